"""Running out of memory in a reference is the reference's failure, and says so."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["ReferenceMemoryError", "reference_memory"]


class ReferenceMemoryError(MemoryError):
    """A reference, not the code under test, ran out of memory."""


@contextmanager
def reference_memory(name: str, advice: str) -> Iterator[None]:
    """Turn an allocation failure inside the block into a `ReferenceMemoryError`.

    Args:
        name: Of the reference.
        advice: What makes it take less.
    """
    try:
        yield
    except (MemoryError, torch.OutOfMemoryError) as error:
        raise ReferenceMemoryError(f"the reference {name} ran out of memory; {advice}") from error
    except RuntimeError as error:
        # The CPU allocator of torch raises a plain RuntimeError.
        if "DefaultCPUAllocator" not in str(error):
            raise
        raise ReferenceMemoryError(f"the reference {name} ran out of memory; {advice}") from error
