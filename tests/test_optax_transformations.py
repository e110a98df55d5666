"""Every public transformation of optax and optax.contrib: inside ours, and around ours."""

import inspect
import warnings

import jax
import jax.numpy as jnp
import optax
import pytest
from helpers import normal
from optax import contrib

import lowmembp_jax as lm

pytestmark = [
    pytest.mark.usefixtures("jax_defaults"),
    pytest.mark.filterwarnings(
        "ignore::DeprecationWarning:optax",
        "ignore:.* is deprecated:DeprecationWarning",
        "ignore:Specifying a key:UserWarning",
        "ignore:compress_state. optimizer. the state is not compressed:UserWarning",
    ),
]

ADAM, STEPS = optax.adam(1e-2), 3
PARAMS = {"w": normal(16, 256)}
#: Values for the parameters of all public functions, by the parameter's name.
ARGUMENTS = {
    "adv_optimizer": optax.sgd(1e-2), "clipping": 1.0, "decay": 0.9, "eta": 0.01,
    "every_k_schedule": 2, "f": lambda updates, params=None: updates, "freeze_mask": False,
    "gamma": 0.5, "key": jax.random.key(0), "l2_norm_clip": 1.0, "learning_rate": 1e-2,
    "mask": True, "max_backtracking_steps": 3, "max_consecutive_errors": 2, "max_delta": 1.0,
    "max_linesearch_steps": 3, "max_norm": 1.0, "measure": lambda updates, *_, **__: 0.0,
    "measure_name": "norm", "measures": {}, "noise_multiplier": 0.1, "param_labels": "all",
    "seed": 0, "should_transform_fn": lambda step, **_: step % 2 == 0, "slow_step_size": 0.5,
    "step_size": -0.1, "step_size_fn": lambda _: -0.1, "sync_period": 2, "threshold": 1.0,
}  # fmt: skip
#: Parameters that take another transformation.
INNER = {"inner", "optimizer", "base_optimizer", "fast_optimizer", "opt", "tx", "transforms"}


def injected(inject):
    return lambda inner: inject(lambda rate: optax.chain(inner, optax.scale(rate)))(rate=0.5)


#: Functions that need more than arguments by name, and variants of others.
WRAPPERS = {
    "chain": lambda inner: optax.chain(optax.clip(1.0), inner),
    "named_chain": lambda inner: optax.named_chain(("clip", optax.clip(1.0)), ("inner", inner)),
    "inject_hyperparams": injected(optax.inject_hyperparams),
    "inject_stateful_hyperparams": injected(optax.inject_stateful_hyperparams),
    "sam, opaque": lambda inner: contrib.sam(inner, optax.sgd(1e-2), opaque_mode=True),
}
OPTIMIZERS = {
    "measure_with_ema": lambda: optax.measure_with_ema(lambda updates, *_, **__: updates, 0.9),
    "scale_by_muon": lambda: contrib.scale_by_muon(
        weight_dimension_numbers={"w": contrib.MuonDimensionNumbers()}
    ),
    "rmsprop, centered": lambda: optax.rmsprop(1e-2, centered=True, momentum=0.9, nesterov=True),
    "sgd, momentum": lambda: optax.sgd(1e-2, momentum=0.9),
}


def add(name, function):
    """Adds a public function that makes a transformation to `WRAPPERS` or to `OPTIMIZERS`."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return
    named = [p for p in signature.parameters.values() if not p.kind.name.startswith("VAR")]
    needed = {p.name for p in named if p.default is p.empty}
    inside = {p.name for p in named} & INNER

    def make(*inner):
        given = {key: ARGUMENTS[key] for key in needed - inside}
        each = {key: {"all": o} if key == "transforms" else o for key in inside for o in inner}
        return function(**given, **each)

    is_one = "GradientTransformation" in str(signature.return_annotation)
    try:
        made = make(ADAM) if inside else make()
    except Exception as error:  # others are losses, schedules and states
        assert not is_one, f"give the arguments of the new {name}: {error}"
        return
    if hasattr(made, "init") and hasattr(made, "update"):
        (WRAPPERS if inside else OPTIMIZERS)[name] = make


with warnings.catch_warnings(action="ignore"):
    for module in (optax, contrib):
        for name in set(dir(module)) - {*WRAPPERS, *OPTIMIZERS}:
            if not name.startswith("_"):
                add(name, getattr(module, name))
OPTIMIZERS |= {name: lambda make=make: make(ADAM) for name, make in WRAPPERS.items()}

LOSS = lambda params, *_: jnp.mean(jnp.square(params["w"]))  # noqa: E731
#: Arguments that an update takes besides gradients, state and parameters.
SEARCHES = "lbfgs", "scale_by_backtracking_linesearch", "scale_by_zoom_linesearch"
BY_VALUE = "momo", "momo_adam", "polyak_sgd", "reduce_on_plateau", "scale_by_polyak"
MORE = {
    **{name: {"value": LOSS(PARAMS), "grad": PARAMS, "value_fn": LOSS} for name in SEARCHES},
    **{name: {"value": LOSS(PARAMS)} for name in BY_VALUE},
    **{name: {"obj_fn": LOSS} for name in ("hutchinson_estimator_diag_hessian", "sophia")},
    "sam, opaque": {"grad_fn": lambda params, *_: jax.grad(LOSS)(params)},
}


def trained(name, optimizer, dtype=jnp.float32):
    """The parameters after some steps."""
    params = {"w": PARAMS["w"].astype(dtype)}
    if name == "lookahead":
        params = optax.LookaheadParams.init_synced(params)
    update, state = optax.with_extra_args_support(optimizer).update, optimizer.init(params)
    for number in range(STEPS):
        gradients = {"w": (normal(16, 256, key=number) + 0.5).astype(dtype)}
        updates, state = update(gradients, state, params, **MORE.get(name, {}))
        params = optax.apply_updates(params, updates)
    return params


def check(name, ours, plain):
    """Ours moves the parameters as the plain optimizer does, up to the rounding of the state."""
    got, want = trained(name, ours), trained(name, plain)
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert jnp.isfinite(a).all() or not jnp.isfinite(b).all()
        # Some first steps divide by a second moment that is nearly 0.
        assert jnp.median(jnp.abs(a - b)) <= 0.2 * jnp.median(jnp.abs(b - PARAMS["w"])) + 1e-6


def check_16_bits(name, ours):
    """The parameters stay bfloat16, and the dtypes of ours agree with those of the others."""
    params = jax.eval_shape(lambda: trained(name, ours, jnp.bfloat16))
    assert {x.dtype.name for x in jax.tree.leaves(params)} == {"bfloat16"}


def named(names, *by_default):
    marks = {name: () for name in by_default}
    return pytest.mark.parametrize(
        "name",
        [pytest.param(name, marks=marks.get(name, pytest.mark.slow)) for name in sorted(names)],
    )


@named(OPTIMIZERS, "adamw", "adafactor", "lookahead", "rmsprop, centered", "sophia")
def test_inside_of_ours(name):
    plain = OPTIMIZERS[name]()
    check(name, lm.compress_state(plain), plain)
    if name != "lookahead":  # its gradients have another structure than its parameters
        check_16_bits(name, lm.master_weights(lm.compress_state(plain)))


@named(WRAPPERS, "MultiSteps", "partition", "inject_hyperparams")
def test_around_ours(name):
    make = WRAPPERS[name]
    check(name, make(lm.compress_state(ADAM)), make(ADAM))
    if not name.endswith("galore"):  # it gives the inner optimizer no parameters
        for bits in (24, 16):
            check_16_bits(name, make(lm.master_weights(lm.compress_state(ADAM), bits=bits)))
