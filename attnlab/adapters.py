"""attnlab in Flax's attention modules, and conversion of their weights to a layout and back.

Nothing here imports Flax: Linen and NNX call `attention_fn` and hand over plain trees.
"""

import contextlib
from collections.abc import Mapping
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Array, Float

from attnlab.attention import dot_product_attention
from attnlab.heads import HeadNorm, Params, Standard, weight_shapes
from attnlab.heads.layout import Bias, check_params
from attnlab.nested import flatten
from attnlab.tap import Tap

__all__ = ["attention_fn", "heads_from_linen", "heads_from_nnx", "heads_to_linen"]

PROJECTIONS: dict[str, Bias] = {"query": "q", "key": "k", "value": "v", "out": "o"}
PATHS = {
    **{f"{name}.kernel": weight for name, weight in PROJECTIONS.items()},
    **{f"{name}.bias": f"{weight}_bias" for name, weight in PROJECTIONS.items()},
    "query_ln.scale": "q_norm",
    "key_ln.scale": "k_norm",
}
"""submodule.parameter of Flax's modules -> weight of a layout."""
FLAX_EPS = 1e-6
"""Of these norms."""

Precision: TypeAlias = (
    str | jax.lax.Precision | jax.lax.DotAlgorithmPreset | tuple["Precision", ...] | None
)
Tree: TypeAlias = Mapping[str, "Tree | Array"]
"""Parameters as Linen and NNX hold them: arrays, or boxes around arrays, in mappings."""


def __dir__() -> list[str]:
    return sorted(__all__)


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
    module: Any = None,
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
      broadcast_dropout: has no effect: each batch row and head has a dropout mask of its own.
      dropout_rng, dropout_rate, deterministic: dropout on the probabilities.
      dtype: of the computation and the result; None is the inputs' common dtype.
      precision: of the matrix products, those of the gradient too, as in `jax.lax.dot`; a pair
        must hold the same twice.
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
    if qk_attn_weights_einsum is not None or attn_weights_value_einsum is not None:
        raise ValueError("attention_fn takes no einsum; build the module without einsum classes")
    if input_positions is not None:
        raise ValueError(
            "attention_fn takes no input_positions; rotate q and k with "
            "multi_head_attention(rotary=...)"
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
    bool_mask, is_valid = _boolean(mask, query.shape[1])
    tap = None if module is None else Tap(("probs",))
    with _at_precision(precision):
        out = dot_product_attention(
            query,
            key,
            value,
            _one_batch(bias, batch),
            _one_batch(bool_mask, batch),
            scale=scale,
            is_causal=is_causal,
            logits_soft_cap=logits_soft_cap,
            dropout_rate=dropout_rate if drops else 0.0,
            dropout_key=dropout_rng if drops else None,
            implementation=implementation,
            tap=tap,
        )
    if module is not None and tap is not None:
        # Linen's collection, and the name that NNX gives `nnx.Intermediate`.
        probs = tap.captured["probs"]
        module.sow("intermediates", "attention_weights", probs.reshape(*batch, *probs.shape[1:]))
    out = out if is_valid is True else jnp.where(is_valid, out, jnp.nan)
    return out.reshape(*batch, *out.shape[1:])


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
    w = _weights_of(params)
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
        biases=tuple(name for name in PROJECTIONS.values() if f"{name}_bias" in w),
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
        a scale of its own, no output projection, RMS norms, another epsilon, ties or extras. Or the
        parameters are not those of the layout.

    >>> from attnlab.heads import init
    >>> layout = Standard(width=6, num_heads=2)
    >>> tree = heads_to_linen(init(jax.random.key(0), layout), layout)
    >>> tree["query"]["kernel"].shape, tree["out"]["kernel"].shape
    ((6, 2, 3), (2, 3, 6))
    """
    _check_linen_has(layout)
    check_params(params, layout)
    tree: dict[str, dict[str, Array]] = {}
    for path, name in PATHS.items():
        part, leaf = path.split(".")
        if name in params:
            tree.setdefault(part, {})[leaf] = jnp.asarray(params[name])
        elif leaf == "bias" and layout.biases:
            kernel = PROJECTIONS[part]
            shape = layout.sizes(layout.all_weights[kernel].bias().axes)
            tree[part][leaf] = jnp.zeros(shape, tree[part]["kernel"].dtype)
    return tree


def _check_linen_has(layout: Standard) -> None:
    """Raises ValueError for options that Flax's module does not have."""
    problem = f"layout {layout.name!r}"
    if layout.name in ("standard", "wide"):
        head_dim, value_dim = layout.size("head_dim"), layout.size("value_dim")
        norm = layout.qk_norm
        problems = {
            f"value_dim {value_dim} beside head_dim {head_dim}": value_dim != head_dim,
            f"scale {layout.scale}": layout.score_scale != head_dim**-0.5,
            "output_projection=False": not layout.output_projection,
            f"qk_norm {norm}": norm not in (None, HeadNorm("layer")),
            f"norm_eps {layout.norm_eps}": norm is not None and layout.norm_eps != FLAX_EPS,
            f"tie={layout.tie!r}": bool(layout.tie),
            f"extra {layout.extras[0].name if layout.extras else None!r}": bool(layout.extras),
        }
        if not any(problems.values()):
            return
        problem = next(problem for problem, is_so in problems.items() if is_so)
    raise ValueError(
        f"Flax's attention module has no {problem}; keep these weights in "
        "attnlab.MultiHeadAttention (nnx.bridge.ToNNX makes it an NNX module)"
    )


def _weights_of(tree: Tree) -> dict[str, Array]:
    """The weights of one module, unboxed from the containers of Linen or NNX."""
    if not isinstance(tree, Mapping):
        raise ValueError(
            f"not the parameters of one attention module of Flax: a {type(tree).__name__}; give "
            "the module's own tree {query, key, value, out}"
        )
    found = {path: jax.tree.leaves(box) for path, box in flatten(tree).items()}
    found = {path: arrays for path, arrays in found.items() if arrays}
    needed = {f"{part}.kernel" for part in PROJECTIONS}
    if not needed <= found.keys() <= PATHS.keys() or any(len(a) > 1 for a in found.values()):
        raise ValueError(
            "not the parameters of one attention module of Flax: found "
            f"{', '.join(sorted(found)) or 'nothing'}; expected {', '.join(sorted(needed))}, and "
            "maybe biases, query_ln.scale and key_ln.scale"
        )
    return {name: found[path][0] for path, name in PATHS.items() if path in found}


def _boolean(mask: ArrayLike | None, num_queries: int) -> tuple[Array | None, Array | bool]:
    """(boolean mask, was it one of zeros and ones?)."""
    if mask is None:
        return None, True
    mask = jnp.asarray(mask)
    if mask.dtype == jnp.bool_:
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


def _one_batch(a: ArrayLike | None, batch: tuple[int, ...]) -> ArrayLike | None:
    """A mask or bias for [*batch] as one for [B]; without batch axes of its own as it is."""
    if a is None or jnp.ndim(a) <= 3:
        return a
    a = jnp.asarray(a)
    return jnp.broadcast_to(a, (*batch, *a.shape[-3:])).reshape(-1, *a.shape[-3:])


def _at_precision(precision: Precision) -> Any:
    """Matrix products inside have this precision."""
    if isinstance(precision, tuple) and precision[0] == precision[-1]:
        precision = precision[0]
    if isinstance(precision, str):
        presets = jax.lax.DotAlgorithmPreset.__members__
        precision = presets.get(precision) or jax.lax.Precision(precision)
    if precision is None:
        return contextlib.nullcontext()
    if isinstance(precision, jax.lax.DotAlgorithmPreset):
        return jax.default_matmul_precision(precision.name)
    if isinstance(precision, jax.lax.Precision):
        return jax.default_matmul_precision(precision.name.lower())
    raise ValueError(f"attention_fn takes one precision for all products, not {precision!r}")
