"""Graphs of compiled kernels that the launch contract is tried on."""
