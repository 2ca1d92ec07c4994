"""Heads with fewer keys and values, fewer heads or a latent: another function, as near as can be.

MHA -> GQA and MQA, heads -> fewer heads, GQA -> latent. The error is measured and returned.
"""

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int
from numpy.typing import NDArray

from attnlab.heads import Latent, Layout, Params, Standard, multi_head_attention
from attnlab.heads.factors import Floats, Weights
from attnlab.heads.standard import UNTIED
from attnlab.models.config import ModelConfig
from attnlab.models.embed import rotary_embedding
from attnlab.models.params import check_params
from attnlab.models.specs import NoPositions, Positions, Rotary
from attnlab.sharing import PyTree
from attnlab.tap import capture
from attnlab.transforms.convert import Conversion, convert
from attnlab.transforms.convert_model import random_inputs, with_heads
from attnlab.transforms.measure import float64, generator, in_float64
from attnlab.transforms.meet import KV_AXES, change_axes, rescale
from attnlab.transforms.permute import check_head_order, take_heads
from attnlab.transforms.resharing import output_difference

TEXTS, LENGTH = 8, 64
"""Random inputs on which an error is measured where none are given."""
RIDGE = 1e-4
"""Weight of ||W_O' - W_O||^2 in the fit of W_O', relative to the mean square of the heads."""
SMALLEST = 1e-9
"""Singular values below this share of the largest are taken for rounding."""
Matrix = TypeVar("Matrix", Floats, NDArray[np.complex128])


class Approximation(NamedTuple):
    """Heads of another layout that compute nearly the same.

    Attributes:
      params: weights of `layout`, in the dtype of those that were given.
      layout: the target.
      method: "exact", "mean", "low rank" or "svd", with "and W_O fitted" where it was.
      error: ||output - expected|| / ||expected|| on the inputs, of the weights as returned.
    """

    params: dict[str, Array]
    layout: Layout
    method: str
    error: float


@dataclasses.dataclass(frozen=True)
class _Inputs:
    """Inputs [B, T, D] of self-attention in float64, and how they are attended to.

    Attributes:
      fit: are the weights fitted to these inputs?
    """

    x: Floats
    rotary: Positions
    is_causal: bool
    fit: bool

    def run(self, params: Mapping[str, Any], layout: Layout) -> tuple[Floats, Floats]:
        """The output [B, T, O] and what the heads return, [B, T, N, V]."""
        w = {name: np.asarray(a, np.float64) for name, a in params.items()}
        angles = rotary_embedding(self.rotary, layout, jnp.arange(self.x.shape[1]))
        output, heads = _run(w, self.x, angles, layout, self.is_causal)
        return np.asarray(output), np.asarray(heads)

    @functools.cached_property
    def root(self) -> Floats:
        """R with R^T R = x^T x / tokens, the second moments; the identity without a fit."""
        width = self.x.shape[-1]
        rows = self.x.reshape(-1, width)
        rows = rows / len(rows) ** 0.5  # so that new weights have the size of those that were
        return np.asarray(np.linalg.qr(rows, mode="r") if self.fit else np.eye(width), np.float64)


@functools.partial(jax.jit, static_argnames=("layout", "is_causal"))
def _run(
    params: Params, x: Array, angles: Array | None, layout: Layout, is_causal: bool
) -> tuple[Array, Array]:
    output, values = capture(
        multi_head_attention, params, x, layout, rotary=angles, is_causal=is_causal,
        order="factored", names=("heads",),
    )  # fmt: skip
    return output, values["heads"]


def approximate(
    params: Params,
    layout: Layout,
    target: Layout,
    inputs: Float[Array | np.ndarray, "B T D"] | None = None,
    *,
    rotary: bool | Rotary = False,
    is_causal: bool = False,
    fit: bool = True,
    key: Array | None = None,
) -> Approximation:
    """Weights of `target` that compute nearly the same as `params`, and their error.

    Where `convert` has an exact conversion, it is returned. Else, from the weights alone:

    - Fewer key and value heads: the mean of those of each N/K consecutive heads (Ainslie et al.
      2023, arXiv 2305.13245).
    - Fewer heads: those with the largest ||W_V,n W_O,n|| stay.
    - Latent: keys and values of all heads side by side, each divided by its norm, are an SVD of rank M.
      The rotated part is apart, as in TransMLA (Meng et al. 2025, arXiv 2502.07864): every (H/P)-th
      pair of each head keeps its positions in one key for all heads, its principal component over
      heads; what is left of the keys loses its positions.

    With `inputs` x the weights are fitted to them:

    - The SVD minimizes ||x (W - W')||, not ||W - W'||; heads stay by their share in the output.
    - The heads of a group share the keys that best give their x W_Q,n W_K,n^T x^T (with rotary
      positions pair by pair, as complex numbers) and the values that best give x W_V,n W_O,n. W_Q
      and W_O change with them.
    - W_O then is the least-squares solution for the outputs of `layout` on x.

    Of these and the mean the one with the least error is returned.

    Args:
      params: weights of `layout`.
      layout, target: target is `Standard`, `Wide`, or `Latent` with latent_norm=False whose
        head_dim is that of `layout` and whose rotary_dim divides it.
      inputs: [B, T, D] of self-attention, such as the activation "attention_in" of a layer, of many
        more tokens than N V. None: normal numbers, to which nothing is fitted.
      rotary: rotary positions are applied: True, with base 10,000, or those of a model.
      is_causal: as in `multi_head_attention`.
      fit: False takes the weights alone and measures the error on `inputs`.
      key: for the random inputs and exact conversions; None is `jax.random.key(0)`.

    Raises:
      ValueError: what cannot become the target, and why.

    >>> from attnlab.heads import init
    >>> layout, grouped = Standard(width=8, num_heads=4), Standard(width=8, num_heads=4, num_kv_heads=2)
    >>> params, x = init(jax.random.key(0), layout), np.random.default_rng(0).normal(size=(8, 9, 8))
    >>> mean, fitted = (approximate(params, layout, grouped, x, fit=fit) for fit in (False, True))
    >>> mean.method, fitted.error < mean.error, fitted.params["k"].shape
    ('mean', True, (8, 2, 2))
    """  # noqa: E501
    w, restore = in_float64(params, layout)
    if inputs is not None and (np.ndim(inputs) != 3 or np.shape(inputs)[2] != layout.width):
        raise ValueError(f"inputs {np.shape(inputs)} must be [batch, length, {layout.width}]")
    if len(set(layout.input_widths)) > 1:
        raise ValueError(f"{layout} reads inputs of several widths; only self-attention is fitted")
    fit = fit and inputs is not None
    if inputs is None:
        inputs = generator(key).normal(size=(TEXTS, LENGTH, layout.width))
    spec: Positions = Rotary() if rotary is True else rotary or NoPositions()
    call = _Inputs(np.asarray(inputs, np.float64), spec, is_causal, fit)
    exact = convert(params, layout, target, rotary=bool(rotary), key=key)
    with float64():
        expected, _ = call.run(w, layout)

        def measured(made: Mapping[str, Any], method: str) -> Approximation:
            apart = np.linalg.norm(call.run(made, target)[0] - expected)
            return Approximation(
                dict(made), target, method, float(apart / np.linalg.norm(expected))
            )

        if isinstance(exact, Conversion):
            return measured(exact.params, "exact")
        each = _with_kv_head_each(layout, target)
        found = convert(w, layout, each, rotary=bool(rotary), key=key)  # type: ignore[arg-type]
        if not isinstance(found, Conversion):
            raise ValueError(f"{layout} cannot become {each}: {found.reason}")
        made = []
        for method, one in _candidates({**found.params}, each, target, call):  # type: ignore[dict-item]
            made.append(measured(restore(one), method))
            if fit and target.output_projection:
                fitted = one | _fitted_output(one, target, call, expected)
                made.append(measured(restore(fitted), f"{method} and W_O fitted"))
        return min(made, key=lambda one: one.error)


def _with_kv_head_each(layout: Layout, target: Layout) -> Standard:
    """The target with as many heads as `layout`, each with a key and value of its own."""
    if type(target).weights not in (Standard.weights, Latent.weights):
        raise ValueError(f"target must be Standard, Wide or Latent heads, not {target}")
    heads, sizes = layout.num_heads, {n: target.size(n) for n in ("head_dim", "value_dim")}
    if target.num_heads > heads:
        raise ValueError(f"{target} has more heads than {layout}; convert adds heads exactly")
    if isinstance(target, Latent):
        pairs = target.size("rotary_dim")
        if target.latent_norm or pairs % 2 or sizes["head_dim"] % pairs:
            raise ValueError(
                "target must have latent_norm=False and an even rotary_dim that divides head_dim "
                f"{sizes['head_dim']}, not {target}"
            )
        return target.to(Standard, num_heads=heads, scale=None, **sizes)
    return target.to(type(target), num_heads=heads, num_kv_heads=heads, **sizes)  # type: ignore[return-value]


def _candidates(
    w: dict[str, Floats], each: Standard, target: Layout, call: _Inputs
) -> Iterator[tuple[str, dict[str, Floats]]]:
    """Weights of the target from heads with a key and value each, by the name of the method."""
    if target.num_heads < each.num_heads:
        w, each = _fewer_heads(w, each, target.num_heads, call)
    if isinstance(target, Latent):
        if (size := _rotated(call.rotary, each)) not in (0, each.size("head_dim")):
            raise ValueError(
                f"rotary positions rotate {size} of the {each.size('head_dim')} numbers of a key; "
                "a latent takes all or none; give a Standard target"
            )
        yield "svd", _latent(w, each, target, call.root)
        return
    groups, ratio = target.size("num_kv_heads"), each.score_scale / target.score_scale

    def mean(a: Floats, axis: int, _: str) -> Floats:
        parts = a.reshape(*a.shape[:axis], groups, -1, *a.shape[axis + 1 :])
        return np.asarray(np.mean(parts, axis + 1))

    method = "mean" if groups < each.num_heads else "fewer heads"
    yield method, rescale(change_axes(w, each, KV_AXES, mean), target, ratio)
    rotated = each.rotary_size == _rotated(call.rotary, each)
    plain = not (each.qk_norm or each.extras or set(each.biases) - {"o"} or set("qkvo") - set(w))
    plain = plain and (rotated or not _rotated(call.rotary, each))
    if call.fit and plain and groups < each.num_heads:
        yield "low rank", rescale(_low_rank(w, groups, call.root, rotated), target, ratio)


def _rotated(rotary: Positions, layout: Layout) -> int:
    return rotary.rotated_size(layout) if isinstance(rotary, Rotary) else 0


def _fewer_heads(
    w: dict[str, Floats], each: Standard, count: int, call: _Inputs
) -> tuple[dict[str, Floats], Standard]:
    """The heads whose part of the output is largest."""
    check_head_order(each)
    written: Floats = w[UNTIED[each.tie].get("v", "v")].swapaxes(0, 1)  # [N, D, V]
    if call.fit:
        written = np.moveaxis(call.run(w, each)[1], 2, 0)  # [N, B, T, V]
        written = written.reshape(len(written), -1, written.shape[-1])
    sizes = np.linalg.norm(written @ w["o"], axis=(1, 2))
    kept = sorted(map(int, np.argsort(-sizes, kind="stable")[:count]))
    known = {name: each.size(name) for name in ("head_dim", "value_dim")}
    fewer = each.to(type(each), num_heads=count, num_kv_heads=count, **known)
    return take_heads(w, each, kept, kept), fewer


def _best(a: Matrix, rank: int, root: Floats) -> tuple[Matrix, Matrix]:
    """left [E, rank] and right [rank, E] with the least ||root (a - left right a)||, by SVD."""
    u, values, vh = np.linalg.svd(root @ a, full_matrices=False)
    kept = values[:rank] > SMALLEST * values[0]
    scale = np.where(kept, values[:rank], np.inf) ** -0.5
    left = a @ vh[:rank].conj().T * scale
    right = scale[:, None] * (u[:, :rank].conj().T @ root)
    spare = rank - len(scale)
    return np.pad(left, [(0, 0), (0, spare)]), np.pad(right, [(0, spare), (0, 0)])


def _as_complex(a: Floats) -> NDArray[np.complex128]:
    """[..., H] -> [..., H/2]: the pairs (i, i + H/2) that rotary embedding rotates."""
    real, imaginary = np.split(a, 2, axis=-1)
    return real + 1j * imaginary


def _as_real(a: NDArray[np.complex128]) -> Floats:
    return np.concatenate([a.real, a.imag], axis=-1)


def _shared_pairs(
    q: NDArray[np.complex128], k: NDArray[np.complex128], root: Floats
) -> tuple[NDArray[np.complex128], NDArray[np.complex128]]:
    """Of every pair p of numbers the key [E, P] and the factors [n, P] with k[:, n, p] near
    key[:, p] factors[n, p], for q, k [E, n, P].

    The score of a pair is Re(q conj(k)) after both are rotated, so heads whose keys differ by a
    complex factor may share one key; a head counts by the size of its queries.
    """
    keys, factors = [], []
    for p in range(k.shape[2]):
        sizes = np.linalg.norm(root @ q[..., p], axis=0)
        left, right = _best(k[..., p] * sizes, 1, root)
        keys.append(left[:, 0])
        factors.append((right @ k[..., p])[0])
    return np.stack(keys, 1), np.stack(factors, 1)


def _low_rank(w: Weights, groups: int, root: Floats, rotated: bool) -> dict[str, Floats]:
    """Keys and values that the heads of a group share, and their queries and outputs."""
    q, k, v, o = (w[name].copy() for name in "qkvo")
    keys, values = [], []
    for heads in np.split(np.arange(len(o)), groups):
        left, right = _best(np.concatenate([v[:, n] @ o[n] for n in heads], 1), v.shape[2], root)
        values.append(left)
        o[heads] = [right @ v[:, n] @ o[n] for n in heads]
        if rotated:
            queries = _as_complex(q[:, heads])
            shared, factors = _shared_pairs(queries, _as_complex(k[:, heads]), root)
            keys.append(_as_real(shared))
            q[:, heads] = _as_real(queries * factors.conj())
        else:
            scores = np.concatenate([k[:, n] @ q[:, n].T @ root.T for n in heads], 1)
            left, right = _best(scores, k.shape[2], root)
            keys.append(left)
            q[:, heads] = np.stack([q[:, n] @ k[:, n].T @ right.T for n in heads], 1)
    return {**w, "q": q, "k": np.stack(keys, 1), "v": np.stack(values, 1), "o": o}


def _latent(w: Weights, each: Standard, target: Latent, root: Floats) -> dict[str, Floats]:
    """Keys and values of rank M, and the pairs whose positions stay."""
    m, half = target.size("latent_dim"), target.size("rotary_dim") // 2
    q, k = _as_complex(w["q"]), _as_complex(w["k"])
    kept = slice(0, None, k.shape[2] // half)  # of these rates the target has its pairs
    shared, factors = _shared_pairs(q[..., kept], k[..., kept], root)
    k[..., kept] -= shared[:, None] * factors
    keys, values = _as_real(k), w["v"]
    # What is left of the keys counts as it would in all of them.
    sizes = [np.linalg.norm(np.tensordot(root, a, 1)) or 1.0 for a in (w["k"], values)]
    parts = [a.reshape(len(a), -1) / size for a, size in zip((keys, values), sizes, strict=True)]
    left, right = _best(np.concatenate(parts, 1), m, root)
    ratio = each.score_scale / target.score_scale
    made = {
        "q": w["q"] * ratio,
        "q_rotary": _as_real(q[..., kept] * factors.conj()) * ratio,
        "kv_down": left,
        "k_rotary": _as_real(shared),
        "k": np.tensordot(right, keys, 1),
        "v": np.tensordot(right, values, 1),
    }
    if target.query_latent_dim is not None:
        queries = np.concatenate([made["q"], made["q_rotary"]], axis=-1)
        down, up = _best(queries.reshape(len(queries), -1), target.query_latent_dim, root)
        made |= {"q_down": down, "q": np.tensordot(up, made["q"], 1)}
        made["q_rotary"] = np.tensordot(up, made["q_rotary"], 1)
    return {**{name: a for name, a in w.items() if name not in made}, **made}


def _fitted_output(
    w: Weights, target: Layout, call: _Inputs, expected: Floats
) -> dict[str, Floats]:
    """W_O (and b_O) with the least ||heads W_O - expected||, kept near the W_O that is there."""
    _, heads = call.run(w, target)
    rows = heads.reshape(-1, heads.shape[2] * heads.shape[3])
    before = w["o"].reshape(rows.shape[1], -1)
    if "o_bias" in w:
        rows = np.pad(rows, [(0, 0), (0, 1)], constant_values=1)
        before = np.vstack([before, w["o_bias"]])
    moments = rows.T @ rows
    ridge = RIDGE * np.trace(moments) / len(moments) * np.eye(len(moments))
    missing = rows.T @ (expected.reshape(len(rows), -1) - rows @ before)
    after = before + np.linalg.solve(moments + ridge, missing)
    size = w["o"].size // before.shape[1]
    made = {"o": after[:size].reshape(w["o"].shape)}
    return made | ({"o_bias": after[size]} if "o_bias" in w else {})


@dataclasses.dataclass(frozen=True)
class ModelApproximation:
    """A model with other heads that computes nearly the same.

    Attributes:
      config, params: of the new model.
      approximations: method and error of each parameter group of attention, on its own inputs in
        the model as it was.
      losses: mean cross-entropy of the next token in nats on `tokens`, before and after; None
        without tokens or where the model is no decoder with an LM head.
      logits_error: as `output_difference`, on `tokens` or on random ones.
    """

    config: ModelConfig
    params: PyTree
    approximations: tuple[tuple[str, float], ...]
    losses: tuple[float, float] | None
    logits_error: float


def approximate_model(
    config: ModelConfig,
    params: PyTree,
    *,
    heads: Layout,
    tokens: Int[Array | np.ndarray, "B T"] | Float[Array | np.ndarray, "B H W C"] | None = None,
    fit: bool = True,
    key: Array | None = None,
) -> ModelApproximation:
    """The model with other heads, every parameter group of attention by `approximate`.

    Args:
      config, params: a decoder or an encoder with one layer type.
      heads: the heads of the new model, without a width.
      tokens: ids [B, T] without padding, or images; their activations are the inputs to which each
        group is fitted, and on which errors and losses are measured. None: weights alone, random
        inputs.
      fit: False takes the weights alone and measures on `tokens`.
      key: as in `approximate`.

    Raises:
      ValueError: a model whose attention is not that of its heads alone: several layer types, two
        stacks, shared keys and values, deltas, windows, relative positions,
        `attention.position_scale`, or different numbers in `attention.layer_scales`.

    >>> config = ModelConfig(width=8, num_layers=1, heads=Standard(num_heads=4))
    >>> tokens = jax.random.randint(jax.random.key(1), (4, 16), 0, 9)
    >>> params = jax.jit(config.build().init)(jax.random.key(0), tokens)["params"]
    >>> heads = Standard(num_heads=4, num_kv_heads=1)
    >>> found = approximate_model(config, params, heads=heads, tokens=tokens)
    >>> found.params["layers"]["attention"]["k"].shape, len(found.losses)
    ((1, 8, 1, 2), 2)
    """
    params = check_params(config, params)
    scale = _score_scale(config)
    key = jax.random.key(0) if key is None else key
    to = dataclasses.replace(config, heads=heads)
    group, names = params["layers"]["attention"], list(config.layout.shapes)
    # Scores of all layers are scaled by the same number: as if the heads did it.
    layout, target = (
        dataclasses.replace(one, scale=scale * one.score_scale)
        for one in (config.layout, to.layout)
    )
    ids = jnp.asarray(random_inputs(config, key) if tokens is None else tokens)
    inputs = config.build().apply({"params": params}, ids, capture=("attention_in",))
    inputs = np.asarray(inputs.captured["attention_in"], np.float64)
    found = []
    for g in range(config.plan.num_groups["attention"]):
        layers = [i for i, one in enumerate(config.plan.indices("attention")) if one == g]
        found.append(
            approximate(
                {n: group[n][g] for n in names}, layout, target,
                None if tokens is None else inputs[layers].reshape(-1, *inputs.shape[2:]),
                rotary=config.positions if isinstance(config.positions, Rotary) else False,
                is_causal=config.kind == "decoder", fit=fit, key=key,
            )
        )  # fmt: skip
    attention = with_heads(group, config.layout, [one.params for one in found])
    made = {**params, "layers": {**params["layers"], "attention": attention}}

    def loss(config: ModelConfig, params: PyTree) -> float:
        logits = config.build().apply({"params": params}, ids).logits[:, :-1]
        logs = jax.nn.log_softmax(logits.astype(jnp.float32))
        return float(-jnp.mean(jnp.take_along_axis(logs, ids[:, 1:, None], axis=-1)))

    losses = None
    if tokens is not None and config.kind == "decoder" and config.output.kind != "none":
        losses = loss(config, params), loss(to, made)
    error = output_difference((config, params), (to, made), ids)
    return ModelApproximation(
        to, made, tuple((one.method, one.error) for one in found), losses, error
    )


def _score_scale(config: ModelConfig) -> float:
    """What `attention.layer_scales` multiplies the scores of every layer by.

    Raises:
      ValueError: attention is not that of its heads alone.
    """
    alone = config.positions.name not in ("relative", "alibi")
    one_stack = not (config.layer_types or config.encoder or {"kv", "delta"} & set(config.plan))
    window, grows = config.attention.window, config.attention.position_scale
    scale, *others = {*(config.attention.layer_scales or (1.0,))}
    if not (alone and one_stack) or (window, grows) != (None, None) or others:
        raise ValueError(
            "approximate_model takes models of one layer type and one stack, without shared keys, "
            "deltas, a window, relative positions, attention.position_scale and different numbers "
            "in attention.layer_scales"
        )
    return scale
