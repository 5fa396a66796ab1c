"""A stranger's kernels, right and with one bug planted in each, for `tilewright verify`."""
