"""The forward pass of whole models as pure functions of params, config, tokens and inputs."""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int

from attnlab.attention.mask_checks import checked_padding_mask
from attnlab.attention.masks import Edges
from attnlab.eager import KEPT, is_eager
from attnlab.heads import Layout
from attnlab.heads.cache import Cache, held_positions, next_positions, stacked_size
from attnlab.heads.weights import without
from attnlab.models.config import ModelConfig
from attnlab.models.dense import dense, dropout
from attnlab.models.embeddings import (
    OWN_INPUTS,
    check_per_token,
    check_positions,
    check_range,
    check_tokens,
    default_positions,
    embed,
    position_bias,
    rotary_embedding,
)
from attnlab.models.layer import Report, TextInputs, layer_values
from attnlab.models.norm import normalize
from attnlab.models.output import lm_head, pool
from attnlab.models.parameters import check_params, empty_sublayers, params_of
from attnlab.models.specs import Alibi, LayerSpec, Learned, Relative, Sinusoidal
from attnlab.models.stack import (
    HeadMask,
    LayersOfType,
    StackInputs,
    StackOutputs,
    check_values,
    run_layers,
    stack_values,
)
from attnlab.sharing import Params
from attnlab.tap import Patches, Tap

ModelCache = Cache | dict[str, Cache]
"""Arrays [L, B, size, ...] by name; with `layer_types` one such dict for each type."""
NextKey = Callable[[], Array] | None
"""Returns another random key for dropout at each call; None: no dropout."""
Reports = dict[str, Report]
"""Stack ("layers", "encoder_layers", ...) -> how its attention is computed."""

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
      positions: [T] or [B, T]; None is 0, 1, 2, ..., with a cache the next ones, which relative
        positions without a table and ALiBi then need: a cache holds no positions. Those outside a
        table are a ValueError, and within `jax.jit` give NaN; there a negative one is not noticed
        and counts from the end of the table.
      token_types: [B, T]; None is type 0.
      head_mask: multiplies each head, [L, N] or [L, B, N]; L arrays where layers differ in their
        number of heads.
      cache: of `config.init_cache`; tokens are the next ones. A position past `max_len`, or a full
        cache, gives NaN.
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
    positions: Int[Array, "*B T"] | None = None
    token_types: Int[Array, "B T"] | None = None
    head_mask: HeadMask | None = None
    cache: ModelCache | None = None
    source: ArrayLike | None = None
    source_padding_mask: Bool[Array, "B S"] | None = None
    encoded: Float[Array, "B S D"] | None = None
    capture: Iterable[str] = ()
    patch: Patches | None = None


NO_INPUTS = ModelInputs()
ARRAYS = ("padding_mask", "mask", "head_mask", "cache", "source_padding_mask", "encoded")
"""The inputs that are arrays, apart from those in `_Tokens`."""


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


def model_values(config: ModelConfig, *, with_encoder: bool = True) -> dict[str, str]:
    """Names of the values of a model -> their axes, without the axis of layers.

    Args:
      config: of the model.
      with_encoder: of an encoder_decoder, also those of its encoder, with the prefix "encoder.".

    >>> sorted(model_values(ModelConfig()))[:4]
    ['attention_in', 'attention_out', 'embeddings', 'ffn_hidden']
    """
    values = {EMBEDDINGS: "B T D"} | stack_values([c.layer for c in config.stacks.values()])
    if config.encoder is not None and with_encoder:
        theirs = {EMBEDDINGS: "B T D"} | layer_values(config.encoder_layer)
        values |= {ENCODER + name: axes for name, axes in theirs.items()}
    return values


def run_model(
    params: Params,
    tokens: ArrayLike,
    config: ModelConfig,
    inputs: ModelInputs = NO_INPUTS,
    *,
    next_key: NextKey = None,
    reports: Reports | None = None,
) -> Outputs:
    """tokens -> `Outputs`: a decoder, an encoder, or both.

    Args:
      params: of the model, or the variables {"params": ...}.
      tokens: ids [B, T]; floats [B, T, vocab_size], which mix tokens; images [B, H, W, C] if the
        config has them.
      config: of the model.
      inputs: masks, positions, cache, second text, what to capture or patch.
      next_key: returns random keys for dropout; None: no dropout.
      reports: filled, while JAX traces, with how attention is computed.

    Raises:
      TypeError: params are no dict, or config is no `ModelConfig`.
      ValueError: params of another model, or inputs that do not fit, saying what to change.

    >>> from attnlab.models.parameters import param_shapes
    >>> import jax
    >>> config = ModelConfig(width=8, num_layers=2)
    >>> params = jax.tree.map(lambda a: jnp.ones(a.shape), param_shapes(config))
    >>> run_model(params, [[1, 2, 3]], config).logits.shape
    (1, 3, 256)
    """
    params = params_of(params, config)
    check_params(config, params)
    has_encoder = config.encoder is not None
    _check_inputs(config, inputs)
    known = model_values(config, with_encoder=has_encoder and inputs.encoded is None)
    capture, patch = check_values(inputs.capture, inputs.patch, known)
    inputs = dataclasses.replace(
        inputs,
        capture=capture,
        patch=patch,
        padding_mask=checked_padding_mask("padding_mask", inputs.padding_mask, tokens),
        source_padding_mask=checked_padding_mask(
            "source_padding_mask",
            inputs.source_padding_mask,
            inputs.source if inputs.encoded is None else inputs.encoded,
        ),
    )
    source = None
    if has_encoder and inputs.encoded is None:
        assert inputs.source is not None
        source = _checked(config, inputs, inputs.source, next_key, is_source=True)
    text = _checked(config, inputs, tokens, next_key)
    arrays = {name: getattr(inputs, name) for name in ARRAYS}
    # Patches and reports are functions and dicts of one call: no program is kept for them.
    if patch or reports is not None or not is_eager(params, text, source, arrays):
        return _forward(params, config, inputs, text, source, reports)
    outputs: Outputs = _program(config, capture)(params, arrays, text, source)
    return outputs


@functools.lru_cache(maxsize=KEPT)
def _program(config: ModelConfig, capture: tuple[str, ...]) -> Callable[..., Outputs]:
    """The compiled forward pass of calls outside of `jit`; its arguments are arrays alone."""

    def run(
        params: Params, arrays: Mapping[str, Any], text: "_Tokens", source: "_Tokens | None"
    ) -> Outputs:
        return _forward(params, config, ModelInputs(**arrays, capture=capture), text, source)

    return jax.jit(run)


def _forward(
    params: Params,
    config: ModelConfig,
    inputs: ModelInputs,
    text: "_Tokens",
    source: "_Tokens | None",
    reports: Reports | None = None,
) -> Outputs:
    """The computation of `run_model`, after its checks."""
    run = _Run(params, config, inputs, reports)
    encoded, encoder = inputs.encoded, None
    if source is not None:
        encoder = run.encode(source)
        encoded = encoder.x
    ran = run.decode(text, encoded)
    captured, losses = ran.captured, ran.losses
    if encoder is not None:
        captured = {ENCODER + name: a for name, a in encoder.captured.items()} | captured
        losses = {ENCODER + name: a for name, a in encoder.losses.items()} | losses
    logits, pooled, classes = _outputs(params, ran.x, config, text.tokens, inputs.padding_mask)
    cache: ModelCache | None = None
    if inputs.cache is not None:
        caches = {name: a for name, a in ran.caches.items() if a is not None}
        cache = caches if config.layer_types else caches["layers"]
    return Outputs(logits, ran.x, pooled, classes, cache, encoded, captured, losses)


def _outputs(
    params: Params,
    hidden: Array,
    config: ModelConfig,
    tokens: ArrayLike,
    padding_mask: Array | None,
) -> tuple[Array | None, Array | None, Array | None]:
    """Logits, pooled output and classes; None for those that the model does not have."""
    spec = config.output
    logits = None if spec.kind == "none" else lm_head(params, hidden, config)
    if spec.pooler is None:
        return logits, None, None
    pooled = pool(params, hidden, config, padding_mask)
    return logits, pooled, dense(params, "classifier", pooled) if spec.num_classes else None


def _check_inputs(config: ModelConfig, inputs: ModelInputs) -> None:
    """Raises ValueError for inputs that this kind of model does not take, or that are missing."""
    if inputs.cache is not None and config.kind == "encoder":
        raise ValueError("an encoder attends to the whole text; leave cache out")
    of_source = ("source", "source_padding_mask", "encoded")
    if config.encoder is None:
        for name in of_source:
            if getattr(inputs, name) is not None:
                raise ValueError(f"{name} is for kind='encoder_decoder'; this is a {config.kind}")
    elif inputs.source is None and inputs.encoded is None:
        raise ValueError("an encoder_decoder needs source=tokens [B, S], or encoded of an earlier "
                         "call")  # fmt: skip


@dataclasses.dataclass
class _Run:
    """One call of a model."""

    params: Params
    config: ModelConfig
    inputs: ModelInputs
    reports: Reports | None

    def encode(self, source: "_Tokens") -> StackOutputs:
        """The source -> output of the encoder, and what its layers captured."""
        c, encoder = self.config, self.config.encoder
        assert encoder is not None
        prefix = "" if encoder.shares_decoder else "encoder_"
        tap = self._tap(ENCODER)
        text = self._embed(source, tap, is_source=True)
        stacked = self.params[f"{prefix}layers"]
        if "delta" in stacked:  # the decoder's delta of cross-attention is none of the encoder's
            stacked = stacked | {"delta": without(stacked["delta"], "cross")}
        layers = LayersOfType(
            params=empty_sublayers(c.encoder_layer) | stacked,
            plan=c.encoder_plan,
            spec=c.encoder_layer,
            text=TextInputs(
                padding_mask=self.inputs.source_padding_mask,
                bias=self._bias(
                    c.encoder_layout, f"{prefix}relative_bias", text, None, two_sided=True
                ),
                rotary=rotary_embedding(c.positions, c.encoder_layout, text.positions),
            ),
            report=self._report("encoder_layers"),
        )
        order = ("encoder",) * c.encoder_plan.num_layers
        return self._run_layers({"encoder": layers}, order, text, tap, f"{prefix}final_norm")

    def decode(self, tokens: "_Tokens", encoded: Array | None) -> StackOutputs:
        """Tokens -> input of the LM head, and what the layers captured."""
        c, inputs = self.config, self.inputs
        caches = cache_by_type(c, inputs.cache)
        padding_mask, source_mask = inputs.padding_mask, inputs.source_padding_mask
        tap = self._tap("")
        text = self._embed(tokens, tap, next(iter(caches.values())))
        layer_types = {
            name: LayersOfType(
                params=empty_sublayers(stack.layer) | self.params[name],
                plan=stack.plan,
                spec=stack.layer,
                text=TextInputs(
                    mask=inputs.mask,
                    padding_mask=padding_mask,
                    bias=self._bias(
                        stack.layout,
                        "relative_bias",
                        text,
                        caches[name],
                        two_sided=c.kind == "encoder",
                    ),
                    rotary=rotary_embedding(stack.positions, stack.layout, text.positions),
                    source=encoded,
                    source_mask=None if source_mask is None else source_mask[:, None, None, :],
                ),
                cache=caches[name],
                report=self._report(name),
            )
            for name, stack in c.stacks.items()
        }
        head_mask = inputs.head_mask
        return self._run_layers(layer_types, c.layer_names, text, tap, "final_norm", head_mask)

    def _tap(self, prefix: str) -> Tap:
        """A tap for one stack, whose values have this prefix in the model."""
        names = {*self.inputs.capture, *(self.inputs.patch or {})}
        mine = (n.removeprefix(prefix) for n in names if n.startswith(ENCODER) == bool(prefix))
        return Tap(self.inputs.capture, self.inputs.patch).restricted(mine, prefix)

    def _embed(
        self, text: "_Tokens", tap: Tap, cache: Cache | None = None, *, is_source: bool = False
    ) -> "_Text":
        """Tokens, embedded; of the source as of the text."""
        c, positions, after_cache = self.config, text.positions, None
        length = text.tokens.shape[1]
        if cache is not None:
            mask = self.inputs.padding_mask
            after_cache = next_positions({"length": cache["length"][0]}, length, mask)
            positions = after_cache if positions is None else positions
        params = self.params
        if is_source and c.encoder is not None and c.encoder.own_inputs:
            own = {name: f"encoder_{name}" for name in OWN_INPUTS if f"encoder_{name}" in params}
            params = params | {name: params[theirs] for name, theirs in own.items()}
        x = embed(params, text.tokens, c, positions=positions, token_types=text.token_types)
        rate = c.dropout.rate if c.dropout.embedding is None else c.dropout.embedding
        x = dropout(x, rate, text.keys.get("embeddings")).astype(c.compute.dtype)
        if c.positions.is_learned and c.positions.is_relative:
            positions = after_cache  # the table has positions, distances count tokens
        numbers = jnp.arange(length) if positions is None else positions
        return _Text(tap(EMBEDDINGS, x), numbers, after_cache, text.keys)

    def _bias(
        self, layout: Layout, name: str, text: "_Text", cache: Cache | None, *, two_sided: bool
    ) -> Array | None:
        """Position bias of the scores of these heads, in layers with this cache."""
        spec, table = self.config.positions, self.params.get(name)
        keys = text.positions
        if cache is not None and text.after_cache is not None:
            # Entries that are not written yet are masked.
            keys = held_positions(text.after_cache[..., -1], stacked_size(cache))
        return position_bias(
            spec, table, layout.num_heads, text.positions, keys, two_sided=two_sided
        )

    def _run_layers(
        self,
        layer_types: Mapping[str, LayersOfType],
        order: Sequence[str],
        text: "_Text",
        tap: Tap,
        norm: str,
        head_mask: HeadMask | None = None,
    ) -> StackOutputs:
        """All layers and the final norm."""
        c = self.config
        inputs = StackInputs(
            head_mask=head_mask,
            dropout_key=text.keys.get("layers"),
            capture=tuple(sorted(tap.capture - {EMBEDDINGS})),
            patch={name: f for name, f in tap.patch.items() if name != EMBEDDINGS},
            remat=c.compute.remat,
        )
        outputs = run_layers(layer_types, order, text.x, inputs)
        x = outputs.x
        if c.norm.has_final:
            x = normalize(self.params.get(norm, {}), x, c.norm)
        x = dropout(x, c.dropout.rate, text.keys.get("final"))
        return outputs._replace(x=x, captured=tap.captured | outputs.captured)

    def _report(self, stack: str) -> Report | None:
        return None if self.reports is None else self.reports.setdefault(stack, {})


class _Text(NamedTuple):
    """One text, embedded."""

    x: Float[Array, "B T D"]
    positions: Int[Array, "*B T"]
    after_cache: Int[Array, "*B T"] | None
    """Where a cache puts the tokens; None without one."""
    keys: Mapping[str, Array]


class _Tokens(NamedTuple):
    """One text, checked."""

    tokens: Int[Array, "B T"] | Float[Array, "B T vocab"]
    positions: Int[Array, "*B T"] | None
    token_types: Int[Array, "B T"] | None
    keys: dict[str, Array]
    """Where there is dropout ("embeddings", "layers", "final") -> its random key."""


def _checked(
    config: ModelConfig,
    inputs: ModelInputs,
    tokens: ArrayLike,
    next_key: NextKey,
    *,
    is_source: bool = False,
) -> _Tokens:
    """The text, or the source, with everything that is given by token.

    Raises:
      ValueError: tokens, positions or token types that do not fit, or are out of range.
    """
    tokens = check_tokens(config, tokens)
    mask = inputs.source_padding_mask if is_source else inputs.padding_mask
    check_range("token id", tokens, config.vocab_size, mask)
    positions, token_types = inputs.positions, inputs.token_types
    if is_source:
        positions = token_types = None
    if positions is not None:
        positions = jnp.asarray(positions)
        check_positions(positions, tokens)
        spec = config.positions
        is_distance = isinstance(spec, Alibi | Relative) and not spec.is_learned
        if inputs.cache is not None and is_distance:
            raise ValueError(
                f"positions {spec.name!r} are distances from the tokens of the cache, whose "
                "positions it does not hold; leave positions out"
            )
        if isinstance(spec, Learned | Sinusoidal):
            check_range("position", positions, config.max_len, mask)
    elif is_source or inputs.cache is None:
        positions = default_positions(config, tokens)
    if token_types is not None:
        check_per_token("token_types", token_types, tokens)
        token_types = jnp.asarray(token_types)
        count = config.embedding.token_types or config.vocab_size
        check_range("token type", token_types, count, mask)
    specs = [config.encoder_layer] if is_source else [c.layer for c in config.stacks.values()]
    return _Tokens(tokens, positions, token_types, _dropout_keys(config, specs, next_key))


def _dropout_keys(
    config: ModelConfig, specs: Sequence[LayerSpec], next_key: NextKey
) -> dict[str, Array]:
    """`_Tokens.keys` of a text that passes layers of these types."""
    spec = config.dropout
    embedding = spec.rate if spec.embedding is None else spec.embedding
    drops = {
        "embeddings": bool(embedding) and "embeddings" in spec.places,
        "layers": any(layer.dropout.is_active for layer in specs),
        "final": bool(spec.rate) and "final" in spec.places,
    }
    return {} if next_key is None else {place: next_key() for place in drops if drops[place]}


def cache_by_type(config: ModelConfig, cache: ModelCache | None) -> dict[str, Cache | None]:
    """Layer type -> the cache of its layers, None without a cache.

    Raises:
      ValueError: the cache is that of another model.
    """
    names = tuple(config.stacks)
    if cache is None:
        return dict.fromkeys(names)
    if set(cache) != set(names) if config.layer_types else "length" not in cache:
        raise ValueError(
            f"the cache holds {', '.join(cache)}, which is that of another model; make it with "
            "config.init_cache(batch, size) of this one"
        )
    caches = {name: cast(Cache, cache[name] if config.layer_types else cache) for name in names}
    for name, stack in config.stacks.items():
        count = max(stack.plan.kv_indices) + 1
        if {np.shape(a)[:1] for a in caches[name].values()} != {(count,)}:
            raise ValueError(
                f"the cache is that of another model: it needs {count} layers; make it with "
                "config.init_cache(batch, size) of this one"
            )
    return dict(caches)
