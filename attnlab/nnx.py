"""The same functions as Flax NNX modules.

    from attnlab import nnx as attnlab_nnx
    model = attnlab_nnx.Transformer(ModelConfig(width=64), rngs=nnx.Rngs(0))
    logits = model(tokens).logits

Parameters are `nnx.Param`s in `module.params` under the names they have in Linen, so `nnx.state`,
filters, `nnx.Optimizer`, `nnx.jit` and `nnx.vmap` work as usual. `arrays(module)` is the dict that
functions and Linen modules take; `Transformer(config, params=variables["params"])` is the way back.
"""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from attnlab import heads
from attnlab.heads import Layout
from attnlab.models import ModelConfig, ModelInputs, Outputs, run_model
from attnlab.sharing import Params

__all__ = ["MultiHeadAttention", "Transformer", "arrays"]


def _as_params(tree: Mapping[str, Any]) -> Any:
    return {n: _as_params(a) if isinstance(a, Mapping) else nnx.Param(a) for n, a in tree.items()}


def _as_arrays(tree: Mapping[str, Any]) -> Params:
    return {n: _as_arrays(a) if isinstance(a, Mapping) else a[...] for n, a in tree.items()}


def arrays(module: "MultiHeadAttention | Transformer") -> Params:
    """The parameters of a module as the dict of arrays that functions and Linen modules take.

    >>> module = MultiHeadAttention(heads.Wide(width=8, num_heads=2), rngs=nnx.Rngs(0))
    >>> arrays(module)["q"].shape
    (8, 2, 8)
    """
    return _as_arrays(module.params)


class MultiHeadAttention(nnx.Module):
    """`attnlab.multi_head_attention` with parameters of its own.

    Args:
      layout: the heads.
      rngs: makes new parameters from `rngs.params()`.
      params: those of `heads.init` or of a trained model instead; then `rngs` may be left out.

    >>> module = MultiHeadAttention(heads.Standard(width=8, num_heads=2), rngs=nnx.Rngs(0))
    >>> module(jnp.ones((1, 5, 8)), is_causal=True).shape
    (1, 5, 8)
    """

    def __init__(
        self, layout: Layout, *, rngs: nnx.Rngs | None = None, params: Params | None = None
    ) -> None:
        self.layout = layout
        made = _initial(rngs, params, lambda key: heads.init(key, layout))
        self.params = nnx.data(_as_params(made))

    def __call__(
        self, x: Float[Array, "B T D"], context: Any = None, **options: Any
    ) -> Float[Array, "B T O"]:
        """`multi_head_attention(params, x, layout, context, **options)`."""
        params = arrays(self)
        output: Array = heads.multi_head_attention(params, x, self.layout, context, **options)
        return output


class Transformer(nnx.Module):
    """A decoder, an encoder (of texts or images) or both: `attnlab.run_model` with parameters of
    its own.

    Args:
      config: everything that makes the model.
      rngs: makes new parameters from `rngs.params()`; dropout has a fork of its stream `dropout`.
      params: those of a trained, loaded or converted model instead, as in
        `Transformer(model.config, params=params)` after `model, params = pretrained.load(name)`.

    >>> config = ModelConfig(width=8, num_layers=2)
    >>> model = Transformer(config, rngs=nnx.Rngs(0))
    >>> model(jnp.zeros((1, 3), int), capture=("probs",)).captured["probs"].shape
    (2, 1, 4, 3, 3)
    """

    def __init__(
        self, config: ModelConfig, *, rngs: nnx.Rngs | None = None, params: Params | None = None
    ) -> None:
        self.config = config
        made = _initial(rngs, params, lambda key: _init(config, key))
        stream = getattr(rngs, "dropout", None)
        self.dropout_key = nnx.data(stream and stream.fork())
        self.params = nnx.data(_as_params(made))

    def __call__(self, tokens: ArrayLike, *, deterministic: bool = True, **inputs: Any) -> Outputs:
        """tokens -> `Outputs`.

        Args:
          tokens: ids [B, T], or images [B, H, W, C] if the model reads images; see `run_model`.
          deterministic: no dropout.
          **inputs: fields of `ModelInputs`, such as `padding_mask`, `segments`, `cache`.

        Raises:
          ValueError: dropout without `rngs`; what `run_model` raises.
        """
        if not deterministic and self.dropout_key is None:
            raise ValueError("deterministic=False needs Transformer(config, rngs=nnx.Rngs(seed))")
        next_key = None if deterministic else self.dropout_key
        return run_model(
            arrays(self), tokens, self.config, ModelInputs(**inputs), next_key=next_key
        )


def _initial(rngs: nnx.Rngs | None, params: Params | None, init: Any) -> Params:
    if params is not None:
        return params
    if rngs is None:
        raise ValueError("give rngs=nnx.Rngs(seed) for new parameters, or params=...")
    made: Params = init(rngs.params())
    return made


def _init(config: ModelConfig, key: Array) -> Params:
    """The parameters that the Linen module makes from this key."""
    images = config.embedding.images
    tokens = jnp.zeros((1, 1), int)
    if images is not None:
        tokens = jnp.zeros((1, images.height, images.width, images.channels))
    source = {} if config.encoder is None else {"source": tokens}
    made: Params = config.build().init(key, tokens, **source)["params"]
    return made
