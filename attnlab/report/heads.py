"""What heads attend to, and what language models write: one run of each of the best variants, from
its newest checkpoint."""

import dataclasses
import itertools
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from attnlab.extras import extra
from attnlab.interpret.statistics import head_statistics
from attnlab.lab.result import RunResult
from attnlab.lab.workdir import saved_steps
from attnlab.load import LoadedModel, ModelInput, open_run
from attnlab.models import Sampling
from attnlab.report.page import Block, Figure, Figures, Paragraph, Section, Table, Text, draw
from attnlab.report.panel import Panel
from attnlab.report.style import FONT_SIZE, FOREGROUND, GRID, SIZE, literal, new_figure
from attnlab.sharing import Params
from attnlab.training.objectives.objective import Inputs

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Drawing

with extra("lab"):
    import pandas

LONGEST = 512
"""Tokens of the longest text whose maps are drawn."""
MOST = 3, 3
"""Layers and heads of a map; more would be too small to see on a phone."""
MOST_VARIANTS = 8
"""The best ones, which are shown."""
MOST_HEADS = 48
"""Of a table; of more heads it has the means of each layer."""
WORDS, LETTERS = 14, 9
"""Tokens of the row that are drawn, and letters of such a token."""
PROMPT, LENGTH, TEMPERATURE = 32, 160, 0.8
"""Of a sample: tokens of the beginning, tokens that are written, temperature."""
MARKS = {i: f"\\x{i:02x}" for i in (*range(32), 127)} | str.maketrans(" \n\t", "·↵⇥")
"""What is drawn of characters that cannot be seen, most of which an SVG file must not have."""
SMALL_FONT = 9
TOKEN_HEIGHT = 0.135
"""Inches of a token label in the small font."""
TITLES = {
    "entropy": "entropy, nats",
    "distance": "distance, tokens",
    "previous_token": "% on previous token",
    "first_token": "% on first token",
    "duplicate_token": "% on same token",
    "induction": "% after same token",
}
"""Of `attnlab.interpret.statistics.STATISTICS`, those that are shown."""
MAPS = (
    "What each head attends to on one held-out row. Row: the query position; column: the key "
    "position. Layers and heads count from 0; at most 3 of each are drawn. Layers of one group "
    "have the same parameters. One seed, one row: an example."
)
STATISTICS = (
    "Means over held-out rows of one seed; untrained: the same model at step 0. Entropy: of the "
    "probabilities of a head; 0 is one token alone. After same token: attention to what followed "
    "an earlier copy of the token (induction)."
)
SAMPLES = (
    "What each model writes (⟶) after the beginning of a held-out row, at temperature "
    f"{TEMPERATURE:g}: one seed, one draw, an example. Of a model that is worse than a baseline "
    "without a model it is folded away."
)
Statistics = dict[str, np.ndarray]
"""Name -> a number for each layer and head [L, N]."""


@dataclasses.dataclass(frozen=True)
class Heads:
    """What was seen of the heads of one model.

    Attributes:
      probs: attention probabilities of one row [L, N, T, S]; of a decoder with an encoder those to
        the source.
      layers: their names, with their parameter group where some share it.
      pieces: "tokens" and, where it is another text, "source" -> token by token.
      trained, untrained: statistics over several rows, at the end and at step 0.
    """

    probs: np.ndarray
    layers: Sequence[str]
    pieces: Mapping[str, Sequence[str]]
    trained: Statistics
    untrained: Statistics


def heads_sections(panel: Panel, end: str = "") -> list[Section]:
    """Maps, statistics and samples of one run of each of the best `MOST_VARIANTS` variants; `end`
    ends the names of figures.

    A variant whose runs left no checkpoint, or have no maps, has none here.
    """
    maps: list[Figure] = []
    tables: list[Block] = []
    samples: list[Block] = []
    for i, variant in enumerate(list(panel.scores)[:MOST_VARIANTS]):
        scored = (run for run in panel.results.variants[variant] if run.scores.heldout)
        run = next((run for run in scored if run.folder and saved_steps(run.folder)), None)
        if run is None or run.folder is None:
            continue
        title = f"{panel.results.labels[variant]}, seed {run.spec.seed}"
        heads, sample = look(run, run.folder)
        if heads is not None:
            texts = "; ".join("".join(pieces)[:300] for pieces in heads.pieces.values())
            caption, alt = f"{title}; the row begins: {texts}", f"Attention maps of {title}"
            maps.append(draw(attention_map(heads), f"map-{i}{end}", alt, caption))
            tables.append(statistics_table(title, heads, f"heads-{i}{end}"))
        if sample:
            samples.append(Text(sample, title, folded=bool(panel.worse_than(variant))))
    found: list[tuple[str, str, list[Block]]] = [
        ("Attention maps", MAPS, [Figures(maps)] if maps else []),
        ("Head statistics", STATISTICS, tables),
        ("Samples", SAMPLES, samples),
    ]
    return [
        Section(panel.named(title), [Paragraph(text), *blocks])
        for title, text, blocks in found
        if blocks
    ]


def look(run: RunResult, folder: Path) -> tuple[Heads | None, str]:
    """The heads of a run, and the beginning of a text with what the model writes behind it.

    None, "": of features, of long texts, of layers with unlike numbers of softmax distributions; of
    other tasks than language models.

    Raises:
      ValueError: the checkpoint cannot be read.
    """
    loaded = open_run(folder, run.spec.seed)
    rows = loaded.heldout()
    tokens = np.asarray(rows[0].inputs["tokens"])
    if tokens.ndim != 2:  # features
        return None, ""
    counts = {config.layout.num_score_maps for config in loaded.config.layer_stacks.values()}
    heads = heads_of(loaded, rows) if tokens.shape[1] <= LONGEST and len(counts) == 1 else None
    is_lm = run.spec.config.task == "causal_lm" and loaded.tokenizer is not None
    return heads, _sample(loaded, tokens[0].tolist()) if is_lm else ""


def _sample(loaded: LoadedModel, tokens: Sequence[int]) -> str:
    """The beginning of a text and what the model writes behind it, as much as fits, drawn with key
    0."""
    prompt = tokens[: min(PROMPT, loaded.config.max_len // 2)]
    new = min(LENGTH, loaded.config.max_len - len(prompt))
    text = "".join(loaded.write(prompt, new, Sampling(temperature=TEMPERATURE)))
    begin = loaded.decode(prompt)
    return f"{begin} ⟶ {text.removeprefix(begin)}"


def heads_of(loaded: LoadedModel, rows: Sequence[ModelInput]) -> Heads:
    """Attention on the first row and statistics over all rows, of `LoadedModel.heldout`."""
    config, written = loaded.config, rows[0].written
    # Fused kernels keep no probabilities: whatever trained, the dense path shows them.
    attention = dataclasses.replace(config.attention, implementation="dense")
    model = dataclasses.replace(config, attention=attention).build()
    name = "probs" if config.encoder is None else "cross.probs"

    @jax.jit
    def attention_of(
        params: Params, inputs: Inputs, real: ArrayLike
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Of the first text; statistics of all texts. real: True = a query that counts."""
        tokens = jnp.asarray(inputs["tokens"])
        probs = model.apply({"params": params}, **inputs, capture=(name,)).captured[name]
        keys = jnp.asarray(inputs.get("source", tokens))
        same_text = config.encoder is None
        found = head_statistics(probs, tokens, real, key_tokens=keys, same_text=same_text)
        return probs[:, 0], found

    def seen(params: Params) -> tuple[np.ndarray, Statistics]:
        """Of the first row; statistics of the rows that have them, NaN where none has."""
        found = []
        for row in rows:
            length = np.shape(row.inputs["tokens"])[1]
            real = np.arange(length)[None] < len(row.written.get("tokens", ()))
            found.append(jax.tree.map(np.asarray, attention_of(params, row.inputs, real)))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            means = {n: np.nanmean([one[n] for _, one in found], axis=0) for n in found[0][1]}
        return np.asarray(found[0][0], np.float32), means

    sublayer = "cross" if "source" in rows[0].inputs and "cross" in config.plan else "attention"
    groups = config.plan.indices(sublayer)
    shares = len(set(groups)) < len(groups)
    layers = [f"layer {i}{f', group {g}' if shares else ''}" for i, g in enumerate(groups)]
    probs, trained = seen(loaded.params)
    _, untrained = seen(loaded.initial(rows[0].inputs))
    queries, keys = len(written["tokens"]), len(written.get("source", written["tokens"]))
    return Heads(probs[:, :, :queries, :keys], layers, written, trained, untrained)


def statistics_table(title: str, heads: Heads, name: str) -> Table:
    """A row for each head, or for each layer where there are many; the means before."""
    num_layers, num_heads = heads.probs.shape[:2]
    by_layer = num_layers * num_heads > MOST_HEADS
    names = [f"{layer}, head {j}" for layer in heads.layers for j in range(num_heads)]
    rows = ["mean", "mean, untrained", *(heads.layers if by_layer else names)]
    columns: dict[str, list[float]] = {}
    for statistic, text in TITLES.items():
        after = heads.trained.get(statistic, np.array(np.nan))
        if np.isnan(after).all():
            continue
        means = np.nanmean(after), np.nanmean(heads.untrained[statistic])
        values = np.array([*means, *(after.mean(axis=1) if by_layer else after.ravel())])
        columns[text] = (100 * values if text.startswith("%") else values).tolist()
    frame = pandas.DataFrame({"head": rows, **columns}, dtype=object)
    return Table(name, f"{title}.", frame, dict.fromkeys(columns, 1))


def attention_map(heads: Heads) -> "Drawing":
    """A grid of attention maps, one row per layer and one column per head, with a scale below.

    The colour goes with the square root of the probability, so that small probabilities show.
    """
    from matplotlib.colors import PowerNorm

    every = heads.pieces["tokens"]
    tokens, keys = _shortened(every), _shortened(heads.pieces.get("source", every))
    layers, chosen = (
        _evenly_spaced(n, most) for n, most in zip(heads.probs.shape, MOST, strict=False)
    )
    cell = max(0.7, TOKEN_HEIGHT * max(len(tokens), len(keys)) + 0.1)
    margin = 0.6 * SMALL_FONT / 72 * max(map(len, [*tokens, *keys]))
    size = len(chosen) * cell + 0.7 + margin, len(layers) * cell + 1.5 + margin
    figure, grid = new_figure(*size, len(layers), len(chosen))
    for (i, layer), (j, head) in itertools.product(enumerate(layers), enumerate(chosen)):
        axes, probs = grid[i][j], heads.probs[layer, head, : len(tokens), : len(keys)]
        image = axes.imshow(probs, "Blues", norm=PowerNorm(0.5, 0, 1), interpolation="none")
        axes.grid(visible=False)
        axes.tick_params(length=0)
        axes.spines[:].set(visible=True, color=GRID)
        axes.set_box_aspect(1)
        axes.set(xticks=[], yticks=[], aspect="auto")
        axes.set_title(f"head {head}" if i == 0 else "", fontsize=FONT_SIZE)
        if j == 0:
            axes.set_yticks(range(len(tokens)), tokens, fontsize=SMALL_FONT)
            axes.set_ylabel(heads.layers[layer])
        if i == len(layers) - 1:
            axes.set_xticks(range(len(keys)), keys, rotation=90, fontsize=SMALL_FONT)
    grid[-1][0].set_xlabel("keys →", loc="left")
    figure.supylabel("← queries", fontsize=FONT_SIZE, color=FOREGROUND)
    bar = figure.colorbar(
        image, ax=[axes for line in grid for axes in line], location="bottom", aspect=30,
        shrink=min(0.6, SIZE[0] / figure.get_figwidth()), ticks=[0, 0.1, 0.5, 1],
    )  # fmt: skip
    bar.ax.tick_params(labelcolor=FOREGROUND, color=GRID, labelsize=FONT_SIZE)
    bar.set_label("attention probability", fontsize=FONT_SIZE, color=FOREGROUND)
    return figure


def _shortened(pieces: Sequence[str]) -> list[str]:
    """With spaces and ends of lines that can be seen."""
    seen = [piece.translate(MARKS) for piece in pieces[:WORDS]]
    short = [t if len(t) <= LETTERS else f"{t[: LETTERS - 1]}…" for t in seen]
    return [literal(t) for t in short]


def _evenly_spaced(count: int, most: int) -> list[int]:
    """At most `most` of range(count), the first and the last among them."""
    return sorted({round(i) for i in np.linspace(0, count - 1, min(count, most))})
