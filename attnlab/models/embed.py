"""Inputs of a model: token ids, embeddings and positions."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Inexact, Int

from attnlab.attention.score_mods import alibi_slopes
from attnlab.attention.segments import restarted
from attnlab.heads import Layout
from attnlab.heads.positions import relative_buckets, rotary_angles, sinusoidal, sinusoidal_halves
from attnlab.models.config import ModelConfig
from attnlab.models.ffn import dense, norm_shapes, normalize
from attnlab.models.specs import (
    Alibi,
    Attention,
    Images,
    Learned,
    Positions,
    Relative,
    Rotary,
    Sinusoidal,
)
from attnlab.ops import with_rank
from attnlab.sharing import Params

Shapes = dict[str, tuple[int, ...] | dict[str, tuple[int, ...]]]
"""Name -> shape of a weight, or the shapes of the weights of a norm."""

OWN_INPUTS = ("positions", "embedding_norm")
"""Weights that an encoder-decoder has twice if `encoder.own_inputs` is true."""


def embedding_shapes(config: ModelConfig) -> Shapes:
    """Shapes of the weights before the layers, in the order in which they are initialized.

    >>> embedding_shapes(ModelConfig(vocab_size=7, max_len=5, width=4))
    {'embedding': (7, 4), 'positions': (5, 4)}
    """
    spec = config.embedding
    width = spec.width or config.width
    shapes: Shapes = {"embedding": (config.vocab_size, width)}
    if config.positions.is_learned:
        offset = config.positions.offset if isinstance(config.positions, Learned) else 0
        shapes["positions"] = (config.max_len + offset, width)
    if spec.token_types:
        shapes["token_types"] = (spec.token_types, width)
    if spec.norm:
        shapes["embedding_norm"] = norm_shapes(width, config.norm)
    if config.encoder is not None and config.encoder.own_inputs:
        own = {name: shapes[name] for name in OWN_INPUTS if name in shapes}
        shapes |= {f"encoder_{name}": shape for name, shape in own.items()}
    if spec.width:
        shapes["embedding_projection"] = (width, config.width)
        shapes["embedding_projection_bias"] = (config.width,)
    return shapes


def check_tokens(config: ModelConfig, tokens: ArrayLike, *, packed: bool = False) -> Array:
    """Tokens as an array: ids [B, T], or floats [B, T, vocab_size], to which images are converted.

    Raises:
      ValueError: text, another number of axes, or more tokens than `max_len` unless they are
        `packed`.

    >>> check_tokens(ModelConfig(), [[1, 2, 3]]).shape
    (1, 3)
    """
    first: Any = tokens
    while isinstance(first, list | tuple) and first:
        first = first[0]
    if isinstance(first, str | bytes):
        raise ValueError(
            f"tokens are ids, not the text {first[:30]!r}; encode it, for a model of bytes with "
            "jnp.array([list(text.encode())])"
        )
    tokens = jnp.asarray(tokens)
    if tokens.ndim == 4:
        tokens = image_features(tokens, config.embedding.images)
    if jnp.issubdtype(tokens.dtype, jnp.integer):
        if tokens.ndim != 2:
            hint = "; for one text pass tokens[None]" if tokens.ndim == 1 else ""
            raise ValueError(f"tokens {tokens.shape} must be [batch, length]{hint}")
    elif tokens.ndim != 3 or tokens.shape[-1] != config.vocab_size:
        raise ValueError(
            f"tokens of dtype {tokens.dtype} and shape {tokens.shape}: ids are integers [batch, "
            f"length], mixtures of tokens are floats [batch, length, {config.vocab_size}]"
        )
    if tokens.shape[1] > config.max_len and not packed:
        raise ValueError(f"{tokens.shape[1]} tokens are longer than max_len {config.max_len}")
    return tokens


def check_range(what: str, ids: ArrayLike, count: int, mask: Array | None = None) -> None:
    """Raises ValueError for the first id that is not one of 0 to `count` - 1.

    Traced ids cannot be checked: there such an id makes the outputs of its text NaN (`read_rows`).

    Args:
      what: what the ids are, for the message.
      ids: integers [B, T]; floats are not checked.
      mask: [B, T], True where an id counts; padding may hold any.

    >>> check_range("token id", [[1, 7]], 7)
    Traceback (most recent call last):
    ValueError: token id 7 at [0, 1] is out of range: ids are 0 to 6
    """
    known = all(not isinstance(a, jax.core.Tracer) for a in (ids, mask))
    if not known or not getattr(ids, "is_fully_addressable", True):
        return
    values = np.asarray(ids)
    if not np.issubdtype(values.dtype, np.integer) or not values.size:
        return
    outside = (values < 0) | (values >= count)
    if mask is not None and mask.shape == values.shape:
        outside &= np.asarray(mask)
    if outside.any():
        index = [int(i) for i in np.argwhere(outside)[0]]
        raise ValueError(
            f"{what} {values[tuple(index)]} at {index} is out of range: ids are 0 to {count - 1}"
        )


def read_rows(table: Float[Array, "rows D"], ids: Int[Array, "..."]) -> Float[Array, "... D"]:
    """The rows of a table; NaN, and no gradient, for an id that is negative or beyond its end.

    Plain indexing takes the last row instead.

    >>> read_rows(jnp.array([[1.0], [2.0]]), jnp.array([1, 2, -1]))[:, 0].tolist()
    [2.0, nan, nan]
    """
    rows: Array = (
        jnp.asarray(table).at[ids].get(mode="fill", fill_value=jnp.nan, wrap_negative_indices=False)
    )
    return rows


def default_positions(
    config: ModelConfig, tokens: Array, segments: Int[Array, "B T"] | None = None
) -> Int[Array, "B T"] | None:
    """The position of each token of whole texts; None means 0, 1, 2, ...

    Packed texts, whose tokens stand in a row, count from 0 each. Relative positions and ALiBi are
    distances, which packing does not change; a table or a `position_scale` beside them counts.

    >>> ids = jnp.array([[1, 1, 2, 2, 2]])
    >>> default_positions(ModelConfig(), ids, segments=ids).tolist()
    [[0, 1, 0, 1, 2]]
    >>> config = ModelConfig(kind="encoder", positions=Learned(pad_token=1))
    >>> default_positions(config, jnp.array([[5, 6, 1]])).tolist()
    [[2, 3, 1]]
    """
    spec = config.positions
    pad_token: int | None = getattr(spec, "pad_token", None)
    if pad_token is None:
        counts = spec.is_learned or config.attention.position_scale is not None
        if segments is None or (isinstance(spec, Alibi | Relative) and not counts):
            return None
        return restarted(jnp.arange(segments.shape[1]), segments)
    if tokens.ndim != 2:
        raise ValueError(f"pad_token is not counted in mixtures {tokens.shape}; pass positions")
    is_token = (tokens != pad_token).astype(jnp.int32)
    count = jnp.cumsum(is_token, axis=1)
    if segments is not None:
        count = restarted(count - is_token, segments) + is_token
    positions = count * is_token + pad_token
    if not isinstance(positions, jax.core.Tracer) and jnp.max(positions) >= config.max_len:
        raise ValueError(
            f"positions.pad_token {pad_token}: a text without padding may have "
            f"{config.longest_text} tokens, not {tokens.shape[1]}; raise max_len"
        )
    return positions


def embed(
    params: Params,
    tokens: Int[Array, "B T"] | Float[Array, "B T vocab"],
    config: ModelConfig,
    *,
    positions: Int[Array, "*B T"] | None = None,
    token_types: Int[Array, "B T"] | None = None,
) -> Float[Array, "B T D"]:
    """What the first layer reads: projection(norm(scale * token + position + type)).

    Args:
      params: of the model.
      tokens: ids; or floats, a weighted sum of tokens, or any `vocab_size` features.
      config: of the model.
      positions: None for 0, 1, 2, ...; a position, token id or type outside its table gives NaN,
        except that negative positions are not noticed: they count from the end of the table.
      token_types: None for type 0. A model without a table of types reads them from the table of
        tokens (GPT-2).

    >>> config = ModelConfig(vocab_size=7, max_len=5, width=4)
    >>> params = {"embedding": jnp.ones((7, 4)), "positions": jnp.ones((5, 4))}
    >>> embed(params, jnp.array([[1, 2]]), config)[0, 0].tolist()
    [2.0, 2.0, 2.0, 2.0]
    """
    spec = config.embedding
    is_mixture = jnp.issubdtype(tokens.dtype, jnp.floating)
    if is_mixture and spec.zero_token is not None:
        tokens = tokens.at[..., spec.zero_token].set(0)
    x: Array = (
        tokens @ params["embedding"] if is_mixture else read_rows(params["embedding"], tokens)
    )
    # Weights may be less precise than the model computes.
    x = x.astype(jnp.promote_types(x.dtype, config.compute.dtype))
    x = x if spec.scale == 1 else x * jnp.asarray(spec.scale, x.dtype)
    if spec.zero_token is not None and not is_mixture:
        x = jnp.where((tokens == spec.zero_token)[..., None], 0, x)
    x = _add_positions(params, x, config, positions)
    if spec.token_types:
        types = jnp.zeros(tokens.shape[:2], int) if token_types is None else token_types
        x = x + read_rows(params["token_types"], types)
    elif token_types is not None:
        x = x + read_rows(params["embedding"], token_types)
    if spec.norm:
        x = normalize(params.get("embedding_norm", {}), x, config.norm)
    return dense(params, "embedding_projection", x) if spec.width else x


def _add_positions(
    params: Params, x: Float[Array, "B T E"], config: ModelConfig, positions: Array | None
) -> Float[Array, "B T E"]:
    spec, offset = config.positions, 0
    table: Array | None = params.get("positions")
    if isinstance(spec, Sinusoidal):
        length, width = config.max_len, x.shape[-1]
        made = (
            sinusoidal_halves(length, width, rates=spec.rates)
            if spec.halves
            else sinusoidal(length, width)
        )
        table = made.astype(x.dtype)
    elif isinstance(spec, Learned):
        offset = spec.offset
    if table is None:
        return x
    if positions is None:
        return x + table[None, offset : offset + x.shape[1]]
    rows: Array = jnp.asarray(table).at[positions + offset].get(mode="fill", fill_value=jnp.nan)
    return x + with_rank(rows, x.ndim)


def rotary_embedding(
    spec: Positions, layout: Layout, positions: Int[Array, "*B T"]
) -> Inexact[Array, "*B T half"] | None:
    """Angles that rotate queries and keys at these positions; None without rotary positions. They
    are complex, log(scale) + i angle, where rotated numbers are scaled.

    >>> from attnlab.heads import Standard
    >>> rotary_embedding(Rotary(), Standard(width=32, num_heads=2), jnp.arange(5)).shape
    (5, 8)
    """
    if not isinstance(spec, Rotary):
        return None
    size = spec.rotated_size(layout)
    angles = rotary_angles(positions, size, base=spec.base, scaling=spec.parsed_scaling)
    return angles if spec.scale == 1 else jnp.log(spec.scale) + 1j * angles


def position_scale(
    attention: Attention, positions: Int[Array, "*B T"]
) -> Float[Array, "*B T 1 1"] | None:
    """What multiplies queries at these positions: see `Attention.position_scale`.

    >>> position_scale(Attention(position_scale=(0.5, 2)), jnp.arange(5))[:, 0, 0].round(2).tolist()
    [1.0, 1.0, 1.350000023841858, 1.350000023841858, 1.5499999523162842]
    """
    if attention.position_scale is None:
        return None
    growth, length = attention.position_scale
    return (1 + growth * jnp.log1p(positions // length))[..., None, None]


def position_bias(
    spec: Positions,
    table: Array | None,
    num_heads: int,
    queries: Int[Array, "*B T"],
    keys: Int[Array, "*B S"],
    *,
    two_sided: bool,
    layer: ArrayLike = 0,
) -> Float[Array, "*B N T S"] | None:
    """What positions add to the scores; None where they add nothing.

    Args:
      spec: the position scheme.
      table: of relative positions, a number for each bucket of distances and head, [buckets, N], or
        [L, buckets, N] with `Relative.per_layer`.
      num_heads: N.
      queries, keys: their positions.
      two_sided: keys ahead of a query have buckets of their own; else all are in bucket 0.
      layer: index of the layer; may be traced.

    >>> position_bias(Alibi(), None, 1, jnp.array([2]), jnp.arange(3), two_sided=False).tolist()
    [[[-0.0078125, -0.00390625, -0.0]]]
    """
    if isinstance(spec, Relative) and table is not None:
        buckets = relative_buckets(
            keys[..., None, :] - queries[..., :, None],
            num_buckets=spec.buckets,
            max_distance=spec.max_distance,
            two_sided=two_sided,
        )
        own = table[layer] if spec.per_layer else table
        return jnp.moveaxis(own[buckets], -1, -3)
    if not isinstance(spec, Alibi):
        return None
    distances = jnp.abs(keys[..., None, None, :] - queries[..., None, :, None])
    return -alibi_slopes(num_heads)[:, None, None] * distances


# Images -------------------------------------------------------------------------------------------


def image_features(images: Float[Array, "B H W C"], spec: Images | None) -> Float[Array, "B T F"]:
    """Images as the rows of features that a model with `embedding.images=spec` reads: the class
    token, then the patches from left to right and from top to bottom (Dosovitskiy et al. 2021). The
    pixels of a patch are in the order of the axes of the image.

    A row is read like any vector of features, by the embedding table. Features after the pixels are
    the kind of the row: (1, 0) for the class token, with zeros for pixels, and (0, 1) for a patch.
    So the table [features, E] holds the projection of the patches, the vector of the class token
    and the bias of the projection. `Images.marks` names these features.

    Raises:
      ValueError: the model reads no images, or images of another size or dtype.

    >>> spec = Images(height=2, width=4, channels=1, patch_height=2, patch_width=2)
    >>> image_features(jnp.arange(8.0).reshape(1, 2, 4, 1), spec)[0].astype(int).tolist()
    [[0, 0, 0, 0, 1, 0], [0, 1, 4, 5, 0, 1], [2, 3, 6, 7, 0, 1]]
    """
    if spec is None:
        raise ValueError(f"tokens {images.shape} are images: this model has no embedding.images")
    expected = spec.height, spec.width, spec.channels
    if images.shape[1:] != expected:
        torch = images.shape[1:] == (spec.channels, spec.height, spec.width)
        hint = "; put the channels last: jnp.moveaxis(images, 1, -1)" if torch else ""
        sizes = ", ".join(map(str, expected))
        raise ValueError(f"images {images.shape} must be [batch, {sizes}]{hint}")
    if not jnp.issubdtype(images.dtype, jnp.floating):
        raise ValueError(f"images of {images.dtype} must be floats, for ViT images / 127.5 - 1")
    (rows, columns), p, q = spec.grid, spec.patch_height, spec.patch_width
    images = images[:, : rows * p, : columns * q]  # the rest fills no patch
    grid = images.reshape(-1, rows, p, columns, q, spec.channels).swapaxes(2, 3)
    patches = grid.reshape(-1, rows * columns, spec.num_pixels)
    first, marks = int(spec.class_token), spec.marks
    features = jnp.pad(patches, [(0, 0), (first, 0), (0, len(marks))])
    for mark, tokens in (("class", slice(first)), ("patch", slice(first, None))):
        if mark in marks:
            features = features.at[:, tokens, spec.num_pixels + marks.index(mark)].set(1)
    return features
