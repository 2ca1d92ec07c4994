"""Layers with experts in a config.json and its tensors, also with dense layers and windows."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from attnlab.models.config import ModelConfig, layers_of
from attnlab.models.specs import FFN, Experts
from attnlab.pretrained.attributes import JSON, Attribute
from attnlab.pretrained.family import Family
from attnlab.pretrained.fields import GATED, Field, Source, Values, choose
from attnlab.pretrained.layer_types import overrides_of, types_of
from attnlab.pretrained.weights import Entry

# Attributes ---------------------------------------------------------------------------------------


class DensePattern:
    """Decides which layers are dense; here none."""

    attributes: tuple[Attribute, ...] = ()

    def read(self, attributes: JSON) -> list[bool]:
        """For each layer, whether it is dense."""
        return [False] * int(attributes["num_hidden_layers"])

    def write(self, dense: list[bool]) -> JSON:
        """The inverse. Raises ValueError where no attribute can express it."""
        return {}


class SparseSteps(DensePattern):
    """Every decoder_sparse_step-th layer has experts, but for those of mlp_only_layers."""

    attributes = (
        Attribute("decoder_sparse_step", 1),
        Attribute("mlp_only_layers", None, nullable=True, json_type=list),
    )

    def read(self, attributes: JSON) -> list[bool]:
        step, dense = attributes["decoder_sparse_step"], attributes["mlp_only_layers"] or []
        layers = range(attributes["num_hidden_layers"])
        return [i in dense or (i + 1) % step != 0 for i in layers]

    def write(self, dense: list[bool]) -> JSON:
        layers = [i for i, is_dense in enumerate(dense) if is_dense]
        return {"decoder_sparse_step": 1, "mlp_only_layers": layers}


class FirstDense(DensePattern):
    """The first first_k_dense_replace layers are dense."""

    attributes = (Attribute("first_k_dense_replace", 3, least=0),)

    def read(self, attributes: JSON) -> list[bool]:
        return [
            i < attributes["first_k_dense_replace"] for i in range(attributes["num_hidden_layers"])
        ]

    def write(self, dense: list[bool]) -> JSON:
        count = sum(dense)
        if not all(dense[:count]):
            raise ValueError("dense layers must stand before those with experts")
        return {"first_k_dense_replace": count}


@dataclasses.dataclass(frozen=True)
class ExpertFields(Field):
    """The FFN of a family with experts; listed after other fields of the FFN.

    Attributes:
      options: field of `Experts` -> the attribute that sets it.
      width: the attribute with the hidden width of an expert.
      constant: fields of `Experts` that no attribute sets.
      other_name: another name of the attribute with the number of experts.
      dense: which layers are dense, with the width of intermediate_size.
      windows: the field that says which layers have a window.
      clip: the attribute that sets `FFN.clip`.
      one_by_one: each expert has tensors of its own, so there are no more than tensors.
    """

    options: Mapping[str, Attribute]
    width: Attribute
    constant: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    other_name: str = ""
    dense: DensePattern = DensePattern()  # has no state
    windows: Field | None = None
    clip: Attribute | None = None
    one_by_one: bool = True

    @property
    def attributes(self) -> tuple[Attribute, ...]:
        own = [*self.options.values(), *self.dense.attributes]
        own += [] if self.width.name == "intermediate_size" else [self.width]
        own += [self.clip] if self.clip else []
        other = Attribute(self.other_name, json_type=int, nullable=True)
        own += [other] if self.other_name else []
        return (*own, *(self.windows.attributes if self.windows else ()))

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
        values: Values = self.windows.read(attributes, source) if self.windows else {}
        dense = self.dense.read(attributes)
        if all(dense):
            return values
        experts, stored = self.experts(attributes), len(source.tensors)
        if self.one_by_one and 0 < stored < experts.num_experts:
            raise ValueError(
                f"config.json: {self.options['num_experts'].name} = {experts.num_experts} is more "
                f"than the {stored} tensors in the folder"
            )
        layers = overrides_of(values, len(dense))
        activation = choose("hidden_act", attributes["hidden_act"], GATED)
        wide = FFN(width=attributes["intermediate_size"], activation=activation, bias=False)
        layers = [
            dataclasses.replace(one, ffn=wide) if is_dense else one
            for one, is_dense in zip(layers, dense, strict=True)
        ]
        values |= types_of(layers)
        if self.clip:
            values["ffn.clip"] = attributes[self.clip.name]
        return values | {"ffn.experts": experts, "ffn.width": attributes[self.width.name]}

    def write(self, config: ModelConfig) -> JSON:
        ffns = [config.stacks[name].ffn for name in config.layer_names]
        attributes = self.windows.write(config) if self.windows else {}
        attributes |= self.dense.write([ffn.experts is None for ffn in ffns])
        for ffn in ffns:
            attributes |= {"intermediate_size": ffn.width} if ffn.experts is None else {}
            attributes |= self.write_experts(ffn) if ffn.experts is not None else {}
        return attributes


# Tensors ------------------------------------------------------------------------------------------


class ExpertNames(NamedTuple):
    """Names of the tensors of a layer, after "layers.N."; "{}" is the number of an expert."""

    router: str
    weights: Mapping[str, str]
    """Weight -> its linear module, one for each expert; empty: see `fused_entries`."""
    shared: Mapping[str, str] = {}
    """Weight of the shared expert -> its linear module."""
    shared_gate: str = ""
    balance_bias: str = ""


class StoredLayer(NamedTuple):
    """One layer of a file."""

    prefix: str
    stack: str
    """Name of the stack of its weights."""
    ffn: FFN
    groups: Mapping[str, int]
    """Sublayer -> its parameter group."""


def stored_layers(config: ModelConfig) -> Iterator[StoredLayer]:
    """Every layer of a decoder."""
    for name, layers in layers_of(config).items():
        stack = config.stacks[name]
        for k, layer in enumerate(layers):
            groups = {sub: stack.plan.indices(sub)[k] for sub in ("attention", "ffn")}
            yield StoredLayer(f"layers.{layer}.", name, stack.ffn, groups)


def expert_entries(names: ExpertNames, config: ModelConfig) -> list[Entry]:
    """The tensors of routers and experts, one for each weight of an expert."""
    made = []
    for prefix, stack, ffn, groups in stored_layers(config):
        if ffn.experts is None:
            continue
        group, where = groups["ffn"], (stack, "ffn")

        def linear(module: str, *path: str, at: Any = group, where: Any = where) -> Entry:
            return Entry(f"{prefix}{module}.weight", ((*where, *path),), at, "linear")  # noqa: B023

        made.append(linear(names.router, "router"))
        for weight, module in names.weights.items():
            for e in range(ffn.experts.num_experts):
                made.append(linear(module.format(e), weight, at=(group, e)))
        if ffn.shared is not None:
            made += [linear(module, "shared", name) for name, module in names.shared.items()]
        if ffn.experts.shared_gate:
            made.append(linear(names.shared_gate, "shared_gate"))
        if ffn.experts.balance_bias:
            path = ((*where, "balance_bias"),)
            made.append(Entry(prefix + names.balance_bias, path, group, "vector"))
    return made


def with_experts(
    family: Family, entries: Callable[[ModelConfig], list[Entry]], *, bias: bool = False
) -> Family:
    """A family whose dense FFNs are those of layers without experts.

    Args:
      family: its table names the weights of a dense FFN.
      entries: config -> the tensors of routers and experts.
      bias: of the FFN.
    """
    table, (layers,) = family.table, family.table.layers
    modules = tuple(
        one._replace(only_without="router") if one.weights in DENSE else one
        for one in layers.modules
    )
    table = table._replace(layers=(layers._replace(modules=modules),), special=entries)
    base = dataclasses.replace(family.base, ffn=FFN(bias=bias))
    return dataclasses.replace(family, table=table, base=base)


DENSE = ("ffn.gate", "ffn.up", "ffn.down")
