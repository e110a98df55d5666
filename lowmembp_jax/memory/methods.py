"""The methods to save memory that the planner compares, and the code that switches each on."""

_NEAR = "  # gradients are approximate: see lm.gradient_fidelity"
_PATCH = f"with lm.patch():{_NEAR}\n    loss, grads = jax.value_and_grad(loss_fn)(params)"
_DOTS = "jax.checkpoint_policies.dots_saveable"
_OFFLOAD = 'jax.checkpoint_policies.offload_dot_with_no_batch_dims("device", "pinned_host")'
_EVERYTHING = "lm.everything_saveable"
_NOTHING = "jax.checkpoint_policies.nothing_saveable"

#: The lines of code that switch each method on, for a Flax model of layers `Block`.
HOW: dict[str, str] = {
    "default": "# nothing to change",
    "norm+activation": "h = nn.remat(nn.LayerNorm)()(x)\nh = jax.checkpoint(nn.gelu)(h)",
    "dots": f"Block = nn.remat(Block, policy={_DOTS})",
    "products": "Block = nn.remat(Block, policy=lm.products_saveable)",
    "full-remat": "Block = nn.remat(Block)",
    "compress": f"Block = lm.compress_module(Block){_NEAR}",
    "compress+remat": f"Block = lm.compress_module(Block, policy={_NOTHING}){_NEAR}",
    "lowmembp": _PATCH,
    "lowmembp+remat": f"Block = nn.remat(Block, policy=lm.checkpoint_policy())\n{_PATCH}",
    "lowmembp+compress": f"Block = lm.compress_module(Block, policy={_EVERYTHING})\n{_PATCH}",
    "offload": f"Block = nn.remat(Block, policy={_OFFLOAD})",
}

#: The names of the methods. The first is plain Flax.
METHODS: tuple[str, ...] = tuple(HOW)
