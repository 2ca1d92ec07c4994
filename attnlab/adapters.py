"""attnlab in Flax's attention modules, and conversion of their weights to a layout and back.

Nothing here imports Flax: Linen and NNX call `attention_fn` and hand over plain trees.
"""

from collections.abc import Callable, Mapping
from typing import Protocol, TypeAlias, runtime_checkable

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Array, Float

from attnlab.attention import dot_product_attention
from attnlab.heads import HeadNorm, Params, Standard, weight_shapes
from attnlab.heads.layout import Bias
from attnlab.tap import Tap

__all__ = ["attention_fn", "heads_from_linen", "heads_from_nnx", "heads_to_linen"]

FLAX_NAMES: dict[str, Bias] = {"query": "q", "key": "k", "value": "v", "out": "o"}
FLAX_NORMS = {"query_ln": "q_norm", "key_ln": "k_norm"}
FLAX_EPS = 1e-6
"""Of these norms."""

Precision: TypeAlias = (
    str | jax.lax.Precision | jax.lax.DotAlgorithmPreset | tuple["Precision", ...] | None
)
Tree: TypeAlias = Mapping[str, "Tree | Array"]
"""Parameters as Linen and NNX hold them: arrays, or boxes around arrays, in mappings."""
Attend: TypeAlias = Callable[
    [Array, Array, Array, Array | None, Array | None, Array | None], tuple[Array, Array | None]
]
"""(query, key, value, bias, mask, dropout key) -> (output, probabilities if requested)."""
Pullback: TypeAlias = Callable[[object], tuple[object, ...]]
"""Cotangents of the outputs -> cotangents of the inputs."""


def __dir__() -> list[str]:
    return sorted(__all__)


@runtime_checkable
class _Sows(Protocol):
    """A Flax module, as far as `attention_fn` uses it."""

    def sow(self, col: str, name: str, value: Array) -> object: ...


def attention_fn(
    query: Float[Array, "*B T N H"],
    key: Float[Array, "*B S K H"],
    value: Float[Array, "*B S Kv V"],
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    *,
    broadcast_dropout: bool = True,
    dropout_rng: Array | None = None,
    dropout_rate: float = 0.0,
    deterministic: bool = False,
    dtype: DTypeLike | None = None,
    precision: Precision = None,
    module: _Sows | None = None,
    force_fp32_for_softmax: bool = True,
    is_causal: bool = False,
    qk_attn_weights_einsum: object = None,
    attn_weights_value_einsum: object = None,
    input_positions: object = None,
    scale: float | None = None,
    logits_soft_cap: float | None = None,
    implementation: str | None = None,
) -> Float[Array, "*B T N V"]:
    """`dot_product_attention` with the signature of Flax, as `attention_fn` of its modules.

    `nn.MultiHeadDotProductAttention(8, attention_fn=attention_fn)` in Linen,
    `nnx.MultiHeadAttention(8, 64, attention_fn=attention_fn, decode=False, rngs=rngs)` in NNX. The
    last three keywords are attnlab's and are set once, with
    `functools.partial(attention_fn, implementation="dense")`.

    Args:
      query, key, value, bias: as in `dot_product_attention`, with any number of batch axes.
      mask: boolean, True = may attend, broadcastable to [B, N, T, S].
      broadcast_dropout: one dropout mask for all batch rows and heads (Flax's default).
      dropout_rng, dropout_rate, deterministic: dropout on the probabilities.
      dtype: of the computation and the result; None is the inputs' common dtype.
      precision: of the matrix products, as in `jax.lax.dot`; a pair must hold the same twice.
        Where it is set, derivatives are reverse-mode only.
      module: the Flax module that gets the probabilities (before dropout, float32 at least) as
        "attention_weights" in "intermediates". They change no bit of the output.
      force_fp32_for_softmax: has no effect, the softmax always runs in float32 at least.
      is_causal: query t attends to keys 0..t; not for decoding.

    Raises:
      TypeError: a mask that is not boolean. Flax makes one of float32 itself where it decodes (one
        query), so there zeros and ones are taken; other numbers are refused, and under `jit` turn
        the output into NaN.
      ValueError: what attnlab has no equal of (einsum classes, `input_positions`), dropout without
        a key, or `is_causal` in a decoding step, whose one query is not the first.

    >>> x = jnp.ones((1, 3, 2, 4))
    >>> attention_fn(x, x, x, mask=jnp.tri(3, dtype=bool)).shape
    (1, 3, 2, 4)
    """
    _check_refused(
        qk_attn_weights_einsum=qk_attn_weights_einsum,
        attn_weights_value_einsum=attn_weights_value_einsum,
        input_positions=input_positions,
    )
    if is_causal and mask is not None and query.shape[-3] == 1 < key.shape[-3]:
        raise ValueError(
            f"is_causal with one query and a mask of {key.shape[-3]} keys hides all keys but the "
            "first; with decode=True leave is_causal out: the cache's mask hides what is not "
            "written yet"
        )
    drops = dropout_rate > 0 and not deterministic
    if drops and dropout_rng is None:
        raise ValueError(f"dropout_rate={dropout_rate} needs a dropout_rng or deterministic=True")
    dtype = dtype or jnp.result_type(query, key, value)
    batch, *batches = (a.shape[:-3] for a in (query, key, value))
    if batches != [batch, batch]:
        raise ValueError(f"query, key and value have batch axes {batch}, {batches}; make them one")
    query, key, value = (a.astype(dtype).reshape(-1, *a.shape[-3:]) for a in (query, key, value))
    bool_mask, is_valid = _boolean(None if mask is None else jnp.asarray(mask), query.shape[1])

    def attend(
        q: Array, k: Array, v: Array, bias: Array | None, mask: Array | None, key: Array | None
    ) -> tuple[Array, Array | None]:
        tap = None if module is None else Tap(("probs",))
        out = dot_product_attention(
            q,
            k,
            v,
            bias,
            mask,
            scale=scale,
            is_causal=is_causal,
            logits_soft_cap=logits_soft_cap,
            dropout_rate=dropout_rate if drops else 0.0,
            dropout_key=key,
            implementation=implementation,
            tap=tap,
        )
        return out, None if tap is None else tap.captured["probs"]

    run = _at_precision(
        _one_dropout_mask(attend) if drops and broadcast_dropout else attend, precision
    )
    bias = _one_batch(None if bias is None else jnp.asarray(bias), batch)
    dropout_key = dropout_rng if drops else None
    out, probs = run(query, key, value, bias, _one_batch(bool_mask, batch), dropout_key)
    if module is not None and probs is not None:
        # Linen's collection, and the name that NNX gives `nnx.Intermediate`.
        module.sow("intermediates", "attention_weights", probs.reshape(*batch, *probs.shape[1:]))
    out = out if is_valid is True else jnp.where(is_valid, out, jnp.nan)
    return out.reshape(*batch, *out.shape[1:])


def _check_refused(**options: object) -> None:
    """Raises ValueError for keywords of Flax without an equivalent in attnlab."""
    alternatives = {
        "qk_attn_weights_einsum": "build the module without einsum classes",
        "attn_weights_value_einsum": "build the module without einsum classes",
        "input_positions": "rotate q and k with multi_head_attention(rotary=...)",
    }
    for name, value in options.items():
        if value is not None:
            raise ValueError(f"attention_fn takes no {name}; {alternatives[name]}")


def heads_from_linen(params: Tree) -> tuple[dict[str, Array], Standard]:
    """(params, layout) with the output of `flax.linen.MultiHeadDotProductAttention`.

    Kernels carry over as they are: [D, N, H] and [N, H, O].

    Args:
      params: the module's own tree {query, key, value, out: {kernel, bias}}, with
        {query_ln, key_ln: {scale}} where `normalize_qk` was set.

    Raises:
      ValueError: a tree that is something else.

    >>> tree = {n: {"kernel": jnp.ones((6, 2, 4))} for n in ("query", "key", "value")}
    >>> w, layout = heads_from_linen(tree | {"out": {"kernel": jnp.ones((2, 4, 6))}})
    >>> w["q"].shape, layout
    ((6, 2, 4), Standard(width=6, num_heads=2, head_dim=4))
    """
    leaves = _leaves(params)
    w: dict[str, Array] = {}
    for names, leaf, suffix in ((FLAX_NAMES, "kernel", ""), (FLAX_NAMES, "bias", "_bias"),
                                (FLAX_NORMS, "scale", "")):  # fmt: skip
        w |= {ours + suffix: leaves[n, leaf] for n, ours in names.items() if (n, leaf) in leaves}
    shapes = {name: a.shape for name, a in w.items()}
    if {len(shapes[name]) for name in "qkvo"} != {3}:
        raise ValueError(
            f"kernels of shapes {shapes} are not those of one module; "
            "jax.tree.map(lambda a: a[i], params) takes one of a stack"
        )
    (width, n, h), (key_width, k, _), (value_width, *_) = (shapes[name] for name in "qkv")
    out_width = shapes["o"][-1]
    layout = Standard(
        width=width,
        num_heads=n,
        num_kv_heads=None if k == n else k,
        head_dim=h,
        key_width=None if key_width == width else key_width,
        value_width=None if value_width == width else value_width,
        out_width=None if out_width == width else out_width,
        biases=tuple(name for name in FLAX_NAMES.values() if f"{name}_bias" in w),
        qk_norm=HeadNorm("layer") if "q_norm" in w else None,
    )
    if shapes != weight_shapes(layout):
        raise ValueError(f"shapes {shapes} do not fit together; expected {weight_shapes(layout)}")
    return w, layout


def heads_from_nnx(state: Tree) -> tuple[dict[str, Array], Standard]:
    """(params, layout) with the output of `nnx.MultiHeadAttention`, from `nnx.state(module)`.

    Grouped heads (`num_kv_heads`) carry over; random streams, caches and sown values in the state
    are left out.

    Raises:
      ValueError: a state that is something else.

    >>> from flax import nnx
    >>> module = nnx.MultiHeadAttention(2, in_features=8, decode=False, rngs=nnx.Rngs(0))
    >>> heads_from_nnx(nnx.state(module))[1]
    Standard(width=8, num_heads=2, biases=('q', 'k', 'v', 'o'), head_dim=4)
    """
    if not isinstance(state, Mapping):
        raise ValueError(f"expected nnx.state(module), not {type(state).__name__}")
    other = {"rngs", "cached_key", "cached_value", "cache_index", "attention_weights"}
    return heads_from_linen({n: state[n] for n in state if n not in other})


def heads_to_linen(params: Params, layout: Standard) -> dict[str, dict[str, Array]]:
    """The parameters of the Flax module that computes the same, as a tree of plain arrays.

    The module is `MultiHeadDotProductAttention(num_heads=N, qkv_features=N*H, out_features=O,
    use_bias=bool(layout.biases), normalize_qk=layout.qk_norm is not None)`; `nnx.update(module,
    tree)` puts the tree into an `nnx.MultiHeadAttention` of these sizes, which also takes grouped
    heads. Flax has all four biases or none: missing ones are zeros.

    Raises:
      ValueError: Flax's module cannot be this: another layout than `Standard` or `Wide`, V != H,
        a scale of its own, no output projection, RMS norms, another epsilon, ties or extras.

    >>> from attnlab.heads import init
    >>> layout = Standard(width=6, num_heads=2)
    >>> tree = heads_to_linen(init(jax.random.key(0), layout), layout)
    >>> tree["query"]["kernel"].shape, tree["out"]["kernel"].shape
    ((6, 2, 3), (2, 3, 6))
    """
    _check_linen_has(layout)
    weights = layout.all_weights
    tree = {name: {"kernel": jnp.asarray(params[ours])} for name, ours in FLAX_NAMES.items()}
    for name, ours in FLAX_NAMES.items():
        if layout.biases:
            zeros = jnp.zeros(layout.sizes(weights[ours].bias().axes), tree[name]["kernel"].dtype)
            tree[name]["bias"] = jnp.asarray(params.get(f"{ours}_bias", zeros))
    for name, ours_norm in FLAX_NORMS.items():
        if layout.qk_norm is not None:
            tree[name] = {"scale": jnp.asarray(params[ours_norm])}
    return tree


def _check_linen_has(layout: Standard) -> None:
    """Raises ValueError for options that Flax's module does not have."""
    if layout.name not in ("standard", "wide"):
        problem = f"layout {layout.name!r}"
    elif layout.size("value_dim") != layout.size("head_dim"):
        problem = f"value_dim {layout.size('value_dim')} beside head_dim {layout.size('head_dim')}"
    elif layout.score_scale != layout.size("head_dim") ** -0.5:
        problem = f"scale {layout.scale}"
    elif not layout.output_projection:
        problem = "output_projection=False"
    elif layout.qk_norm is not None and layout.qk_norm != HeadNorm("layer"):
        problem = f"qk_norm {layout.qk_norm}"
    elif layout.qk_norm is not None and layout.norm_eps != FLAX_EPS:
        problem = f"norm_eps {layout.norm_eps}"
    elif layout.tie:
        problem = f"tie={layout.tie!r}"
    elif layout.extras:
        problem = f"extra {layout.extras[0].name!r}"
    else:
        return
    raise ValueError(
        f"Flax's attention module has no {problem}; keep these weights in "
        "attnlab.MultiHeadAttention (nnx.bridge.ToNNX makes it an NNX module)"
    )


def _leaves(tree: Tree) -> dict[tuple[str, str], Array]:
    """(module, leaf) -> array, unboxed from the containers of Linen or NNX."""
    if not isinstance(tree, Mapping):
        raise ValueError(
            f"not the parameters of one attention module of Flax: a {type(tree).__name__}; give "
            "the module's own tree {query, key, value, out}"
        )
    boxes: dict[tuple[str, str], list[Array]] = {}
    for name, part in tree.items():
        for leaf, box in part.items() if isinstance(part, Mapping) else [("", part)]:
            boxes[name, leaf] = jax.tree.leaves(box)
    needed = {(name, "kernel") for name in FLAX_NAMES}
    known = needed | {(n, "bias") for n in FLAX_NAMES} | {(n, "scale") for n in FLAX_NORMS}
    found = {path: arrays for path, arrays in boxes.items() if arrays}
    if not needed <= set(found) <= known or any(len(a) > 1 for a in found.values()):
        raise ValueError(
            f"not the parameters of one attention module of Flax: found {_names(set(found))}; "
            f"expected {_names(needed)}, and maybe {_names(known - needed)}"
        )
    return {path: arrays[0] for path, arrays in found.items()}


def _names(paths: set[tuple[str, str]]) -> str:
    return ", ".join(sorted("/".join(p).rstrip("/") for p in paths)) or "nothing"


def _boolean(mask: Array | None, num_queries: int) -> tuple[Array | None, Array | bool]:
    """(boolean mask, was it one of zeros and ones?)."""
    if mask is None or mask.dtype == jnp.bool_:
        return mask, True
    error = TypeError(
        f"mask must be boolean (True = may attend), not {mask.dtype}, which is the default of "
        "Flax's functions: nn.make_causal_mask(x, dtype=bool), nn.make_attention_mask(..., "
        "dtype=bool), nn.combine_masks(..., dtype=bool); numbers that are added to the scores "
        "are a bias"
    )
    is_valid = jnp.all((mask == 0) | (mask == 1))
    if num_queries > 1 or (not isinstance(is_valid, jax.core.Tracer) and not is_valid):
        raise error
    return mask == 1, is_valid


def _one_batch(a: Array | None, batch: tuple[int, ...]) -> Array | None:
    """A mask or bias for [*batch] as one for [B]; without batch axes of its own as it is."""
    if a is None or a.ndim <= 3:
        return a
    return jnp.broadcast_to(a, (*batch, *a.shape[-3:])).reshape(-1, *a.shape[-3:])


def _one_dropout_mask(attend: Attend) -> Attend:
    """`attend` for one head of one row at a time: from one key, all draw the same dropout mask."""

    def head(
        q: Array, k: Array, v: Array, bias: Array | None, mask: Array | None, key: Array | None
    ) -> tuple[Array, Array | None]:
        out, probs = attend(q[:, None], k[:, None], v[:, None], bias, mask, key)
        return out[:, 0], None if probs is None else probs[0]

    def batched_attend(
        q: Array, k: Array, v: Array, bias: Array | None, mask: Array | None, key: Array | None
    ) -> tuple[Array, Array | None]:
        shape = q.shape[0], q.shape[2], q.shape[1], k.shape[1]
        k, v = (jnp.repeat(a, q.shape[2] // a.shape[2], axis=2) for a in (k, v))
        bias, mask = (None if a is None else jnp.broadcast_to(a, shape) for a in (bias, mask))
        heads = jax.vmap(head, (1, 1, 1, 0, 0, None), (1, 0))
        batched: Attend = jax.vmap(heads, (0, 0, 0, 0, 0, None))
        return batched(q, k, v, bias, mask, key)

    return batched_attend


def _at_precision(attend: Attend, precision: Precision) -> Attend:
    """`attend` with all its matrix products, those of the gradient too, at this precision."""
    if isinstance(precision, tuple) and precision[0] == precision[-1]:
        precision = precision[0]
    if isinstance(precision, str):
        precision = jax.lax.Precision(precision)
    if precision is None:
        return attend
    if not isinstance(precision, jax.lax.Precision | jax.lax.DotAlgorithmPreset):
        raise ValueError(f"attention_fn takes one precision for all products, not {precision!r}")
    preset = isinstance(precision, jax.lax.DotAlgorithmPreset)
    name = precision.name if preset else precision.name.lower()

    # The backward pass of a backend may be traced when this call is long over: it has to enter
    # the context by itself.
    @jax.custom_vjp
    def run(*call: Array | None) -> tuple[Array, Array | None]:
        with jax.default_matmul_precision(name):
            return attend(*call)  # type: ignore[arg-type]  # six of them

    def forward(*call: Array | None) -> tuple[tuple[Array, Array | None], Pullback]:
        with jax.default_matmul_precision(name):
            outputs, pull = jax.vjp(attend, *call)
        return outputs, pull

    def backward(pull: Pullback, cotangents: object) -> tuple[object, ...]:
        with jax.default_matmul_precision(name):
            return pull(cotangents)

    run.defvjp(forward, backward)
    at_precision: Attend = run
    return at_precision
