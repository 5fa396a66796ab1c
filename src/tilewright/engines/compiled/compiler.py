"""Compiling a Triton or Gluon kernel for a named target, with or without that GPU here."""

from __future__ import annotations

import re
import tempfile
import threading
from typing import Any

from tilewright.artifact.code import KernelCode
from tilewright.artifact.forbidding import require_compiler
from tilewright.engines.compiled.unused_barriers import without_unused_barriers
from tilewright.errors import NotSupportedError
from tilewright.records import record

# Targets that every kernel is compiled for in the tests.
TARGETS: tuple[tuple[int, int], ...] = ((8, 0), (9, 0), (10, 0), (12, 0))
WARP_THREADS = 32
# Held while Triton's settings tell another folder than the process's own.
_setting = threading.Lock()
POINTER_ALIGNMENT_BYTES = 16
# Why the assembler gave up.
_REFUSAL = re.compile(r"^ptxas[-\w]* fatal\s*: (.*)$", re.MULTILINE)


@record(frozen=True)
class KernelSpec:
    """What is compiled: a kernel, the types of its arguments, and what it specializes on.

    ``types`` maps run-time argument names to Triton's types in the kernel's order; ``constants``
    are compile-time arguments; ``aligned`` names arguments that are multiples of 16 (bytes for a
    pointer, elements for a stride). ``max_registers`` limits a thread's registers at entry. A
    function of Gluon is compiled as one.
    """

    function: Any
    types: tuple[tuple[str, str], ...]
    constants: tuple[tuple[str, Any], ...] = ()
    aligned: frozenset[str] = frozenset()
    warps: int = 4
    stages: int = 3
    max_registers: int | None = None

    @property
    def name(self) -> str:
        """The kernel's name."""
        return str(self.function.__name__)


def compile_kernel(spec: KernelSpec, compute_capability: tuple[int, int]) -> KernelCode:
    """Compile ``spec`` for ``compute_capability``.

    Raises:
        LaunchError: if the compiler is forbidden here.
        NotSupportedError: if Triton is absent or does not know the target, or its assembler gives
            up, as when it runs out of registers.
    """
    require_compiler(spec.name, compute_capability)
    try:
        import triton
        from triton.backends.compiler import GPUTarget
    except ImportError as error:
        raise NotSupportedError(f"Triton is not installed: {error}") from error
    major, minor = compute_capability
    names = spec.function.arg_names
    types = dict(spec.types)
    constants = dict(spec.constants)
    source = _source_class(spec.function)(
        fn=spec.function,
        signature={name: types.get(name, "constexpr") for name in names},
        constexprs=constants,
        attrs={
            (names.index(name),): [["tt.divisibility", POINTER_ALIGNMENT_BYTES]]
            for name in sorted(spec.aligned)
        },
    )
    options = {"num_warps": spec.warps, "num_stages": spec.stages}
    if spec.max_registers is not None:
        options["maxnreg"] = spec.max_registers
    target = GPUTarget("cuda", major * 10 + minor, WARP_THREADS)
    try:
        compiled = _compiled(source, target, options)
    except Exception as error:
        refusal = _REFUSAL.search(str(error))
        if refusal is None:
            raise
        # Its assembler's words; there is no list of targets to ask beforehand.
        if "not defined for option 'gpu-name'" in refusal[1]:
            said = f"Triton {triton.__version__} has no target sm_{major}{minor}"
        else:
            said = f"the assembler for sm_{major}{minor} refuses it: {refusal[1]}"
        raise NotSupportedError(f"kernel {spec.name!r}: {said}") from error
    metadata = compiled.metadata
    if metadata.global_scratch_size or metadata.profile_scratch_size:
        raise NotSupportedError(
            f"kernel {spec.name!r} wants scratch memory, which a prepared launch does not carry"
        )
    image = compiled.asm["cubin"]
    ptx = without_unused_barriers(compiled.asm["ptx"])
    if ptx != compiled.asm["ptx"]:
        image = _assembled(ptx, target, options)
    return KernelCode(
        metadata.name,
        image,
        metadata.num_warps * WARP_THREADS,
        metadata.shared,
        compute_capability,
    )


def _compiled(source: Any, target: Any, options: dict[str, Any]) -> Any:
    """What Triton makes of ``source``, whether or not there is a place for a cache of its own."""
    import triton

    try:
        return triton.compile(source, target=target, options=options)
    except OSError:
        # Its files go below the home directory, which may be read-only, full, or not there.
        # Nothing of what it keeps there is wanted here.
        with (
            tempfile.TemporaryDirectory(prefix="tilewright-") as folder,
            _setting,
            triton.knobs.cache.scope(),
        ):
            triton.knobs.cache.dir = folder
            return triton.compile(source, target=target, options=options)


def _assembled(ptx: str, target: Any, options: dict[str, Any]) -> bytes:
    """The machine code of ``ptx``, assembled as Triton does it."""
    from triton.compiler.compiler import make_backend

    backend = make_backend(target)
    image: bytes = backend.make_cubin(ptx, {}, backend.parse_options(dict(options)), target.arch)
    return image


def _source_class(function: Any) -> Any:
    if function.is_gluon():
        from triton.experimental.gluon._runtime import GluonASTSource

        return GluonASTSource
    from triton.compiler import ASTSource

    return ASTSource
