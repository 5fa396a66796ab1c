"""Gluon kernels for Hopper (SM90): tensor maps, asynchronous warpgroup products, warp roles."""
