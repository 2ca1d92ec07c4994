"""Calls outside of `jit`, which one compiled program can run, kept for the next call."""

import jax
import jax.numpy as jnp
import numpy as np

KEPT = 64
"""How many programs are kept, for as many configs and options; each for every shape of its call."""


def is_eager(*trees: object) -> bool:
    """Whether nothing traces this call, and everything in it is an array.

    >>> is_eager(jnp.ones(2)), jax.eval_shape(lambda: jnp.asarray(is_eager(np.ones(2)))).dtype
    (True, dtype('bool'))
    >>> _ = jax.jit(lambda x: print(is_eager(x), is_eager(np.ones(2))))(1.0)
    False False
    """
    leaves = [jnp.zeros(()), *jax.tree.leaves(trees)]  # zeros are traced where anything is
    of_jax = (jax.Array, np.ndarray)
    return all(isinstance(a, of_jax) and not isinstance(a, jax.core.Tracer) for a in leaves)
