"""Architectures with a classifier in place of the LM head, as data."""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from attnlab.models.config import ModelConfig
from attnlab.nested import JSON
from attnlab.pretrained.fields import Values
from attnlab.pretrained.metadata import metadata_of
from attnlab.pretrained.name_table import Module


class Task(NamedTuple):
    """A task model: its tensors, and its output head."""

    end: str
    """How the name of its architecture ends."""
    modules: tuple[Module, ...]
    """Of its output head, in place of those of the family with the same weights."""
    output: Mapping[str, Any]
    """Fields of `OutputHead`, where they are not the default: values, or functions of the
    attributes of config.json."""
    prefix: str = ""
    """How its tensors of the bare model begin; "": as those of the family's other task models."""
    num_classes: int = 0
    """0: one for each of `id2label`, or `num_labels` without it."""
    by_name: bool = False
    """Other architectures have all of its modules too."""

    def is_stored(self, tensors: Iterable[str]) -> bool:
        """Whether a file has all of its modules, and no other architecture has them."""
        return not self.by_name and all(
            f"{module.name}.weight" in tensors for module in self.modules
        )

    def read(self, attributes: JSON) -> Values:
        """The values of the output head."""
        count = self.num_classes or count_labels(attributes)
        plain = {"kind": "none", "bias": False, "transform": None, "num_classes": count}
        own = {n: a(attributes) if callable(a) else a for n, a in self.output.items()}
        return {f"output.{name}": value for name, value in {**plain, **own}.items()}

    def can_write(self, config: ModelConfig) -> bool:
        """Whether the classifier of the model is that of this task."""
        output, count = config.output, config.output.num_classes
        given = {name: value for name, value in self.output.items() if not callable(value)}
        fits = all(getattr(output, name) == value for name, value in given.items())
        return output.kind == "none" and fits and 0 < count == (self.num_classes or count)


def count_labels(attributes: JSON) -> int:
    """The number of classes that a config.json says, as in transformers.

    >>> count_labels({"num_labels": 3}), count_labels({})
    (3, 2)
    """
    labels = attributes.get("id2label")
    return (attributes.get("num_labels") or 2) if labels is None else len(labels)


def write_labels(config: ModelConfig) -> JSON:
    """id2label and label2id: the names of the loaded folder, or those that transformers gives."""
    labels = {str(i): f"LABEL_{i}" for i in range(config.output.num_classes)}
    kept = metadata_of(config).get("config", {}).get("id2label") or {}
    labels = kept if len(kept) == len(labels) else labels
    return {"id2label": labels, "label2id": {label: int(i) for i, label in labels.items()}}


def per_token(name: str, end: str = "ForTokenClassification", **options: Any) -> Task:
    """A classifier, the module of this name, of each token."""
    return Task(end, (Module(name, "classifier"),), {"pooler": "each"}, **options)


def questions(prefix: str = "") -> Task:
    """Logits of the first and the last token of an answer: two classes of each token."""
    return per_token("qa_outputs", "ForQuestionAnswering", prefix=prefix, num_classes=2)


def pooled(pooler: str, classifier: str, **output: Any) -> Task:
    """A classifier of the first token behind a dense layer."""
    modules = (Module(pooler, "pooler"), Module(classifier, "classifier"))
    return Task("ForSequenceClassification", modules, {"pooler": "first", **output})


LAST = Task(
    "ForSequenceClassification",
    (Module("score", "classifier"),),
    {"pooler": "last", "classifier_bias": False},
)
"""A classifier of the last token, which is no padding."""
SCORES = (LAST, per_token("score"))
QUESTIONS = (*SCORES, questions())
GENERIC = (*SCORES, questions("transformer."))
OLDER = (LAST, per_token("classifier"), questions())
"""Of decoders whose token classifier has a name of its own."""
ENCODER = (pooled("classifier.dense", "classifier.out_proj"), per_token("classifier"), questions())
"""RoBERTa's, and of encoders like it."""
