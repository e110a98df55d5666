"""GPU kernels for the operators of lowmembp_jax. This package imports nothing from lowmembp_jax.

`interface` has the six kernels. They are written in Pallas (`flat`, `rows`; its Triton back end)
and in Triton (the folder `triton`).
"""
