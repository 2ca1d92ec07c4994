"""Compare weights with the model that they are for."""

from typing import Any

import numpy as np

from attnlab.model.config import ModelConfig
from attnlab.model.mismatch import describe_mismatch, flatten
from attnlab.model.shapes import param_shapes as param_shapes
from attnlab.pretrained.tensors import CHUNK, is_floating


def check_params(config: ModelConfig, params: Any, *, allow_nonfinite: bool = False) -> None:
    """Check that `params` are the weights of `config.build()`: names, shapes, dtypes, values.

    Any floating-point dtype is accepted; each weight may have its own.

    Raises:
      ValueError: names the first weight that is wrong, what it is and what the model expects.
    """
    wrong = describe_mismatch(param_shapes(config), params)
    if wrong is not None:
        raise ValueError(f"params do not fit the model: {wrong}")
    for path, leaf in flatten(params).items():
        name, a = ".".join(path), np.asarray(leaf)
        if not is_floating(a.dtype):
            raise ValueError(f"params: {name} is {a.dtype}, the model expects a floating dtype")
        if not allow_nonfinite:
            check_finite(f"params: {name}", a)


def check_finite(name: str, a: np.ndarray) -> None:
    """Raise ValueError for NaN and infinity, with the value and its index."""
    flat = a.reshape(-1)
    for first in range(0, flat.size, CHUNK):
        finite = np.isfinite(flat[first : first + CHUNK])
        if not finite.all():
            place = first + int(np.argmin(finite))
            index = ", ".join(str(i) for i in np.unravel_index(place, a.shape))
            raise ValueError(
                f"{name} has {float(flat[place])} at {index or 'its only place'}; if it is meant "
                "to, pass allow_nonfinite=True"
            )
