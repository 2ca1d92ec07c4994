"""Suite accelerator: what attention, decoding and training cost on a GPU or TPU, beside peers.

Every width stands at the middle of the design (bfloat16, the function, causal, with gradient,
4,096 tokens); then comes what differs from there in one thing, then in two, and so on: whoever
stops after twenty minutes has every question answered once. Of each case all `BACKENDS` are rows,
those that refuse with their reason, and so are peers that fail.
"""

import dataclasses
import functools
import gc
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from attnlab import training
from attnlab.attention import dot_product_attention, explain
from attnlab.heads import Standard, explain_heads, init, multi_head_attention
from attnlab.models import Compute, ModelConfig
from attnlab.nested import JSON
from attnlab.sharing import Params
from experiments.benchmarks import train
from experiments.benchmarks.attention import (
    OURS,
    Size,
    chosen_in,
    entries,
    peak_bytes,
    quick_key,
)
from experiments.benchmarks.decoding import decode_case
from experiments.benchmarks.ledger import DeviceLostError
from experiments.benchmarks.measure import Case, Entry, measure, refuse
from experiments.benchmarks.peers import attention as peers

FUNCTION_PEERS = ("jax.nn", "jax.nn cudnn", "tokamax", "tokamax xla_chunked", "torch sdpa")
LAYER_PEERS = ("Linen", "jax.nn", "torch sdpa")
MOST_SECONDS = 6.0
"""Of the rounds of one case; where they would take longer there are fewer."""


SMALL_DECODER = dataclasses.replace(
    train.SMALL_DECODER, compute=Compute(dtype="bfloat16", remat=False)
)


class TrainingDesign(NamedTuple):
    """The trainings that are measured: model and training of each."""

    decoder: tuple[ModelConfig, training.TrainConfig] = (
        dataclasses.replace(
            SMALL_DECODER,
            vocab_size=50304,
            max_len=1024,
            width=768,
            num_layers=12,
            heads=dataclasses.replace(SMALL_DECODER.heads, num_heads=12),
            ffn=dataclasses.replace(SMALL_DECODER.ffn, width=3072),
        ),
        training.TrainConfig(batch_size=16, length=1024, seeds=(0,)),
    )
    small: tuple[ModelConfig, training.TrainConfig] = (SMALL_DECODER, train.TRAINS)
    """Trained from several seeds at once."""
    seeds: int = 8


class Design(NamedTuple):
    """What is measured; of each tuple the first stands in the middle."""

    tokens: int = 16 * 1024
    """B T of every case."""
    lengths: tuple[int, ...] = (4096, 1024, 8192, 2048, 16384)
    widths: tuple[int, ...] = (512, 1024, 256, 128, 64)
    """Of a head: all of them are in the middle."""
    modes: tuple[str, ...] = ("with gradient", "forward")
    words: tuple[str, ...] = ("function", "layer")
    causal: tuple[bool, ...] = (True, False)
    dtypes: tuple[str, ...] = ("bfloat16", "float32")
    heads: int = 8
    width: int = 1024
    """Of the model, in layers and in decoding."""
    caches: tuple[Size, ...] = (
        Size(16, 4096, 8, 1024, 1024, dtype="bfloat16"),
        Size(16, 16384, 8, 1024, 1024, dtype="bfloat16"),
    )
    """How full they are in decoding."""
    training: TrainingDesign = TrainingDesign()
    most_apart: int = 5
    """Points that differ from the middle in more things are left out."""


FULL = Design()

_TINY_DECODER = dataclasses.replace(
    SMALL_DECODER,
    vocab_size=11,
    max_len=8,
    width=8,
    num_layers=2,
    heads=dataclasses.replace(SMALL_DECODER.heads, num_heads=2),
    ffn=dataclasses.replace(SMALL_DECODER.ffn, width=16),
)
_TINY_STEPS = training.TrainConfig(
    batch_size=4, length=8, schedule=training.ScheduleConfig(warmup_steps=1), seeds=(0,)
)
TINY = Design(
    tokens=32,
    lengths=(16,),
    widths=(16, 8),
    heads=2,
    width=16,
    caches=(Size(2, 16, 2, 16, 16, dtype="bfloat16"),),
    training=TrainingDesign(
        decoder=(_TINY_DECODER, _TINY_STEPS), small=(_TINY_DECODER, _TINY_STEPS), seeds=2
    ),
    most_apart=2,
)
"""Everything that `FULL` does, in minutes on a CPU: it shows that the suite runs, no more."""
DESIGNS = {"full": FULL, "tiny": TINY}


class Setting(NamedTuple):
    """One point of a design."""

    size: Size
    word: str
    mode: str
    distance: int
    """In how many things it differs from the middle."""


def settings(design: Design) -> list[Setting]:
    """Every point, from the middle outwards."""
    d, found = design, []
    facets = (d.dtypes, d.causal, d.words, d.modes, d.lengths)
    for dtype, causal, word, mode, t in itertools.product(*facets):
        distance = sum(
            value != facet[0]
            for value, facet in zip((dtype, causal, word, mode, t), facets, strict=True)
        )
        if distance > d.most_apart:
            continue
        for h in d.widths:
            width = d.width if word == "layer" else 0
            size = Size(d.tokens // t, t, d.heads, h, width, causal, dtype)
            found.append(Setting(size, word, mode, distance))
    return sorted(found, key=lambda setting: setting.distance)


def cases(design: Design = FULL) -> Iterator[Case]:
    """The most telling first: the middle, then decoding and training, then the rest."""
    places = settings(design)
    yield from (attention_case(place) for place in places if not place.distance)
    yield train.step_case(
        "training step of the decoder", *design.training.decoder, train.LINEN[:1], lenient=True
    )
    yield train.seeds_case(*design.training.small, design.training.seeds)
    yield from map(decode_case, design.caches)
    yield from (attention_case(place) for place in places if place.distance)


def attention_case(place: Setting) -> Case:
    """A function or a layer with each of our backends, beside peers."""
    size, word, mode, _ = place
    build = functools.partial(_of_layer if word == "layer" else _of_function, size, mode)
    about = size._asdict() | {"word": word, "mode": mode, "flops": attention_flops(place)}
    name = ", ".join([f"{word} {size.labels()[0]} {size.labels()[1]}", *size.labels()[2:], mode])
    return Case(name, size.B * size.T, build, about=about)


def attention_flops(place: Setting) -> float:
    """Of scores and values alone, as FlashAttention counts (Dao 2023, arXiv 2307.08691, section
    4.1): a causal mask halves them, a backward pass takes 2.5 times the forward one."""
    size = place.size
    forward = 4.0 * size.B * size.N * size.T**2 * size.H / (2 if size.is_causal else 1)
    return forward * (3.5 if place.mode == "with gradient" else 1.0)


def _of_function(size: Size, mode: str) -> list[Entry]:
    shape = (size.B, size.T, size.N, size.H)
    normal = lambda key: jax.random.normal(key, shape, size.dtype)
    q, k, v = jax.jit(lambda: tuple(map(normal, jax.random.split(quick_key(0), 3))))()
    call = functools.partial(dot_product_attention, is_causal=size.is_causal)
    own, refused = by_backend(explain(q, k, v, is_causal=size.is_causal), call)
    others = {n: functools.partial(peers.FUNCTIONS[n], size.is_causal) for n in FUNCTION_PEERS}
    return entries(own, others, (q, k, v), mode, "", lenient=True) + refused


def _of_layer(size: Size, mode: str) -> list[Entry]:
    """Backends under the order of contraction that is chosen, and the other orders."""
    layout = Standard(width=size.D, num_heads=size.N, head_dim=size.H)

    @jax.jit
    def start() -> tuple[Params, Array]:
        w = init(quick_key(0), layout, dtype=size.dtype)
        return w, jax.random.normal(quick_key(1), (size.B, size.T, size.D), size.dtype)

    w, x = start()
    call = functools.partial(multi_head_attention, layout=layout, is_causal=size.is_causal)
    would = explain_heads(layout, x, is_causal=size.is_causal)
    order = would["chosen"]["order"]
    ordered = functools.partial(call, order=order)
    own, refused = by_backend(would["implementation"], ordered, f"{OURS} {order},")
    for other, cost in would["order"].items():
        if other != order and isinstance(cost, int):
            own[f"{OURS} {other}, as chosen"] = functools.partial(call, order=other)
    others = {n: functools.partial(peers.LAYERS[n], layout, size.is_causal) for n in LAYER_PEERS}
    return entries(own, others, (w, x), mode, "", lenient=True) + refused


def by_backend(
    would: Mapping[str, object], call: Callable, title: str = OURS
) -> tuple[dict[str, Callable], list[Entry]]:
    """What `explain` says -> our calls by name, the chosen one first, and rows that refuse."""
    first = chosen_in(would)
    able = [first, *(n for n, word in would.items() if word == "could run")]
    own: dict[str, Callable] = {
        f"{OURS} {n}": functools.partial(call, implementation=n) for n in able
    }
    return own, [refuse(f"{title} {n}", str(would[n]), ours=True) for n in would if n not in able]


def work(case: Case, rounds: int) -> JSON:
    """What the ledger keeps of a case. Raises DeviceLostError where the device answers no more."""
    try:
        measured = measure(case.build(), rounds, most_seconds=MOST_SECONDS)
    finally:
        gc.collect()  # the arrays of a case are many GiB
        _check_device()
    rows = [one.to_dict() for one in measured]
    return {"tokens": case.tokens, "rows": rows, "peak_bytes": peak_bytes()}


def _check_device() -> None:
    """A kernel that reads where it must not leaves a GPU that fails whatever it is asked."""
    try:
        jax.block_until_ready(jnp.zeros(8) + 1)
    except Exception as error:
        raise DeviceLostError(
            f"the device answers no more ({error}); the same command goes on"
        ) from error
