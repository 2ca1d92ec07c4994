"""How a model computes attention."""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from attnlab.attention.api import trace
from attnlab.heads import explain_heads
from attnlab.models.config import ModelConfig
from attnlab.models.forward import (
    ENCODER,
    ModelInputs,
    check_inputs,
    embed_text,
    layers_of_text,
)
from attnlab.models.layer import attention_inputs
from attnlab.models.params import param_shapes
from attnlab.sharing import Params

Explanation = dict[str, dict[str, dict[str, Any]]]
"""Stack of layers, by the name of its parameters -> "self" or "cross" -> result of
`explain_heads`."""


def explain_model(
    config: ModelConfig, inputs: Mapping[str, object], *, training: bool = False
) -> Explanation:
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
