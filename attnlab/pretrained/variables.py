"""Weights given as arrays under the names of the system they come from.

Beside folders (`load`): systems that have no config.json, or none with a model_type.
"""

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from attnlab.heads.old.spec import HeadSpec
from attnlab.model.config import ModelConfig
from attnlab.model.modules import MultiHeadAttention
from attnlab.names import lookup
from attnlab.pretrained import albert, bert, summae, t2t, torch_layers
from attnlab.pretrained.rows import Row, dense, fill, norm, same
from attnlab.pretrained.settings import read_settings
from attnlab.pretrained.shapes import param_shapes
from attnlab.sharing.plan import GROUP_RULES, Plan

Tensors = dict[str, np.ndarray]
Built = tuple[Any, list[Row]]
"""A HeadSpec or a ModelConfig, and the name table."""


def from_variables(
    system: str, config: Mapping[str, Any], variables: Mapping[str, Any]
) -> tuple[Any, dict[str, Any]]:
    """(model, params) of `variables`, named as in `system`; `config` has the system's own words.

    torch_mha      torch.nn.MultiheadAttention: embed_dim, num_heads; kdim, vdim, add_zero_attn
                   (which leaves no weight). A row that sees no key of its own is that of
                   `extra_keys` and `sink`, in torch too.
    torch_layers   torch.nn.TransformerEncoderLayer, TransformerDecoderLayer, TransformerEncoder,
                   TransformerDecoder or Transformer: nhead; norm_first (False), activation
                   ("relu"), layer_norm_eps (1e-5), max_length. Takes vectors, floats
                   [B, T, d_model]; gives `Outputs.last`. A decoder is called with
                   (memory, x, encoded=memory).
    former         pbloem/former. One attention: module="SelfAttention", "SelfAttentionWide",
                   "SelfAttentionNarrow" or "SelfAttentionAlt", emb, heads; a model:
                   module="GTransformer" or "CTransformer" with heads, attention_type
                   ("default", "wide", "narrow", "alt"), max_pool. revision="2019" scales scores by
                   1/sqrt(emb), "HEAD" (default) by 1/sqrt(width of a head), `scalefactor` by
                   itself; `kqnorm` is what the variables say.
    seed_snippet   the tutorial class with one chunk projection for all heads: embed_size, heads
    t2t            tensor2tensor's Transformer, encoder and decoder with one vocabulary: num_heads;
                   layer_postprocess_sequence "da" (default) or, as in the paper, "dan";
                   norm_epsilon, max_length. Decoder inputs are targets shifted right behind a 0.
    google_bert    bert_config.json of google-research/bert (whose gelu is the tanh kind)
    google_albert  albert_config.json of google-research/albert
    summae         TransformerEncoderDecoder of google-research/summae: num_encoder_heads,
                   num_decoder_heads, max_length. It takes vectors: the table that they come from
                   is the variable "embedding" [V, E]. Decoder inputs are targets shifted right
                   behind a 0, which is the zero vector; the model gives `Outputs.last`.

    Attentions come as a `MultiHeadAttention`, the rest as a decoder or encoder; a model of
    `former` ends in a log-softmax, ours in the logits before it.

    Raises ValueError that names the variable that is missing, unknown or of a wrong shape.
    """
    tensors = {name: np.asarray(a) for name, a in variables.items()}
    built, rows = lookup(SYSTEMS, system, what="system")(dict(config), tensors)
    unknown = sorted(set(tensors) - {row.name for row in rows})
    if unknown:
        raise ValueError(f"{system} has no place for the variable {unknown[0]!r}")
    if isinstance(built, HeadSpec):
        zeros = {name: np.broadcast_to(np.float32(), s) for name, s in built.shapes.items()}
        params = fill({"heads": zeros}, rows, tensors)
        return MultiHeadAttention(built), jax.tree.map(jnp.asarray, params)
    params = fill(param_shapes(built), rows, tensors)
    return built.build(), jax.tree.map(jnp.asarray, params)


def _take(config: dict[str, Any], *needed: str, **defaults: Any) -> list[Any]:
    """The values of these words. Raises ValueError for one that is missing or unknown."""
    for name in needed:
        if name not in config:
            raise ValueError(f"config needs {name!r}; it has {sorted(config)}")
    for name in config:
        if name not in (*needed, *defaults):
            raise ValueError(f"config: {name!r} is unknown; known: {[*needed, *defaults]}")
    return [config[name] for name in needed] + [config.get(n, d) for n, d in defaults.items()]


def _torch_mha(config: dict[str, Any], tensors: Tensors) -> Built:
    width, heads, kdim, vdim, extra, zero, _ = _take(
        config, "embed_dim", "num_heads", kdim=None, vdim=None, add_bias_kv=None,
        add_zero_attn=False, batch_first=True,
    )  # fmt: skip
    biases = "qkvo" if "in_proj_bias" in tensors else ""
    there = "bias_k" in tensors
    if extra is not None and bool(extra) != there:
        raise ValueError(f"add_bias_kv is {extra}, and bias_k is {'' if there else 'not '}there")
    spec = HeadSpec(
        "standard", width, heads, key_width=kdim, value_width=vdim, biases=biases,
        extra_keys=1 if there else None, sink="one" if zero else None,
    )  # fmt: skip
    at = ("heads",)
    if "in_proj_weight" in tensors:
        rows = [Row("in_proj_weight", tuple((*at, n) for n in "qkv"), None, "linear")]
    else:
        rows = [Row(f"{n}_proj_weight", ((*at, n),), None, "linear") for n in "qkv"]
    if biases:
        packed = tuple((*at, f"{n}_bias") for n in "qkv")
        rows.append(Row("in_proj_bias", packed, None, "vector"))
    for n in "kv" if there else "":
        tensors[f"bias_{n}"] = np.ravel(tensors.get(f"bias_{n}", ()))  # torch: [1, 1, E]
        rows.append(Row(f"bias_{n}", ((*at, f"extra_{n}"),), None, "vector"))
    return spec, rows + dense("out_proj", *at, "o", bias=bool(biases))


def _torch_layers(config: dict[str, Any], tensors: Tensors) -> Built:
    heads, first, activation, eps, length, *_ = _take(
        config, "nhead", norm_first=False, activation="relu", layer_norm_eps=1e-5, max_length=1024,
        batch_first=True,
    )  # fmt: skip
    return torch_layers.build(tensors, heads, first, activation, eps, length)


def _seed_snippet(config: dict[str, Any], tensors: Tensors) -> Built:
    width, heads = _take(config, "embed_size", "heads")
    spec = HeadSpec("narrow_tied", width, heads, biases="o", scale=width**-0.5)
    names = {"q": "queries", "k": "keys", "v": "values"}
    rows = [row for n, name in names.items() for row in dense(name, "heads", n, bias=False)]
    return spec, rows + dense("fc_out", "heads", "o")


FORMER = {  # class and attention_type -> layout
    "SelfAttention": "standard",
    "SelfAttentionWide": "wide",
    "SelfAttentionNarrow": "narrow_tied",
    "SelfAttentionAlt": "alt",
    "default": "standard",
    "wide": "wide",
    "narrow": "narrow_tied",
    "alt": "alt",
}


def _former_heads(
    layout: str, prefix: str, where: tuple[str, ...], tensors: Tensors, slot: int | None
) -> tuple[bool, list[Row]]:
    """(is there an output map?, the name table) of one attention."""
    rows: list[Row] = []
    for ours, theirs in {"q": "toqueries", "k": "tokeys", "v": "tovalues"}.items():
        if layout == "alt":  # a bare parameter, [heads, out, in]
            rows.append(Row(f"{prefix}{theirs}", ((*where, ours),), slot, "swapped"))
        else:
            rows += dense(f"{prefix}{theirs}", *where, ours, slot=slot, bias=False)
    if layout == "alt":
        rows += dense(f"{prefix}downproj", *where, "down", slot=slot, bias=False)
    if f"{prefix}kln.weight" in tensors:
        for ours, theirs in {"q": "qln", "k": "kln"}.items():
            rows += same(f"{prefix}{theirs}.weight", *where, f"{ours}_norm", slot=slot)
            rows += same(f"{prefix}{theirs}.bias", *where, f"{ours}_norm_bias", slot=slot)
    # Narrow attention lost its output map after 2019.
    output = layout != "narrow_tied" or f"{prefix}unifyheads.weight" in tensors
    rows += dense(f"{prefix}unifyheads", *where, "o", slot=slot) if output else []
    return output, rows


def _former(config: dict[str, Any], tensors: Tensors) -> Built:
    if config.get("module") in ("GTransformer", "CTransformer"):
        return _former_model(config, tensors)
    module, width, heads, revision, kqnorm, factor = _take(
        config, "module", "emb", "heads", revision="HEAD", kqnorm=None, scalefactor=None
    )
    layout = lookup(FORMER, module, what="module of former")
    output, rows = _former_heads(layout, "", ("heads",), tensors, None)
    spec = HeadSpec(
        layout, width, heads, output=output, biases="o" if output else "", norm_eps=1e-5,
        **_former_norms(layout, kqnorm, "", tensors),
    )  # fmt: skip
    return dataclasses.replace(spec, scale=_former_scale(revision, factor, width, spec)), rows


def _former_norms(layout: str, kqnorm: Any, prefix: str, tensors: Tensors) -> dict[str, Any]:
    """The norms of queries and keys, which the variables have or not."""
    there = f"{prefix}kln.weight" in tensors
    if kqnorm is not None and bool(kqnorm) != there:
        raise ValueError(f"kqnorm is {kqnorm}, and kln.weight is {'' if there else 'not '}there")
    if there and layout != "standard":
        raise ValueError(f"kqnorm is of former's SelfAttention alone, not of layout {layout!r}")
    return {"qk_norm": "layer", "qk_norm_bias": True} if there else {}


def _former_scale(revision: str, factor: float | None, width: int, spec: HeadSpec) -> float:
    lookup({"HEAD": 0, "2019": 0}, revision, what="revision of former")
    if factor is not None:
        if spec.layout != "standard":
            raise ValueError(f"scalefactor is of former's SelfAttention alone, not {spec.layout!r}")
        return factor
    scale: float = (width if revision == "2019" else spec.sizes["H"]) ** -0.5
    return scale


def _former_model(config: dict[str, Any], tensors: Tensors) -> Built:
    module, heads, kind, max_pool, revision, kqnorm, factor = _take(
        config, "module", "heads", attention_type="default", max_pool=True, revision="HEAD",
        kqnorm=None, scalefactor=None,
    )  # fmt: skip
    layout = lookup(FORMER, kind, what="attention_type of former")
    depth, output, rows = _former_rows(layout, tensors)
    (vocab, width), (length, _) = (
        np.shape(tensors[name]) for name in ("token_embedding.weight", "pos_embedding.weight")
    )
    if module == "GTransformer":
        rows += dense("toprobs", "readout")
        ends: dict[str, Any] = dict(kind="decoder", readout="own", readout_bias=True)
    else:
        rows += dense("toprobs", "classes")
        ends = dict(kind="encoder", readout="none", pooler="max" if max_pool else "mean")
        ends |= dict(pooled_classes=np.shape(tensors["toprobs.weight"])[0])
    norms = _former_norms(layout, kqnorm, "tblocks.0.attention.", tensors)
    model = ModelConfig(
        vocab_size=vocab,
        max_len=length,
        width=width,
        num_layers=depth,
        num_heads=heads,
        layout=layout,
        attention_output=output,
        attention_biases="o",
        ffn_width=len(tensors.get("tblocks.0.ff.0.weight", range(4 * width))),
        norm="post",
        activation="relu",
        **norms | ({"head_norm_eps": 1e-5} if norms else {}),
        **ends,
    )
    scale = _former_scale(revision, factor, width, model.heads)
    return dataclasses.replace(model, attention_scale=scale), rows


def _former_rows(layout: str, tensors: Tensors) -> tuple[int, bool, list[Row]]:
    """(number of layers, is there an output map?, the name table) but for what reads the layers."""
    for name in ("token_embedding.weight", "pos_embedding.weight", "toprobs.weight"):
        if name not in tensors:
            raise ValueError(f"1 tensors are missing, the first is {name!r}")
    blocks = [re.match(r"tblocks\.(\d+)\.", name) for name in tensors]
    depth = 1 + max((int(found[1]) for found in blocks if found), default=0)
    attention, ffn = ("layers", "attention"), ("layers", "ffn")
    rows = same("token_embedding.weight", "embedding") + same("pos_embedding.weight", "positions")
    output = True
    for i in range(depth):
        at = f"tblocks.{i}."
        output, more = _former_heads(layout, f"{at}attention.", attention, tensors, i)
        rows += more + norm(f"{at}norm1", *attention, "norm", slot=i)
        rows += dense(f"{at}ff.0", *ffn, "up", slot=i) + dense(f"{at}ff.2", *ffn, "down", slot=i)
        rows += norm(f"{at}norm2", *ffn, "norm", slot=i)
    return depth, output, rows


def _google(row: Row) -> Row:
    """A row of Hugging Face's table as TensorFlow stores it: slashes, kernels [in, out]."""
    *path, last = re.sub(r"\.layer\.(\d+)\.", r".layer_\1.", row.name).split(".")
    table = path[0] == "embeddings" and "LayerNorm" not in path
    path = ["bert", *path] if path[0] != "cls" else path
    if table:
        return row._replace(name="/".join(path))
    if path[-1] == "seq_relationship":  # stored (out, in) here too
        word = {"weight": "output_weights", "bias": "output_bias"}[last]
        return row._replace(name="/".join([*path, word]))
    if path == ["cls", "predictions"]:
        return row._replace(name="cls/predictions/output_bias")
    if "LayerNorm" in path[-1]:
        return row._replace(name="/".join([*path, {"weight": "gamma", "bias": "beta"}[last]]))
    name = "/".join([*path, "kernel" if last == "weight" else last])
    return row._replace(name=name, kind="conv1d" if row.kind == "linear" else row.kind)


def _google_readout(fields: dict[str, Any], tensors: Tensors) -> dict[str, Any]:
    """The readouts that the variables have; gelu is the tanh kind in both of Google's."""
    words = {"gelu": "gelu_tanh"}
    act = words.get(fields["activation"], fields["activation"])
    mlm = "cls/predictions/output_bias" in tensors
    pooler = "bert/pooler/dense/kernel" in tensors
    classes = 2 if "cls/seq_relationship/output_weights" in tensors else 0
    readouts = bert.readout_fields(True, act if mlm else None, pooler, classes)
    return fields | readouts | dict(activation=act)


def _google_bert(config: dict[str, Any], tensors: Tensors) -> Built:
    settings = read_settings(config, bert.SETTINGS, {}, ())
    built = ModelConfig(**_google_readout(bert.encoder_fields(settings), tensors))
    return built, [_google(row) for row in bert.BERT.rows(built, settings)]


def _google_albert(config: dict[str, Any], tensors: Tensors) -> Built:
    s = read_settings(config, albert.SETTINGS, albert.ALBERT.fixed, ())
    calls, inner = s["num_hidden_layers"], s["inner_group_num"]
    rule = GROUP_RULES["google"]
    groups = [rule(i, calls, s["num_hidden_groups"]) for i in range(calls)]
    used = sorted(set(groups))  # some groups may never come to exist
    slots = tuple(used.index(g) * inner + k for g in groups for k in range(inner))
    e, d = s["embedding_size"], s["hidden_size"]
    fields = _google_readout(bert.encoder_fields(s), tensors) | dict(
        num_layers=len(slots),
        plan=Plan(attention=slots, ffn=slots),
        embedding_width=None if e == d else e,
    )
    built = ModelConfig(**fields)
    rows = bert.embedding_rows(built.token_types)
    rows += dense("encoder.embedding_hidden_mapping_in", "embedding_map") if e != d else []
    for slot in range(len(used) * inner):
        at = f"encoder.transformer.group_{used[slot // inner]}.inner_group_{slot % inner}."
        attention, ffn = ("layers", "attention"), ("layers", "ffn")
        for ours, theirs in {"q": "query", "k": "key", "v": "value"}.items():
            rows += dense(f"{at}attention_1.self.{theirs}", *attention, ours, slot=slot)
        rows += dense(f"{at}attention_1.output.dense", *attention, "o", slot=slot)
        rows += norm(f"{at}LayerNorm", *attention, "norm", slot=slot)
        rows += dense(f"{at}ffn_1.intermediate.dense", *ffn, "up", slot=slot)
        rows += dense(f"{at}ffn_1.intermediate.output.dense", *ffn, "down", slot=slot)
        rows += norm(f"{at}LayerNorm_1", *ffn, "norm", slot=slot)
    rows += dense("pooler.dense", "pooler") if built.pooler else []
    rows += dense("cls.seq_relationship", "classes") if built.pooled_classes else []
    if built.readout == "tied":
        rows += dense("cls.predictions.transform.dense", "transform")
        rows += norm("cls.predictions.transform.LayerNorm", "transform_norm")
        rows += same("cls.predictions.bias", "readout_bias")
    return built, [_google(row) for row in rows]


def _t2t(config: dict[str, Any], tensors: Tensors) -> Built:
    heads, after, eps, length = _take(
        config, "num_heads", layer_postprocess_sequence="da", norm_epsilon=1e-6, max_length=256
    )
    t2t.strip(tensors)
    return t2t.build(tensors, heads, after, eps, length)


def _summae(config: dict[str, Any], tensors: Tensors) -> Built:
    words = _take(config, "num_encoder_heads", "num_decoder_heads", max_length=256)
    return summae.build(tensors, *words)


SYSTEMS: dict[str, Callable[[dict[str, Any], Tensors], Built]] = {
    "torch_mha": _torch_mha,
    "torch_layers": _torch_layers,
    "former": _former,
    "seed_snippet": _seed_snippet,
    "t2t": _t2t,
    "google_bert": _google_bert,
    "google_albert": _google_albert,
    "summae": _summae,
}
