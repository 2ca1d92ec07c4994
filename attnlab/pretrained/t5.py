"""T5, versions 1.0 and 1.1 (Raffel et al. 2020; Shazeer 2020), in the names of Hugging Face."""

from typing import Any

from attnlab.model.config import ModelConfig
from attnlab.pretrained.families import Family, Tensors
from attnlab.pretrained.rows import Row, dense, norm, same
from attnlab.pretrained.settings import Null, activation, their_activation
from attnlab.sharing.bits import same_bits
from attnlab.sharing.plan import Plan

SETTINGS = {
    "vocab_size": 32128,
    "d_model": 512,
    "d_kv": 64,
    "d_ff": 2048,
    "num_layers": 6,
    "num_decoder_layers": Null(int),
    "num_heads": 8,
    "relative_attention_num_buckets": 32,
    "relative_attention_max_distance": 128,
    "dropout_rate": 0.1,
    "layer_norm_epsilon": 1e-6,
    "feed_forward_proj": "relu",
    "is_gated_act": Null(bool),
    "dense_act_fn": Null(str),
    "tie_word_embeddings": True,
    "scale_decoder_outputs": Null(bool),
    "is_encoder_decoder": True,
    "n_positions": 512,  # of the training data; relative positions go on
}
ANY_LENGTH = 2**20


def _activation(s: dict[str, Any]) -> str:
    """ "gated-gelu" means the tanh kind, "gelu" alone the exact one; the last word decides."""
    *gate, last = s["feed_forward_proj"].split("-")
    theirs = "gelu_new" if gate and last == "gelu" else last
    for name, derived in {"is_gated_act": bool(gate), "dense_act_fn": theirs}.items():
        if s[name] not in (None, derived):
            raise ValueError(
                f"config.json: {name} = {s[name]!r} contradicts feed_forward_proj = "
                f"{s['feed_forward_proj']!r}, which says {derived!r}"
            )
    if gate not in ([], ["gated"]):
        raise ValueError(
            f"config.json: feed_forward_proj = {s['feed_forward_proj']!r} is not supported; "
            "known: the name of an activation, with 'gated-' before it or not"
        )
    plain = activation({"feed_forward_proj": theirs}, "feed_forward_proj")
    return f"gated_{plain}" if gate else plain


def _own_readout(tensors: Tensors) -> bool:
    """The file decides: a readout that differs from the table is used, a copy is not."""
    own, table = tensors.get("lm_head.weight"), tensors.get("shared.weight")
    if own is None or table is None:
        return "lm_head.weight" in tensors
    return not same_bits(own, table)


def _fields(s: dict[str, Any], tensors: Tensors, architecture: str) -> dict[str, Any]:
    alone = architecture == "T5EncoderModel"
    scaled = s["scale_decoder_outputs"]
    scaled = s["tie_word_embeddings"] if scaled is None else scaled
    readout = "own" if _own_readout(tensors) else "tied"
    readout = "none" if alone or architecture == "T5Model" else readout
    depth = dict(num_layers=s["num_layers"])
    if not alone:
        decoder = s["num_layers"] if s["num_decoder_layers"] is None else s["num_decoder_layers"]
        depth = dict(num_layers=decoder, encoder_layers=s["num_layers"])
    return depth | dict(
        kind="encoder" if alone else "encoder_decoder",
        vocab_size=s["vocab_size"],
        max_len=ANY_LENGTH,
        width=s["d_model"],
        num_heads=s["num_heads"],
        head_dim=s["d_kv"],
        ffn_width=s["d_ff"],
        attention_scale=1.0,
        attention_biases="",
        ffn_bias=False,
        norm_kind="rms",
        norm_bias=False,
        norm_eps=s["layer_norm_epsilon"],
        activation=_activation(s),
        positions="relative",
        relative_buckets=s["relative_attention_num_buckets"],
        relative_distance=s["relative_attention_max_distance"],
        readout=readout,
        readout_scale=s["d_model"] ** -0.5 if scaled and readout != "none" else 1.0,
        dropout_rate=s["dropout_rate"],
        attention_dropout_rate=s["dropout_rate"],
        ffn_dropout_rate=s["dropout_rate"],
        dropout_places=("embeddings", "attention", "ffn", "final"),
    )


def _describe(c: ModelConfig) -> tuple[dict[str, Any], str]:
    plain = their_activation(c.activation.removeprefix("gated_"))
    gated = c.activation.startswith("gated_")
    words = {"gelu_new": "gated-gelu"}.get(plain, f"gated-{plain}") if gated else plain
    if gated and plain == "gelu":
        raise ValueError("no word for the exact gelu behind a gate")
    alone, scaled = c.kind == "encoder", c.readout_scale != 1
    settings = dict(
        vocab_size=c.vocab_size,
        d_model=c.width,
        d_kv=c.heads.sizes["H"],
        d_ff=c.ffn_width,
        num_layers=c.num_layers if alone else c.encoder_layer_plan.num_layers,
        num_decoder_layers=c.num_layers,
        num_heads=c.num_heads,
        relative_attention_num_buckets=c.relative_buckets,
        relative_attention_max_distance=c.relative_distance,
        dropout_rate=c.dropout_rate,
        layer_norm_epsilon=c.norm_eps,
        feed_forward_proj=words,
        is_gated_act=gated,
        dense_act_fn=plain,
        # What a reader before version 5 takes for "scaled", and for "tied".
        tie_word_embeddings=scaled or c.readout == "none",
        scale_decoder_outputs=scaled or c.readout == "none",
        is_encoder_decoder=not alone,
        decoder_start_token_id=0,
        pad_token_id=0,
        eos_token_id=1,
    )
    names = {"none": "T5Model"} | ({"none": "T5EncoderModel"} if alone else {})
    return settings, names.get(c.readout, "T5ForConditionalGeneration")


def _rows(c: ModelConfig, s: dict[str, Any]) -> list[Row]:
    own = "" if c.share_encoder or c.kind == "encoder" else "encoder_"
    encoder = c.layer_plan if c.kind == "encoder" else c.encoder_layer_plan
    rows = same("shared.weight", "embedding")
    rows += _stack("encoder", own, encoder, c)
    if c.kind != "encoder":
        rows += _stack("decoder", "", c.layer_plan, c)
    return rows + (dense("lm_head", "readout", bias=False) if c.readout == "own" else [])


PARTS = {"attention": "SelfAttention", "cross": "EncDecAttention", "ffn": "DenseReluDense"}


def _stack(name: str, own: str, plan: Plan, c: ModelConfig) -> list[Row]:
    """All of an encoder or decoder, stored under its `name`; `own` begins our names."""
    heads = {ours: ours for ours in "qkvo"}
    ffn = {"up": "wi", "down": "wo"}
    if c.activation.startswith("gated_"):
        ffn = {"gate": "wi_0", "up": "wi_1", "down": "wo"}
    matrices = {"attention": heads, "cross": heads, "ffn": ffn}
    rows = same(
        f"{name}.block.0.layer.0.SelfAttention.relative_attention_bias.weight",
        f"{own}relative_bias",
    )
    groups = {part: plan.indices(part) for part in plan}
    for i in range(plan.num_layers):
        for j, part in enumerate(p for p in PARTS if p in plan):
            at, slot = f"{name}.block.{i}.layer.{j}.", groups[part][i]
            where = (f"{own}layers", part)
            for ours, theirs in matrices[part].items():
                file = f"{at}{PARTS[part]}.{theirs}"
                rows += dense(file, *where, ours, slot=slot, bias=False)
            rows += norm(f"{at}layer_norm", *where, "norm", slot=slot, bias=False)
    return rows + norm(f"{name}.final_layer_norm", f"{own}final_norm", bias=False)


T5 = Family(
    name="t5",
    settings=SETTINGS,
    fields=_fields,
    describe=_describe,
    rows=_rows,
    # The table may be stored again for each stack, and a bias that no release ever used.
    ignored=(
        "encoder.embed_tokens.weight",
        "decoder.embed_tokens.weight",
        "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight",
    ),
    ignored_for=lambda c: () if c.readout == "own" else ("lm_head.weight",),
)
