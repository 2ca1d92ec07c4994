"""The tables of docs/reference/layouts.md; `python -m experiments.reference` writes them.

Everything in them is computed: formulas from the axes of the weights, backends from their own
refusals.
"""

import inspect
import math
import re
from collections import Counter
from collections.abc import Iterable
from typing import Any

import jax

from attnlab import heads
from attnlab.attention import BACKENDS, explain
from attnlab.attention.jax_nn import assume_device
from attnlab.heads import LAYOUTS, Layout, cache_bytes_per_token, cache_shapes, num_parameters
from attnlab.heads.cost import flops_per_token
from attnlab.heads.weights import Axes
from attnlab.report.page import table

TOKENS = 512
NAMES = (
    "standard", "wide", "narrow", "narrow_tied", "alt", "collaborative", "bilinear", "absorbed",
    "two_stage", "low_rank_query", "tensor_product", "grouped_tied", "latent", "latent_absorbed",
    "differential",
)  # fmt: skip
EXAMPLES = {name: LAYOUTS[name](width=512, num_heads=8) for name in NAMES}
LETTERS = {
    "width": "D", "num_heads": "N", "num_kv_heads": "K", "head_dim": "H", "value_dim": "V",
    "slice_width": "C", "key_width": "E", "value_width": "W", "out_width": "O", "latent_dim": "M",
    "query_latent_dim": "Q", "query_width": "Q", "rotary_dim": "P", "query_rank": "X",
    "key_rank": "Y", "value_rank": "Z", "num_score_maps": "N", "queries_per_key": "G",
}  # fmt: skip
"""Field or property of a layout -> its letter."""
EXTRAS = (
    heads.Gate(), heads.Gate("element"), heads.Sink(), heads.Sink(learnt=False),
    heads.ExtraKeys(), heads.LearntSoftCap(), heads.MixtureOfHeads(),
)  # fmt: skip
OPTIONS: tuple[dict[str, Any], ...] = (
    *({"extras": (extra,)} for extra in EXTRAS),
    *({"tie": tie} for tie in ("kv", "qk", "qkv")),
    {"qk_norm": heads.HeadNorm("layer")},
)
"""Fields that most layouts have."""


def parts() -> dict[str, str]:
    """What is made of the page."""
    return {
        "layouts": "\n\n".join(map(section, EXAMPLES.values())),
        "numbers": numbers(),
        "options": options(),
        "backends": backends(),
    }


def letters(axes: Axes) -> str:
    """Axes as text.

    >>> letters(("width", "num_heads", "head_dim"))
    'D N H'
    """
    return " ".join(str(LETTERS.get(str(axis), axis)) for axis in axes)


def section(layout: Layout) -> str:
    """One layout: equation, weights, formulas, source."""
    forms = [layout.name, *(step.layout.name for step in layout.chain[0])]
    weights = {name: letters(weight.axes) for name, weight in layout.all_weights.items()}
    scores = f"{layout.num_score_maps} T ({layout.score_width} + {layout.head_width})"
    cache = sum(map(math.prod, cache_shapes(layout).values()))
    lines = [
        ("equation", f"`{layout.equation}`"),
        ("weights", ", ".join(f"`{n}` [{axes.replace(' ', ', ')}]" for n, axes in weights.items())),
        ("parameters", f"{total(weights.values())} = {num_parameters(layout):,}"),
        ("FLOPs per token",
         f"2 ({products(layout)} + {scores}) = {flops_per_token(layout, TOKENS):,}"),
        ("rank of a head's scores", f"at most min({layout.rank}) = {rank(layout)}"),
        ("cache", f"{cache} numbers = {cache_bytes_per_token(layout):,} bytes a token (float32)"),
        ("same function as", " → ".join(forms) if len(forms) > 1 else "end of the chain"),
        ("source", link(layout.source)),
    ]  # fmt: skip
    drawn = f"![{layout.name}: what each head reads](../drawings/layout_{layout.name}.svg)"
    return f"## {layout.name}\n\n{drawn}\n\n" + table(("", ""), lines)


def total(terms: Iterable[str]) -> str:
    """The sum of products: DNH, DNH -> 2 DNH."""
    counts = Counter(terms)
    return " + ".join(f"{count} {text}" if count > 1 else text for text, count in counts.items())


def products(layout: Layout) -> str:
    """Multiply-adds per token of the weights, and of products that involve none."""
    applied = [
        letters(weight.axes + weight.tied_axes)
        for weight in layout.all_weights.values()
        if weight.in_axes
        for _ in weight.stages
    ]
    others = sum(layout.extra_multiply_adds().values())
    return total(applied) + (f" + {others}" if others else "")


def rank(layout: Layout) -> int:
    """The largest rank that the scores of a head can have."""
    sums = [bound.split(" + ") for bound in layout.rank.split(", ")]
    return min(sum(map(layout.size, axes)) for axes in sums)


def link(source: str) -> str:
    """A source with the address of the paper that it names."""
    found = re.search(r"arXiv (\d+\.\d+)", source)
    return f"[{source}](https://arxiv.org/abs/{found[1]})" if found else source


def numbers() -> str:
    """Every layout beside the others."""
    rows = []
    for name, layout in EXAMPLES.items():
        sizes = flops_per_token(layout, TOKENS), cache_bytes_per_token(layout)
        costs = [f"{cost:,}" for cost in (num_parameters(layout), *sizes)]
        rows.append([name, *costs, str(rank(layout))])
    header = ("layout", "parameters", "FLOPs per token", "cache bytes per token", "rank of scores")
    return table(header, rows, ["---", *["--:"] * 4])


def options() -> str:
    """The cost of each option in `standard`, and which layouts cannot have it."""
    rows, plain = [], EXAMPLES["standard"]
    for fields in OPTIONS:
        [(field, value)] = fields.items()
        [shown] = value if isinstance(value, tuple) else [value]
        what = "" if isinstance(shown, str) else (inspect.getdoc(shown) or "").partition("\n")[0]
        layout = LAYOUTS["standard"](width=512, num_heads=8, **fields)
        more = num_parameters(layout) - num_parameters(plain)
        without = ", ".join(name for name in NAMES if not can_have(name, fields)) or "–"
        costs = f"{more:+,}", f"{cache_bytes_per_token(layout):,}"
        rows.append([f"`{field}={value!r}`", what, *costs, without])
    header = ("option", "what it does", "parameters", "cache bytes", "not for")
    return table(header, rows, ["---", "---", "--:", "--:", "---"])


def can_have(name: str, fields: dict[str, Any]) -> bool:
    """Can the layout of this name have these fields?"""
    try:
        LAYOUTS[name](width=512, num_heads=8, **fields)
    except (TypeError, ValueError):
        return False
    return True


def backends() -> str:
    """Which backend can run the q, k and v of each layout."""
    # `edges` depends on the mask, not on sizes; no device chooses the others.
    kernels = [n for n in BACKENDS if n not in ("edges", "splash")]
    names = [f"`{n}`" + " (bfloat16)" * (n == "cudnn") for n in kernels]
    rows = [[name, *(can_run(layout, n) for n in kernels)] for name, layout in EXAMPLES.items()]
    return table(("layout", *names), rows)


def can_run(layout: Layout, backend: str) -> str:
    """ "yes", or the backend's own reason on a GPU of compute capability 9.0."""
    dtype = "bfloat16" if backend == "cudnn" else "float32"
    counts = layout.num_score_maps, layout.num_key_heads, layout.num_value_heads
    widths = layout.score_width, layout.score_width, layout.head_width
    shapes = [(1, TOKENS, *shape) for shape in zip(counts, widths, strict=True)]
    with assume_device("gpu", 9.0):
        qkv = (jax.ShapeDtypeStruct(shape, dtype) for shape in shapes)
        answer = explain(*qkv, implementation="dense")[backend]  # traced, so one that runs
    return "yes" if answer.startswith(("chosen", "could run")) else answer
