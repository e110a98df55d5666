"""The methods to save memory: the name, the code that a user writes, and how models apply each.

The planner compares them and prints the code. `models.layers` applies them to a model's layers.
"""

from typing import Any, Literal, NamedTuple

_NEAR = "  # gradients are approximate: see lm.gradient_fidelity"
_PATCH = f"with lm.patch():{_NEAR}\n    loss, grads = jax.value_and_grad(loss_fn)(params)"


class Method(NamedTuple):
    """The parts of a method.

    Attributes:
      operators: the norms and activations: Flax's own, Flax's in `jax.checkpoint`, or this
        library's.
      layer: the wrapper around each layer.
      policy: the wrapper's policy as Python code; None for its default.
      offload: whether `lm.compress_module` moves what it stores to the host's memory.
    """

    operators: Literal["flax", "checkpointed", "lowmembp"] = "flax"
    layer: Literal["plain", "remat", "compress"] = "plain"
    policy: str | None = None
    offload: bool = False

    @property
    def is_exact(self) -> bool:
        """Whether the gradients are exact."""
        return self.operators != "lowmembp" and self.layer != "compress"

    @property
    def code(self) -> str:
        """The lines that switch the method on, for a Flax model of layers `Block`."""
        lines = []
        policy = "" if self.policy is None else f", policy={self.policy}"
        if self.operators == "checkpointed":
            lines.append("h = nn.remat(nn.LayerNorm)()(x)\nh = jax.checkpoint(nn.gelu)(h)")
        if self.layer == "remat":
            lines.append(f"Block = nn.remat(Block{policy})")
        if self.layer == "compress":
            near = "" if self.operators == "lowmembp" else _NEAR
            moved = ', offload="pinned_host"' if self.offload else ""
            lines.append(f"Block = lm.compress_module(Block{policy}{moved}){near}")
        if self.operators == "lowmembp":
            lines.append(_PATCH)
        return "\n".join(lines) or "# nothing to change"

    def options(self) -> dict[str, Any]:
        """The keyword arguments of `nn.remat` or `lm.compress_module`."""
        import jax

        import lowmembp_jax as lm

        found = {"offload": "pinned_host"} if self.offload else {}
        if self.policy is not None:
            found["policy"] = eval(self.policy, {"jax": jax, "lm": lm})
        return found


_OFFLOAD = 'jax.checkpoint_policies.offload_dot_with_no_batch_dims("device", "pinned_host")'
#: The methods by name. Every method computes plain Flax's values. Gradients are approximate with
#: "compress", which stores residuals in 8 bits, and with "lowmembp".
TABLE: dict[str, Method] = {
    "default": Method(),
    "norm+activation": Method("checkpointed"),
    "dots": Method("flax", "remat", "jax.checkpoint_policies.dots_saveable"),
    "products": Method("flax", "remat", "lm.products_saveable"),
    "full-remat": Method("flax", "remat"),
    "compress": Method("flax", "compress"),
    "compress+remat": Method("flax", "compress", "None"),
    "lowmembp": Method("lowmembp"),
    "lowmembp+remat": Method("lowmembp", "remat", "lm.checkpoint_policy()"),
    "lowmembp+compress": Method("lowmembp", "compress", "lm.everything_saveable"),
    "offload": Method("flax", "remat", _OFFLOAD),
    "compress+remat+offload": Method("flax", "compress", "None", offload=True),
}

#: All methods, and those that are compared unless others are named.
METHODS: tuple[str, ...] = tuple(TABLE)
USUAL = ("default", "dots", "full-remat", "compress", "compress+remat", "lowmembp+compress")
#: The code that switches each method on.
HOW: dict[str, str] = {name: method.code for name, method in TABLE.items()}
