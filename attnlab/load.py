"""Load a run, a published folder or a model of the hub, with what it reads: text to tokens, and
tokens to text."""

import dataclasses
import functools
import hashlib
import itertools
import json
import math
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from attnlab import pretrained, transforms
from attnlab.atomic import write_atomic
from attnlab.data import DATASETS, DataConfig, Dataset
from attnlab.data.tokenizer import (
    FILE,
    SubwordTokenizer,
    Tokenizer,
    load_tokenizer,
    make_tokenizer,
)
from attnlab.interpret import AblationMetric
from attnlab.models import ModelConfig, Sampling, from_json, generate, stream, to_json
from attnlab.models.config import sharing_name
from attnlab.models.generate import GenerateOptions
from attnlab.models.transformer import Transformer
from attnlab.names import import_those, lookup
from attnlab.names import load as load_object
from attnlab.nested import differences, flatten
from attnlab.sharing import Params
from attnlab.tap import Patches
from attnlab.training.checkpoint import Checkpoints, digest
from attnlab.training.objectives import (
    OBJECTIVES,
    Model,
    Objective,
    decode_tokens,
    special_name,
)
from attnlab.training.objectives.objective import Example, Inputs, cross_entropy
from attnlab.training.step import InitParams, initial_params

ROWS = 8
"""Held-out rows: statistics are means over them, maps are of one."""
WORDS = 20
"""Tokens at the beginning of a row that a report shows as words."""
TEXTS = ("source", "tokens")
"""The inputs of a model that are tokens."""
MAY_DIFFER = (
    "sharing", "encoder.shares_decoder", "delta_rank", "compute", "attention.order",
    "attention.implementation", "init", "dropout", "metadata",
)  # fmt: skip
"""What a run may choose: how parameters are shared, computed with and dropped."""


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
    if not is_run(folder):
        raise ValueError(
            f"{folder} holds no run; give --workdir=RUN, or --path=FOLDER of a published model"
        )
    found = read_run(folder, None if seed is None else [seed])
    [(seed, params)] = found.params.items()
    if (folder / SPECS).is_file():
        folder = run_of_seed(folder, seed)
    run = _Run(folder, found.config, found.record["config"], seed)
    objective, sizes = run.objective, run.data.sizes()
    ends: tuple[int, ...] = ()
    if "<end>" in objective.special_tokens:
        ends = (sizes.vocab_size + objective.special_tokens.index("<end>"),)
    files = folder / FILE, Path(run.tokenizer_name)
    return LoadedModel(
        str(folder), found.config, params, run.initial, run.read, run.decode, run.split, ends, files
    )


@dataclasses.dataclass(frozen=True, eq=False)
class _Run:
    """What a run reads and writes."""

    folder: Path
    config: ModelConfig
    experiment: Mapping[str, Any]
    """"config" of its spec.json."""
    seed: int

    @property
    def objective(self) -> Objective:
        return lookup(OBJECTIVES, self.experiment["task"], what="task")

    @functools.cached_property
    def data(self) -> DataConfig:
        return stored_data(self.experiment["data"])

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
    def tokenizer(self) -> Tokenizer:
        """The run's own."""
        return make_tokenizer(self.tokenizer_name, [], self.folder)

    def initial(self, inputs: Inputs) -> Params:
        """The parameters that it began with."""
        if self.experiment["start"]:
            start = load_start(self.experiment["start"], self.seed)
            tokens = np.asarray(inputs["tokens"])
            return with_plan_of(start.config, start.params, self.config, tokens)[0]
        make: InitParams | None = None
        if name := self.experiment.get("init", ""):
            make = lambda key, inputs: load_object(name)(key, self.config, inputs)
        return initial_params(self.config.build(), make, self.seed, inputs)

    def decode(self, tokens: Sequence[int]) -> str:
        """Tokens -> text."""
        if not self.tokenizer_name or not self.is_kept:
            return ",".join(map(str, tokens))
        size = self.data.sizes().vocab_size  # special tokens of the task are no text
        return self.tokenizer.decode([t for t in tokens if t < size])

    def read(self, prompt: Prompt) -> ModelInput:
        """The prompt as the model reads it."""
        if not any(prompt) or not self.tokenizer_name:
            return self._read_data(prompt)
        if not self.is_kept:
            raise ValueError(f"{self.folder} has lost its {FILE}; give --tokens=1,2,3")
        size = self.data.sizes().vocab_size

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
        data = self.data
        dataset = data.load(self.experiment["train"]["length"], self.folder)
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
        read = self.tokenizer.read(text, special_tokens=False)
        return read.tokens, read.spans


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


def stored_data(fields: Mapping[str, Any]) -> DataConfig:
    """The data of a spec.json: "source", a name of `DATASETS`, and its fields.

    Raises:
      ValueError: an unknown name or field.
    """
    kind = lookup(DATASETS, fields["source"], what="data source")
    more = {n: tuple(v) if isinstance(v, list) else v for n, v in fields.items() if n != "source"}
    try:
        return kind(**more)
    except TypeError as error:
        raise ValueError(f"not data of this version of attnlab: {error}") from None


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
    example, ends = shown_row(objective, dataset)
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


SPEC, SPECS, RUNS = "spec.json", "specs.json", "runs"
"""Files of a run and of a sweep, the folder of its runs."""


class StoredRun(NamedTuple):
    """A run at its newest checkpoint."""

    config: ModelConfig
    params: dict[int, dict[str, Any]]
    """Seed -> parameters, on the first device."""
    steps: int
    """Steps taken at the checkpoint."""
    record: dict[str, Any]
    """Its spec.json: "config", and "source" with the "sha256" of the data."""


def load_run(folder: str | Path, seed: int | None = None) -> tuple[Transformer, dict[str, Any]]:
    """The model and the parameters of one seed, at the newest checkpoint.

    A checkpoint that is damaged is reported and passed over. Needs the extra `train`.

    Args:
      folder: of a run (`WORKDIR/runs/ID`), or the workdir of a sweep whose runs differ in their
        seed only, as `experiments.run` writes it.
      seed: None: the first.

    Returns:
      (model, params), arrays on the first device.

    Raises:
      ValueError: there is no run, no checkpoint, no such seed, or several runs of it.

    >>> try:
    ...     load_run("nowhere")
    ... except ValueError as error:
    ...     print(error)
    nowhere holds no run with checkpoints; give the folder of one run
    """
    found = read_run(folder, None if seed is None else [seed])
    return found.config.build(), next(iter(found.params.values()))


def is_run(folder: str | Path) -> bool:
    """Is it the folder of a run or of a sweep, not of a published model?"""
    folder = Path(folder)
    if (folder / SPECS).is_file():
        return True
    return (folder / "checkpoints").is_dir() and (folder / SPEC).is_file()


def read_run(folder: str | Path, seeds: Sequence[int] | None = None) -> StoredRun:
    """The checkpoints of these seeds of a run, in their order.

    Args:
      folder: as of `load_run`.
      seeds: None: the first; empty: no parameters are read.

    Raises:
      ValueError: as of `load_run`.
    """
    folder = Path(folder)
    if not is_run(folder):
        raise ValueError(f"{folder} holds no run with checkpoints; give the folder of one run")
    if not (folder / SPECS).is_file():
        return _read_one(folder, seeds)
    if not seeds:
        return _read_one(run_of_seed(folder), seeds)
    found = [_read_one(run_of_seed(folder, seed), [seed]) for seed in seeds]
    params = {seed: one for run in found for seed, one in run.params.items()}
    return found[0]._replace(params=params)


def run_of_seed(workdir: str | Path, seed: int | None = None) -> Path:
    """The folder of the only run of a seed in the workdir of a sweep; None: the first seed.

    Raises:
      ValueError: there is no such run, or there are several.
    """
    workdir = Path(workdir)
    specs = json.loads((workdir / SPECS).read_text(encoding="utf-8"))
    seed = specs[0]["seed"] if seed is None else seed
    ids = [spec["id"] for spec in specs if spec["seed"] == seed]
    if not ids:
        known = ", ".join(str(seed) for seed in dict.fromkeys(spec["seed"] for spec in specs))
        raise ValueError(f"{workdir} has no seed {seed}, only {known}")
    if len(ids) > 1:
        known = ", ".join(ids)
        raise ValueError(
            f"{workdir} is a sweep of several models; give the folder of one run, as "
            f"{workdir / RUNS / ids[0]} (its runs with seed {seed}: {known})"
        )
    return workdir / RUNS / str(ids[0])


def seeds_of(folder: str | Path) -> list[int]:
    """The seeds of a run, or of the only model of a sweep, in their order. Raises ValueError."""
    folder = Path(folder)
    if (folder / SPECS).is_file():
        specs = json.loads((folder / SPECS).read_text(encoding="utf-8"))
        return list(dict.fromkeys(int(spec["seed"]) for spec in specs))
    return [_read_one(folder, ()).record["seed"]]


def _read_one(folder: Path, seeds: Sequence[int] | None) -> StoredRun:
    """Of the folder of a run."""
    if not (folder / "checkpoints").is_dir():
        raise ValueError(f"{folder} has no checkpoint yet; let it run until its first")
    record = json.loads((folder / SPEC).read_text(encoding="utf-8"))
    import_those(record["config"].get("imports", ()))
    own = record["seed"]
    seeds = [own] if seeds is None else seeds
    if missing := [str(seed) for seed in seeds if seed != own]:
        raise ValueError(f"{folder} has no seed {', '.join(missing)}, only {own}")
    with Checkpoints(folder / "checkpoints") as checkpoints:
        found = checkpoints.restore() if seeds else checkpoints.notes()
    if found is None:
        raise ValueError(f"{folder} has no checkpoint yet; let it run until its first")
    step, notes = found[0], found[-1]
    params = {seed: _params(found[1]) for seed in seeds}
    return StoredRun(_config(notes), params, step, record)


def _config(notes: dict[str, Any]) -> ModelConfig:
    """The config of the model, from the file that `describe_model` wrote."""
    fields = {name: value for name, value in notes["model"].items() if name != "plans"}
    return from_json(json.dumps({"version": fields.pop("version"), "model": fields}))


def _params(state: dict[str, Any]) -> dict[str, Any]:
    """The parameters as a tree, from path -> array [1, ...]."""
    params: dict[str, Any] = {}
    for path, a in state.items():
        *steps, last = path.split(".")
        if steps[:1] == ["params"]:
            where = params
            for step in steps[1:]:
                where = where.setdefault(step, {})
            where[last] = a[0]
    return params


class Start(NamedTuple):
    """What a run starts from."""

    config: ModelConfig
    params: Params
    digest: str
    """Of the parameters."""
    data_digest: str | None
    """Of the data that they were trained on, where that is known."""
    description: str


def check_start(model: ModelConfig, folder: str) -> None:
    """Raises ValueError that names every field of `model` which the parameters of `folder` forbid.

    A part "{seed}" of the path stands for a seed; any that is there is looked at.
    """
    before, seed, after = folder.partition("{seed}")
    if seed:
        outer = Path(before).parent
        found = sorted(outer.glob(f"{Path(before).name}*{after}")) if outer.is_dir() else []
        if not found:
            raise ValueError(f"no folder {folder} of any seed")
        folder = str(found[0])
    stored = read_run(folder, ()).config if is_run(folder) else pretrained.load_config(folder)
    changed = differences(_fixed_fields(model), _fixed_fields(stored))
    if wrong := [f"model.{path}={ours!r} (there {theirs!r})" for path, ours, theirs in changed]:
        raise ValueError(
            f"the parameters of {folder} make another model than {', '.join(wrong)}; leave these "
            "fields as the folder has them, or start=''"
        )


def _fixed_fields(config: ModelConfig) -> dict[str, object]:
    """Path -> value of every field that makes other parameters or computes otherwise."""
    fields = flatten(json.loads(to_json(config))["model"])
    return {path: value for path, value in fields.items() if not path.startswith(MAY_DIFFER)}


def load_start(folder: str, seed: int) -> Start:
    """The parameters that a seed starts from: of a run those of the same seed at its newest
    checkpoint; of a published folder the same for all seeds.

    Raises:
      ValueError: there are none, or the run has no such seed.
    """
    folder = folder.replace("{seed}", str(seed))
    if not is_run(folder):
        model, params = pretrained.load(folder)
        return Start(model.config, params, params_digest(params), None, folder)
    try:
        found = read_run(folder, [seed])
    except ValueError as error:
        raise ValueError(f"seed n starts from seed n of {folder}: {error}") from None
    params = found.params[seed]
    data = found.record.get("source", {}).get("sha256")
    description = f"seed {seed} of {folder} after {found.steps:,} steps"
    return Start(found.config, params, params_digest(params), data, description)


def params_digest(params: Params) -> str:
    """Of all arrays and their names."""
    leaves = jax.tree_util.tree_flatten_with_path(params)[0]
    lines = [f"{jax.tree_util.keystr(path)} {digest(leaf)}" for path, leaf in leaves]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def with_plan_of(
    config: ModelConfig, params: Params, model: ModelConfig, tokens: np.ndarray | jax.Array
) -> tuple[Params, str]:
    """Parameters under the sharing plan of another model.

    Args:
      config: of the model that `params` are of.
      params: its parameters.
      model: gives the plan, the rank of deltas, and whether encoder and decoder share.
      tokens: whose outputs are compared.

    Returns:
      The parameters, and in words what was changed and what that does to the outputs.
    """
    changed, new, changes = config, params, []
    shared, wanted = (c.encoder is not None and c.encoder.shares_decoder for c in (config, model))
    if shared and not wanted:
        changed, new = transforms.untie_encoder(changed, new)
        changes.append("encoder and decoder part")
    ranked = dataclasses.replace(changed, delta_rank=model.delta_rank)
    if model.plan != changed.plan or ("delta" in model.plan and ranked != changed):
        changes.append(f"plan {sharing_name(changed)} -> {sharing_name(model)}")
        # A name is the plan of both stacks; an encoder that has a plan of its own keeps it.
        own = changed.encoder is not None and changed.encoder.sharing is not None
        changed, new = transforms.change_plan(ranked, new, model.plan if own else model.sharing)
    if wanted and not shared:
        changed, new = transforms.tie_encoder(changed, new)
        changes.append("encoder and decoder become one")
    if not changes:
        return new, f"its plan, {sharing_name(config)}, is kept"
    difference = transforms.output_difference((config, params), (changed, new), tokens)
    return new, f"{', '.join(changes)}: outputs differ by {difference:.3g} of the largest"


class Row(NamedTuple):
    """One held-out row, as an objective presents it."""

    example: Example
    ends: dict[str, int]
    """Its texts -> the length of each: what follows is padding."""


def shown_rows(objective: Objective, dataset: Dataset) -> list[Row]:
    """Up to `ROWS` held-out rows, evenly spaced; the first is the one whose maps are kept.

    Of the rows that are no shorter than the middle one, that is the one that begins with most
    letters in words, so not the indentation of a program.
    """
    rows = dataset.heldout(ROWS)
    count = len(jax.tree.leaves(rows)[0])
    prepared = jax.jit(objective.prepare)(rows, jax.random.key(0))
    examples = [jax.tree.map(lambda a: a[i : i + 1], prepared) for i in range(count)]  # noqa: B023
    found = [Row(example, _lengths(example)) for example in examples]
    lengths = [sum(row.ends.values()) for row in found]

    def rank(i: int) -> tuple[bool, int, int]:
        is_long = lengths[i] >= lengths[count // 2]
        return is_long, _letters(found[i], dataset), -abs(i - count // 2)

    first = max(range(count), key=rank)
    return [found[first], *found[:first], *found[first + 1 :]]


def shown_row(objective: Objective, dataset: Dataset) -> Row:
    """The row whose maps are kept."""
    return shown_rows(objective, dataset)[0]


def _lengths(example: Example) -> dict[str, int]:
    inputs = example.inputs
    real = {name: np.ones(np.shape(inputs[name])[1], bool) for name in TEXTS if name in inputs}
    for text, mask in (("tokens", "padding_mask"), ("source", "source_padding_mask")):
        if mask in inputs:
            real[text] = np.asarray(inputs[mask])[0]
    if "source" in inputs:
        real["tokens"] = np.asarray(example.weights[0] > 0)
    return {n: int(np.flatnonzero(a)[-1]) + 1 for n, a in real.items() if np.any(a)}


def _letters(row: Row, dataset: Dataset) -> int:
    """In words of two letters or more among the first `WORDS` tokens; 0 of features."""
    name = "source" if "source" in row.ends else "tokens"
    tokens = np.asarray(row.example.inputs[name])[0][: min(row.ends.get(name, 0), WORDS)]
    if not np.issubdtype(tokens.dtype, np.integer):
        return 0
    text = dataset.decode([t for t in tokens.tolist() if t < dataset.sizes.vocab_size])
    text = re.sub(r"\\(x..|.)", " ", text)  # line ends and other escapes
    return sum(map(len, re.findall(r"[^\W\d_]{2,}", text)))


class _Request(NamedTuple):
    """A call of `generate`."""

    prompt: jax.Array
    num_tokens: int
    options: GenerateOptions
    before: list[int]
    """Tokens that the text begins with: those of the prompt, unless it has a source."""


def texts(
    opened: LoadedModel,
    prompt: Prompt,
    new_tokens: int,
    count: int = 1,
    sampling: Sampling = Sampling(),  # noqa: B008
    draw: int = 0,
) -> list[str]:
    """`count` texts; one of a model without an encoder begins with its prompt.

    Args:
      opened: the model.
      prompt: what it continues.
      new_tokens: of each text, as many as fit.
      count: texts.
      sampling: how tokens are chosen; temperature 0: the likeliest.
      draw: of the random key.

    Raises:
      ValueError: the prompt cannot be read, or leaves no space for a token.
    """
    request = _request(opened, prompt, new_tokens, sampling, draw)
    rows = jnp.repeat(request.prompt, count, axis=0)
    options = request.options
    for name in ("source", "source_padding_mask"):
        if (a := options.get(name)) is not None:
            options[name] = jnp.repeat(jnp.asarray(a), count, axis=0)
    new = np.asarray(generate(opened.params, rows, opened.config, request.num_tokens, **options))
    until = [until_end(row, opened.ends) for row in new.tolist()]
    return [opened.decode([*request.before, *row]) for row in until]


def pieces(
    opened: LoadedModel,
    prompt: Prompt,
    new_tokens: int,
    sampling: Sampling = Sampling(),  # noqa: B008
    draw: int = 0,
) -> Iterator[str]:
    """The first of `texts`, as it is written: a piece for each token that makes one."""
    request = _request(opened, prompt, new_tokens, sampling, draw)
    columns = stream(
        opened.params, request.prompt, opened.config, request.num_tokens, **request.options
    )
    tokens = until_end((int(column[0]) for column in columns), opened.ends)
    row, written = request.before, ""
    for new in itertools.chain([[]], ([token] for token in tokens)):
        row = [*row, *new]
        text = opened.decode(row) if row else ""
        # The last character may be a part of one, which the next token completes.
        if text.startswith(written) and not text.endswith("\ufffd"):
            yield text[len(written) :]
            written = text
    text = opened.decode(row)
    yield text[len(written) :] if text.startswith(written) else f"\n{text}"


def _request(
    opened: LoadedModel, prompt: Prompt, new_tokens: int, sampling: Sampling, draw: int
) -> _Request:
    given = {name: jnp.asarray(a) for name, a in opened.read(prompt).inputs.items()}
    tokens, most = given["tokens"], opened.config.max_len
    length = tokens.shape[1]
    if length >= most:
        raise ValueError(f"the text fills all {most} tokens of the model; give a shorter one")
    fits = min(new_tokens, most - length)
    if fits < new_tokens:
        print(
            f"only {fits} of --new_tokens={new_tokens} fit: the model reads {most} tokens, its "
            f"max_len, and the text has {length}",
            file=sys.stderr,
        )
    options: GenerateOptions = {
        "source": given.get("source"),
        "source_padding_mask": given.get("source_padding_mask"),
        "end": opened.ends or None,
        "sampling": sampling,
        "key": jax.random.key(draw) if sampling.temperature else None,
    }
    return _Request(tokens, fits, options, [] if "source" in given else tokens[0].tolist())
