"""Names of the residuals, and `jax.checkpoint` policies that keep them."""

from collections.abc import Callable
from typing import Any

import jax

CODES = "lowmembp_codes"
NORM_OUTPUT = "lowmembp_norm_output"
NORM_RSTD = "lowmembp_norm_rstd"

#: The `checkpoint_name` of every residual that the operators of this library keep.
RESIDUAL_NAMES: tuple[str, ...] = (CODES, NORM_OUTPUT, NORM_RSTD)


def checkpoint_policy(*policies: Callable[..., Any]) -> Callable[..., Any]:
    """A `jax.checkpoint` policy that keeps this library's residuals and what `policies` keep.

    Inside `jax.checkpoint(block, policy=lm.checkpoint_policy())` the backward finds the 2-bit
    codes, the norms' outputs and `rstd` in memory and recomputes everything else. Each policy
    given is asked in turn for what those names do not cover, so
    `lm.checkpoint_policy(jax.checkpoint_policies.dots_saveable)` also keeps matrix products.

    Args:
      *policies: policies of `jax.checkpoint_policies`, or any callable of the same kind,
        offloading ones included.

    Raises:
      TypeError: one of `policies` is not callable.
    """
    for policy in policies:
        if not callable(policy):
            raise TypeError(
                f"checkpoint_policy: policies must be callables such as those of "
                f"jax.checkpoint_policies, got {policy!r}"
            )
    keep = (jax.checkpoint_policies.save_only_these_names(*RESIDUAL_NAMES), *policies)

    def policy(prim, *args, **params):
        for ask in keep:
            if answer := ask(prim, *args, **params):
                return answer
        return False

    return policy
