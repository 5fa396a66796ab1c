"""Keys of what the plugin keeps on pytest's config."""

from __future__ import annotations

import pytest

from tilewright.testing.options import Settings

SETTINGS = pytest.StashKey[Settings]()
SEED = pytest.StashKey[int]()
# Why no worker was injected; absent where one was, and in workers.
WHY_DIRECT = pytest.StashKey[str]()
