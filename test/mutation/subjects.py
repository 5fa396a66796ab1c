"""Files of numeric code, and the tests that are to notice a change there first."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# The engine on ATen, and helpers that every engine's results go through.
SUBJECTS: dict[str, str] = {
    "src/tilewright/engines/aten/attention*.py": "test/python/sdpa",
    "src/tilewright/engines/aten/dropout.py": "test/python/sdpa",
    "src/tilewright/engines/aten/matmul.py": "test/python/matmul",
    "src/tilewright/engines/aten/convolution.py": "test/python/conv",
    "src/tilewright/engines/aten/normalization*.py": "test/python/norm/aten",
    "src/tilewright/engines/aten/batchnorm.py": "test/python/batchnorm",
    "src/tilewright/engines/aten/pointwise*.py": "test/python/pointwise",
    "src/tilewright/engines/aten/reduction.py": "test/python/reduction",
    "src/tilewright/engines/aten/shape.py": "test/python/shape",
    "src/tilewright/engines/aten/rope.py": "test/python/rope/aten",
    "src/tilewright/engines/aten/block_scale.py": "test/python/block_scale",
    "src/tilewright/engines/aten/moe.py": "test/python/moe",
    "src/tilewright/engines/aten/casts.py": "test/python/pointwise",
    "src/tilewright/graph/shapes.py": "test/python/core/graph",
    "src/tilewright/launch/binder.py": "test/python/core/launch",
    "src/tilewright/launch/workspace*.py": "test/python/core/launch",
}
# Constants that only set how work is cut, or from which size on it is done in place.
CUTS = {
    "SCORE_BLOCK_ELEMENTS",
    "DEVICE_SCORE_BLOCK_ELEMENTS",
    "_BANDED_ROWS",
    "_IN_PLACE_FROM",
    "MASK_ELEMENTS",
    "WASTE_A_SEQUENCE",
    "_DUMP_ELEMENTS",
    "_MEMO",
}
# Where tests of these files are.
TESTS = sorted({*SUBJECTS.values(), "test/python/core/planning"})


def subject_files() -> dict[str, str]:
    """File -> folder of the tests that are its own, both relative to the root."""
    found = {}
    for pattern, tests in SUBJECTS.items():
        for path in sorted(ROOT.glob(pattern)):
            found[str(path.relative_to(ROOT))] = tests
    return found


if __name__ == "__main__":
    print(*TESTS)
