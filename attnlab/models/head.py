"""Outputs of a model: LM head, pooler and classifier head."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from attnlab.models.config import ModelConfig
from attnlab.models.embed import Shapes
from attnlab.models.ffn import activation_function, dense, norm_shapes, normalize
from attnlab.ops import wide_einsum
from attnlab.sharing import Params


def output_shapes(config: ModelConfig) -> Shapes:
    """Shapes of the weights behind the final norm, in the order in which they are initialized.

    >>> from attnlab.models.specs import OutputHead
    >>> output_shapes(ModelConfig(vocab_size=7, width=4, output=OutputHead(kind="own", bias=True)))
    {'lm_head': (4, 7), 'lm_head_bias': (7,)}
    """
    spec, width, vocab = config.output, config.width, config.vocab_size
    narrow = config.embedding.width or width
    shapes: Shapes = {}
    if spec.transform:
        shapes["transform"] = (width, narrow)
        shapes |= {"transform_bias": (narrow,)} if spec.transform_bias else {}
        shapes["transform_norm"] = norm_shapes(narrow, config.norm)
    if spec.kind == "own":
        shapes["lm_head"] = (narrow if spec.transform else width, vocab)
    if spec.bias:
        shapes["lm_head_bias"] = (vocab,)
    if spec.pooler == "first":
        shapes |= {"pooler": (width, width), "pooler_bias": (width,)}
    if spec.num_classes:
        shapes["classifier"] = (narrow if spec.transforms_classes else width, spec.num_classes)
        shapes |= {"classifier_bias": (spec.num_classes,)} if spec.classifier_bias else {}
    return shapes


def lm_head(
    params: Params, hidden: Float[Array, "B T D"], config: ModelConfig
) -> Float[Array, "B T vocab"]:
    """scale * h W + b in float32 at least, with h = norm(act(hidden W_t + b_t)) if there is a
    transform, and W the transposed embedding if the LM head is tied; capped where there is a cap.

    >>> config = ModelConfig(vocab_size=2, width=4)
    >>> lm_head({"embedding": jnp.ones((2, 4))}, jnp.ones((1, 3, 4)), config)[0, 0].tolist()
    [4.0, 4.0]
    """
    spec, x = config.output, hidden
    x = _transform(params, x, config) if spec.transform else x
    x = x if spec.scale == 1 else x * jnp.asarray(spec.scale, x.dtype)
    kernel: Array = params["lm_head"] if spec.kind == "own" else params["embedding"].T
    logits = wide_einsum(
        "TD,DV->TV",
        x.reshape(-1, x.shape[-1]),
        kernel.astype(x.dtype),
        jnp.promote_types(x.dtype, jnp.float32),
    ).reshape(*x.shape[:2], config.vocab_size)
    logits = logits + params["lm_head_bias"][None, None] if spec.bias else logits
    cap = spec.soft_cap
    return logits if cap is None else cap * jnp.tanh(logits / cap)


def _transform(params: Params, x: Array, config: ModelConfig) -> Array:
    """norm(act(x W_t + b_t))."""
    assert config.output.transform is not None
    x = activation_function(config.output.transform)(dense(params, "transform", x))
    return normalize(params.get("transform_norm", {}), x, config.norm)


def classify(
    params: Params, pooled: Float[Array, "B *T D"], config: ModelConfig
) -> Float[Array, "B *T C"]:
    """Logits of the classes: p W + b, of the transform of p where no LM head has it.

    >>> from attnlab.models.specs import OutputHead
    >>> config = ModelConfig(output=OutputHead(kind="none", pooler="each", num_classes=2))
    >>> classify({"classifier": jnp.ones((3, 2))}, jnp.ones((1, 3)), config).tolist()
    [[3.0, 3.0]]
    """
    if config.output.transforms_classes:
        pooled = _transform(params, pooled, config)
    return dense(params, "classifier", pooled)


def pool(
    params: Params,
    hidden: Float[Array, "B T D"],
    config: ModelConfig,
    padding_mask: Bool[Array, "B T"] | None = None,
) -> Float[Array, "B *T D"]:
    """One vector per text, or per token: see `OutputHead.pooler`.

    Padding does not count in "max" and "mean"; a row of padding alone gives zeros there.

    Args:
      params: of the model.
      hidden: what the LM head reads.
      config: of the model.
      padding_mask: True = a token.

    >>> from attnlab.models.specs import OutputHead
    >>> config, mask = ModelConfig(output=OutputHead(pooler="mean")), jnp.array([[True, False]])
    >>> pool({}, jnp.array([[[1.0], [jnp.nan]]]), config, mask).tolist()
    [[1.0]]
    """
    pooler = config.output.pooler
    if padding_mask is None:
        padding_mask = jnp.ones((1, hidden.shape[1]), bool)
    is_token = padding_mask[..., None]
    if pooler == "first":
        act = activation_function(config.output.pooler_activation)
        return act(dense(params, "pooler", hidden[:, 0]))
    if pooler == "first_plain":
        return hidden[:, 0]
    if pooler == "last":
        real = jnp.broadcast_to(padding_mask, hidden.shape[:2])
        last = jnp.argmax(jnp.where(real, jnp.arange(hidden.shape[1]), -1), axis=1)
        return jnp.take_along_axis(hidden, last[:, None, None], axis=1)[:, 0]
    if pooler == "mean":
        total = jnp.sum(jnp.where(is_token, hidden, 0), axis=1)
        return total / jnp.maximum(jnp.sum(is_token, axis=1), 1)
    if pooler == "max":
        # Not jnp.max: its gradient compares with a maximum that XLA may round in another way, and
        # divides by the number of equal values, which then is 0.
        index = jnp.argmax(jnp.where(is_token, hidden, -jnp.inf), axis=1, keepdims=True)
        largest = jnp.take_along_axis(hidden, index, axis=1)[:, 0]
        return jnp.where(jnp.any(is_token, axis=1), largest, 0)
    return hidden
