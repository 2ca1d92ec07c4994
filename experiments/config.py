"""Config files: presets behind the colon, a flag for each field, the experiment they describe.

A config file has a function `get_config(preset)` that returns a `ConfigDict`, made from `base()`,
or an `attnlab.lab.Experiment`, whose fields are no flags. It may have `variants` (a list, or a
function of the base experiment and the preset) and `description` (or `describe(preset)`).
"""

import ast
import dataclasses
import functools
import os
import re
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple, TypeAlias, cast, get_args

from absl import flags
from ml_collections import ConfigDict, config_dict
from ml_collections.config_flags.tuple_parser import TupleParser

from attnlab import lab, models
from attnlab.data import DATASETS, DataConfig, Text
from attnlab.lab.spec import LAYOUT, POSITIONS, SHARING, specs_of
from attnlab.models import ModelConfig
from attnlab.models.budget import Budget
from attnlab.models.flags import choose
from attnlab.names import import_module, lookup, nearest
from attnlab.nested import flatten
from attnlab.sharing.plan import plan_name
from attnlab.training.config import TrainConfig
from attnlab.training.objectives import OBJECTIVES

Values: TypeAlias = Mapping[str, object]
"""Config field -> value."""
SOURCE = "data.source"
CHOICES = (LAYOUT, POSITIONS, SOURCE)
"""Fields that decide which fields there are beside them."""
PATHS = ("path", "tokenizer")
"""Fields of datasets that are paths, or may be one."""
SHORTEST = {
    "train.batch_size": 8,
    "train.steps": 20,
    "train.schedule.warmup_steps": 2,
    "train.log_every": 5,
    "train.evaluation.every": 10,
    "train.checkpoint_every": 10,
    "train.evaluation.batch_size": 16,
    "train.evaluation.curve_windows": 16,
    "train.seeds": (0, 1),
}
"""A training of seconds, for tests."""

# Presets ------------------------------------------------------------------------------------------


def keys(switches: Mapping[str, Values]) -> dict[str, object]:
    """What `parse` knows of a config file: a layout, a sharing plan and switches (name -> values of
    the fields that it sets)."""
    return {"layout": "", "sharing": "", **dict.fromkeys(switches, False)}


def parse(arg: str, known: Mapping[str, object]) -> Any:
    """What stands behind the colon of a config file: KEY=VALUE and switches, separated by commas.

    Args:
      arg: as "layout=wide,tiny".
      known: key -> default, which has the type of the value. False: a switch, given by its name
        alone. A tuple: one of these texts, by default the first.

    Returns:
      A namespace with all keys.

    Raises:
      ValueError: an unknown key or value, or a key that is given twice.

    >>> parse("layout=wide,tiny", {"layout": "", "tiny": False, "scale": ("", "gpu")})
    namespace(layout='wide', tiny=True, scale='')
    """
    found = {key: a[0] if isinstance(a, tuple) else a for key, a in known.items()}
    written = {key if default is False else f"{key}=": key for key, default in known.items()}
    given: set[str] = set()
    for part in filter(None, arg.split(",")):
        name, equals, text = part.partition("=")
        key = lookup(written, name + equals, what="preset")
        if key in given:
            raise ValueError(f"preset {key!r} is given twice; give it once")
        given.add(key)
        if isinstance(choices := known[key], tuple):
            lookup(dict.fromkeys(filter(None, choices)), text, what=f"preset {key}")
        kind: Callable[..., object] = type(found[key])
        found[key] = kind(text or True)
    return SimpleNamespace(**found)


def other_data(
    task: str, source: str, values: Values, switches: Mapping[str, Values]
) -> Callable[..., ConfigDict]:
    """`get_config` of a file with another task and entry of `DATASETS`: the base with `values`,
    then its presets, those of `keys(switches)`."""

    def get_config(arg: str = "") -> ConfigDict:
        preset, config = parse(arg, keys(switches)), base()
        config.task = task
        set_values(config, {SOURCE: source, **values})
        set_presets(config, preset, switches)
        return config

    return get_config


def set_presets(config: ConfigDict, preset: Any, switches: Mapping[str, Values]) -> None:
    """Sets the fields of the switches that are on, in their order, then layout and plan."""
    for name, values in switches.items():
        set_values(config, values if getattr(preset, name) else {})
    chosen = {LAYOUT: preset.layout, SHARING: preset.sharing}
    set_values(config, {path: name for path, name in chosen.items() if name})


# Configs ------------------------------------------------------------------------------------------


def base() -> ConfigDict:
    """The defaults of every field: a decoder of bytes."""
    return ConfigDict(
        {
            "task": "causal_lm",
            # Weights to start from: of a published folder (see pretrained.py), or of a run.
            "start": "",
            "data": {"source": "text", **fields(Text())},
            "model": model_fields(ModelConfig()),
            "train": fields(TrainConfig()),
            # Makes the new parameters: "module:function"; "": the model does.
            "init": "",
            # Called while it trains: names of attnlab.training.CALLBACKS, or "module:function".
            "callbacks": (),
            # Solve ffn.width for the "parameters" or "flops" of another layout and sharing plan.
            "match": {"budget": "", "layout": "standard", "sharing": "separate"},
        }
    )


def fields(example: Any) -> dict[str, object]:
    """Every field of a dataclass, and of those in it; one that is None gets the first type of its
    hint, since a flag needs one to be read."""
    hints = typing.get_type_hints(type(example))
    found: dict[str, object] = {}
    for field in dataclasses.fields(example):
        value = getattr(example, field.name)
        if value is None:
            first = typing.get_args(hints[field.name])[0]
            value = config_dict.placeholder(typing.get_origin(first) or first)  # tuple[...]: tuple
        found[field.name] = fields(value) if dataclasses.is_dataclass(value) else value
    return found


def model_fields(model: ModelConfig) -> dict[str, object]:
    """Every field of a model; its sharing plan by name.

    Raises ValueError for extras that are not in alphabetical order, which a config cannot keep.
    """
    named = dataclasses.replace(model, sharing=plan_name(model.sharing))
    names = [extra.name for extra in model.heads.extras]
    if names != sorted(names):
        raise ValueError(f"heads.extras={names}: a config sorts them; give them sorted by name")
    return models.to_dict(named, config_dict.placeholder)


def set_model(config: ConfigDict, model: ModelConfig) -> None:
    """Every field of `model`, and the first task for its kind."""
    config.model = ConfigDict(model_fields(model))
    config.task = next(name for name, task in OBJECTIVES.items() if model.kind in task.model_kinds)


def set_values(config: ConfigDict, values: Values) -> None:
    """Sets fields by their paths. A layout, position scheme or dataset brings its own fields."""
    for path in CHOICES:
        if (name := values.get(path)) is None:
            continue
        if path == SOURCE:
            made = lookup(DATASETS, str(name), what="data source")()
            config.data = ConfigDict({"source": name, **fields(made)})
        else:
            part = path.split(".")[1]
            record = choose(config.model[part].to_dict(), str(name), config_dict.placeholder)
            config.model[part] = ConfigDict(record)
    config.update_from_flattened_dict(dict(values))


# Flags --------------------------------------------------------------------------------------------


class _OrNone(flags.ArgumentParser):  # type: ignore[misc]
    """A parser of a config field that also reads None."""

    def __init__(self, parser: Any) -> None:
        self.parser, self.syntactic_help = parser, parser.syntactic_help

    def parse(self, argument: object) -> object:
        return None if argument in (None, "None") else self.parser.parse(argument)

    def flag_type(self) -> str:
        return str(self.parser.flag_type())


PARSERS: dict[type, Any] = {
    int: flags.IntegerParser(),
    float: flags.FloatParser(),
    bool: flags.BooleanParser(),
    str: flags.ArgumentParser(),
    tuple: TupleParser(),
}


class ConfigFile(NamedTuple):
    """A config file that was read."""

    path: Path
    preset: str
    module: ModuleType
    config: ConfigDict | lab.Experiment
    overrides: Values = {}  # noqa: RUF012
    """Fields that flags set."""


@functools.cache
def load(name: str) -> ConfigFile:
    """The file of a --config=FILE.py:PRESET.

    Raises ValueError where it is no config file; and what its `get_config` raises.
    """
    file, _, preset = name.partition(":")
    path = Path(file)
    if path.suffix != ".py" or not path.is_file():
        raise ValueError(f"no config file {file!r}; --config is path.py or path.py:PRESET")
    module = import_module(file)
    if not hasattr(module, "get_config"):
        raise ValueError(f"{path} has no function get_config() that returns the config")
    config = module.get_config(*[preset] * (":" in name))
    return ConfigFile(path, preset, module, config)


def define_fields(argv: Sequence[str]) -> dict[str, object]:
    """Makes the fields that `argv` sets flags of their own: first those that choose a layout, ...,
    then those that there are with this choice.

    Returns:
      Field -> value of the whole config, before flags.

    Raises:
      ValueError: no config file, or a field that is not there.
    """
    files, *chosen = words_of(argv, "config", *(f"config.{path}" for path in CHOICES))
    config = load(files[-1]).config
    named = [m[1] for word in argv if (m := re.match(r"--?(?:no)?config\.([\w.]+)", word))]
    if not isinstance(config, ConfigDict):
        if named:
            raise ValueError(
                f"{files[-1]} returns an Experiment, whose fields are no flags; leave out "
                f"--config.{named[0]}, or write --vary={named[0]}=VALUE"
            )
        return {}
    set_values(config, {path: a[-1] for path, a in zip(CHOICES, chosen, strict=True) if a})
    known = flatten(config.to_dict())
    records = {path.rpartition(".")[0] for path in known}
    for path in dict.fromkeys(named):
        if path not in {*known, *records}:
            raise ValueError(f"no config field {path!r}; {hint(path, known)}")
        *outer, last = path.split(".")
        record = functools.reduce(lambda at, name: at[name], outer, config)
        kind = record.get_type(last)
        parser = _NoneOnly() if path in records else _OrNone(PARSERS[kind])
        flag = flags.Flag(parser, flags.ArgumentSerializer(), f"config.{path}", None, "A field.")
        flag.boolean = kind is bool
        flags.DEFINE_flag(flag)
    return known


class _NoneOnly(flags.ArgumentParser):  # type: ignore[misc]
    """A parser of a record, which is None or given by its fields."""

    def parse(self, argument: object) -> None:
        if argument not in (None, "None"):
            raise ValueError("it is no value; set its fields, or None")


def words_of(argv: Sequence[str], *names: str) -> list[list[str]]:
    """The values that some flags are given, whatever other flags there are."""
    first = flags.FlagValues()
    first.set_gnu_getopt(True)
    for name in names:
        flags.DEFINE_multi_string(name, [], "", flag_values=first)
    first(list(argv), known_only=True)
    return [list(first[name].value or ()) for name in names]


def hint(name: str, known: Sequence[str] | Mapping[str, object]) -> str:
    """The known name that ends in `name`, or is nearest to it, as a question."""
    ends = [one for one in known if one.rpartition(".")[2] == name.rpartition(".")[2]]
    near = min(ends, key=len, default=None) or nearest(name, known)
    return f"did you mean {near!r}?" if near else "--help lists those there are"


def given() -> ConfigFile:
    """The file of --config with the fields that flags set."""
    file, found = load(flags.FLAGS.config), flags.FLAGS
    if not isinstance(file.config, ConfigDict):
        return file
    values = {n.removeprefix("config."): found[n].value for n in found if n.startswith("config.")}
    leaves = flatten(file.config.to_dict())
    unset = [leaf for path in values for leaf in leaves if leaf.startswith(f"{path}.")]
    overrides = dict.fromkeys(unset) | {n: a for n, a in values.items() if n in leaves}
    file.config.update_from_flattened_dict(overrides)
    return file._replace(overrides=overrides)


def parse_variants(lines: Sequence[str]) -> list[lab.Variant]:
    """The combinations of `--vary` lines.

    >>> [variant.id for variant in parse_variants(["train.steps=10,20"])]
    ['10', '20']
    """
    found: dict[str, list[object]] = {}
    for line in lines:
        path, equals, values = line.partition("=")
        if not (path and equals and values):
            raise ValueError(f"--vary={line}: write FIELD=VALUE,VALUE,...")
        if path in found:
            raise ValueError(f"--vary={path}=... is given twice; write all its values in one")
        found[path] = [_literal(value) for value in values.split(",")]
    return lab.grid(**found)


def _literal(text: str) -> object:
    """A Python value; what is none is a string."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


# Experiments --------------------------------------------------------------------------------------


class Setup(NamedTuple):
    """What a config file describes."""

    base: lab.Experiment
    """Before a budget is made equal."""
    seeds: tuple[int, ...]
    match: lab.Match | None
    variants: list[lab.Variant]
    """Empty where the file has none."""
    description: lab.Description

    def specs(self, seeds: Sequence[int] = ()) -> list[lab.RunSpec]:
        """A run of each variant with each seed; of the base where there are no variants."""
        return specs_of(
            self.base, self.variants or [lab.Variant({})], seeds or self.seeds, self.match
        )


def setup_of(file: ConfigFile, variants: Sequence[lab.Variant] | None = None) -> Setup:
    """What a config file describes.

    Args:
      file: the file.
      variants: in place of those of the file, of which then nothing is described.

    Raises:
      ValueError: the config makes no experiment, or sets what all variants set.
    """
    one, module, described = one_model(file.config), file.module, lab.Description()
    if variants is None:
        variants = getattr(module, "variants", [])
        variants = variants(one.base, file.preset) if callable(variants) else variants
        if hasattr(module, "describe"):
            described = module.describe(file.preset)
        described = getattr(module, "description", described)
    if isinstance(file.config, ConfigDict):
        _check_varied(file, file.config, variants)
    return one._replace(variants=list(variants), description=described)


def one_model(config: ConfigDict | lab.Experiment) -> Setup:
    """A config without variants. Raises ValueError."""
    found = experiment_of(config)
    match = match_of(config) if isinstance(config, ConfigDict) else None
    return Setup(found, found.train.seeds, match, [], lab.Description())


def experiment_of(config: ConfigDict | lab.Experiment) -> lab.Experiment:
    """The experiment of a config, before a budget is made equal. Raises ValueError."""
    if isinstance(config, lab.Experiment):
        return config
    default = base()
    missing = [name for name in default if name not in config]
    if missing or not isinstance(config, ConfigDict):
        what = f"a config without {', '.join(missing)}" if missing else "no ConfigDict"
        raise ValueError(
            f"get_config() of the config file returns {what}; begin with "
            "experiments.config.base() and change its fields, or return an attnlab.lab.Experiment"
        )
    leaves = flatten(config.to_dict())
    set_values(default, {path: leaves[path] for path in CHOICES})
    optional = {path for path, value in flatten(default.to_dict()).items() if value is None}
    if unset := [p for p, value in leaves.items() if value is None and p not in optional]:
        raise ValueError(f"config.{unset[0]} is None; it needs a value")
    found = lab.Experiment(
        model=models.from_dict(config.model.to_dict()),
        train=TrainConfig.from_dict(config.train.to_dict()),
        data=_data_of(config.data),
        task=config.task,
        start=os.path.expanduser(config.start),
        init=config.init,
        callbacks=tuple(config.callbacks),
    )
    found.check_start()
    return found


def _data_of(record: ConfigDict) -> DataConfig:
    """`config.data` as an entry of `DATASETS` with its fields."""
    values = {
        name: os.path.expanduser(a) if name in PATHS and isinstance(a, str) else a
        for name, a in record.items()
    }
    made: Callable[..., DataConfig] = lookup(DATASETS, values.pop("source"), what="data source")
    return made(**values)


def match_of(config: ConfigDict) -> lab.Match | None:
    """What `config.match` asks for. Raises ValueError."""
    if not (budget := config.match.budget):
        return None
    lookup(dict.fromkeys(get_args(Budget)), budget, what="match.budget")
    return lab.Match(cast(Budget, budget), config.match.layout, config.match.sharing)


def _check_varied(file: ConfigFile, config: ConfigDict, variants: Sequence[lab.Variant]) -> None:
    """Raises ValueError where a flag or a preset sets what all variants set."""
    varied = set.intersection(*(set(one.values) for one in variants)) if variants else set()
    chosen = flatten(config.to_dict())
    default = flatten(file.module.get_config().to_dict()) if varied else {}
    by_preset = [f for f in (LAYOUT, SHARING) if chosen[f] != default.get(f, chosen[f])]
    for field in (*file.overrides, *by_preset):
        if field in varied:
            raise ValueError(
                f"{field}={chosen[field]} is set, and this sweep varies it; leave it out, or "
                f"choose by --vary={field}={chosen[field]}"
            )
