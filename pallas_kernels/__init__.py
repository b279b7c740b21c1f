"""Kernels for Hopper GPUs. None yet: `jspec.attention` and `jspec.verify` run as plain JAX."""
