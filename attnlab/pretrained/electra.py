"""ELECTRA (Clark et al. 2020, arXiv 2003.10555), in the names of Hugging Face: the bare model
and the masked-LM head of its generator.
"""

from attnlab.models.config import ModelConfig
from attnlab.nested import JSON
from attnlab.pretrained.attributes import Attribute
from attnlab.pretrained.bert import EMBEDDINGS, FIELDS, MaskedHead, encoder
from attnlab.pretrained.common_fields import numbers
from attnlab.pretrained.fields import Field, Source, Values, changed
from attnlab.pretrained.name_table import Module


class _EmbeddingSize(Field):
    """Embeddings as wide as the model have no projection."""

    attributes = (Attribute("embedding_size", 128),)

    def read(self, attributes: JSON, source: Source) -> Values:
        width = attributes["embedding_size"]
        return {"embedding.width": None if width == attributes["hidden_size"] else width}

    def write(self, config: ModelConfig) -> JSON:
        """Raises ValueError for a square projection."""
        if config.embedding.width == config.width:
            raise ValueError("embedding.width must be None where it is the width of the model")
        return {"embedding_size": config.embedding.width or config.width}


ELECTRA = encoder(
    "electra",
    MaskedHead(
        name="Electra",
        transform="generator_predictions.dense",
        norm="generator_predictions.LayerNorm",
        lm_head="generator_lm_head",
        activation="",  # the exact gelu whatever hidden_act says
    ),
    changed(
        FIELDS,
        *numbers(hidden_size=256, num_attention_heads=4, intermediate_size=1024),
        _EmbeddingSize(),
    ),
    modules=(*EMBEDDINGS, Module("embeddings_project", "embedding_projection")),
)
