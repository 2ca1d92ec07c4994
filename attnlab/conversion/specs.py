"""Where each exact map leads: (spec, goal) -> the specs that it reaches on the way to the goal.

The goal is `settled`. A size that a map may choose is the goal's, so that a search ends.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

from attnlab.heads.old.absorb import untie_maps
from attnlab.heads.old.layouts import LAYOUTS
from attnlab.heads.old.spec import FIELDS, HeadSpec


def letters_of(layout: str) -> str:
    """The axis letters that the weights of a layout have."""
    return LAYOUTS[layout].letters


def settled(spec: HeadSpec, layout: str | None = None, **changes: Any) -> HeadSpec:
    """`spec` with every size and the scale spelled out; as another layout with the same sizes.

    Two specs that mean the same are equal once they are settled.
    """
    layout, s = layout or spec.layout, spec.sizes
    asked = LAYOUTS[layout].asks  # told or not, it decides what is there
    sizes = {
        n: (getattr(spec, n) if n in asked else s.get(a)) if a in letters_of(layout) else None
        for a, n in FIELDS.items()
    }
    settled_fields = {
        "layout": layout,
        "out_width": s["O"] if spec.output else None,
        "scale": spec.score_scale,
        "biases": "".join(sorted(spec.biases)),
        "latent_norm": spec.latent_norm or "latent_norm" not in asked,
    }
    made = dataclasses.replace(spec, **settled_fields | sizes | changes)
    return made if has_norms(made) else dataclasses.replace(made, norm_eps=HeadSpec.norm_eps)


def has_norms(spec: HeadSpec) -> bool:
    """Is there a norm, of q and k or of a latent?"""
    return any(name.endswith("_norm") for name in spec.maps)


@functools.cache
def untied(spec: HeadSpec) -> HeadSpec:
    """The same with a map of its own for each of q, k and v, settled."""
    return settled(untie_maps(spec).spec if spec.ties else spec)


def ending(spec: HeadSpec, letters: str, *runs: str) -> list[str]:
    """The weights whose last axis is one of these, matrices first, where these functions of the
    row apply them."""
    return [n for n, a in spec.maps.items() if a.runs in runs and a.axes[-1] in letters]


def becomes(source: str, layout: str, *goals: str) -> Callable:
    """One layout to another with the sizes that it has, on the way to `goals` (default: it)."""
    chunks = "C" in letters_of(layout)

    def reach(spec, goal):
        s = spec.sizes
        if spec.layout != source or goal.layout not in (goals or (layout,)):
            return
        fits = s["D"] == s["E"] == s["W"] and s["D"] % s["N"] == 0 and s["K"] == s["N"]
        if fits or not chunks:
            yield settled(spec, layout)

    return reach


def size(letter: str) -> Callable:
    """The size that the goal has for this letter."""

    def reach(spec, goal):
        both = letter in letters_of(spec.layout) and letter in letters_of(goal.layout)
        if both and spec.sizes[letter] < goal.sizes[letter] and (letter != "V" or spec.output):
            with contextlib.suppress(ValueError):  # it does not fit the other sizes yet
                yield settled(spec, **{FIELDS[letter]: goal.sizes[letter]})

    return reach


def repeated(spec, goal):
    s = spec.sizes
    if "K" in letters_of(spec.layout):
        for k in {s["N"], goal.sizes["K"]}:
            if k > s["K"] and k % s["K"] == 0 and s["N"] % k == 0:
                yield settled(spec, num_kv_heads=k)


def shared(spec, goal):
    k, wanted = spec.sizes["K"], goal.sizes["K"]
    both = "K" in letters_of(spec.layout) and "K" in letters_of(goal.layout)
    if both and wanted < k and k % wanted == 0 and spec.num_heads == goal.num_heads:
        yield settled(spec, num_kv_heads=wanted)


def heads(spec, goal):
    s = spec.sizes
    if spec.layout == "standard" and s["K"] == s["N"] < goal.num_heads and spec.output:
        yield settled(spec, num_heads=goal.num_heads, num_kv_heads=goal.num_heads)


def indicators(spec, goal):
    s = spec.sizes
    both = spec.layout == "standard" and goal.layout == "collaborative"
    if both and s["K"] == s["N"] and s["N"] * s["H"] <= goal.sizes["R"]:
        yield settled(spec, "collaborative", shared_dim=s["N"] * s["H"])


def repeated_keys(spec, goal):
    if spec.layout == "collaborative":
        yield settled(spec, "standard", head_dim=spec.sizes["R"])


def identity_keys(spec, goal):
    if spec.layout == "bilinear" and goal.layout not in ("bilinear", "absorbed"):
        yield settled(spec, "standard", head_dim=spec.sizes["E"])


def factored_keys(spec, goal):
    s, g = spec.sizes, goal.sizes
    if spec.layout == "bilinear":
        for h in {g["H"]} if "H" in letters_of(goal.layout) else {g["R"] // s["N"]} - {0}:
            if goal.layout not in ("bilinear", "absorbed") and h < s["E"]:
                yield settled(spec, "standard", head_dim=h)


def diagonal(spec, goal):
    if spec.layout == "bilinear" and goal.layout == "collaborative":
        yield settled(spec, "collaborative", shared_dim=goal.sizes["R"])


def interleaved(spec, goal):
    for reached in size("H")(spec, goal):
        if reached.sizes["H"] % spec.sizes["H"] == 0 == spec.sizes["H"] % 2:
            yield reached


def one_text(spec: HeadSpec) -> bool:
    """Are all three texts as wide as x, and no bias but that of the output there?"""
    s = spec.sizes
    return s["D"] == s["E"] == s["W"] and set(spec.biases) <= {"o"} and not spec.qk_norm


def latent(spec: HeadSpec, goal: HeadSpec, width: int) -> HeadSpec | None:
    """Standard heads as a latent of that width without norms, if the goal is one."""
    both = spec.layout == "standard" and goal.layout in ("latent", "latent_absorbed")
    plain = not goal.latent_norm and goal.query_latent_dim is None
    if not (both and plain and one_text(spec) and width <= goal.sizes["M"]):
        return None
    sizes = {"latent_dim": width, "rotary_dim": goal.sizes["P"]}
    return settled(spec, "latent", latent_norm=False, **sizes)


def side_by_side(spec, goal):
    s = spec.sizes
    if reached := latent(spec, goal, s["K"] * (s["H"] + s["V"])):
        yield reached


def factored_latent(spec, goal):
    if "M" in letters_of(goal.layout) and (reached := latent(spec, goal, goal.sizes["M"])):
        yield reached


def latent_size(spec, goal):
    if not spec.latent_norm:
        yield from size("M")(spec, goal)


def multiplied_latent(spec, goal):
    s = spec.sizes
    if spec.layout == "latent" and not spec.latent_norm:
        sizes = {"head_dim": s["H"] + s["P"], "num_kv_heads": s["N"]}
        yield settled(spec, "standard", latent_norm=True, **sizes)


def factored_queries(spec, goal):
    if spec.layout == "standard" and goal.layout == "low_rank_q" and not goal.latent_norm:
        yield settled(spec, "low_rank_q", latent_norm=False, query_latent_dim=goal.sizes["Q"])


def tied_states(spec, goal):
    s, g = spec.sizes, goal.sizes
    if spec.layout != "standard" or goal.layout != "grouped_tied" or not one_text(spec):
        return
    if s["H"] == g["H"] + g["P"] and g["H"] <= s["V"]:
        yield settled(spec, "grouped_tied", head_dim=g["H"], rotary_dim=g["P"])


def constant_factors(spec, goal):
    s = spec.sizes
    both = spec.layout == "standard" and goal.layout == "tensor" and "a" in goal.biases
    if both and not spec.qk_norm and set(spec.biases) <= {"o"}:
        sizes = {"query_rank": s["N"], "key_rank": s["K"], "value_rank": s["K"]}
        yield settled(spec, "tensor", biases="a" + spec.biases, **sizes)


def constants(spec, goal):
    if spec.layout == "tensor" and goal.layout != "tensor" and "a" in spec.biases:
        biases = spec.biases.replace("a", "")
        yield settled(spec, "standard", biases=biases, num_kv_heads=spec.num_heads)


def ranks(spec, goal):
    names = [FIELDS[a] for a in "XYZ"]
    if spec.layout == goal.layout == "tensor":
        wanted = {n: getattr(goal, n) for n in names}
        less = [getattr(spec, n) - wanted[n] for n in names]
        if max(less) <= 0 and min(less) < 0:
            yield settled(spec, **wanted)


def identity_values(spec, goal):
    s, k = spec.sizes, goal.sizes["K"]
    if spec.layout == "absorbed" and goal.layout != "absorbed" and goal.sizes["V"] >= s["V"]:
        k = k if s["N"] % k == 0 else s["N"]
        yield settled(spec, "bilinear", num_kv_heads=k, value_dim=s["V"])


def factored_values(spec, goal):
    if spec.layout == "absorbed" and goal.layout != "absorbed":
        for k in {spec.num_heads, goal.sizes["K"]}:
            if spec.num_heads % k == 0:
                yield settled(spec, "bilinear", num_kv_heads=k, value_dim=goal.sizes["V"])


def output(spec, goal):
    if not spec.output:
        yield settled(spec, output=True, out_width=spec.sizes["O"])


def no_output(spec, goal):
    s, v = spec.sizes, goal.sizes["V"]
    fits = spec.num_heads == goal.num_heads and s["N"] * v == s["O"] and "o" not in spec.biases
    if spec.output and not goal.output and ending(spec, "V", "store", "read") and fits:
        yield settled(spec, output=False, out_width=None, value_dim=v)


def no_bias(letters: str) -> Callable:
    def reach(spec, goal):
        goal = untied(goal)
        spare = {a for a in letters if a in spec.biases and a not in goal.biases}
        if spare:
            yield settled(spec, biases="".join(a for a in spec.biases if a not in spare))

    return reach


LAST = ("biases", "scale", "gate", "sink", "extra_keys", "qk_norm_bias", "norm_eps")
"""What is left to last: all but these, and ties, is already as in the goal."""


def all_but_last(spec: HeadSpec, goal: HeadSpec) -> bool:
    """Is all but `LAST` as in the goal, which is untied?"""
    alike = all(getattr(spec, f) == getattr(goal, f) for f in ("layout", "ties", "qk_norm"))
    if not alike or set(spec.biases) - set(goal.biases) or goal.scale == 0:
        return False
    return dataclasses.replace(spec, **{f: getattr(goal, f) for f in LAST}) == goal


def finish(field: str, may: Callable[[Any, Any], bool] = lambda old, new: True) -> Callable:
    """The value that the goal has of this field, from those values that may become it."""

    def reach(spec, goal):
        goal = untied(goal)
        old, new = getattr(spec, field), getattr(goal, field)
        if old != new and may(old, new) and all_but_last(spec, goal):
            yield dataclasses.replace(spec, **{field: new})

    return reach


def renamed(spec, goal):
    other = {"wide": "standard", "standard": "wide"}.get(spec.layout)
    if other and (other == "standard" or goal.layout == "wide"):
        yield settled(spec, other)
