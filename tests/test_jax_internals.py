"""What the library uses of JAX that is not public, with the version of JAX that runs this."""

import inspect
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import lowmembp_jax
import pallas_kernels
from lowmembp_jax import _jax_internals as jax_internals

X = jnp.arange(4.0)


def test_it_is_in_one_file():
    private = re.compile(r"jax[./]_src|_check_vma|manual_axis_type|_cache_miss")
    files = [
        f for p in (lowmembp_jax, pallas_kernels) for f in Path(p.__file__).parent.rglob("*.py")
    ]
    found = [file.name for file in files if private.search(file.read_text())]
    assert found == ["_jax_internals.py"]


def test_cache_miss_is_called_each_time_that_it_says_so():
    def double(x):
        return 2 * x

    jitted = jax.jit(double)
    cell = jax_internals.cache_miss(jitted)
    original, calls = cell.cell_contents, []

    def missed(x):
        calls.append(x)
        return -x, None, False

    cell.cell_contents = missed
    assert [float(jitted(3.0)) for _ in range(2)] == [-3.0, -3.0]
    assert jax.make_jaxpr(jitted)(X).eqns[0].primitive is lax.neg_p
    assert len(calls) == 3
    with jax.disable_jit():
        assert jitted(3.0) == 6.0  # which calls the Python function
    cell.cell_contents = original
    assert jax.jit(lambda x: jitted(x))(3.0) == 6.0


def test_a_jitted_function_without_its_compiler_options():
    def power(x, n):
        return x**n

    def square(x):
        return x * x

    given = {"xla_cpu_enable_fast_math": True}
    jitted = jax.jit(power, static_argnums=1, donate_argnums=0, compiler_options=given)
    plain, options = jax_internals.without_compiler_options(jitted)
    assert options == given
    with pytest.raises(ValueError, match="top-level"):
        jax.make_jaxpr(lambda x: jitted(x, 2))(X)
    [eqn] = jax.make_jaxpr(lambda x: plain(x, 2))(X).eqns
    assert eqn.params["donated_invars"] == (True,)
    np.testing.assert_array_equal(plain(jnp.array(X), 3), X**3)
    for other in (square, jax.jit(square)):
        assert jax_internals.without_compiler_options(other) == (other, {})


@pytest.mark.parametrize(
    ("function", "pattern"),
    [
        (jax.nn.gelu, jax_internals.WHOLE),
        (jax.nn.dot_product_attention, jax_internals.WHOLE),
        (jax.scipy.linalg.solve, jax_internals.WHOLE),
        (jax.image.resize, jax_internals.WHOLE),
        (jnp.dot, jax_internals.FUNCTIONS),
        (lax.dot_general, jax_internals.FUNCTIONS),
        (jax.random.normal, jax_internals.FUNCTIONS),
        (lax.scan, jax_internals.SOURCE),
    ],
)
def test_files_of_jax(function, pattern):
    file = inspect.unwrap(function).__code__.co_filename
    assert re.search(pattern, file)
    assert jax_internals.SOURCE in file
    if function is lax.scan:
        assert not re.search(jax_internals.FUNCTIONS, file)
