"""Models, data, a trainer and benchmarks that use lowmembp_jax."""
