"""Exact maps between what stands beside the rows: gates, sinks, extra keys, norms of q and k.

What a field adds is added last, when all else is as in the goal; what it can lose, the weights
decide. The functions are those of `specs.py` and `weights.py`: (spec, goal) -> specs, and
(w, spec, reached) -> weights.
"""

import dataclasses
from collections.abc import Callable

import numpy as np

from attnlab.conversion.factors import Refused, same
from attnlab.conversion.specs import all_but_last, ending, finish, has_norms, untied
from attnlab.conversion.weights import add_zeros, keep
from attnlab.heads.old.layouts import LAYOUTS
from attnlab.heads.old.maps import Weights
from attnlab.heads.old.spec import HeadSpec

NEVER = -1e30
"""A sink whose share is 0 in every dtype, while the largest score of a row is above it by 1000."""

GATES = {"head": "head_gate", "element": "gate"}


def loses(field: str, old: object, *to: object) -> Callable:
    """The goal's value of a field that has the old one, if it is one of `to`."""

    def reach(spec, goal):
        new = getattr(goal, field)
        if getattr(spec, field) == old != new and new in to:
            yield dataclasses.replace(spec, **{field: new})

    return reach


def no_gate(spec, goal):
    if spec.gate and not goal.gate:
        yield dataclasses.replace(spec, gate=None)


def _scaled(w: Weights, spec: HeadSpec, factor: float) -> Weights:
    """What the heads give, times a number: in the output maps, or in the values without any."""
    outputs = [n for n, a in spec.maps.items() if a.runs == "merge" and a.reads and a.makes == "O"]
    own_keys = "H" not in LAYOUTS[spec.layout].scores or ending(spec, "H", "store", "read")
    if not outputs and not own_keys:
        raise Refused("without an output map, values that are keys cannot be scaled")
    names = outputs or ending(spec, "V", "store", "read", "merge")
    return {n: a * factor if n in names else a for n, a in w.items()}


def half_gate(w, spec, reached):
    """sigmoid(0) = 1/2, so what is gated is twice as large."""
    return add_zeros(_scaled(w, spec, 2.0), spec, reached)


def drop_gate(w, spec, reached):
    largest = np.max(np.abs(w[GATES[spec.gate]]))
    if largest > 0:
        raise Refused(f"the gate looks at x: its weights are up to {largest:.2g}")
    return keep(_scaled(w, spec, 0.5), spec, reached)


def spread_gate(w, spec, reached):
    gate = np.repeat(w["head_gate"][..., None], spec.sizes["V"], axis=-1)
    return keep(w | {"gate": gate}, spec, reached)


def gather_gate(w, spec, reached):
    if not same(w["gate"], np.broadcast_to(w["gate"][..., :1], w["gate"].shape)):
        raise Refused("the numbers of a head have gates of their own")
    return keep(w | {"head_gate": w["gate"][..., 0]}, spec, reached)


def never(spec, goal):
    """Last of all: where a zero key can be the sink, it is exact."""
    if spec.sink is None and goal.sink == "learnt" and spec.extra_keys == goal.extra_keys:
        yield from finish("sink")(spec, goal)


def never_sink(w, spec, reached):
    return w | {"sink": np.full(spec.num_heads, NEVER)}


def drop_sink(w, spec, reached):
    """To one: a logit of 0; to none: one that no row sees."""
    largest, smallest = np.max(w["sink"]), np.min(w["sink"])
    if reached.sink is None and largest > NEVER / 2:
        raise Refused(f"a sink of {largest:.2g} takes a share of the softmax")
    if reached.sink == "one" and (largest, smallest) != (0, 0):
        raise Refused(f"the sinks are not 0: {smallest:.2g} to {largest:.2g}")
    return keep(w, spec, reached)


def one_more_key(spec, goal):
    """A sink of 0 as a key."""
    goal, count = untied(goal), (spec.extra_keys or 0) + 1
    wanted = spec.sink == "one" != goal.sink and goal.extra_keys == count
    if wanted and all_but_last(spec, goal):
        yield dataclasses.replace(spec, sink=None, extra_keys=count)


def zero_key(w, spec, reached):
    old = {n: w.get(n, np.zeros((0, *reached.shapes[n][1:]))) for n in ("extra_k", "extra_v")}
    return w | {n: np.pad(a, [(0, 1)] + [(0, 0)] * (a.ndim - 1)) for n, a in old.items()}


def one_key_less(spec, goal):
    """A key as a sink: of 0 where there is none, in the learnt one else."""
    count = spec.extra_keys or 0
    if count > (goal.extra_keys or 0):
        sink = "learnt" if spec.sink else "one"
        yield dataclasses.replace(spec, sink=sink, extra_keys=count - 1 or None)


def drop_zero_key(w, spec, reached):
    parts = [np.abs(w[n]).reshape(spec.extra_keys, -1).max(axis=1) for n in ("extra_k", "extra_v")]
    size = np.maximum(*parts)
    least = int(np.argmin(size))
    if size[least] > 0:
        raise Refused(f"no extra key and its value are zero: up to {size[least]:.2g}")
    made = {n: np.delete(w[n], least, axis=0) for n in ("extra_k", "extra_v")}
    if spec.sink:
        made["sink"] = np.logaddexp(w.get("sink", np.zeros(spec.num_heads)), 0.0)
    return keep(w | made, spec, reached)


def drop_norm_bias(*names: str) -> Callable:
    """Those of these names must be zero."""

    def weights(w, spec, reached):
        for name in names:
            if (largest := np.max(np.abs(w[name]))) > 0:
                raise Refused(f"{name} is not zero: up to {largest:.2g}")
        return keep(w, spec, reached)

    return weights


def other_eps(spec, goal):
    goal = untied(goal)
    differ = has_norms(spec) and spec.norm_eps != goal.norm_eps
    if differ and min(spec.norm_eps, goal.norm_eps) > 0 and all_but_last(spec, goal):
        yield dataclasses.replace(spec, norm_eps=goal.norm_eps)


def rescale_norms(w, spec, reached):
    """c a / sqrt(c^2 m + c^2 eps) = a / sqrt(m + eps), with c^2 the ratio of the epsilons."""
    ratio = (reached.norm_eps / spec.norm_eps) ** 0.5
    normed = [n for n in w if f"{n}_norm" in w]
    scaled = {*normed, *(f"{n}_bias" for n in normed)}
    return {n: a * ratio if n in scaled else a for n, a in w.items()}
