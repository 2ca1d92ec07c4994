"""How a model computes attention: what its call reports while JAX traces it."""

from collections.abc import Mapping

import jax
import numpy as np
from jax.typing import ArrayLike

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
    leaves, tree = jax.tree.flatten(dict(inputs))
    arrays = {i: a for i, a in enumerate(leaves) if _is_array(a)}

    def call(params: Params, key: jax.Array, arrays: dict[int, ArrayLike]) -> None:
        given = jax.tree.unflatten(tree, [arrays.get(i, a) for i, a in enumerate(leaves)])
        tokens = given.pop("tokens")
        next_key = (lambda: key) if training else None
        run_model(params, tokens, config, ModelInputs(**given), next_key=next_key, reports=reports)

    jax.eval_shape(call, param_shapes(config), jax.random.key(0), arrays)
    return reports


def _is_array(a: object) -> bool:
    return isinstance(a, jax.Array | np.ndarray | jax.ShapeDtypeStruct)
