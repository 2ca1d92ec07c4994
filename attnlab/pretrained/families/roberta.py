"""RoBERTa (Liu et al. 2019), XLM-R (Conneau et al. 2019, arXiv 1911.02116), CamemBERT (Martin et
al. 2019, arXiv 1911.03894), RoBERTa-PreLayerNorm (Ott et al. 2019, arXiv 1904.01038) and MPNet
(Song et al. 2020, arXiv 2004.09297), in the names of Hugging Face.
"""

from attnlab.models import Learned, Norm, Relative
from attnlab.pretrained import fields as f
from attnlab.pretrained.families.bert import EMBEDDINGS, LAYERS, MaskedHead, like_bert
from attnlab.pretrained.name_table import Module, linears
from attnlab.pretrained.tasks import ENCODER


def _head(architecture: str) -> MaskedHead:
    return MaskedHead(
        stem=architecture,
        transform="lm_head.dense",
        norm="lm_head.layer_norm",
        lm_head="lm_head.decoder",
        lm_head_bias="lm_head",
        pooler="pooler.dense",
        activation="",  # the exact gelu whatever hidden_act says
    )


PAD = f.value("pad_token_id", 1, "positions.pad_token", least=0)
PADDED = Learned(pad_token=1)
ROBERTA = like_bert(
    "roberta", _head("Roberta"), PAD, dict(vocab_size=50265), positions=PADDED, tasks=ENCODER
)
XLM_ROBERTA, CAMEMBERT = (
    like_bert(name, _head(architecture), PAD, prefix="roberta.", positions=PADDED, tasks=ENCODER)
    for name, architecture in {"xlm-roberta": "XLMRoberta", "camembert": "Camembert"}.items()
)
ROBERTA_PRELAYERNORM = like_bert(
    "roberta-prelayernorm",
    _head("RobertaPreLayerNorm"),
    PAD,
    dict(vocab_size=50265),
    modules=(*EMBEDDINGS, Module("LayerNorm", "final_norm", "norm")),
    layers=LAYERS._replace(
        modules=(
            *(module for module in LAYERS.modules if module.kind != "norm"),
            Module("attention.LayerNorm", "attention.norm", "norm"),
            Module("intermediate.LayerNorm", "ffn.norm", "norm"),
        )
    ),
    prefix="roberta_prelayernorm.",
    norm=Norm(),
    positions=PADDED,
    tasks=ENCODER,
)
MPNET_MODULES = (
    *linears("attention.attn.", "attention", q="q", k="k", v="v", o="o"),
    Module("attention.LayerNorm", "attention.norm", "norm"),
    *(module for module in LAYERS.modules if module.weights in ("ffn.up", "ffn.down", "ffn.norm")),
)
MPNET = like_bert(
    "mpnet",
    _head("MPNet"),
    dict(vocab_size=30527),
    # transformers computes with 32 buckets, and counts positions without token 1, whatever it says.
    f.Words(only={"relative_attention_num_buckets": 32}),
    without="type_vocab_size",
    modules=(*EMBEDDINGS, Module("encoder.relative_attention_bias", "relative_bias", "table")),
    layers=LAYERS._replace(modules=MPNET_MODULES),
    positions=Relative(table=True, pad_token=1),
    tasks=ENCODER,
)
