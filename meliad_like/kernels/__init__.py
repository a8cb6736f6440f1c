"""Kernels: computations in the way that is fastest on a platform, above the mathematics that they repeat."""
