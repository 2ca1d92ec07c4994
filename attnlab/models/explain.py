"""How a model computes attention: what its call reports while JAX traces it."""

from collections.abc import Mapping
from typing import Any

import jax

from attnlab.attention import trace
from attnlab.models.config import ModelConfig
from attnlab.models.forward import ModelInputs, Reports, run_model
from attnlab.models.parameters import param_shapes
from attnlab.sharing import Params


def explain_model(
    config: ModelConfig, inputs: Mapping[str, object], *, training: bool = False
) -> Reports:
    """The form of the heads and the backend of every attention sublayer in a call of a model.

    The call is traced, not run, and without gradient. A backend that `implementation` names and
    that cannot run here is reported, not refused.

    Args:
      config: of the model.
      inputs: "tokens" and the fields of `ModelInputs` by name; arrays may be
        `jax.ShapeDtypeStruct`s.
      training: explain the call with dropout.

    Returns:
      Stack of layers, by the name of its parameters -> {"self", and with cross-attention "cross"}
      -> what `explain_heads` returns. All layers of a stack do the same.

    >>> config = ModelConfig(width=8, num_layers=2)
    >>> tokens = jax.ShapeDtypeStruct((64, 64), "int32")
    >>> explain_model(config, {"tokens": tokens})["layers"]["self"]["chosen"]
    {'order': 'factored'}
    """
    reports: Reports = {}

    def call(params: Params, key: jax.Array, given: dict[str, Any]) -> None:
        others = {name: a for name, a in given.items() if name != "tokens"}
        next_key = (lambda: key) if training else None
        run = ModelInputs(**others)
        run_model(params, given["tokens"], config, run, next_key=next_key, reports=reports)

    trace(call, params=param_shapes(config), key=jax.random.key(0), given=dict(inputs))
    return reports
