"""Every field of every config record of the package: what is outside of its bounds is refused."""

import dataclasses
import importlib
import math
import pkgutil
import re
import types
from typing import Literal, Union, get_args, get_origin, get_type_hints

import numpy as np
import pytest

import attnlab
from attnlab import data, heads
from attnlab.fields import Spec
from attnlab.heads import Layout, Standard
from attnlab.lab.description import Expectation
from attnlab.models import ModelConfig
from attnlab.models.specs import FFN, Attention, Experts, Images, LayerSpec, Norm
from attnlab.training import OptimizerConfig, TrainConfig

REQUIRED = {
    Layout: {"width": 12, "num_heads": 3},
    Experts: {"num_experts": 4, "top_k": 2},
    Images: {"height": 4, "width": 4, "channels": 1, "patch_height": 2, "patch_width": 2},
    LayerSpec: {"heads": Standard(width=12, num_heads=3)},
    Expectation: {"tags": {}, "relation": "at most", "value": 1.0, "text": ""},
}
"""What a record cannot be made without."""


def records(kind=Spec):
    """Every record of the package that can be made, and what it needs."""
    for one in kind.__subclasses__():
        yield from records(one)
        if not one.__module__.startswith("attnlab.") or not dataclasses.is_dataclass(one):
            continue
        fields = next((more for base, more in REQUIRED.items() if issubclass(one, base)), {})
        try:
            one(**fields)
        except NotImplementedError:  # a base class
            continue
        yield one, fields


for module in pkgutil.walk_packages(attnlab.__path__, "attnlab."):
    if not module.name.startswith("attnlab.contrib"):
        importlib.import_module(module.name)
RECORDS = dict(records())
RELATED = {
    "Absorbed": {"output_projection"}, "Collaborative": {"tie"}, "Differential": {"tie"},
    "LowRankQuery": {"tie"}, "HeadNorm": {"bias"}, "Experts": {"num_experts", "shared_gate"},
    "Sinusoidal": {"rates"}, "Relative": {"max_distance", "pad_token"},
    "Images": {"height", "width"}, "Norm": {"bias"}, "OutputHead": {"transform"},
    "ModelConfig": {"width"}, "OptimizerConfig": {"per_head"},
}  # fmt: skip
"""Fields of which another field decides which allowed values are used."""


def kinds_of(hint):
    """The members of a union but None."""
    members = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    return [member for member in members if member is not types.NoneType]


def outside(hint, bounds):
    """Values that a field of this type and these bounds does not take; none: any type is taken."""
    kind, *others = kinds_of(hint)
    if others or not (get_origin(kind) in (Literal, tuple) or isinstance(kind, type)):
        return [] if get_origin(kind) in (Literal, tuple) else [object()]
    if get_origin(kind) is tuple:
        element, *rest = get_args(kind)
        inner = outside(element, bounds) if rest == [...] else []
        return [3, *((one,) for one in inner)]
    beyond = {"least": -1, "above": 0, "below": 0, "most": 1}
    wrong = {
        bool: [0, 1, "True", 1.0],
        int: [1.5, "2", True, math.inf],
        float: [math.nan, math.inf, -math.inf, "1", True, 1e300, 10**400],
    }
    if get_origin(kind) is Literal:
        return ["no such choice", 3, True]
    if kind not in (int, float):
        bounds = {}
    return wrong.get(kind, [object()]) + [kind(limit + beyond[n]) for n, limit in bounds.items()]


def inside(hint, bounds):
    """The values at the bounds, which are allowed, and every choice."""
    (kind, *others) = kinds_of(hint)
    if others:
        return []
    if get_origin(kind) is Literal:
        return list(get_args(kind))
    if kind is bool:
        return [True, False]
    if kind in (int, float):
        return [kind(limit) for name, limit in bounds.items() if name in ("least", "most")]
    return []


@pytest.mark.parametrize("kind", RECORDS, ids=lambda kind: kind.__name__)
def test_what_is_outside_of_its_bounds_is_refused_by_the_name_of_its_field(kind):
    hints = get_type_hints(kind)
    for field in dataclasses.fields(kind):
        name = "bias" if field.name == "biases" else kind.prefix + field.name
        for value in outside(hints[field.name], field.metadata):
            with pytest.raises((ValueError, TypeError), match=re.escape(name)) as error:
                kind(**RECORDS[kind] | {field.name: value})
            assert error.type is ValueError or field.name in ("biases", "extras")


@pytest.mark.parametrize("kind", RECORDS, ids=lambda kind: kind.__name__)
def test_what_is_at_its_bounds_is_allowed(kind):
    hints = get_type_hints(kind)
    for field in dataclasses.fields(kind):
        if field.name not in RELATED.get(kind.__name__, ()):
            for value in inside(hints[field.name], field.metadata):
                made = kind(**RECORDS[kind] | {field.name: value})
                assert getattr(made, field.name) == value
                assert type(getattr(made, field.name)) is type(value)


def test_all_records_are_tried():
    entries = [*data.DATASETS.values(), *heads.LAYOUTS.values()]
    assert {kind for kind in entries if kind.__module__.startswith("attnlab.")} <= RECORDS.keys()
    assert {ModelConfig, TrainConfig, OptimizerConfig, heads.SoftCap} <= RECORDS.keys()


def test_numbers_become_those_of_the_field():
    """A whole number in a field of floats, numbers of NumPy, a list in a field of a tuple."""
    assert type(Norm(eps=10**30).eps) is float
    scaled = Attention(layer_scales=[1, np.float32(2)])
    assert scaled.layer_scales == (1.0, 2.0)
    assert all(type(one) is float for one in scaled.layer_scales)
    assert type(FFN(width=np.int64(8)).width) is int
