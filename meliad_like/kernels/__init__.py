"""Kernels: what a platform computes in another way, above the mathematics that they repeat."""
