"""RoBERTa (Liu et al. 2019), XLM-R (Conneau et al. 2019, arXiv 1911.02116) and CamemBERT (Martin et
al. 2019, arXiv 1911.03894), in the names of Hugging Face.
"""

import dataclasses

from attnlab.models.specs import Learned
from attnlab.pretrained.bert import BASE, EMBEDDINGS, FIELDS, LAYERS, OLD_NORMS, masked_head
from attnlab.pretrained.family import Family, UnreadTensors
from attnlab.pretrained.fields import MaskedHead, changed, sizes, value
from attnlab.pretrained.name_table import Module, NameTable

ROBERTA = Family(
    name="roberta",
    base=dataclasses.replace(BASE, positions=Learned(pad_token=1)),
    fields=changed(
        FIELDS,
        *sizes(vocab_size=50265),
        value("pad_token_id", 1, "positions.pad_token"),
        # Its LM head has the exact gelu whatever hidden_act says.
        MaskedHead("Roberta", transform="lm_head.dense", pooler="pooler.dense", activation=""),
    ),
    table=NameTable(
        modules=(
            *EMBEDDINGS,
            Module("pooler.dense", "pooler"),
            *masked_head("lm_head.dense", "lm_head.layer_norm", "lm_head", "lm_head.decoder"),
        ),
        layers=(LAYERS,),
    ),
    prefix="roberta.",
    task_modules=("lm_head.",),
    renamed=OLD_NORMS,
    unread=UnreadTensors(
        always=("embeddings.position_ids",),
        if_tied=("lm_head.decoder.*",),
        copies={"lm_head.bias": "lm_head.decoder.bias"},
    ),
)


def _like_roberta(name: str, architecture: str) -> Family:
    head = MaskedHead(architecture, transform="lm_head.dense", pooler="pooler.dense", activation="")
    fields = changed(ROBERTA.fields, *sizes(vocab_size=30522), head)
    return dataclasses.replace(ROBERTA, name=name, fields=fields)


XLM_ROBERTA = _like_roberta("xlm-roberta", "XLMRoberta")
CAMEMBERT = _like_roberta("camembert", "Camembert")
