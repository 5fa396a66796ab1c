"""Memory pressure: a skip around the one large allocation of a test, and around nothing else.

What launches, compares or asserts cannot be inside of it: the helper takes a size, makes the
storage itself, and gives it back. Running out of memory anywhere else fails the test.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    import torch

_GIB = 2**30
# How torch says on a CPU that it has no memory; on a GPU there is a type for it.
_CPU_TEXTS = ("can't allocate memory", "not enough memory", "Cannot allocate memory")


def allocate_or_skip(size_bytes: int, device: str | torch.device = "cuda") -> torch.Tensor:
    """Storage of ``size_bytes`` on ``device``, uint8 (size_bytes,), of any contents.

    Skips the test if it is not to be had. View it as another type with ``view`` and lay it out with
    ``as_strided``.
    """
    import torch

    try:
        return torch.empty(size_bytes, dtype=torch.uint8, device=device)
    except torch.OutOfMemoryError:
        pass
    except RuntimeError as error:
        if not any(text in str(error) for text in _CPU_TEXTS):
            raise
    # Outside of the handler, so that the skip has no error as its context.
    pytest.skip(f"{size_bytes / _GIB:.3g} GiB are not free on {device}")
