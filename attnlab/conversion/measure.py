"""What a set of heads computes, in float64 on random inputs: the numbers behind certificates and
witnesses.
"""

import contextlib
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.experimental
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from attnlab.heads.old.maps import Weights
from attnlab.heads.old.multihead import multi_head_attention
from attnlab.heads.old.spec import HeadSpec
from attnlab.heads.positions import rotary_angles

# Relative: above rounding, below anything that a user would call a difference.
MEASURABLE = 1e-9


class Situation(NamedTuple):
    """What stands between q k^T and the softmax, beside what the specs say."""

    rotary: bool = False
    logits_soft_cap: float | None = None

    def forbids(self, breaks: tuple[str, ...], *specs: HeadSpec) -> list[str]:
        """Which of `breaks` are there, in one of these specs or around them.

        "cap" is whatever sees what a key bias adds to a whole row: a soft cap, or a score in the
        sum of the softmax that has no key bias, together with such a bias.
        """
        sees = self.logits_soft_cap is not None or any(s.sink or s.extra_keys for s in specs)
        bias = any(s.tied["k"] in s.biases or s.qk_norm_bias for s in specs)
        present = {
            "rotary": self.rotary,
            "qk_norm": any(s.qk_norm for s in specs),
            "cap": sees and bias,
            "element": any(s.gate == "element" for s in specs),
            "extra": any(s.extra_keys for s in specs),
        }
        return [name for name in breaks if present[name]]


@contextlib.contextmanager
def float64() -> Iterator[None]:
    """float64 within a `with`, whatever the global flag says, and on the CPU: TPUs emulate it."""
    module: Any = jax if hasattr(jax, "enable_x64") else jax.experimental  # where JAX 0.7 has it
    try:
        device = jax.local_devices(backend="cpu")[0]
    except RuntimeError:  # the platforms were told, and no CPU is among them
        device = None
    with module.enable_x64(True), jax.default_device(device):
        yield


def draw(spec: HeadSpec, rng: np.random.Generator, batch: int = 3) -> list[np.ndarray]:
    """Normal x [B, 5, D], context [B, 7, E] and value context [B, 7, W]."""
    sizes = spec.sizes
    return [rng.normal(size=(batch, n, sizes[a])) for n, a in ((5, "D"), (7, "E"), (7, "W"))]


def masks() -> np.ndarray:
    """[3, 1, 5, 7]: every key; the first three alone; some at random, and query 2 sees none."""
    seen = np.ones((3, 1, 5, 7), bool)
    seen[1, ..., 3:] = False
    seen[2] = np.random.default_rng(0).random((1, 5, 7)) < 0.6
    seen[2, :, 2] = False
    return seen


def forward(
    w: Weights,
    inputs: Any,
    mask: Any = None,
    *,
    spec: HeadSpec,
    situation: Situation,
    probs: bool = False,
) -> Array:
    """(x, context, value context) -> output, or the probabilities, exactly as the layout states it:
    no other order of products.
    """
    x, context, values = inputs
    angles = lambda a: rotary_angles(jnp.arange(a.shape[1]), spec.turned or spec.sizes["H"])
    result = multi_head_attention(
        w,
        x,
        context,
        spec=spec,
        value_context=values,
        mask=mask,
        logits_soft_cap=situation.logits_soft_cap,
        rotary=(angles(x), angles(context)) if situation.rotary else None,
        order="factored",
        return_probs=probs,
        implementation="dense",
    )
    return result[1] if probs else result


def _with_gradients(w, inputs, mask, cotangent, *, spec, situation):
    out, pull = jax.vjp(lambda *a: forward(w, a, mask, spec=spec, situation=situation), *inputs)
    return out, pull(cotangent)


_compiled = jax.jit(_with_gradients, static_argnames=("spec", "situation"))


def outputs(
    w: Weights, inputs: list, spec: HeadSpec, situation: Situation, mask=None, cotangent=None
) -> tuple[np.ndarray, list[np.ndarray]]:
    """The output [3, 5, O] and the gradients of sum(output * cotangent) with respect to inputs.

    One program per spec serves every question. Call it within `float64()`.
    """
    shape = (3, 5, spec.sizes["O"])
    mask = np.ones((3, 1, 5, 7), bool) if mask is None else mask
    cotangent = np.zeros(shape) if cotangent is None else cotangent
    out, gradients = _compiled(w, inputs, mask, cotangent, spec=spec, situation=situation)
    return np.asarray(out), [np.asarray(a) for a in gradients]


def difference(got: Any, expected: Any) -> float:
    """Largest difference, relative to the largest expected value."""
    got, expected = np.asarray(got), np.asarray(expected)
    largest = np.max(np.abs(expected), initial=0)
    return float(np.max(np.abs(got - expected), initial=0) / max(largest, 1e-300))


def _heads_see(w, inputs, *, spec, situation):
    return forward(w, inputs, spec=spec, situation=situation, probs=True)


probabilities = jax.jit(_heads_see, static_argnames=("spec", "situation"))


def dimension(
    w: Weights, spec: HeadSpec, situation: Situation, rng: np.random.Generator
) -> int | None:
    """Degrees of freedom of the function at `w`, its gauge not counted; None if not clear.

    That is the rank of the derivatives, with respect to all weights, of more numbers than there
    are weights: each a random sum over the output of a query.
    """
    count = sum(math.prod(shape) for shape in spec.shapes.values())
    inputs = draw(spec, rng, -(-(count + 40) // 5))
    directions = rng.normal(size=(len(inputs[0]), 5, spec.sizes["O"]))

    def numbers(w, x, context, values, direction):
        inputs = [a[None] for a in (x, context, values)]
        out = forward(w, inputs, spec=spec, situation=situation)
        return jnp.sum(out[0] * direction, axis=-1)

    derivatives = jax.jit(jax.vmap(jax.jacrev(numbers), in_axes=(None, 0, 0, 0, 0)))
    made = [np.asarray(a) for a in derivatives(w, *inputs, directions).values()]
    matrix = np.concatenate([a.reshape(a.shape[0] * 5, -1) for a in made], axis=1)
    values = np.linalg.svd(matrix, compute_uv=False)
    found = int(np.sum(values > MEASURABLE * values[0]))
    clear = found == len(values) or values[found] < 1e-3 * values[found - 1]
    return found if clear else None
