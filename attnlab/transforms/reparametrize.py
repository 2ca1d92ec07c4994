"""The same heads in other bases of queries and keys, and of values."""

from typing import Literal

import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array

from attnlab.heads import (
    Collaborative,
    ExtraKeys,
    GroupedTied,
    Latent,
    Layout,
    Params,
    TensorProduct,
)
from attnlab.heads.factors import Floats, Weights
from attnlab.transforms.measure import in_float64

HEAD_AXES = ("num_heads", "num_kv_heads", "num_key_heads", "num_value_heads")
NO_BASIS_OF_QK = (Collaborative, GroupedTied, Latent, TensorProduct)
"""Layouts with queries and keys whose numbers are weighed, shared or normalized one by one."""


def reparametrize(
    params: Params,
    layout: Layout,
    *,
    qk: ArrayLike | None = None,
    vo: ArrayLike | None = None,
    rotary: bool = False,
) -> dict[str, Array]:
    """The same function with q -> q A, k -> k A^-T and v -> v B, W_O -> B^-1 W_O.

    Args:
      params, layout: the heads.
      qk: A, [H, H] for all heads or one per key head [K, H, H] (per head [N, H, H] where those of a
        key head agree).
      vo: B, [V, V] or [K, V, V] likewise.
      rotary: rotary positions are applied to whole heads (`Rotary(fraction=1.0)`): A must commute
        with the rotation. Where they rotate a part of each head, leave qk out: the result would be
        another function.

    Raises:
      ValueError: other shapes, and layouts whose function depends on the basis.

    >>> import jax, jax.numpy as jnp
    >>> from attnlab.heads import Standard, init
    >>> layout = Standard(width=6, num_heads=2)
    >>> params = init(jax.random.key(0), layout)
    >>> reparametrize(params, layout, qk=2 * jnp.eye(3))["q"].shape
    (6, 2, 3)
    """
    w, restore = in_float64(params, layout)
    if qk is not None:
        _check_qk(layout)
        a = bases("qk", qk, layout, "k")
        if rotary and layout.rotary_axis == "head_dim":
            if a.shape[-1] % 2:
                raise ValueError(
                    f"rotary positions need an even head_dim, not {a.shape[-1]}; leave qk out"
                )
            if not commutes(a):
                raise ValueError("qk does not commute with rotary positions; use [[a, -b], [b, a]]")
        inverse: Floats = np.asarray(np.linalg.inv(a).swapaxes(-1, -2), np.float64)
        w = changed_basis(w, layout, {"q": a, "q_bias": a})
        w = changed_basis(w, layout, dict.fromkeys(("k", "k_bias", "extra_k"), inverse))
    if vo is not None:
        _check_vo(layout)
        b = bases("vo", vo, layout, "v")
        w = changed_basis(w, layout, dict.fromkeys(("v", "v_bias", "extra_v"), b))
        each = np.repeat(b, layout.num_heads // len(b), axis=0)
        w = w | {"o": np.linalg.inv(each) @ w["o"]}
    return restore(w)


def _check_qk(layout: Layout) -> None:
    names = layout.all_weights
    if layout.tie:
        raise ValueError(f"tie={layout.tie!r} makes projections one, in one basis; leave qk out")
    if not {"q", "k"} <= names.keys() or isinstance(layout, NO_BASIS_OF_QK):
        raise ValueError(f"{layout} has no q and k per head; leave qk out")
    if layout.qk_norm is not None:
        raise ValueError("qk_norm depends on the basis of q and k; leave qk out")
    for extra in layout.extras:
        if extra.between in ("qk", "any") and type(extra) is not ExtraKeys:  # they change with k
            raise ValueError(f"{extra.name} may depend on the basis of q and k; leave qk out")


def _check_vo(layout: Layout) -> None:
    names = layout.all_weights
    if "v" in layout.tie:
        raise ValueError(f"tie={layout.tie!r} makes projections one, in one basis; leave vo out")
    if isinstance(layout, GroupedTied):
        raise ValueError("values of layout 'grouped_tied' are its keys; leave vo out")
    if "v" not in names or "o" not in names or isinstance(layout, Latent | TensorProduct):
        raise ValueError(f"{layout} has no v and o per head; leave vo out")
    if layout.num_score_maps != layout.num_heads:
        raise ValueError(f"the heads of {layout} are normalized in the basis of v; leave vo out")
    if extra := layout.blocks("vo"):
        raise ValueError(f"{extra} may depend on the basis of v; leave vo out")


def bases(argument: Literal["qk", "vo"], value: ArrayLike, layout: Layout, weight: str) -> Floats:
    """One matrix per head of `weight`, or one for all: [1 or K, H, H]."""
    a: Floats = np.asarray(value, np.float64)
    names = layout.all_weights[weight].axes
    heads = next((layout.size(axis) for axis in names if axis in HEAD_AXES), 1)
    shape = (layout.size(names[-1]),) * 2
    if a.shape == (layout.num_heads, *shape) and heads < layout.num_heads:
        parts = a.reshape(heads, -1, *shape)
        if np.any(parts != parts[:, :1]):
            raise ValueError(f"{argument} must be the same for all heads of one {weight} head")
        a = parts[:, 0]
    if a.shape not in (shape, (heads, *shape)):
        raise ValueError(
            f"{argument} has shape {a.shape}; {layout} takes {shape} or {(heads, *shape)}"
        )
    a = a.reshape(-1, *shape)
    if not np.all(np.isfinite(a)) or np.linalg.cond(a).max() > 1e15:
        raise ValueError(f"{argument} must hold invertible matrices of finite numbers")
    return a


def changed_basis(w: Weights, layout: Layout, by: dict[str, Floats]) -> dict[str, Floats]:
    """The last axis of each of these weights times the basis of its head."""
    made = dict(w)
    for name, basis in by.items():
        if name in w:
            names = layout.all_weights[name].axes
            at = next((i for i, axis in enumerate(names) if axis in HEAD_AXES), None)
            heads = 1 if at is None else w[name].shape[at]
            a = w[name][None] if at is None else np.moveaxis(w[name], at, 0)
            each = np.repeat(basis, heads // len(basis), axis=0) if len(basis) < heads else basis
            a = np.einsum("N...H,NHZ->N...Z", a, each)
            made[name] = a[0] if at is None else np.moveaxis(a, 0, at)
    return made


def commutes(a: Floats) -> bool:
    """Does each matrix commute with rotating every pair (i, i + H/2) by an angle of its own?"""
    half = a.shape[-1] // 2
    angles = np.arange(1, half + 1) / half
    cos, sin = np.diag(np.cos(angles)), np.diag(np.sin(angles))
    rotation = np.block([[cos, sin], [-sin, cos]])
    return bool(np.allclose(a @ rotation, rotation @ a, rtol=0, atol=1e-12 * np.max(np.abs(a))))
