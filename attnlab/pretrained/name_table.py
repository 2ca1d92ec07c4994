"""A name table as data: which modules of a file hold which weights of a model."""

import types
from collections.abc import Callable, Iterator, Mapping
from types import EllipsisType
from typing import Literal, NamedTuple

from attnlab.models.config import ModelConfig
from attnlab.models.params import Leaf, leaves, param_shapes
from attnlab.nested import JSON
from attnlab.pretrained.weights import Entry, Path

Stack = Literal["encoder", "decoder", ""]
Kind = Literal["linear", "conv1d", "norm", "table", "vector", "bias", "plain", "swapped"]


class Suffixes(NamedTuple):
    """How the names of tensors end, behind the name of their module."""

    weight: str = ".weight"
    bias: str = ".bias"
    scale: str = ".weight"
    norm_bias: str = ".bias"
    table: str = ".weight"
    linear: Literal["linear", "conv1d", "table"] = "linear"
    """How a "linear" is stored."""


class Module(NamedTuple):
    """A module of a file, and the weights that it holds.

    >>> Module("attn.c_attn", ("attention.q", "attention.k", "attention.v"), "conv1d").kind
    'conv1d'
    """

    name: str
    """Its name in the file, behind that of the layer; "in_proj_" has the tensor in_proj_weight;
    "{}" is the number of an expert or a head, each of which has its own module."""
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

    @property
    def paths(self) -> tuple[Path, ...]:
        """Paths in the tree of params."""
        names = (self.weights,) if isinstance(self.weights, str) else self.weights
        return tuple(tuple(name.split(".")) for name in names)

    def inside(self, prefix: str, stack: str, *, in_pairs: bool) -> "Module":
        """The module of a layer: with the start of its name, and of the paths of its weights."""
        weights = tuple(f"{stack}.{'.'.join(path)}" for path in self.paths)
        pairs = self.pairs if in_pairs else ()
        return self._replace(name=prefix + self.name, weights=weights, pairs=pairs)

    def entries(
        self,
        held: Mapping[Path, Leaf],
        ends: Suffixes,
        group: int | EllipsisType = ...,
        rotated: int = 0,
    ) -> list[Entry]:
        """Its tensors; none if the model lacks its weights.

        Args:
          held: the weights of the whole model.
          ends: how names of tensors end.
          group: of weights that are stacked [G, ...], or ... for all.
          rotated: how many numbers of a head are rotated.
        """
        first = self.paths[0]
        if self.kind == "norm":
            stored = {(*first, "scale"): ends.scale, (*first, "bias"): ends.norm_bias}
            found = {path: end for path, end in stored.items() if path in held}
            return [Entry(self.name + end, (path,), group) for path, end in found.items()]
        beside = {path[-1] for path in held if path[:-1] == first[:-1]}
        needed = {*(path[-1] for path in self.paths), *self.only_with.split()}
        if not needed <= beside or self.only_without in beside:
            return []
        leaf, name = held[first], self.name
        if name.endswith("_"):
            ends = ends._replace(weight="weight", bias="bias")
        pairs = self.pairs if rotated else ()
        base = Entry(name + ends.weight, self.paths, group, pairs=pairs, rotated=rotated)
        if self.kind in ("table", "vector"):
            return _each(base._replace(name=name + ends.table, kind=self.kind), leaf)
        if self.kind in ("plain", "swapped"):
            shape = (1,) * self.axes + leaf.array.shape[group is not ... :]
            kind = "table" if self.kind == "plain" else "swapped"
            stored_as = shape if self.axes else ()
            return [base._replace(name=name, kind=kind, stored=stored_as, in_turn=self.in_turn)]
        bias = base._replace(name=name + ends.bias, kind="vector", by_head=self.by_head)
        if self.kind == "bias":
            return [bias]
        kind = ends.linear if self.kind == "linear" else self.kind
        num_in = len(leaf.weight.in_axes) if leaf.weight else 1
        made = base._replace(kind=kind, by_head=self.by_head, num_in=num_in)
        biases = tuple((*path[:-1], f"{path[-1]}_bias") for path in self.paths)
        if "{}" in name or not {path[-1] for path in biases} <= beside:
            return _each(made, leaf)
        return [made, bias._replace(paths=biases, pairs=tuple(f"{one}_bias" for one in pairs))]


def _each(entry: Entry, leaf: Leaf) -> list[Entry]:
    """The entry, or one for each expert or head where its name has a place for the number."""
    if "{}" not in entry.name:
        return [entry]
    assert isinstance(entry.at, int)
    places = [(entry.at, i) for i in range(leaf.array.shape[1])]
    return [entry._replace(name=entry.name.format(at[1]), at=at) for at in places]


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


class NameTable(NamedTuple):
    """All tensors of a file.

    A table lists the modules that a family may have. Those whose weights a given config does not
    have are passed over.
    """

    modules: tuple[Module, ...]
    """Outside the layers."""
    layers: tuple[Layers, ...] = ()
    suffixes: Suffixes = Suffixes()
    special: Callable[[ModelConfig], list[Entry]] | None = None
    """Tensors that no `Module` describes."""
    prefix: str = ""
    """Of the names of the bare model in the files of its task models."""
    task_modules: tuple[str, ...] = ()
    """How names begin that belong to a task and never have the prefix."""
    renamed: tuple[tuple[str, str], ...] = ()
    """(ending of an older checkpoint, ending of today)."""
    unread: tuple[str, ...] = ()
    """Patterns of tensors that hold no weight."""
    repeated: Mapping[str, str] = types.MappingProxyType({})
    """Tensor that may be stored again -> the one that is read, whose numbers it must have."""
    if_tied: Mapping[str, str] = types.MappingProxyType({})
    """More of these where the LM head is tied."""
    copies: Mapping[str, str] = types.MappingProxyType({})
    """Tensors that transformers stores and never reads where the LM head is not tied: name -> the
    one it copies."""

    def of_head(self, modules: tuple[Module, ...], prefix: str) -> "NameTable":
        """The names in the files of a task model whose head has these modules; `prefix`: of those
        of the bare model, "" as here."""
        new = {module.weights for module in modules}
        # Older files hold the pooler of the bare model, which this head does not read.
        poolers = (f"{one.name}.*" for one in self.modules if one.weights == "pooler")
        own = (f"{module.name}." for module in modules if not module.name.startswith("pooler"))
        return self._replace(
            modules=(*(one for one in self.modules if one.weights not in new), *modules),
            prefix=prefix or self.prefix,
            task_modules=tuple(own),
            unread=(*self.unread, *poolers),
            copies={},
        )

    def repeated_in(self, config: ModelConfig) -> Mapping[str, str]:
        """Tensor that is not read for this model -> the one whose numbers it must have."""
        return {**self.repeated, **(self.if_tied if config.output.kind == "tied" else {})}

    def copies_in(self, config: ModelConfig) -> Mapping[str, str]:
        """Tensor of this model that is never read -> the one it copies."""
        return self.copies if config.output.kind == "own" else {}

    def entries(self, config: ModelConfig, attributes: JSON | None = None) -> list[Entry]:
        """The tensors of a file with the weights of this model."""
        held = {leaf.path: leaf for leaf in leaves(config, param_shapes(config))}
        said, position = attributes or {}, config.norm.position
        made = self.special(config) if self.special else []
        for module in self.modules:
            made += module.entries(held, self.suffixes)
        for layers in self.layers:
            if layers.stack == "decoder" and config.kind == "encoder":
                continue
            apart = config.encoder is not None and not config.encoder.shares_decoder
            own = "encoder_" if layers.stack == "encoder" and apart else ""
            for module in layers.outer:
                whole = module._replace(weights=f"{own}{module.weights}")
                made += whole.entries(held, self.suffixes)
            for prefix, stack, groups in _stored_layers(layers, config, own, said):
                size = config.stacks[stack].rotary_size if stack in config.stacks else 0
                for module in layers.modules:
                    sublayer = module.paths[0][0]
                    if sublayer in groups and position in (module.only_norms or (position,)):
                        in_pairs = bool(said.get(module.pairs_if, True))
                        one = module.inside(prefix, stack, in_pairs=in_pairs)
                        made += one.entries(held, self.suffixes, groups[sublayer], size)
        return made


def _stored_layers(
    layers: Layers, config: ModelConfig, own: str, attributes: JSON
) -> Iterator[tuple[str, str, dict[str, int]]]:
    """(start of its names, stack of its weights, sublayer -> group) of every stored layer."""
    plans = {name: stack.plan for name, stack in config.stacks.items()}
    names = config.layer_names
    if layers.stack == "encoder" and config.encoder is not None:
        plans = {f"{own}layers": config.encoder_model.plan}
        names = (f"{own}layers",) * config.encoder_model.num_layers
    places = [(layers.prefix.format(i), i) for i in range(len(names))]
    places = layers.places(config, attributes) if layers.places else places
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
