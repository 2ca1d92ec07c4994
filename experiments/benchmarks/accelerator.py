"""Suite accelerator: what attention, decoding and training cost on a GPU or TPU, beside peers.

Every head_dim is measured at the centre of the design (bfloat16, the function, causal, with
gradient, 4,096 tokens); then every case that differs from the centre in one setting, then in two,
and so on: whoever stops after twenty minutes has an answer to every question.
"""

import dataclasses
import itertools
from collections.abc import Iterator
from typing import NamedTuple

from attnlab import training
from attnlab.models import Compute
from experiments.benchmarks import decoding, train
from experiments.benchmarks.attention import Size, function_case, layer_case
from experiments.benchmarks.measure import Case

FUNCTION_PEERS = ("jax.nn", "jax.nn cudnn", "tokamax", "tokamax xla_chunked", "torch sdpa")
LAYER_PEERS = ("Linen", "jax.nn", "torch sdpa")
MOST_SECONDS = 6.0
"""Of the rounds of one case."""

BFLOAT16 = Compute(dtype="bfloat16", remat=False)
SMALL, SMALL_TRAINS = dataclasses.replace(train.SMALL_DECODER, compute=BFLOAT16), train.TRAINS
"""Trained from several seeds at once."""
TINY, TINY_TRAINS = dataclasses.replace(train.TINY_DECODER, compute=BFLOAT16), train.TINY_TRAINS
DECODER = dataclasses.replace(
    SMALL,
    vocab_size=50304,
    max_len=1024,
    width=768,
    num_layers=12,
    heads=dataclasses.replace(SMALL.heads, num_heads=12),
    ffn=dataclasses.replace(SMALL.ffn, width=3072),
)
DECODER_TRAINS = training.TrainConfig(batch_size=16, length=1024, seeds=(0,))
DTYPES, CAUSAL = ("bfloat16", "float32"), (True, False)
WORDS, MODES = ("function", "layer"), ("with gradient", "forward")


class Design(NamedTuple):
    """Sizes of attention; of the settings the first is the centre."""

    tokens: int = 16 * 1024
    """B T of every case."""
    lengths: tuple[int, ...] = (4096, 1024, 8192, 2048, 16384)
    head_dims: tuple[int, ...] = (512, 1024, 256, 128, 64)
    """All of them belong to the centre."""
    heads: int = 8
    width: int = 1024
    """Of the model, in layers."""
    most_settings: int = 5
    """In which a case may differ from the centre."""


FULL = Design()
SMALLEST = Design(32, (16,), (16, 8), heads=2, width=16, most_settings=2)
"""Everything that `FULL` does, in minutes on a CPU: it shows that the suite runs, no more."""


def attention_cases(d: Design) -> Iterator[tuple[int, Case]]:
    """(the number of settings in which it differs from the centre, case), from the centre on."""
    facets = (DTYPES, CAUSAL, WORDS, MODES, d.lengths)
    differs = lambda point: sum(v != facet[0] for v, facet in zip(point, facets, strict=True))
    for point in sorted(itertools.product(*facets), key=differs):
        if differs(point) > d.most_settings:
            break
        dtype, causal, word, mode, t = point
        for head_dim in d.head_dims:
            width = d.width if word == "layer" else 0
            size = Size(d.tokens // t, t, d.heads, head_dim, width, causal, dtype)
            of_layer = word == "layer"
            make, names = (layer_case, LAYER_PEERS) if of_layer else (function_case, FUNCTION_PEERS)
            case = make(size, mode, names)
            yield differs(point), case._replace(most_seconds=MOST_SECONDS)


def cases(tiny: bool) -> Iterator[Case]:
    """The most informative first: the centre, then training and decoding, then the rest."""
    attention = list(attention_cases(SMALLEST if tiny else FULL))
    yield from (case for distance, case in attention if not distance)
    large = (TINY, TINY_TRAINS) if tiny else (DECODER, DECODER_TRAINS)
    small = (TINY, TINY_TRAINS, 2) if tiny else (SMALL, SMALL_TRAINS, 8)
    step = train.step_case("training step of the decoder", *large, loop=False)
    caches = map(decoding.decode_case, decoding.TINY_CACHES if tiny else decoding.CACHES)
    for case in (step, train.seeds_case(*small), *caches):
        yield case._replace(most_seconds=MOST_SECONDS)
    yield from (case for distance, case in attention if distance)
