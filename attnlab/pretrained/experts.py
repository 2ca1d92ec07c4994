"""Layers with experts in a config.json and its tensors, also with dense layers and windows."""

import dataclasses
from collections.abc import Mapping

from attnlab.models import FFN, Experts
from attnlab.models.config import ModelConfig
from attnlab.nested import JSON
from attnlab.pretrained.attributes import Attribute
from attnlab.pretrained.fields import GATED, Field, Source, Values, choose
from attnlab.pretrained.name_table import Module
from attnlab.pretrained.rotary import overrides_of, types_of

STEP = "decoder_sparse_step"
SPARSE_STEPS = (Attribute(STEP, 1), Attribute("mlp_only_layers", kind=list))
"""Every decoder_sparse_step-th layer has experts, but for those of mlp_only_layers."""
FIRST_DENSE = (Attribute("first_k_dense_replace", 3, least=0),)
"""The first first_k_dense_replace layers are dense."""
UNUSED = Attribute("output_router_logits")
"""Whether transformers returns the routing, and adds the balance loss in training."""


@dataclasses.dataclass(frozen=True)
class ExpertFields(Field):
    """The FFN of a family with experts; listed after other fields of the FFN.

    Attributes:
      options: field of `Experts` -> the attribute that sets it.
      width: the attribute with the hidden width of an expert.
      constant: fields of `Experts` that no attribute sets.
      other_name: another name of the attribute with the number of experts.
      dense: `SPARSE_STEPS` or `FIRST_DENSE`, which say what layers are dense, with the width of
        intermediate_size; (): none.
      windows: the field that says which layers have a window.
      clip: the attribute that sets `FFN.clip`.
    """

    options: Mapping[str, Attribute]
    width: Attribute
    constant: Mapping[str, object] = dataclasses.field(default_factory=dict)
    other_name: str = ""
    dense: tuple[Attribute, ...] = ()
    windows: Field = Field()
    clip: Attribute | None = None

    @property
    def attributes(self) -> tuple[Attribute, ...]:
        own = [*self.options.values(), *self.dense, *self.windows.attributes, UNUSED]
        own += [] if self.width.name == "intermediate_size" else [self.width]
        own += [self.clip] if self.clip else []
        own += [Attribute(self.other_name, kind=int, is_depth=True)] if self.other_name else []
        return tuple(own)

    def experts(self, attributes: JSON) -> Experts:
        """The experts of a layer."""
        values = {field: attributes[one.name] for field, one in self.options.items()}
        if attributes.get(self.other_name) is not None:
            values["num_experts"] = attributes[self.other_name]
        return Experts(**{**self.constant, **values})

    def write_experts(self, ffn: FFN) -> JSON:
        """The inverse."""
        attributes = {one.name: getattr(ffn.experts, field) for field, one in self.options.items()}
        attributes |= {self.width.name: ffn.width}
        return attributes | ({self.clip.name: ffn.clip} if self.clip else {})

    def read(self, attributes: JSON, source: Source) -> Values:
        values = self.windows.read(attributes, source)
        first, step = attributes.get("first_k_dense_replace", 0), attributes.get(STEP, 1)
        only = attributes.get("mlp_only_layers") or ()
        layers = range(attributes["num_hidden_layers"])
        dense = [i < first or i in only or (i + 1) % step != 0 for i in layers]
        if all(dense):
            return values
        activation = choose("hidden_act", attributes["hidden_act"], GATED)
        wide = FFN(width=attributes["intermediate_size"], activation=activation, bias=False)
        values |= types_of(
            [
                dataclasses.replace(one, ffn=wide) if is_dense else one
                for one, is_dense in zip(overrides_of(values, len(dense)), dense, strict=True)
            ]
        )
        values |= {"ffn.clip": attributes[self.clip.name]} if self.clip else {}
        return values | {
            "ffn.experts": self.experts(attributes),
            "ffn.width": attributes[self.width.name],
        }

    def write(self, config: ModelConfig) -> JSON:
        ffns = [config.stacks[name].ffn for name in config.layer_names]
        attributes = self.windows.write(config)
        layers = [i for i, ffn in enumerate(ffns) if ffn.experts is None]
        said = {"first_k_dense_replace": len(layers), STEP: 1, "mlp_only_layers": layers}
        attributes |= {one.name: said[one.name] for one in self.dense}
        for ffn in ffns:
            dense = {"intermediate_size": ffn.width}
            attributes |= dense if ffn.experts is None else self.write_experts(ffn)
        return attributes


def expert_modules(
    router: str, experts: dict[str, str], dense: tuple[Module, ...] = ()
) -> tuple[Module, ...]:
    """Modules of an FFN with experts.

    Args:
      router: its module.
      experts: weight -> its module; "{}" is the number of an expert.
      dense: modules of layers without experts.
    """
    return (
        *(module._replace(only_without="router") for module in dense),
        Module(router, "ffn.router"),
        *(Module(name, f"ffn.{ours}", only_with="router") for ours, name in experts.items()),
    )
