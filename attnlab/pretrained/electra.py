"""ELECTRA (Clark et al. 2020, arXiv 2003.10555), in the names of Hugging Face: the bare model
and the masked-LM head of its generator.
"""

from attnlab.models.config import ModelConfig
from attnlab.pretrained.attributes import JSON, Attribute
from attnlab.pretrained.bert import BASE, EMBEDDINGS, FIELDS, LAYERS, OLD_NORMS, masked_head
from attnlab.pretrained.family import Family, UnreadTensors
from attnlab.pretrained.fields import Field, MaskedHead, Source, Values, changed, sizes
from attnlab.pretrained.name_table import Module, NameTable


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


ELECTRA = Family(
    name="electra",
    base=BASE,
    fields=changed(
        FIELDS,
        *sizes(hidden_size=256, num_attention_heads=4, intermediate_size=1024),
        _EmbeddingSize(),
        # Its LM head has the exact gelu whatever hidden_act says.
        MaskedHead("Electra", transform="generator_predictions.dense", activation=""),
    ),
    table=NameTable(
        modules=(
            *EMBEDDINGS,
            Module("embeddings_project", "embedding_projection"),
            *masked_head(
                "generator_predictions.dense",
                "generator_predictions.LayerNorm",
                "generator_lm_head",
                "generator_lm_head",
            ),
        ),
        layers=(LAYERS,),
    ),
    prefix="electra.",
    task_modules=("generator_predictions.", "generator_lm_head."),
    renamed=OLD_NORMS,
    unread=UnreadTensors(
        always=("embeddings.position_ids",), if_tied=("generator_lm_head.weight",)
    ),
)
