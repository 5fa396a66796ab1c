"""Compiled kernels that outlive the process: keys, the store, the environment."""
