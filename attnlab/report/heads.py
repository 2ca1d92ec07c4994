"""What heads attend to, and what language models write: one run of each variant, from its newest
checkpoint."""

import dataclasses
import functools
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from attnlab.data import Dataset
from attnlab.interpret.statistics import head_statistics
from attnlab.lab.result import RunResult
from attnlab.load import Row, open_run, shown_rows
from attnlab.models import ModelConfig, Sampling, generate
from attnlab.models.config import heads_per_layer
from attnlab.report.maps import HeadTable, attention_map, head_tables
from attnlab.report.page import Block, Figure, Figures, Paragraph, Section, Text, draw
from attnlab.report.panel import Panel
from attnlab.sharing import Params
from attnlab.training.objectives import Objective, decode_tokens
from attnlab.training.objectives.objective import Inputs

LONGEST = 512
"""Tokens of the longest text whose maps are drawn."""
MOST = 3, 3
"""Layers and heads of a map; more would be too small to see on a phone."""
MOST_VARIANTS = 8
WORDS, LETTERS = 14, 9
"""Tokens of the row that are drawn, and letters of such a token."""
PROMPT, LENGTH, TEMPERATURE = 32, 160, 0.8
"""Of a sample: tokens of the beginning, tokens that are written, temperature."""
TITLES = {
    "entropy": "entropy, nats",
    "distance": "distance, tokens",
    "previous_token": "% on previous token",
    "first_token": "% on first token",
    "duplicate_token": "% on same token",
    "induction": "% behind same token",
}
"""Of `attnlab.interpret.statistics.STATISTICS`, those that are drawn."""
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
      written: the same texts in one piece each.
      trained, untrained: statistics over `rows` rows, at the end and at step 0.
    """

    probs: np.ndarray
    groups: Sequence[int]
    pieces: Mapping[str, Sequence[str]]
    written: Mapping[str, str]
    trained: Statistics
    untrained: Statistics
    rows: int

    def layers(self, chosen: Sequence[int]) -> list[str]:
        """Names of layers, with their parameter group where some share it."""
        shared = len(set(self.groups)) < len(self.groups)
        return [f"layer {i}" + (f", group {self.groups[i]}" if shared else "") for i in chosen]


def heads_sections(panel: Panel, end: str = "") -> list[Section]:
    """Maps, statistics and samples of one run of each variant; `end` ends the names of figures.

    A variant whose runs left no checkpoint, or have no maps, has none here.
    """
    maps: list[Figure] = []
    tables: list[Figure] = []
    samples: list[Block] = []
    for i, variant in enumerate(list(panel.scores)[:MOST_VARIANTS]):
        run = next(run for run in panel.variants[variant] if run.scores.heldout)
        folder, label = panel.results.folder_of(run), panel.labels[variant]
        if folder is None or not (folder / "checkpoints").exists():
            continue
        title = f"{label}, seed {run.spec.seed}"
        heads, sample = look(run, folder)
        if heads is not None:
            maps.append(_map(title, heads, f"map-{i}{end}"))
            tables.append(_statistics(title, heads, f"heads-{i}{end}"))
        if sample is not None:
            samples.append(Text(f"{sample[0]} ⟶ {sample[1]}", f"{title}."))
    sections = []
    if maps:
        text = (
            "What each head attends to on one held-out row. Row: the query position; column: the "
            "key position. Layers and heads count from 0; layers of one group have the same "
            "parameters. One seed, one row: an example."
        )
        sections.append(Section(panel.named("Attention maps"), [Paragraph(text), Figures(maps)]))
        text = (
            "Means over held-out rows, one cell per layer and head, of one seed. Above each table: "
            "the mean over its heads, and that of the same model before training. Entropy: of the "
            "probabilities of a head; 0 is one token alone. Behind same token: on what "
            "followed an earlier token like this one (induction)."
        )
        section = Section(panel.named("Head statistics"), [Paragraph(text), Figures(tables)])
        sections.append(section)
    if samples:
        text = (
            "What each model writes (⟶) after the beginning of a held-out row, at temperature "
            f"{TEMPERATURE:g}: one seed, one draw, an example."
        )
        sections.append(Section(panel.named("Samples"), [Paragraph(text), *samples]))
    return sections


def look(run: RunResult, folder: Path) -> tuple[Heads | None, tuple[str, str] | None]:
    """The heads of a run, and the beginning of a text with what the model writes behind it.

    None: of features, of long texts, of layers with unlike numbers of heads; of other tasks than
    language models.

    Raises:
      ValueError: the checkpoint cannot be read.
    """
    loaded, experiment = open_run(folder, run.spec.seed), run.spec.config
    dataset = experiment.data.load(experiment.train.length, folder)
    objective = experiment.objective.bind(dataset.sizes)
    rows = shown_rows(objective, dataset)
    tokens = np.asarray(rows[0].example.inputs["tokens"])
    if tokens.ndim != 2:  # features
        return None, None
    heads = sample = None
    if tokens.shape[1] <= LONGEST and _same_number_of_heads(loaded.config):
        initial = loaded.initial(rows[0].example.inputs)
        heads = heads_of(loaded.config, objective, dataset, rows, loaded.params, initial)
    if experiment.task == "causal_lm" and hasattr(experiment.data, "tokenizer"):
        sample = write_text(loaded.config, loaded.params, dataset, tokens)
    return heads, sample


def _same_number_of_heads(model: ModelConfig) -> bool:
    try:
        heads_per_layer(model)
    except ValueError:
        return False
    return True


def heads_of(
    config: ModelConfig,
    objective: Objective,
    dataset: Dataset,
    rows: Sequence[Row],
    params: Params,
    initial: Params,
) -> Heads:
    """Attention on the first row and statistics over all rows.

    Args:
      config: of the model.
      objective: of the training.
      dataset: what decodes tokens.
      rows: of `attnlab.load.shown_rows`.
      params: trained parameters.
      initial: those at step 0.
    """
    example, ends = rows[0]
    attention_of = _attention(config)

    def of_row(params: Params, row: Row) -> tuple[jax.Array, dict[str, jax.Array]]:
        length = np.shape(row.example.inputs["tokens"])[1]
        real = np.arange(length)[None] < row.ends.get("tokens", 0)
        return attention_of(params, row.example.inputs, real)

    def mean(params: Params) -> Statistics:
        """Over the rows that have a statistic; NaN where none has."""
        found = [jax.tree.map(np.asarray, of_row(params, row)[1]) for row in rows]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            return {n: np.nanmean([one[n] for one in found], axis=0) for n in found[0]}

    texts = {n: np.asarray(example.inputs[n])[0, :end].tolist() for n, end in ends.items()}
    probs = np.asarray(of_row(params, rows[0])[0], np.float32)
    sublayer = "cross" if "source" in example.inputs and "cross" in config.plan else "attention"
    decode = functools.partial(decode_tokens, objective, dataset)
    return Heads(
        probs[:, :, : ends["tokens"], : ends.get("source", ends["tokens"])],
        list(config.plan.indices(sublayer)),
        {name: [decode([t]) for t in some] for name, some in texts.items()},
        {name: decode(some) for name, some in texts.items()},
        mean(params),
        mean(initial),
        len(rows),
    )


@functools.lru_cache(maxsize=4)
def _attention(
    config: ModelConfig,
) -> Callable[[Params, Inputs, ArrayLike], tuple[jax.Array, dict[str, jax.Array]]]:
    """(params, inputs, True = a query that counts) -> attention of the first text and statistics of
    all texts."""
    # Fused kernels keep no probabilities: whatever trained, the dense path shows them.
    attention = dataclasses.replace(config.attention, implementation="dense")
    model = dataclasses.replace(config, attention=attention).build()
    name = "probs" if config.encoder is None else "cross.probs"

    @jax.jit
    def attention_of(
        params: Params, inputs: Inputs, real: ArrayLike
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        tokens = jnp.asarray(inputs["tokens"])
        probs = model.apply({"params": params}, **inputs, capture=(name,)).captured[name]
        keys = jnp.asarray(inputs.get("source", tokens))
        return probs[:, 0], head_statistics(probs, tokens, real, key_tokens=keys)

    return attention_of


def write_text(
    config: ModelConfig, params: Params, dataset: Dataset, tokens: np.ndarray
) -> tuple[str, str]:
    """The beginning of `tokens` [1, T] and what the model writes behind it, drawn with key 0.

    Where the model's longest text is full it goes on from the last tokens alone, as many as the
    prompt has.
    """
    prompt = tokens[:, : min(PROMPT, config.max_len // 2)]
    size = prompt.shape[1]
    new = min(LENGTH, config.max_len - size)
    text = prompt
    for part in range(-(-LENGTH // new)):
        more = generate(
            params,
            jnp.asarray(text[:, -size:]),
            config,
            new,
            sampling=Sampling(temperature=TEMPERATURE),
            key=jax.random.fold_in(jax.random.key(0), part),
        )
        text = np.concatenate([text, np.asarray(more)], axis=1)

    def decode(some: list[int]) -> str:  # a vocabulary may be larger than the dataset's
        return _lines(dataset.decode([t for t in some if t < dataset.sizes.vocab_size]))

    return decode(prompt[0].tolist()), decode(text[0, size : size + LENGTH].tolist())


def _lines(text: str) -> str:
    """A text that was written on one line, with its own line ends."""
    meant = {"n": "\n", "t": "\t", "'": "'", "\\": "\\"}
    return re.sub(r"\\(.)", lambda found: meant.get(found[1], found[0]), text)


def _map(title: str, heads: Heads, name: str) -> Figure:
    tokens = heads.pieces["tokens"]
    probs = heads.probs[:, :, :WORDS, :WORDS]
    layers, chosen = (evenly_spaced(n, most) for n, most in zip(probs.shape, MOST, strict=False))
    figure = attention_map(
        probs[np.ix_(layers, chosen)],
        heads.layers(layers),
        [f"head {i}" for i in chosen],
        _shortened(tokens),
        _shortened(heads.pieces.get("source", tokens)),
    )
    written = "; ".join(some[:300] for some in heads.written.values())
    caption = (
        f"{title}: {len(layers)} of {probs.shape[0]} layers and {len(chosen)} of {probs.shape[1]} "
        f"heads; the first tokens of the row: {written}"
    )
    return draw(figure, name, f"Attention maps of {title}", caption)


def _shortened(pieces: Sequence[str]) -> list[str]:
    """With spaces that can be seen."""
    seen = [piece.replace(" ", "·") for piece in pieces[:WORDS]]
    return [t if len(t) <= LETTERS else f"{t[: LETTERS - 1]}…" for t in seen]


def _statistics(title: str, heads: Heads, name: str) -> Figure:
    """Small tables, as dark as their numbers: one for each statistic, layers x heads."""
    tables = []
    for statistic, words in TITLES.items():
        if statistic not in heads.trained:  # maps to another text have no distance
            continue
        share = 100 if words.startswith("%") else 1
        values, before = (of[statistic] * share for of in (heads.trained, heads.untrained))
        if np.isnan(values).all():
            continue
        digits = 1 if statistic == "entropy" or np.nanmax(values) < 9.5 else 0
        means = [f"{np.nanmean(a):.{digits}f}" for a in (values, before)]
        above = f"{words}\nmean {means[0]}, untrained {means[1]}"
        most = 100.0 if share > 1 else float(np.nanmax(values))
        tables.append(HeadTable(above, values, most, digits))
    layers, count = heads.probs.shape[:2]
    caption = (
        f"{title}: {layers} layers (rows, from 0) and {count} heads (columns, from 0), means over "
        f"{heads.rows} held-out rows."
    )
    figure = head_tables(tables, heads.layers(range(layers)))
    return draw(figure, name, f"Statistics of the heads of {title}", caption)


def evenly_spaced(count: int, most: int) -> list[int]:
    """At most `most` of range(count), evenly spaced, the first and the last among them.

    >>> evenly_spaced(12, 4), evenly_spaced(3, 4)
    ([0, 4, 7, 11], [0, 1, 2])
    """
    return sorted({round(i) for i in np.linspace(0, count - 1, min(count, most))})
