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
from typing import Any

import jax
import jax.numpy as jnp

from attnlab.attention import BACKENDS, explain
from attnlab.attention.jax_nn import assume_device
from attnlab.contrib import interpreted
from attnlab.heads.old.cost import cache_bytes_per_token, head_flops, head_parameters
from attnlab.heads.old.layouts import LAYOUTS
from attnlab.heads.old.project import project_heads
from attnlab.heads.old.spec import HeadSpec, absorption, weight_axes
from experiments.drawing.arrows import between_fields, fitting, maps, pairs
from experiments.drawing.layouts import layout_drawing
from experiments.drawing.plans import drawn_plans, plan_drawing
from experiments.running import launch

PATH = Path(__file__).parent.parent / "docs" / "layouts.md"
DRAWINGS = PATH.parent / "drawings"
TOKENS = 512
SIZES = {layout: HeadSpec(layout, width=512, num_heads=8) for layout in LAYOUTS}

URLS = {
    r"arXiv (\d+\.\d+)": "https://arxiv.org/abs/{}",
    r"(pbloem/former)": "https://github.com/{}",
    r"(peterbloem\.nl/blog/transformers)": "https://{}",
    "(Transformer Circuits)": "https://transformer-circuits.pub/2021/framework/index.html",
}


def page() -> str:
    """The whole page."""
    tables = numbers(), fields(), between_fields(), backends(), maps(), pairs(), fitting()
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
        "capabilities 8.0 and 9.0), `pallas_wide` a GPU.\n\n"
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
        with assume_device("gpu", float(capability or 0)), interpreted():
            answer = explain(q, k, v, implementation="dense")[backend]  # traced, so one that runs
        answers[capability] = "yes" if answer.startswith(("chosen", "could run")) else answer
    if len(set(answers.values())) == 1:
        return next(iter(answers.values()))
    return "; ".join(f"{c}: {a}" for c, a in answers.items())


def main() -> None:
    """Writes the page and the drawings."""
    PATH.write_text(page())
    DRAWINGS.mkdir(exist_ok=True)
    for name, text in drawings().items():
        (DRAWINGS / name).write_text(text)
    print(f"wrote {PATH} and {DRAWINGS}")


if __name__ == "__main__":
    launch.start(main)
