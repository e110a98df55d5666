"""One file a command of `lowmembp`. They import JAX when they run, not before."""
