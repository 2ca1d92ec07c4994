"""`ModelConfig`: everything that makes a model, checked where it is built."""

import dataclasses
import functools
import types
from collections.abc import Callable, Mapping
from typing import Any, Literal, Protocol, TypeAlias, runtime_checkable

import jax
import jax.numpy as jnp

from attnlab.attention.masks import Edges
from attnlab.fields import Spec, as_count, bounded
from attnlab.heads import Cache, Layout, Standard, explain_heads, init_cache, kv_weight_names
from attnlab.heads.cost import CallSizes, cache_shapes, choose, form
from attnlab.models.specs import (
    FFN,
    Attention,
    Compute,
    Dropout,
    Embedding,
    Images,
    Init,
    LayerSpec,
    Learned,
    Norm,
    OutputHead,
    Positions,
    Relative,
    Rotary,
)
from attnlab.sharing.plan import Plan, as_plan

Kind: TypeAlias = Literal["decoder", "encoder", "encoder_decoder"]


@runtime_checkable
class FlaxModel(Protocol):
    """What `ModelConfig.build` returns: a `Decoder`, `Encoder` or `EncoderDecoder` of Flax."""

    config: "ModelConfig"

    def init(self, rngs: Any, *args: Any, **kwargs: Any) -> Any:
        """{"params": initial parameters} for a random key and the arguments of a call."""

    def apply(self, variables: Any, *args: Any, **kwargs: Any) -> Any:
        """`Outputs` of a call with {"params": params}."""


MODULES: "dict[Kind, Callable[[ModelConfig], FlaxModel]]" = {}
"""Kind of model -> its Flax module; `attnlab.models.flax` fills it."""

WITHOUT_DEVICE = {"blockwise": "blockwise", "xla": "xla", "cudnn": "xla", "edges": "edges"}
"""Backend -> the one whose limits do not depend on the device, and are limits of it too."""

__all__ = ["EncoderConfig", "LayerOverrides", "LayerSpec", "LayerType", "ModelConfig"]


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class LayerOverrides(Spec, prefix="layer_types: "):
    """Fields of a config that one type of layer replaces; None keeps that of the config.

    Attributes:
      heads, ffn, norm, positions, sharing: as in `ModelConfig`. Positions may be rotary in some
        layers and none in others; norms outside the layers are those of the config.
      window, order, implementation: as in `Attention`; `full_attention` removes the window.

    Raises:
      ValueError: both a window and `full_attention`.

    >>> types = ((2, LayerOverrides(window=7)), (1, LayerOverrides()))
    >>> config = ModelConfig(layer_types=types, num_layers=6)
    >>> [config.stacks[name].attention.window for name in config.layer_names]
    [7, 7, None, 7, 7, None]
    """

    heads: Layout | None = None
    ffn: FFN | None = None
    positions: Positions | None = None
    sharing: str | Plan | None = None
    window: int | None = bounded(None, least=0)
    full_attention: bool = False
    order: str | None = None
    implementation: str | None = None
    norm: Norm | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.full_attention and self.window is not None:
            raise ValueError("layer_types: give window or full_attention=True, not both")


LayerType: TypeAlias = tuple[int, LayerOverrides]
"""(number of consecutive layers, what they override)."""


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class EncoderConfig(Spec, prefix="encoder."):
    """The encoder of an encoder-decoder.

    Attributes:
      num_layers, num_heads, sharing: of the encoder; None: those of the decoder.
      own_inputs: the encoder has its own table of positions and norm of embeddings, if the decoder
        has them (BART, arXiv 1910.13461); else both use the decoder's.
      shares_decoder: the encoder uses the decoder's attention, FFN, norms, relative positions and
        final norm (Raffel et al. 2020, section 3.2.2).

    Raises:
      ValueError: `shares_decoder` together with a field that only an encoder of its own has.

    >>> config = ModelConfig(kind="encoder_decoder", encoder=EncoderConfig(num_layers=2))
    >>> config.encoder_model.num_layers, config.num_layers
    (2, 4)
    """

    num_layers: int | None = bounded(None, least=1)
    num_heads: int | None = bounded(None, least=1)
    sharing: str | Plan | None = None
    shares_decoder: bool = False
    own_inputs: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.shares_decoder and (self.own_inputs or self.num_heads is not None):
            raise ValueError(
                "encoder.shares_decoder: both stacks have the same heads and inputs; leave "
                "num_heads and own_inputs out"
            )


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class ModelConfig(Spec):
    """Everything that makes a model. Frozen, hashable, and valid once it exists.

        config = ModelConfig(width=64, heads=heads.Wide(num_heads=4), sharing="albert")
        model = config.build()

    It has more than 12 fields because users name each of them on the command line; those that
    belong together are grouped (`attention`, `ffn`, ...).

    Attributes:
      kind: "decoder" (causal LM), "encoder" (masked LM) or "encoder_decoder" (text to text).
      vocab_size, max_len, width: sizes.
      num_layers: of the decoder, where there are two stacks.
      heads: layout of the attention heads; its width is that of the model and may be left out.
      attention: window, backend, scales.
      ffn, norm, dropout: of every layer.
      positions: position scheme: learned table, sinusoids, rotary, relative, ALiBi or none.
      embedding, output: token embedding; LM head, pooler and classifier head.
      sharing: a sharing plan by name ("albert", "cycle:3") or a `Plan`.
      delta_rank: rank of the differences between layers, where the plan has the sublayer `delta`.
      layer_types: (count, overrides) pairs, repeated until there are `num_layers`: five layers
        with a window, then one without, is ((5, LayerOverrides(window=511)), (1,
        LayerOverrides())).
      encoder: of an encoder_decoder.
      init: initial weights.
      compute: precision and memory.
      metadata: JSON of what a published folder says and nothing computes with, such as ids of
        special tokens; `pretrained.load` sets it, `pretrained.save` writes it. Not compared.

    Raises:
      ValueError: fields that do not fit each other; it names the field, its value and the fix.

    >>> from attnlab.heads import Wide
    >>> ModelConfig(heads=Wide(num_heads=2), num_layers=2).layout.size("head_dim")
    64
    """

    kind: Kind = "decoder"
    vocab_size: int = bounded(256, least=1)
    max_len: int = bounded(64, least=1)
    width: int = bounded(64, least=1)
    num_layers: int = bounded(4, least=1)
    heads: Layout = Standard(num_heads=4, biases=("q", "k", "v", "o"))
    attention: Attention = Attention()
    ffn: FFN = FFN()
    norm: Norm = Norm()
    dropout: Dropout = Dropout()
    positions: Positions = Learned()
    embedding: Embedding = Embedding()
    output: OutputHead = OutputHead()
    sharing: str | Plan = "separate"
    delta_rank: int = bounded(8, least=1)
    layer_types: tuple[LayerType, ...] = ()
    encoder: EncoderConfig | None = None
    init: Init = Init()
    compute: Compute = Compute()
    metadata: str = dataclasses.field(default="", compare=False, repr=False)

    def build(self) -> FlaxModel:
        """The Flax module: `Decoder`, `Encoder` or `EncoderDecoder`."""
        return MODULES[self.kind](self)

    def init_cache(
        self, batch: int, size: int, piece: int | None = None
    ) -> Cache | dict[str, Cache]:
        """An empty cache for decoding.

        Args:
          batch, size: B, and the number of tokens that fit.
          piece: layers with a window keep a window and a piece only, in a ring; then no call may
            have more than `piece` tokens.

        Returns:
          Name -> arrays [K, B, size, ...], one of K for each layer that makes keys and values; with
          `layer_types` one such dict for each type, by the names of `stacks`.

        >>> cache = ModelConfig(num_layers=2).init_cache(batch=1, size=5)
        >>> {name: a.shape for name, a in cache.items()}
        {'k': (2, 1, 5, 4, 16), 'v': (2, 1, 5, 4, 16), 'length': (2,)}
        """
        check_cached_length(self, size)
        made = {name: _init_cache(c, batch, size, piece) for name, c in self.stacks.items()}
        return made if self.layer_types else made["layers"]

    def __post_init__(self) -> None:
        super().__post_init__()
        # One way to write the same thing, so that equal configs are equal.
        if self.heads.width == self.width:
            self._set("heads", dataclasses.replace(self.heads, width=0))
        self._set("layer_types", tuple(_layer_type(pair, self.width) for pair in self.layer_types))
        if self.kind == "encoder_decoder":
            self._set("encoder", self.encoder or EncoderConfig())
        elif self.encoder is not None:
            raise ValueError(f"encoder is for kind='encoder_decoder'; this is a {self.kind}")
        if self.embedding.images is not None:
            check_images(self, self.embedding.images)
        check_position_scheme(self)
        check_output(self)
        scales = self.attention.layer_scales
        if scales is not None and (self.encoder is not None or len(scales) != self.num_layers):
            raise ValueError(
                f"attention.layer_scales: give {self.num_layers} for one stack, not {len(scales)}"
            )
        if self.layer_types:
            check_layer_types(self)
            return
        if self.encoder is None and "cross" in self.plan:
            raise ValueError("the sublayer 'cross' needs kind='encoder_decoder'; leave it out")
        check_sublayers(self)
        check_heads(self)
        if self.encoder is not None:
            check_encoder(self, self.encoder)

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    # What follows -----------------------------------------------------------------------------

    @functools.cached_property
    def layout(self) -> Layout:
        """The heads with the width of the model.

        Raises:
          ValueError: layer types have heads of their own; see `stacks`.
        """
        return self.heads.with_width(self.width)

    @functools.cached_property
    def rotary_size(self) -> int:
        """How many numbers of a query and key are rotated: the first ones."""
        rotary = self.positions
        return rotary.rotated_size(self.layout) if isinstance(rotary, Rotary) else 0

    @functools.cached_property
    def plan(self) -> Plan:
        """The sharing plan as data; of the decoder, where there are two stacks; of all types."""
        if self.layer_types:
            return _whole_plan(self)
        plan = as_plan(self.sharing, self.num_layers)
        if self.encoder is None or "cross" in plan:
            return plan
        return Plan(**dict(plan.items()), cross=plan["attention"])

    @functools.cached_property
    def layer(self) -> LayerSpec:
        """One layer; of the decoder, where there are two stacks."""
        return LayerSpec(
            heads=self.layout,
            cross=self.layout if "cross" in self.plan else None,
            ffn=self.ffn,
            norm=self.norm,
            attention=self.attention,
            dropout=self.dropout,
            is_causal=self.kind != "encoder",
            separate_kv="kv" in self.plan,
            delta_rank=self.delta_rank if "delta" in self.plan else None,
        )

    @functools.cached_property
    def encoder_model(self) -> "ModelConfig":
        """The encoder of an encoder-decoder as a model of its own; `encoder_params` has its
        parameters.

        >>> config = ModelConfig(kind="encoder_decoder", encoder=EncoderConfig(num_layers=2))
        >>> config.encoder_model.kind, config.encoder_model.plan
        ('encoder', Plan(attention=(0, 1), ffn=(0, 1)))
        """
        encoder = self.encoder
        assert encoder is not None
        num_layers = encoder.num_layers or self.num_layers
        plan = as_plan(self.sharing if encoder.sharing is None else encoder.sharing, num_layers)
        heads = self.heads
        if encoder.num_heads is not None:
            heads = dataclasses.replace(heads, num_heads=encoder.num_heads)
        return dataclasses.replace(
            self,
            kind="encoder",
            encoder=None,
            num_layers=num_layers,
            heads=heads,
            ffn=dataclasses.replace(self.ffn, residual_scale=1.0),
            sharing=Plan(**{name: groups for name, groups in plan.items() if name != "cross"}),
            output=OutputHead(kind="none"),
        )

    @functools.cached_property
    def stacks(self) -> "Mapping[str, ModelConfig]":
        """Name of its weights -> the config of the layers of one type; without layer types
        {"layers": itself}."""
        if not self.layer_types:
            return {"layers": self}
        return types.MappingProxyType(
            {name: _of_type(self, name, one) for name, one in _types(self).items()}
        )

    @property
    def longest_text(self) -> int:
        """The most tokens of a text without padding.

        >>> ModelConfig(kind="encoder", max_len=512, positions=Learned(pad_token=1)).longest_text
        510
        """
        pad: int | None = getattr(self.positions, "pad_token", None)
        return self.max_len if pad is None else self.max_len - pad - 1

    @functools.cached_property
    def layer_names(self) -> tuple[str, ...]:
        """The name of the weights of every layer, in order.

        >>> types = ((2, LayerOverrides(window=7)), (1, LayerOverrides()))
        >>> ModelConfig(layer_types=types, num_layers=4).layer_names
        ('layers_0', 'layers_0', 'layers_1', 'layers_0')
        """
        if not self.layer_types:
            return ("layers",) * self.num_layers
        names = {overrides: name for name, overrides in _types(self).items()}
        turn = [names[overrides] for count, overrides in self.layer_types for _ in range(count)]
        return tuple(turn[i % len(turn)] for i in range(self.num_layers))

    @functools.cached_property
    def layer_stacks(self) -> "Mapping[str, ModelConfig]":
        """All layers that run, by type: the `stacks`, and the encoder of an encoder-decoder.

        >>> list(ModelConfig(kind="encoder_decoder").layer_stacks)
        ['layers', 'encoder_layers']
        """
        if self.encoder is None:
            return self.stacks
        return types.MappingProxyType({**self.stacks, "encoder_layers": self.encoder_model})

    def __getstate__(self) -> dict[str, Any]:
        """Fields alone are pickled: what follows from them is derived again."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}


def _scaling(config: ModelConfig, kind: str) -> tuple[float, ...]:
    """The numbers of this kind of rotary scaling; () where the model has none of it."""
    spec = config.positions
    parsed = spec.parsed_scaling if isinstance(spec, Rotary) else None
    return parsed.numbers if parsed is not None and parsed.kind == kind else ()


def check_cached_length(config: ModelConfig, length: int) -> None:
    """Raises ValueError where cached keys of so many tokens would have other longrope factors."""
    for c in config.stacks.values():
        if (longrope := _scaling(c, "longrope")) and 1 < longrope[0] < length:
            raise ValueError(
                f"{length} tokens are above the {longrope[0]:g} of longrope's short factors, which "
                "cached keys keep; decode fewer, or write 1 there for the long factors alone"
            )


def _init_cache(config: ModelConfig, batch: int, size: int, piece: int | None) -> Cache:
    """The empty cache of the layers of one type."""
    window = config.attention.window
    if piece is not None and window is not None:
        size = min(size, window + piece)
    one = init_cache(
        config.layout,
        batch,
        size,
        jnp.dtype(config.compute.dtype),
        order=config.attention.order or "factored",
        rotary=config.positions.is_rotary,
    )
    count = max(config.plan.kv_indices) + 1
    return {name: jnp.zeros((count, *a.shape), a.dtype) for name, a in one.items()}


def _layer_type(pair: object, width: int) -> LayerType:
    """(count, overrides), checked."""
    if not (
        isinstance(pair, list | tuple) and len(pair) == 2 and isinstance(pair[1], LayerOverrides)
    ):
        raise ValueError(f"layer_types holds pairs (count, LayerOverrides(...)), not {pair!r}")
    count, overrides = as_count("layer_types: number of layers", pair[0], 1), pair[1]
    if overrides.heads is not None and overrides.heads.width == width:
        heads = dataclasses.replace(overrides.heads, width=0)
        overrides = dataclasses.replace(overrides, heads=heads)
    return count, overrides


def check_sublayers(config: ModelConfig) -> None:
    """Raises ValueError for sublayers that no layer has, or keys that layers cannot share."""
    plan, order, heads = config.plan, config.attention.order, config.layout
    if not {"attention", "ffn"} <= set(plan) <= {"attention", "ffn", "cross", "kv", "delta"}:
        raise ValueError(
            f"a plan has the sublayers attention, ffn, maybe cross, kv, delta, not {[*plan]}"
        )
    if "kv" in plan and not kv_weight_names(heads):
        raise ValueError(f"layout {heads.name!r} has no weights for a sublayer 'kv'; leave it out")
    if any(plan.reuses_kv) and order is not None:
        rotary = config.positions.is_rotary
        held = [cache_shapes(one, rotary=rotary) for one in (form(heads, order), heads)]
        if held[0] != held[1]:
            raise ValueError(f"attention.order {order!r} has no keys to share; use 'factored'")


def check_heads(config: ModelConfig) -> None:
    """Raises ValueError for heads that do not fit the layers, the positions or the backend."""
    layout, attention, rotary = config.layout, config.attention, config.positions.is_rotary
    if {*layout.input_widths} != {config.width}:
        raise ValueError(f"the model has width {config.width}: leave key_width and value_width out")
    if layout.size("out_width") != config.width:
        raise ValueError(
            f"the heads return width {layout.size('out_width')}, the model has {config.width}; set "
            "value_dim, or output_projection=True without out_width"
        )
    if rotary and layout.rotary_size is None:
        raise ValueError(f"rotary positions cannot rotate keys of {layout.name!r}; use 'bilinear'")
    size = config.rotary_size
    if size % 2:
        raise ValueError(
            f"rotary positions rotate pairs: fraction of {layout.rotary_axis}, {size}, must be even"
        )
    longrope = _scaling(config, "longrope")
    if longrope and len(longrope) // 2 != size // 2:
        raise ValueError(
            f"longrope needs {size // 2} of each, short and long factors, not {len(longrope) // 2}"
        )
    if attention.order is not None:
        sizes = CallSizes(1, config.max_len, config.max_len, rotary=rotary)
        choose(layout, sizes, attention.order)
    name = attention.implementation or ""
    backend = WITHOUT_DEVICE.get(name)
    if backend and (reason := _refusal(config, backend)):
        raise ValueError(
            f"attention.implementation {name!r} cannot run: {reason}; use 'dense' or None"
        )


def _refusal(config: ModelConfig, backend: str) -> object:
    """Why a backend cannot run the heads in any form, in training too, or None."""
    x = jax.ShapeDtypeStruct((1, config.max_len, config.width), "float32")
    nodes, rate = jnp.zeros(1, int), config.dropout.attention
    reasons: list[object] = []
    for order in {config.attention.order, config.attention.order or "factored"}:
        report = explain_heads(
            config.layout,
            x,
            order=order,
            implementation=backend,
            is_causal=config.kind != "encoder",
            local_window_size=config.attention.window,
            mask=Edges(nodes, nodes) if backend == "edges" else None,
            dropout_rate=rate,
            dropout_key=jax.random.key(0) if rate else None,
        )
        reasons.append(report["implementation"].get(backend))  # heads may have no softmax
    return None if "chosen: requested" in reasons else reasons[-1]


# Layer types --------------------------------------------------------------------------------------


def _types(config: ModelConfig) -> dict[str, LayerOverrides]:
    """Name of its weights -> overrides of every type, in the order of its first layer."""
    types_ = dict.fromkeys(overrides for _, overrides in config.layer_types)
    return {f"layers_{i}": overrides for i, overrides in enumerate(types_)}


def _of_type(config: ModelConfig, name: str, overrides: LayerOverrides) -> ModelConfig:
    """The config of the layers of one type, with their number and plan."""
    names = config.layer_names
    count = names.count(name)
    attention = config.attention
    own: dict[str, object] = {
        field: value
        for field in ("window", "order", "implementation")
        if (value := getattr(overrides, field)) is not None
    }
    if overrides.full_attention:
        own["window"] = None
    if attention.layer_scales is not None:
        pairs = zip(attention.layer_scales, names, strict=True)
        own["layer_scales"] = tuple(scale for scale, other in pairs if other == name)
    try:
        return dataclasses.replace(
            config,
            layer_types=(),
            num_layers=count,
            attention=dataclasses.replace(attention, **own),  # type: ignore[arg-type]
            heads=overrides.heads or config.heads,
            ffn=overrides.ffn or config.ffn,
            norm=overrides.norm or config.norm,
            positions=overrides.positions or config.positions,
            sharing=overrides.sharing or config.sharing,
        )
    except ValueError as error:
        raise ValueError(f"the {count} layers of type {overrides}: {error}") from None


def _whole_plan(config: ModelConfig) -> Plan:
    """The plans of all layer types as one.

    Groups are numbered type by type (in `kv` also for a type without that sublayer), layers as in
    the model.
    """
    stacks, names = config.stacks, config.layer_names
    sublayers = [{*c.plan} | {"kv"} for c in stacks.values()]
    kept = set.intersection(*sublayers)
    if not any("kv" in c.plan for c in stacks.values()):
        kept -= {"kv"}
    made: dict[str, list[int | str]] = {n: [0] * config.num_layers for n in sorted(kept)}
    used = dict.fromkeys(made, 0)
    for name, stack in stacks.items():
        plan, layers = stack.plan, [i for i, other in enumerate(names) if other == name]
        for sublayer, groups in made.items():
            own = plan[sublayer] if sublayer in plan else plan["attention"]
            for i, group, source in zip(layers, own, plan.kv_sources, strict=True):
                shifted = group + used[sublayer] if isinstance(group, int) else None
                groups[i] = f"@{layers[source]}" if shifted is None else shifted
            used[sublayer] += 1 + max(group for group in own if isinstance(group, int))
    return Plan(**made)


def check_layer_types(config: ModelConfig) -> None:
    """Raises ValueError for layer types that do not fit each other; it says what to change."""
    if config.kind == "encoder_decoder":
        raise ValueError("layer_types are for one stack, not for an encoder_decoder")
    if len(_types(config)) < 2:
        raise ValueError("layer_types has one type of layer; set its fields in the config")
    if (count := sum(n for n, _ in config.layer_types)) > config.num_layers:
        raise ValueError(f"layer_types has {count} layers, num_layers is {config.num_layers}")
    ours = config.positions
    for c in config.stacks.values():
        theirs, heads = c.positions, config.heads.num_heads
        if theirs != ours and not {theirs.name, ours.name} <= {"rotary", "none"}:
            raise ValueError(
                f"layer_types: only rotary positions and none may differ, not {theirs} and {ours}"
            )
        if ours.is_relative and c.heads.num_heads != heads:
            raise ValueError(
                f"layer_types: relative positions have one table for {heads} heads of every layer, "
                f"not for {c.heads.num_heads}; use rotary positions"
            )


# Encoder, inputs and outputs ----------------------------------------------------------------------


def check_encoder(config: ModelConfig, encoder: EncoderConfig) -> None:
    """Raises ValueError if the encoder, or what it shares, does not fit the decoder."""
    if config.output.pooler:
        raise ValueError("an encoder_decoder has no pooler; leave output.pooler out")
    try:
        theirs = config.encoder_model.plan
    except ValueError as error:
        raise ValueError(f"encoder: see encoder.num_heads and encoder.sharing: {error}") from None
    if not encoder.shares_decoder:
        return
    if isinstance(config.positions, Relative) and config.positions.per_layer:
        raise ValueError("encoder.shares_decoder and positions.per_layer: leave one out")
    uses, has = theirs.num_groups, config.plan.num_groups
    if ("kv" in uses) != ("kv" in has) or any(uses[name] > has.get(name, 0) for name in uses):
        raise ValueError(
            f"encoder.shares_decoder: the encoder uses the groups {uses}, the decoder has {has}; "
            "give both as many layers, or encoder.sharing that fits"
        )


def check_images(config: ModelConfig, images: Images) -> None:
    """Raises ValueError for a model that cannot read these images."""
    if config.kind == "encoder_decoder":
        raise ValueError("embedding.images are read by one stack: set kind='encoder'")
    if config.embedding.token_types:
        raise ValueError("embedding.images have no token types; leave token_types out")
    if config.vocab_size != images.num_features:
        raise ValueError(f"embedding.images are features: set vocab_size={images.num_features}")
    if config.max_len < images.num_tokens:
        raise ValueError(f"embedding.images have so many tokens: set max_len={images.num_tokens}")


def check_position_scheme(config: ModelConfig) -> None:
    """Raises ValueError for positions, or special tokens, that the model does not have."""
    c = config
    pad: int | None = getattr(c.positions, "pad_token", None)
    for field, token in (
        ("positions.pad_token", pad),
        ("embedding.zero_token", c.embedding.zero_token),
    ):
        if token is not None and token >= c.vocab_size:
            raise ValueError(f"{field} {token} is outside of the vocabulary of {c.vocab_size}")
    if (dynamic := _scaling(c, "dynamic")) and c.max_len > dynamic[1]:
        raise ValueError(
            f"positions.scaling 'dynamic' is not supported for longer texts: set max_len "
            f"{c.max_len} to at most {dynamic[1]:g}"
        )
    if pad is not None and c.kind != "encoder":
        raise ValueError("positions.pad_token needs the whole text: set kind='encoder'")
    if pad is not None and pad + 1 >= c.max_len:
        raise ValueError(f"raise max_len: the first token is at position {pad + 1}, by pad_token")


def check_output(config: ModelConfig) -> None:
    """Raises ValueError for an LM head that does not fit the model."""
    c = config
    factorized = c.embedding.width not in (None, c.width)
    if c.output.kind == "tied" and factorized and c.output.transform is None:
        raise ValueError(
            f"a tied LM head of embedding.width {c.embedding.width} cannot read width {c.width}; "
            "set output.transform='gelu' or output.kind='own'"
        )


def heads_per_layer(config: ModelConfig) -> int:
    """The number of heads of every layer.

    Raises:
      ValueError: layer types or stacks differ in it.
    """
    counts = {c.heads.num_heads for c in config.layer_stacks.values()}
    if len(counts) > 1:
        numbers = " or ".join(map(str, sorted(counts)))
        raise ValueError(f"layers have {numbers} heads, and this needs one number for all")
    return counts.pop()
