"""ELECTRA (Clark et al. 2020, arXiv 2003.10555), in the names of Hugging Face: the bare model
and the masked-LM head of its generator.
"""

from attnlab.models.config import ModelConfig
from attnlab.nested import JSON
from attnlab.pretrained import fields as f
from attnlab.pretrained import tasks as t
from attnlab.pretrained.attributes import Attribute
from attnlab.pretrained.families.bert import BERT, EMBEDDINGS, MaskedHead, like_bert
from attnlab.pretrained.name_table import Module


class EmbeddingSize(f.Field):
    """Embeddings as wide as the model have no projection."""

    attributes = (Attribute("embedding_size", 128),)

    def read(self, attributes: JSON, source: f.Source) -> f.Values:
        width = attributes["embedding_size"]
        return {"embedding.width": None if width == attributes["hidden_size"] else width}

    def write(self, config: ModelConfig) -> JSON:
        return {"embedding_size": config.embedding.width or config.width}


ELECTRA = like_bert(
    "electra",
    MaskedHead(
        name="Electra",
        transform="generator_predictions.dense",
        norm="generator_predictions.LayerNorm",
        lm_head="generator_lm_head",
        activation="",  # the exact gelu whatever hidden_act says
    ),
    dict(hidden_size=256, num_attention_heads=4, intermediate_size=1024),
    EmbeddingSize(),
    modules=(*EMBEDDINGS, Module("embeddings_project", "embedding_projection")),
    tasks=(
        t.pooled("classifier.dense", "classifier.out_proj", pooler_activation="gelu"),
        *BERT.tasks[1:],
    ),
)
