"""MPNet (Song et al. 2020, arXiv 2004.09297), in the names of Hugging Face."""

import dataclasses

from attnlab.models.specs import Relative
from attnlab.pretrained.bert import LAYERS
from attnlab.pretrained.family import OtherAttributes
from attnlab.pretrained.fields import MaskedHead, changed, sizes
from attnlab.pretrained.name_table import Module, linears
from attnlab.pretrained.roberta import ROBERTA

MPNET = dataclasses.replace(
    ROBERTA,
    name="mpnet",
    base=dataclasses.replace(ROBERTA.base, positions=Relative(table=True, pad_token=1)),
    fields=changed(
        ROBERTA.fields,
        *sizes(vocab_size=30527),
        MaskedHead("MPNet", transform="lm_head.dense", pooler="pooler.dense", activation=""),
        without=("type_vocab_size",),
    ),
    table=ROBERTA.table._replace(
        modules=(
            *ROBERTA.table.modules,
            Module("encoder.relative_attention_bias", "relative_bias", "table"),
        ),
        layers=(
            LAYERS._replace(
                modules=(
                    *linears("attention.attn.", "attention", q="q", k="k", v="v", o="o"),
                    Module("attention.LayerNorm", "attention.norm", "norm"),
                    *LAYERS.modules[5:],
                )
            ),
        ),
    ),
    prefix="mpnet.",
    # transformers computes with 32 buckets whatever it says.
    other_attributes=OtherAttributes(fixed={"relative_attention_num_buckets": 32}),
)
