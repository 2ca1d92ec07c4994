"""Config files: presets behind the colon, a flag for each field, the experiment they describe.

A config file has a function `get_config(preset)` that returns a `ConfigDict`, made from `base()`,
or an `attnlab.lab.Experiment`, whose fields are no flags. It may have `variants` (a list, or a
function of the base experiment and the preset) and `description` (or `describe(preset)`).
"""

import ast
import dataclasses
import functools
import inspect
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType, ModuleType, SimpleNamespace
from typing import Any, NamedTuple, TypeAlias, get_args

from absl import flags
from ml_collections import ConfigDict, config_dict
from ml_collections.config_flags.tuple_parser import TupleParser

from attnlab import lab, models
from attnlab.data import DATASETS, Text
from attnlab.fields import check_choice
from attnlab.lab.spec import LAYOUT, POSITIONS, SHARING, specs_of
from attnlab.models import ModelConfig
from attnlab.models.budget import Budget
from attnlab.models.flags import choose, field_types
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
TINY = {"model.width": 16, "model.heads.num_heads": 2, "model.ffn.width": 32, **SHORTEST}
"""The same with a small model."""

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
        key = lookup(MappingProxyType(written), name + equals, what="preset")
        if key in given:
            raise ValueError(f"preset {key!r} is given twice; give it once")
        given.add(key)
        if equals and not text:
            raise ValueError(f"preset {name!r} has no value; write {name}=VALUE or leave it out")
        if isinstance(choices := known[key], tuple):
            check_choice(f"preset {key}", text, list(filter(None, choices)))
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
            # Makes "parameters", "flops" or "cache" those of another layout and sharing plan.
            "match": {"budget": "", "layout": "standard", "sharing": "separate"},
        }
    )


def fields(example: Any) -> dict[str, object]:
    """Every field of a dataclass, and of those in it; one that is None as a placeholder of its
    type, since a flag needs one to be read."""
    found: dict[str, object] = {}
    for name, kind in field_types(type(example)).items():
        value = getattr(example, name)
        found[name] = fields(value) if dataclasses.is_dataclass(value) else value
        if value is None:
            found[name] = config_dict.placeholder(kind)
    return found


def model_fields(model: ModelConfig) -> dict[str, object]:
    """Every field of a model; its sharing plan by name.

    Raises ValueError for extras that are not in alphabetical order, which a config cannot keep.
    """
    named = dataclasses.replace(model, sharing=plan_name(model.sharing))
    if (names := [extra.name for extra in model.heads.extras]) != sorted(names):
        raise ValueError(f"heads.extras={names}: a config sorts them; give them sorted by name")
    return models.to_dict(named, config_dict.placeholder)


def set_model(config: ConfigDict, model: ModelConfig) -> None:
    """Every field of `model`, and the first task for its kind."""
    config.model = ConfigDict(model_fields(model))
    config.task = next(name for name, task in OBJECTIVES.items() if model.kind in task.model_kinds)


def set_values(config: ConfigDict, values: Values) -> None:
    """Sets fields by their paths. Another layout, position scheme or dataset brings its own
    fields."""
    if (source := values.get(SOURCE)) and source != config.data.source:
        made = lookup(DATASETS, str(source), what="data source")()
        config.data = ConfigDict({"source": source, **fields(made)})
    for path in (LAYOUT, POSITIONS):
        if name := values.get(path):
            part = path.split(".")[1]
            record = choose(config.model[part].to_dict(), str(name), config_dict.placeholder)
            config.model[part] = ConfigDict(record)
    config.update_from_flattened_dict(dict(values))


# Flags --------------------------------------------------------------------------------------------

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

    def fields(self) -> dict[str, object]:
        """Field -> value; none of an experiment, whose fields are no flags."""
        return flatten(self.config.to_dict()) if isinstance(self.config, ConfigDict) else {}


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
    given = [preset] * (":" in name)
    try:
        inspect.signature(module.get_config).bind(*given)
    except TypeError as error:
        raise ValueError(f"get_config of {path} with the presets {given}: {error}") from None
    config = module.get_config(*given)
    return ConfigFile(path, preset, module, config)


def read(name: str, texts: Mapping[str, str | None]) -> ConfigFile:
    """A config file with fields that flags set: first those that choose a layout, ..., then those
    that there are with this choice.

    Args:
      name: as of `load`.
      texts: field -> value, or "None"; of a record, which is given by its fields, "None" alone.
        None: the field alone was written, as is enough for a boolean.

    Raises:
      ValueError: as `load`; a field that is not there, or no value of its type.
    """
    file = load(name)
    config = file.config
    if not isinstance(config, ConfigDict):
        if texts:
            raise ValueError(f"{name} returns an Experiment; set its fields by --vary=FIELD=VALUE")
        return file
    set_values(config, {field: texts[field] for field in CHOICES if field in texts})
    known, overrides = file.fields(), dict[str, object]()
    for field, text in texts.items():
        within = [one for one in known if one == field or one.startswith(f"{field}.")]
        if not within:
            raise ValueError(f"no config field {field!r}; {hint(field, known)}")
        if text == "None":
            overrides |= dict.fromkeys(within)
        elif within == [field]:
            *outer, last = field.split(".")
            record = functools.reduce(lambda at, part: at[part], outer, config)
            kind = record.get_type(last)
            if text is None and kind is not bool:
                raise ValueError(f"--config.{field} has no value; write --config.{field}=VALUE")
            try:
                overrides[field] = text is None or PARSERS[kind].parse(text)
            except (TypeError, ValueError) as error:
                raise ValueError(f"--config.{field}={text}: {error}") from None
        else:
            raise ValueError(f"--config.{field}={text}: it is no value; set its fields, or None")
    config.update_from_flattened_dict(overrides)
    return file._replace(overrides=overrides)


def hint(name: str, known: Iterable[str]) -> str:
    """The known name that ends in `name`, or is nearest to it, as a question."""
    ends = [one for one in known if one.rpartition(".")[2] == name.rpartition(".")[2]]
    near = min(ends, key=len, default=None) or nearest(name, known)
    return f"did you mean {near!r}?" if near else "--help lists those there are"


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
    match: lab.Match | None
    variants: list[lab.Variant]
    """Empty where the file has none."""
    description: lab.Description

    def specs(self, seeds: Sequence[int] = ()) -> list[lab.RunSpec]:
        """A run of each variant with each seed; of the base where there are no variants."""
        seeds = seeds or self.base.train.seeds
        return specs_of(self.base, self.variants or [lab.Variant({})], seeds, self.match)


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
    _check_varied(file, variants)
    return one._replace(variants=list(variants), description=described)


def _check_varied(file: ConfigFile, variants: Sequence[lab.Variant]) -> None:
    """Raises ValueError where a flag or a preset sets what all variants set.

    A preset that sets other fields too, as `tiny` does, is only refused for layout and plan.
    """
    varied = set.intersection(*(set(one.values) for one in variants)) if variants else set()
    if not varied or not isinstance(file.config, ConfigDict):
        return
    fields_of = lambda arg: file._replace(config=file.module.get_config(arg)).fields()
    found, presets = [one for one in file.overrides if one in varied], file.preset.split(",")
    chosen = fields_of(file.preset) if file.preset else {}
    for preset in presets if chosen else []:
        try:
            without = fields_of(",".join(one for one in presets if one != preset))
        except Exception:  # it cannot be left out, as the folder of pretrained.py
            continue
        changed = {n for n in {*chosen, *without} if chosen.get(n) != without.get(n)}
        found += sorted(changed & (varied if changed <= varied else {LAYOUT, SHARING} & varied))
    if found:
        value = file.fields()[found[0]]
        raise ValueError(
            f"{found[0]}={value} is set, and this sweep varies it; leave it out, or choose by "
            f"--vary={found[0]}={value}"
        )


def one_model(config: ConfigDict | lab.Experiment) -> Setup:
    """A config without variants. Raises ValueError."""
    found, match = experiment_of(config), None
    if isinstance(config, ConfigDict) and (budget := config.match.budget):
        check_choice("match.budget", budget, get_args(Budget))
        match = lab.Match(**config.match)
    elif isinstance(config, ConfigDict) and config.match != base().match:
        raise ValueError(
            f"match.layout={config.match.layout} and match.sharing={config.match.sharing} have no "
            "effect without a budget; set match.budget=parameters, flops or cache"
        )
    return Setup(found, match, [], lab.Description())


def experiment_of(config: ConfigDict | lab.Experiment) -> lab.Experiment:
    """The experiment of a config, before a budget is made equal. Raises ValueError."""
    if isinstance(config, lab.Experiment):
        return config
    default = base()
    if not isinstance(config, ConfigDict) or set(default) - set(config):
        raise ValueError(
            f"get_config() of the config file returns a {type(config).__name__}; return the "
            "ConfigDict of experiments.config.base(), or an attnlab.lab.Experiment"
        )
    leaves = flatten(config.to_dict())
    set_values(default, {path: leaves[path] for path in CHOICES})
    known = flatten(default.to_dict())
    if unknown := [path for path in leaves if path not in known]:
        chosen = ", ".join(f"{path}={leaves[path]}" for path in CHOICES)
        raise ValueError(
            f"the config has no field {unknown[0]!r} with {chosen}; {hint(unknown[0], known)}"
        )
    optional = {path for path, value in known.items() if value is None}
    if unset := [p for p, value in leaves.items() if value is None and p not in optional]:
        raise ValueError(f"config.{unset[0]} is None; it needs a value")
    home = lambda a: os.path.expanduser(a) if isinstance(a, str) else a
    values = {n: home(a) if n in PATHS else a for n, a in config.data.to_dict().items()}
    found = lab.Experiment(
        model=models.from_dict(config.model.to_dict()),
        train=TrainConfig.from_dict(config.train.to_dict()),
        data=lookup(DATASETS, values.pop("source"), what="data source")(**values),
        task=config.task,
        start=os.path.expanduser(config.start),
        init=config.init,
        callbacks=tuple(config.callbacks),
    )
    found.check_start()
    return found
