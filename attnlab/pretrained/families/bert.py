"""BERT (Devlin et al. 2018) and encoders like it, in the names of Hugging Face: RoBERTa (Liu et al.
2019), XLM-R (Conneau et al. 2019, arXiv 1911.02116), CamemBERT (Martin et al. 2019, arXiv
1911.03894), RoBERTa-PreLayerNorm (Ott et al. 2019, arXiv 1904.01038), MPNet (Song et al. 2020,
arXiv 2004.09297), DistilBERT (Sanh et al. 2019) and ELECTRA (Clark et al. 2020, arXiv 2003.10555),
whose discriminator's head is not read.
"""

import dataclasses
from typing import Any

from attnlab.heads import Standard
from attnlab.models import Dropout, Embedding, Init, Learned, Norm, OutputHead, Relative
from attnlab.models.config import ModelConfig
from attnlab.nested import JSON
from attnlab.pretrained import fields as f
from attnlab.pretrained import tasks as t
from attnlab.pretrained.attributes import Attribute
from attnlab.pretrained.family import Family
from attnlab.pretrained.name_table import Layers, Module, NameTable, linears

BASE = ModelConfig(
    kind="encoder",
    heads=Standard(num_heads=4, biases=f.BIASES),
    norm=Norm(position="post"),
    embedding=Embedding(norm=True),
    output=OutputHead(kind="none"),
    init=Init(std=0.02),
)
EMBEDDINGS = (
    Module("embeddings.word_embeddings", "embedding", "table"),
    Module("embeddings.position_embeddings", "positions", "table"),
    Module("embeddings.token_type_embeddings", "token_types", "table"),
    Module("embeddings.LayerNorm", "embedding_norm", "norm"),
)
QKV = {"q": "query", "k": "key", "v": "value"}
FFN_NAMES = {"up": "intermediate.dense", "down": "output.dense"}
LAYERS = Layers(
    "encoder.layer.{}.",
    (
        *linears("attention.self.", "attention", **QKV),
        Module("attention.output.dense", "attention.o"),
        Module("attention.output.LayerNorm", "attention.norm", "norm"),
        *linears("", "ffn", **FFN_NAMES),
        Module("output.LayerNorm", "ffn.norm", "norm"),
    ),
)


NO_LM_HEAD: JSON = {
    "output.kind": "none",
    "output.bias": False,
    "output.transform": None,
    "output.transform_bias": True,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class MaskedHead(f.Field):
    """The masked-LM head, pooler and classifier of an encoder: those that the architecture needs,
    or whose tensors are there.

    Attributes:
      stem: architectures are STEMModel, STEMForMaskedLM and maybe STEMForPreTraining.
      transform, norm: modules of the transform.
      lm_head: the LM head that is not tied to the embedding.
      lm_head_bias: the module with the bias of a tied LM head; "" : `lm_head`.
      embedding: the module to which it is tied.
      pooler, classifier: modules; "": there is none.
      activation: attribute that names the activation of the transform, as that of the FFN; "": it
        is the exact gelu. None: other fields read it and the biases of LM head and transform.
    """

    stem: str
    transform: str
    norm: str
    lm_head: str
    lm_head_bias: str = ""
    embedding: str = "embeddings.word_embeddings"
    pooler: str = ""
    classifier: str = ""
    activation: str | None = "hidden_act"

    @property
    def modules(self) -> tuple[Module, ...]:
        """Those of the output heads."""
        bias = self.lm_head_bias or self.lm_head
        made = (
            Module(self.pooler, "pooler"),
            Module(self.classifier, "classifier"),
            Module(self.transform, "transform"),
            Module(self.norm, "transform_norm", "norm"),
            Module(bias, "lm_head_bias", "bias", only_without="lm_head"),
            Module(self.lm_head, "lm_head"),
        )
        return tuple(module for module in made if module.name)

    def table(
        self, modules: tuple[Module, ...], layers: Layers, prefix: str, **options: Any
    ) -> NameTable:
        """The name table of a model with these modules outside its layers.

        A tied LM head may be stored again; an own one has its own bias, beside an unused one.
        """
        tasks = {f"{module.name.partition('.')[0]}." for module in self.modules}
        tied = {f"{self.lm_head}.weight": f"{self.embedding}.weight"}
        ours, theirs = f"{self.lm_head_bias}.bias", f"{self.lm_head}.bias"
        return NameTable(
            (*modules, *self.modules),
            (layers,),
            prefix=prefix,
            task_modules=tuple(sorted(tasks - {"pooler."})),
            if_tied=tied | ({theirs: ours} if self.lm_head_bias else {}),
            copies={ours: theirs} if self.lm_head_bias else {},
            **options,
        )

    @property
    def attributes(self) -> tuple[Attribute, ...]:
        return (Attribute("tie_word_embeddings", True),)

    @property
    def architectures(self) -> tuple[str, ...]:
        tasks = ("Model", "ForMaskedLM", *("ForPreTraining",) * bool(self.classifier))
        return tuple(self.stem + task for task in tasks)

    def read(self, attributes: JSON, source: f.Source) -> f.Values:
        stored = (self.transform, self.pooler, self.classifier)
        has = {name: f"{name}.weight" in source.tensors for name in stored}
        both = bool(self.classifier) and source.architecture == f"{self.stem}ForPreTraining"
        values: f.Values = {
            "output.pooler": "first" if both or has[self.pooler] else None,
            "output.num_classes": 2 if both or has[self.classifier] else 0,
        }
        if not (both or source.architecture == f"{self.stem}ForMaskedLM" or has[self.transform]):
            return values | NO_LM_HEAD
        values["output.kind"] = "tied" if attributes["tie_word_embeddings"] else "own"
        if (name := self.activation) is not None:
            act = f.choose(name, attributes[name], f.ACTIVATIONS) if name else "gelu"
            values |= {"output.bias": True, "output.transform": act}
        return values

    def write(self, config: ModelConfig) -> JSON:
        output = config.output
        task = "ForPreTraining" if output.num_classes and self.classifier else "ForMaskedLM"
        name = self.stem + ("Model" if output.kind == "none" else task)
        return {"tie_word_embeddings": output.kind != "own", "architectures": [name]}


BERT_HEAD = MaskedHead(
    stem="Bert",
    transform="cls.predictions.transform.dense",
    norm="cls.predictions.transform.LayerNorm",
    lm_head="cls.predictions.decoder",
    lm_head_bias="cls.predictions",
    pooler="pooler.dense",
    classifier="cls.seq_relationship",
)
OLDER: JSON = {
    # Endings of norms in checkpoints made from TensorFlow's.
    "renamed": ((".gamma", ".weight"), (".beta", ".bias")),
    "unread": ("embeddings.position_ids",),
}
PER_TOKEN = t.per_token("classifier"), t.questions()
BERT = Family(
    name="bert",
    base=BASE,
    fields=(
        *f.numbers("vocab_size hidden_size num_hidden_layers num_attention_heads"),
        *f.numbers("intermediate_size max_position_embeddings layer_norm_eps"),
        *f.numbers("hidden_dropout_prob attention_probs_dropout_prob"),
        f.activation("hidden_act"),
        f.value("type_vocab_size", int, "embedding.token_types", least=0),
        BERT_HEAD,
    ),
    table=BERT_HEAD.table(EMBEDDINGS, LAYERS, "bert.", **OLDER),
    tasks=(
        t.pooled("pooler.dense", "classifier"),
        *PER_TOKEN,
        t.pooled("pooler.dense", "cls.seq_relationship")._replace(
            end="ForNextSentencePrediction", num_classes=2, by_name=True
        ),
    ),
)


def like_bert(
    name: str,
    head: MaskedHead,
    *changes: f.Field | JSON,
    modules: tuple[Module, ...] = EMBEDDINGS,
    layers: Layers = LAYERS,
    prefix: str = "",
    **options: Any,
) -> Family:
    """A family with BERT's output heads.

    Args:
      name: its `model_type`.
      head: its output heads.
      *changes, **options: as in `Family.variant`.
      modules: outside the layers, beside those of the output heads.
      layers: names of the weights of layers.
      prefix: of the names of the bare model; "": `name` and a dot.
    """
    table = head.table(modules, layers, prefix or f"{name}.", **OLDER)
    return BERT.variant(name, head, *changes, table=table, **options)


def _head(architecture: str) -> MaskedHead:
    return MaskedHead(
        stem=architecture,
        transform="lm_head.dense",
        norm="lm_head.layer_norm",
        lm_head="lm_head.decoder",
        lm_head_bias="lm_head",
        pooler="pooler.dense",
        activation="",  # the exact gelu whatever hidden_act says
    )


PAD = f.value("pad_token_id", int, "positions.pad_token", least=0)
PADDED = Learned(pad_token=1)
STEMS = {"roberta": "Roberta", "xlm-roberta": "XLMRoberta", "camembert": "Camembert"}
ROBERTA, XLM_ROBERTA, CAMEMBERT = (
    like_bert(name, _head(stem), PAD, prefix="roberta.", positions=PADDED, tasks=t.ENCODER)
    for name, stem in STEMS.items()
)
ROBERTA_PRELAYERNORM = like_bert(
    "roberta-prelayernorm",
    _head("RobertaPreLayerNorm"),
    PAD,
    modules=(*EMBEDDINGS, Module("LayerNorm", "final_norm", "norm")),
    layers=LAYERS._replace(
        modules=(
            *(module for module in LAYERS.modules if module.kind != "norm"),
            Module("attention.LayerNorm", "attention.norm", "norm"),
            Module("intermediate.LayerNorm", "ffn.norm", "norm"),
        )
    ),
    prefix="roberta_prelayernorm.",
    norm=Norm(),
    positions=PADDED,
    tasks=t.ENCODER,
)
MPNET_MODULES = (
    *linears("attention.attn.", "attention", q="q", k="k", v="v", o="o"),
    Module("attention.LayerNorm", "attention.norm", "norm"),
    *(module for module in LAYERS.modules if module.weights in ("ffn.up", "ffn.down", "ffn.norm")),
)
MPNET = like_bert(
    "mpnet",
    _head("MPNet"),
    # transformers computes with 32 buckets, and counts positions without token 1, whatever it says.
    f.Words(only={"relative_attention_num_buckets": 32}),
    without="type_vocab_size",
    modules=(*EMBEDDINGS, Module("encoder.relative_attention_bias", "relative_bias", "table")),
    layers=LAYERS._replace(modules=MPNET_MODULES),
    positions=Relative(table=True, pad_token=1),
    tasks=t.ENCODER,
)
DISTILBERT = like_bert(
    "distilbert",
    MaskedHead(
        stem="DistilBert",
        transform="vocab_transform",
        norm="vocab_layer_norm",
        lm_head="vocab_projector",
        activation="activation",
    ),
    *f.numbers("n_layers n_heads dim hidden_dim dropout attention_dropout"),
    f.activation("activation"),
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
    tasks=(t.pooled("pre_classifier", "classifier", pooler_activation="relu"), *PER_TOKEN),
)
# Embeddings as wide as the model have no projection.
EMBEDDING_SIZE = f.value(
    "embedding_size", int, "embedding.width", default_path="width", same_as="hidden_size"
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
    EMBEDDING_SIZE,
    modules=(*EMBEDDINGS, Module("embeddings_project", "embedding_projection")),
    tasks=(
        t.pooled("classifier.dense", "classifier.out_proj", pooler_activation="gelu"),
        *PER_TOKEN,
    ),
)
