"""The Triton engine: SM80 and newer. Kernels are compiled once a plan and launched prepared."""
