"""The integration without the package that it is for, and with one that is too old."""

from __future__ import annotations

from collections.abc import Callable

import pytest

pytestmark = pytest.mark.L0

MISSING = """
import sys

class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "transformers":
            raise ModuleNotFoundError(f"No module named {name!r}", name="transformers")

sys.meta_path.insert(0, Block())
from tilewright.integrations import transformers as integration
import torch
print(integration.replace_norms(torch.nn.Sequential(torch.nn.LayerNorm(4))))
try:
    integration.register()
except ModuleNotFoundError as error:
    print(error)
"""

OLD = """
import sys, types
old = types.ModuleType("transformers")
old.__version__ = "4.40.0"
sys.modules["transformers"] = old
from tilewright.integrations import transformers as integration
try:
    integration.register()
except ImportError as error:
    print(error)
"""


def test_only_register_needs_the_package(run_python: Callable[..., str]) -> None:
    count, error = run_python(MISSING).splitlines()
    assert count == "1"
    assert "needs the package 'transformers'" in error
    assert "pip install 'tilewright[transformers]'" in error


def test_a_version_without_the_interfaces_is_named(run_python: Callable[..., str]) -> None:
    error = run_python(OLD)
    assert "AttentionMaskInterface; got 4.40.0" in error
