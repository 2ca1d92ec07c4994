"""A config (of ml_collections) as an experiment of the lab, and what its file says of a sweep."""

import dataclasses
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, cast, get_args

import jax
from ml_collections import ConfigDict

from attnlab import lab
from attnlab.data import DATASETS, DataConfig
from attnlab.lab.description import Description
from attnlab.lab.machine import threads, write_threads
from attnlab.lab.spec import LAYOUT, SHARING, matched, specs_of
from attnlab.lab.sweep import add_specs
from attnlab.models import ModelConfig, from_dict, to_dict
from attnlab.models.budget import Budget, with_layout
from attnlab.names import lookup
from attnlab.nested import flatten
from attnlab.training import sharding
from attnlab.training.config import TrainConfig
from attnlab.training.interrupts import Stopped, stop_signals

FIELDS = ("task", "start", "data", "model", "train", "init", "callbacks", "match")
"""What a config has at least."""
PATHS = ("path", "tokenizer")
"""Fields of datasets that are paths, or may be one."""


class Setup(NamedTuple):
    """What a config file describes."""

    base: lab.Experiment
    """Before a budget is made equal."""
    seeds: tuple[int, ...]
    match: lab.Match | None
    variants: list[lab.Variant]
    """Empty where the file has none."""
    description: Description


def model_of(fields: ConfigDict) -> ModelConfig:
    """`config.model` as the config of the model. Raises ValueError."""
    return from_dict(fields.to_dict())


def data_of(fields: ConfigDict) -> DataConfig:
    """`config.data` as an entry of `DATASETS` with its fields. Raises ValueError."""
    given = {
        name: os.path.expanduser(a) if name in PATHS and isinstance(a, str) else a
        for name, a in fields.items()
    }
    kind = lookup(DATASETS, given.pop("source"), what="data source")
    try:
        return kind(**given)
    except TypeError:
        raise ValueError(
            f"data.source={fields['source']!r} does not have all of the fields "
            f"{', '.join(given)}; choose the source by its preset behind the colon of the config"
        ) from None


def experiment_of(config: ConfigDict) -> lab.Experiment:
    """The experiment of a config, before a budget is made equal. Raises ValueError."""
    missing = [name for name in FIELDS if name not in config]
    if missing or not isinstance(config, ConfigDict):
        what = f"a config without {', '.join(missing)}" if missing else "no ConfigDict"
        raise ValueError(
            f"get_config() of the config file returns {what}; begin with "
            "experiments.configs.byte_lm.get_config() and change its fields"
        )
    _check_none(config)
    found = lab.Experiment(
        model=model_of(config.model),
        train=TrainConfig.from_dict(config.train.to_dict()),
        data=data_of(config.data),
        task=config.task,
        start=os.path.expanduser(config.start),
        init=config.init,
        callbacks=tuple(config.callbacks),
    )
    found.check_start()
    return found


def _check_none(config: ConfigDict) -> None:
    """Raises ValueError where a field is None that has to have a value."""
    source: Any = lookup(DATASETS, config.data.source, what="data source")
    defaults: dict[str, object] = {
        "model": to_dict(ModelConfig()),
        "train": TrainConfig().to_dict(),
        "data": {field.name: field.default for field in dataclasses.fields(source)},
    }
    free = {path for path, value in flatten(defaults).items() if value is None}
    # Those of heads and positions that are None have the default of the chosen class.
    chosen = ("model.heads.", "model.positions.", "model.encoder.")
    for path, value in flatten(config.to_dict()).items():
        if value is None and path not in free and not path.startswith(chosen):
            raise ValueError(f"config.{path} is None; it needs a value")


def matched_experiment(config: ConfigDict) -> lab.Experiment:
    """The experiment of a config for one run, with its budget made equal. Raises ValueError."""
    found, match = experiment_of(config), match_of(config)
    if match is None:
        return found
    reference = with_layout(found.model, match.layout, match.sharing)
    return matched(found, reference, match.budget)


def run_config(
    config: ConfigDict,
    folder: Path,
    options: lab.RunOptions = lab.RunOptions(),  # noqa: B008
) -> list[lab.RunResult]:
    """Trains the model of a config with each seed of `train.seeds`, one after the other.

    Args:
      config: of a config file.
      folder: workdir; each seed is a run in it.
      options: of `run_one`.

    Raises:
      Exceptions of `lab.run_one`.
    """
    specs = specs_of(matched_experiment(config), [lab.Variant({})], list(config.train.seeds))
    if jax.process_index() == 0:
        add_specs(specs, folder)
        write_threads(folder, threads())
    results = []
    with stop_signals() as stop_requested:
        for spec in specs:
            results.append(lab.run_one(spec, folder, options=options))
            if sharding.any_process(bool(stop_requested())):
                raise Stopped(
                    f"stopped; {len(results)} of {len(specs)} runs are complete; repeat the "
                    "command to resume"
                )
    return results


def match_of(config: ConfigDict) -> lab.Match | None:
    """What `config.match` asks for. Raises ValueError."""
    if not (budget := config.match.budget):
        return None
    lookup(dict.fromkeys(get_args(Budget)), budget, what="match.budget")
    return lab.Match(cast(Budget, budget), config.match.layout, config.match.sharing)


def setup_of(
    config: ConfigDict,
    module: ModuleType,
    preset: str,
    variants: Sequence[lab.Variant] | None = None,
    overrides: Mapping[str, object] | None = None,
) -> Setup:
    """What a config and its module describe.

    Args:
      config: with the fields that flags set.
      module: of the config file; may have `variants` (a list, or a function of the base experiment
        and the preset) and `description`, or `describe` (preset -> `Description`).
      preset: behind the colon of the config file.
      variants: in place of those of the file, of which then nothing is described.
      overrides: field -> value that flags set.

    Raises:
      ValueError: the config makes no experiment, or a flag sets what the variants vary.
    """
    base, match = experiment_of(config), match_of(config)
    described = Description()
    if variants is None:
        given = getattr(module, "variants", [])
        variants = given(base, preset) if callable(given) else given
        if hasattr(module, "describe"):
            described = module.describe(preset)
        described = getattr(module, "description", described)
    _check_overrides(variants, overrides or {}, module, config)
    return Setup(base, tuple(config.train.seeds), match, list(variants), described)


def _check_overrides(
    variants: Sequence[lab.Variant],
    overrides: Mapping[str, object],
    module: ModuleType,
    config: ConfigDict,
) -> None:
    """Raises ValueError where a flag or a preset sets what all variants set."""
    if not variants:
        return
    varied = set.intersection(*(set(variant.values) for variant in variants))
    if flag := next((field for field in overrides if field in varied), None):
        raise ValueError(f"--config.{flag} is what this sweep varies; leave the flag out")
    chosen, default = (flatten(one.to_dict()) for one in (config, module.get_config()))
    for field in (LAYOUT, SHARING):
        if field in varied and chosen[field] != default[field]:
            raise ValueError(
                f"the preset sets {field}={chosen[field]}, which this sweep varies; leave it out, "
                f"or choose by --vary={field}={chosen[field]}"
            )
