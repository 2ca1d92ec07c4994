"""`ModelConfig`: everything that makes a model, checked."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp

from attnlab.attention.dispatch import check_implementation
from attnlab.heads.old.cache import Cache, init_cache
from attnlab.heads.old.cost import cache_shapes
from attnlab.heads.old.layouts import LAYOUTS
from attnlab.heads.old.orders import check_order, contraction_orders
from attnlab.heads.old.project import memory_names
from attnlab.heads.old.spec import FIELDS, HeadSpec, under_order
from attnlab.model import kinds
from attnlab.model.block import DROPOUT_PLACES, NORMS, BlockSpec, check_scales
from attnlab.model.encoder import CROSS, check_encoder
from attnlab.model.outer import DTYPES, POSITIONS, READOUTS, check_dtype, check_outer
from attnlab.model.pointwise import ACTIVATIONS
from attnlab.names import check_count, find
from attnlab.norms import NORM_KINDS
from attnlab.sharing.mixing import check_mixtures
from attnlab.sharing.named_plans import as_plan
from attnlab.sharing.plan import MIXTURE_SUFFIX, Plan, mixtures

MODELS: dict[str, Callable[..., Any]] = {}
"""kind -> its Flax module; `models.py` fills it, so that this file needs no Flax."""


MIXED = ("attention", "ffn", "cross")
"""Parts whose slots a plan may mix."""
CROSSES = ("cross", f"cross{MIXTURE_SUFFIX}")
"""Parts of a decoder that an encoder beside it has not."""


@runtime_checkable
class Model(Protocol):
    """What `ModelConfig.build` gives, told without Flax; see the modules of `models.py`."""

    def __hash__(self) -> int:
        """Of its config, so that compiled programs are kept by model."""

    @property
    def config(self) -> "ModelConfig":
        """Everything that it does."""

    def init(self, rngs: Any, *tokens: Any, **options: Any) -> Any:
        """{"params": weights} for a key."""

    def apply(self, variables: Any, *tokens: Any, **options: Any) -> Any:
        """What the module returns for these weights and tokens."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Everything that makes a model. Frozen, hashable, and valid once it exists.

    Sizes left None take the default of the layout (see `HeadSpec`); of `attention_biases` letters
    count for which the layout has a map; `head_norm_eps` is the epsilon of norms inside the heads;
    `gate`, `sink`, `ties` and `extra_keys` are those of `HeadSpec`; `layer_scales` has
    a number for each layer, times which its scores are scaled (GPT-2's by 1 / layer).
    With `window` a token sees so many tokens back (an encoder also ahead). `talking_heads` mixes
    the heads' scores and probabilities by learnt matrices that start as the identity (Shazeer et
    al. 2020, arXiv 2003.02436). `order` is that of `multi_head_attention`. `plan` is a name of
    `sharing.parse_plan` ("albert", "cycle:3") or a `Plan`, `delta_rank` the rank of the differences
    between layers where it has a part `delta`; `init_std` None means 1/sqrt(fan in), and
    `init_residual="depth"` divides the two matrices that write into the residual stream (o, down)
    by sqrt(2 L), as GPT-2 does.

    With `kinds` layers differ: "5(window=511; rotary_base=1e4) 1()" is five layers with these
    fields in the place of the config's, then one as the config says, and so on until there are
    `num_layers`; or pairs (5, dict(window=511, ...)). All fields of heads, FFN, rotary positions
    and plan may stand there; `stacks` are the models of the kinds, each with its own weights.

    Around the layers: `embedding_width` makes the tables that wide and adds a map to `width`, also
    where both are equal (ALBERT); None has no map. The embedding is multiplied by
    `embedding_scale`, that of `zero_token` is read as zeros (T2T's padding). With `images`
    ("224x224x3/16": height x width x channels / side of a patch) it reads images [B, H, W, C] too,
    as rows of `vocab_size` features (see `model.images`). `positions` is a row of `POSITIONS`: with
    "learned_unpadded" `pad_token` is not counted (RoBERTa), "relative" adds to the scores a number
    per head and one of `relative_buckets` distances, the last of them from `relative_distance` on
    (T5), "rotary" turns the first `rotary_fraction` of every head at rates of `rotary_base`, which
    `rotary_scaling` slows down (see `rotary_angles`). `readout` "tied" takes the embedding, "none"
    leaves the logits out; `readout_transform` is the activation of a dense layer and a norm before
    it (BERT), or None. `pooler` is a row of `POOLERS`, `pooled_classes` logits are read from what
    it gives. Dropout of `dropout_rate` acts at `dropout_places`; inside attention and FFN the other
    two rates act; `embedding_dropout_rate` None is `dropout_rate`. `ffn_width` 0 leaves the
    feed-forward part out; `ffn_skip` multiplies what goes past that of a decoder, or of an encoder
    that stands alone (SummAE has 2), `attention_gain` what self-attention writes.

    An "encoder_decoder" has `encoder_layers` (None: num_layers) of `encoder_heads` heads (None:
    num_heads) under `encoder_plan` (None: `plan`) and, in the decoder, the part `cross`, which a
    plan without one shares as it shares `attention`. `cross` "merged" has no such part: attention
    of the decoder reads both texts with one set of maps in one softmax (T5Gemma 2, arXiv
    2512.14856), keys of the source behind its own, unturned. `share_encoder` lets the encoder read
    the decoder's weights: attention, FFN, norms, relative positions and final norm (Raffel et al.
    2020, section 3.2.2).

    Weights, softmax, statistics of norms, logits and loss are float32; products and activations
    are `dtype` ("bfloat16"; "float16" is refused). `remat` computes activations again in the
    backward pass: less memory, and on a CPU no slower. Raises ValueError with a way out.
    """

    kind: str = "decoder"
    vocab_size: int = 256
    max_len: int = 64
    width: int = 64
    num_layers: int = 4
    kinds: Any = ""
    num_heads: int = 4
    layout: str = "standard"
    plan: str | Plan = "separate"
    delta_rank: int = 8
    num_kv_heads: int | None = None
    head_dim: int | None = None
    value_dim: int | None = None
    shared_dim: int | None = None
    latent_dim: int | None = None
    query_latent_dim: int | None = None
    rotary_dim: int | None = None
    query_rank: int | None = None
    key_rank: int | None = None
    value_rank: int | None = None
    attention_scale: float | None = None
    layer_scales: tuple[float, ...] | None = None
    attention_output: bool = True
    qk_norm: str | None = None
    qk_norm_bias: bool = False
    latent_norm: bool = True
    head_norm_eps: float = 1e-6
    gate: str | None = None
    sink: str | None = None
    ties: str = ""
    extra_keys: int | None = None
    window: int | None = None
    talking_heads: bool = False
    ffn_width: int = 256
    cross: str = "own"
    encoder_layers: int | None = None
    encoder_heads: int | None = None
    encoder_plan: str | Plan | None = None
    share_encoder: bool = False
    norm: str = "pre"
    norm_kind: str = "layer"
    norm_eps: float = 1e-5
    norm_bias: bool = True
    activation: str = "gelu"
    attention_biases: str = "qkvo"
    ffn_bias: bool = True
    ffn_skip: float = 1.0
    attention_gain: float = 1.0
    positions: str = "learned"
    pad_token: int | None = None
    rotary_base: float = 10000.0
    rotary_fraction: float = 1.0
    rotary_scaling: str | None = None
    relative_buckets: int = 32
    relative_distance: int = 128
    embedding_width: int | None = None
    embedding_scale: float = 1.0
    images: str | None = None
    zero_token: int | None = None
    token_types: int = 0
    embedding_norm: bool = False
    readout: str = "tied"
    readout_bias: bool = False
    readout_scale: float = 1.0
    readout_transform: str | None = None
    pooler: str | None = None
    pooled_classes: int = 0
    dropout_rate: float = 0.0
    embedding_dropout_rate: float | None = None
    attention_dropout_rate: float = 0.0
    ffn_dropout_rate: float = 0.0
    dropout_places: tuple[str, ...] = ("embeddings", "attention", "ffn")
    init_std: float | None = None
    init_residual: str = "plain"
    dtype: str = "float32"
    remat: bool = True
    order: str | None = None
    implementation: str | None = None

    def __post_init__(self):
        if not isinstance(self.dtype, str):  # jnp.bfloat16
            object.__setattr__(self, "dtype", jnp.dtype(self.dtype).name)
        for field in ("vocab_size", "max_len", "width", "num_layers", "num_heads", "delta_rank"):
            check_count(field, getattr(self, field), 1)
        for field in ("encoder_layers", "encoder_heads", "embedding_width"):
            check_count(field, 1 if getattr(self, field) is None else getattr(self, field), 1)
        for field in ("ffn_width", "token_types", "pooled_classes"):
            check_count(field, getattr(self, field), 0)
        for place in ("", "embedding_", "attention_", "ffn_"):
            if not 0 <= (getattr(self, field := f"{place}dropout_rate") or 0.0) < 1:
                raise ValueError(f"{field} must be in [0, 1), not {getattr(self, field)}")
        if self.init_std is not None and self.init_std <= 0:
            raise ValueError(f"init_std must be positive or None, not {self.init_std}")
        find("kind of model", self.kind, MODELS)
        find("norm", self.norm, NORMS)
        find("norm_kind", self.norm_kind, NORM_KINDS)
        if self.norm_kind != "layer" and self.norm_bias:
            raise ValueError("an RMS norm has no bias; set norm_bias=False")
        find("activation", self.activation, ACTIVATIONS)
        find("positions", self.positions, POSITIONS)
        find("readout", self.readout, dict.fromkeys(READOUTS))
        find("cross", self.cross, CROSS)
        find("init_residual", self.init_residual, {"plain": 1, "depth": 1})
        check_dtype(self.dtype)
        for place in self.dropout_places:
            find("place of dropout", place, dict.fromkeys(DROPOUT_PLACES))
        if self.implementation is not None:
            check_implementation(self.implementation)
        if self.window is not None and self.window < 0:
            raise ValueError(f"window must be at least 0 tokens back, not {self.window}")
        check_outer(self)
        if self.layer_scales is not None:
            object.__setattr__(self, "layer_scales", tuple(self.layer_scales))  # a list: no hash
        check_scales(self.layer_scales, self.num_layers, self.kind)
        runs = kinds.read_kinds(self.kinds or [], type(self))
        object.__setattr__(self, "kinds", kinds.write_kinds(runs))  # one way to write it
        if self.kinds:
            kinds.check_kinds(self)
            return
        if self.layer_plan.num_layers != self.num_layers:
            raise ValueError(
                f"the plan has {self.layer_plan.num_layers} layers, num_layers is {self.num_layers}"
            )
        if self.encoder_heads == self.num_heads:
            object.__setattr__(self, "encoder_heads", None)  # one way to write it
        check_encoder(self)
        if self.kind == "encoder_decoder":
            self._check_parts(self.encoder_layer_plan)
        self._check_parts(self.layer_plan)
        self._check_heads(self.heads)

    def _check_parts(self, plan: Plan) -> None:
        """Parts that a layer has, and what keys that layers share ask of it."""
        check_mixtures(plan, MIXED)
        must, may = {"attention", "ffn"}, {"cross", "kv", "delta", *mixtures(plan).values()}
        if not must <= set(plan) <= must | may:
            raise ValueError(
                f"a plan has the parts {sorted(must)} and may have {sorted(may)}; this one has "
                f"{sorted(plan)}"
            )
        if "kv" in plan and not memory_names(self.heads):
            raise ValueError(
                f"layout {self.layout!r} has the inputs{self.ties and ' or the queries'} for keys, "
                "which layers cannot share; use layout 'bilinear' or a plan without 'kv'"
            )
        if any(plan.reuses_kv) and self.order is not None:
            rotary = POSITIONS[self.positions].rotary
            orders = under_order(self.heads, self.order), self.heads
            held = [cache_shapes(one, rotary) for one in orders]
            if held[0] != held[1]:
                raise ValueError(
                    f"order {self.order!r} has no keys for layers to share; use 'factored' or None"
                )

    def _check_heads(self, heads: HeadSpec) -> None:
        """What a layer asks of its heads."""
        if heads.sizes["O"] != self.width:
            raise ValueError(
                f"without an output map the heads side by side ({heads.sizes['O']}) must be as "
                f"wide as the model ({self.width}); set value_dim or attention_output=True"
            )
        if heads.extra_keys and self.talking_heads:
            raise ValueError("talking_heads mix no extra_keys; leave one of them out")
        rotary = POSITIONS[self.positions].rotary
        if rotary and heads.turned is None:
            raise ValueError(
                f"layout {self.layout!r} has the inputs for keys, which rotary positions cannot "
                "turn; use layout 'bilinear' or other positions"
            )
        turned = self.num_turned if rotary else 0
        if turned % 2:
            field = FIELDS[LAYOUTS[self.layout].turned or "H"]
            part = (
                "" if self.rotary_fraction == 1 else f", of which rotary_fraction takes {turned},"
            )
            raise ValueError(
                f"rotary positions turn pairs: {field} {heads.turned}{part} must be even"
            )
        if self.order is not None:
            orders = contraction_orders(heads, 1, self.max_len, rotary=rotary)
            check_order(heads, orders, self.order)

    @property
    def stacks(self) -> Mapping[str, "ModelConfig"]:
        """Name of its weights -> the model of the layers of one kind: `kinds.stacks_of`."""
        return kinds.stacks_of(self)

    @property
    def layer_names(self) -> tuple[str, ...]:
        """The name of the weights of every layer, in their order."""
        return kinds.layer_names(self)

    @property
    def heads(self) -> HeadSpec:
        """The attention heads of every layer. Raises ValueError where `kinds` have their own."""
        if self.kinds:
            raise ValueError(
                f"layers of several kinds ({self.kinds}) have no heads in common; each model of "
                "config.stacks has its own"
            )
        same = {f.name for f in dataclasses.fields(HeadSpec)} - {"norm_eps"}
        return HeadSpec(
            scale=self.attention_scale,
            biases=self._biases(),
            output=self.attention_output,
            norm_eps=self.head_norm_eps,
            **{f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name in same},
        )

    @property
    def num_turned(self) -> int:
        """How many numbers of a query and of a key rotary positions turn: the first ones."""
        return int((self.heads.turned or 0) * self.rotary_fraction)

    def _biases(self) -> str:
        """A layout without a map has no bias for it; a letter that is none stays, and fails."""
        find("layout", self.layout, LAYOUTS)
        maps = HeadSpec.bias_letters(self.layout, self.attention_output, self.ties)
        return "".join(a for a in self.attention_biases if a in maps or a not in "qkvo")

    @property
    def layer_plan(self) -> Plan:
        """The plan as data; of the decoder, where there is an encoder too; of all `kinds`."""
        if self.kinds:
            return kinds.whole_plan(self)
        plan = as_plan(self.plan, self.num_layers)
        if self.kind != "encoder_decoder" or "cross" in plan or self.cross == "merged":
            return plan
        names = {part.replace("attention", "cross", 1): part for part in plan}
        crosses = {new: plan[old] for new, old in names.items() if new.startswith("cross")}
        return Plan(**dict(plan.items()), **crosses)

    @property
    def encoder_layer_plan(self) -> Plan:
        """The plan of the encoder beside the decoder."""
        plan = self.plan if self.encoder_plan is None else self.encoder_plan
        plan = as_plan(plan, self.encoder_layers or self.num_layers)
        return Plan(**{part: slots for part, slots in plan.items() if part not in CROSSES})

    @property
    def as_encoder(self) -> "ModelConfig":
        """The same model with the heads of its encoder in both stacks."""
        if self.encoder_heads is None:
            return self
        return dataclasses.replace(self, num_heads=self.encoder_heads, encoder_heads=None)

    @property
    def block(self) -> BlockSpec:
        """One layer; of the decoder, where there is an encoder too."""
        return self.block_under(self.layer_plan)

    @property
    def encoder_block(self) -> BlockSpec:
        """One layer of the encoder beside the decoder."""
        block = self.as_encoder.block_under(self.encoder_layer_plan)
        return block._replace(is_causal=False, ffn_skip=1.0, merged=False)

    def block_under(self, plan: Plan) -> BlockSpec:
        """One layer with the parts that `plan` names."""
        own = ("heads", "is_causal", "cross", "merged", "kv_apart", "delta_rank", "mixed")
        return BlockSpec(
            heads=self.heads,
            is_causal=self.kind != "encoder",
            cross=self.heads if "cross" in plan else None,
            merged=self.cross == "merged",
            kv_apart="kv" in plan,
            delta_rank=self.delta_rank if "delta" in plan else None,
            mixed=tuple((part, plan.num_groups[part]) for part in mixtures(plan)),
            **{f: getattr(self, f) for f in BlockSpec._fields if f not in own},
        )

    def build(self) -> Model:
        """The Flax module."""
        return MODELS[self.kind](self)

    def empty_cache(self, batch: int, size: int, piece: int | None = None) -> Cache:
        """A cache of `size` tokens for every layer that makes keys: arrays [L, B, size, ...]; of
        several `kinds` a dict of such caches, by the names of `stacks`.

        With `piece` layers with a window hold a window and a piece at most: their cache goes
        round, and a call must not have more than `piece` tokens.
        """
        made: dict[str, Any] = {}
        for name, c in self.stacks.items():
            room = size if piece is None or c.window is None else min(size, c.window + piece)
            order, rotary = c.order or "factored", POSITIONS[c.positions].rotary
            one = init_cache(c.heads, batch, room, DTYPES[c.dtype], order=order, rotary=rotary)
            shape = (max(c.layer_plan.kv_indices) + 1,)
            made[name] = jax.tree.map(lambda a, n=shape: jnp.zeros((*n, *a.shape), a.dtype), one)
        return made if self.kinds else made["layers"]
