"""A name table as data: which modules of a file hold which weights of a model.

A table lists all modules that a family may have. Those whose weights a given config does not have
are passed over, and a bias is stored where the model has one.
"""

from collections.abc import Callable, Iterator
from types import EllipsisType
from typing import Literal, NamedTuple

from attnlab.models.config import ModelConfig
from attnlab.models.params import param_shapes
from attnlab.nested import JSON
from attnlab.pretrained.weights import Entry, Path
from attnlab.sharing import Params
from attnlab.sharing.plan import Plan

Stack = Literal["encoder", "decoder", ""]
Kind = Literal["linear", "conv1d", "norm", "table", "vector", "bias", "plain", "swapped"]


class Module(NamedTuple):
    """A module of a file, and the weights that it holds.

    >>> Module("attn.c_attn", ("attention.q", "attention.k", "attention.v"), "conv1d").kind
    'conv1d'
    """

    name: str
    """Its name in the file, behind that of the layer; "in_proj_" has the tensor in_proj_weight;
    "{}" is the number of an expert, each of which has its own module."""
    weights: str | tuple[str, ...]
    """Paths of weights, without stack and layer; several lie side by side in one tensor."""
    kind: Kind = "linear"
    """"linear" (out, in) and "conv1d" (in, out) have a bias where the model has one; a "norm" has a
    scale and maybe a bias; a "table" is stored as it is, a "vector" flat; "bias" is a lone bias; a
    "plain" one is a table whose tensor has the name of the module, "swapped" such a one with the
    last two axes exchanged."""
    by_head: bool = False
    """Several weights lie side by side head by head: all of head 0, then all of head 1."""
    pairs: tuple[str, ...] = ()
    """Weights in which the file rotates neighbours (2i, 2i+1) where `pairs_if` is true."""
    pairs_if: str = ""
    """Attribute of config.json; "": always."""
    only_with: str = ""
    """Stored only where the model has a weight of this name beside it."""
    only_without: str = ""
    """Stored only where the model has none of this name beside it."""
    axes: int = 0
    """Of a "plain" one: axes of 1 that the tensor has in front."""
    only_norms: tuple[str, ...] = ()
    """Stored only where the norms of the model have one of these positions; (): anywhere."""
    in_turn: bool = False
    """Several weights lie column by column: the first of each, then the second of each."""


Places = Callable[[ModelConfig, JSON], list[tuple[str, int]]]
"""(config, attributes) -> (start of the names of a layer, index of a layer with its weights)."""


class Layers(NamedTuple):
    """The layers of one stack."""

    prefix: str
    """How names of a layer begin; "{}" is its index."""
    modules: tuple[Module, ...]
    """Of each layer; weights are paths such as "attention.q"."""
    stack: Stack = ""
    """Of an encoder-decoder which stack; "encoder" is also that of an encoder alone."""
    outer: tuple[Module, ...] = ()
    """Modules of this stack outside its layers, such as its final norm."""
    places: Places | None = None
    """Where layers are stored; None: each under its own index."""


class Suffixes(NamedTuple):
    """How the names of tensors end, behind the name of their module."""

    weight: str = ".weight"
    bias: str = ".bias"
    scale: str = ".weight"
    norm_bias: str = ".bias"
    table: str = ".weight"
    linear: Literal["linear", "conv1d", "table"] = "linear"
    """How a "linear" is stored."""


class NameTable(NamedTuple):
    """All modules of a file."""

    modules: tuple[Module, ...]
    """Outside the layers."""
    layers: tuple[Layers, ...]
    suffixes: Suffixes = Suffixes()
    special: Callable[[ModelConfig], list[Entry]] | None = None
    """Tensors that no `Module` describes."""

    def entries(self, config: ModelConfig, attributes: JSON | None = None) -> list[Entry]:
        """The tensors of a file with the weights of this model."""
        attributes, shapes = attributes or {}, param_shapes(config)
        rotated = {name: stack.rotary_size for name, stack in config.stacks.items()}
        made = self.special(config) if self.special else []
        for module in self.modules:
            made += self._entries(module, "", shapes, (), ..., attributes)
        for layers in self.layers:
            if layers.stack == "decoder" and config.kind == "encoder":
                continue
            own = _own_prefix(config) if layers.stack == "encoder" else ""
            for module in layers.outer:
                outer = module._replace(weights=f"{own}{module.weights}")
                made += self._entries(outer, "", shapes, (), ..., attributes)
            for prefix, stack, groups in _places(layers, config, own, attributes):
                for module in layers.modules:
                    if module.only_norms and config.norm.position not in module.only_norms:
                        continue
                    sublayer = _names(module)[0].partition(".")[0]
                    if sublayer in groups and sublayer in shapes[stack]:
                        index = groups[sublayer]
                        entries = self._entries(module, prefix, shapes, (stack,), index, attributes)
                        size = rotated.get(stack, 0)
                        made += [
                            one._replace(rotated=size, pairs=one.pairs if size else ())
                            for one in entries
                        ]
        return made

    def _entries(
        self,
        module: Module,
        prefix: str,
        shapes: Params,
        where: Path,
        index: int | EllipsisType,
        attributes: JSON,
    ) -> list[Entry]:
        """The tensors of a module; none if the model lacks its weights."""
        paths = tuple((*where, *name.split(".")) for name in _names(module))
        beside = shapes
        for step in paths[0][:-1]:
            beside = beside.get(step, {})
        if (
            any(path[-1] not in beside for path in paths)
            or (module.only_with and module.only_with not in beside)
            or module.only_without in beside
        ):
            return []
        there, name, ends = beside[paths[0][-1]], prefix + module.name, self.suffixes
        if "{}" in name:
            assert isinstance(index, int)
            weight, experts = name + ends.weight, range(there.shape[1])
            return [Entry(weight.format(e), paths, (index, e), ends.linear) for e in experts]
        if name.endswith("_"):
            ends = ends._replace(weight="weight", bias="bias")
        if module.kind == "norm":
            ends_of = {"scale": ends.scale, "bias": ends.norm_bias}
            return [
                Entry(name + ends_of[n], ((*paths[0], n),), index) for n in ends_of if n in there
            ]
        pairs = module.pairs if not module.pairs_if or attributes.get(module.pairs_if) else ()
        if module.kind in ("table", "vector"):
            return [Entry(name + ends.table, paths, index, module.kind, pairs=pairs)]
        if module.kind in ("plain", "swapped"):
            kind = "table" if module.kind == "plain" else "swapped"
            shape = (1,) * module.axes + there.shape[index is not ... :] if module.axes else ()
            return [Entry(name, paths, index, kind, stored=shape, in_turn=module.in_turn)]
        if module.kind == "bias":
            return [Entry(name + ends.bias, paths, index, "vector")]
        kind = ends.linear if module.kind == "linear" else module.kind
        made = [Entry(name + ends.weight, paths, index, kind, module.by_head, pairs)]
        biases = tuple((*path[:-1], f"{path[-1]}_bias") for path in paths)
        if all(path[-1] in beside for path in biases):
            of_pairs = tuple(f"{one}_bias" for one in pairs)
            made.append(Entry(name + ends.bias, biases, index, "vector", module.by_head, of_pairs))
        return made


def _names(module: Module) -> tuple[str, ...]:
    return (module.weights,) if isinstance(module.weights, str) else module.weights


def _own_prefix(config: ModelConfig) -> str:
    """How names of weights of the encoder's own begin."""
    return "" if config.encoder is None or config.encoder.shares_decoder else "encoder_"


def _places(
    layers: Layers, config: ModelConfig, own: str, attributes: JSON
) -> Iterator[tuple[str, str, dict[str, int]]]:
    """(start of its names, stack of its weights, sublayer -> group) of every stored layer."""
    plans: dict[str, Plan]
    if layers.stack == "encoder" and config.encoder is not None:
        name = f"{own}layers"
        names, plans = (name,) * config.encoder_plan.num_layers, {name: config.encoder_plan}
    else:
        names = config.layer_names
        plans = {name: stack.plan for name, stack in config.stacks.items()}
    if layers.places is None:
        places = [(layers.prefix.format(i), i) for i in range(len(names))]
    else:
        places = layers.places(config, attributes)
    groups = {name: {sub: plan.indices(sub) for sub in plan} for name, plan in plans.items()}
    before = [names[:i].count(name) for i, name in enumerate(names)]
    for prefix, i in places:
        own_groups = groups[names[i]]
        yield prefix, names[i], {sub: own_groups[sub][before[i]] for sub in own_groups}


def linears(prefix: str, sublayer: str, **names: str) -> tuple[Module, ...]:
    """One "linear" for each weight of a sublayer: weight -> name of the module behind `prefix`.

    >>> linears("mlp.", "ffn", up="up_proj")[0].name
    'mlp.up_proj'
    """
    return tuple(Module(prefix + name, f"{sublayer}.{ours}") for ours, name in names.items())


PACKED = ("attention.q", "attention.k", "attention.v")
"""Weights that many files hold side by side in one tensor."""
