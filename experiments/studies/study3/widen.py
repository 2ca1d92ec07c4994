"""4x16 -> 4x64: the same function in wider heads, whose new width can learn."""

from pathlib import Path

import jax
import jax.numpy as jnp
from jaxtyping import Array

from attnlab.atomic import write_atomic
from attnlab.load import SPEC, open_run
from attnlab.models import ModelConfig
from attnlab.sharing import Params
from attnlab.training.checkpoint import Checkpoints, describe_model


def widen(narrow: Params, wide: Params, q_factor: float) -> Params:
    """The parameters of the wide model that compute the function of the narrow one.

    In each head the first numbers of q, k and v and the first inputs of W_O are those of the narrow
    model. The new q and v are those of `wide` (random), the new k and the new inputs of W_O are 0:
    the new width adds nothing to scores or outputs, and k and W_O have gradients at once.

    Args:
      narrow: parameters of the model with narrower heads; everything but heads is kept.
      wide: initial parameters of the model with wider heads.
      q_factor: multiplies the old W_Q and its bias: (old scale of scores) / (new one).
    """
    old, new = (p["layers"]["attention"] for p in (narrow, wide))
    heads = dict(old)
    for name in ("q", "k", "v"):
        factor = q_factor if name == "q" else 1.0
        for end in ("", "_bias"):
            fill = jnp.zeros_like(new[name + end]) if name == "k" else new[name + end]
            heads[name + end] = _first(fill, factor * old[name + end], axis=-1)
    heads["o"] = _first(jnp.zeros_like(new["o"]), old["o"], axis=-2)
    return {**narrow, "layers": {**narrow["layers"], "attention": heads}}


def _first(array: Array, values: Array, axis: int) -> Array:
    """`array` with its first entries along an axis replaced."""
    rest = jnp.split(array, [values.shape[axis]], axis=axis)[1]
    return jnp.concatenate([values, rest], axis=axis)


def write_start(half: Path, folder: Path, model: ModelConfig, seed: int) -> None:
    """Writes the parameters of the run in `half`, converted to the wider heads of `model`, so that
    a run can start from `folder`; does nothing where they are there."""
    if (folder / SPEC).exists():
        return
    narrow = open_run(half, seed)
    tokens = jnp.zeros((1, 2), jnp.int32)
    wide: Params = model.build().init(jax.random.key(seed), tokens=tokens)["params"]
    factor = narrow.config.layout.score_scale / model.layout.score_scale
    params = jax.tree.map(lambda a: a[None], widen(narrow.params, wide, factor))
    with Checkpoints(folder / "checkpoints") as checkpoints:
        notes = {"model": describe_model(model.build())}
        checkpoints.save(narrow.steps, {"params": params}, notes)
    write_atomic(folder / SPEC, (half / SPEC).read_bytes())
