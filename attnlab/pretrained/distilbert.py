"""DistilBERT (Sanh et al. 2019), in the names of Hugging Face."""

import dataclasses

from attnlab.models.specs import Dropout, Norm
from attnlab.pretrained.attributes import Attribute
from attnlab.pretrained.bert import BASE, EMBEDDINGS, OLD_NORMS, masked_head
from attnlab.pretrained.family import Family, OtherAttributes, UnreadTensors
from attnlab.pretrained.fields import ACTIVATIONS, Choice, MaskedHead, value
from attnlab.pretrained.name_table import Layers, Module, NameTable, linears

DISTILBERT = Family(
    name="distilbert",
    base=dataclasses.replace(
        BASE,
        norm=Norm(position="post", eps=1e-12),  # no attribute says it
        dropout=Dropout(places=("embeddings", "ffn")),
    ),
    fields=(
        value("vocab_size", 30522, "vocab_size"),
        value("max_position_embeddings", 512, "max_len"),
        value("n_layers", 6, "num_layers", is_depth=True),
        value("n_heads", 12, "heads.num_heads"),
        value("dim", 768, "width"),
        value("hidden_dim", 3072, "ffn.width"),
        value("dropout", 0.1, "dropout.rate"),
        value("attention_dropout", 0.1, "dropout.attention"),
        Choice("activation", "gelu", "ffn.activation", ACTIVATIONS),
        MaskedHead("DistilBert", transform="vocab_transform", activation="activation"),
    ),
    table=NameTable(
        modules=(
            *EMBEDDINGS,
            *masked_head(
                "vocab_transform", "vocab_layer_norm", "vocab_projector", "vocab_projector"
            ),
        ),
        layers=(
            Layers(
                "transformer.layer.{}.",
                (
                    *linears(
                        "attention.", "attention", q="q_lin", k="k_lin", v="v_lin", o="out_lin"
                    ),
                    Module("sa_layer_norm", "attention.norm", "norm"),
                    *linears("ffn.", "ffn", up="lin1", down="lin2"),
                    Module("output_layer_norm", "ffn.norm", "norm"),
                ),
            ),
        ),
    ),
    prefix="distilbert.",
    task_modules=("vocab_",),
    renamed=OLD_NORMS,
    other_attributes=OtherAttributes(
        read=(Attribute("sinusoidal_pos_embds", False),),
        fixed={"tie_weights_": True},
        # The table of sinusoids is stored as a weight: only how it was made differs.
        written={"sinusoidal_pos_embds": False},
    ),
    unread=UnreadTensors(always=("embeddings.position_ids",), if_tied=("vocab_projector.weight",)),
)
