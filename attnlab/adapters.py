"""Flax's own attention modules with attnlab inside, and their weights as weights of a `HeadSpec`.

Nothing here imports Flax: Linen and NNX call `attention_fn` and hand over plain trees.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from attnlab.attention import dot_product_attention
from attnlab.heads.old import beside
from attnlab.heads.old.maps import Weights
from attnlab.heads.old.spec import HeadSpec
from attnlab.tap import Tap

FLAX_NAMES = {"query": "q", "key": "k", "value": "v", "out": "o"}
FLAX_NORMS = {"query_ln": "q_norm", "key_ln": "k_norm"}


def attention_fn(
    query: Float[Array, "*B T N H"],
    key: Float[Array, "*B S K H"],
    value: Float[Array, "*B S Kv V"],
    bias: Any = None,
    mask: Any = None,
    *,
    broadcast_dropout: bool = True,
    dropout_rng: Any = None,
    dropout_rate: float = 0.0,
    deterministic: bool = False,
    dtype: Any = None,
    precision: Any = None,
    module: Any = None,
    force_fp32_for_softmax: bool = True,
    is_causal: bool = False,
    qk_attn_weights_einsum: Any = None,
    attn_weights_value_einsum: Any = None,
    input_positions: Any = None,
    scale: float | None = None,
    logits_soft_cap: float | None = None,
    implementation: str | None = None,
) -> Float[Array, "*B T N V"]:
    """`dot_product_attention` under the keywords of Flax: the plug of Flax's attention modules.

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
      is_causal: query t sees keys 0..t.

    Raises: TypeError for a mask that is not boolean. Flax makes one of float32 itself where it
      decodes (one query), so there zeros and ones are taken; other numbers are refused, and under
      `jit` turn the output into NaN. ValueError for what attnlab has no equal of (einsum classes,
      `input_positions`) and for dropout without a key.

    >>> x = jnp.ones((1, 3, 2, 4))
    >>> attention_fn(x, x, x, mask=jnp.tri(3, dtype=bool)).shape
    (1, 3, 2, 4)
    """
    refused = {
        "qk_attn_weights_einsum": "build the module without einsum classes",
        "attn_weights_value_einsum": "build the module without einsum classes",
        "input_positions": "rotate q and k with multi_head_attention(rotary=...)",
    }
    given = (qk_attn_weights_einsum, attn_weights_value_einsum, input_positions)
    for (name, way_out), thing in zip(refused.items(), given, strict=True):
        if thing is not None:
            raise ValueError(f"attention_fn takes no {name}; {way_out}")
    drops = dropout_rate > 0 and not deterministic
    if drops and dropout_rng is None:
        raise ValueError(f"dropout_rate={dropout_rate} needs a dropout_rng or deterministic=True")
    dtype = dtype or jnp.result_type(query, key, value)
    batch, *batches = (a.shape[:-3] for a in (query, key, value))
    if batches != [batch, batch]:
        raise ValueError(f"query, key and value have batch axes {batch}, {batches}; make them one")
    query, key, value = (a.astype(dtype).reshape(-1, *a.shape[-3:]) for a in (query, key, value))
    bias, mask = (None if a is None else jnp.asarray(a) for a in (bias, mask))
    mask, holds = _boolean(mask, query.shape[1])
    looks = module is not None

    def attend(q, k, v, bias, mask, key):
        tap = Tap(("probs",)) if looks else None
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

    if drops and broadcast_dropout:
        attend = _one_dropout_mask(attend)
    bias, mask = _one_batch(bias, batch), _one_batch(mask, batch)
    key_or_none = dropout_rng if drops else None
    out, probs = _at_precision(attend, precision)(query, key, value, bias, mask, key_or_none)
    if looks:
        # Linen's collection, and the name that NNX gives `nnx.Intermediate`.
        module.sow("intermediates", "attention_weights", probs.reshape(*batch, *probs.shape[1:]))
    out = out if holds is True else jnp.where(holds, out, jnp.nan)
    return out.reshape(*batch, *out.shape[1:])


def heads_from_linen(params: Mapping[str, Any]) -> tuple[Weights, HeadSpec]:
    """(weights, spec) with the output of `flax.linen.MultiHeadDotProductAttention`.

    `params` is the module's own tree {query, key, value, out: {kernel, bias}}, with
    {query_ln, key_ln: {scale}} where `normalize_qk` was set. Kernels carry over as they are:
    [D, N, H] and [N, H, O].

    Raises: ValueError for a tree that is something else.

    >>> tree = {n: {"kernel": jnp.ones((6, 2, 4))} for n in ("query", "key", "value")}
    >>> w, spec = heads_from_linen(tree | {"out": {"kernel": jnp.ones((2, 4, 6))}})
    >>> w["q"].shape, spec.num_heads, spec.head_dim
    ((6, 2, 4), 2, 4)
    """
    leaves = _leaves(params)
    w: Weights = {}
    for leaf, names, suffix in (
        ("kernel", FLAX_NAMES, ""),
        ("bias", FLAX_NAMES, "_bias"),
        ("scale", FLAX_NORMS, ""),
    ):
        w |= {names[n] + suffix: leaves[n, leaf] for n in names if (n, leaf) in leaves}
    shapes = {name: a.shape for name, a in w.items()}
    if {len(shapes[name]) for name in "qkvo"} != {3}:
        raise ValueError(
            f"kernels of shapes {shapes} are not those of one module; "
            "jax.tree.map(lambda a: a[i], params) takes one of a stack"
        )
    (width, n, h), (key_width, k, _), (value_width, *_) = (shapes[name] for name in "qkv")
    out_width = shapes["o"][-1]
    spec = HeadSpec(
        "standard",
        width=width,
        num_heads=n,
        num_kv_heads=None if k == n else k,
        head_dim=h,
        key_width=None if key_width == width else key_width,
        value_width=None if value_width == width else value_width,
        out_width=None if out_width == width else out_width,
        biases="".join(c for c in "qkvo" if f"{c}_bias" in w),
        qk_norm="layer" if "q_norm" in w else None,
    )
    if shapes != spec.shapes:
        raise ValueError(f"shapes {shapes} do not fit together; expected {spec.shapes}")
    return w, spec


def heads_from_nnx(state: Mapping[str, Any]) -> tuple[Weights, HeadSpec]:
    """(weights, spec) with the output of `nnx.MultiHeadAttention`, from `nnx.state(module)`.

    Grouped heads (`num_kv_heads`) carry over; random streams, caches and sown values in the state
    are left out.

    Raises: ValueError for a state that is something else.
    """
    if not isinstance(state, Mapping):
        raise ValueError(f"expected nnx.state(module), not {type(state).__name__}")
    other = {"rngs", "cached_key", "cached_value", "cache_index", "attention_weights"}
    return heads_from_linen({n: state[n] for n in state if n not in other})


def heads_to_linen(w: Weights, spec: HeadSpec) -> dict[str, dict[str, Array]]:
    """The parameters of the Flax module that computes the same, as a tree of plain arrays.

    The module is `MultiHeadDotProductAttention(num_heads=N, qkv_features=N*H, out_features=O,
    use_bias=bool(spec.biases), normalize_qk=bool(spec.qk_norm))`; `nnx.update(module, tree)` puts
    the tree into an `nnx.MultiHeadAttention` of these sizes, which also takes grouped heads.
    Flax has all four biases or none: missing ones are zeros.

    Raises: ValueError for what Flax's module cannot be: another layout than "standard" or "wide",
      V != H, a scale of its own, no output map, "rms" norms.

    >>> import jax
    >>> from attnlab.heads.old import init_heads
    >>> spec = HeadSpec("standard", width=6, num_heads=2)
    >>> tree = heads_to_linen(init_heads(jax.random.key(0), spec), spec)
    >>> tree["query"]["kernel"].shape, tree["out"]["kernel"].shape
    ((6, 2, 3), (2, 3, 6))
    """
    s = spec.sizes
    reasons = {
        f"layout {spec.layout!r}": spec.layout not in ("standard", "wide"),
        f"value_dim {s['V']} beside head_dim {s['H']}": s["V"] != s["H"],
        f"scale {spec.scale}": spec.scale not in (None, s["H"] ** -0.5),
        "output=False": not spec.output,
        f"qk_norm {spec.qk_norm!r}": spec.qk_norm not in (None, "layer"),
        beside.told(spec): bool(beside.told(spec)),
    }
    for what, holds in reasons.items():
        if holds:
            raise ValueError(
                f"Flax's attention module has no {what}; keep these weights in "
                "attnlab.MultiHeadAttention (nnx.bridge.ToNNX makes it an NNX module)"
            )
    tree = {name: {"kernel": w[ours]} for name, ours in FLAX_NAMES.items()}
    for name, ours in FLAX_NAMES.items():
        if spec.biases:
            shape = tuple(s[a] for a in spec.maps[ours].makes)
            zeros = jnp.zeros(shape, w[ours].dtype)
            tree[name]["bias"] = w.get(f"{ours}_bias", zeros)
    for name, ours in FLAX_NORMS.items():
        if spec.qk_norm:
            tree[name] = {"scale": w[ours]}
    return tree


def _leaves(tree: Mapping[str, Any]) -> dict[tuple[str, str], Array]:
    """(module, leaf) -> array, out of whatever box Linen or NNX keep it in."""
    boxes = {
        (name, leaf): jax.tree.leaves(box)
        for name, part in tree.items()
        for leaf, box in (part.items() if isinstance(part, Mapping) else [("", part)])
    }
    needed = {(name, "kernel") for name in FLAX_NAMES}
    known = needed | {(n, "bias") for n in FLAX_NAMES} | {(n, "scale") for n in FLAX_NORMS}
    found = {path: arrays for path, arrays in boxes.items() if arrays}
    if not needed <= set(found) <= known or any(len(a) > 1 for a in found.values()):
        show = lambda paths: ", ".join(sorted("/".join(p).rstrip("/") for p in paths)) or "nothing"
        raise ValueError(
            f"not the parameters of one attention module of Flax: found {show(found)}; expected "
            f"{show(needed)}, and maybe {show(known - needed)}"
        )
    return {path: arrays[0] for path, arrays in found.items()}


def _boolean(mask: Any, num_queries: int) -> tuple[Array | None, Any]:
    """(boolean mask, whether it was one of zeros and ones)."""
    if mask is None or mask.dtype == jnp.bool_:
        return mask, True
    error = TypeError(
        f"mask must be boolean (True = may attend), not {mask.dtype}, which is the default of "
        "Flax's functions: nn.make_causal_mask(x, dtype=bool), nn.make_attention_mask(..., "
        "dtype=bool), nn.combine_masks(..., dtype=bool); numbers that are added to the scores "
        "are a bias"
    )
    holds = jnp.all((mask == 0) | (mask == 1))
    if num_queries > 1 or (not isinstance(holds, jax.core.Tracer) and not holds):
        raise error
    return mask == 1, holds


def _one_batch(a: Any, batch: tuple[int, ...]) -> Any:
    """A mask or bias for [*batch] as one for [B]; without batch axes of its own as it is."""
    if a is None or a.ndim <= 3:
        return a
    return jnp.broadcast_to(a, (*batch, *a.shape[-3:])).reshape(-1, *a.shape[-3:])


def _one_dropout_mask(attend: Callable) -> Callable:
    """`attend` for one head of one row at a time: from one key, all draw the same dropout mask."""

    def head(q, k, v, bias, mask, key):
        out, probs = attend(q[:, None], k[:, None], v[:, None], bias, mask, key)
        return out[:, 0], None if probs is None else probs[0]

    def rows(q, k, v, bias, mask, key):
        shape = q.shape[0], q.shape[2], q.shape[1], k.shape[1]
        k, v = (jnp.repeat(a, q.shape[2] // a.shape[2], axis=2) for a in (k, v))
        bias, mask = (None if a is None else jnp.broadcast_to(a, shape) for a in (bias, mask))
        heads = jax.vmap(head, (1, 1, 1, 0, 0, None), (1, 0))
        return jax.vmap(heads, (0, 0, 0, 0, 0, None))(q, k, v, bias, mask, key)

    return rows


def _at_precision(attend: Callable, precision: Any) -> Callable:
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
    def run(*call):
        with jax.default_matmul_precision(name):
            return attend(*call)

    def forward(*call):
        with jax.default_matmul_precision(name):
            return jax.vjp(attend, *call)

    def backward(pull, cotangents):
        with jax.default_matmul_precision(name):
            return pull(cotangents)

    run.defvjp(forward, backward)
    return run
