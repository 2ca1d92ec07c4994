"""pbloem/former, and the tutorial class with one chunk projection for all heads."""

import dataclasses
from types import MappingProxyType

import numpy as np

from attnlab.heads import Alt, HeadNorm, Layout, NarrowTied, Standard, Wide
from attnlab.models.config import ModelConfig
from attnlab.models.specs import FFN, Norm, OutputHead, Pooler
from attnlab.names import lookup
from attnlab.nested import JSON
from attnlab.pretrained.name_table import Layers, Module, NameTable
from attnlab.pretrained.systems.arrays import Built, depth, require, take
from attnlab.pretrained.tensors import Arrays
from attnlab.pretrained.weights import Entry

LAYOUTS: dict[str, type[Layout]] = {
    "SelfAttention": Standard,
    "SelfAttentionWide": Wide,
    "SelfAttentionNarrow": NarrowTied,
    "SelfAttentionAlt": Alt,
    "default": Standard,
    "wide": Wide,
    "narrow": NarrowTied,
    "alt": Alt,
}
"""Class, and attention_type of a model -> layout."""
SCALED_BY = MappingProxyType({"HEAD": "head_width", "2019": "width"})
"""Revision -> the width by whose root scores are divided."""
MODULES = (
    Module("toqueries", "attention.q"),
    Module("tokeys", "attention.k"),
    Module("tovalues", "attention.v"),
    Module("downproj", "attention.mix"),
    Module("qln", "attention.q_norm", "table"),
    Module("qln", "attention.q_norm_bias", "bias"),
    Module("kln", "attention.k_norm", "table"),
    Module("kln", "attention.k_norm_bias", "bias"),
    Module("unifyheads", "attention.o"),
)
OUTSIDE = (
    Module("token_embedding", "embedding", "table"),
    Module("pos_embedding", "positions", "table"),
    Module("toprobs", "lm_head"),
    Module("toprobs", "classifier"),
)
PROJECTIONS = ("toqueries", "tokeys", "tovalues")


def _modules(layout: Layout) -> tuple[Module, ...]:
    """Those of an attention; the projections of Alt are bare parameters, [heads, out, in]."""
    if not isinstance(layout, Alt):
        return MODULES
    return tuple(m._replace(kind="swapped") if m.name in PROJECTIONS else m for m in MODULES)


def _layout(
    name: str, width: int, num_heads: int, prefix: str, config: JSON, tensors: Arrays
) -> Layout:
    """The layout of an attention whose names begin with `prefix`."""
    kqnorm, factor = config.get("kqnorm"), config.get("scalefactor")
    kind = lookup(MappingProxyType(LAYOUTS), name, what="module of former")
    has_norms = f"{prefix}kln.weight" in tensors
    if kqnorm is not None and bool(kqnorm) != has_norms:
        found = "" if has_norms else "not "
        raise ValueError(f"kqnorm is {kqnorm}, and kln.weight is {found}there")
    if kind is not Standard and (has_norms or factor is not None):
        option = "kqnorm" if has_norms else "scalefactor"
        raise ValueError(
            f"{option} is of former's SelfAttention alone, not of layout {kind.name!r}"
        )
    scaled_by = lookup(SCALED_BY, config.get("revision", "HEAD"), what="revision of former")
    # Narrow attention lost its output projection after 2019.
    has_output = kind is not NarrowTied or f"{prefix}unifyheads.weight" in tensors
    layout = kind(
        width=width,
        num_heads=num_heads,
        output_projection=has_output,
        biases=("o",) if has_output else (),
        norm_eps=1e-5,
    )
    if has_norms:
        assert isinstance(layout, Standard)
        layout = dataclasses.replace(layout, qk_norm=HeadNorm("layer", bias=True))
    scale = getattr(layout, scaled_by) ** -0.5
    return dataclasses.replace(layout, scale=scale if factor is None else factor)


def build(config: JSON, tensors: Arrays) -> Built:
    """One attention, or a GTransformer or CTransformer."""
    if config.get("module") in ("GTransformer", "CTransformer"):
        return _build_model(config, tensors)
    name, width, heads, *_ = take(
        config, "module", "emb", "heads", revision="HEAD", kqnorm=None, scalefactor=None
    )
    layout = _layout(name, width, heads, "", config, tensors)
    return layout, attention_entries(layout, _modules(layout))


def attention_entries(layout: Layout, modules: tuple[Module, ...]) -> list[Entry]:
    """The tensors of an attention alone; `modules` have paths such as "attention.q"."""
    config = ModelConfig(width=layout.width, num_layers=1, heads=layout)
    return [
        one._replace(paths=tuple(("heads", path[-1]) for path in one.paths), at=...)
        for one in NameTable((), (Layers("", modules),)).entries(config)
    ]


def _build_model(config: JSON, tensors: Arrays) -> Built:
    module, heads, kind, max_pool, *_ = take(
        config, "module", "heads", attention_type="default", max_pool=True, revision="HEAD",
        kqnorm=None, scalefactor=None,
    )  # fmt: skip
    lookup(MappingProxyType(LAYOUTS), kind, what="attention_type of former")
    require(tensors, "token_embedding.weight", "pos_embedding.weight", "toprobs.weight")
    (vocab, width), (length, _) = (
        np.shape(tensors[name]) for name in ("token_embedding.weight", "pos_embedding.weight")
    )
    layout = _layout(kind, width, heads, "tblocks.0.attention.", config, tensors)
    decodes = module == "GTransformer"
    output = OutputHead(kind="own", bias=True)
    if not decodes:
        classes = np.shape(tensors["toprobs.weight"])[0]
        pooler: Pooler = "max" if max_pool else "mean"
        output = OutputHead(kind="none", pooler=pooler, num_classes=classes)
    model = ModelConfig(
        kind="decoder" if decodes else "encoder",
        vocab_size=vocab,
        max_len=length,
        width=width,
        num_layers=max(depth(tensors, r"tblocks\.(\d+)\."), 1),
        heads=layout,
        ffn=FFN(
            width=len(tensors.get("tblocks.0.ff.0.weight", range(4 * width))), activation="relu"
        ),
        norm=Norm(position="post"),
        output=output,
    )
    layers = Layers(
        "tblocks.{}.",
        (
            *(one._replace(name=f"attention.{one.name}") for one in _modules(layout)),
            Module("norm1", "attention.norm", "norm"),
            Module("ff.0", "ffn.up"),
            Module("ff.2", "ffn.down"),
            Module("norm2", "ffn.norm", "norm"),
        ),
    )
    return model, NameTable(OUTSIDE, (layers,)).entries(model)


def build_tutorial(config: JSON, tensors: Arrays) -> Built:
    """The tutorial class: scores over sqrt(embed_size)."""
    width, heads = take(config, "embed_size", "heads")
    layout = NarrowTied(width=width, num_heads=heads, biases=("o",), scale=width**-0.5)
    names = {"q": "queries", "k": "keys", "v": "values", "o": "fc_out"}
    modules = tuple(Module(name, f"attention.{ours}") for ours, name in names.items())
    return layout, attention_entries(layout, modules)
