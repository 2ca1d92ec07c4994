"""A model that is there, of a run or of a published folder, and what it reads: text to tokens, and
how each token is written."""

import dataclasses
import functools
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from attnlab import pretrained
from attnlab.data import DataConfig, Dataset
from attnlab.data.tokenizer import FILE, Tokenizer, load_tokenizer, make_tokenizer
from attnlab.interpret import AblationMetric
from attnlab.models import ModelConfig
from attnlab.names import lookup
from attnlab.training.objectives import OBJECTIVES, Objective, decode_tokens
from attnlab.training.objectives.objective import Example, cross_entropy
from experiments.running import arm, initial, maps, workdir

LONGEST = 1024
"""Tokens of a text that is looked at: a page holds a byte for every pair of them, head by head."""


class Asked(NamedTuple):
    """What a person wants a model to read; "" where it is left open."""

    text: str = ""
    tokens: str = ""
    """In place of `text`: their numbers, with commas between"""
    source: str = ""
    """What the encoder of an encoder-decoder reads"""
    source_tokens: str = ""

    def __bool__(self) -> bool:
        return any(self)


class Read(NamedTuple):
    """One text as a model reads it."""

    inputs: dict[str, Any]
    """Arguments of the model's call"""
    written: dict[str, list[str]]
    """Names of those that are texts -> how their tokens are written, without filling"""
    metric: Callable[[Any], AblationMetric] | None = None
    """Model -> the task's loss of a run; None where it asks nothing"""


class Opened(NamedTuple):
    """A model that is there."""

    name: str
    config: ModelConfig
    params: Any
    fresh: Callable[[dict[str, Any]], Any]
    """Inputs -> the weights that it began with, or others drawn alike"""
    read: Callable[[Asked], Read]
    write: Callable[[Sequence[int]], str]
    """Tokens -> text; numbers where there is no tokenizer"""
    split: Callable[[str], tuple[np.ndarray, np.ndarray]]
    """Text -> its tokens [T] as the model reads them, and from where to where in it, in characters,
    each stands [T, 2]"""
    ends: tuple[int, ...] = ()
    """Tokens that a text is over with"""


def open_run(folder: Path, seed: int | None = None) -> Opened:
    """One seed of a run (None: the first), at its newest checkpoint.

    It reads a text through the run's own tokenizer, or, where nothing is asked for, a row that is
    held out, as the run's task presents it. Raises ValueError for what is no run, or cannot read.
    """
    if not (folder / workdir.CONFIG).is_file():
        raise ValueError(f"{folder} holds no run; give the --workdir of one run, or a --path")
    found = initial.of_run(folder, seed)
    record = workdir.read_json(folder / workdir.CONFIG)["config"]
    seed = record["train"]["seeds"][0] if seed is None else seed
    task, data = lookup(OBJECTIVES, record["task"], what="task"), arm.data_of(record["data"])
    run = _Run(folder, found.config, record, seed, task, data)
    ends: tuple[int, ...] = ()
    if "<end>" in task.special_tokens:
        ends = (data.sizes().vocab_size + task.special_tokens.index("<end>"),)
    return Opened(
        str(folder), found.config, found.params, run.fresh, run.read, run.write, run.split, ends
    )


@dataclasses.dataclass(frozen=True)
class _Run:
    """What a run reads and writes."""

    folder: Path
    config: ModelConfig
    record: dict[str, Any]
    seed: int
    task: Objective
    data: DataConfig

    @property
    def tokenizer_name(self) -> str:
        """ "" where the data are no text."""
        name: str = getattr(self.data, "tokenizer", "")
        return name

    @property
    def is_kept(self) -> bool:
        """Is the tokenizer known? One that was learnt is a file."""
        return (self.folder / FILE).exists() or not self.tokenizer_name.startswith("bpe:")

    @functools.cached_property
    def tokenizer(self) -> Any:
        """The run's own."""
        return make_tokenizer(self.tokenizer_name, [], self.folder)

    def fresh(self, inputs: dict[str, Any]) -> Any:
        """The weights that it began with."""
        if self.record["start"]:
            stored = initial.start(self.record["start"], [self.seed])
            return initial.begin(stored, self.config, inputs["tokens"])[0][0]
        make = initial.fresh(self.config, initial.Same(**self.record["same"]))
        return initial.begun(self.config.build(), make, self.seed, inputs)

    def write(self, tokens: Sequence[int]) -> str:
        """Tokens -> text."""
        if not self.tokenizer_name or not self.is_kept:
            return ",".join(map(str, tokens))
        size = self.data.sizes().vocab_size  # what the task adds behind it is no text
        text: str = self.tokenizer.decode([t for t in tokens if t < size])
        return text

    def read(self, asked: Asked) -> Read:
        """What is asked for, as the model reads it."""
        if not asked or not self.tokenizer_name:
            return self._read_data(asked)
        if not self.is_kept:
            raise ValueError(f"{self.folder} has lost its {FILE}; give --tokens=1,2,3")
        size, symbols = self.data.sizes().vocab_size, self.task.special_tokens
        starts = [size + symbols.index("<start>")] if "<start>" in symbols else []

        def encode(text: str) -> Sequence[int]:
            tokens: list[int] = self.tokenizer.encode([text])[0].tokens.tolist()
            return tokens

        def piece(token: int) -> str:
            return symbols[token - size] if token >= size else self.tokenizer.piece(token)

        return _read(self.config, asked, encode, piece, starts)

    def _read_data(self, asked: Asked) -> Read:
        """A row that is held out, or numbers."""
        source = self.data.load(self.record["train"]["length"], self.folder)
        bound = self.task.bind(source.sizes)
        if not asked:
            return _heldout(self.config, bound, source)
        if asked.text or asked.source:
            raise ValueError(
                f"the data of {self.folder} ({self.record['data']['source']}) are no text: give "
                "--tokens=1,2,3, or leave it out to see a row that is held out"
            )
        return _read(self.config, asked, None, functools.partial(_write, bound, source), [])

    def split(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        """A text's tokens, and where each stands."""
        if not self.tokenizer_name or not self.is_kept:
            raise ValueError(
                f"{self.folder} reads no text: its data ({self.record['data']['source']}) have "
                f"none, or its {FILE} is lost"
            )
        encoded = self.tokenizer.encode([text])[0]
        return encoded.tokens, encoded.spans(text)


def _tokenizer(folder: Path) -> Tokenizer:
    return load_tokenizer(pretrained.tokenizer_path(folder))


def open_folder(folder: Path) -> Opened:
    """A published model, with the tokenizer.json that lies beside it. Raises ValueError for a
    folder that cannot be read, and where a text is to be read without a tokenizer."""
    found, tokenizer = initial.load(str(folder)), functools.cache(_tokenizer)
    config = found.config

    def fresh(inputs: dict[str, Any]) -> Any:
        return jax.jit(config.build().init)(jax.random.key(0), **inputs)["params"]

    def read(asked: Asked) -> Read:
        if not asked:
            raise ValueError('what shall it read? give --text="...", or --tokens=1,2,3')
        encode: Callable | None = None
        piece: Callable[[int], str] = str
        if asked.text or asked.source or (folder / FILE).is_file():
            its = tokenizer(folder)
            encode, piece = lambda text: its.read(text).tokens.tolist(), its.piece
        settings = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        return _read(config, asked, encode, piece, [settings.get("decoder_start_token_id") or 0])

    def write(tokens: Sequence[int]) -> str:
        if not (folder / FILE).is_file():
            return ",".join(map(str, tokens))
        return tokenizer(folder).decode(tokens)

    def split(text: str) -> tuple[np.ndarray, np.ndarray]:
        one = tokenizer(folder).read(text)
        return one.tokens, one.spans

    ends = _ends(folder, config)
    return Opened(str(folder), config, found.params, fresh, read, write, split, ends)


def _ends(folder: Path, config: ModelConfig) -> tuple[int, ...]:
    """`eos_token_id`, one or several, of generation_config.json, else of config.json."""
    told: Any = None
    for name in ("generation_config.json", "config.json"):
        if told is None and (folder / name).is_file():
            told = json.loads((folder / name).read_text(encoding="utf-8")).get("eos_token_id")
    listed = told if isinstance(told, list) else [told]
    return tuple(t for t in listed if isinstance(t, int) and 0 <= t < config.vocab_size)


def _write(task: Objective, source: Dataset, token: int) -> str:
    return decode_tokens(task, source, [token])


def _read(
    config: ModelConfig,
    asked: Asked,
    encode: Callable[[str], Sequence[int]] | None,
    write: Callable[[int], str],
    starts: list[int],
) -> Read:
    """The texts that are asked for; `starts` stand before what a decoder of two texts writes."""
    both = config.kind == "encoder_decoder"
    if both != bool(asked.source or asked.source_tokens):
        raise ValueError(
            "an encoder-decoder reads two texts: give --source for the encoder and --text for the "
            "decoder (or --source_tokens and --tokens)"
            if both
            else f"a {config.kind} reads one text: leave --source and --source_tokens out"
        )
    ids = {"tokens": _ids("tokens", asked.text, asked.tokens, encode, starts if both else [])}
    if both:
        ids["source"] = _ids("source", asked.source, asked.source_tokens, encode, [])
    for name, row in ids.items():
        least, most = min(row), max(row)
        if least < 0 or most >= config.vocab_size:
            raise ValueError(
                f"{name}: {most if least >= 0 else least} is no token of this model, which has 0 "
                f"to {config.vocab_size - 1}"
            )
    _check_length(config, {name: len(row) for name, row in ids.items()})
    inputs = {name: jnp.asarray([row], jnp.int32) for name, row in ids.items()}
    return Read(inputs, {name: list(map(write, row)) for name, row in ids.items()})


def _ids(
    name: str, text: str, tokens: str, encode: Callable | None, starts: list[int]
) -> list[int]:
    flags = ("text", "tokens") if name == "tokens" else ("source", "source_tokens")
    if text and tokens:
        raise ValueError(f"give --{flags[0]} or --{flags[1]}, not both")
    if tokens:
        try:
            return [int(t) for t in tokens.split(",")]
        except ValueError:
            raise ValueError(f"--{flags[1]}={tokens} must be numbers, as 1,2,3") from None
    assert encode is not None
    found = [*starts, *encode(text)]
    if not found or (name == "source" and not text):
        raise ValueError(f"--{flags[0]} holds no token; give a text")
    return found


def _check_length(config: ModelConfig, lengths: dict[str, int]) -> None:
    for name, length in lengths.items():
        if length > config.max_len:
            raise ValueError(
                f"{name}: {length} tokens are more than the {config.max_len} that this model reads "
                "(its max_len); give a shorter text"
            )
        if length > LONGEST:
            raise ValueError(
                f"{name}: a page of {length} tokens would be too large to open, {LONGEST} are the "
                "most; give a shorter text"
            )


def _heldout(config: ModelConfig, task: Objective, source: Dataset) -> Read:
    """The row in the middle of those that are held out, and what the task makes of it."""
    example, ends = maps.shown_row(task, source)
    inputs = example.inputs
    _check_length(config, ends)

    def write(name: str) -> list[str]:
        row = np.asarray(inputs[name])[0, : ends[name]]
        if not np.issubdtype(row.dtype, np.integer):  # features have no words
            return [str(i) for i in range(len(row))]
        return [_write(task, source, t) for t in row.tolist()]

    metric = functools.partial(_metric, task, example)
    return Read(inputs, {name: write(name) for name in ends}, metric)


def _metric(task: Objective, example: Example, model: Any) -> AblationMetric:
    """What the task says of the answer, the mean over its targets."""
    unit, divisor = ("bits ", math.log(2)) if task.loss is cross_entropy else ("", 1.0)

    def loss(params: Any, patch: Any) -> jax.Array:
        answer, _ = task.predict(model, params, example.inputs, patch=patch)
        losses = task.loss(answer, example.targets) * example.weights
        return jnp.sum(losses) / jnp.sum(example.weights) / divisor

    meaning = f"{unit}that a target of the task costs more when this head writes nothing"
    return AblationMetric("loss without it", meaning, loss, jnp.subtract)
