"""What the engines that compile their own kernels share: compiling, storing, launching."""
