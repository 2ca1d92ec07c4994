r"""How well does one head layout under one sharing plan predict bytes of real text?

    python -m experiments.run --config=experiments/configs/byte_lm.py:wide,albert --workdir=runs/one

2 CPU cores, 3 seeds: standard heads take 40 seconds to 2.75 bits per byte of the held-out part of
the Python 3.11 standard library (unigram 4.76, gzip 1.89), wide heads 65 seconds to 2.66.

Presets after the colon: a layout, a plan (`albert`, `cycle:3`), `masked` (an encoder that fills in
masked bytes), `seq2seq` (an encoder and a decoder that write the spans cut out of a text, as T5
does; bits per target token then), `tiny` (seconds, for tests), a published model (`bert_base`,
`albert_xxlarge`, ...: its sizes, and a task for its kind), or `nanogpt_cpu`: nanoGPT's CPU setting
on Tiny Shakespeare,

    python -m experiments.run --config=experiments/configs/byte_lm.py:nanogpt_cpu \
        --config.data.path=PATH/tinyshakespeare --workdir=runs/shakespeare

which reaches 1.88 nats (2.71 bits) per character on the whole validation text.
"""

import dataclasses
import typing
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from ml_collections import ConfigDict, config_dict

from attnlab import models
from attnlab.data import DATASETS, Text
from attnlab.heads import LAYOUTS
from attnlab.models import ModelConfig
from attnlab.names import lookup
from attnlab.pretrained import PUBLISHED, published_config
from attnlab.sharing.named_plans import PLANS, plan_name, plan_names
from attnlab.training.config import TrainConfig
from attnlab.training.objectives import OBJECTIVES

MODELS = [name for name in PUBLISHED if published_config(name).embedding.images is None]
MODELS += ["transformer_base"]
"""Published models that read text: no row of `DATASETS` has images."""


Values: TypeAlias = Mapping[str, object]
"""Config field -> value."""


def get_config(arg: str = "") -> ConfigDict:
    """The base config with the words of `arg` applied in order."""
    return with_presets(_base(), arg)


def other_data(
    task: str, source: str, values: Values, variants: Mapping[str, Values]
) -> Callable[..., ConfigDict]:
    """`get_config` of a file with another task and entry of `DATASETS`: the base with `values`
    (field -> value), then the words of its argument, those of `variants` among them."""

    def get_config(arg: str = "") -> ConfigDict:
        config = _base()
        config.task = task
        set_source(config, source)
        config.update_from_flattened_dict(values)
        return with_presets(config, arg, variants)

    return get_config


def presets(variants: Mapping[str, Values]) -> dict[str, str]:
    """What may stand behind the colon -> what it does, for --help."""
    rows = {
        "a layout": LAYOUTS,
        "a plan": plan_names("COUNT"),
        "data": DATASETS,
        "a published model": MODELS,
    }
    told = {kind: ", ".join(names) for kind, names in rows.items()}
    sets = lambda values: ", ".join(f"{path}={value}" for path, value in values.items())
    return told | {name: sets(values) for name, values in variants.items()}


def with_presets(
    config: ConfigDict, arg: str, variants: Mapping[str, Values] | None = None
) -> ConfigDict:
    """`config` with the words of `arg` applied in order; None: the words of this file.

    Raises ValueError for two layouts or two plans, of which a model has one.
    """
    names = [name for name in arg.split(",") if name]
    for field, known in (("model.heads.layout", LAYOUTS), ("model.sharing", PLANS)):
        found = [name for name in names if name.partition(":")[0] in known]
        if len(found) > 1:
            raise ValueError(
                f"presets {' and '.join(found)}: a model has one {field}; give one of them, or "
                f"compare them with experiments.sweep --vary={field}={','.join(found)}"
            )
    for name in names:
        _apply(config, name, VARIANTS if variants is None else variants)
    return config


def _base() -> ConfigDict:
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
    """Every field of a dataclass, and of those in it, so that every one is a flag; one that is
    None gets the first type of its hint, since a flag needs one to be read.
    """
    hints = typing.get_type_hints(type(example))
    found: dict[str, object] = {}
    for field in dataclasses.fields(example):
        value = getattr(example, field.name)
        if value is None:
            first = typing.get_args(hints[field.name])[0]
            value = config_dict.placeholder(typing.get_origin(first) or first)  # tuple[...]: tuple
        found[field.name] = fields(value) if dataclasses.is_dataclass(value) else value
    return found


def set_source(config: ConfigDict, name: str, **values: object) -> None:
    """Another entry of `DATASETS`, all its fields with their defaults or `values`."""
    config.data = ConfigDict({"source": name, **fields(DATASETS[name](**values))})


def model_fields(model: ModelConfig) -> dict[str, object]:
    """Every field of every layout and part of a model, so that every one is a flag; its sharing
    plan by name.

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


def _apply(config: ConfigDict, name: str, variants: Mapping[str, Values]) -> None:
    if name in LAYOUTS:
        config.model.heads.layout = name
    elif name in MODELS:
        set_model(config, published_config(name))
    elif name.partition(":")[0] in PLANS or name[:1].isdigit():
        config.model.sharing = name
    elif name in DATASETS:
        set_source(config, name)
    else:
        known = dict.fromkeys([*LAYOUTS, *PLANS, *DATASETS, *MODELS])
        for path, value in (lookup({**variants, **known}, name, what="preset") or {}).items():
            config.update_from_flattened_dict({path: value})


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

VARIANTS: dict[str, Values] = {
    "masked": {
        "task": "masked_lm",
        "model.kind": "encoder",
        "model.vocab_size": 257,
    },
    "seq2seq": {
        "task": "span_corruption",
        "model.kind": "encoder_decoder",
        "model.vocab_size": 357,
    },
    "tiny": {
        "model.width": 16,
        "model.num_layers": 2,
        "model.heads.num_heads": 2,
        "model.ffn.width": 32,
        "model.max_len": 16,
        **SHORTEST,
        "train.length": 16,
        "train.evaluation.windows": 32,
    },
    "nanogpt_cpu": {
        "model.width": 128,
        "model.ffn.width": 512,
        "model.heads.biases": "",
        "model.ffn.bias": False,
        "model.norm.bias": False,
        "model.init.std": 0.02,
        "model.init.residual": "depth",
        "train.batch_size": 12,
        "train.steps": 2000,
        "train.optimizer.learning_rate": 1e-3,
        "train.schedule.final_learning_rate": 1e-4,
        "train.schedule.warmup_steps": 100,
        "train.evaluation.every": 500,
        "train.checkpoint_every": 200,
        "train.evaluation.windows": 0,
    },
}
