"""The records that make up a model config; each validates its own fields.

They are frozen dataclasses with the defaults of a small pre-norm decoder. `attnlab.models.config`
composes them.
"""

import dataclasses
import functools
from typing import ClassVar, Literal, NamedTuple, TypeAlias

from attnlab.attention.backends import check_implementation
from attnlab.fields import Spec, bounded
from attnlab.heads import positions
from attnlab.heads.layout import Layout

PlainActivation: TypeAlias = Literal["gelu", "gelu_tanh", "quick_gelu", "relu", "silu", "tanh"]
GLU_NAMES = {"geglu": "gated_gelu", "reglu": "gated_relu", "swiglu": "gated_silu"}
"""Names of Shazeer 2020 -> ours; near those of activations without a gate."""
Activation: TypeAlias = Literal[
    PlainActivation, "gated_gelu", "gated_gelu_tanh", "gated_quick_gelu", "gated_relu",
    "gated_silu", "gated_tanh",
]  # fmt: skip
NormPosition: TypeAlias = Literal[
    "pre", "post", "post_final", "pre_open", "pre_ffn", "after", "sandwich", "parallel",
    "parallel_one",
]  # fmt: skip
Pooler: TypeAlias = Literal["first", "first_plain", "last", "max", "mean", "each"]
DropoutPlace: TypeAlias = Literal["embeddings", "attention", "ffn", "final"]
SublayerName: TypeAlias = Literal["attention", "cross", "ffn"]
Dtype: TypeAlias = Literal["float32", "bfloat16", "float64"]


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Experts(Spec, prefix="ffn.experts."):
    """Mixture of experts: each token uses `top_k` FFNs (Shazeer et al. 2017, arXiv 1701.06538).

        y = sum over the chosen e of weight_e FFN_e(x), plus the shared expert

    Attributes:
      num_experts: E.
      top_k: experts that a token uses.
      scores: of the experts, "softmax" or "sigmoid" of x W_router.
      normalize: divide the scores of the chosen experts by their sum.
      scale: multiplies the weights of the chosen experts.
      num_groups, top_groups: a token chooses among the experts of `top_groups` of so many groups
        (DeepSeek-V3, arXiv 2412.19437).
      balance_bias: a number per expert is added to the scores for the choice alone, and learns to
        balance it (Wang et al. 2024, arXiv 2408.15664).
      router_bias: x W_router has a bias.
      shared_width: hidden width of an expert that every token uses; 0: there is none. Several are
        one that is as wide as all together.
      shared_gate: sigmoid(x w) multiplies the shared expert (Qwen2-MoE, arXiv 2407.10671).
      balance: weight of the balance loss "expert_balance", see `experts.balance_loss`.

    Raises:
      ValueError: groups that do not divide the experts, fewer experts to choose from than `top_k`,
        or a gate without a shared expert.

    >>> from attnlab.models.ffn import ffn_flops  # of 8 experts a token computes 2, and the router
    >>> ffn_flops(4, FFN(width=6)), ffn_flops(4, FFN(width=6, experts=Experts(num_experts=8)))
    (96, 256)
    """

    num_experts: int = dataclasses.field(metadata={"least": 1})
    top_k: int = bounded(2, least=1)
    scores: Literal["softmax", "sigmoid"] = "softmax"
    normalize: bool = True
    scale: float = 1.0
    num_groups: int = bounded(1, least=1)
    top_groups: int = bounded(1, least=1)
    balance_bias: bool = False
    router_bias: bool = False
    shared_width: int = bounded(0, least=0)
    shared_gate: bool = False
    balance: float = bounded(0.01, least=0.0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_experts % self.num_groups or self.top_groups > self.num_groups:
            raise ValueError(
                f"ffn.experts: num_groups {self.num_groups} must divide num_experts "
                f"{self.num_experts} and be at least top_groups {self.top_groups}"
            )
        allowed = self.top_groups * (self.num_experts // self.num_groups)
        if self.top_k > allowed:
            raise ValueError(f"ffn.experts: top_k {self.top_k} of {allowed} experts; lower top_k")
        if self.shared_gate and not self.shared_width:
            raise ValueError("ffn.experts.shared_gate needs a shared expert; set shared_width")


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class FFN(Spec, prefix="ffn."):
    """Position-wise feed-forward network: act(x W_up + b) W_down + b.

    Attributes:
      width: of the hidden layer; 0 leaves the FFN out. Of each expert, where there are experts.
      activation: "gated_*" is (act(x W_gate) * (x W_up)) W_down (Shazeer 2020, arXiv 2002.05202).
      bias: of all its matrices.
      residual_scale: multiplies the residual connection around the FFN; not in the encoder of an
        encoder-decoder.
      output_scale: multiplies the output of the FFN, before a norm behind it.
      clip: of a gated activation, c in act(min(x W_gate, c)) * (clip(x W_up, -c, c) + 1) (gpt-oss,
        arXiv 2508.10925); None: no limit, and nothing is added.
      experts: a mixture of experts in place of one FFN for all tokens; None: no experts.

    Raises:
      ValueError: `clip` without a gated activation, or experts without a hidden layer.

    >>> from attnlab.models.ffn import ffn_shapes  # a gate is a third matrix
    >>> ffn_shapes(4, FFN(width=6, activation="gated_silu", bias=False))
    {'gate': (4, 6), 'up': (4, 6), 'down': (6, 4)}
    """

    width: int = bounded(256, least=0)
    activation: Activation = "gelu"
    bias: bool = True
    residual_scale: float = 1.0
    output_scale: float = 1.0
    clip: float | None = bounded(None, above=0.0)
    experts: Experts | None = None

    def __post_init__(self) -> None:
        if gated := GLU_NAMES.get(str(self.activation)):
            raise ValueError(f"unknown ffn.activation {self.activation!r}: write {gated!r}")
        super().__post_init__()
        if self.clip is not None and not self.activation.startswith("gated_"):
            raise ValueError("ffn.clip needs a gated activation, such as 'gated_silu'")
        if self.experts is not None and not self.width:
            raise ValueError("ffn.experts need a hidden layer: set ffn.width")

    @property
    def shared(self) -> "FFN | None":
        """The shared expert as an FFN."""
        if self.experts is None or not self.experts.shared_width:
            return None
        return dataclasses.replace(self, width=self.experts.shared_width, experts=None)


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Norm(Spec, prefix="norm."):
    """Norms of the residual stream.

    Attributes:
      kind: "layer" (Ba et al. 2016), "rms" (Zhang and Sennrich 2019), or "rms_plus_one" with
        1 + scale (Gemma).
      position: "pre" x + f(norm(x)); "post" norm(x + f(x)); "post_final" and "pre_open" the same
        with and without a final norm; "after" x + norm(f(x)) (OLMo 2, arXiv 2501.00656);
        "sandwich" x + norm(f(norm(x))) (Ding et al. 2021, arXiv 2105.13290); "parallel" adds what
        all sublayers make of the same x (GPT-NeoX), "parallel_one" of the same norm(x) (GPT-J);
        "pre_ffn" is "pre" without a norm before self-attention, for a first layer behind a norm of
        the embeddings (ModernBERT, arXiv 2412.13663).
      eps: epsilon.
      bias: a learnt bias; None: where the kind is "layer" and has a scale.
      scale: a learnt scale; without one a norm has no weights (OLMo, arXiv 2402.00838).
      layer_scale: a learnt vector multiplies the output of each sublayer, before a norm behind it;
        its initial numbers (LayerScale, Touvron et al. 2021, arXiv 2103.17239). None: there is
        none.

    Raises:
      ValueError: a bias where the kind has none, or without a scale.

    >>> Norm(position="sandwich").names_in("ffn"), Norm(kind="rms").has_bias
    (('norm', 'norm_after'), False)
    """

    kind: Literal["layer", "rms", "rms_plus_one"] = "layer"
    position: NormPosition = "pre"
    eps: float = bounded(1e-5, least=0.0)
    bias: bool | None = None
    scale: bool = True
    layer_scale: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.bias and not (self.kind == "layer" and self.scale):
            raise ValueError("norm.bias is of a layer norm with a scale; leave bias out")
        if self.bias == (self.kind == "layer" and self.scale):
            object.__setattr__(self, "bias", None)  # one way to write the same thing

    @property
    def has_bias(self) -> bool:
        """`bias`, resolved."""
        return self.kind == "layer" and self.scale if self.bias is None else self.bias

    @functools.cached_property
    def places(self) -> "NormPlaces":
        """`position` as fields."""
        return NORM_PLACES[self.position]

    def names_in(self, sublayer: str) -> tuple[str, ...]:
        """Norms of a sublayer.

        >>> Norm(position="parallel_one").names_in("ffn")
        ()
        """
        has_norm = self.places.after_sum or sublayer in self.places.before
        return ("norm",) * has_norm + ("norm_after",) * self.places.after


class NormPlaces(NamedTuple):
    """Where norms stand, for x + f(x) of each sublayer."""

    before: tuple[SublayerName, ...] = ("attention", "cross", "ffn")
    """Sublayers that read norm(x)."""
    after: bool = False
    """norm(f(x)) is added to x."""
    after_sum: bool = False
    """x is norm(x + f(x))."""
    parallel: bool = False
    """All sublayers read the same x; those without a norm of their own, the norm of the first."""
    final: bool = True
    """There is a norm behind the last layer."""


NORM_PLACES: dict[NormPosition, NormPlaces] = {
    "pre": NormPlaces(),
    "pre_open": NormPlaces(final=False),
    "pre_ffn": NormPlaces(before=("cross", "ffn")),
    "post": NormPlaces(before=(), after_sum=True, final=False),
    "post_final": NormPlaces(before=(), after_sum=True),
    "after": NormPlaces(before=(), after=True),
    "sandwich": NormPlaces(after=True),
    "parallel": NormPlaces(parallel=True),
    "parallel_one": NormPlaces(before=("attention",), parallel=True),
}


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Attention(Spec, prefix="attention."):
    """Options of every self-attention sublayer, apart from its heads.

    Attributes:
      window: a token attends to so many tokens back (an encoder also ahead); None: to all.
      order: form of the heads to compute with, see `attnlab.multi_head_attention`; None chooses.
      implementation: backend, see `attnlab.explain`; None chooses.
      layer_scales: a number per layer that multiplies its scores (GPT-2's reordered attention).
      position_scale: (a, m) multiplies the scores of a query at position p by
        1 + a log(1 + floor(p / m)) (Llama 4, Ministral 3).
      output_scale: multiplies the output of self-attention, before a norm behind it.

    Raises:
      ValueError: an unknown backend, or a field out of its bounds.

    >>> from attnlab.models import ModelConfig
    >>> cache = ModelConfig(attention=Attention(window=7)).init_cache(1, size=50, piece=1)
    >>> cache["k"].shape  # [L, B, size, N, H]: a ring of the window and one more token
    (4, 1, 8, 4, 16)
    """

    window: int | None = bounded(None, least=0)
    order: str | None = None
    implementation: str | None = None
    layer_scales: tuple[float, ...] | None = bounded(None, above=0.0)
    position_scale: tuple[float, float] | None = bounded(None, above=0.0)
    output_scale: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.implementation is not None:
            check_implementation(self.implementation)


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Dropout(Spec, prefix="dropout."):
    """Dropout rates.

    Attributes:
      rate: of the outputs at `places`.
      embedding: of the embeddings, whatever `places` are; None is `rate`.
      attention: of attention probabilities.
      ffn: of the hidden layer of the FFN.
      places: where `rate` acts.

    >>> Dropout(rate=0.1).is_active, Dropout(embedding=0.1).is_active  # the second: not in layers
    (True, False)
    """

    rate: float = bounded(0.0, least=0.0, below=1.0)
    embedding: float | None = bounded(None, least=0.0, below=1.0)
    attention: float = bounded(0.0, least=0.0, below=1.0)
    ffn: float = bounded(0.0, least=0.0, below=1.0)
    places: tuple[DropoutPlace, ...] = ("embeddings", "attention", "ffn")

    @functools.cached_property
    def embedding_rate(self) -> float:
        """`embedding`, resolved."""
        return self.rate if self.embedding is None else self.embedding

    @property
    def is_active(self) -> bool:
        """Do layers drop anything in training?"""
        rate = self.rate if {"attention", "ffn"} & {*self.places} else 0.0
        return any((rate, self.attention, self.ffn))


# Positions ----------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Positions(Spec, prefix="positions."):
    """Base class of position schemes."""

    name: ClassVar[str] = ""
    is_rotary: ClassVar[bool] = False
    """Are queries and keys rotated?"""
    is_relative: ClassVar[bool] = False
    """Is a learnt number per head and distance added to the scores?"""

    @functools.cached_property
    def is_learned(self) -> bool:
        """Is a trained table added to the embedding?"""
        return False


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class NoPositions(Positions):
    """No positions at all: a causal mask alone tells a decoder the order (Kazemnejad et al. 2023,
    arXiv 2305.19466). Without one, attention ignores the order of tokens.

    >>> from attnlab.models import ModelConfig, param_shapes
    >>> [name for name in param_shapes(ModelConfig(positions=NoPositions())) if name != "layers"]
    ['embedding', 'final_norm']
    """

    name: ClassVar[str] = "none"


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Learned(Positions):
    """A trained table [max_len + offset, E], added to the embedding.

    Attributes:
      pad_token: positions count the other tokens, from pad_token + 1 on; padding is at pad_token
        (RoBERTa). None: 0, 1, 2, ...
      offset: position p has row p + offset (OPT: 2).

    >>> from attnlab.models import ModelConfig, param_shapes
    >>> param_shapes(ModelConfig(max_len=5, positions=Learned(offset=2)))["positions"].shape
    (7, 64)
    """

    name: ClassVar[str] = "learned"
    pad_token: int | None = bounded(None, least=0)
    offset: int = bounded(0, least=0)

    @functools.cached_property
    def is_learned(self) -> bool:
        return True


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Sinusoidal(Positions):
    """A fixed table of sines and cosines (Vaswani et al. 2017, section 3.5).

    Attributes:
      halves: all sines, then all cosines, as tensor2tensor makes them.
      rates: with `halves`, "t2t" base^(-i/(n-1)), or "paper" base^(-i/n), of n = D // 2.

    Raises:
      ValueError: `rates` without `halves`.

    >>> Sinusoidal(rates="paper")
    Traceback (most recent call last):
    ValueError: positions.rates is of halves: set halves=True, or leave rates out
    """

    name: ClassVar[str] = "sinusoidal"
    halves: bool = False
    rates: Literal["t2t", "paper"] = "t2t"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rates != "t2t" and not self.halves:
            raise ValueError("positions.rates is of halves: set halves=True, or leave rates out")


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Rotary(Positions):
    """Rotary embedding of queries and keys (Su et al. 2021, arXiv 2104.09864).

    Attributes:
      base: of the rates base^(-2i/H).
      fraction: share of each head that is rotated, from its start.
      scaling: for longer texts, "linear:4", "llama3:8,1,4,8192" or "yarn:4,32,1,4096", see
        `positions.rotary_angles`. "longrope:4096,s1,s2,...,l1,l2,..." divides each rate by its
        factor s in a call whose positions are below 4096, and by l in others. Cached keys keep the
        factor of their call, so decode at most 4096 tokens; a call with a ring does not check it.
      scale: multiplies the rotated numbers of queries and keys (LongRoPE's attention factor, arXiv
        2402.13753).

    Raises:
      ValueError: a scaling that cannot be read.

    >>> from attnlab.heads import Standard
    >>> Rotary(fraction=0.25).rotated_size(Standard(width=64, num_heads=4))  # of head_dim 16
    4
    """

    name: ClassVar[str] = "rotary"
    is_rotary: ClassVar[bool] = True
    base: float = bounded(10000.0, above=0.0)
    fraction: float = bounded(1.0, above=0.0, most=1.0)
    scaling: str | None = None
    scale: float = bounded(1.0, above=0.0)

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.parsed_scaling

    @property
    def parsed_scaling(self) -> positions.RotaryScaling | None:
        """`scaling` as a record."""
        return None if self.scaling is None else positions.read_scaling(self.scaling)

    def rotated_size(self, layout: Layout) -> int:
        """How many numbers of a query and key are rotated: the first ones."""
        return int((layout.rotary_size or 0) * self.fraction)


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Relative(Positions):
    """A learnt number per head and bucket of distances, added to the scores (T5, arXiv 1910.10683).

    Attributes:
      buckets: of distances, a multiple of 4.
      max_distance: distances from here on share the last bucket.
      table: a trained table is added to the embedding too, as by `Learned` (MPNet, arXiv
        2004.09297). Then distances count all tokens of the text, also if positions are given.
      pad_token: of the table, as in `Learned`.
      per_layer: each layer has numbers of its own, also where it shares its attention (UMT5, arXiv
        2304.09151).

    Raises:
      ValueError: buckets and distances that do not fit, or `pad_token` without a table.

    >>> from attnlab.models import ModelConfig, param_shapes
    >>> param_shapes(ModelConfig(positions=Relative()))["relative_bias"].shape  # one for all layers
    (32, 4)
    """

    name: ClassVar[str] = "relative"
    is_relative: ClassVar[bool] = True
    buckets: int = bounded(32, least=4)
    max_distance: int = bounded(128, least=1)
    table: bool = False
    pad_token: int | None = bounded(None, least=0)
    per_layer: bool = False

    @functools.cached_property
    def is_learned(self) -> bool:
        return self.table

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.pad_token is not None and not self.table:
            raise ValueError("positions.pad_token is of a table; set table=True")
        if self.buckets % 4 or self.max_distance <= self.buckets // 2:
            raise ValueError(
                f"positions: buckets {self.buckets} must be a multiple of 4 and max_distance "
                f"{self.max_distance} more than half of it"
            )


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Alibi(Positions):
    """-slope_n |distance| added to the scores of head n (Press et al. 2022, arXiv 2108.12409), with
    the slopes of `attnlab.attention.alibi_slopes`; nothing is learnt.

    >>> from attnlab.models import ModelConfig, param_shapes
    >>> [name for name in param_shapes(ModelConfig(positions=Alibi())) if name != "layers"]
    ['embedding', 'final_norm']
    """

    name: ClassVar[str] = "alibi"


POSITIONS: dict[str, type[Positions]] = {
    kind.name: kind for kind in (Learned, Sinusoidal, Rotary, Relative, Alibi, NoPositions)
}
"""Name on the command line -> class."""


# Input and output ---------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Images(Spec, prefix="images."):
    """Images instead of tokens (Dosovitskiy et al. 2021, arXiv 2010.11929).

    A class token, then the patches from left to right and from top to bottom.

    Attributes:
      height, width, channels: of an image.
      patch_height, patch_width: of a patch.
      crop: pixels at the right and at the bottom that fill no patch are left out; else sizes must
        divide.
      class_token: there is a class token.
      bias: the projection of the patches has one.
      mask_token: a learnt vector replaces a hidden patch in training (Bao et al. 2021, arXiv
        2106.08254).

    Raises:
      ValueError: patches that do not divide the image, where `crop` is False.

    >>> images = Images(height=224, width=224, channels=3, patch_height=16, patch_width=16)
    >>> images.num_tokens, images.num_features  # the model's max_len (at least) and vocab_size
    (197, 770)
    """

    height: int = dataclasses.field(metadata={"least": 1})
    width: int = dataclasses.field(metadata={"least": 1})
    channels: int = dataclasses.field(metadata={"least": 1})
    patch_height: int = dataclasses.field(metadata={"least": 1})
    patch_width: int = dataclasses.field(metadata={"least": 1})
    crop: bool = False
    class_token: bool = True
    bias: bool = True
    mask_token: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        divides = not (self.height % self.patch_height or self.width % self.patch_width)
        if not all(self.grid) or not (divides or self.crop):
            raise ValueError(
                f"images: {self.height} x {self.width} does not divide into patches of "
                f"{self.patch_height} x {self.patch_width}; scale or crop the images, or set crop"
            )

    @property
    def grid(self) -> tuple[int, int]:
        """Number of patches from top to bottom and from left to right."""
        return self.height // self.patch_height, self.width // self.patch_width

    @property
    def num_tokens(self) -> int:
        """The class token, if there is one, and the patches."""
        return self.class_token + self.grid[0] * self.grid[1]

    @property
    def num_pixels(self) -> int:
        """Numbers of a patch."""
        return self.patch_height * self.patch_width * self.channels

    @property
    def marks(self) -> tuple[str, ...]:
        """Names of the one-hot features after the pixels: the kind of token.

        >>> sizes = dict(height=2, width=2, channels=1, patch_height=1, patch_width=1)
        >>> Images(**sizes, class_token=False).marks
        ('patch',)
        """
        marks = {"class": self.class_token, "patch": self.bias, "mask": self.mask_token}
        return tuple(name for name, is_there in marks.items() if is_there)

    @property
    def num_features(self) -> int:
        """Of a token: the numbers of a patch, and those of `marks`."""
        return self.num_pixels + len(self.marks)


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Embedding(Spec, prefix="embedding."):
    """Token embedding: projection(norm(scale * token + position + type)).

    Attributes:
      width: of the tables, with a projection to the width of the model, also where both are equal
        (ALBERT); None: the width of the model, without a projection.
      scale: multiplies the token embedding.
      token_types: number of token types (segments); 0: none.
      norm: a norm of the sum.
      zero_token: a token whose embedding is zeros (tensor2tensor's padding).
      images: the model also reads images, as rows of `vocab_size` features.

    >>> from attnlab.models import ModelConfig, OutputHead, param_shapes
    >>> own = OutputHead(kind="own")  # a narrow table cannot also be the LM head of a wide model
    >>> shapes = param_shapes(ModelConfig(embedding=Embedding(width=16), output=own))
    >>> {name: a.shape for name, a in shapes.items() if "embedding" in name}
    {'embedding': (256, 16), 'embedding_projection': (16, 64), 'embedding_projection_bias': (64,)}
    """

    width: int | None = bounded(None, least=1)
    scale: float = 1.0
    token_types: int = bounded(0, least=0)
    norm: bool = False
    zero_token: int | None = bounded(None, least=0)
    images: Images | None = None


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class OutputHead(Spec, prefix="output."):
    """LM head and classifier head.

    Attributes:
      kind: LM head: "tied" to the embedding, "own" matrix, or "none": no logits.
      bias: of the logits.
      scale: multiplies what the LM head reads.
      soft_cap: c of logits c tanh(logits / c) (Gemma 2, arXiv 2408.00118); None: no cap.
      transform: activation of a dense layer and a norm before the LM head (BERT), or before the
        classifier head where there is no LM head (ModernBERT); None: no layer.
      transform_bias: the dense layer has a bias.
      pooler: what the classifier head reads: "first" act(x_0 W + b) (BERT), "first_plain" x_0,
        "last" token that is no padding, "max" or "mean" over tokens, "each" token.
      pooler_activation: act of the pooler "first".
      num_classes: of the classifier head; 0: none.
      classifier_bias: the classifier head has a bias.

    Raises:
      ValueError: fields of an LM head or pooler that the model does not have.

    >>> from attnlab.models import ModelConfig
    >>> from attnlab.models.head import output_shapes
    >>> output_shapes(ModelConfig(output=OutputHead(kind="none", pooler="mean", num_classes=3)))
    {'classifier': (64, 3), 'classifier_bias': (3,)}
    """

    kind: Literal["tied", "own", "none"] = "tied"
    bias: bool = False
    scale: float = 1.0
    transform: PlainActivation | None = None
    pooler: Pooler | None = None
    pooler_activation: PlainActivation = "tanh"
    num_classes: int = bounded(0, least=0)
    classifier_bias: bool = True
    soft_cap: float | None = bounded(None, above=0.0)
    transform_bias: bool = True

    @property
    def transforms_classes(self) -> bool:
        """Does the classifier head read the transform, since there is no LM head?"""
        return self.transform is not None and self.kind == "none"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kind == "none" and (self.bias or (self.transform and not self.num_classes)):
            raise ValueError("output.kind='none' has no logits; leave bias and transform out")
        if self.num_classes and self.pooler is None:
            raise ValueError("output.num_classes are read from the pooler; set pooler='first'")


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Init(Spec, prefix="init."):
    """Initial weights.

    Attributes:
      std: standard deviation of all matrices; None is 1/sqrt(fan-in).
      residual: "depth" divides the matrices that write into the residual stream by sqrt(2 L)
        (GPT-2; Radford et al. 2019, section 2.3).

    >>> from attnlab.models import ModelConfig
    >>> from attnlab.models.params import residual_scale
    >>> residual_scale(ModelConfig(num_layers=8, init=Init(residual="depth")))
    0.25
    """

    std: float | None = bounded(None, above=0.0)
    residual: Literal["plain", "depth"] = "plain"


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Compute(Spec, prefix="compute."):
    """Precision, memory and the loop over layers.

    Weights, softmax, statistics of norms, logits and loss are float32 at least.

    Attributes:
      dtype: of products and activations. There is no "float16": nothing scales the loss.
      remat: compute activations again in the backward pass: less memory, no slower on a CPU.
      unroll: layers, or repetitions of a pattern of layers, in one iteration of the scan: more to
        fuse on an accelerator, a larger program to compile (the log of a run has the seconds); the
        same numbers but for rounding.

    Raises:
      ValueError: an unknown dtype.

    >>> from attnlab.models import ModelConfig, param_shapes
    >>> config = ModelConfig(compute=Compute(dtype="bfloat16"))
    >>> str(config.init_cache(1, 5)["k"].dtype), str(param_shapes(config)["embedding"].dtype)
    ('bfloat16', 'float32')
    """

    dtype: Dtype = "float32"
    remat: bool = True
    unroll: int = bounded(1, least=1)


# Layers -------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class LayerSpec(Spec, prefix="layer."):
    """Configuration of one layer.

    Attributes:
      heads: of self-attention, with their width.
      cross: heads of cross-attention; None: no cross-attention.
      ffn, norm, attention, dropout: as in `ModelConfig`.
      is_causal: tokens attend to themselves and the past alone.
      separate_kv: the projections to keys and values are a sublayer "kv" of their own.
      delta_rank: rank of a difference per layer to each matrix (`attnlab.sharing.deltas`).

    >>> from attnlab.heads import Standard
    >>> LayerSpec(heads=Standard(width=6, num_heads=2), ffn=FFN(width=0)).sublayers
    {'attention': 1.0}
    """

    heads: Layout
    cross: Layout | None = None
    ffn: FFN = FFN()
    norm: Norm = Norm()
    attention: Attention = Attention()
    dropout: Dropout = Dropout()
    is_causal: bool = False
    separate_kv: bool = False
    delta_rank: int | None = bounded(None, least=1)

    @functools.cached_property
    def sublayers(self) -> dict[SublayerName, float]:
        """Sublayers in the order in which they run -> the scale of their residual connection."""
        scales: dict[SublayerName, float] = {"attention": 1.0}
        if self.cross is not None:
            scales["cross"] = 1.0
        return scales | ({"ffn": self.ffn.residual_scale} if self.ffn.width else {})
