"""GPU kernels for the operators of lowmembp_jax. This package imports nothing from lowmembp_jax.

`activation`, `gated` and `normalization` are written in Pallas (Triton back end); they run on the
CPU with `interpret=True`. `triton` has the same functions written in Triton.
"""
