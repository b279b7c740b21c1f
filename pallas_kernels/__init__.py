"""Kernels for Hopper GPUs in Pallas Mosaic GPU, each behind the same function as its plain JAX."""
