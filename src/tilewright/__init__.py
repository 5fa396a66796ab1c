"""Tilewright runs graphs of tensor operations."""

from tilewright._version import __version__ as __version__
