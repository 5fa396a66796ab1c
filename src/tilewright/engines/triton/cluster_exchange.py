"""Float32 numbers that the programs of a cluster send one another, for programs of one warp.

Each program reserves the same bytes of shared memory, whose last eight are a barrier of the device
that counts bytes: it tells how many it will be sent (``expect_bytes``), sends what others wait for
(``send_pairs``, ``send_both``), and waits for its own (``await_bytes``). What a program is sent is
there once the barrier says so; a program that has sent need not wait for the others to read.

Source: PTX ISA, st.async and mbarrier (SM90 and newer). The launch makes the clusters
(``PlannedKernel.cluster``).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

# Bytes behind what is sent: the barrier.
FLAG_BYTES = gl.constexpr(16)


@gluon.constexpr_function
def _reservation(size):
    return "{ .shared .align 16 .b8 exchanged[" + str(size) + "]; mov.u32 $0, exchanged; }"


@gluon.jit
def reserved(SIZE: gl.constexpr):
    """The shared address of SIZE bytes, the same in every program; once a kernel."""
    asm: gl.constexpr = _reservation(SIZE)
    return gl.inline_asm_elementwise(
        asm, "=r,r", [gl.to_tensor(0)], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def expect_bytes(flag, count):
    """Make the barrier at ``flag`` wait for ``count`` bytes, and tell the cluster that it is there.

    ``all_have_begun`` stands before the first thing that is sent.
    """
    gl.inline_asm_elementwise(
        "{ .reg .pred p; .reg .u32 t; mov.u32 t, %tid.x; setp.eq.u32 p, t, 0;"
        " @p mbarrier.init.shared::cta.b64 [$1], 1;"
        " @p mbarrier.arrive.expect_tx.shared::cta.b64 _, [$1], $2;"
        " fence.mbarrier_init.release.cluster;"
        " barrier.cluster.arrive.relaxed.aligned; mov.b32 $0, 0; }", "=r,r,r,~{memory}",
        [flag, count], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def all_have_begun():
    """Wait until every program of the cluster has called ``expect_bytes``."""
    gl.inline_asm_elementwise(
        "barrier.cluster.wait.acquire.aligned; mov.b32 $0, 0;", "=r,r,~{memory}",
        [gl.to_tensor(0)], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def in_program(at, program):
    """The shared address ``at`` in another program of the cluster."""
    return gl.inline_asm_elementwise(
        "mapa.shared::cluster.u32 $0, $1, $2;", "=r,r,r", [at, program],
        dtype=gl.int32, is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def send_pairs(at, values, flag, fits):
    """Store ``values`` at addresses ``at`` of other programs, two that follow one another at once.

    ``flag`` is the barrier there; a pair is sent where ``fits``, int32, is not 0.
    """
    gl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.b32 p, $8, 0;"
        " @p st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.f32"
        " [$2], {$4, $5}, [$6];"
        " mov.b32 $0, 0; mov.b32 $1, 0; }",
        "=r,=r,r,r,f,f,r,r,r,r,~{memory}", [at, values, flag, fits],
        dtype=gl.int32, is_pure=False, pack=2,
    )  # fmt: skip


@gluon.jit
def send_both(at, first, second, flag, fits):
    """As ``send_pairs``, with an element of ``first`` and one of ``second`` side by side."""
    gl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.b32 p, $5, 0;"
        " @p st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.f32"
        " [$1], {$2, $3}, [$4];"
        " mov.b32 $0, 0; }",
        "=r,r,f,f,r,r,~{memory}", [at, first, second, flag, fits],
        dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def await_bytes(flag):
    """Wait until all that this program expects is there."""
    gl.inline_asm_elementwise(
        "{ .reg .pred p;"
        " again: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [$1], 0;"
        " @!p bra again; mov.b32 $0, 0; }", "=r,r,~{memory}",
        [flag], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def received(at):
    """The numbers at shared addresses of this program."""
    return gl.inline_asm_elementwise(
        "ld.shared.f32 $0, [$1];", "=f,r,~{memory}", [at], dtype=gl.float32, is_pure=False, pack=1
    )


@gluon.jit
def received_both(at):
    """As ``received``, what ``send_both`` has stored."""
    return gl.inline_asm_elementwise(
        "ld.shared.v2.f32 {$0, $1}, [$2];", "=f,=f,r,~{memory}", [at],
        dtype=(gl.float32, gl.float32), is_pure=False, pack=1,
    )  # fmt: skip
