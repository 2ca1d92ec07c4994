"""ELECTRA (Clark et al. 2020, arXiv 2003.10555), in the names of Hugging Face: the bare model
and the masked-LM head of its generator.
"""

from attnlab.pretrained import fields as f
from attnlab.pretrained import tasks as t
from attnlab.pretrained.families.bert import BERT, EMBEDDINGS, MaskedHead, like_bert
from attnlab.pretrained.name_table import Module

# Embeddings as wide as the model have no projection.
EMBEDDING_SIZE = f.value(
    "embedding_size", 128, "embedding.width", default_path="width", same_as="hidden_size"
)
ELECTRA = like_bert(
    "electra",
    MaskedHead(
        stem="Electra",
        transform="generator_predictions.dense",
        norm="generator_predictions.LayerNorm",
        lm_head="generator_lm_head",
        activation="",  # the exact gelu whatever hidden_act says
    ),
    dict(hidden_size=256, num_attention_heads=4, intermediate_size=1024),
    EMBEDDING_SIZE,
    modules=(*EMBEDDINGS, Module("embeddings_project", "embedding_projection")),
    tasks=(
        t.pooled("classifier.dense", "classifier.out_proj", pooler_activation="gelu"),
        *BERT.tasks[1:],
    ),
)
