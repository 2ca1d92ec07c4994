"""The forward pass of whole models as pure functions of params, config, tokens and inputs."""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int

from attnlab.attention.call import check_array, checked_padding_mask
from attnlab.attention.masks import Edges
from attnlab.heads.cache import Cache, held_positions, next_positions, stacked_size
from attnlab.models.config import ModelConfig
from attnlab.models.embed import (
    check_range,
    check_tokens,
    default_positions,
    embed,
    position_bias,
    position_scale,
    rotary_embedding,
)
from attnlab.models.ffn import dropout, normalize
from attnlab.models.head import classify, lm_head, pool
from attnlab.models.layer import LayerInputs, Source
from attnlab.models.params import check_params, empty_sublayers, encoder_params
from attnlab.models.specs import Alibi, Relative, Sinusoidal
from attnlab.models.stack import (
    HeadMask,
    LayersOfType,
    StackOutputs,
    check_values,
    run_layers,
    stack_values,
)
from attnlab.ops import KEPT_PROGRAMS, is_eager
from attnlab.sharing import Params
from attnlab.tap import Patches, Tap

T = TypeVar("T")
ModelCache = Cache | dict[str, Cache]
"""Arrays [L, B, size, ...] by name; with `layer_types` one such dict for each type."""
NextKey = Callable[[], Array] | None
"""Returns another random key for dropout at each call; None: no dropout."""
ENCODER = "encoder."
EMBEDDINGS = "embeddings"
"""Input of the first layer [B, T, D]: a value of the model, not of each layer."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelInputs:
    """Inputs of a model, apart from params and tokens.

    Attributes:
      padding_mask: [B, T], True = a token. Padding is attended to by none, does not count in
        the pooler, and with a cache is neither kept nor counted as a position.
      mask: True = may attend: [T, S], [N, T, S] or [B, N, T, S], each axis 1 or as long, or
        `Edges`.
      segments: packed texts: the number of the text of each token [B, T], with 0 = padding; for an
        encoder_decoder a pair (of tokens, of source [B, S]). No token attends to another text, and
        positions count from the first token of a text. The tokens of a text stand in a row.
      positions: [T] or [B, T]; None is 0, 1, 2, ..., with a cache the next ones, which relative
        positions without a table and ALiBi then need: a cache holds no positions. Those outside a
        table are a ValueError, and within `jax.jit` give NaN; there a negative one is not noticed
        and counts from the end of the table.
      token_types: [B, T]; None is type 0.
      head_mask: multiplies each head, [L, N] or [L, B, N]; L arrays where layers differ in their
        number of heads.
      cache: of `config.init_cache`; tokens are the next ones. A position past the end of a table,
        or a full cache, gives NaN.
      source: tokens [B, S] that the encoder of an encoder_decoder reads.
      source_padding_mask: [B, S], True = a token of the source.
      encoded: `Outputs.encoded` of an earlier call; the encoder is not run again.
      capture: names of values to return, of `model_values(config)`. It never changes a bit of the
        other outputs.
      patch: name -> f(value, layer index), which replaces the value.

    >>> import jax
    >>> from attnlab.models import param_shapes
    >>> config, inputs = ModelConfig(), ModelInputs(capture=("probs",))
    >>> run = lambda params: run_model(params, [[1, 2, 3]], config, inputs).captured["probs"]
    >>> jax.eval_shape(run, param_shapes(config)).shape  # [L, B, N, T, S]
    (4, 1, 4, 3, 3)
    """

    padding_mask: Bool[Array, "B T"] | None = None
    mask: Bool[Array, "..."] | Edges | None = None
    segments: Int[Array, "B T"] | tuple[Int[Array, "B T"], Int[Array, "B S"] | None] | None = None
    positions: Int[Array, "*B T"] | None = None
    token_types: Int[Array, "B T"] | None = None
    head_mask: HeadMask | None = None
    cache: ModelCache | None = None
    source: ArrayLike | None = None
    source_padding_mask: Bool[Array, "B S"] | None = None
    encoded: Float[Array, "B S D"] | None = None
    capture: Iterable[str] = ()
    patch: Patches | None = None


NOT_ARRAYS = ("capture", "patch")
"""Fields of `ModelInputs` that a compiled call depends on."""
jax.tree_util.register_dataclass(
    ModelInputs,
    [f.name for f in dataclasses.fields(ModelInputs) if f.name not in NOT_ARRAYS],
    NOT_ARRAYS,
)
NO_INPUTS = ModelInputs()


class Outputs(NamedTuple):
    """Outputs of a model; None or empty if it does not have them or they were not requested.

    >>> import jax
    >>> from attnlab.models import OutputHead, param_shapes
    >>> config = ModelConfig(kind="encoder", output=OutputHead(pooler="mean", num_classes=3))
    >>> outputs = jax.eval_shape(lambda p: run_model(p, [[1, 2]], config), param_shapes(config))
    >>> [name for name, value in outputs._asdict().items() if value is None]
    ['cache', 'encoded']
    """

    logits: Float[Array, "B T vocab"] | None
    hidden: Float[Array, "B T D"]
    """Input of the LM head: the output of the last layer, after the final norm if there is one."""
    pooled: Float[Array, "B *T D"] | None = None
    classes: Float[Array, "B *T C"] | None = None
    """Logits of the classifier."""
    cache: ModelCache | None = None
    """The cache with the new tokens."""
    encoded: Float[Array, "B S D"] | None = None
    """Output of the encoder, which cross-attention attends to."""
    captured: Mapping[str, Array] = {}
    """Value -> [L, ...]; see `StackOutputs.captured`."""
    losses: Mapping[str, Array] = {}
    """Auxiliary loss -> its sum over layers; those of the encoder with prefix "encoder."."""


@functools.lru_cache(maxsize=256)
def model_values(config: ModelConfig, *, with_encoder: bool = True) -> Mapping[str, str]:
    """Names of the values of a model -> their axes, without the axis of layers.

    Args:
      config: of the model.
      with_encoder: of an encoder_decoder, also those of its encoder, with the prefix "encoder.".

    >>> sorted(model_values(ModelConfig()))[:4]
    ['attention_in', 'attention_out', 'embeddings', 'ffn_hidden']
    """
    values = stack_values([c.layer for c in config.stacks.values()]) | {EMBEDDINGS: "B T D"}
    if config.encoder is not None and with_encoder:
        theirs = model_values(config.encoder_model)
        values |= {ENCODER + name: axes for name, axes in theirs.items()}
    return values


def run_model(
    params: Params,
    tokens: ArrayLike,
    config: ModelConfig,
    inputs: ModelInputs = NO_INPUTS,
    *,
    next_key: NextKey = None,
) -> Outputs:
    """tokens -> `Outputs`: a decoder, an encoder, or both.

    Args:
      params: of the model, or the variables {"params": ...}.
      tokens: ids [B, T]; floats [B, T, vocab_size], which mix tokens; images [B, H, W, C] if the
        config has them.
      config: of the model.
      inputs: masks, positions, cache, second text, what to capture or patch.
      next_key: returns random keys for dropout; None: no dropout.

    Raises:
      TypeError: params are no dict, or config is no `ModelConfig`.
      ValueError: params of another model, or inputs that do not fit, saying what to change.

    >>> from attnlab.models.params import param_shapes
    >>> import jax
    >>> config = ModelConfig(width=8, num_layers=2)
    >>> params = jax.tree.map(lambda a: jnp.ones(a.shape), param_shapes(config))
    >>> run_model(params, [[1, 2, 3]], config).logits.shape
    (1, 3, 256)
    """
    params = check_params(config, params)
    tokens, inputs = check_inputs(config, tokens, inputs)
    keys = _dropout_keys(config, inputs, next_key)
    # Patches are functions of one call: no program is kept for them.
    if inputs.patch or not is_eager(params, tokens, inputs, keys):
        return _forward(params, tokens, config, inputs, keys)
    outputs: Outputs = _program(config)(params, tokens, inputs=inputs, keys=keys)
    return outputs


@functools.lru_cache(maxsize=KEPT_PROGRAMS)
def _program(config: ModelConfig) -> Callable[..., Outputs]:
    """The compiled forward pass of calls outside of `jit`."""
    return jax.jit(functools.partial(_forward, config=config))


# Checks -------------------------------------------------------------------------------------------


def check_inputs(
    config: ModelConfig, tokens: ArrayLike, inputs: ModelInputs
) -> tuple[Array, ModelInputs]:
    """Tokens and inputs of a call as arrays.

    Raises:
      TypeError, ValueError: inputs that do not fit the model or each other; ids and positions that
        are out of range, where they are known.
    """
    has_encoder = config.encoder is not None
    if inputs.cache is not None:
        if config.kind == "encoder":
            raise ValueError("an encoder attends to the whole text; leave cache out")
        cache_by_type(config, inputs.cache)
    for name in ("source", "source_padding_mask", "encoded"):
        if not has_encoder and getattr(inputs, name) is not None:
            raise ValueError(f"{name} is for kind='encoder_decoder'; this is a {config.kind}")
    if has_encoder and inputs.source is None and inputs.encoded is None:
        raise ValueError("an encoder_decoder needs source=tokens [B, S], or encoded")
    known = model_values(config, with_encoder=inputs.encoded is None)
    capture, patch = check_values(inputs.capture, inputs.patch, known)
    segments, of_source, packed = None, None, inputs.segments is not None
    if packed:
        segments, of_source = _check_segments(config, inputs)
    tokens = check_tokens(config, tokens, packed=packed)
    mask, segments = _check_text(config, "", tokens, inputs.padding_mask, segments)
    source, source_mask = None, inputs.source_padding_mask
    if inputs.encoded is None and inputs.source is not None:
        source = check_tokens(config, inputs.source, packed=packed)
    second = source if inputs.encoded is None else jnp.asarray(inputs.encoded)
    if second is not None:
        source_mask, of_source = _check_text(config, "source_", second, source_mask, of_source)
    if source is not None:
        _check_positions(config.encoder_model, source, NO_INPUTS, source_mask, of_source)
    types, masks = inputs.token_types, inputs.head_mask
    if types is not None:
        shape, count = tokens.shape[:2], config.embedding.token_types or config.vocab_size
        types = check_array("token_types", types, "an integer", "[B, T]", shape, exact=True)
        check_range("token type", types, count, mask)
    return tokens, dataclasses.replace(
        inputs,
        padding_mask=mask,
        mask=inputs.mask if isinstance(inputs.mask, Edges | None) else jnp.asarray(inputs.mask),
        segments=None if segments is None else (segments, of_source),
        positions=_check_positions(config, tokens, inputs, mask, segments),
        token_types=types,
        head_mask=list(map(jnp.asarray, masks)) if isinstance(masks, list | tuple) else masks,
        encoded=None if inputs.encoded is None else second,
        source=source,
        source_padding_mask=source_mask,
        capture=capture,
        patch=patch or None,
    )


def _check_text(
    config: ModelConfig, side: str, tokens: Array, mask: ArrayLike | None, segments: Array | None
) -> tuple[Array | None, Array | None]:
    """The padding mask and the segments of a text, each of which hides what the other hides.

    `side` is "source_" for that of an encoder. Ids that are not hidden are in the vocabulary.
    """
    mask = checked_padding_mask(f"{side}padding_mask", mask, tokens)
    if segments is not None:
        shape, name = tokens.shape[:2], f"{side}segments"
        array = check_array(name, segments, "an integer", "[B, T]", shape, exact=True)
        # NumPy stays NumPy: lengths that are known while JAX traces suit cuDNN.
        array = segments if isinstance(segments, np.ndarray) else array
        segments = array if mask is None else jnp.where(mask, array, 0)
        mask = segments != 0
    check_range("token id", tokens, config.vocab_size, mask)
    return mask, segments


def _check_segments(config: ModelConfig, inputs: ModelInputs) -> tuple[Array | None, Array | None]:
    """The segments of tokens and of source."""
    if inputs.cache is not None:
        raise ValueError("a cache holds one text a row; leave segments out")
    if (pooler := config.output.pooler) not in (None, "each"):
        raise ValueError(f"pooler {pooler!r} makes one vector of a row; leave segments out")
    given = inputs.segments
    is_pair = isinstance(given, tuple) and len(given) == 2 and not any(a is None for a in given)
    if isinstance(given, tuple) != is_pair or is_pair == (config.encoder is None):
        raise ValueError(
            "segments must be a pair (of tokens, of source) for an encoder_decoder, else one array"
        )
    return _segments(inputs)


def _segments(inputs: ModelInputs) -> tuple[Array | None, Array | None]:
    """Of tokens and of source."""
    given = inputs.segments
    return given if isinstance(given, tuple) else (given, None)


def _check_positions(
    config: ModelConfig,
    tokens: Array,
    inputs: ModelInputs,
    mask: Array | None,
    segments: Array | None,
) -> Array | None:
    """The positions of a call; None for 0, 1, 2, ..., or those that follow a cache."""
    spec, shape = config.positions, tokens.shape[:2]
    has_table = spec.is_learned or isinstance(spec, Sinusoidal)
    if inputs.positions is None:
        if inputs.cache is not None:
            return None
        made = default_positions(config, tokens, segments)
        if made is not None and segments is not None and has_table:
            check_range("position", made, config.max_len, mask)
        return made
    positions = check_array("positions", inputs.positions, "an integer")
    if positions.shape not in {shape, shape[1:]}:
        raise ValueError(
            f"positions {positions.shape} must be [T] = {shape[1:]} or [B, T] = {shape}"
        )
    if inputs.cache is not None and isinstance(spec, Alibi | Relative) and not spec.is_learned:
        raise ValueError(
            f"positions {spec.name!r} are distances from tokens of the cache; leave positions out"
        )
    if has_table:
        check_range("position", inputs.positions, config.max_len, mask)
    return positions.astype(int)  # their differences may be negative


def cache_by_type(config: ModelConfig, cache: ModelCache) -> dict[str, Cache]:
    """Layer type -> the cache of its layers.

    Raises:
      ValueError: the cache is that of another model.
    """
    caches = cast(dict[str, Cache], cache if config.layer_types else {"layers": cache})
    for name, stack in config.stacks.items():
        count = max(stack.plan.kv_indices) + 1
        held = caches.get(name, {}) if isinstance(caches, Mapping) else {}
        held = held if isinstance(held, Mapping) else {}
        if "length" not in held or {np.shape(a)[:1] for a in held.values()} != {(count,)}:
            raise ValueError(
                f"the cache is that of another model: it needs {count} {name}; make it with "
                "config.init_cache(batch, size) of this one"
            )
    return caches


def _dropout_keys(config: ModelConfig, inputs: ModelInputs, next_key: NextKey) -> dict[str, Array]:
    """Where there is dropout -> its random key, those of the encoder with its prefix."""
    if next_key is None:
        return {}
    spec = config.dropout
    of_embeddings = spec.embedding is not None or "embeddings" in spec.places
    drops = {
        "embeddings": bool(spec.embedding_rate) and of_embeddings,
        "layers": spec.is_active,
        "final": bool(spec.rate) and "final" in spec.places,
    }
    sides = ("",) if inputs.source is None else (ENCODER, "")
    return {side + place: next_key() for side in sides for place in drops if drops[place]}


# Computation --------------------------------------------------------------------------------------


def _forward(
    params: Params,
    tokens: Array,
    config: ModelConfig,
    inputs: ModelInputs,
    keys: Mapping[str, Array],
) -> Outputs:
    """The computation of `run_model`, after its checks."""
    captured: dict[str, Array] = {}
    losses: dict[str, Array] = {}
    encoded = inputs.encoded
    if inputs.source is not None:
        text = encoder_call(params, config, inputs)
        ran = _run_text(*text, _of_encoder(keys))
        encoded = ran.x
        captured |= {ENCODER + name: a for name, a in ran.captured.items()}
        losses |= {ENCODER + name: a for name, a in ran.losses.items()}
        inputs = dataclasses.replace(inputs, encoded=encoded)
    ran = _run_text(params, tokens, config, inputs, keys)
    spec, hidden, pooled, classes = config.output, ran.x, None, None
    logits = None if spec.kind == "none" else lm_head(params, hidden, config)
    if spec.pooler is not None:
        pooled = pool(params, hidden, config, inputs.padding_mask)
        classes = classify(params, pooled, config) if spec.num_classes else None
    cache: ModelCache | None = None
    if inputs.cache is not None:
        caches = {name: a for name, a in ran.caches.items() if a is not None}
        cache = caches if config.layer_types else caches["layers"]
    return Outputs(
        logits, hidden, pooled, classes, cache, encoded, captured | ran.captured,
        losses | ran.losses,
    )  # fmt: skip


def _of_encoder(values: Mapping[str, T]) -> dict[str, T]:
    """What belongs to the encoder, by its names in a model of its own."""
    return {n.removeprefix(ENCODER): a for n, a in values.items() if n.startswith(ENCODER)}


def encoder_call(
    params: Params, config: ModelConfig, inputs: ModelInputs
) -> tuple[Params, Array, ModelConfig, ModelInputs]:
    """(params, tokens, config, inputs) of the encoder of an encoder-decoder as a model of its own,
    for inputs of `check_inputs`."""
    tokens, (_, segments) = cast(Array, inputs.source), _segments(inputs)
    own = ModelInputs(
        padding_mask=inputs.source_padding_mask,
        segments=segments,
        positions=default_positions(config, tokens, segments),
        capture=tuple(_of_encoder(dict.fromkeys(inputs.capture))),
        patch=_of_encoder(inputs.patch or {}),
    )
    return encoder_params(config, params), tokens, config.encoder_model, own


def _run_text(
    params: Params,
    tokens: Array,
    config: ModelConfig,
    inputs: ModelInputs,
    keys: Mapping[str, Array],
) -> StackOutputs:
    """One text through its embedding, its layers and the final norm."""
    tap = Tap(inputs.capture, inputs.patch)
    x, layers = prepare_text(params, tokens, config, inputs, keys)
    ran = run_layers(
        layers,
        config.layer_names,
        tap(EMBEDDINGS, x),
        head_mask=inputs.head_mask,
        dropout_key=keys.get("layers"),
        capture=tuple(inputs.capture),
        patch=inputs.patch,
        compute=config.compute,
    )
    x = ran.x
    if config.norm.places.final:
        x = normalize(params.get("final_norm", {}), x, config.norm)
    x = dropout(x, config.dropout.rate, keys.get("final"))
    return ran._replace(x=x, captured=tap.captured | ran.captured)


def prepare_text(
    params: Params,
    tokens: Array,
    config: ModelConfig,
    inputs: ModelInputs,
    keys: Mapping[str, Array],
) -> tuple[Float[Array, "B T D"], dict[str, LayersOfType]]:
    """What the first layer reads, and the layers that a text passes, by type, with their inputs."""
    length, positions = tokens.shape[1], inputs.positions
    caches: dict[str, Cache] = {}
    after_cache: Array | None = None  # where a cache puts the tokens
    if inputs.cache is not None:
        caches = cache_by_type(config, inputs.cache)
        first = {"length": next(iter(caches.values()))["length"][0]}
        after_cache = next_positions(first, length, inputs.padding_mask)
        positions = after_cache if positions is None else positions
    x = embed(params, tokens, config, positions=positions, token_types=inputs.token_types)
    x = dropout(x, config.dropout.embedding_rate, keys.get("embeddings"))
    if config.positions.is_learned and config.positions.is_relative:
        positions = after_cache  # the table has positions, distances count tokens
    positions = jnp.arange(length) if positions is None else positions
    segments, _ = _segments(inputs)
    made: dict[str, LayersOfType] = {}
    for name, c in config.stacks.items():
        key_positions, cache = positions, caches.get(name)
        if cache is not None and after_cache is not None:
            # Entries that are not written yet are masked.
            key_positions = held_positions(after_cache[..., -1], stacked_size(cache))
        bias = functools.partial(
            position_bias,
            config.positions,
            params.get("relative_bias"),
            c.heads.num_heads,
            positions,
            key_positions,
            two_sided=config.kind == "encoder",
        )
        by_layer = isinstance(config.positions, Relative) and config.positions.per_layer
        own = LayerInputs(
            mask=inputs.mask,
            padding_mask=inputs.padding_mask,
            segments=segments,
            source=None if inputs.encoded is None else _source(inputs, inputs.encoded),
            bias=bias if by_layer else bias(),
            rotary=rotary_embedding(c.positions, c.layout, positions),
            query_scale=position_scale(c.attention, positions),
            cache=cache,
        )
        stacked = empty_sublayers(c.layer) | params[name]
        made[name] = LayersOfType(params=stacked, plan=c.plan, spec=c.layer, inputs=own)
    return x.astype(config.compute.dtype), made


def _source(inputs: ModelInputs, encoded: Array) -> Source:
    """The second text of the decoder's layers."""
    (_, segments), mask = _segments(inputs), inputs.source_padding_mask
    if segments is not None or mask is None:  # segments have their own padding
        return Source(encoded, segments=segments)
    return Source(encoded, mask[:, None, None, :])
