"""Outputs of heads in float64 on random inputs, for conversion errors and proofs.

Layouts are called as black boxes, through `multi_head_attention` alone.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.experimental
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array
from numpy.typing import NDArray

from attnlab.attention import ScoreMod
from attnlab.heads.attention import multi_head_attention
from attnlab.heads.factors import Floats, Weights
from attnlab.heads.layout import Layout
from attnlab.heads.positions import rotary_angles

NUM_QUERIES, NUM_KEYS = 5, 7
SCALES = (1.0, 0.1, 4.0)
"""Standard deviations of random inputs. An error that large scores or a norm hide in one of them
shows in another; each has three masks."""


@dataclasses.dataclass(frozen=True)
class CallOptions:
    """Options of the calls in which two layouts are to compute the same function.

    Attributes:
      rotary: rotary positions are applied.
      logits_soft_cap: c of c tanh(scores / c).
      score_mods: score modifications of `attnlab.dot_product_attention`.
    """

    rotary: bool = False
    logits_soft_cap: float | None = None
    score_mods: Sequence[ScoreMod] = ()

    @property
    def shift_invariant(self) -> bool:
        """Does a constant added to all scores of a query change nothing?"""
        return self.logits_soft_cap is None and not self.score_mods


class Inputs(NamedTuple):
    """Query input [B, 5, D], key input [B, 7, E] and value input [B, 7, W]."""

    x: Floats
    keys: Floats
    values: Floats


class Measured(NamedTuple):
    """An output [B, 5, O] and the gradients of sum(output * cotangent)."""

    output: Floats
    weights: Weights
    inputs: Inputs


@contextlib.contextmanager
def float64() -> Iterator[None]:
    """Context in which JAX computes in float64, on the CPU since TPUs emulate it."""
    module: Any = jax if hasattr(jax, "enable_x64") else jax.experimental  # where JAX 0.7 has it
    try:
        device = jax.local_devices(backend="cpu")[0]
    except RuntimeError:  # the CPU is not among the platforms of JAX_PLATFORMS
        device = None
    with module.enable_x64(True), jax.default_device(device):
        yield


def generator(key: Array | None) -> np.random.Generator:
    """NumPy's generator of random numbers; None is a fixed one."""
    seed = 0 if key is None else int(jax.random.randint(key, (), 0, 2**31 - 1))
    return np.random.default_rng(seed)


def random_inputs(layout: Layout, rng: np.random.Generator, batch: int = 9) -> Inputs:
    """Normal inputs of standard deviation 1."""
    lengths = NUM_QUERIES, NUM_KEYS, NUM_KEYS
    shapes = zip(lengths, layout.input_widths, strict=True)
    return Inputs(*(rng.normal(size=(batch, length, width)) for length, width in shapes))


def standard_masks() -> NDArray[np.bool_]:
    """[9, 1, 5, 7]: every key; the first three; a random choice that leaves query 2 no key."""
    masks = np.ones((3, 1, NUM_QUERIES, NUM_KEYS), bool)
    masks[1, ..., 3:] = False
    masks[2] = np.random.default_rng(0).random((1, NUM_QUERIES, NUM_KEYS)) < 0.6
    masks[2, :, 2] = False
    return np.tile(masks, (len(SCALES), 1, 1, 1))


@functools.partial(jax.jit, static_argnames=("layout", "rotary", "cap"))
def _run(
    params: Mapping[str, Array],
    inputs: tuple[Array, ...],
    mask: Array,
    cotangent: Array,
    mods: tuple[ScoreMod, ...],
    layout: Layout,
    rotary: bool,
    cap: float | None,
) -> tuple[Array, Mapping[str, Array], tuple[Array, ...]]:
    """The output of a layout with its weights as they are, and its gradients in the weights and in
    the inputs."""
    angles = None
    if rotary and layout.rotary_size is not None:
        size = layout.rotary_size - layout.rotary_size % 2
        for_q, for_k = (rotary_angles(jnp.arange(a.shape[1]), size) for a in inputs[:2])
        angles = (for_q, for_k)

    def call(params: Mapping[str, Array], inputs: tuple[Array, ...]) -> Array:
        x, keys, values = inputs
        return multi_head_attention(
            params, x, layout, (keys, values), rotary=angles, order="factored", mask=mask,
            logits_soft_cap=cap, score_mods=mods, implementation="dense",
        )  # fmt: skip

    output, pull = jax.vjp(call, params, inputs)
    return output, *pull(cotangent)


def measure(
    params: Mapping[str, ArrayLike],
    layout: Layout,
    call: CallOptions,
    inputs: Inputs,
    mask: NDArray[np.bool_] | None = None,
    cotangent: Floats | None = None,
) -> Measured:
    """Output and gradients of a layout; call it within `float64()`."""
    batch = len(inputs.x)
    if mask is None:
        mask = np.ones((batch, 1, NUM_QUERIES, NUM_KEYS), bool)
    if cotangent is None:
        cotangent = np.zeros((batch, NUM_QUERIES, layout.size("out_width")))
    wide = {name: np.asarray(a, np.float64) for name, a in params.items()}
    output, of_weights, of_inputs = _run(
        wide, tuple(inputs), mask, cotangent, tuple(call.score_mods), layout, call.rotary,
        call.logits_soft_cap,
    )  # fmt: skip
    weights = {name: np.asarray(a) for name, a in of_weights.items()}
    return Measured(np.asarray(output), weights, Inputs(*map(np.asarray, of_inputs)))


def weight_gradients(params: Weights, layout: Layout, call: CallOptions) -> Weights:
    """Gradients of a random sum of the output in the weights; call it within `float64()`."""
    rng = np.random.default_rng(0)
    inputs, mask = random_inputs(layout, rng), standard_masks()
    cotangent = rng.normal(size=(len(mask), NUM_QUERIES, layout.size("out_width")))
    return measure(params, layout, call, inputs, mask, cotangent).weights


class Errors(NamedTuple):
    """Largest differences, relative to the largest expected value."""

    forward: float
    gradient: float

    def below(self, bound: float) -> bool:
        """Are both finite and below the bound?"""
        return self.forward < bound and self.gradient < bound  # NaN is below nothing


def errors(got: Measured, expected: Measured) -> Errors:
    """The worst errors over the scales of `SCALES`, each relative to its own largest value."""

    def error(got: tuple[Floats, ...], expected: tuple[Floats, ...]) -> float:
        worst = 0.0
        for i in range(len(SCALES)):
            part = slice(3 * i, 3 * i + 3)
            apart = np.max([np.max(np.abs(a[part] - b[part]), initial=0)
                            for a, b in zip(got, expected, strict=True)])  # fmt: skip
            largest = np.max([np.max(np.abs(b[part]), initial=0) for b in expected])
            worst = float(np.maximum(worst, apart / np.maximum(largest, 1e-300)))
        return worst

    with np.errstate(all="ignore"):
        return Errors(error((got.output,), (expected.output,)), error(got.inputs, expected.inputs))


def compare(
    params: Mapping[str, ArrayLike],
    layout: Layout,
    expected_params: Mapping[str, ArrayLike],
    expected_layout: Layout,
    call: CallOptions,
    rng: np.random.Generator,
) -> Errors:
    """Errors of one set of heads as a replacement of another; call it within `float64()`."""
    inputs = random_inputs(expected_layout, rng)
    scale = np.repeat(SCALES, 3)[:, None, None]
    inputs = Inputs(*(a * scale for a in inputs))
    shape = (len(scale), NUM_QUERIES, expected_layout.size("out_width"))
    cotangent = rng.normal(size=shape)
    one, two = (
        measure(a, which, call, inputs, standard_masks(), cotangent)
        for a, which in ((params, layout), (expected_params, expected_layout))
    )
    return errors(one, two)
