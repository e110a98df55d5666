"""Names of the residuals, and `jax.checkpoint` policies that keep them."""

from collections.abc import Callable
from typing import Any

import jax
from jax.ad_checkpoint import Recompute, Saveable

CODES = "lowmembp_codes"
NORM_OUTPUT = "lowmembp_norm_output"
#: The same with a scale or a bias, of which the backward takes it free again.
NORM_AFFINE_OUTPUT = "lowmembp_norm_affine_output"
NORM_RSTD = "lowmembp_norm_rstd"

#: The `checkpoint_name` of every residual that the operators of this library keep.
RESIDUAL_NAMES: tuple[str, ...] = (CODES, NORM_OUTPUT, NORM_AFFINE_OUTPUT, NORM_RSTD)


# Primitives whose results take a matrix product, a convolution, a kernel or a collective to compute
# again. Not `all_gather`: what it gives is as many times larger as there are devices.
_PRODUCTS = frozenset(
    (
        "all_to_all",
        "conv_general_dilated",
        "custom_partitioning",
        "dot_general",
        "dot_product_attention_fp8_fwd_wrapper",
        "dot_product_attention_fwd_wrapper",
        "ffi_call",
        "pallas_call",
        "pmax",
        "pmin",
        "ppermute",
        "psum",
        "psum_invariant",
        "ragged_all_to_all",
        "ragged_dot_general",
        "reduce_scatter",
        "scaled_matmul_wrapper",
        "triton_kernel_call",
    )
)


def products_saveable(prim: Any, *_: Any, **__: Any) -> bool:
    """A `jax.checkpoint` policy: products and attention are kept, what is elementwise is not.

    Kept are the results of matrix products, ragged ones included, of convolutions and of kernels:
    attention's with their statistics. Norms, activations and softmax are computed again.
    `jax.checkpoint_policies.dots_saveable` runs attention kernels and ragged products again.

    Inside `jax.shard_map` what `lax.psum`, `lax.psum_scatter`, `lax.ppermute` and `lax.all_to_all`
    give is kept too, in place of the product that they read, or the backward would send it again.
    `lax.all_gather` is run again, for it makes arrays larger by the number of devices.
    """
    return prim.name in _PRODUCTS


def everything_saveable(prim: Any, *_: Any, **__: Any) -> bool:
    """A policy for `lm.compress` that saves what JAX saves without `jax.checkpoint`.

    Nothing is recomputed but casts, reshapes and what is as cheap.
    """
    return True


def checkpoint_policy(*policies: Callable[..., Any]) -> Callable[..., Any]:
    """A `jax.checkpoint` policy that keeps this library's residuals and what `policies` keep.

    Inside `jax.checkpoint(block, policy=lm.checkpoint_policy())` the backward finds the 2-bit
    codes, the norms' outputs and `rstd` in memory and recomputes everything else. A value is kept
    where one policy or more keeps it: `lm.checkpoint_policy(jax.checkpoint_policies.dots_saveable)`
    also keeps matrix products. What a policy offloads is offloaded, this library's residuals
    included:

        lm.checkpoint_policy(jax.checkpoint_policies.save_and_offload_only_these_names(
            names_which_can_be_saved=[], names_which_can_be_offloaded=lm.RESIDUAL_NAMES,
            offload_src="device", offload_dst="pinned_host"))

    Args:
      *policies: policies of `jax.checkpoint_policies`, or any callable of the same kind,
        offloading ones included.

    Raises:
      TypeError: one of `policies` is not callable.
      ValueError: two of `policies` disagree: one saves a value that another offloads, or they
        offload it to different memories. Raised when a `jax.checkpoint` is differentiated.
    """
    for policy in policies:
        if not callable(policy):
            raise TypeError(
                f"checkpoint_policy: policies must be callables such as those of "
                f"jax.checkpoint_policies, got {policy!r}"
            )
    keep_ours = jax.checkpoint_policies.save_only_these_names(*RESIDUAL_NAMES)

    def combined(prim, *args, **params):
        answers = [policy(prim, *args, **params) for policy in policies]
        kept = [Saveable if a is True else a for a in answers if a not in (False, Recompute)]
        if other := [answer for answer in kept if answer != kept[0]]:
            raise ValueError(
                f"checkpoint_policy: policies disagree on a result of {prim} "
                f"{params.get('name', '')!r}: one answers {_name(kept[0])}, another "
                f"{_name(other[0])}; accepted is one answer besides Recompute"
            )
        return kept[0] if kept else keep_ours(prim, *args, **params)

    return combined


def _name(answer: Any) -> str:
    return "Saveable" if answer is Saveable else repr(answer)
