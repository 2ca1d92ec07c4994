"""A stored model, of a run or of a published folder, with what it reads: text to tokens, and tokens
to text."""

import dataclasses
import functools
import itertools
import json
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from attnlab import pretrained, runs
from attnlab.atomic import write_atomic
from attnlab.data import Dataset
from attnlab.data.tokenizer import (
    FILE,
    SubwordTokenizer,
    Tokenizer,
    load_tokenizer,
    make_tokenizer,
)
from attnlab.interpret import AblationMetric
from attnlab.lab import attention_maps
from attnlab.lab.experiment import Experiment
from attnlab.lab.start import init_function, initial_params, load_start, with_plan_of
from attnlab.models import ModelConfig
from attnlab.sharing import Params
from attnlab.tap import Patches
from attnlab.training.objectives import (
    OBJECTIVES,
    Model,
    Objective,
    decode_tokens,
    special_name,
)
from attnlab.training.objectives.objective import Example, Inputs, cross_entropy

LONGEST = 1024
"""Tokens of the longest text: a page holds a byte for every pair of them, head by head."""


class Prompt(NamedTuple):
    """What a model is to read; "" where it is left open."""

    text: str = ""
    tokens: str = ""
    """In place of `text`: their numbers, with commas between"""
    source: str = ""
    """What the encoder of an encoder-decoder reads"""
    source_tokens: str = ""


class ModelInput(NamedTuple):
    """One text as a model reads it."""

    inputs: Inputs
    """Arguments of the model's call"""
    written: dict[str, list[str]]
    """Names of those that are texts -> how their tokens are written, without filling"""
    metric: Callable[[Model], AblationMetric] | None = None
    """Model -> the loss of the task; None where there is no task"""


class LoadedModel(NamedTuple):
    """A stored model."""

    name: str
    config: ModelConfig
    params: Params
    initial: Callable[[Inputs], Params]
    """Inputs -> the parameters at step 0, or others drawn alike"""
    read: Callable[[Prompt], ModelInput]
    decode: Callable[[Sequence[int]], str]
    """Tokens -> text; numbers where there is no tokenizer"""
    split: Callable[[str], tuple[np.ndarray, np.ndarray]]
    """Text -> its tokens [T] as the model reads them, and where in it each begins and ends, in
    characters [T, 2]"""
    ends: tuple[int, ...] = ()
    """Tokens that end a text"""
    tokenizer_files: tuple[Path, ...] = ()
    """Where its tokenizer.json may be, the first that there is."""

    def save_tokenizer(self, folder: Path) -> None:
        """Writes tokenizer.json to a folder, where the tokenizer is a file."""
        if found := next(filter(Path.is_file, self.tokenizer_files), None):
            write_atomic(folder / FILE, found.read_bytes())


def open_run(folder: Path, seed: int | None = None) -> LoadedModel:
    """One seed of a run (None: the first), at its newest checkpoint.

    It reads a text through the run's own tokenizer, or, without a prompt, a held-out row as the
    run's task presents it.

    Args:
      folder: of a run, or the workdir of a sweep of one model.
      seed: None: the first.

    Raises:
      ValueError: there is no run, or it cannot read.
    """
    if not runs.is_run(folder):
        raise ValueError(
            f"{folder} holds no run; give --workdir=RUN, or --path=FOLDER of a published model"
        )
    found = runs.read_run(folder, None if seed is None else [seed])
    [(seed, params)] = found.params.items()
    if (folder / runs.SPECS).is_file():
        folder = runs.run_of_seed(folder, seed)
    run = _Run(folder, found.config, Experiment.from_dict(found.record["config"]), seed)
    objective, sizes = run.objective, run.experiment.data.sizes()
    ends: tuple[int, ...] = ()
    if "<end>" in objective.special_tokens:
        ends = (sizes.vocab_size + objective.special_tokens.index("<end>"),)
    files = folder / FILE, Path(run.tokenizer_name)
    return LoadedModel(
        str(folder), found.config, params, run.initial, run.read, run.decode, run.split, ends, files
    )


@dataclasses.dataclass(frozen=True)
class _Run:
    """What a run reads and writes."""

    folder: Path
    config: ModelConfig
    experiment: Experiment
    seed: int

    @property
    def objective(self) -> Objective:
        return OBJECTIVES[self.experiment.task]

    @property
    def tokenizer_name(self) -> str:
        """ "" where the data are no text."""
        name: str = getattr(self.experiment.data, "tokenizer", "")
        return name

    @property
    def is_kept(self) -> bool:
        """Is the tokenizer known? One that was learnt is a file."""
        return (self.folder / FILE).exists() or not self.tokenizer_name.startswith("bpe:")

    @functools.cached_property
    def tokenizer(self) -> Tokenizer:
        """The run's own."""
        return make_tokenizer(self.tokenizer_name, [], self.folder)

    def initial(self, inputs: Inputs) -> Params:
        """The parameters that it began with."""
        if self.experiment.start:
            start = load_start(self.experiment.start, self.seed)
            tokens = np.asarray(inputs["tokens"])
            return with_plan_of(start.config, start.params, self.config, tokens)[0]
        make = init_function(self.config, self.experiment.head_init)
        return initial_params(self.config.build(), make, self.seed, inputs)

    def decode(self, tokens: Sequence[int]) -> str:
        """Tokens -> text."""
        if not self.tokenizer_name or not self.is_kept:
            return ",".join(map(str, tokens))
        size = self.experiment.data.sizes().vocab_size  # special tokens of the task are no text
        return self.tokenizer.decode([t for t in tokens if t < size])

    def read(self, prompt: Prompt) -> ModelInput:
        """The prompt as the model reads it."""
        if not any(prompt) or not self.tokenizer_name:
            return self._read_data(prompt)
        if not self.is_kept:
            raise ValueError(f"{self.folder} has lost its {FILE}; give --tokens=1,2,3")
        size = self.experiment.data.sizes().vocab_size

        def encode(text: str) -> Sequence[int]:
            tokens: list[int] = self.tokenizer.encode([text])[0].tokens.tolist()
            return tokens

        def piece(token: int) -> str:
            if token >= size:
                return special_name(self.objective, token, size)
            return self.tokenizer.piece(token)

        return _read(self.config, prompt, encode, piece, self._starts(size))

    def _starts(self, size: int) -> list[int]:
        """Tokens before what a decoder writes, if the task has one; `size`: tokens of the data."""
        symbols = self.objective.special_tokens
        return [size + symbols.index("<start>")] if "<start>" in symbols else []

    def _read_data(self, prompt: Prompt) -> ModelInput:
        """A held-out row, or token numbers."""
        data = self.experiment.data
        dataset = data.load(self.experiment.train.length, self.folder)
        bound = self.objective.bind(dataset.sizes)
        if not any(prompt):
            return _heldout(self.config, bound, dataset)
        if prompt.text or prompt.source:
            raise ValueError(
                f"the data of {self.folder} ({type(data).__name__}) are no text: give "
                "--tokens=1,2,3, or leave it out to see a held-out row"
            )
        starts = self._starts(dataset.sizes.vocab_size)
        piece = lambda t: decode_tokens(bound, dataset, [t])
        return _read(self.config, prompt, None, piece, starts)

    def split(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        """A text's tokens, and where each stands."""
        if not self.tokenizer_name or not self.is_kept:
            raise ValueError(
                f"{self.folder} reads no text: its data have none, or its {FILE} is lost"
            )
        encoded = self.tokenizer.encode([text])[0]
        return encoded.tokens, encoded.spans(text)


def open_folder(folder: Path) -> LoadedModel:
    """A published model, with the tokenizer.json beside it.

    Raises:
      ValueError: the folder cannot be read, or a text is to be read without a tokenizer.
    """
    model, params = pretrained.load(folder)
    config = model.config
    ends = end_tokens(folder, config)

    @functools.cache
    def tokenizer() -> SubwordTokenizer:
        return load_tokenizer(pretrained.tokenizer_path(folder))

    def initial(inputs: Inputs) -> Params:
        return initial_params(config.build(), None, 0, inputs)

    def read(prompt: Prompt) -> ModelInput:
        if not any(prompt):
            raise ValueError('no text; give --text="..." or --tokens=1,2,3')
        encode: Callable[[str], Sequence[int]] | None = None
        piece: Callable[[int], str] = str
        if prompt.text or prompt.source or (folder / FILE).is_file():
            its = tokenizer()
            encode, piece = lambda text: its.read(text).tokens.tolist(), its.piece
        return _read(config, prompt, encode, piece, [decoder_start(folder)], ends)

    def decode(tokens: Sequence[int]) -> str:
        if not (folder / FILE).is_file():
            return ",".join(map(str, tokens))
        return tokenizer().decode(tokens)

    def split(text: str) -> tuple[np.ndarray, np.ndarray]:
        one = tokenizer().read(text)
        return one.tokens, one.spans

    files = (folder / FILE,)
    return LoadedModel(str(folder), config, params, initial, read, decode, split, ends, files)


def decoder_start(folder: Path) -> int:
    """The token that the decoder of an encoder-decoder reads first; 0 where no file says it."""
    found = _setting(folder, "decoder_start_token_id")
    return found if isinstance(found, int) else 0


def _setting(folder: Path, name: str) -> object:
    """An attribute of generation_config.json, else of config.json, else None."""
    found: object = None
    for file in ("generation_config.json", "config.json"):
        if found is None and (folder / file).is_file():
            found = json.loads((folder / file).read_text(encoding="utf-8-sig")).get(name)
    return found


def end_tokens(folder: Path, config: ModelConfig) -> tuple[int, ...]:
    """`eos_token_id`, one or several."""
    found = _setting(folder, "eos_token_id")
    listed = found if isinstance(found, list) else [found]
    return tuple(t for t in listed if isinstance(t, int) and 0 <= t < config.vocab_size)


def until_end(tokens: Iterable[int], ends: Collection[int]) -> Iterator[int]:
    """The tokens before the first end token.

    >>> list(until_end([5, 3, 0, 5], ends=(0,)))
    [5, 3]
    """
    return itertools.takewhile(lambda token: token not in ends, tokens)


def _read(
    config: ModelConfig,
    prompt: Prompt,
    encode: Callable[[str], Sequence[int]] | None,
    write: Callable[[int], str],
    starts: list[int],
    ends: tuple[int, ...] = (),
) -> ModelInput:
    """The texts of a prompt; `starts` come before what a decoder with an encoder writes, which goes
    on: it has no end token of the tokenizer."""
    both = config.kind == "encoder_decoder"
    if both != bool(prompt.source or prompt.source_tokens):
        raise ValueError(
            "an encoder-decoder reads two texts: give --source for the encoder and --text for the "
            "decoder (or --source_tokens and --tokens)"
            if both
            else f"a {config.kind} reads one text: leave --source and --source_tokens out"
        )
    begun = (starts, ends) if both else ((), ())
    ids = {"tokens": _ids("tokens", prompt.text, prompt.tokens, encode, *begun)}
    if both:
        ids["source"] = _ids("source", prompt.source, prompt.source_tokens, encode)
    for name, row in ids.items():
        least, most = min(row), max(row)
        if least < 0 or most >= config.vocab_size:
            raise ValueError(
                f"{name}: {most if least >= 0 else least} is no token of this model, which has 0 "
                f"to {config.vocab_size - 1}"
            )
    _check_length(config, {name: len(row) for name, row in ids.items()})
    inputs: Inputs = {name: jnp.asarray([row], jnp.int32) for name, row in ids.items()}
    return ModelInput(inputs, {name: list(map(write, row)) for name, row in ids.items()})


def _ids(
    name: str,
    text: str,
    tokens: str,
    encode: Callable[[str], Sequence[int]] | None,
    starts: Sequence[int] = (),
    ends: Sequence[int] = (),
) -> list[int]:
    flags = ("text", "tokens") if name == "tokens" else ("source", "source_tokens")
    if text and tokens:
        raise ValueError(f"give --{flags[0]} or --{flags[1]}, not both")
    if tokens:
        try:
            return [int(t) for t in tokens.split(",")]
        except ValueError:
            raise ValueError(f"--{flags[1]}={tokens} must be numbers such as 1,2,3") from None
    encoded = list(encode(text)) if encode else []
    if encoded and encoded[-1] in ends:
        del encoded[-1]
    found = [*starts, *encoded]
    if not found or (name == "source" and not text):
        raise ValueError(f"--{flags[0]} has no token; give at least one word")
    return found


def _check_length(config: ModelConfig, lengths: dict[str, int]) -> None:
    for name, length in lengths.items():
        if length > config.max_len:
            raise ValueError(
                f"{name}: {length} tokens are more than max_len {config.max_len} of this model; "
                "give a shorter text"
            )
        if length > LONGEST:
            raise ValueError(
                f"{name}: a page of {length} tokens would be too large to open, {LONGEST} are the "
                "most; give a shorter text"
            )


def _heldout(config: ModelConfig, objective: Objective, dataset: Dataset) -> ModelInput:
    """A held-out row as the objective presents it."""
    example, ends = attention_maps.shown_row(objective, dataset)
    inputs = example.inputs
    _check_length(config, ends)

    def write(name: str) -> list[str]:
        row = np.asarray(inputs[name])[0, : ends[name]]
        if not np.issubdtype(row.dtype, np.integer):  # features have no words
            return [str(i) for i in range(len(row))]
        return [decode_tokens(objective, dataset, [t]) for t in row.tolist()]

    metric = functools.partial(_metric, objective, example)
    return ModelInput(inputs, {name: write(name) for name in ends}, metric)


def _metric(task: Objective, example: Example, model: Model) -> AblationMetric:
    """What the task says of the answer, the mean over its targets."""
    unit, divisor = ("bits ", math.log(2)) if task.loss is cross_entropy else ("", 1.0)

    def loss(params: Params, patch: Patches) -> jax.Array:
        answer, _ = task.predict(model, params, example.inputs, patch=patch)
        losses = task.loss(answer, example.targets) * example.weights
        return jnp.sum(losses) / jnp.sum(example.weights) / divisor

    meaning = f"{unit}that a target of the task costs more when this head writes nothing"
    return AblationMetric("loss without it", meaning, loss, jnp.subtract)
