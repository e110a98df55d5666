"""Every differentiable function in lm.compress: its value, and its gradient near the exact one.

Each random program, 50 a run, applies some of them to one array, inside a random transformation.
Its seed is printed with a failure; `PROGRAM_SEED=5 pytest -m slow tests/test_primitives.py` runs
the programs of one seed again.
"""

import functools
import os
import secrets

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compression_models import NOTHING, error
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import primitives
from jax.interpreters import ad

import lowmembp_jax as lm
from lowmembp_jax.compression.jaxprs import every_equation

pytestmark = pytest.mark.usefixtures("jax_defaults")
ROWS, WIDTH = 24, 16
#: Drawn so that no sum of a function nearly cancels.
W = jax.random.normal(jax.random.key(0), (WIDTH, WIDTH)) / 4
X = jax.random.normal(jax.random.key(1), (ROWS, WIDTH))
SQUARE = jnp.eye(WIDTH)


def unit(h):
    return 0.98 * jax.nn.sigmoid(h) + 0.01


FUNCTIONS = {}


def add(prefix, module, names, prepare=lambda h: h):
    for name in names.split():
        function = getattr(module, name)
        FUNCTIONS[f"{prefix}.{name}"] = lambda h, f=function: f(prepare(h))


add("lax", lax, "abs asinh atan cbrt cos cosh erf erfc exp exp2 expm1 logistic neg")
add("lax", lax, "sin sinh square tan tanh bessel_i0e bessel_i1e cumsum cumprod cummax cummin")
add("lax", lax, "cumlogsumexp sort")
add("lax", lax, "acosh", lambda h: jnp.abs(h) + 1.01)
add("lax", lax, "log log1p sqrt rsqrt lgamma digamma", lambda h: jnp.abs(h) + 1e-3)
add("lax", lax, "acos asin atanh erf_inv", lambda h: 2 * unit(h) - 1)
add(
    "nn",
    jax.nn,
    "relu relu6 sigmoid softplus sparse_plus soft_sign silu log_sigmoid leaky_relu hard_sigmoid "
    "hard_silu hard_tanh elu celu selu gelu squareplus mish softmax log_softmax standardize glu "
    "logsumexp",
)
add("special", jax.scipy.special, "log_ndtr ndtr i0 i1")
add("special", jax.scipy.special, "entr logit ndtri spence", unit)
add("jnp", jnp, "sinc arcsinh deg2rad nan_to_num std var mean ptp max min sum")
add(
    "linalg",
    jnp.linalg,
    "cholesky inv det slogdet pinv eigh svd qr norm",
    lambda h: jnp.cov(h.T, bias=True) + SQUARE,
)
FUNCTIONS |= {
    "gelu_erf": functools.partial(jax.nn.gelu, approximate=False),
    "rem": lambda h: lax.rem(h, jnp.full_like(h, 0.7)),
    "pow": lambda h: lax.pow(jnp.abs(h) + 0.01, jnp.full_like(h, 2.5)),
    "pow_of_both": lambda h: lax.pow(jnp.abs(h) + 0.1, h),
    "integer_pow": lambda h: h**7 - h**-2,
    "atan2": lambda h: lax.atan2(h, h[:, ::-1]),
    "div": lambda h: h[:, ::-1] / h,
    "max_and_min": lambda h: lax.max(h, h[:, ::-1]) * lax.min(h, h[::-1]),
    "clamp": lambda h: lax.clamp(-0.5, h, 0.5) * h,
    "sign_and_steps": lambda h: h * (jnp.sign(h) + jnp.floor(3 * h) + jnp.round(2 * h)),
    "igamma": lambda h: jax.scipy.special.gammainc(2.0, jnp.abs(h) + 0.1),
    "polygamma": lambda h: jax.scipy.special.polygamma(1, jnp.abs(h) + 0.1),
    "xlogy": lambda h: jax.scipy.special.xlogy(unit(h), unit(h)),
    "xlog1py": lambda h: jax.scipy.special.xlog1py(unit(h), -unit(h)),
    "rel_entr": lambda h: jax.scipy.special.rel_entr(unit(h), unit(-h)),
    "betainc": lambda h: jax.scipy.special.betainc(2.0, 3.0, unit(h)),
    "log1mexp": lambda h: jnp.log1p(-jnp.exp(-jnp.abs(h) - 1e-3)),
    "spectrum": lambda h: jnp.log1p(
        jnp.abs(jnp.fft.fft(1e3 * h * jnp.exp(-jnp.arange(16.0)))) ** 2
    ),
    "fft": lambda h: jnp.abs(jnp.fft.fft(h)),
    "steep_sin": lambda h: jnp.sin(30 * h),
    "cancel_sin": lambda h: jnp.sin(3 * h) / h,
    "cancel_log": lambda h: jnp.log(1 + h * h) / (h * h),
    "cancel_cos": lambda h: (1 - jnp.cos(2 * h)) / h**2,
    "cancel_exp": lambda h: jnp.expm1(h) / h,
    "cancel_tanh": lambda h: 1 / jnp.tanh(h) - 1 / h,
    "cancel_rsqrt": lambda h: jax.nn.gelu(h) * lax.rsqrt(h * h),
    "cancel_atan2": lambda h: jnp.arctan2(jnp.sin(h), h),
    "cancel_sort": lambda h: jnp.sort(jnp.expm1(h), 1) / jnp.sort(h, 1),
    "cancel_cumsum": lambda h: jnp.cumsum(jnp.expm1(jnp.abs(h)), 1) / jnp.cumsum(jnp.abs(h), 1),
    "cancel_lgamma": lambda h: lax.lgamma(1 + jnp.abs(h)) / h,
    "maximum_of_another_row": lambda h: _shifted(3 * h[:WIDTH], lambda k: k.max(1)[None]),
    "maximum_of_a_transposed_array": lambda h: _shifted(
        3 * h[:WIDTH], lambda k: k.T.max(1, keepdims=True)
    ),
    "maximum_of_another_call": lambda h: jnp.exp(_sums(4 * h) - _highest(_sums(4 * h[::-1]))),
    "maximum_of_a_selected_array": lambda h: jnp.exp(
        jnp.where(_infinite_in_fifths(h) == jnp.inf, 3 * h[::-1], h) - _highest(h)
    ),
    "logits": lambda h: jax.nn.softmax(5 * h),
    "large_logits": lambda h: jax.nn.softmax(10 * h),
    # Attention over two parts of the keys weighs them in this way.
    "softmax_of_two": lambda h: jnp.exp(h[::2] - jnp.logaddexp(h[::2], h[1::2])),
    "softmax_of_float16": lambda h: jax.nn.softmax(h.astype(jnp.float16)).astype(jnp.float32),
    "layer_norm": lambda h: (h - h.mean(1, keepdims=True)) / (h.std(1, keepdims=True) + 1e-6),
    "rms_norm": lambda h: h * lax.rsqrt((h * h).mean(1, keepdims=True) + 1e-6),
    "top_k": lambda h: lax.top_k(h, 3)[0] * jnp.arange(3.0),
    "gather": lambda h: h[jnp.argmax(h, 0)] * h[:WIDTH],
    "searchsorted": lambda h: h * jnp.searchsorted(jnp.linspace(-2, 2, 33), h),
    "cond": lambda h: lax.cond(h.mean() > 0, jnp.exp, jnp.log1p, jnp.abs(h)),
    "scan_log": lambda h: lax.scan(
        lambda c, a: (c + a, jnp.log(jnp.abs(c) + 0.1)), jnp.zeros(WIDTH), h
    )[1],
    "while_of_a_constant": lambda h: (
        h * lax.while_loop(lambda s: s < 3.0, lambda s: s + 1, lax.stop_gradient(h.sum() * 0))
    ),
    "max_pool": lambda h: lax.reduce_window(h, -jnp.inf, lax.max, (3, 1), (1, 1), "SAME"),
    "avg_pool": lambda h: lax.reduce_window(h, 0.0, lax.add, (3, 1), (1, 1), "SAME") ** 2,
    "min_pool": lambda h: lax.reduce_window(h, jnp.inf, lax.min, (3, 1), (1, 1), "SAME"),
    "conv": lambda h: jnp.tanh(
        lax.conv_general_dilated(
            h[None], jnp.stack([W, W.T, W]), (1,), "SAME", dimension_numbers=("NHC", "HIO", "NHC")
        )
    ),
    "prod": lambda h: jnp.prod(h, 1),
    "update_slice": lambda h: lax.dynamic_update_slice(h, jnp.sin(h[:2]), (3, 0)) ** 2,
    "dynamic_slice": lambda h: lax.dynamic_slice(h, (jnp.argmax(h[:, 0]), 0), (2, WIDTH)) ** 2,
    "scatter_add": lambda h: jnp.zeros_like(h).at[jnp.argmax(h, 1)].add(h) ** 2,
    "scatter_mul": lambda h: (
        jnp.ones_like(h).at[jnp.arange(ROWS)[::-1]].mul(h, unique_indices=True)
    ),
    "scatter_max": lambda h: jnp.zeros_like(h).at[jnp.arange(ROWS) // 2].max(h),
    "scatter_min": lambda h: jnp.zeros_like(h).at[jnp.arange(ROWS) // 2].min(h),
    "concatenate_and_pad": lambda h: jnp.pad(jnp.concatenate([h, jnp.sin(h)]), 1) ** 2,
    "reduce_precision": lambda h: lax.reduce_precision(h, 8, 7) ** 2,
    "complex_parts": lambda h: jnp.imag(lax.complex(h, jnp.sin(h)) ** 2) * jnp.real(1j * h + h),
    "name": lambda h: checkpoint_name(jnp.tanh(h), "tanh") ** 2,
    "barrier": lambda h: lax.optimization_barrier(jnp.tanh(h)) ** 2,
    "custom_reduction": lambda h: lax.reduce(h, 1.0, lambda a, b: a * b, (1,)),
    "ragged_dot": lambda h: lax.ragged_dot(h, jnp.stack([W, W.T]), jnp.array([10, 14])) ** 2,
    "attention": lambda h: jax.nn.dot_product_attention(*[h.reshape(1, ROWS, 2, 8)] * 3),
    "solve": lambda h: jnp.linalg.solve(jnp.cov(h.T) + SQUARE, h.T),
    "expm": lambda h: jax.scipy.linalg.expm(jnp.cov(h.T) / 8),
    "tridiagonal": lambda h: lax.linalg.tridiagonal_solve(
        jnp.pad(unit(h[1:, 0]), (1, 0)), 3 + unit(h[:, 1]), jnp.pad(unit(h[1:, 2]), (0, 1)), h
    ),
    "triangular": lambda h: lax.linalg.triangular_solve(
        jnp.tril(h[:WIDTH]) + 4 * SQUARE, h[:WIDTH], left_side=True, lower=True
    ),
}


def _shifted(k, most):
    return jnp.exp(k - most(k))


@jax.jit
def _sums(h):
    return jnp.cumsum(h, 1)


def _infinite_in_fifths(h):
    return jnp.where(jnp.arange(WIDTH) % 5 == 0, jnp.inf, 0 * h)


def _highest(h):
    return lax.stop_gradient(h.max(1, keepdims=True))


#: Differentiable primitives that no function above has, and why that is safe.
ELSEWHERE = {
    "collectives: tests/test_compression_meshes.py": "all_gather all_to_all ppermute psum "
    "ragged_all_to_all sharding_constraint",
    "integers and random numbers, whose derivative is 0": "argmin bitcast_convert_type ceil eq_to "
    "le_to lt_to nextafter not random_bits random_fold_in random_gamma random_seed random_split "
    "shift_left shift_right_arithmetic shift_right_logical xor approx_top_k",
    "references, which are left to jax.checkpoint": "get swap",
    "unknown to the table, so exact": "eig eval_jaxpr igammac reduce reduce_window "
    "select_and_gather_add cumlogsumexp cummax cummin",
    "the same array": "device_put remat2",
}
#: The functions that amplify any error of what they are computed from.
AMPLIFY = {"linalg.pinv": 0.6, "linalg.eigh": 0.6, "linalg.svd": 0.6}


def loss(function, w, x):
    y = function(lambda w, x: x @ w)(w, x)
    leaves = [jnp.real(leaf) for leaf in jax.tree.leaves(y)]
    return sum(
        jnp.sum(leaf * jnp.cos(jnp.arange(leaf.size)).reshape(leaf.shape)) for leaf in leaves
    )


@pytest.mark.filterwarnings("ignore:.* runs jax.checkpoint with its policy")
@pytest.mark.parametrize(
    ("name", "dtype", "policy"),
    [(name, "float8", lm.products_saveable) for name in FUNCTIONS]
    + [(name, "float8", lm.everything_saveable) for name in ("layer_norm", "log1mexp", "spectrum")]
    + [(f"cancel_{name}", "float8", lm.everything_saveable) for name in ("cos", "rsqrt", "tanh")]
    + [(name, "float8", NOTHING) for name in ("logits", "softmax_of_two")]
    + [(name, "int8", lm.products_saveable) for name in ("attention", "log1mexp", "spectrum")]
    + [(name, None, lm.products_saveable) for name in ("xlogy", "cond", "solve")],
)
def test_the_value_is_exact_and_the_gradient_near(name, dtype, policy):
    f = FUNCTIONS[name]

    def run(wrap):
        of_dense = lambda dense: wrap(lambda w, x: f(dense(w, x)))  # noqa: E731
        return jax.jit(jax.value_and_grad(functools.partial(loss, of_dense), (0, 1)))(W, X)

    value, got = run(lambda f: lm.compress(f, dtype=dtype, policy=policy))
    plain, want = run(lambda f: f)
    assert all(np.isfinite(each).all() for each in want)
    tolerance = 1e-3 if name in AMPLIFY else 1e-5
    np.testing.assert_allclose(value, plain, rtol=tolerance, atol=tolerance)
    bound = {"float8": AMPLIFY.get(name, 0.1), "int8": 0.1, None: tolerance}
    assert error(got, want) < bound[dtype]


def test_every_differentiable_primitive_is_tested():
    """A new JAX must break this test and not a user's gradient."""
    seen = set(" ".join(ELSEWHERE.values()).split())
    for f in FUNCTIONS.values():
        wrapped = functools.partial(loss, lambda dense, f=f: lambda w, x: f(dense(w, x)))
        for jaxpr in (jax.make_jaxpr(wrapped)(W, X), jax.make_jaxpr(jax.grad(wrapped))(W, X)):
            seen |= {eqn.primitive.name for eqn in every_equation(jaxpr.jaxpr)}
    known = (p for name, p in vars(primitives).items() if name.endswith("_p"))
    assert {p.name for p in known if p in ad.primitive_jvps} - seen == set()


SEED = int(os.environ.get("PROGRAM_SEED", secrets.randbelow(10**6)))
POLICIES = (
    lm.products_saveable,
    lm.everything_saveable,
    NOTHING,
    jax.checkpoint_policies.dots_saveable,
    jax.checkpoint_policies.save_only_these_names("tanh"),
)
#: One after the other, these make XLA's rounding large; JAX cannot map the last one.
LEFT_OUT = ("cancel", "div", "integer_pow", "large_logits", "maximum", "pow_of_both", "rem", "tan")
LEFT_OUT += ("lax.digamma", "ragged_dot")
#: Functions of a compressed function, kernels and rows: how a model calls the function.
CALLS = {
    "plain": lambda f, ws, x: f(ws, x),
    "jit": lambda f, ws, x: jax.jit(f)(ws, x),
    "twice": lambda f, ws, x: f(ws, f(ws, x)),
    "scan": lambda f, ws, x: lax.scan(lambda h, _: (f(ws, h), None), x, None, length=2)[0],
    "vmap": lambda f, ws, x: jax.vmap(f, (None, 0))(ws, jnp.stack([x, x[::-1]])),
    "vmap_params": lambda f, ws, x: jax.vmap(f, (0, None))(jnp.stack([ws, ws[::-1]]), x),
    "checkpoint": lambda f, ws, x: jax.checkpoint(f)(ws, x),
}


def layers():
    """Names of functions whose result has the shape and dtype of the rows."""
    rows = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32)
    names = [name for name in FUNCTIONS if not name.startswith(LEFT_OUT)]
    return [name for name in names if jax.eval_shape(FUNCTIONS[name], rows) == rows]


def assert_same(got, want):
    """Compares two compiled programs, in which XLA may fuse products and sums differently."""
    got, want = (np.asarray(y, np.float32) for y in (got, want))
    atol = 64 * float(jnp.finfo(jnp.float32).eps) * np.max(np.abs(want))
    np.testing.assert_allclose(got, want, rtol=0, atol=atol)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.* runs jax.checkpoint with its policy")
@pytest.mark.parametrize("number", range(50))
def test_a_random_program(number):
    """With `dtype=None`, `jax.checkpoint` gives the same results, except for XLA's rounding.

    The error of a rounded gradient must be small beside the change that 2% noise on all inputs
    makes.
    """
    rng = np.random.default_rng([SEED, number])
    names = [str(rng.choice(layers())) for _ in range(rng.integers(2, 6))]
    residual = [bool(rng.integers(2)) for _ in names]

    def function(ws, x):
        for w, name, is_added in zip(ws, names, residual, strict=True):
            y = FUNCTIONS[name](lm.ms_rms_norm(x @ w))
            x = x + y if is_added else y
        return x

    call = str(rng.choice(list(CALLS)))
    policy = POLICIES[rng.integers(len(POLICIES))]
    params = {"params_argnums": 0 if rng.integers(2) else ()}
    print(f"PROGRAM_SEED={SEED}, number {number}: {names}, {residual}, {call}, {policy}, {params}")

    def normal(*shape):
        return jnp.asarray(rng.normal(size=shape), jnp.float32)

    ws, x = normal(len(names), WIDTH, WIDTH) / WIDTH**0.5, normal(ROWS, WIDTH)
    weights = normal(2, ROWS, WIDTH)

    def run(transformed, *given):
        def loss(ws, x):
            y = CALLS[call](transformed, ws, x)
            return jnp.sum(y * (weights if y.ndim == 3 else weights[0])), y

        step = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))
        (_, y), gradients = step(*given)
        return y, gradients

    y, want = run(jax.checkpoint(function, policy=policy), ws, x)
    if not all(jnp.all(jnp.isfinite(a)) for a in jax.tree.leaves((y, want))):
        pytest.skip("the program leaves the range of its dtype")
    same, exact = run(lm.compress(function, policy=policy, dtype=None, **params), ws, x)
    assert_same(same, y)
    assert error(exact, want) < 1e-4
    noisy = []
    for _ in range(3):
        near = [a * (1 + 0.02 * normal(*a.shape)) for a in (ws, x)]
        noisy.append(error(run(function, *near)[1], want))
    for storage in ("float8", "int8"):
        same, rounded = run(lm.compress(function, policy=policy, dtype=storage, **params), ws, x)
        assert_same(same, y)
        assert error(rounded, want) < 0.05 + 3 * max(noisy), (storage, noisy)
