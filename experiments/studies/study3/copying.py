"""Copy bytes scored apart, and the repeated-bytes probe.

A target is a copy byte if the 8 bytes before it stand earlier in its window (they may overlap): a
model that has learnt to copy can continue them. The definition reads the context alone, not whether
the earlier continuation is right.
"""

import functools
import math
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from attnlab.sharing import Params
from attnlab.training.callbacks import StepInfo, callback
from attnlab.training.objectives import OBJECTIVES
from attnlab.training.objectives.objective import (
    Example,
    Metric,
    Model,
    Objective,
    Sums,
    cross_entropy,
)
from experiments.studies.study3.windows import FREQUENT

CONTEXT = 8
HALF, ROWS = 64, 64
"""The probe: rows of HALF random bytes, then the same again."""
PROBE = "probe"
PROBE_EVERY = 96
"""Steps between two probes: 5 % of those at D = 64."""
THRESHOLD = 2.0
"""Bits a byte of the second half below which a model has learnt to copy."""


def copy_targets(tokens: Int[Array, "B T"], context: int = CONTEXT) -> Bool[Array, "B T"]:
    """Target i, which follows token i, is True if tokens i - context + 1 to i stand earlier.

    >>> text = jnp.array([list(b"abcabcx")])
    >>> copy_targets(text, 2)[0].astype(int).tolist()  # after the second "ab" and "bc"
    [0, 0, 0, 0, 1, 1, 0]
    """
    length = tokens.shape[1]
    same = tokens[:, :, None] == tokens[:, None, :]
    matches = same
    for back in range(1, context):  # both ends one back; before the window nothing matches
        shifted = jnp.pad(same, [(0, 0), (back, 0), (back, 0)])[:, :length, :length]
        matches = matches & shifted
    earlier = jnp.tril(jnp.ones((length, length), bool), -1)
    return jnp.any(matches & earlier, axis=-1)


def _copy_weights(example: Example) -> Array:
    tokens = example.inputs["tokens"]
    assert isinstance(tokens, jax.Array)
    return example.weights * copy_targets(tokens)


def _copy_nats(logits: Array, example: Example) -> Sums:
    return cross_entropy(logits, example.targets) * _copy_weights(example), example.weights


def _copy_share(logits: Array, example: Example) -> Sums:
    return _copy_weights(example), example.weights


def copy_objective() -> Objective:
    """The next byte, with two further metrics: the part of the bits that copy bytes cost (summed
    over them, divided by all bytes), and their share."""
    causal = OBJECTIVES["causal_lm"]
    more = (
        Metric("copy_part", "bits per byte of all", "lower", _copy_nats, math.log(2)),
        Metric("copy_share", "share of copy bytes", "higher", _copy_share),
    )
    return causal._replace(metrics=(*causal.metrics, *more))


COPY = copy_objective()


def split_bits(scores: Mapping[str, float]) -> tuple[float, float, float, float]:
    """(all, copy, other) bits per byte, and the share of copy bytes.

    Without copy bytes, or without others, their bits are NaN.

    >>> split_bits({"bits_per_byte": 2.0, "copy_part": 0.125, "copy_share": 0.25})
    (2.0, 0.5, 2.5, 0.25)
    """
    names = "bits_per_byte", "copy_part", "copy_share"
    bits, part, share = (float(scores[name]) for name in names)
    copy = part / share if share else math.nan
    return bits, copy, (bits - part) / (1 - share) if share < 1 else math.nan, share


def probe_tokens(symbols: Sequence[int]) -> np.ndarray:
    """[ROWS, 2 HALF]: random bytes of `symbols`, then the same again.

    Bytes that a text lacks would have untrained embeddings, which a tied LM head cannot tell apart.
    """
    rows = np.random.default_rng(3).integers(len(symbols), size=(ROWS, HALF))
    return np.asarray(symbols, np.int32)[np.concatenate([rows, rows], axis=1)]


@functools.partial(jax.jit, static_argnums=0)
def probe_bits(model: Model, params: Params, tokens: Int[Array, "B T"]) -> Array:
    """Bits per byte of the second half of the probe, without its first byte, which nothing
    foretells."""
    logits = model.apply({"params": params}, tokens=tokens[:, :-1]).logits
    assert logits is not None
    nats = cross_entropy(logits[:, HALF:], tokens[:, HALF + 1 :])
    return jnp.mean(nats) / math.log(2)


@callback(every=PROBE_EVERY)
def probe(info: StepInfo) -> None:
    """Logs `probe_bits` on the most frequent bytes of the text."""
    symbols = list(bytes.fromhex(str(info.dataset.facts[FREQUENT])))
    info.log(PROBE, probe_bits(info.model, info.params, jnp.asarray(probe_tokens(symbols))))


def copy_step(curve: Mapping[int, float]) -> int:
    """The first step whose probe is below THRESHOLD; -1 if there is none (censored).

    >>> copy_step({0: 8.0, 96: 5.0, 192: 1.9, 288: 2.1})
    192
    """
    return min((step for step, bits in curve.items() if bits < THRESHOLD), default=-1)
