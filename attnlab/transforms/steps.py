"""Exact conversion steps between head layouts; `convert` searches for a chain of them.

A step takes (weights, layout, goal) and returns another layout and its weights, which are the same
function, or None where it does not apply. Layouts are canonical (`forms.canonical`). A step that
needs weights of some structure, such as a low rank, is marked `structured` and tried later.

Steps between layouts are here and, where weights must have a structure, in `steps_structured.py`;
those of biases, scale, extras, norms and ties are in `steps_options.py`.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from attnlab.heads import (
    Absorbed,
    Alt,
    Bilinear,
    Blocked,
    Collaborative,
    GroupedTied,
    Latent,
    LatentAbsorbed,
    Layout,
    LowRankQuery,
    Narrow,
    Standard,
    TensorProduct,
    TwoStage,
    weight_shapes,
)
from attnlab.transforms.forms import PROJECTED, Goal, axes, changed
from attnlab.transforms.matrices import same, split, stacked_values, zero
from attnlab.transforms.measure import Floats, Weights
from attnlab.transforms.permute import reorder_heads

Made = tuple[Layout, dict[str, Floats]] | None
Apply = Callable[[Weights, Layout, Goal], Made]


class Step(NamedTuple):
    """One exact step."""

    name: str
    """Empty: "to " and the name of the layout that it reaches."""
    apply: Apply
    structured: bool = False
    ties: bool = False
    """Does it apply to layouts whose projections are tied?"""


STEPS: list[Step] = []


def step(name: str, *, structured: bool = False, ties: bool = False) -> Callable[[Apply], Apply]:
    """Adds a function to `STEPS`."""

    def add(apply: Apply) -> Apply:
        STEPS.append(Step(name, apply, structured, ties))
        return apply

    return add


def finish(w: Weights, layout: Layout | None, **made: Floats) -> Made:
    """The layout and those of the old and new weights that it has."""
    if layout is None:
        return None
    both = {**w, **made}
    return layout, {name: both[name] for name in weight_shapes(layout) if name in both}


def pad_to(w: Weights, layout: Layout | None) -> Made:
    """Zeros at the end of every axis that is longer in `layout`."""
    if layout is None:
        return None
    shapes = weight_shapes(layout)
    return layout, {
        name: np.pad(a, [(0, m - n) for n, m in zip(a.shape, shapes[name], strict=True)])
        for name, a in w.items()
    }


@step("", ties=True)
def rewrite(w: Weights, layout: Layout, goal: Goal) -> Made:
    """The next layout of the chain of `Layout.rewritten`."""
    call = goal.call
    found = layout.rewritten(rotary=call.rotary, shift_invariant=call.shift_invariant)
    if isinstance(found, Blocked):
        return None
    made = found.params({name: jnp.asarray(a) for name, a in w.items()})
    return found.layout, {name: np.asarray(a) for name, a in made.items()}


# Sizes --------------------------------------------------------------------------------------------


@step("pad")
def pad(w: Weights, layout: Layout, goal: Goal) -> Made:
    """Zero columns in q and k, in v (and rows in o), in a latent without a norm; heads of zeros."""
    to = goal.untied
    alike = type(layout) is type(to)
    both = isinstance(layout, PROJECTED) and isinstance(to, PROJECTED)
    free = not goal.call.rotary or isinstance(layout, GroupedTied | Latent)
    free = free and getattr(layout, "qk_norm", None) is None
    each = isinstance(layout, Standard) and layout.size("num_kv_heads") == layout.num_heads
    plain = type(layout) is Standard and each and layout.output_projection
    latents = isinstance(layout, Latent) and isinstance(to, Latent)
    grows = {
        "head_dim": free and (alike or both),
        "value_dim": layout.output_projection,
        "latent_dim": latents and not getattr(layout, "latent_norm", True),
        "num_heads": plain,
    }
    changes = {}
    for name, allowed in grows.items():
        known = allowed and hasattr(layout, name) and hasattr(to, name)
        if known and to.size(name) > layout.size(name):
            changes[name] = to.size(name)
    if "num_heads" in changes:
        changes["num_kv_heads"] = changes["num_heads"]
    return pad_to(w, changed(layout, **changes)) if changes else None


@step("pad_rotary_pairs")
def pad_rotary_pairs(w: Weights, layout: Layout, goal: Goal) -> Made:
    """Zero pairs between the rotated pairs: column i of each half becomes column i H'/H, whose
    angle base^(-2i/H) is the same."""
    to = goal.untied
    if not (hasattr(layout, "head_dim") and hasattr(to, "head_dim") and goal.call.rotary):
        return None
    if layout.rotary_axis != "head_dim" or getattr(layout, "qk_norm", None) is not None:
        return None
    h, new = layout.size("head_dim"), to.size("head_dim")
    if isinstance(layout, Collaborative) != isinstance(to, Collaborative) or h % 2 or new % h:
        return None
    if new == h:
        return None

    def spread(a: Floats) -> Floats:
        wide = np.zeros((*a.shape[:-1], 2, h // 2, new // h))
        wide[..., 0] = a.reshape(wide.shape[:-1])
        return wide.reshape(*a.shape[:-1], new)

    wider = changed(layout, head_dim=new)
    names = axes(layout)
    return finish(w, wider, **{
        name: spread(a) if names[name][-1] == "head_dim" or name == "extra_k" else a
        for name, a in w.items()
    })  # fmt: skip


@step("pad_ranks")
def pad_ranks(w: Weights, layout: Layout, goal: Goal) -> Made:
    """More factors, all zero; those of the heads grow, as the mean is over more."""
    to = goal.untied
    if not (isinstance(layout, TensorProduct) and isinstance(to, TensorProduct)):
        return None
    ranks = {"q": "query_rank", "k": "key_rank", "v": "value_rank"}
    grow = {name: to.size(field) / layout.size(field) for name, field in ranks.items()}
    if min(grow.values()) < 1 or max(grow.values()) == 1:
        return None
    found = pad_to(w, changed(layout, **{field: to.size(field) for field in ranks.values()}))
    if found is None:
        return None
    wider, made = found
    for name, factor in grow.items():
        for end in ("_heads", "_heads_bias"):
            if name + end in made:
                made[name + end] = made[name + end] * factor
    return wider, made


def repeated(w: Weights, layout: Layout, count: int) -> Made:
    """Every key/value head copied, to `count` in all."""
    heads = layout.size("num_kv_heads")
    if count <= heads or count % heads or layout.num_heads % count:
        return None
    made = {}
    for name, names in axes(layout).items():
        a = w[name]
        if "num_kv_heads" in names:
            a = np.repeat(a, count // heads, names.index("num_kv_heads"))
        made[name] = a
    return finish(made, changed(layout, num_kv_heads=count))


@step("repeat_heads")
def repeat_heads(w: Weights, layout: Layout, goal: Goal) -> Made:
    """A key/value head for each query head, copied within its group."""
    return repeated(w, layout, layout.num_heads) if hasattr(layout, "num_kv_heads") else None


@step("repeat_heads")
def repeat_to_goal(w: Weights, layout: Layout, goal: Goal) -> Made:
    """As many key/value heads as the goal has."""
    both = hasattr(layout, "num_kv_heads") and hasattr(goal.untied, "num_kv_heads")
    return repeated(w, layout, goal.untied.size("num_kv_heads")) if both else None


@step("share_heads", structured=True)
def share_heads(w: Weights, layout: Layout, goal: Goal) -> Made:
    """Key and value heads that are equal in groups, of heads in any order."""
    to = goal.untied
    if not (hasattr(layout, "num_kv_heads") and hasattr(to, "num_kv_heads")):
        return None
    heads, wanted = layout.size("num_kv_heads"), to.size("num_kv_heads")
    if wanted >= heads or heads % wanted or layout.num_heads != to.num_heads:
        return None
    names = axes(layout)
    shared = [n for n, a in names.items() if "num_kv_heads" in a]
    each = [np.moveaxis(w[n], names[n].index("num_kv_heads"), 0) for n in shared]

    def fit(members: list[int]) -> bool:
        return all(equal(a[members]) for a in each)

    order = grouped(heads, wanted, fit)
    fixed = not layout.output_projection or layout.num_heads != heads
    if order is None or (fixed and order != sorted(order)):
        return None
    if order != sorted(order):
        w = reorder_heads(w, layout, order)
    first = range(0, heads, heads // wanted)
    made = {n: np.take(w[n], first, names[n].index("num_kv_heads")) for n in shared}
    return finish(w, changed(layout, num_kv_heads=wanted), **made)


def equal(heads: Floats) -> bool:
    """Are all heads [N, ...] as the first?"""
    return same(heads, np.broadcast_to(heads[:1], heads.shape))


def grouped(count: int, groups: int, fit: Callable[[list[int]], bool]) -> list[int] | None:
    """An order of heads in which neighbours fit together, 0, 1, 2, ... if possible; else None."""
    size = count // groups
    if all(fit(list(range(i, i + size))) for i in range(0, count, size)):
        return list(range(count))
    left, order = list(range(count)), []
    while left:
        members = [left.pop(0)]
        for other in list(left):
            if len(members) < size and fit([*members, other]):
                members.append(other)
                left.remove(other)
        if len(members) < size:
            return None
        order += members
    return order


# Identities and copies ----------------------------------------------------------------------------


@step("identity_outer")
def identity_outer(w: Weights, layout: Layout, goal: Goal) -> Made:
    """Standard to two_stage: outer matrices that are identities."""
    if type(layout) is not Standard or not isinstance(goal.untied, TwoStage):
        return None
    sizes = zip("qkv", layout.input_widths, strict=True)
    made = {f"{name}_outer": np.eye(width) for name, width in sizes}
    return finish(w, layout.to(TwoStage), **made)


@step("identity_mix")
def identity_mix(w: Weights, layout: Layout, goal: Goal) -> Made:
    """Narrow to alt: a shared matrix that is the identity."""
    if type(layout) is not Narrow or not isinstance(goal.untied, Alt):
        return None
    mix = np.eye(layout.width).reshape(layout.width, layout.num_heads, -1)
    return finish(w, layout.to(Alt), mix=mix)


@step("identity_output")
def identity_output(w: Weights, layout: Layout, goal: Goal) -> Made:
    """An output projection that is the identity."""
    if layout.output_projection or not goal.untied.output_projection:
        return None
    width = layout.size("out_width")
    o = np.eye(width).reshape(layout.num_heads, -1, width)
    return finish(w, changed(layout, output_projection=True, out_width=width), o=o)


@step("identity_keys")
def identity_keys(w: Weights, layout: Layout, goal: Goal) -> Made:
    """Bilinear to standard with head_dim = width of the key input."""
    if not isinstance(layout, Bilinear) or isinstance(goal.untied, Bilinear | Absorbed):
        return None
    width = layout.size("key_width")
    keys = np.repeat(np.eye(width)[:, None], layout.size("num_kv_heads"), axis=1)
    return finish(w, layout.to(Standard, head_dim=width), q=w["qk"], k=keys)


@step("identity_values")
def identity_values(w: Weights, layout: Layout, goal: Goal) -> Made:
    """Absorbed to bilinear: value_dim = width of the value input, one more with value biases."""
    to, both = goal.untied, stacked_values(w) if isinstance(layout, Absorbed) else None
    if both is None or isinstance(to, Absorbed) or "extra_v" in w or not hasattr(to, "value_dim"):
        return None
    width = both.shape[1]
    if to.size("value_dim") < width:
        return None
    heads = to.size("num_kv_heads") if hasattr(to, "num_kv_heads") else layout.num_heads
    heads = heads if layout.num_heads % heads == 0 else layout.num_heads
    v = np.repeat(np.eye(width)[None], heads, axis=0)
    made = {"v": v[:, : layout.size("value_width")].swapaxes(0, 1), "o": both}
    made |= {"v_bias": v[:, -1]} if "v_bias" in w else {}
    return finish(w, layout.to(Bilinear, num_kv_heads=heads, value_dim=width), **made)


@step("repeat_keys")
def repeat_keys(w: Weights, layout: Layout, goal: Goal) -> Made:
    """Collaborative to standard: head_dim = shared dimensions, the one key head copied."""
    if not isinstance(layout, Collaborative):
        return None
    heads, mixing = layout.size("num_kv_heads"), w["mixing"]
    made = {"q": w["q"][:, None] * mixing, "k": np.repeat(w["k"][:, None], heads, axis=1)}
    if "q_bias" in w:
        made["q_bias"] = w["q_bias"] * mixing
    if "k_bias" in w:
        made["k_bias"] = np.repeat(w["k_bias"][None], heads, axis=0)
    if "extra_k" in w:
        made["extra_k"] = np.repeat(w["extra_k"], heads, axis=1)
    return finish(w, layout.to(Standard), **made)


@step("block_mixing")
def block_mixing(w: Weights, layout: Layout, goal: Goal) -> Made:
    """Standard to collaborative with N H dimensions: head n weighs its own by 1, others by 0."""
    to, heads = goal.untied, layout.num_heads
    if type(layout) is not Standard or not isinstance(to, Collaborative):
        return None
    each, wide = layout.size("num_kv_heads") == heads, heads * layout.size("head_dim")
    if not each or wide > to.size("head_dim") or goal.call.rotary or layout.qk_norm is not None:
        return None
    names = [n for n in ("q", "k", "q_bias", "k_bias") if n in w]
    made = {n: w[n].reshape(*w[n].shape[:-2], -1) for n in names}
    if "extra_k" in w:
        made["extra_k"] = w["extra_k"].reshape(len(w["extra_k"]), 1, -1)
    mixing = np.repeat(np.eye(heads), layout.size("head_dim"), axis=1)
    return finish(w, layout.to(Collaborative, head_dim=wide), mixing=mixing, **made)


@step("constant_factors")
def constant_factors(w: Weights, layout: Layout, goal: Goal) -> Made:
    """Standard to tensor_product of ranks N, K, K: factors of heads that are constants, 1 for one
    head or group."""
    to = goal.untied
    if type(layout) is not Standard or not isinstance(to, TensorProduct):
        return None
    fits = "factors" in to.biases and layout.qk_norm is None and set(layout.biases) <= {"o"}
    if not fits:
        return None
    n, k = layout.num_heads, layout.size("num_kv_heads")
    ranks = {"query_rank": n, "key_rank": k, "value_rank": k}
    biases = tuple(sorted(("factors", *layout.biases)))
    found = layout.to(TensorProduct, biases=biases, **ranks)
    made: dict[str, Floats] = {}
    for name, count in (("q", n), ("k", k), ("v", k)):
        made[f"{name}_heads"] = np.zeros(weight_shapes(found)[f"{name}_heads"])
        made[f"{name}_heads_bias"] = count * np.repeat(np.eye(count), n // count, axis=1)
    return finish(w, found, **made)


@step("constant_factors_to_heads", structured=True)
def multiply_factors(w: Weights, layout: Layout, goal: Goal) -> Made:
    """Tensor_product to standard, where the factors of the heads are constants."""
    if not isinstance(layout, TensorProduct) or "factors" not in layout.biases:
        return None
    if any(not zero(w[f"{n}_heads"], w[f"{n}_heads_bias"]) for n in "qkv"):
        return None
    made = {n: np.einsum("DRH,RN->DNH", w[n], w[f"{n}_heads_bias"]) / w[n].shape[1] for n in "qkv"}
    biases = tuple(b for b in layout.biases if b != "factors")
    return finish(w, layout.to(Standard, biases=biases), **made)


# Latents ------------------------------------------------------------------------------------------


@step("expand_latent")
def expand_latent(w: Weights, layout: Layout, goal: Goal) -> Made:
    """Latent_absorbed to latent: the up-projections applied to the latent."""
    if type(layout) is not LatentAbsorbed or "extra_k" in w:
        return None
    made = {"k": w["k"].transpose(2, 0, 1), "v": w["v"].transpose(1, 0, 2)}
    return finish(w, layout.to(Latent), **made)


@step("multiply_latent")
def multiply_latent(w: Weights, layout: Layout, goal: Goal) -> Made:
    """Latent without norms to standard: the matrices into and out of the latent multiplied."""
    if type(layout) is not Latent or layout.latent_norm or goal.call.rotary:
        return None
    heads = layout.num_heads
    q = np.concatenate([w["q"], w["q_rotary"]], axis=-1)
    k_rotary = np.repeat(w["k_rotary"][:, None], heads, axis=1)
    made = {
        "q": np.tensordot(w["q_down"], q, 1) if "q_down" in w else q,
        "k": np.concatenate([np.tensordot(w["kv_down"], w["k"], 1), k_rotary], axis=-1),
        "v": np.tensordot(w["kv_down"], w["v"], 1),
    }
    head_dim = layout.size("head_dim") + layout.size("rotary_dim")
    return finish(w, layout.to(Standard, head_dim=head_dim), **made)


def one_input(layout: Layout) -> bool:
    """Plain standard heads: three inputs of one width, no bias but that of the output, no norm."""
    widths = len(set(layout.input_widths)) == 1
    plain = type(layout) is Standard and layout.qk_norm is None and "extra_k" not in axes(layout)
    return widths and plain and set(layout.biases) <= {"o"}


@step("factor_latent", structured=True)
def factor_latent(w: Weights, layout: Layout, goal: Goal) -> Made:
    """Standard to latent: keys and values of all heads side by side, or factored by SVD where the
    latent is narrower."""
    to = goal.untied
    if not (isinstance(to, Latent) and one_input(layout)) or goal.call.rotary:
        return None
    if to.latent_norm or to.query_latent_dim is not None:
        return None
    heads, groups, m = layout.num_heads, layout.size("num_kv_heads"), to.size("latent_dim")
    both = np.concatenate([w[n].reshape(len(w[n]), -1) for n in "kv"], axis=1)
    size = both.shape[1]
    if size <= m:
        down, up = np.pad(both, [(0, 0), (0, m - size)]), np.eye(m, size)
    else:
        factors = split(both[None], m)
        if factors is None:
            return None
        down, up = factors[0][0], factors[1][0]
    parts = np.split(up, [groups * layout.size("head_dim")], axis=1)
    k, v = (np.repeat(a.reshape(m, groups, -1), heads // groups, axis=1) for a in parts)
    found = layout.to(Latent, latent_norm=False, latent_dim=m, rotary_dim=to.size("rotary_dim"))
    none = {n: np.zeros(weight_shapes(found)[n]) for n in ("q_rotary", "k_rotary")}
    return finish(w, found, kv_down=down, k=k, v=v, **none)


@step("factor_queries", structured=True)
def factor_queries(w: Weights, layout: Layout, goal: Goal) -> Made:
    """Standard to low_rank_query without a norm: queries of all heads factored by SVD."""
    to = goal.untied
    if type(layout) is not Standard or not isinstance(to, LowRankQuery) or to.latent_norm:
        return None
    q, rank = w["q"], to.size("query_latent_dim")
    if (factors := split(q.reshape(1, len(q), -1), rank)) is None:
        return None
    found = layout.to(LowRankQuery, latent_norm=False, query_latent_dim=rank)
    left, right = factors
    return finish(w, found, q_down=left[0], q=right[0].reshape(-1, *q.shape[1:]))


@step("tie_states", structured=True)
def tie_states(w: Weights, layout: Layout, goal: Goal) -> Made:
    """Standard to grouped_tied: keys that begin as the values do and end as those of all heads."""
    to = goal.untied
    if not isinstance(to, GroupedTied) or not one_input(layout) or goal.call.rotary:
        return None
    h, rotary_dim = to.size("head_dim"), to.size("rotary_dim")
    if layout.size("head_dim") != h + rotary_dim or h > layout.size("value_dim"):
        return None
    rest = w["k"][..., h:]
    shared = same(rest, np.broadcast_to(rest[:, :1], rest.shape))
    if not shared or not same(w["k"][..., :h], w["v"][..., :h]):
        return None
    found = layout.to(GroupedTied, head_dim=h, rotary_dim=rotary_dim)
    made = {"q": w["q"][..., :h], "q_rotary": w["q"][..., h:], "kv": w["v"]}
    return finish(w, found, k_rotary=rest[:, 0], **made)
