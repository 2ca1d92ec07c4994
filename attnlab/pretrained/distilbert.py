"""DistilBERT (Sanh et al. 2019), in the names of Hugging Face."""

import dataclasses

from attnlab.models.specs import Dropout, Norm
from attnlab.pretrained.attributes import Attribute
from attnlab.pretrained.bert import BASE, MaskedHead, encoder
from attnlab.pretrained.common_fields import activation, numbers
from attnlab.pretrained.family import OtherAttributes
from attnlab.pretrained.name_table import Layers, Module, linears

DISTILBERT = encoder(
    "distilbert",
    MaskedHead(
        name="DistilBert",
        transform="vocab_transform",
        norm="vocab_layer_norm",
        lm_head="vocab_projector",
        activation="activation",
    ),
    (
        *numbers(vocab_size=30522, max_position_embeddings=512, n_layers=6, n_heads=12, dim=768),
        *numbers(hidden_dim=3072, dropout=0.1, attention_dropout=0.1),
        activation("activation", "gelu"),
    ),
    base=dataclasses.replace(
        BASE,
        norm=Norm(position="post", eps=1e-12),  # no attribute says it
        dropout=Dropout(places=("embeddings", "ffn")),
    ),
    layers=Layers(
        "transformer.layer.{}.",
        (
            *linears("attention.", "attention", q="q_lin", k="k_lin", v="v_lin", o="out_lin"),
            Module("sa_layer_norm", "attention.norm", "norm"),
            *linears("ffn.", "ffn", up="lin1", down="lin2"),
            Module("output_layer_norm", "ffn.norm", "norm"),
        ),
    ),
    other_attributes=OtherAttributes(
        read=(Attribute("sinusoidal_pos_embds", False),),
        fixed={"tie_weights_": True},
        # The table of sinusoids is stored as a weight: only how it was made differs.
        written={"sinusoidal_pos_embds": False},
    ),
)
