"""Load a run, a folder of parameters or a model of the hub: `LoadedModel`, with text in and out."""

import dataclasses
import functools
import glob
import hashlib
import itertools
import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from attnlab import transforms
from attnlab.data import DATASETS, DataConfig, Dataset
from attnlab.data.tokenizer import FILE, Tokenizer, load_tokenizer, make_tokenizer
from attnlab.models import ModelConfig, Sampling, from_json, stream, to_json
from attnlab.models.config import FlaxModel
from attnlab.models.embed import check_range
from attnlab.names import import_those, lookup
from attnlab.names import load as load_object
from attnlab.nested import JSON, differences
from attnlab.sharing import Params, plan_name
from attnlab.tap import Patches
from attnlab.training.checkpoint import Checkpoints, digest
from attnlab.training.objectives import OBJECTIVES, Model, Objective
from attnlab.training.objectives.objective import Example, Inputs, cross_entropy
from attnlab.training.step import InitParams, new_params

if TYPE_CHECKING:
    from attnlab.interpret import AblationMetric

T = TypeVar("T")

SPEC, SPECS, RUNS = "spec.json", "specs.json", "runs"
"""Files of a run and of a sweep, the folder of its runs."""
IMPORTS = "imports"
"""Field of a stored experiment: the modules outside of attnlab that define its parts."""
ROWS = 8
"""Held-out rows of `LoadedModel.heldout`."""
TEXTS = ("source", "tokens")
"""The inputs of a model that are tokens."""
MAY_DIFFER = (
    "sharing", "encoder.sharing", "encoder.shares_decoder", "delta_rank", "compute",
    "attention.order", "attention.implementation", "init", "dropout", "metadata",
)  # fmt: skip
"""What a run may choose: how parameters are shared, computed with and dropped."""


class ModelInput(NamedTuple):
    """One text as a model reads it.

    Attributes:
      inputs: arguments of the model's call.
      written: names of those that are texts -> how their tokens are written, without padding.
      metric: model -> the loss of the task; None where there is no task.
    """

    inputs: Inputs
    written: dict[str, list[str]]
    metric: "Callable[[Model], AblationMetric] | None" = None


@dataclasses.dataclass(frozen=True, eq=False)
class LoadedModel:
    """A stored model: one seed of a run at its newest checkpoint, or a published model.

    Attributes:
      name: for people.
      folder: of the run, or with config.json; tokenizer.json lies in it.
      config, params: of the model; arrays on the first device.
      record: spec.json of a run ("config" is that of the experiment, "source" has the "sha256" of
        the data); empty for a published model.
      seed, steps: of the run, and the steps taken.

        model = open_run(Path("runs/one"))
        print("".join(model.write("def main(", new_tokens=100)))
    """

    name: str
    folder: Path
    config: ModelConfig
    params: Params
    record: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    seed: int = 0
    steps: int = 0

    @functools.cached_property
    def objective(self) -> Objective | None:
        """What a run was trained on; None for a published model."""
        if not self.record:
            return None
        return lookup(OBJECTIVES, self.record["config"]["task"], what="task")

    @functools.cached_property
    def data(self) -> DataConfig | None:
        """The data of a run."""
        return stored_data(self.record["config"]["data"]) if self.record else None

    @functools.cached_property
    def dataset(self) -> Dataset:
        """`data`, loaded."""
        assert self.data is not None
        return self.data.load(self.record["config"]["train"]["length"], self.folder)

    @functools.cached_property
    def tokenizer(self) -> Tokenizer | None:
        """None where there is none, or where one that was learnt from the data is lost."""
        if (self.folder / FILE).is_file():
            return load_tokenizer(self.folder / FILE)
        name: str = getattr(self.data, "tokenizer", "")
        return make_tokenizer(name, []) if name and not name.startswith("bpe:") else None

    @property
    def num_tokens(self) -> int:
        """Tokens of the data; what follows is special tokens of the task."""
        return self.data.sizes().vocab_size if self.data else self.config.vocab_size

    @property
    def ends(self) -> list[int]:
        """Tokens that end a text."""
        found = self._special("<end>", "eos_token_id")
        return [token for token in found if token in range(self.config.vocab_size)]

    @property
    def starts(self) -> list[int]:
        """What the decoder of an encoder-decoder reads before its text."""
        found = self._special("<start>", "decoder_start_token_id")
        return found if found or self.record else [0]

    def _special(self, name: str, setting: str) -> list[int]:
        """Special tokens: of a run that of the task, of a published model those that
        generation_config.json, else config.json, sets."""
        if self.objective:
            names = self.objective.special_tokens
            return [self.num_tokens + names.index(name)] if name in names else []
        from attnlab.pretrained.metadata import metadata_of

        kept = metadata_of(self.config)
        files = [kept.get(file) or {} for file in ("generation_config", "config")]
        value: Any = next((v for file in files if (v := file.get(setting)) is not None), [])
        return list(np.ravel(value).tolist())

    def initial(self, inputs: Inputs) -> Params:
        """The parameters at step 0; of a published model others drawn alike.

        Raises:
          ValueError: the run started from others than those that are there now.
        """
        begun = self.record["config"] if self.record else {"start": "", "init": ""}
        if begun["start"]:
            start = load_start(begun["start"], self.seed)
            if start.digest != self.record["start"]["digest"]:
                raise ValueError(
                    f"{start.name} has other parameters now than those that {self.name} started "
                    "from; restore them"
                )
            tokens = np.asarray(inputs["tokens"])
            return with_plan_of(start.config, start.params, self.config, tokens)[0]
        if make := named_init(begun["init"], self.config):
            return make(jax.random.key(self.seed), inputs)
        return new_params(self.config.build(), self.seed, inputs)

    def split(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        """The tokens of a text [T] as the model reads them, a published one with special tokens,
        and where in the text each begins and ends, in characters [T, 2].

        Raises:
          ValueError: there is no tokenizer.
        """
        if self.tokenizer is None:
            raise ValueError(
                f"{self.name} has no {FILE}, which holds a tokenizer whole; give --tokens=1,2,3"
            )
        read = self.tokenizer.read(text, special_tokens=not self.record)
        return read.tokens, read.spans

    def decode(self, tokens: Sequence[int]) -> str:
        """Tokens -> text, without special tokens of a task; numbers where there is no tokenizer."""
        if self.tokenizer is None:
            return ",".join(map(str, tokens))
        return self.tokenizer.decode([t for t in tokens if t < self.num_tokens])

    def piece(self, token: int) -> str:
        """One token for people."""
        if self.objective and token >= self.num_tokens:
            # A vocabulary may be larger than those of the data and the task.
            more = self.objective.special_tokens[token - self.num_tokens :]
            return more[0] if more else f"<{token}>"
        if self.tokenizer is not None:
            return self.tokenizer.piece(token)
        return self.dataset.decode([token]) if self.data else str(token)

    @functools.cached_property
    def digest(self) -> str:
        """sha256 of all parameters and their names."""
        leaves = jax.tree_util.tree_flatten_with_path(self.params)[0]
        lines = [f"{jax.tree_util.keystr(path)} {digest(leaf)}" for path, leaf in leaves]
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()

    def heldout(self) -> list[ModelInput]:
        """Up to `ROWS` held-out rows of a run as its task presents them, evenly spaced, the longest
        first."""
        assert self.objective is not None
        objective = self.objective.bind(self.dataset.sizes)
        rows = self.dataset.heldout(ROWS)
        examples = jax.jit(objective.prepare)(rows, jax.random.key(0))
        found = []
        for i in range(len(jax.tree.leaves(rows)[0])):
            example: Example = jax.tree.map(lambda a, i=i: a[i : i + 1], examples)
            written = {
                name: self._written(np.asarray(example.inputs[name])[0, :end])
                for name, end in _lengths(example).items()
            }
            metric = functools.partial(_metric, objective, example)
            found.append(ModelInput(example.inputs, written, metric))
        return sorted(found, key=lambda one: -sum(map(len, one.written.values())))

    def _written(self, row: np.ndarray) -> list[str]:
        """How the tokens of a text are written; features have no words but their positions."""
        is_text = np.issubdtype(row.dtype, np.integer)
        return [self.piece(t) if is_text else str(i) for i, t in enumerate(row.tolist())]

    def read(self, text: str | Sequence[int] = "", source: str | Sequence[int] = "") -> ModelInput:
        """A text as the model reads it; without one, a held-out row of a run as its task presents
        it.

        Args:
          text: what a decoder continues or an encoder reads, or the ids of its tokens.
          source: the same for the encoder of an encoder-decoder.

        Raises:
          ValueError: the text does not fit the model.
        """
        if not text and not source:
            if self.objective is None:
                raise ValueError('no text; give --text="..." or --tokens=1,2,3')
            return self.heldout()[0]
        both = self.config.kind == "encoder_decoder"
        if both != bool(source):
            needs = "two texts: give --source too" if both else "one text: leave --source out"
            raise ValueError(f"a model of kind {self.config.kind} reads {needs}")
        given = {"tokens": text, "source": source} if both else {"tokens": text}
        rows = {name: self._ids(one) for name, one in given.items()}
        if both and isinstance(text, str):
            # The decoder goes on behind its text, which therefore has no end token.
            row = rows["tokens"]
            at_end = row and not self.record and row[-1] in self.ends
            rows["tokens"] = [*self.starts, *(row[:-1] if at_end else row)]
        for name, row in rows.items():
            if not 0 < len(row) <= self.config.longest_text:
                raise ValueError(
                    f"{name}: {len(row)} tokens, where this model reads 1 to "
                    f"{self.config.longest_text}; give another text"
                )
            check_range(name, np.array(row), self.config.vocab_size)
        inputs: Inputs = {name: jnp.asarray([row], jnp.int32) for name, row in rows.items()}
        return ModelInput(inputs, {name: list(map(self.piece, row)) for name, row in rows.items()})

    def _ids(self, text: str | Sequence[int]) -> list[int]:
        return self.split(text)[0].tolist() if text and isinstance(text, str) else [*map(int, text)]

    def write(
        self,
        text: str | Sequence[int],
        new_tokens: int,
        sampling: Sampling = Sampling(),  # noqa: B008
        *,
        source: str | Sequence[int] = "",
        draw: int = 0,
    ) -> Iterator[str]:
        """A text piece by piece, as its tokens come. That of a model without an encoder begins with
        the text that it continues.

        Args:
          text, source: as in `read`.
          new_tokens: at most, and no more than max_len allows.
          sampling: how tokens are chosen; temperature 0: the likeliest.
          draw: of the random key.

        Raises:
          ValueError: the text cannot be read, or leaves no space for a token.
        """
        inputs: dict[str, Any] = dict(self.read(text, source).inputs)
        tokens = np.asarray(inputs["tokens"])
        space = self.config.max_len - tokens.shape[1]
        if space < 1:
            raise ValueError(
                f"the text fills all {self.config.max_len} tokens of the model; give a shorter one"
            )
        if space < new_tokens:
            print(f"only {space} of {new_tokens} new tokens fit max_len", file=sys.stderr)
        columns = stream(
            self.params,
            tokens,
            self.config,
            min(new_tokens, space),
            source=inputs.get("source"),
            source_padding_mask=inputs.get("source_padding_mask"),
            end=self.ends or None,
            sampling=sampling,
            key=jax.random.key(draw),
        )
        row: list[int] = [] if self.config.encoder else tokens[0].tolist()
        new = itertools.takewhile(lambda t: t not in self.ends, (int(c[0]) for c in columns))
        written = ""
        for more in itertools.chain([[]], ([token] for token in new)):
            row = [*row, *more]
            whole = self.decode(row) if row else ""
            # The last character may be a part of one, which the next token completes.
            if whole.startswith(written) and not whole.endswith("\ufffd"):
                yield whole[len(written) :]
                written = whole
        whole = self.decode(row)
        yield whole[len(written) :] if whole.startswith(written) else f"\n{whole}"


def named_init(name: str, config: ModelConfig) -> InitParams | None:
    """(key, inputs) -> new parameters, by the function (key, model, inputs) that `name` refers to;
    None for "": those of the model."""
    if not name:
        return None
    make = load_object(name)
    return lambda key, inputs: make(key, config, inputs)


def open_folder(name: str | Path) -> LoadedModel:
    """A published model, with the tokenizer.json beside it. Raises ValueError as `pretrained.load`
    does."""
    from attnlab import pretrained
    from attnlab.pretrained.hub import find_folder

    model, params = pretrained.load(name)
    return LoadedModel(str(name), find_folder(name), model.config, params)


def open_run(folder: str | Path, seed: int | None = None) -> LoadedModel:
    """One seed of a run at its newest checkpoint. A checkpoint that is damaged is reported and
    passed over.

    Args:
      folder: of a run (`WORKDIR/runs/ID`), or the workdir of a sweep whose runs differ in their
        seed only, as `experiments.run` writes it.
      seed: None: the first.

    Raises:
      ValueError: there is no run, no checkpoint, no such seed, or several runs of it.
    """
    folder, record = _record(folder, seed)
    steps, state, notes = _newest(folder, Checkpoints.restore)
    config, params, seed = _config(notes), _params(state), record["seed"]
    return LoadedModel(str(folder), folder, config, params, record, seed, steps)


def load_run(folder: str | Path, seed: int | None = None) -> tuple[FlaxModel, dict[str, Any]]:
    """(model, parameters) of one seed of a run, as `pretrained.load` returns them; needs the extra
    `train`. Args and errors are those of `open_run`.

    >>> try:
    ...     load_run("nowhere")
    ... except ValueError as error:
    ...     print(error)
    nowhere holds no run with checkpoints; give the folder of one run
    """
    found = open_run(folder, seed)
    return found.config.build(), found.params


def load_config(where: str | Path) -> ModelConfig:
    """The config of a run, a folder or a model of the hub; reads no parameters."""
    if not is_run(where):
        from attnlab import pretrained

        return pretrained.load_config(where)
    folder, _ = _record(where)
    return _config(_newest(folder, Checkpoints.notes)[1])


def is_run(folder: str | Path) -> bool:
    """Is it the folder of a run or of a sweep, not of a published model?"""
    folder = Path(folder)
    is_one = (folder / "checkpoints").is_dir() and (folder / SPEC).is_file()
    return is_one or (folder / SPECS).is_file()


def seeds_of(folder: str | Path) -> list[int]:
    """The seeds of a run, or of the only model of a sweep, in their order. Raises ValueError."""
    return list(dict.fromkeys(seed for seed, _ in _runs(Path(folder))))


def _runs(folder: Path) -> list[tuple[int, Path]]:
    """(seed, folder) of the runs of a sweep, or of one run. Raises ValueError."""
    if not is_run(folder):
        raise ValueError(f"{folder} holds no run with checkpoints; give the folder of one run")
    if not (folder / SPECS).is_file():
        return [(_read(folder / SPEC)["seed"], folder)]
    return [(spec["seed"], folder / RUNS / spec["id"]) for spec in _read(folder / SPECS)]


def _read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def _record(where: str | Path, seed: int | None = None) -> tuple[Path, JSON]:
    """The folder of the run of a seed and its spec.json. Raises ValueError as `open_run`."""
    runs = _runs(Path(where))
    seed = runs[0][0] if seed is None else seed
    folders = [folder for one, folder in runs if one == seed]
    if not folders:
        raise ValueError(f"{where} has no seed {seed}, only {', '.join(str(s) for s, _ in runs)}")
    if len(folders) > 1:
        raise ValueError(
            f"{where} is a sweep of several models; give the folder of one run: "
            f"{', '.join(map(str, folders))}"
        )
    if not (folders[0] / SPEC).is_file():
        raise ValueError(f"{folders[0]} has not begun; let it run until its first checkpoint")
    record: JSON = _read(folders[0] / SPEC)
    import_those(record["config"].get(IMPORTS, ()))
    return folders[0], record


def _newest(folder: Path, read: Callable[[Checkpoints], T | None]) -> T:
    """What `read` returns of the checkpoints of a run. Raises ValueError where there are none."""
    found = None
    if (folder / "checkpoints").is_dir():
        with Checkpoints(folder / "checkpoints") as checkpoints:
            found = read(checkpoints)
    if found is None:
        raise ValueError(f"{folder} has no checkpoint yet; let it run until its first")
    return found


def _config(notes: JSON) -> ModelConfig:
    """The config of a model from the notes of its checkpoint, as `describe_model` wrote them."""
    fields = {name: value for name, value in notes["model"].items() if name != "plans"}
    return from_json(json.dumps({"version": fields.pop("version"), "model": fields}))


def _params(state: dict[str, Any]) -> dict[str, Any]:
    """The parameters as a tree, from path -> array [1, ...]."""
    params: dict[str, Any] = {}
    for path, a in state.items():
        if path.startswith("params."):
            _, *outer, last = path.split(".")
            functools.reduce(lambda at, name: at.setdefault(name, {}), outer, params)[last] = a[0]
    return params


def stored_data(fields: Mapping[str, Any]) -> DataConfig:
    """The data of a spec.json: "source", a name of `DATASETS`, and its fields. Raises ValueError
    for an unknown name or field."""
    kind = lookup(DATASETS, fields["source"], what="data source")
    more = {n: tuple(v) if isinstance(v, list) else v for n, v in fields.items() if n != "source"}
    try:
        return kind(**more)
    except TypeError as error:
        raise ValueError(f"not data of this version of attnlab: {error}") from None


def check_start(model: ModelConfig, folder: str) -> None:
    """Raises ValueError that names every field of `model` which the parameters of `folder` forbid.

    A part "{seed}" of the path stands for a seed; any that is there is looked at.
    """
    before, *after = map(glob.escape, folder.split("{seed}"))
    if after:
        found = sorted(glob.glob("[0-9]*".join([before, *after])))
        if not found:
            raise ValueError(f"no folder {folder} of any seed")
        folder = found[0]
    theirs, ours = (json.loads(to_json(c))["model"] for c in (load_config(folder), model))
    changed = [one for one in differences(theirs, ours) if not one[0].startswith(MAY_DIFFER)]
    if wrong := [f"model.{path}={ours!r} (there {theirs!r})" for path, theirs, ours in changed]:
        raise ValueError(
            f"the parameters of {folder} make another model than {', '.join(wrong)}; leave these "
            "fields as the folder has them, or start=''"
        )


def load_start(folder: str, seed: int) -> LoadedModel:
    """What a seed starts from: of a run the same seed at its newest checkpoint; a published model
    is the same for all seeds. "{seed}" in the path stands for the seed.

    Raises:
      ValueError: there are no parameters, or the run has no such seed.
    """
    where = folder.replace("{seed}", str(seed))
    return open_run(where, seed) if is_run(where) else open_folder(where)


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
    rank = model.delta_rank
    ours, theirs = ({n: s.plan for n, s in c.layer_stacks.items()} for c in (model, changed))
    has_delta = any("delta" in plan for plan in ours.values())
    if ours != theirs or (has_delta and rank != changed.delta_rank):
        changes.append(f"plan {_plans(changed)} -> {_plans(model)}")
        plans: dict[str, Any] = {"sharing": model.sharing, "layer_types": model.layer_types}
        if changed.encoder is not None and model.encoder is not None:
            own = model.encoder.sharing
            plans["encoder"] = dataclasses.replace(changed.encoder, sharing=own)
        after = dataclasses.replace(changed, delta_rank=rank, **plans)
        changed, new = after, transforms.resharing.reshared(changed, new, after, "mean")
    if wanted and not shared:
        changed, new = transforms.tie_encoder(changed, new)
        changes.append("encoder and decoder become one")
    if not changes:
        return new, f"its plan, {_plans(config)}, is kept"
    difference = transforms.output_difference((config, params), (changed, new), tokens)
    return new, f"{', '.join(changes)}: outputs differ by {difference:.3g} of the largest"


def _plans(config: ModelConfig) -> str:
    """The name of its sharing plan, and that of an encoder which has its own."""
    name, encoder = plan_name(config.sharing), config.encoder
    if encoder is None or encoder.sharing is None:
        return name
    return f"{name}, encoder {plan_name(encoder.sharing)}"


def _lengths(example: Example) -> dict[str, int]:
    """Text -> its length; what follows is padding."""
    inputs = example.inputs
    real = {name: np.ones(np.shape(inputs[name])[1], bool) for name in TEXTS if name in inputs}
    masks = {"padding_mask": "tokens", "segments": "tokens", "source_padding_mask": "source"}
    for mask, text in masks.items():
        if mask in inputs:
            real[text] = np.asarray(inputs[mask])[0] > 0
    if "source" in inputs:
        real["tokens"] = np.asarray(example.weights[0] > 0)
    return {n: int(np.flatnonzero(a)[-1]) + 1 for n, a in real.items() if np.any(a)}


def _metric(task: Objective, example: Example, model: Model) -> "AblationMetric":
    """What the task says of the answer, the mean over its targets."""
    from attnlab.interpret import AblationMetric

    unit, divisor = ("bits ", math.log(2)) if task.loss is cross_entropy else ("", 1.0)

    def loss(params: Params, patch: Patches) -> jax.Array:
        answer, _ = task.predict(model, params, example.inputs, patch=patch)
        losses = task.loss(answer, example.targets) * example.weights
        return jnp.sum(losses) / jnp.sum(example.weights) / divisor

    meaning = f"{unit}that a target of the task costs more when this head writes nothing"
    return AblationMetric("loss without it", meaning, loss, jnp.subtract)
