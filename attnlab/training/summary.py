"""The line that a run begins with."""

import jax

from attnlab.data.dataset import Dataset
from attnlab.models import ModelConfig
from attnlab.sharing import Params
from attnlab.sharing.named_plans import plan_name


def describe_start(model: object, params: Params, dataset: Dataset, devices: str) -> str:
    """Model, parameters, data and devices in words.

    Args:
      model: its config is described if it is a `ModelConfig`.
      params: with a leading axis of seeds; those of one seed are counted.
      dataset: its name and number of training tokens.
      devices: in words.
    """
    size = sum(a.size // a.shape[0] for a in jax.tree.leaves(params))
    tokens = dataset.facts.get("training tokens")
    data = f"{dataset.name}, {tokens:,} training tokens" if tokens else dataset.name
    return f"{_describe_model(model)}, {size:,} parameters; {data}; {devices}"


def _describe_model(model: object) -> str:
    config = getattr(model, "config", None)
    if not isinstance(config, ModelConfig):
        return type(model).__name__
    return (
        f"{config.kind} of {config.num_layers} layers, width {config.width}, {config.heads.name} "
        f"heads, plan {plan_name(config.sharing)}"
    )
