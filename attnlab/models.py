"""`ModelConfig` -> a decoder (causal LM) or an encoder (masked LM)."""

import dataclasses
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from attnlab import positions
from attnlab.attention import BACKENDS
from attnlab.block import ACTIVATIONS, NORMS, BlockSpec, dropout, init_norm, layer_norm
from attnlab.cache import Cache, init_cache
from attnlab.heads import HeadSpec
from attnlab.layouts import LAYOUTS
from attnlab.modules import LayerStack
from attnlab.multihead import contraction_orders
from attnlab.names import find
from attnlab.sharing import COUNTED, PLANS, Plan, named

DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16, "float64": jnp.float64}
POSITIONS = ("learned", "sinusoidal", "rotary", "none")
READOUTS = ("tied", "own")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Everything that makes a model. Frozen, hashable, and valid once it exists.

    Sizes left None take the default of the layout (see `HeadSpec`); of `attention_biases` letters
    count for which the layout has a map. With `window` a token sees so many tokens back (an encoder
    also ahead). `talking_heads` mixes the heads' scores and probabilities by learnt matrices that
    start as the identity (Shazeer et al. 2020, arXiv 2003.02436). `order` is that of
    `multi_head_attention`. `plan` is a name of `sharing.named` ("albert", "cycle:3") or a `Plan`;
    `init_std` None means 1/sqrt(fan in), and `init_residual="depth"` divides the two
    matrices that write into the residual stream (o, down) by sqrt(2 L), as GPT-2 does.
    Weights are float32; `dtype` is what products run in. `remat` computes activations again in
    the backward pass: less memory, and on a CPU no slower. Raises ValueError with a way out.
    """

    kind: str = "decoder"
    vocab_size: int = 256
    max_len: int = 64
    width: int = 64
    num_layers: int = 4
    num_heads: int = 4
    layout: str = "standard"
    plan: str | Plan = "separate"
    num_kv_heads: int | None = None
    head_dim: int | None = None
    value_dim: int | None = None
    shared_dim: int | None = None
    attention_scale: float | None = None
    attention_output: bool = True
    qk_norm: str | None = None
    window: int | None = None
    talking_heads: bool = False
    ffn_width: int = 256
    norm: str = "pre"
    norm_eps: float = 1e-5
    norm_bias: bool = True
    activation: str = "gelu"
    attention_biases: str = "qkvo"
    ffn_bias: bool = True
    positions: str = "learned"
    token_types: int = 0
    embedding_norm: bool = False
    readout: str = "tied"
    readout_bias: bool = False
    dropout_rate: float = 0.0
    attention_dropout_rate: float = 0.0
    ffn_dropout_rate: float = 0.0
    init_std: float | None = None
    init_residual: str = "plain"
    dtype: str = "float32"
    remat: bool = True
    order: str | None = None
    implementation: str | None = None

    def __post_init__(self):
        for field in ("vocab_size", "max_len", "width", "num_layers", "num_heads", "ffn_width"):
            value = getattr(self, field)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{field} must be a whole number of at least 1, not {value!r}")
        if self.token_types < 0:
            raise ValueError(f"token_types must be at least 0, not {self.token_types}")
        for field in ("dropout_rate", "attention_dropout_rate", "ffn_dropout_rate"):
            if not 0 <= getattr(self, field) < 1:
                raise ValueError(f"{field} must be in [0, 1), not {getattr(self, field)}")
        if self.init_std is not None and self.init_std <= 0:
            raise ValueError(f"init_std must be positive or None, not {self.init_std}")
        find("kind of model", self.kind, MODELS)
        find("norm", self.norm, NORMS)
        find("activation", self.activation, ACTIVATIONS)
        find("positions", self.positions, dict.fromkeys(POSITIONS))
        find("readout", self.readout, dict.fromkeys(READOUTS))
        find("init_residual", self.init_residual, {"plain": 1, "depth": 1})
        find("dtype", self.dtype, DTYPES)
        if self.implementation is not None:
            find("implementation", self.implementation, BACKENDS)
        if self.slots.num_layers != self.num_layers:
            raise ValueError(
                f"the plan has {self.slots.num_layers} layers, num_layers is {self.num_layers}"
            )
        if self.window is not None and self.window < 0:
            raise ValueError(f"window must be at least 0 tokens back, not {self.window}")
        self._check_heads(self.heads)

    def _check_heads(self, heads: HeadSpec) -> None:
        """What a layer asks of its heads."""
        if heads.sizes["O"] != self.width:
            raise ValueError(
                f"without an output map the heads side by side ({heads.sizes['O']}) must be as "
                f"wide as the model ({self.width}); set value_dim or attention_output=True"
            )
        rotary = self.positions == "rotary"
        if rotary and heads.sizes["H"] % 2:
            raise ValueError(
                f"rotary positions turn pairs: head_dim {heads.sizes['H']} must be even"
            )
        if rotary and self.layout == "absorbed":
            raise ValueError(
                "layout 'absorbed' has the inputs for keys, which rotary positions cannot turn; "
                "use layout 'bilinear' or other positions"
            )
        if self.order is not None:
            orders = contraction_orders(heads, 1, self.max_len, rotary=rotary)
            cost = find(f"order of layout {self.layout!r}", self.order, orders)
            if isinstance(cost, str):
                raise ValueError(f"order {self.order!r} cannot run: {cost}; use 'factored' or None")

    @property
    def heads(self) -> HeadSpec:
        """The attention heads of every layer."""
        return HeadSpec(
            layout=self.layout,
            width=self.width,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            value_dim=self.value_dim,
            shared_dim=self.shared_dim,
            scale=self.attention_scale,
            biases=self._biases(),
            output=self.attention_output,
            qk_norm=self.qk_norm,
        )

    def _biases(self) -> str:
        """A layout without a map has no bias for it; a letter that is none stays, and fails."""
        maps = set(find("layout", self.layout, LAYOUTS).biases)
        maps -= set() if self.attention_output else {"o"}
        return "".join(a for a in self.attention_biases if a in maps or a not in "qkvo")

    @property
    def slots(self) -> Plan:
        """The plan as data."""
        if isinstance(self.plan, Plan):
            return self.plan
        find("plan", self.plan.partition(":")[0], PLANS | COUNTED)
        return named(self.plan, self.num_layers)

    @property
    def block(self) -> BlockSpec:
        """One layer."""
        return BlockSpec(
            heads=self.heads,
            is_causal=self.kind == "decoder",
            **{f: getattr(self, f) for f in BlockSpec._fields if f not in ("heads", "is_causal")},
        )

    def build(self) -> "Transformer":
        """The Flax module."""
        return MODELS[self.kind](self)

    def empty_cache(self, batch: int, size: int) -> Cache:
        """A cache of `size` tokens for every layer: arrays [L, B, size, ...]."""
        one = init_cache(
            self.heads, batch, size, DTYPES[self.dtype], order=self.order or "factored"
        )
        return jax.tree.map(lambda a: jnp.zeros((self.num_layers, *a.shape), a.dtype), one)


class Transformer(nn.Module):
    """Embeddings, a stack of layers, a readout."""

    config: ModelConfig

    @nn.compact
    def __call__(
        self,
        tokens: Int[Array, "B T"],
        *,
        token_types: Int[Array, "B T"] | None = None,
        mask: Bool[Array, "..."] | None = None,
        head_gate: Float[Array, "..."] | None = None,
        cache: Cache | None = None,
        deterministic: bool = True,
        return_probs: bool = False,
    ) -> Any:
        """tokens -> logits [B, T, vocab_size] in float32 at least.

        With `return_probs` also the attention probabilities [L, B, N, T, T]; the logits are the
        same bits. `mask` is boolean, True = may attend; `head_gate` is [L, N] or [L, B, N].
        With `cache` (of `ModelConfig.empty_cache`) the tokens are the next ones, and the longer
        cache is returned last; positions past `max_len` or a full cache give NaN.
        Dropout takes the "dropout" random stream when not `deterministic`.
        """
        c, dtype = self.config, DTYPES[self.config.dtype]
        length = tokens.shape[1]
        if length > c.max_len:
            raise ValueError(f"{length} tokens are longer than max_len {c.max_len}; raise max_len")
        matrix = nn.initializers.normal(c.init_std or c.width**-0.5)
        if cache is not None and c.kind != "decoder":
            raise ValueError(f"only a decoder goes on from a cache, not the {c.kind}")
        where = jnp.arange(length) + (0 if cache is None else cache["length"][0])

        def positioned(table):
            if cache is None:
                return table[:length]
            return table.at[where].get(mode="fill", fill_value=jnp.nan)

        table = self.param("embedding", matrix, (c.vocab_size, c.width))
        x = table[tokens]
        if c.positions == "learned":
            x = x + positioned(self.param("positions", matrix, (c.max_len, c.width)))
        if c.positions == "sinusoidal":
            x = x + positioned(positions.sinusoidal(c.max_len, c.width)).astype(x.dtype)
        if c.token_types:
            types = self.param("token_types", matrix, (c.token_types, c.width))
            x = x + types[jnp.zeros_like(tokens) if token_types is None else token_types]
        if c.embedding_norm:
            x = layer_norm(self._norm("embedding_norm"), x, eps=c.norm_eps)
        if c.dropout_rate and not deterministic:
            x = dropout(x, c.dropout_rate, self.make_rng("dropout"))
        rotary = None
        if c.positions == "rotary":
            rotary = positions.rotary_angles(where, c.heads.sizes["H"])
        layers = LayerStack(
            c.block,
            c.slots,
            init_std=c.init_std,
            residual_scale=(2 * c.num_layers) ** -0.5 if c.init_residual == "depth" else 1.0,
            remat=c.remat,
            name="layers",
        )
        x, probs, cache = layers(
            x.astype(dtype),
            mask=mask,
            rotary=rotary,
            head_gate=head_gate,
            cache=cache,
            deterministic=deterministic,
            return_probs=return_probs,
        )
        if c.norm == "pre":
            x = layer_norm(self._norm("final_norm"), x, eps=c.norm_eps)
        readout = table.T
        if c.readout == "own":
            readout = self.param("readout", matrix, (c.width, c.vocab_size))
        logits = jax.lax.dot(
            x.reshape(-1, c.width),
            readout.astype(x.dtype),
            preferred_element_type=jnp.promote_types(x.dtype, jnp.float32),
        ).reshape(*tokens.shape, c.vocab_size)
        if c.readout_bias:
            logits = logits + self.param("readout_bias", nn.initializers.zeros, (c.vocab_size,))
        results = [logits, probs, cache]
        asked = [True, return_probs, cache is not None]
        given = tuple(a for a, wanted in zip(results, asked, strict=True) if wanted)
        return given if len(given) > 1 else logits

    def _norm(self, name: str) -> Any:
        return self.param(
            name, lambda key: init_norm(self.config.width, bias=self.config.norm_bias)
        )


class Decoder(Transformer):
    """Each position sees itself and the past: predicts the next token."""


class Encoder(Transformer):
    """Each position sees all: predicts the tokens that were masked."""


MODELS = {"decoder": Decoder, "encoder": Encoder}
