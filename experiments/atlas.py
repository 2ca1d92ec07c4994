"""The layout atlas, docs/layouts.md, and docs/drawings: python -m experiments.atlas

Everything on the page is asked of the code: formulas from the axes of the weights, backends from
their own refusals, and the table of layout against layout from `convert` on generic weights. Half
a minute on 2 cores; a test fails while the page is not what this makes.
"""

import dataclasses
import functools
import math
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from attnlab.attention.core import BACKENDS, explain
from attnlab.attention.wide import interpreted
from attnlab.conversion.convert import convert
from attnlab.conversion.maps import MAPS
from attnlab.conversion.witness import Witness
from attnlab.heads.cost import cache_bytes_per_token, head_flops, head_parameters
from attnlab.heads.layouts import LAYOUTS
from attnlab.heads.project import project_heads
from attnlab.heads.spec import HeadSpec, absorption, weight_axes
from experiments.drawing.layouts import layout_drawing
from experiments.drawing.plans import drawn_plans, plan_drawing
from experiments.running import launch

PATH = Path(__file__).parent.parent / "docs" / "layouts.md"
DRAWINGS = PATH.parent / "drawings"
TOKENS = 512
SIZES = {layout: HeadSpec(layout, width=512, num_heads=8) for layout in LAYOUTS}
SMALL = {layout: HeadSpec(layout, width=12, num_heads=4) for layout in LAYOUTS}

URLS = {
    r"arXiv (\d+\.\d+)": "https://arxiv.org/abs/{}",
    r"(pbloem/former)": "https://github.com/{}",
    r"(peterbloem\.nl/blog/transformers)": "https://{}",
    "(Transformer Circuits)": "https://transformer-circuits.pub/2021/framework/index.html",
}


def page() -> str:
    """The whole page."""
    tables = numbers(), fields(), backends(), maps(), pairs(), fitting()
    return "\n\n".join([INTRODUCTION, *map(section, LAYOUTS), *tables]) + "\n"


INTRODUCTION = """\
# The layout atlas

How heads get q, k and v from x, layout by layout: what it costs, and which layouts are the same
function. This page is made by `python -m experiments.atlas`; a test fails while it is stale.

    out = sum_n softmax(scale q_n k_n^T) v_n W_O,n

x asks, y gives the keys, z the values (self-attention: all the same). x_n is chunk n of x, its
columns n C to (n+1) C.

D width, N heads, K key/value heads, H width of a head, V value width of a head, C = D/N, E and W
widths of y and z, O output width, R shared key width, M and Q widths of the latents of keys and
queries, P rotary part, X, Y and Z ranks of queries, keys and values, T tokens. Sizes left out are
D/N for H and V, D for E, W, O, R and Q, 4 H for M and H/2 for P; `low_rank_q` has K = 1, H = 2 D/N
and Q = D/2, `grouped_tied` H = P = V/2, `tensor` X = 6 and Y = Z = 2. `turn` is rotary positions;
where an equation has none, they turn all of q and k (not of `absorbed`). Head sizes, head counts
and the width are independent: what a head *reads* (all of x or its chunk) is the layout, how *wide*
it is a size.
Numbers are for D = 512, N = 8, T = 512, one text, no biases.

In the drawings (D = 64, N = 4, so C = 16) a line is a weight and a column a head. The bar above is
what there is to read, filled where the head reads it, the bar below what it makes, to scale, and
the matrix stands between. A colour is a set of weights; grey is one set that all heads use."""


def drawings() -> dict[str, str]:
    """File name -> drawing, of every layout and of the plans."""
    layouts = {f"layout_{layout}.svg": layout_drawing(layout) for layout in LAYOUTS}
    return layouts | {f"plan_{n}.svg": plan_drawing(text) for n, text in drawn_plans().items()}


def section(layout: str) -> str:
    """One layout: equation, weights, formulas, source."""
    spec, row = SIZES[layout], LAYOUTS[layout]
    chain = [layout, *(step.spec.layout for step in absorption(spec))]
    weights = ", ".join(f"`{n}` [{', '.join(a)}]" for n, a in weight_axes(spec))
    counted, flops = products(spec), products(spec, applied=True)
    attended = f"N T ({row.scores} + {row.values})"
    lines = [
        ("equation", f"`{row.equation}`"),
        ("weights", weights),
        ("parameters", f"{total(counted)} = {evaluate(counted, spec):,}"),
        ("FLOPs per token", f"2 ({total(flops)} + {attended}) = {head_flops(spec, TOKENS):,}"),
        ("rank of a head's scores", f"at most min({row.rank}) = {rank(spec)}"),
        (
            "cache",
            f"{cached(spec)} numbers = {cache_bytes_per_token(spec):,} bytes a token (float32)",
        ),
        ("same function as", " → ".join(chain) if len(chain) > 1 else "end of the chain"),
        ("source", link(row.source)),
    ]
    drawn = f"![{layout}: what each head reads](drawings/layout_{layout}.svg)"
    table = "\n".join(f"| {a} | {b} |" for a, b in lines)
    return f"## {layout}\n\n{drawn}\n\n| | |\n|---|---|\n{table}"


def products(spec: HeadSpec, applied: bool = False) -> list[str]:
    """Each weight as a product of letters; as often as it is applied to a token, or stored once."""
    maps = spec.maps.values()
    if not applied:
        return [one.axes for one in maps]
    beside = [text.split(": ")[1].replace(" ", "") for text in LAYOUTS[spec.layout].products]
    return [one.products for one in maps if one.products] + beside


def total(terms: list[str]) -> str:
    """Letters as text: DNH + DNH -> 2 D N H."""
    counts = {term: terms.count(term) for term in terms}
    return " + ".join(" ".join([*([str(c)] * (c > 1)), *t]) for t, c in counts.items())


def evaluate(terms: list[str], spec: HeadSpec) -> int:
    """The sum of the products at the sizes of `spec`."""
    return sum(math.prod(spec.sizes[a] for a in term) for term in terms)


def rank(spec: HeadSpec) -> int:
    """The largest rank that the scores of a head can have."""
    return min(map(spec.size, LAYOUTS[spec.layout].rank.split(", ")))


def cached(spec: HeadSpec) -> str:
    """What decoding keeps, in letters."""
    return " + ".join(LAYOUTS[spec.layout].cache.values())


def link(source: str) -> str:
    """A source with the address that it names."""
    for pattern, url in URLS.items():
        if found := re.search(pattern, source):
            return f"[{source}]({url.format(found[1])})"
    return source


def numbers() -> str:
    """Every layout beside the others."""
    rows = []
    for layout, spec in SIZES.items():
        cost = head_parameters(spec), head_flops(spec, TOKENS), cache_bytes_per_token(spec)
        rows.append(f"| {layout} | " + " | ".join(f"{c:,}" for c in cost) + f" | {rank(spec)} |")
    return (
        f"## Side by side\n\nD = 512, N = 8, T = {TOKENS}, no biases, all other sizes left out. "
        "FLOPs are those of the\nweights as they are; `multi_head_attention` runs the cheapest "
        "layout of the chain (`contraction_orders`).\n\n"
        "| layout | parameters | FLOPs per token | cache bytes per token | rank of scores |\n"
        "|---|--:|--:|--:|--:|\n" + "\n".join(rows)
    )


BESIDE: dict[str, tuple[dict[str, Any], str, str]] = {
    'gate="head"': (
        {"gate": "head"},
        "each head times sigmoid(x g_n), one number",
        "Qiu et al. 2025, arXiv 2505.06708",
    ),
    'gate="element"': (
        {"gate": "element"},
        "each head times sigmoid(x G_n), V numbers",
        "Qiu et al. 2025, arXiv 2505.06708",
    ),
    'sink="learnt"': (
        {"sink": "learnt"},
        "exp(s_n) in the sum of each softmax",
        "gpt-oss, arXiv 2508.10925",
    ),
    'sink="one"': ({"sink": "one"}, "1 in the sum of each softmax", "torch's `add_zero_attn`"),
    "extra_keys=1": (
        {"extra_keys": 1},
        "a learnt key and value per key head, which no input has",
        "torch's `bias_k`, `bias_v`",
    ),
    'ties="kv"': ({"ties": "kv"}, "W_V is W_K", "arXiv 2606.04032"),
    'ties="qk"': ({"ties": "qk"}, "W_K is W_Q", "arXiv 2606.04032"),
    'ties="qkv"': ({"ties": "qkv"}, "one map", "arXiv 2606.04032"),
    'qk_norm="layer"': (
        {"qk_norm": "layer"},
        "a norm of each head's q and k, with `qk_norm_bias` a bias too",
        "Dehghani et al. 2023, arXiv 2302.05442",
    ),
}
"""What a person writes -> fields, what they do, where they come from."""


def fields() -> str:
    """What a spec may have beside its layout: its cost in `standard`, and which layouts cannot."""
    rows, plain = [], SIZES["standard"]
    for told, (asked, what, source) in BESIDE.items():
        spec = dataclasses.replace(plain, **asked)
        more = head_parameters(spec) - head_parameters(plain)
        cost = f"{more:+,} | {cache_bytes_per_token(spec):,}"
        without = ", ".join(n for n in LAYOUTS if not takes(n, asked)) or "–"
        rows.append(f"| `{told}` | {what} | {cost} | {without} | {link(source)} |")
    return (
        "## Beside a layout\n\nFields that most layouts take. Parameters are those more, or fewer, "
        "than `standard` has, bytes a token those of\nits cache without rotary positions, which "
        "keep tied keys and values apart.\n\n"
        "| field | what it does | parameters | cache bytes | not for | source |\n"
        "|---|---|--:|--:|---|---|\n" + "\n".join(rows)
    )


def takes(layout: str, asked: dict[str, Any]) -> bool:
    """Is there such a spec?"""
    try:
        dataclasses.replace(SIZES[layout], **asked)
    except ValueError:
        return False
    return True


def backends() -> str:
    """Which backend can run the q, k and v of each layout."""
    # `edges` is a matter of the mask, not of sizes; no device chooses the others.
    rows, kernels = [], [n for n in BACKENDS if n not in ("edges", "tokamax", "splash")]
    for layout, spec in SIZES.items():
        cells = [can_run(spec, name) for name in kernels]
        rows.append(f"| {layout} | " + " | ".join(cells) + " |")
    names = [f"`{n}`" + " (bfloat16)" * (n == "cudnn") for n in kernels]
    return (
        "## Backends\n\nWhat can run q, k and v of these sizes, forward and backward, without "
        "dropout, bias or probabilities.\n`cudnn` needs an NVIDIA GPU (asked are compute "
        "capabilities 8.0 and 9.0), `wide` a GPU.\n\n"
        f"| layout | {' | '.join(names)} |\n|---|{'---|' * len(names)}\n" + "\n".join(rows)
    )


def can_run(spec: HeadSpec, backend: str) -> str:
    """ "yes", or the backend's own reason, whatever this machine is."""
    dtype = jnp.bfloat16 if backend == "cudnn" else jnp.float32
    x = jax.ShapeDtypeStruct((1, TOKENS, spec.width), dtype)
    w = {name: jax.ShapeDtypeStruct(shape, dtype) for name, shape in spec.shapes.items()}
    q, k, v = jax.eval_shape(functools.partial(project_heads, spec=spec), w, x)
    answers = {}
    for capability in ("8.0", "9.0") if backend == "cudnn" else ("",):
        device = SimpleNamespace(platform="gpu", compute_capability=capability)
        asked = mock.patch("jax.devices", return_value=[device])
        gpu = mock.patch("attnlab.attention.fused._trouble", return_value=None)
        with asked, gpu, interpreted():
            answer = explain(q, k, v, implementation="dense")[backend]  # traced, so one that runs
        answers[capability] = "yes" if answer.startswith(("chosen", "could run")) else answer
    if len(set(answers.values())) == 1:
        return next(iter(answers.values()))
    return "; ".join(f"{c}: {a}" for c, a in answers.items())


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
        w = {
            n: rng.normal(size=a) * s
            for (n, a), s in zip(spec.shapes.items(), stds(spec), strict=True)
        }
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


def main() -> None:
    """Writes the page and the drawings."""
    PATH.write_text(page())
    DRAWINGS.mkdir(exist_ok=True)
    for name, text in drawings().items():
        (DRAWINGS / name).write_text(text)
    print(f"wrote {PATH} and {DRAWINGS}")


if __name__ == "__main__":
    launch.start(main)
