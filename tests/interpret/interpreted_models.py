"""Models with large random parameters, for tests that compare numbers."""

import functools

import jax.numpy as jnp
import random_models

from attnlab import heads
from attnlab.models import FFN, ModelConfig


def config_of(layout="standard", *, num_heads=3, biases=("q", "k", "v", "o"), **fields):
    """A small decoder whose sizes all differ; `fields` are of the config, or of the layout."""
    kind = heads.LAYOUTS[layout]
    names = set(kind.__dataclass_fields__)
    own = {name: fields.pop(name) for name in list(fields) if name in names and name != "width"}
    biases = tuple(b for b in biases if b in kind.bias_names)
    base = {"vocab_size": 11, "max_len": 8, "width": 12, "num_layers": 3, "ffn": FFN(width=10)}
    return ModelConfig(heads=kind(num_heads=num_heads, biases=biases, **own), **base | fields)


TOKENS = jnp.asarray([[4, 1, 7, 2, 2, 0], [10, 3, 5, 6, 1, 8]])
random_params = functools.partial(random_models.random_params, seed=0, scale=0.5)
