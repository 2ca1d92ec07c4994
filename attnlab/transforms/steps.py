"""Conversion steps that hold for all weights: matrices multiplied out, zeros, identities, copies.

A step is a function of (weights, layout, goal). It returns another layout and its weights, which
are the same function, or None where it does not apply. Layouts are canonical (`forms.canonical`).
`search` looks for a chain of steps and lists all of them.
"""

from collections.abc import Callable

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
    Narrow,
    Standard,
    TwoStage,
    score_scale,
    weight_shapes,
)
from attnlab.norms import STARTS
from attnlab.transforms.forms import PROJECTED, Goal, axes, changed
from attnlab.transforms.matrices import stacked_values
from attnlab.transforms.measure import Floats, Weights

Made = tuple[Layout, dict[str, Floats]] | None
Step = Callable[[Weights, Layout, Goal], Made]


def finish(w: Weights, layout: Layout | None, **made: Floats) -> Made:
    """The layout and those of the old and new weights that it has."""
    if layout is None:
        return None
    both = {**w, **made}
    return layout, {name: both[name] for name in weight_shapes(layout) if name in both}


def rewrite(w: Weights, layout: Layout, goal: Goal) -> Made:
    """The next layout by `Layout.rewritten`: two matrices multiplied out, or a tie undone."""
    call = goal.call
    found = layout.rewritten(rotary=call.rotary, shift_invariant=call.shift_invariant)
    if isinstance(found, Blocked):
        return None
    made = found.params({name: jnp.asarray(a) for name, a in w.items()})
    return found.layout, {name: np.asarray(a) for name, a in made.items()}


# Sizes --------------------------------------------------------------------------------------------


def pad(w: Weights, layout: Layout, goal: Goal) -> Made:
    """Zero columns in q and k, in v (and rows in o), in a latent without a norm; heads of zeros."""
    to = goal.untied
    alike = type(layout) is type(to)
    both = isinstance(layout, PROJECTED) and isinstance(to, PROJECTED)
    free = not goal.call.rotary or isinstance(layout, GroupedTied | Latent)
    free = free and getattr(layout, "qk_norm", None) is None
    each = isinstance(layout, Standard) and layout.size("num_kv_heads") == layout.num_heads
    latents = isinstance(layout, Latent) and isinstance(to, Latent)
    grows = {
        "head_dim": free and (alike or both),
        "value_dim": layout.output_projection,
        "latent_dim": latents and not getattr(layout, "latent_norm", True),
        "num_heads": type(layout) is Standard
        and each
        and layout.output_projection
        and (layout.qk_norm is None or layout.qk_norm.over == "head"),
    }
    changes = {}
    for name, allowed in grows.items():
        known = allowed and hasattr(layout, name) and hasattr(to, name)
        if known and to.size(name) > layout.size(name):
            changes[name] = to.size(name)
    if "num_heads" in changes:
        changes["num_kv_heads"] = changes["num_heads"]
    wider = changed(layout, **changes) if changes else None
    if wider is None:
        return None
    shapes = weight_shapes(wider)
    return wider, {
        name: np.pad(a, [(0, m - n) for n, m in zip(a.shape, shapes[name], strict=True)])
        for name, a in w.items()
    }


def repeat_heads(w: Weights, layout: Layout, goal: Goal) -> Made:
    """Every key/value head copied within its group: as many as the goal has, or one per head."""
    if not hasattr(layout, "num_kv_heads"):
        return None
    heads, count = layout.size("num_kv_heads"), layout.num_heads
    if hasattr(goal.untied, "num_kv_heads"):
        wanted = goal.untied.size("num_kv_heads")
        count = wanted if wanted > heads and wanted % heads == 0 else count
    if count <= heads or count % heads or layout.num_heads % count:
        return None
    made = {}
    for name, names in axes(layout).items():
        a = w[name]
        if "num_kv_heads" in names:
            a = np.repeat(a, count // heads, names.index("num_kv_heads"))
        made[name] = a
    return finish(made, changed(layout, num_kv_heads=count))


# Identities and copies ----------------------------------------------------------------------------


def identity_outer(w: Weights, layout: Layout, goal: Goal) -> Made:
    """Standard to two_stage: outer matrices that are identities."""
    if type(layout) is not Standard or not isinstance(goal.untied, TwoStage):
        return None
    sizes = zip("qkv", layout.input_widths, strict=True)
    made = {f"{name}_outer": np.eye(width) for name, width in sizes}
    return finish(w, layout.to(TwoStage), **made)


def identity_mix(w: Weights, layout: Layout, goal: Goal) -> Made:
    """Narrow to alt: a shared matrix that is the identity."""
    if type(layout) is not Narrow or not isinstance(goal.untied, Alt):
        return None
    mix = np.eye(layout.width).reshape(layout.width, layout.num_heads, -1)
    return finish(w, layout.to(Alt), mix=mix)


def identity_output(w: Weights, layout: Layout, goal: Goal) -> Made:
    """An output projection that is the identity."""
    if layout.output_projection or not goal.untied.output_projection:
        return None
    width = layout.size("out_width")
    o = np.eye(width).reshape(layout.num_heads, -1, width)
    return finish(w, changed(layout, output_projection=True, out_width=width), o=o)


def identity_keys(w: Weights, layout: Layout, goal: Goal) -> Made:
    """Bilinear to standard with head_dim = width of the key input."""
    if not isinstance(layout, Bilinear) or isinstance(goal.untied, Bilinear | Absorbed):
        return None
    width = layout.size("key_width")
    keys = np.repeat(np.eye(width)[:, None], layout.size("num_kv_heads"), axis=1)
    return finish(w, layout.to(Standard, head_dim=width), q=w["qk"], k=keys)


def identity_values(w: Weights, layout: Layout, goal: Goal) -> Made:
    """Absorbed to bilinear: value_dim = width of the value input, one more with value biases."""
    to, both = goal.untied, stacked_values(w) if isinstance(layout, Absorbed) else None
    if both is None or isinstance(to, Absorbed) or "extra_v" in w or not hasattr(to, "value_dim"):
        return None
    width = both.shape[1]
    if to.size("value_dim") < width:
        return None
    heads = layout.num_heads
    v = np.repeat(np.eye(width)[None], heads, axis=0)
    made = {"v": v[:, : layout.size("value_width")].swapaxes(0, 1), "o": both}
    made |= {"v_bias": v[:, -1]} if "v_bias" in w else {}
    return finish(w, layout.to(Bilinear, num_kv_heads=heads, value_dim=width), **made)


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


def expand_latent(w: Weights, layout: Layout, goal: Goal) -> Made:
    """Latent_absorbed to latent: the up-projections applied to the latent."""
    if type(layout) is not LatentAbsorbed or "extra_k" in w:
        return None
    made = {"k": w["k"].transpose(2, 0, 1), "v": w["v"].transpose(1, 0, 2)}
    return finish(w, layout.to(Latent), **made)


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


def drop_key_bias(w: Weights, layout: Layout, goal: Goal) -> Made:
    """A key bias adds the same to all scores of a query."""
    seen = goal.call.rotary or not goal.call.shift_invariant or getattr(layout, "qk_norm", None)
    seen = seen or not all(extra.shift_invariant for extra in layout.extras)
    if "k" not in layout.biases or "k" in goal.untied.biases or seen:
        return None
    return finish(w, changed(layout, biases=tuple(b for b in layout.biases if b != "k")))


# Biases and scale ---------------------------------------------------------------------------------
# They are last in a chain: each applies where all else is as in the goal (`Goal.nearly`).


def add_zero_bias(w: Weights, layout: Layout, goal: Goal) -> Made:
    """A bias of zeros."""
    biased = changed(layout, biases=goal.untied.biases)
    if biased is None or not goal.nearly(layout) or layout.biases == biased.biases:
        return None
    return biased, {n: w.get(n, np.zeros(shape)) for n, shape in weight_shapes(biased).items()}


def rescale(w: Weights, layout: Layout, goal: Goal) -> Made:
    """The ratio of the scales goes into q, or into its norm where q is normalized."""
    if not goal.nearly(layout) or layout.scale == goal.untied.scale:
        return None
    ratio, made = score_scale(layout) / score_scale(goal.untied), dict(w)
    norm = getattr(layout, "qk_norm", None)
    if norm is not None:
        start = 1 - STARTS[norm.kind]  # some norms count their scale from 1
        made["q_norm"] = w["q_norm"] * ratio + (ratio - 1) * start
        names: tuple[str, ...] = ("q_norm_bias",)
    elif isinstance(layout, Collaborative):
        names = ("mixing",)
    else:
        names = ("qk", "q", "q_bias", "q_rotary")
    made |= {name: w[name] * ratio for name in names if name in w}
    return finish(made, changed(layout, scale=goal.untied.scale))


STEPS: tuple[Step, ...] = (
    rewrite, pad, repeat_heads, identity_outer, identity_mix, identity_output, identity_keys,
    identity_values, repeat_keys, block_mixing, expand_latent, multiply_latent, drop_key_bias,
    add_zero_bias, rescale,
)  # fmt: skip
