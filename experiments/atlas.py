"""The tables of docs/reference/layouts.md; `python -m experiments.reference` writes them.

Everything in them is computed: formulas from the axes of the weights, backends from their own
refusals.
"""

import math
import re
from typing import Any

import jax
import jax.numpy as jnp

from attnlab.attention import BACKENDS, explain
from attnlab.attention.jax_nn import assume_device
from attnlab.heads import (
    LAYOUTS,
    ExtraKeys,
    Gate,
    HeadNorm,
    Layout,
    LearntSoftCap,
    MixtureOfHeads,
    Sink,
    cache_bytes_per_token,
    cache_shapes,
    num_parameters,
)
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
URLS = {
    r"arXiv (\d+\.\d+)": "https://arxiv.org/abs/{}",
    r"(pbloem/former)": "https://github.com/{}",
    r"(peterbloem\.nl/blog/transformers)": "https://{}",
    "(Transformer Circuits)": "https://transformer-circuits.pub/2021/framework/index.html",
}


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
    weights = {name: weight.axes for name, weight in layout.all_weights.items()}
    listed = ", ".join(f"`{n}` [{letters(axes).replace(' ', ', ')}]" for n, axes in weights.items())
    scores = f"{layout.num_score_maps} T ({layout.score_width} + {layout.head_width})"
    cache = sum(map(math.prod, cache_shapes(layout).values()))
    lines = [
        ("equation", f"`{layout.equation}`"),
        ("weights", listed),
        ("parameters", f"{total(list(weights.values()))} = {num_parameters(layout):,}"),
        (
            "FLOPs per token",
            f"2 ({products(layout)} + {scores}) = {flops_per_token(layout, TOKENS):,}",
        ),
        ("rank of a head's scores", f"at most min({layout.rank}) = {rank(layout)}"),
        ("cache", f"{cache} numbers = {cache_bytes_per_token(layout):,} bytes a token (float32)"),
        ("same function as", " → ".join(forms) if len(forms) > 1 else "end of the chain"),
        ("source", link(layout.source)),
    ]
    drawn = f"![{layout.name}: what each head reads](../drawings/layout_{layout.name}.svg)"
    rows = "\n".join(f"| {a} | {b} |" for a, b in lines)
    return f"## {layout.name}\n\n{drawn}\n\n| | |\n|---|---|\n{rows}"


def total(terms: list[Axes]) -> str:
    """Products of axes as text: DNH + DNH -> 2 D N H."""
    texts = [letters(axes) for axes in terms]
    counts = {text: texts.count(text) for text in texts}
    return " + ".join(f"{count} {text}" if count > 1 else text for text, count in counts.items())


def products(layout: Layout) -> str:
    """Multiply-adds per token of the weights, and of products that involve none."""
    applied = [
        weight.axes + weight.tied_axes
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
    """A source with the address that it names."""
    for pattern, url in URLS.items():
        if found := re.search(pattern, source):
            return f"[{source}]({url.format(found[1])})"
    return source


def numbers() -> str:
    """Every layout beside the others."""
    rows = []
    for name, layout in EXAMPLES.items():
        sizes = flops_per_token(layout, TOKENS), cache_bytes_per_token(layout)
        costs = [f"{cost:,}" for cost in (num_parameters(layout), *sizes)]
        rows.append([name, *costs, str(rank(layout))])
    header = ("layout", "parameters", "FLOPs per token", "cache bytes per token", "rank of scores")
    return table(header, rows, ["---", *["--:"] * 4])


QIU, TIES = "Qiu et al. 2025, arXiv 2505.06708", "arXiv 2606.04032"
OPTIONS: tuple[tuple[str, dict[str, Any], str, str], ...] = (
    ("Gate()", {"extras": (Gate(),)}, "each head times sigmoid(x g_n), one number", QIU),
    ('Gate("element")', {"extras": (Gate("element"),)},
     "each head times sigmoid(x G_n), V numbers", QIU),
    ("Sink()", {"extras": (Sink(),)},
     "exp(s_n) in the sum of each softmax", "gpt-oss, arXiv 2508.10925"),
    ("Sink(learnt=False)", {"extras": (Sink(learnt=False),)},
     "1 in the sum of each softmax", "torch's `add_zero_attn`"),
    ("ExtraKeys(1)", {"extras": (ExtraKeys(1),)},
     "a learnt key and value per key head, which no input has", "torch's `bias_k`, `bias_v`"),
    ("LearntSoftCap()", {"extras": (LearntSoftCap(),)},
     "c_n tanh(scores / c_n) with a learnt c_n",
     "`SoftCap` of Gemma 2, arXiv 2408.00118, as a parameter"),
    ("MixtureOfHeads()", {"extras": (MixtureOfHeads(),)},
     "a router gives each token 1 shared and 2 chosen heads, with a balance loss",
     "Jin et al. 2024, arXiv 2410.11842"),
    ('tie="kv"', {"tie": "kv"}, "W_V is W_K", TIES),
    ('tie="qk"', {"tie": "qk"}, "W_K is W_Q", TIES),
    ('tie="qkv"', {"tie": "qkv"}, "one projection", TIES),
    ('qk_norm=HeadNorm("layer")', {"qk_norm": HeadNorm("layer")},
     "a norm of each head's q and k, with `bias=True` a bias too",
     "Dehghani et al. 2023, arXiv 2302.05442"),
)  # fmt: skip
"""An option that most layouts have, its fields, what it does, its source."""


def options() -> str:
    """The cost of each option in `standard`, and which layouts cannot have it."""
    rows, plain = [], EXAMPLES["standard"]
    for code, fields, what, source in OPTIONS:
        layout = LAYOUTS["standard"](width=512, num_heads=8, **fields)
        more = num_parameters(layout) - num_parameters(plain)
        without = ", ".join(name for name in NAMES if not can_have(name, fields)) or "–"
        costs = f"{more:+,}", f"{cache_bytes_per_token(layout):,}"
        rows.append([f"`{code}`", what, *costs, without, link(source)])
    header = ("option", "what it does", "parameters", "cache bytes", "not for", "source")
    return table(header, rows, ["---", "---", "--:", "--:", "---", "---"])


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
    """ "yes", or the backend's own reason, whatever this machine is; of cuDNN by the capability of
    the GPU where that decides."""
    dtype, capabilities = (
        (jnp.bfloat16, (8.0, 9.0)) if backend == "cudnn" else (jnp.float32, (0.0,))
    )
    heads = layout.num_score_maps, layout.num_key_heads, layout.num_value_heads
    widths = layout.score_width, layout.score_width, layout.head_width
    shapes = [(1, TOKENS, *shape) for shape in zip(heads, widths, strict=True)]
    answers = {}
    for capability in capabilities:
        with assume_device("gpu", capability):
            qkv = (jax.ShapeDtypeStruct(shape, dtype) for shape in shapes)
            answer = explain(*qkv, implementation="dense")[backend]  # traced, so one that runs
        answers[capability] = "yes" if answer.startswith(("chosen", "could run")) else answer
    if len(set(answers.values())) == 1:
        return answers[capabilities[0]]
    return "; ".join(f"{capability}: {answer}" for capability, answer in answers.items())
