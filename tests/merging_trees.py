"""Small trees of parameters, whose norms are merged."""

import jax.numpy as jnp
import numpy as np


def small(norm=("scale", "bias"), dense=("kernel", "bias"), wrap=jnp.asarray):
    """One norm of 4 features, "n", and one Dense to 3, "d"."""
    rng = np.random.default_rng(0)
    shapes = {"scale": (4,), "kernel": (4, 3)}
    draw = lambda name, other: wrap(rng.normal(1, 1, shapes.get(name, other)).astype(np.float32))  # noqa: E731
    return {
        "n": {name: draw(name, (4,)) for name in norm},
        "d": {name: draw(name, (3,)) for name in dense},
    }


def layers(*names):
    norm, up = {"scale": np.full(2, 3.0)}, {"kernel": np.ones((2, 2))}
    return {name: {"ln": norm, "mlp": {"up": up, "gate": up}} for name in names}
