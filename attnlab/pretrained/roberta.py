"""RoBERTa (Liu et al. 2019), XLM-R (Conneau et al. 2019, arXiv 1911.02116), CamemBERT (Martin et
al. 2019, arXiv 1911.03894) and MPNet (Song et al. 2020, arXiv 2004.09297), in the names of Hugging
Face.
"""

import dataclasses

from attnlab.models.specs import Learned, Relative
from attnlab.pretrained.bert import BASE, EMBEDDINGS, FIELDS, LAYERS, MaskedHead, encoder
from attnlab.pretrained.common_fields import numbers
from attnlab.pretrained.family import OtherAttributes
from attnlab.pretrained.fields import changed, value
from attnlab.pretrained.name_table import Module, linears


def _head(architecture: str) -> MaskedHead:
    return MaskedHead(
        name=architecture,
        transform="lm_head.dense",
        norm="lm_head.layer_norm",
        lm_head="lm_head.decoder",
        lm_head_bias="lm_head",
        pooler="pooler.dense",
        activation="",  # the exact gelu whatever hidden_act says
    )


PADDED = dataclasses.replace(BASE, positions=Learned(pad_token=1))
PADDED_FIELDS = (*FIELDS, value("pad_token_id", 1, "positions.pad_token", least=0))
ROBERTA = encoder(
    "roberta", _head("Roberta"), changed(PADDED_FIELDS, *numbers(vocab_size=50265)), base=PADDED
)
XLM_ROBERTA = encoder(
    "xlm-roberta", _head("XLMRoberta"), PADDED_FIELDS, base=PADDED, prefix="roberta."
)
CAMEMBERT = encoder("camembert", _head("Camembert"), PADDED_FIELDS, base=PADDED, prefix="roberta.")
MPNET_MODULES = (
    *linears("attention.attn.", "attention", q="q", k="k", v="v", o="o"),
    Module("attention.LayerNorm", "attention.norm", "norm"),
    *(module for module in LAYERS.modules if module.weights in ("ffn.up", "ffn.down", "ffn.norm")),
)
MPNET = encoder(
    "mpnet",
    _head("MPNet"),
    changed(FIELDS, *numbers(vocab_size=30527), without=("type_vocab_size",)),
    base=dataclasses.replace(BASE, positions=Relative(table=True, pad_token=1)),
    modules=(*EMBEDDINGS, Module("encoder.relative_attention_bias", "relative_bias", "table")),
    layers=LAYERS._replace(modules=MPNET_MODULES),
    # transformers computes with 32 buckets, and counts positions without token 1, whatever it says.
    other_attributes=OtherAttributes(fixed={"relative_attention_num_buckets": 32}),
)
