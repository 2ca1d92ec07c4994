"""What heads attend to, and what language models write: one run of each variant, from its newest
checkpoint."""

import dataclasses
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
from attnlab.load import LoadedModel, ModelInput, open_run
from attnlab.models import ModelConfig, Sampling
from attnlab.models.config import heads_per_layer
from attnlab.report.page import Block, Figure, Figures, Paragraph, Section, Table, Text, draw
from attnlab.report.panel import Panel
from attnlab.report.style import (
    BACKGROUND,
    COLOURS,
    FONT_SIZE,
    FOREGROUND,
    GRID,
    SIZE,
    new_figure,
)
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
MOST_HEADS = 48
"""Of a table; of more heads it has the means of each layer."""
WORDS, LETTERS = 14, 9
"""Tokens of the row that are drawn, and letters of such a token."""
PROMPT, LENGTH, TEMPERATURE = 32, 160, 0.8
"""Of a sample: tokens of the beginning, tokens that are written, temperature."""
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
    "position. Layers and heads count from 0; layers of one group have the same parameters. One "
    "seed, one row: an example."
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
      groups: the parameter group of each layer.
      pieces: "tokens" and, where it is another text, "source" -> token by token.
      trained, untrained: statistics over several rows, at the end and at step 0.
    """

    probs: np.ndarray
    groups: Sequence[int]
    pieces: Mapping[str, Sequence[str]]
    trained: Statistics
    untrained: Statistics

    @property
    def layers(self) -> list[str]:
        """Their names, with their parameter group where some share it."""
        shared = len(set(self.groups)) < len(self.groups)
        return [f"layer {i}{f', group {g}' if shared else ''}" for i, g in enumerate(self.groups)]


def heads_sections(panel: Panel, end: str = "") -> list[Section]:
    """Maps, statistics and samples of one run of each variant; `end` ends the names of figures.

    A variant whose runs left no checkpoint, or have no maps, has none here.
    """
    found: dict[str, list[Block]] = {"Attention maps": [], "Head statistics": [], "Samples": []}
    maps: list[Figure] = []
    for i, variant in enumerate(list(panel.scores)[:MOST_VARIANTS]):
        run = next(run for run in panel.results.variants[variant] if run.scores.heldout)
        if run.folder is None or not (run.folder / "checkpoints").exists():
            continue
        title = f"{panel.results.labels[variant]}, seed {run.spec.seed}"
        heads, sample = look(run, run.folder)
        if heads is not None:
            maps.append(_map(title, heads, f"map-{i}{end}"))
            found["Head statistics"].append(statistics_table(title, heads, f"heads-{i}{end}"))
        if sample:
            found["Samples"].append(Text(sample, title, folded=bool(panel.worse_than(variant))))
    found["Attention maps"] += [Figures(maps)] if maps else []
    texts = zip(found.items(), (MAPS, STATISTICS, SAMPLES), strict=True)
    return [
        Section(panel.named(title), [Paragraph(text), *blocks])
        for (title, blocks), text in texts
        if blocks
    ]


def look(run: RunResult, folder: Path) -> tuple[Heads | None, str]:
    """The heads of a run, and the beginning of a text with what the model writes behind it.

    None, "": of features, of long texts, of layers with unlike numbers of heads; of other tasks
    than language models.

    Raises:
      ValueError: the checkpoint cannot be read.
    """
    loaded = open_run(folder, run.spec.seed)
    rows = loaded.heldout()
    tokens = np.asarray(rows[0].inputs["tokens"])
    if tokens.ndim != 2:  # features
        return None, ""
    fits = tokens.shape[1] <= LONGEST and _same_number_of_heads(loaded.config)
    heads = heads_of(loaded, rows) if fits else None
    if run.spec.config.task == "causal_lm" and loaded.tokenizer is not None:
        return heads, _sample(loaded, tokens[0].tolist())
    return heads, ""


def _same_number_of_heads(model: ModelConfig) -> bool:
    try:
        heads_per_layer(model)
    except ValueError:
        return False
    return True


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
        return probs[:, 0], head_statistics(probs, tokens, real, key_tokens=keys)

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
    probs, trained = seen(loaded.params)
    _, untrained = seen(loaded.initial(rows[0].inputs))
    queries, keys = len(written["tokens"]), len(written.get("source", written["tokens"]))
    groups = list(config.plan.indices(sublayer))
    return Heads(probs[:, :, :queries, :keys], groups, written, trained, untrained)


def statistics_table(title: str, heads: Heads, name: str) -> Table:
    """A row for each head, or for each layer where there are many; the means before."""
    shown = [n for n in TITLES if n in heads.trained and not np.isnan(heads.trained[n]).all()]
    count = heads.trained[shown[0]].size
    rows = {"mean": [np.nanmean(heads.trained[n]) for n in shown]}
    rows["mean, untrained"] = [np.nanmean(heads.untrained[n]) for n in shown]
    for i, layer in enumerate(heads.layers):
        if count > MOST_HEADS:
            rows[layer] = [heads.trained[n][i].mean() for n in shown]
            continue
        for j in range(heads.probs.shape[1]):
            rows[f"{layer}, head {j}"] = [heads.trained[n][i, j] for n in shown]
    scale = [100 if TITLES[n].startswith("%") else 1 for n in shown]
    cells = [[row, *map(float, np.multiply(values, scale))] for row, values in rows.items()]
    columns = [TITLES[n] for n in shown]
    frame = pandas.DataFrame(cells, columns=["head", *columns], dtype=object)
    return Table(name, f"{title}.", frame, dict.fromkeys(columns, 1))


def _map(title: str, heads: Heads, name: str) -> Figure:
    tokens = heads.pieces["tokens"]
    probs = heads.probs[:, :, :WORDS, :WORDS]
    layers, chosen = (evenly_spaced(n, most) for n, most in zip(probs.shape, MOST, strict=False))
    figure = attention_map(
        probs[np.ix_(layers, chosen)],
        [heads.layers[i] for i in layers],
        [f"head {i}" for i in chosen],
        _shortened(tokens),
        _shortened(heads.pieces.get("source", tokens)),
    )
    texts = "; ".join("".join(pieces)[:300] for pieces in heads.pieces.values())
    caption = (
        f"{title}: {len(layers)} of {probs.shape[0]} layers and {len(chosen)} of {probs.shape[1]} "
        f"heads; the first tokens of the row: {texts}"
    )
    return draw(figure, name, f"Attention maps of {title}", caption)


def _shortened(pieces: Sequence[str]) -> list[str]:
    """With spaces that can be seen."""
    seen = [piece.replace(" ", "·") for piece in pieces[:WORDS]]
    return [t if len(t) <= LETTERS else f"{t[: LETTERS - 1]}…" for t in seen]


def evenly_spaced(count: int, most: int) -> list[int]:
    """At most `most` of range(count), evenly spaced, the first and the last among them.

    >>> evenly_spaced(12, 4), evenly_spaced(3, 4)
    ([0, 4, 7, 11], [0, 1, 2])
    """
    return sorted({round(i) for i in np.linspace(0, count - 1, min(count, most))})


def attention_map(
    probs: np.ndarray,
    layers: Sequence[str],
    heads: Sequence[str],
    tokens: Sequence[str],
    keys: Sequence[str],
) -> "Drawing":
    """A grid of attention maps, one row per layer and one column per head, with a scale below.

    The colour goes with the square root of the probability, so that small probabilities show.

    Args:
      probs: attention probabilities [L, N, T, S].
      layers, heads: their names.
      tokens, keys: query and key tokens, written at the left and below the grid.
    """
    from matplotlib.colors import LinearSegmentedColormap, PowerNorm

    rows, columns, *lengths = probs.shape
    cell = max(min(1.0, max(4.0 / columns, 0.62)), TOKEN_HEIGHT * max(lengths) + 0.1)
    margin = 0.6 * SMALL_FONT / 72 * max(map(len, [*tokens, *keys]))
    size = columns * cell + 0.7 + margin, rows * cell + 1.5 + margin
    figure, grid = new_figure(*size, rows, columns)
    colours = LinearSegmentedColormap.from_list("shares", [BACKGROUND, COLOURS[0]])
    # A dollar would start a formula.
    tokens, keys = ([word.replace("$", r"\$") for word in some] for some in (tokens, keys))
    for i, j in np.ndindex(rows, columns):
        axes = grid[i][j]
        norm = PowerNorm(0.5, 0, 1)
        image = axes.imshow(probs[i, j], colours, norm=norm, interpolation="none", aspect="auto")
        axes.tick_params(length=0)
        axes.grid(visible=False)
        axes.spines[:].set(visible=True, color=GRID)
        axes.set_box_aspect(1)
        axes.set(xticks=[], yticks=[])
        if j == 0:
            axes.set_yticks(range(len(tokens)), tokens, fontsize=SMALL_FONT)
            axes.set_ylabel(layers[i])
        if i == rows - 1:
            axes.set_xticks(range(len(keys)), keys, rotation=90, fontsize=SMALL_FONT)
        if i == 0:
            axes.set_title(heads[j], fontsize=FONT_SIZE)
    grid[-1][0].set_xlabel("keys →", loc="left")
    figure.supylabel("← queries", fontsize=FONT_SIZE, color=FOREGROUND)
    bar = figure.colorbar(
        image, ax=[axes for line in grid for axes in line], location="bottom", aspect=30,
        shrink=min(0.6, SIZE[0] / figure.get_figwidth()), ticks=[0, 0.1, 0.5, 1],
    )  # fmt: skip
    bar.ax.tick_params(labelcolor=FOREGROUND, color=GRID, labelsize=FONT_SIZE)
    bar.outline.set_edgecolor(GRID)
    bar.set_label("attention probability", fontsize=FONT_SIZE, color=FOREGROUND)
    return figure
