"""BERT (Devlin et al. 2018), in the names of Hugging Face, and `like_bert` for encoders like it."""

import dataclasses
from typing import Any

from attnlab.heads import Standard
from attnlab.models import Embedding, Init, Norm, OutputHead
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
BERT = Family(
    name="bert",
    base=BASE,
    fields=(
        *f.numbers(vocab_size=30522, hidden_size=768, num_hidden_layers=12),
        *f.numbers(num_attention_heads=12, intermediate_size=3072, max_position_embeddings=512),
        *f.numbers(layer_norm_eps=1e-12, hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.1),
        f.activation("hidden_act", "gelu"),
        f.value("type_vocab_size", 2, "embedding.token_types", least=0),
        BERT_HEAD,
    ),
    table=BERT_HEAD.table(EMBEDDINGS, LAYERS, "bert.", **OLDER),
    tasks=(t.pooled("pooler.dense", "classifier"), t.per_token("classifier"), t.questions()),
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
