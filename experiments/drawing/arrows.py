"""Which layouts, and which fields beside them, are the same function: tables of what `convert`
answers, for the atlas.
"""

import itertools
import re
from typing import Any

import numpy as np

from attnlab.conversion.convert import convert
from attnlab.conversion.maps import MAPS
from attnlab.conversion.question import Witness
from attnlab.heads.old.layouts import LAYOUTS
from attnlab.heads.old.maps import Weights
from attnlab.heads.old.spec import HeadSpec

SMALL = {layout: HeadSpec(layout, width=12, num_heads=4) for layout in LAYOUTS}


def maps() -> str:
    """The table of exact maps."""
    words = {
        "rotary": "rotary positions",
        "qk_norm": "q/k norm",
        "cap": "key bias with a soft cap or a sink",
        "element": "gate per element",
        "extra": "extra keys",
    }
    rows = [
        f"| `{name}` | {row.takes} | {', '.join(words[b] for b in row.breaks) or '–'} |"
        for name, row in MAPS.items()
    ]
    return (
        "## Exact maps\n\n`convert` finds the shortest way through these. From "
        f"`{next(n for n, r in MAPS.items() if r.conditional)}` on they need weights\nwith a "
        "structure; `convert` looks for it.\n\n| map | what it takes | broken by |\n|---|---|---|\n"
        + "\n".join(rows)
    )


def pairs() -> str:
    """Source layout against target layout, by running `convert`."""
    rng = np.random.default_rng(0)
    lines, table = [], []
    for source, spec in SMALL.items():
        w = generic(spec, rng)
        found = {target: answer(w, spec, goal) for target, goal in SMALL.items()}
        table.append(f"| **{source}** | " + " | ".join(f[0] for f in found.values()) + " |")
        lines += [
            f"| {source} | {target} | {f[1]} |" for target, f in found.items() if target != source
        ]
    names = " | ".join(SMALL)
    return (
        "## Which layout is which\n\nEvery layout at D = 12, N = 4 and its own default sizes, with "
        "generic random weights, no rotary\npositions. *exact*: `convert` returns weights of the "
        "target (top) that are the same function as the source\n(left). Else the kind of its proof "
        "that there are none: *rank*, *permutation* (of chunks),\n*linearity* (of queries or "
        "values, in the size of their text); see `Witness`.\n\n"
        f"| | {names} |\n|---|{'---|' * len(SMALL)}\n"
        + "\n".join(table)
        + "\n\nHow, and why not. The largest difference is that of outputs and of gradients with "
        "respect to the\ninputs, relative, in float64.\n\n"
        "| source | target | maps, largest difference; or the witness |\n|---|---|---|\n"
        + "\n".join(lines)
    )


def stds(spec: HeadSpec) -> list[float]:
    """1/sqrt(fan in) of each weight."""
    return [one.fan(spec.sizes) ** -0.5 for one in spec.maps.values()]


def fitting() -> str:
    """Sources and targets whose sizes were chosen for each other."""
    rng, lines = np.random.default_rng(0), []
    for first, second, turned in FITTING:
        source, target = (
            HeadSpec(**{"width": 12, "num_heads": 4, "head_dim": 4, "value_dim": 4} | one)
            for one in (first, second)
        )
        w = {n: rng.normal(size=a) for n, a in source.shapes.items()}
        told = (
            " ".join([one["layout"], *(f"{n}={v}" for n, v in one.items() if n != "layout")])
            for one in (first, second)
        )
        row = (*told, "rotary" if turned else "–", answer(w, source, target, turned)[1])
        lines.append("| " + " | ".join(row) + " |")
    return (
        "## With sizes that fit\n\nWhat the default sizes, and the norm of a latent, keep apart. "
        "D = 12, N = 4, H = V = 4 but where told.\nRotary positions turn all of a standard key, of "
        "a latent or tied one the P numbers that all heads\nshare: no exact map is known "
        "(TransMLA, arXiv 2502.07864, has approximate ones).\n\n"
        "| source | target | positions | maps, largest difference; or why not |\n"
        "|---|---|---|---|\n" + "\n".join(lines)
    )


def _latent(width: int) -> dict:
    return {"layout": "latent", "latent_dim": width, "latent_norm": False}


def _tensor(rank: int) -> dict:
    ranks = {"query_rank": 4, "key_rank": rank, "value_rank": rank}
    return {"layout": "tensor", **ranks, "biases": "a"}


def _standard(heads: int) -> dict:
    return {"layout": "standard", "num_kv_heads": heads}


LOW_RANK: dict = {"layout": "low_rank_q", "query_latent_dim": 12, "latent_norm": False}
TIED: dict = {"layout": "grouped_tied", "head_dim": 2, "rotary_dim": 2}
FITTING: tuple[tuple[dict, dict, bool], ...] = (
    (_standard(4), _latent(32), False),
    (_standard(4), _latent(12), False),
    (_standard(2), _latent(16), False),
    (_standard(1), _latent(8), False),
    (_standard(2), _latent(16), True),
    (_latent(8) | {"rotary_dim": 2}, {"layout": "standard", "head_dim": 6}, False),
    (_standard(4), _tensor(4), False),
    (_standard(2), _tensor(2), False),
    (_standard(1), _tensor(1), False),
    (_standard(1), _tensor(1), True),
    (_tensor(2), _standard(4), False),
    (_standard(1), LOW_RANK, False),
    (LOW_RANK, _standard(1), True),
    (TIED, _standard(4), False),
    (TIED, _standard(4), True),
)


def answer(w: dict, source: HeadSpec, target: HeadSpec, rotary: bool = False) -> tuple[str, str]:
    """(a word for the table, a sentence), with no digit that may differ between machines."""
    found = convert(w, source, target, rotary=rotary)[1]
    if isinstance(found, Witness):
        broken = "; ".join(re.findall(r"\w+: not with [\w ]+", found.reason))
        if found.kind == "undecided":
            return found.kind, f"undecided: {broken or 'no map, no proof'}"
        numbers = f" {found.found}, there at most {found.allowed}" if found.kind == "rank" else ""
        return found.kind, f"{found.kind}{numbers}: {found.what}"
    worst = max(found.forward, found.gradient)
    if worst >= 1e-12:
        raise AssertionError(f"{source.layout} -> {target.layout}: differs by {worst}")
    return "exact" if found.maps else "–", " → ".join(f"`{m}`" for m in found.maps) + ", < 1e-12"


FAMILIES: dict[str, dict[str, dict[str, Any]]] = {
    "gates": {"none": {}, "head": {"gate": "head"}, "element": {"gate": "element"}},
    "sinks and extra keys": {
        "none": {},
        "sink learnt": {"sink": "learnt"},
        "sink one": {"sink": "one"},
        "extra key": {"extra_keys": 1},
    },
    "ties": {"none": {}, "kv": {"ties": "kv"}, "qk": {"ties": "qk"}, "qkv": {"ties": "qkv"}},
    "norms of q and k": {
        "none": {},
        "layer": {"qk_norm": "layer"},
        "with bias": {"qk_norm": "layer", "qk_norm_bias": True},
        "epsilon 0.01": {"qk_norm": "layer", "norm_eps": 1e-2},
    },
}
"""What the fields are of -> their values."""


def between_fields() -> str:
    """A value of a field against the others, by running `convert`."""
    rng, lines = np.random.default_rng(0), []
    for family, values in FAMILIES.items():
        for one, two in itertools.permutations(values, 2):
            source, target = (
                HeadSpec("standard", width=6, num_heads=2, **values[n]) for n in (one, two)
            )
            w = generic(source, rng)
            there, told = answer(w, source, target)
            back = "–"
            if there == "exact":
                back = answer(convert(w, source, target)[0] or {}, target, source)[1]
            lines.append(f"| {family} | {one} | {two} | {told} | {back} |")
    return (
        "## Field against field\n\nOne field changes, in `standard` at D = 6, N = 2 with generic "
        "random weights and no rotary positions. Where\nthere are weights of the target, the last "
        "column goes back from them: that takes the structure which they\nhave. `never_sink` is "
        "exact to the precision of a dtype, all others in exact numbers.\n\n"
        "| field | source | target | maps, largest difference; or the witness | back |\n"
        "|---|---|---|---|---|\n" + "\n".join(lines)
    )


def generic(spec: HeadSpec, rng: np.random.Generator) -> Weights:
    """Random weights of standard deviation 1/sqrt(fan in)."""
    return {
        n: rng.normal(size=a) * s for (n, a), s in zip(spec.shapes.items(), stds(spec), strict=True)
    }
