"""Heads in float64: parameters as NumPy arrays, and outputs on random inputs for errors and proofs.

Layouts are called as black boxes, through `multi_head_attention` alone.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
from attnlab.heads.layout import Layout, check_params
from attnlab.heads.positions import rotary_angles
from attnlab.heads.weights import Params

Restore = Callable[[Weights], dict[str, Array]]
NUM_QUERIES, NUM_KEYS = 5, 7
SCALES = (1.0, 0.1, 4.0)
"""Standard deviations of random inputs. An error that large scores or a norm hide in one of them
shows in another; each has three masks."""


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["score_mods"], meta_fields=["rotary", "logits_soft_cap"],
)  # fmt: skip
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


def in_float64(params: Params, layout: Layout) -> tuple[dict[str, Floats], Restore]:
    """Parameters in NumPy float64, and a function that casts others back.

    The function returns arrays of the dtype that holds all of `params`: NumPy arrays if all of them
    are, else JAX arrays.

    Raises:
      ValueError: params that are not those of the layout, NaN or inf among them.
      TypeError: params that are not of a float dtype, which could not hold the result.
    """
    check_params(params, layout)
    for name, a in params.items():
        if not jnp.issubdtype(a.dtype, jnp.floating):
            raise TypeError(f"weight {name!r} has dtype {a.dtype}: convert params to a float")
    w = {name: np.asarray(a).astype(np.float64) for name, a in params.items()}
    for name, wide in w.items():
        if not np.all(np.isfinite(wide)):
            raise ValueError(f"weight {name!r} holds NaN or inf; conversion needs finite weights")
    numpy = all(isinstance(a, np.ndarray) for a in params.values())
    dtype = common_dtype(params)

    def restore(made: Mapping[str, Floats]) -> dict[str, Array]:
        with np.errstate(over="ignore"):
            cast = {name: a.astype(dtype) for name, a in made.items()}
        if numpy:
            return cast  # type: ignore[return-value]  # NumPy arrays in, NumPy arrays out
        with float64(), jax.default_device(None):  # not on the CPU, where they were computed
            return {name: jnp.asarray(a) for name, a in cast.items()}

    return w, restore


def common_dtype(params: Params) -> np.dtype[np.floating]:
    """The dtype that holds all of them."""
    with float64():
        found: np.dtype[np.floating] = jnp.result_type(*params.values())
    return found


def eps(dtype: np.dtype[np.floating]) -> float:
    """The distance from 1 to the next number of this dtype."""
    return float(jnp.finfo(dtype).eps)  # type: ignore[no-untyped-call]


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


@functools.partial(jax.jit, static_argnames="layout")
def _run(
    params: Params, inputs: Inputs, mask: Array, cotangent: Array, call: CallOptions, layout: Layout
) -> tuple[Array, Params, Inputs]:
    """The output of a layout with its weights as they are, and its gradients in the weights and in
    the inputs."""
    angles = None
    if call.rotary and layout.rotary_size is not None:
        size = layout.rotary_size - layout.rotary_size % 2
        for_q, for_k = (rotary_angles(jnp.arange(a.shape[1]), size) for a in inputs[:2])
        angles = (for_q, for_k)

    def output(params: Params, inputs: Any) -> Array:
        return multi_head_attention(
            params, inputs.x, layout, (inputs.keys, inputs.values), rotary=angles, mask=mask,
            order="factored", logits_soft_cap=call.logits_soft_cap, score_mods=call.score_mods,
            implementation="dense",
        )  # fmt: skip

    made, pull = jax.vjp(output, params, inputs)
    return made, *pull(cotangent)


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
    found = _run(wide, inputs, mask, cotangent, call, layout)
    return Measured(*jax.tree.map(np.asarray, found))


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


def _error(got: tuple[Floats, ...], expected: tuple[Floats, ...]) -> float:
    """The worst error over the scales of `SCALES`, each relative to its own largest value."""

    def largest(arrays: Iterable[Floats]) -> Floats:
        each = [np.max(np.abs(a).reshape(len(SCALES), -1), axis=1, initial=0) for a in arrays]
        return np.asarray(np.max(each, axis=0), np.float64)

    with np.errstate(all="ignore"):
        apart = largest(a - b for a, b in zip(got, expected, strict=True))
        return float(np.max(apart / np.maximum(largest(expected), 1e-300)))


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
    return Errors(_error((one.output,), (two.output,)), _error(one.inputs, two.inputs))
