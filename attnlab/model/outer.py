"""What stands around the layers: embeddings and positions before them, readout and pooler behind.

Pure functions on one flat dict of weights, named as in `outer_shapes`; `config` is a `ModelConfig`.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from attnlab.heads import positions
from attnlab.model.block import NORMS
from attnlab.model.images import as_features, check_images
from attnlab.model.pointwise import ACTIVATIONS, linear
from attnlab.names import find
from attnlab.norms import NORM_KINDS, init_norm

Weights = dict[str, Any]


class Position(NamedTuple):
    """One way to tell a model where a token stands. A new one is a row of `POSITIONS`."""

    learned: bool = False
    """Is a trained table added to the embedding?"""
    fixed: Callable | None = None
    """(number of positions, width) -> a table that is added and not trained."""
    skips_padding: bool = False
    """Are only the tokens counted that are not `pad_token`?"""
    rotary: bool = False
    """Are queries and keys turned?"""
    relative: bool = False
    """Is a number per head and distance added to the scores?"""


POSITIONS = {
    "learned": Position(learned=True),
    # RoBERTa: the tokens that are no padding count from pad_token + 1 on, padding is at pad_token.
    "learned_unpadded": Position(learned=True, skips_padding=True),
    "sinusoidal": Position(fixed=positions.sinusoidal),
    "sinusoidal_halves": Position(fixed=positions.sinusoidal_halves),
    "rotary": Position(rotary=True),
    "relative": Position(relative=True),
    "none": Position(),
}
READOUTS = ("tied", "own", "none")
DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16, "float64": jnp.float64}
"""What a model may compute in, from the embedding to the logits."""
TABLES = {"embedding", "positions", "token_types", "relative_bias", "encoder_relative_bias"}


def check_dtype(name: str) -> None:
    """Raises ValueError for what is none of `DTYPES`, with the reason where there is one."""
    if name == "float16":
        raise ValueError(
            "dtype 'float16' ends at 65,504 and at 6e-8, and no loss is scaled here to keep "
            "gradients between; use 'bfloat16', which has the range of float32"
        )
    find("dtype", name, DTYPES)


def check_outer(config: Any) -> None:
    """Raises ValueError where positions, readout or pooler do not fit what the model is."""
    c = config
    check_images(c)
    row = POSITIONS[c.positions]
    if not 0 < c.rotary_fraction <= 1:
        raise ValueError(f"rotary_fraction must be in (0, 1], not {c.rotary_fraction}")
    if c.rotary_scaling is not None:
        positions.read_scaling(c.rotary_scaling)
    if row.skips_padding and (c.pad_token is None or c.kind != "encoder"):
        raise ValueError(
            f"positions {c.positions!r} need to see the whole text and the padding in it: "
            "set pad_token and kind='encoder'"
        )
    if row.relative and (
        c.relative_buckets < 4
        or c.relative_buckets % 4
        or c.relative_distance <= c.relative_buckets // 2
    ):
        raise ValueError(
            f"relative_buckets {c.relative_buckets} must be a multiple of 4 and "
            f"relative_distance {c.relative_distance} more than half of it"
        )
    if c.readout_transform is not None:
        plain = {name: a for name, a in ACTIVATIONS.items() if len(a.maps) == 1}
        find("readout_transform", c.readout_transform, plain)
    factorised = c.embedding_width not in (None, c.width)
    if c.readout == "tied" and factorised and c.readout_transform is None:
        raise ValueError(
            f"a tied readout of embedding_width {c.embedding_width} cannot read width "
            f"{c.width}; set readout_transform='gelu' or readout='own'"
        )
    if c.readout == "none" and (c.readout_bias or c.readout_transform):
        raise ValueError(
            "readout='none' has no logits; leave readout_bias and readout_transform out"
        )
    if c.pooler is not None:
        find("pooler", c.pooler, POOLERS)
    if c.pooled_classes and not c.pooler:
        raise ValueError("pooled_classes are read from the pooled output; set pooler='first'")


def outer_shapes(config: Any) -> dict[str, Any]:
    """Weight name -> shape, or a dict of shapes, in the order in which they are made."""
    c, row = config, POSITIONS[config.positions]
    d, e = c.width, c.embedding_width or c.width
    norm = lambda width: {"scale": (width,)} | ({"bias": (width,)} if c.norm_bias else {})
    matrix = lambda name, i, o: {name: (i, o), f"{name}_bias": (o,)}
    shapes: dict[str, Any] = {"embedding": (c.vocab_size, e)}
    shapes |= {"positions": (c.max_len, e)} if row.learned else {}
    shapes |= {"token_types": (c.token_types, e)} if c.token_types else {}
    shapes |= {"embedding_norm": norm(e)} if c.embedding_norm else {}
    shapes |= matrix("embedding_map", e, d) if c.embedding_width else {}
    stacks = ["", "encoder_"] if c.kind == "encoder_decoder" and not c.share_encoder else [""]
    if row.relative:
        heads = {"": c.num_heads, "encoder_": c.as_encoder.num_heads}
        shapes |= {f"{s}relative_bias": (c.relative_buckets, heads[s]) for s in stacks}
    if NORMS[c.norm].final:
        shapes |= {f"{s}final_norm": norm(d) for s in stacks}
    if c.readout_transform:
        shapes |= matrix("transform", d, e) | {"transform_norm": norm(e)}
    if c.readout == "own":
        shapes |= {"readout": (e if c.readout_transform else d, c.vocab_size)}
    shapes |= {"readout_bias": (c.vocab_size,)} if c.readout_bias else {}
    shapes |= matrix("pooler", d, d) if c.pooler == "first" else {}
    return shapes | (matrix("classes", d, c.pooled_classes) if c.pooled_classes else {})


def init_outer(config: Any) -> dict[str, Callable]:
    """Weight name -> (key -> its value).

    Matrices are normal with standard deviation 1/sqrt(fan in), or `init_std`; the fan of a table
    is its width. Biases are zero.
    """

    def make(name: str, shape: Any) -> Callable:
        if isinstance(shape, dict):
            own = dict(bias="bias" in shape, kind=config.norm_kind)
            return lambda key: init_norm(shape["scale"][0], **own)
        if len(shape) == 1:
            return lambda key: jnp.zeros(shape)
        std = config.init_std or shape[1 if name in TABLES else 0] ** -0.5
        return lambda key: jax.random.normal(key, shape) * std

    return {name: make(name, shape) for name, shape in outer_shapes(config).items()}


def count_outer(config: Any) -> int:
    """Parameters outside the layers.

    >>> from attnlab import ModelConfig
    >>> count_outer(ModelConfig(vocab_size=7, max_len=5, width=4)) == 7 * 4 + 5 * 4 + 2 * 4
    True
    """
    leaves = jax.tree.leaves(outer_shapes(config), is_leaf=lambda a: isinstance(a, tuple))
    return sum(math.prod(shape) for shape in leaves)


def check_tokens(config: Any, tokens: Any) -> Array:
    """Tokens as an array: ids [B, T], or floats [B, T, vocab_size], as which images come back.

    Raises ValueError with a way out.

    >>> from attnlab import ModelConfig
    >>> check_tokens(ModelConfig(), [[1, 2, 3]]).shape
    (1, 3)
    """
    words: Any = np.ravel(tokens) if isinstance(tokens, str | bytes | list | tuple) else ()
    if len(words) and isinstance(words[0], str | bytes):
        raise ValueError(
            f"tokens are ids, not the text {str(words[0])[:30]!r}: encode it, for a model of bytes "
            "by jnp.array([list(text.encode())])"
        )
    tokens = jnp.asarray(tokens)
    if tokens.ndim == 4:
        return as_features(config, tokens)
    if jnp.issubdtype(tokens.dtype, jnp.integer):
        if tokens.ndim != 2:
            way_out = "; one text is tokens[None]" if tokens.ndim == 1 else ""
            raise ValueError(f"tokens {tokens.shape} must be [batch, length]{way_out}")
    elif tokens.ndim != 3 or tokens.shape[-1] != config.vocab_size:
        raise ValueError(
            f"tokens of {tokens.dtype} {tokens.shape}: ids are integers [batch, length], mixtures "
            f"of words floats [batch, length, {config.vocab_size}]"
        )
    return tokens


def check_range(name: str, ids: Any, count: int, mask: Any = None) -> None:
    """Check that ids are in a table of `count` rows, where their values are known.

    Args:
      name: what they are, for the error.
      ids: integers [B, T]. Anything else is left to others to check.
      mask: True where an id counts; padding may hold any.

    Raises:
      ValueError: the first id that is not, and its index. Within `jax.jit` such an id cannot raise,
        it makes the outputs of its text NaN (see `read_rows`).
    """
    known = all(not isinstance(a, jax.core.Tracer) for a in (ids, mask))
    if not known or not getattr(ids, "is_fully_addressable", True):
        return
    values = np.asarray(ids)
    if not np.issubdtype(values.dtype, np.integer) or not values.size:
        return
    if values.min() >= 0 and values.max() < count:
        return
    outside = (values < 0) | (values >= count)
    if mask is not None:
        real = np.asarray(mask, bool)
        # One of another length has an error of its own.
        outside &= real if real.shape[-1:] == values.shape[-1:] else False
    if outside.any():
        index = [int(i) for i in np.argwhere(outside)[0]]
        raise ValueError(
            f"{name} {values[tuple(index)]} at {index} is not in the table; ids are 0 to "
            f"{count - 1}"
        )


def read_rows(table: Float[Array, "rows D"], ids: Int[Array, "..."]) -> Float[Array, "... D"]:
    """The rows of a table; NaN for an id that is negative or beyond its end.

    Plain indexing would take the last row in silence. No gradient comes from such an id.

    >>> read_rows(jnp.array([[1.0], [2.0]]), jnp.array([1, 2, -1]))[:, 0].tolist()
    [2.0, nan, nan]
    """
    return table.at[ids].get(mode="fill", fill_value=jnp.nan, wrap_negative_indices=False)


def number_positions(
    config: Any, tokens: Int[Array, "B T"] | Float[Array, "B T vocab"]
) -> Int[Array, "*B T"] | None:
    """The position of each token of a text; None means 0, 1, 2, ..."""
    if POSITIONS[config.positions].skips_padding:
        if tokens.ndim != 2:
            raise ValueError(
                f"positions {config.positions!r} skip a token, tokens {tokens.shape} are mixtures "
                "of all; pass positions, or choose others"
            )
        real = (tokens != config.pad_token).astype(jnp.int32)
        return jnp.cumsum(real, axis=1) * real + config.pad_token
    return None


def embed(
    w: Weights,
    tokens: Int[Array, "B T"] | Float[Array, "B T vocab"],
    *,
    config: Any,
    numbers: Int[Array, "*B T"] | None = None,
    token_types: Int[Array, "B T"] | None = None,
) -> Float[Array, "B T D"]:
    """What the first layer reads: map(norm(scale * word + position + type)), of those there are.

    `numbers` are the positions, None for 0, 1, 2, ...; a position, token id or type that is not in
    its table gives NaN. Of floats the
    last axis is over the vocabulary: a sum of words with these weights (one word has a single 1),
    or any `vocab_size` features.
    """
    c, row = config, POSITIONS[config.positions]
    mixed = jnp.issubdtype(tokens.dtype, jnp.floating)
    x = tokens @ w["embedding"] if mixed else read_rows(w["embedding"], tokens)
    x = x.astype(jnp.promote_types(x.dtype, c.dtype))  # weights may be less precise
    x = x if c.embedding_scale == 1 else x * jnp.asarray(c.embedding_scale, x.dtype)
    if c.zero_token is not None and not mixed:
        x = jnp.where((tokens == c.zero_token)[..., None], 0, x)
    table = w.get("positions")
    if row.fixed is not None:
        table = row.fixed(c.max_len, x.shape[-1]).astype(x.dtype)
    if table is not None and numbers is None:
        x = x + table[: tokens.shape[1]]
    elif table is not None:
        x = x + table.at[numbers].get(mode="fill", fill_value=jnp.nan)
    if c.token_types:
        types = jnp.zeros_like(tokens) if token_types is None else token_types
        x = x + read_rows(w["token_types"], types)
    elif token_types is not None:
        # GPT-2 reads the type from the table of the words.
        x = x + read_rows(w["embedding"], token_types)
    if c.embedding_norm:
        x = NORM_KINDS[c.norm_kind](w["embedding_norm"], x, eps=c.norm_eps)
    return linear(w, "embedding_map", x) if c.embedding_width else x


def rotary_of(config: Any, numbers: Int[Array, "*B T"]) -> Float[Array, "*B T half"] | None:
    """The angles by which queries and keys at these positions are turned; None where none are."""
    c = config
    if not POSITIONS[c.positions].rotary:
        return None
    given = dict(base=c.rotary_base, scaling=c.rotary_scaling)
    return positions.rotary_angles(numbers, c.num_turned, **given)


def relative_bias(
    table: Float[Array, "buckets N"],
    queries: Int[Array, "*B T"],
    keys: Int[Array, "*B S"],
    *,
    config: Any,
    two_sided: bool,
) -> Float[Array, "*B N T S"]:
    """Added to the scores of all layers: table[bucket of the distance, head]."""
    buckets = positions.relative_buckets(
        keys[..., None, :] - queries[..., :, None],
        num_buckets=config.relative_buckets,
        max_distance=config.relative_distance,
        two_sided=two_sided,
    )
    return jnp.moveaxis(table[buckets], -1, -3)


def read_out(w: Weights, x: Float[Array, "B T D"], *, config: Any) -> Float[Array, "B T vocab"]:
    """scale * x W + b in float32 at least, of norm(act(x W_t + b_t)) where there is a transform."""
    c = config
    if c.readout_transform:
        x = ACTIVATIONS[c.readout_transform].run(linear(w, "transform", x))
        x = NORM_KINDS[c.norm_kind](w["transform_norm"], x, eps=c.norm_eps)
    x = x if c.readout_scale == 1 else x * jnp.asarray(c.readout_scale, x.dtype)
    kernel = w["readout"] if c.readout == "own" else w["embedding"].T
    logits = jax.lax.dot(
        x.reshape(-1, x.shape[-1]),
        kernel.astype(x.dtype),
        preferred_element_type=jnp.promote_types(x.dtype, jnp.float32),
    ).reshape(*x.shape[:2], c.vocab_size)
    return logits + w["readout_bias"] if c.readout_bias else logits


def _mean(w: Weights, x: Array, real: Array) -> Array:
    return jnp.sum(jnp.where(real, x, 0), axis=1) / jnp.maximum(jnp.sum(real, axis=1), 1)


def _max(w: Weights, x: Array, real: Array) -> Array:
    top = jnp.max(jnp.where(real, x, -jnp.inf), axis=1)
    return jnp.where(jnp.any(real, axis=1), top, 0)


POOLERS: dict[str, Callable] = {
    # tanh(x_0 W + b): the first token speaks for the text (Devlin et al. 2018).
    "first": lambda w, x, real: jnp.tanh(linear(w, "pooler", x[:, 0])),
    # The first token as it is (Dosovitskiy et al. 2021).
    "first_plain": lambda w, x, real: x[:, 0],
    "max": _max,
    "mean": _mean,
    # Every token for itself: classes of tokens, or of the nodes of a graph.
    "each": lambda w, x, real: x,
}
"""Name -> (weights, x [B, T, D], real [B or 1, T, 1], False for padding) -> [B, D] or [B, T, D].
Padding does not count; a row of nothing else has zeros."""
