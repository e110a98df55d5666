"""Names of the residuals, and `jax.checkpoint` policies that save them."""

from collections.abc import Callable
from typing import Any

import jax
from jax.ad_checkpoint import Recompute, Saveable

CODES = "lowmembp_codes"
NORM_OUTPUT = "lowmembp_norm_output"
#: The output of a norm with a scale or a bias, which the backward removes again.
NORM_AFFINE_OUTPUT = "lowmembp_norm_affine_output"
NORM_RSTD = "lowmembp_norm_rstd"

#: The `checkpoint_name` of every residual that this library's operators save.
RESIDUAL_NAMES: tuple[str, ...] = (CODES, NORM_OUTPUT, NORM_AFFINE_OUTPUT, NORM_RSTD)


def products_saveable(prim: Any, /, *_: Any, **__: Any) -> bool:
    """A `jax.checkpoint` policy that saves products and attention and recomputes the rest.

    It saves the results of matrix products (also ragged ones), convolutions and kernels, and the
    statistics of attention kernels. The backward pass recomputes norms, activations and softmax.
    `jax.checkpoint_policies.dots_saveable` recomputes attention kernels and ragged products, too.

    Inside `jax.shard_map` it also saves the results of `lax.psum`, `lax.psum_scatter`,
    `lax.ppermute` and `lax.all_to_all`, so that the backward pass does not communicate again. This
    result replaces the product that the collective reads. `lax.all_gather` runs again, because
    its result is larger than its operand by the number of devices.
    """
    from lowmembp_jax.compression.rules import RULES  # which imports this module

    return prim.name in RULES and RULES[prim.name].product


def everything_saveable(prim: Any, /, *_: Any, **__: Any) -> bool:
    """A policy for `lm.compress` that saves what JAX saves without `jax.checkpoint`.

    The backward pass recomputes only cheap operations such as casts and reshapes.
    """
    return True


def checkpoint_policy(*policies: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a `jax.checkpoint` policy that saves this library's residuals.

    `jax.checkpoint(block, policy=lm.checkpoint_policy())` saves the 2-bit codes, the norms' outputs
    and `rstd`, and recomputes everything else. The policy also saves every value that one of
    `policies` saves: `lm.checkpoint_policy(jax.checkpoint_policies.dots_saveable)` also saves
    matrix products. If one of `policies` offloads a value, it is offloaded. This holds for this
    library's residuals, too:

        lm.checkpoint_policy(jax.checkpoint_policies.save_and_offload_only_these_names(
            names_which_can_be_saved=[], names_which_can_be_offloaded=lm.RESIDUAL_NAMES,
            offload_src="device", offload_dst="pinned_host"))

    Args:
      *policies: policies of `jax.checkpoint_policies`, or any callables of the same kind. They may
        offload.

    Raises:
      TypeError: one of `policies` is not callable.
      ValueError: two of `policies` disagree: one saves a value that another offloads, or they
        offload it to different memories. Raised when a `jax.checkpoint` is differentiated.
    """
    for policy in policies:
        if not callable(policy):
            raise TypeError(
                f"checkpoint_policy: policies: expected callables such as "
                f"jax.checkpoint_policies.dots_saveable, got {policy!r}"
            )
    keep_ours = jax.checkpoint_policies.save_only_these_names(*RESIDUAL_NAMES)

    def combined(prim, /, *args, **params):
        answers = [policy(prim, *args, **params) for policy in policies]
        kept = [Saveable if a is True else a for a in answers if a not in (False, Recompute)]
        if other := [answer for answer in kept if answer != kept[0]]:
            raise ValueError(
                f"checkpoint_policy: policies disagree on a result of {prim} "
                f"{params.get('name', '')!r}: expected one answer besides Recompute, got "
                f"{_name(kept[0])} and {_name(other[0])}"
            )
        # JAX's policy does not accept every name of a parameter.
        is_name = prim.name == "name" or "_prim" in params  # the latter under `jax_remat3`
        return kept[0] if kept else is_name and keep_ours(prim, *args, **params)

    return combined


def _name(answer: Any) -> str:
    return "Saveable" if answer is Saveable else repr(answer)
