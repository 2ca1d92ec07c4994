"""Which layouts, and which options of a layout, are the same function: tables of what `convert`
answers, for the atlas.
"""

import csv
import functools
import io
import itertools
from typing import NamedTuple

import numpy as np

from attnlab.heads import (
    LAYOUTS,
    Extra,
    ExtraKeys,
    Gate,
    GroupedTied,
    HeadNorm,
    Latent,
    Layout,
    LowRankQuery,
    Sink,
    Standard,
    TensorProduct,
)
from attnlab.heads.layout import all_weights
from attnlab.transforms import Conversion, NotEquivalent, convert
from attnlab.transforms.measure import Floats
from attnlab.transforms.steps import STEPS
from attnlab.transforms.steps_structured import STRUCTURED

NAMES = (
    "standard", "wide", "narrow", "narrow_tied", "alt", "collaborative", "bilinear", "absorbed",
    "two_stage", "low_rank_query", "tensor_product", "grouped_tied", "latent", "latent_absorbed",
    "differential",
)  # fmt: skip
SMALL = {name: LAYOUTS[name](width=12, num_heads=4) for name in NAMES}


def random_params(layout: Layout, rng: np.random.Generator) -> dict[str, Floats]:
    """Weights of standard deviation 1/sqrt(fan-in), biases and gates too."""
    made = {}
    for name, weight in all_weights(layout).items():
        fan_in = np.prod([layout.size(axis) for axis in weight.reads] or [1])
        made[name] = rng.normal(size=layout.shape(weight)) / np.sqrt(fan_in)
    return made


class Answer(NamedTuple):
    """What `convert` answers, without a digit that may differ between machines."""

    word: str
    """For a cell of a table"""
    text: str
    params: dict[str, Floats]


def answer(
    params: dict[str, Floats], layout: Layout, target: Layout, rotary: bool = False
) -> Answer:
    """What `convert` answers."""
    found = convert(params, layout, target, rotary=rotary)  # type: ignore[arg-type]  # NumPy arrays
    if isinstance(found, NotEquivalent):
        fact = found.reason.split(";")[0]
        return Answer(found.kind, f"{found.kind}: {fact}", {})
    if not isinstance(found, Conversion):
        return Answer("undecided", "undecided: no chain of steps, no proof", {})
    worst = max(found.forward_error, found.gradient_error)
    if worst >= 1e-12:
        raise AssertionError(f"{layout} -> {target}: differs by {worst}")
    steps = " → ".join(f"`{step}`" for step in found.steps)
    made = {name: np.asarray(a) for name, a in found.params.items()}
    return Answer("exact" if found.steps else "–", f"{steps}, < 1e-12", made)


def steps() -> str:
    """The table of conversion steps."""
    rows = []
    for step in STEPS[1:] + STRUCTURED:  # the first is `rewrite`, which takes the name of a layout
        first = (step.__doc__ or "").split("\n\n")[0]
        needs = "structure" if step in STRUCTURED else "–"
        rows.append(f"| `{step.__name__}` | {' '.join(first.split()).rstrip('.')} | {needs} |")
    return "\n".join(rows)


@functools.cache
def _answers() -> dict[tuple[str, str], Answer]:
    """(source, target) -> what `convert` answers for random weights."""
    rng, found = np.random.default_rng(0), {}
    # A differential head has two softmax distributions: no step leads to one that has one.
    small = {name: layout for name, layout in SMALL.items() if name != "differential"}
    for source, layout in small.items():
        params = random_params(layout, rng)
        for name, target in small.items():
            found[source, name] = answer(params, layout, target)
    return found


def sources() -> list[str]:
    """The layouts that are compared."""
    return list(dict.fromkeys(source for source, _ in _answers()))


def pairs() -> str:
    """Source layout against target layout, by running `convert`."""
    found = _answers()
    return "\n".join(
        f"| **{source}** | " + " | ".join(found[source, name].word for name in sources()) + " |"
        for source in sources()
    )


def pair_table() -> str:
    """Every pair with its steps or proof, as CSV. "< 1e-12" bounds the largest relative difference
    of outputs and of gradients with respect to the inputs, in float64."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(("source", "target", "answer", "steps and largest difference, or the proof"))
    for (source, target), one in _answers().items():
        if one.word != "–":
            writer.writerow((source, target, one.word, one.text.replace("`", "")))
    return file.getvalue()


def _standard(num_kv_heads: int, head_dim: int = 4) -> Layout:
    return Standard(
        width=12, num_heads=4, num_kv_heads=num_kv_heads, head_dim=head_dim, value_dim=4
    )


def _latent(latent_dim: int) -> Layout:
    return Latent(
        width=12, num_heads=4, head_dim=4, value_dim=4, latent_dim=latent_dim, latent_norm=False
    )


def _tensor_product(rank: int) -> Layout:
    return TensorProduct(
        width=12, num_heads=4, head_dim=4, value_dim=4, query_rank=4, key_rank=rank,
        value_rank=rank, biases=("factors",),
    )  # fmt: skip


LOW_RANK = LowRankQuery(
    width=12, num_heads=4, head_dim=4, value_dim=4, query_latent_dim=12, latent_norm=False
)
TIED = GroupedTied(width=12, num_heads=4, head_dim=2, value_dim=4, rotary_dim=2)
MATCHING: tuple[tuple[Layout, Layout, bool], ...] = (
    (_standard(4), _latent(32), False),
    (_standard(4), _latent(12), False),
    (_standard(2), _latent(16), False),
    (_standard(1), _latent(8), False),
    (_standard(2), _latent(16), True),
    (_latent(8), _standard(4, head_dim=6), False),
    (_standard(4), _tensor_product(4), False),
    (_standard(2), _tensor_product(2), False),
    (_standard(1), _tensor_product(1), False),
    (_standard(1), _tensor_product(1), True),
    (_tensor_product(2), _standard(4), False),
    (_standard(1), LOW_RANK, False),
    (LOW_RANK, _standard(1), True),
    (TIED, _standard(4), False),
    (TIED, _standard(4), True),
)
"""Source, target, rotary positions."""


def matching_sizes() -> str:
    """Sources and targets whose sizes were chosen for each other."""
    rng, lines = np.random.default_rng(0), []
    for layout, target, rotary in MATCHING:
        found = answer(random_params(layout, rng), layout, target, rotary)
        positions = "rotary" if rotary else "–"
        lines.append(f"| `{layout!r}` | `{target!r}` | {positions} | {found.text} |")
    return "\n".join(lines)


def _options(*extras: Extra, **fields: object) -> Layout:
    return Standard(width=6, num_heads=2, extras=extras, **fields)  # type: ignore[arg-type]


OPTIONS: dict[str, dict[str, Layout]] = {
    "gates": {"none": _options(), "head": _options(Gate()), "element": _options(Gate("element"))},
    "sinks and extra keys": {
        "none": _options(),
        "learnt sink": _options(Sink()),
        "sink of 0": _options(Sink(learnt=False)),
        "extra key": _options(ExtraKeys(1)),
    },
    "ties": {
        "none": _options(),
        "kv": _options(tie="kv"),
        "qk": _options(tie="qk"),
        "qkv": _options(tie="qkv"),
    },
    "norms of q and k": {
        "none": _options(),
        "layer": _options(qk_norm=HeadNorm("layer")),
        "with bias": _options(qk_norm=HeadNorm("layer", bias=True)),
        "epsilon 0.01": _options(qk_norm=HeadNorm("layer"), norm_eps=1e-2),
    },
}


def options() -> str:
    """One value of an option against the others, by running `convert`."""
    rng, lines = np.random.default_rng(0), []
    for option, values in OPTIONS.items():
        for one, two in itertools.permutations(values, 2):
            found = answer(random_params(values[one], rng), values[one], values[two])
            back = answer(found.params, values[two], values[one]).text if found.params else "–"
            lines.append(f"| {option} | {one} | {two} | {found.text} | {back} |")
    return "\n".join(lines)
