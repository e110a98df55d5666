"""On 8 devices: the values of one device, and no collective that default Flax does not have."""

from functools import cache, partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import array, assert_close, normal
from jax import P
from jax.sharding import AxisType, Mesh, NamedSharding
from meshes import exchanged

import lowmembp_jax as lm

SHAPE = (8, 16, 1000)
SPECS = {"batch": P("x"), "sequence": P(None, "x"), "hidden": P(None, None, "x")}


def flax_norm(module, x, *parameters):
    tree = dict(zip(("scale", "bias"), parameters, strict=False))
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        return module.apply({"params": tree}, x)


#: Ours, what Flax has, and how many parameters of [hidden] go in.
OPS = {
    "regelu2": (lm.regelu2, nn.gelu, 0),
    "swiglu": (
        lambda x, **how: lm.swiglu(x, jnp.cos(x), **how), lambda x: nn.silu(x) * jnp.cos(x), 0,
    ),
    "layer_norm": (
        lm.ms_layer_norm, partial(flax_norm, nn.LayerNorm(use_bias=False, use_scale=False)), 0,
    ),
    "layer_norm_affine": (lm.ms_layer_norm, partial(flax_norm, nn.LayerNorm()), 2),
    "rms_norm_affine": (lm.ms_rms_norm, partial(flax_norm, nn.RMSNorm()), 1),
}  # fmt: skip
CASES = [
    (name, split) for name in OPS for split in (("batch", "sequence") if "norm" in name else SPECS)
]


def arguments(count):
    rows = [1 + normal(SHAPE[-1], key=1 + key) / 4 for key in range(count)]
    return [normal(*SHAPE), *rows]


def gradients(op, *args):
    return jax.grad(lambda *a: jnp.sum(jnp.square(op(*a))), argnums=tuple(range(len(args))))(*args)


@cache
def on_one_device(name, implementation):
    """The gradients that a mesh must give too."""
    ours, _, count = OPS[name]
    ours = partial(ours, implementation=implementation)
    return jax.jit(partial(gradients, ours))(*arguments(count))


def mapped_over(mesh, op, count, split, **options):
    specs = (SPECS[split], *(P(),) * count)
    return jax.shard_map(op, mesh=mesh, in_specs=specs, out_specs=SPECS[split], **options)


def compiled(op, count, split, mesh, mapped=False):
    """The gradients over a mesh, whose devices need not be there."""
    shardings = [NamedSharding(mesh, spec) for spec in (SPECS[split], *(P(),) * count)]
    arrays = [array(*SHAPE), *[array(SHAPE[-1])] * count]
    given = [a.update(sharding=s) for a, s in zip(arrays, shardings, strict=True)]
    op = mapped_over(mesh, op, count, split) if mapped else op
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        return jax.jit(partial(gradients, op)).lower(*given).compile()


@cache
def exchanged_by_flax(name, split, mesh, mapped=False):
    _, theirs, count = OPS[name]
    return exchanged(compiled(theirs, count, split, mesh, mapped))


@pytest.mark.parametrize(
    ("name", "split", "axis_type", "implementation"),
    [(*case, AxisType.Auto, "xla") for case in CASES]
    + [("regelu2", "hidden", AxisType.Explicit, "pallas_interpret")]
    + [("swiglu", "batch", AxisType.Auto, "pallas_interpret")]
    + [("layer_norm_affine", "sequence", AxisType.Explicit, "pallas_interpret")]
    + [("rms_norm_affine", "batch", AxisType.Auto, "pallas_interpret")],
)
def test_meshes(name, split, axis_type, implementation):
    ours, _, count = OPS[name]
    mesh = jax.make_mesh((8,), ("x",), axis_types=(axis_type,))
    program = compiled(partial(ours, implementation=implementation), count, split, mesh)
    assert exchanged(program) <= exchanged_by_flax(name, split, mesh)
    x, *rest = arguments(count)
    x = jax.device_put(x, NamedSharding(mesh, SPECS[split]))
    got = program(x, *jax.device_put(rest, NamedSharding(mesh, P())))
    assert got[0].sharding.is_equivalent_to(x.sharding, 3)
    assert_close(got, on_one_device(name, implementation), atol=2e-4)


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
@pytest.mark.parametrize("name", ["layer_norm", "layer_norm_affine"])
def test_kernels_of_norms_where_rows_are_split(name, axis_type):
    """They take whole rows; results and gradients are sharded as the arguments."""
    ours, _, count = OPS[name]
    ours = partial(ours, implementation="pallas_interpret")
    args = arguments(count)
    want = on_one_device(name, "pallas_interpret")
    mesh = jax.make_mesh((8,), ("x",), axis_types=(axis_type,))
    with jax.set_mesh(mesh):
        sharded = [jax.device_put(args[0], NamedSharding(mesh, SPECS["hidden"]))]
        sharded += [jax.device_put(a, NamedSharding(mesh, P("x"))) for a in args[1:]]
        # The sum of x and its norm needs the two sharded alike.
        got = jax.jit(partial(gradients, lambda x, *rest: x * 0 + ours(x, *rest)))(*sharded)
    assert_close(got, want, atol=2e-4)
    if axis_type == AxisType.Explicit:
        pairs = zip(got, sharded, strict=True)
        assert all(a.sharding.is_equivalent_to(b.sharding, a.ndim) for a, b in pairs)


def mapped_over_8(op, count, split, check_vma):
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    return mapped_over(mesh, op, count, split, check_vma=check_vma)


# JAX's interpreter of Pallas does not support check_vma=True; compiled kernels do, below.
@pytest.mark.parametrize(
    ("name", "split", "check_vma", "implementation"),
    [
        ("regelu2", "hidden", True, "xla"),
        ("swiglu", "batch", False, "pallas_interpret"),
        ("layer_norm_affine", "batch", True, "xla"),
        ("layer_norm_affine", "sequence", False, "pallas_interpret"),
        ("rms_norm_affine", "batch", False, "xla"),
    ],
)
def test_inside_shard_map(name, split, check_vma, implementation):
    ours, _, count = OPS[name]
    args, want = arguments(count), on_one_device(name, implementation)
    mapped = mapped_over_8(partial(ours, implementation=implementation), count, split, check_vma)
    program = jax.jit(partial(gradients, mapped)).lower(*args).compile()
    # Parameter gradients are summed over the devices once, in one collective.
    assert exchanged(program) == ({"all-reduce": 4 * SHAPE[-1] * count} if count else {})
    assert_close(program(*args), want, atol=2e-4)


@pytest.mark.parametrize("ours", [lm.regelu2, lm.compress(jnp.sin, params_argnums=())])
def test_inside_shard_map_outside_jit(ours):
    """There, JAX has no custom VJP that asks which arguments are differentiated."""
    mapped, [x] = mapped_over_8(ours, 0, "batch", check_vma=True), arguments(0)
    np.testing.assert_allclose(mapped(x), jax.jit(ours)(x), rtol=1e-5, atol=1e-5)
    assert_close(gradients(mapped, x), gradients(ours, x), atol=2e-4)


@pytest.mark.compiled
@pytest.mark.parametrize(
    ("name", "split", "mapped", "implementation"),
    [
        ("regelu2", "hidden", False, "triton"),
        ("swiglu", "sequence", True, "triton"),
        ("layer_norm_affine", "batch", False, "pallas"),
        ("rms_norm_affine", "sequence", True, "triton"),
    ],
)
@pytest.mark.filterwarnings("ignore::ResourceWarning")  # jax-triton's temporary directory
def test_kernels_compiled_for_eight_h200s(name, split, mapped, implementation, monkeypatch):
    """With no GPU: the kernels run on each device's part, and nothing else is exchanged."""
    if implementation == "triton":
        pytest.importorskip("triton")
        library = pytest.importorskip("jax_triton.triton_lib").triton_kernel_call_lib
        # All that jax-triton 0.3 asks of a GPU.
        monkeypatch.setattr(library, "get_compute_capability", lambda device: 90)
    ours, _, count = OPS[name]
    mesh = Mesh(np.array(lm.memory.topology("h200", 8).devices).reshape(8), ("x",))
    ours = partial(ours, implementation=implementation)
    program = compiled(ours, count, split, mesh, mapped)
    text = program.as_text()
    family = "norm" if "norm" in name else "gated" if name == "swiglu" else "activation"
    if implementation == "pallas" or mapped:
        assert all(f"lowmembp_{family}_{way}" in text for way in ("forward", "backward"))
    else:  # the kernels' names are in the calls' compressed bodies
        assert text.count('custom_call_target="triton_kernel_call') >= 2
    assert exchanged(program) <= exchanged_by_flax(name, split, mesh, mapped)


@pytest.mark.parametrize(
    ("name", "implementation"),
    [("regelu2", "pallas_interpret"), ("swiglu", "xla"), ("layer_norm_affine", "pallas_interpret")],
)
def test_arrays_with_explicit_axes_need_no_set_mesh(name, implementation):
    """`jax.jit` of plain functions does not need it either."""
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Explicit,))
    ours, _, count = OPS[name]
    x, *parameters = arguments(count)
    x = jax.device_put(x, NamedSharding(mesh, P(None, None, "x")))
    parameters = jax.device_put(parameters, NamedSharding(mesh, P()))
    got = jax.jit(partial(gradients, partial(ours, implementation=implementation)))(x, *parameters)
    assert_close(got, on_one_device(name, implementation), atol=1e-4)


def test_a_loss_with_explicit_axes_needs_no_set_mesh():
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(AxisType.Explicit,) * 2)
    hidden = normal(8, 64)
    kernel, labels = normal(64, 96, key=1), jnp.arange(8)
    grad = jax.jit(jax.grad(lm.linear_cross_entropy))
    exact = grad(hidden, kernel, labels=labels)
    put = lambda x, *spec: jax.device_put(x, NamedSharding(mesh, P(*spec)))  # noqa: E731
    got = grad(put(hidden, "x", None), put(kernel, None, "y"), labels=put(labels, "x"))
    np.testing.assert_allclose(got, exact, rtol=1e-5, atol=1e-6)
