"""Say whose weights were given to a model, where they are not its own."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from attnlab.heads.old.layouts import LAYOUTS
from attnlab.heads.old.spec import HeadSpec

Path = tuple[str, ...]
Shapes = dict[Path, tuple[int, ...]]
TRANSFORMS = "attnlab.transforms"
FIELDS = {
    "positions": "positions='learned'",
    "token_types": "token_types",
    "embedding_norm": "embedding_norm=True",
    "embedding_map": "embedding_width",
    "relative_bias": "positions='relative'",
    "final_norm": "norm",
    "transform": "readout_transform",
    "readout": "readout='own'",
    "readout_bias": "readout_bias=True",
    "pooler": "pooler='first'",
    "classes": "pooled_classes",
}
"""Weight outside the layers -> the field of `ModelConfig` that decides whether there is one."""


def describe_mismatch(expected_shapes: Mapping[str, Any], params: Any) -> str | None:
    """Say how `params` differ from the weights that a model has, and what to do about it.

    Names the first weight that differs, then the likeliest reason: {"params": ...} around the
    weights or missing, another sharing plan, another head layout, an encoder-decoder, layers of
    several types, another family of models.

    Args:
      expected_shapes: the tree of the model's weights; leaves have a `shape`. Or this tree in
        {"params": ...}, as Flax's `apply` takes it.
      params: the tree that was given.

    Returns:
      One message, or None where names and shapes are equal.

    >>> import jax
    >>> model = {"embedding": jax.ShapeDtypeStruct((7, 4), "float32")}
    >>> describe_mismatch(model, {"params": {"embedding": np.zeros((7, 4))}})
    'params are wrapped in {"params": ...}, the bare weights are expected; pass params["params"]'
    """
    if not isinstance(params, Mapping):
        return f"params are a {type(params).__name__}; pass a dict of weights, by name"
    if (wrapped := _describe_wrapping(expected_shapes, params)) is not None:
        return wrapped
    if "params" in expected_shapes:  # beside other collections of variables
        return describe_mismatch(expected_shapes["params"], params["params"])
    try:
        expected, given = _shapes(expected_shapes), _shapes(params)
    except ValueError as error:
        return str(error)
    if expected == given:
        return None
    reason = (
        _describe_other_files(expected, given)
        or _describe_plan(expected, given)
        or _describe_layout(expected, given)
        or _describe_stacks(expected, given)
        or _describe_outer(expected, given)
    )
    return _first_difference(expected, given) + (f". {reason}" if reason else "")


def flatten(tree: Mapping[str, Any], path: Path = ()) -> dict[Path, Any]:
    """Path -> leaf of a tree of mappings, sorted by name."""
    found: dict[Path, Any] = {}
    for name in sorted(tree, key=str):
        here, value = (*path, str(name)), tree[name]
        found |= flatten(value, here) if isinstance(value, Mapping) else {here: value}
    return found


def _shapes(tree: Mapping[str, Any]) -> Shapes:
    found: Shapes = {}
    for path, leaf in flatten(tree).items():
        shape = getattr(leaf, "shape", None)
        if not isinstance(shape, tuple):
            if not isinstance(leaf, int | float | complex | np.generic):
                raise ValueError(f"{'.'.join(path)} is no array but a {type(leaf).__name__}")
            shape = ()
        found[path] = shape
    return found


def _describe_wrapping(expected: Mapping[str, Any], given: Mapping[str, Any]) -> str | None:
    if "params" in given and "params" not in expected:
        return 'params are wrapped in {"params": ...}, the bare weights are expected; pass ' + (
            'params["params"]'
        )
    if "params" in expected and "params" not in given:
        return 'the weights are not wrapped in {"params": ...}; pass {"params": params}'
    return None


def _first_difference(expected: Shapes, given: Shapes) -> str:
    for path in sorted({*expected, *given}):
        name = ".".join(path)
        if path not in given:
            return f"{name} is missing; the model expects it with shape {expected[path]}"
        if path not in expected:
            return f"{name} is {given[path]}; the model has no weight of that name"
        if expected[path] != given[path]:
            return f"{name} is {given[path]}, the model expects {expected[path]}"
    return "names and shapes are equal"


def _describe_other_files(expected: Shapes, given: Shapes) -> str | None:
    if all(len(path) == 1 for path in given) and any("." in path[0] for path in given):
        return (
            "These are names of another library: load the folder with attnlab.pretrained.load, or "
            "the arrays with attnlab.pretrained.from_variables"
        )
    return None


def _is_stack(name: str) -> bool:
    return name.removeprefix("encoder_").startswith("layers")


def _groups(shapes: Shapes) -> dict[Path, int]:
    """(stack, part) -> its number of parameter groups, the first axis of all its weights."""
    return {p[:2]: s[0] for p, s in shapes.items() if _is_stack(p[0]) and len(p) > 2 and s}


def _describe_plan(expected: Shapes, given: Shapes) -> str | None:
    """Another sharing plan: other numbers of groups, or parts that only some plans have."""
    ours, theirs = _groups(expected), _groups(given)
    if {stack for stack, _ in ours} != {stack for stack, _ in theirs}:
        return None
    differ = [p for p in ours if p in theirs and ours[p] != theirs[p]]
    own_parts = sorted({part for _, part in {*ours} ^ {*theirs}} - {"attention", "ffn", "cross"})
    if not differ and not own_parts:
        return None
    if any(expected[p][1:] != given[p][1:] for p in {*expected} & {*given} if p[:2] in differ):
        return None
    said = [
        f"{theirs[p]} parameter group(s) of {'.'.join(p)} where the model has {ours[p]}"
        for p in differ
    ]
    said += [f"the part {p!r} in only one of both" for p in own_parts]
    return (
        f"The weights are of another sharing plan: {'; '.join(said)}. Convert them with "
        f"{TRANSFORMS}.change_plan(their_config, params, plan)"
    )


def _describe_layout(expected: Shapes, given: Shapes) -> str | None:
    """Another head layout, or other sizes of heads."""
    for stack in sorted({path[0] for path in expected if _is_stack(path[0])}):
        ours, theirs = (_head_weights(a, stack) for a in (expected, given))
        if ours == theirs or not theirs:
            continue
        width = _width(expected, given)
        names = [_layout_of(w, width) for w in (ours, theirs)]
        if {*ours} == {*theirs} and (None in names or names[0] == names[1]):
            return "The sizes of the heads differ: width, num_heads, num_kv_heads or head_dim"
        if names[0] == names[1]:
            odd = ", ".join(sorted({*ours} ^ {*theirs}))
            return f"The heads differ in {odd}: in biases, norms, a gate or a sink"
        like = f"layout {names[1]!r}" if names[1] else "another layout or other sizes"
        model = f", the model has {names[0]!r}" if names[0] else ""
        return (
            f"The heads look like {like}{model}. attnlab.convert(weights, their_spec, model_spec) "
            "converts the heads of one layer where an exact conversion exists"
        )
    return None


def _head_weights(shapes: Shapes, stack: str) -> dict[str, tuple[int, ...]]:
    """The head weights of one group of a stack, without the norms beside them."""
    parts = {(stack, "attention"), (stack, "kv")}
    return {
        path[-1]: shape[1:]
        for path, shape in shapes.items()
        if path[:2] in parts and len(path) == 3
    }


def _width(expected: Shapes, given: Shapes) -> int:
    """The width of the model: of what the heads write, or of the embedding."""
    for shapes in (given, expected):
        for path, shape in shapes.items():
            if (path[-1] == "o" and len(shape) > 1) or path == ("embedding",):
                return shape[-1]
    return 0


def _layout_of(weights: Mapping[str, tuple[int, ...]], width: int) -> str | None:
    """The layout whose default sizes make these weights; None where no layout does."""
    sizes = {n for shape in weights.values() for n in shape}
    matrices = {n: s for n, s in weights.items() if not n.endswith("_bias") and n != "mix"}
    for layout in LAYOUTS:
        for spec in _default_specs(layout, width, sizes):
            if spec.shapes == matrices:
                return layout
    return None


def _default_specs(layout: str, width: int, sizes: set[int]) -> Iterator[HeadSpec]:
    for num_heads in sorted(n for n in sizes if 0 < n <= width):
        try:
            yield HeadSpec(layout, width, num_heads)
        except ValueError:
            continue


def _describe_stacks(expected: Shapes, given: Shapes) -> str | None:
    """Other stacks of layers: an encoder of its own, or layers of several types."""
    ours, theirs = ({p[0] for p in a if _is_stack(p[0])} for a in (expected, given))
    if ours == theirs:
        return None
    if theirs - ours == {"encoder_layers"}:
        return (
            "The weights have an encoder beside the decoder: the model is no encoder_decoder, or "
            f"shares its encoder ({TRANSFORMS}.tie_encoder merges the two)"
        )
    if ours - theirs == {"encoder_layers"}:
        return (
            "The weights have no encoder of their own: they are of a decoder, or of a shared "
            f"encoder ({TRANSFORMS}.untie_encoder copies it)"
        )
    return (
        f"The weights have the stacks {sorted(theirs)}, the model has {sorted(ours)}: they are of "
        "another family, or of other layer types (kinds)"
    )


def _describe_outer(expected: Shapes, given: Shapes) -> str | None:
    """Weights outside the layers that only one of both has: another family."""
    ours, theirs = ({p[0] for p in a if not _is_stack(p[0])} for a in (expected, given))
    said = [_with_field(name, "lack") for name in sorted(ours - theirs)]
    said += [_with_field(name, "have") for name in sorted(theirs - ours)]
    if not said:
        return None
    return f"The weights are of another family of models or other fields: they {', '.join(said)}"


def _with_field(weight: str, verb: str) -> str:
    name = weight.removeprefix("encoder_")
    field = FIELDS.get(name) or FIELDS.get(name.removesuffix("_bias"))
    return f"{verb} {weight}" + (f" (field {field})" if field else "")
