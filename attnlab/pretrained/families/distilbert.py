"""DistilBERT (Sanh et al. 2019), in the names of Hugging Face."""

from attnlab.models import Dropout, Norm
from attnlab.pretrained import fields as f
from attnlab.pretrained import tasks as t
from attnlab.pretrained.attributes import Attribute
from attnlab.pretrained.families.bert import BERT, MaskedHead, like_bert
from attnlab.pretrained.name_table import Layers, Module, linears

DISTILBERT = like_bert(
    "distilbert",
    MaskedHead(
        stem="DistilBert",
        transform="vocab_transform",
        norm="vocab_layer_norm",
        lm_head="vocab_projector",
        activation="activation",
    ),
    *f.numbers(n_layers=6, n_heads=12, dim=768, hidden_dim=3072),
    *f.numbers(dropout=0.1, attention_dropout=0.1),
    f.activation("activation", "gelu"),
    f.Words(
        used=(Attribute("sinusoidal_pos_embds", False),),
        only={"tie_weights_": True},
        # The table of sinusoids is stored as a weight: only how it was made differs.
        written={"sinusoidal_pos_embds": False},
    ),
    without="hidden_size num_hidden_layers num_attention_heads intermediate_size layer_norm_eps "
    "hidden_dropout_prob attention_probs_dropout_prob hidden_act type_vocab_size",
    layers=Layers(
        "transformer.layer.{}.",
        (
            *linears("attention.", "attention", q="q_lin", k="k_lin", v="v_lin", o="out_lin"),
            Module("sa_layer_norm", "attention.norm", "norm"),
            *linears("ffn.", "ffn", up="lin1", down="lin2"),
            Module("output_layer_norm", "ffn.norm", "norm"),
        ),
    ),
    norm=Norm(position="post", eps=1e-12),  # no attribute says it
    dropout=Dropout(places=("embeddings", "ffn")),
    tasks=(
        t.pooled("pre_classifier", "classifier", pooler_activation="relu"),
        *BERT.tasks[1:],
    ),
)
