"""Explains why weights do not fit a model, and which model they look like."""

import contextlib
from collections.abc import Mapping

from attnlab.heads import LAYOUTS, weight_shapes
from attnlab.models.head_weights import is_stack

Path = tuple[str, ...]
Shapes = dict[Path, tuple[int, ...]]
FIELDS = {
    "positions": "positions=Learned()",
    "token_types": "embedding.token_types",
    "embedding_norm": "embedding.norm",
    "encoder_positions": "encoder.own_inputs",
    "encoder_embedding_norm": "encoder.own_inputs",
    "embedding_projection": "embedding.width",
    "relative_bias": "positions=Relative()",
    "final_norm": "norm.position",
    "transform": "output.transform",
    "transform_norm": "output.transform",
    "lm_head": "output.kind='own'",
    "lm_head_bias": "output.bias",
    "pooler": "output.pooler='first'",
    "classifier": "output.num_classes",
}
"""Weight outside the layers -> the field of `ModelConfig` that decides whether there is one."""


def describe_mismatch(expected_shapes: Mapping[str, object], params: object) -> str | None:
    """How `params` differ from the weights of a model, and what to do about it.

    Names the first weight that differs, then the likeliest reason: {"params": ...} around the
    weights, another sharing plan, another head layout, an encoder-decoder, layers of several types,
    another family of models.

    Args:
      expected_shapes: the tree of the model's weights; leaves have a `shape`.
      params: the tree to compare.

    Returns:
      One message, or None where names and shapes are equal.

    >>> import jax, numpy as np
    >>> model = {"embedding": jax.ShapeDtypeStruct((7, 4), "float32")}
    >>> describe_mismatch(model, {"params": {"embedding": np.zeros((7, 4))}})
    'params are wrapped in {"params": ...}; pass params["params"]'
    """
    if not isinstance(params, Mapping):
        return f"params are a {type(params).__name__}; pass a dict of weights by name"
    if "params" in params and "params" not in expected_shapes:
        return 'params are wrapped in {"params": ...}; pass params["params"]'
    try:
        expected, given = _shapes(expected_shapes), _shapes(params)
    except ValueError as error:
        return str(error)
    if expected == given:
        return None
    reason = (
        _describe_other_library(given)
        or _describe_plan(expected, given)
        or _describe_layout(expected, given)
        or _describe_stacks(expected, given)
        or _describe_outer(expected, given)
    )
    return _first_difference(expected, given) + (f". {reason}" if reason else "")


def _shapes(tree: Mapping[str, object], path: Path = ()) -> Shapes:
    """Path -> shape of a tree of mappings, sorted by name."""
    found: Shapes = {}
    for name in sorted(tree, key=str):
        here, leaf = (*path, str(name)), tree[name]
        if isinstance(leaf, Mapping):
            found |= _shapes(leaf, here)
            continue
        shape = () if isinstance(leaf, int | float | complex) else getattr(leaf, "shape", None)
        if not isinstance(shape, tuple):
            raise ValueError(f"weight {_name(here)} must be an array, not a {type(leaf).__name__}")
        found[here] = shape
    return found


def _name(path: Path) -> str:
    return repr("/".join(path))


def _first_difference(expected: Shapes, actual: Shapes) -> str:
    paths = sorted({*expected, *actual}, key=lambda p: ((p in expected) != (p in actual), p))
    for path in paths:  # those that both have come first
        if path not in actual:
            return f"weight {_name(path)} is missing; the model has it with shape {expected[path]}"
        if path not in expected:
            return f"weight {_name(path)} has shape {actual[path]}; the model has no such weight"
        if expected[path] != actual[path]:
            return f"weight {_name(path)} has shape {actual[path]}, the model has {expected[path]}"
    raise AssertionError("called for weights that are equal")


def _describe_other_library(actual: Shapes) -> str | None:
    if all(len(path) == 1 for path in actual) and any("." in path[0] for path in actual):
        return (
            "These are names of another library: load the folder with attnlab.pretrained.load, or "
            "the arrays with attnlab.pretrained.from_variables"
        )
    return None


def _groups(shapes: Shapes) -> dict[Path, int]:
    """(stack, sublayer) -> its number of parameter groups, the first axis of all its weights."""
    return {p[:2]: s[0] for p, s in shapes.items() if is_stack(p[0]) and len(p) > 2 and s}


def _describe_plan(expected: Shapes, actual: Shapes) -> str | None:
    """Another sharing plan: other numbers of groups, or sublayers that only some plans have."""
    ours, theirs = _groups(expected), _groups(actual)
    if {stack for stack, _ in ours} != {stack for stack, _ in theirs}:
        return None
    differ = [p for p in ours if p in theirs and ours[p] != theirs[p]]
    own = sorted({sublayer for _, sublayer in {*ours} ^ {*theirs}} - {"attention", "ffn", "cross"})
    if not differ and not own:
        return None
    if any(expected[p][1:] != actual[p][1:] for p in {*expected} & {*actual} if p[:2] in differ):
        return None
    found = [
        f"{theirs[p]} parameter group(s) of {_name(p)} where the model has {ours[p]}"
        for p in differ
    ]
    found += [f"the sublayer {sublayer!r} in only one of the two" for sublayer in own]
    counts = {(theirs[p], ours[p]) for p in differ}
    what = f"The weights are of another sharing plan: {'; '.join(found)}. Convert"
    if len(counts) == 1 and len(differ) == len(ours) and not own:
        ((count, wanted),) = counts
        what = (
            f"Every sublayer has {count} parameter group(s) where the model has {wanted}: set "
            f"num_layers={count} if each layer has its own; of another sharing plan, convert"
        )
    return f"{what} them with attnlab.transforms.change_plan(their_config, params, plan)"


def _describe_layout(expected: Shapes, actual: Shapes) -> str | None:
    """Another head layout, or other sizes or extras of heads."""
    for stack in sorted({path[0] for path in expected if is_stack(path[0])}):
        ours, theirs = (_head_weights(a, stack) for a in (expected, actual))
        if ours == theirs or not theirs:
            continue
        width = _width(actual) or _width(expected)
        mine, other = (_layout_of(w, width) for w in (ours, theirs))
        if {*ours} == {*theirs} and (mine is None or other in (None, mine)):
            return "The sizes of the heads differ: width, num_heads, num_kv_heads or head_dim"
        if mine == other:
            odd = ", ".join(sorted({*ours} ^ {*theirs}))
            return f"The heads differ in {odd}: in biases, norms, ties or extras such as a gate"
        like = f"layout {other!r}" if other else "another layout or other sizes"
        model = f", the model has {mine!r}" if mine else ""
        return (
            f"The heads look like {like}{model}. attnlab.convert(params, their_layout, layout) "
            "converts the heads of one layer where an exact conversion exists"
        )
    return None


def _head_weights(shapes: Shapes, stack: str) -> dict[str, tuple[int, ...]]:
    """The head weights of one group of a stack, without norms."""
    parts = {(stack, "attention"), (stack, "kv")}
    return {
        path[-1]: shape[1:]
        for path, shape in shapes.items()
        if path[:2] in parts and len(path) == 3
    }


def _width(shapes: Shapes) -> int:
    """The width of the model: of what the heads add to the residual stream, or of the embedding."""
    for path, shape in shapes.items():
        if shape and ((path[-1] == "o" and len(shape) > 1) or path == ("embedding",)):
            return shape[-1]
    return 0


def _layout_of(weights: Mapping[str, tuple[int, ...]], width: int) -> str | None:
    """The layout whose default sizes make most of these weights; None where no layout does."""
    found: dict[str, int] = {}
    for name, kind in LAYOUTS.items():
        for num_heads in sorted({n for shape in weights.values() for n in shape}):
            with contextlib.suppress(TypeError, ValueError):  # no layout of this size
                shapes = weight_shapes(kind(width=width, num_heads=num_heads))
                if shapes.items() <= weights.items():
                    found.setdefault(name, len(shapes))
    return max(found, key=found.__getitem__, default=None)


def _describe_stacks(expected: Shapes, actual: Shapes) -> str | None:
    """Other stacks of layers: a separate encoder, or layers of several types."""
    ours, theirs = ({p[0] for p in a if is_stack(p[0])} for a in (expected, actual))
    if ours == theirs:
        return None
    if theirs - ours == {"encoder_layers"}:
        return (
            "The weights have an encoder and a decoder: the model is no encoder_decoder, or "
            "has encoder.shares_decoder (attnlab.transforms.tie_encoder merges the two)"
        )
    if ours - theirs == {"encoder_layers"}:
        return (
            "The weights have no encoder of their own: they are of a decoder, or of a model with "
            "encoder.shares_decoder (attnlab.transforms.untie_encoder copies it)"
        )
    return (
        f"The weights have the stacks {sorted(theirs)}, the model has {sorted(ours)}: they are of "
        "another family, or of other layer_types"
    )


def _describe_outer(expected: Shapes, actual: Shapes) -> str | None:
    """Weights outside the layers that only one of the two has: another family."""
    ours, theirs = ({p[0] for p in a if not is_stack(p[0])} for a in (expected, actual))
    found = [_with_field(name, "lack") for name in sorted(ours - theirs)]
    found += [_with_field(name, "have") for name in sorted(theirs - ours)]
    if not found:
        return None
    return f"The weights are of another family of models or other fields: they {', '.join(found)}"


def _with_field(weight: str, verb: str) -> str:
    name = weight.removeprefix("encoder_")
    field = FIELDS.get(name) or FIELDS.get(name.removesuffix("_bias"))
    return f"{verb} {weight}" + (f" (field {field})" if field else "")
