"""q, k, v -> output: one function, several backends, one set of rules that all of them keep.

`dot_product_attention` has the names and axes of `jax.nn.dot_product_attention` and drops in
where that stood. It settles what a mask means before any backend runs, so no backend can differ.
"""

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any, Literal, NamedTuple, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array

from attnlab.attention import masks
from attnlab.attention.blockwise import blockwise, refuse_blockwise
from attnlab.attention.call import Call, checked
from attnlab.attention.dense import Mix, Options, dense, inside
from attnlab.attention.edges import edges, refuse_edges
from attnlab.attention.fused import cudnn, refuse_cudnn, refuse_jax_nn, xla
from attnlab.attention.splash import refuse_splash, splash
from attnlab.attention.tokamax import refuse_tokamax, tokamax
from attnlab.attention.wide import refuse_wide, wide
from attnlab.observe import OF_HEADS, Edit, Look, check_names
from attnlab.remat import save_for_backward

__all__ = ["BACKENDS", "Backend", "Mix", "Options", "attend", "dot_product_attention", "explain"]


class Backend(NamedTuple):
    """One way to compute attention. `refuse` says why it cannot do a call, or returns None."""

    run: Callable[..., dict[str, Array]]
    """(q, k, v, bias, visible, options) -> {"out", and "residual" where asked}; marks what its own
    backward pass reads by `save_for_backward`, each array once"""
    refuse: Callable[..., str | None]
    """(q, k, v, bias, visible, options) -> reason or None; looks at shapes and dtypes alone"""


BACKENDS: dict[str, Backend] = {
    "dense": Backend(dense, lambda *call: None),
    "blockwise": Backend(blockwise, refuse_blockwise),
    "xla": Backend(xla, refuse_jax_nn),
    "cudnn": Backend(cudnn, refuse_cudnn),
    "edges": Backend(edges, refuse_edges),
    "tokamax": Backend(tokamax, refuse_tokamax),
    "splash": Backend(splash, refuse_splash),
    "wide": Backend(wide, refuse_wide),
}
"""Every way to run attention by its name, as in `implementation`."""


# fmt: off
@overload
def dot_product_attention(
    query: ArrayLike, key: ArrayLike, value: ArrayLike, bias: ArrayLike | None = None,
    mask: ArrayLike | masks.Edges | None = None, *, scale: Any = None, is_causal: bool = False,
    query_seq_lengths: Any = None, key_value_seq_lengths: Any = None,
    local_window_size: Any = None, logits_soft_cap: Any = None, dropout_rate: float = 0.0,
    dropout_key: Any = None, mix: Any = None, sink: Any = None,
    return_probs: Literal[False] = False, return_residual: Literal[False] = False,
    show: tuple[()] = (), edit: Edit | None = None, implementation: str | None = None,
) -> Array: ...
@overload
def dot_product_attention(
    query: ArrayLike, key: ArrayLike, value: ArrayLike, bias: ArrayLike | None = None,
    mask: ArrayLike | masks.Edges | None = None, *, scale: Any = None, is_causal: bool = False,
    query_seq_lengths: Any = None, key_value_seq_lengths: Any = None,
    local_window_size: Any = None, logits_soft_cap: Any = None, dropout_rate: float = 0.0,
    dropout_key: Any = None, mix: Any = None, sink: Any = None, return_probs: bool = False,
    return_residual: bool = False, show: Iterable[str] = (), edit: Edit | None = None,
    implementation: str | None = None,
) -> Any: ...
# fmt: on


def dot_product_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | masks.Edges | None = None,
    *,
    scale: Any = None,
    is_causal: bool = False,
    query_seq_lengths: Any = None,
    key_value_seq_lengths: Any = None,
    local_window_size: Any = None,
    logits_soft_cap: Any = None,
    dropout_rate: float = 0.0,
    dropout_key: Any = None,
    mix: Any = None,
    sink: ArrayLike | None = None,
    return_probs: bool = False,
    return_residual: bool = False,
    show: Iterable[str] = (),
    edit: Edit | None = None,
    implementation: str | None = None,
) -> Any:
    """softmax(scale q k^T + bias) v, per head (Vaswani et al. 2017, section 3.2.1).

    Args:
      query, key, value: [B, T, N, H], [B, S, K, H], [B, S, Kv, V]; B may be left out. V may
        differ from H. K and Kv each divide N: query head n uses key head n // (N/K).
      bias: added to the scores, broadcastable to [B, N, T, S].
      mask: boolean, True = may attend, broadcastable to [B, N, T, S]; or `masks.Edges`.
      scale: multiplies q k^T; None is 1/sqrt(H).
      is_causal: query t sees keys 0..t (top-left aligned where T != S, as in jax.nn).
      query_seq_lengths, key_value_seq_lengths: valid positions per batch row [B]; each works alone.
      local_window_size: (left, right): query t sees keys t-left..t+right; w means (w, w).
      logits_soft_cap: c tanh(scores / c), after scale and bias, before the mask.
      dropout_rate, dropout_key: dropout on the probabilities. One key drops the same ones in
        every backend.
      mix: two [N, M] and [M, N] matrices that mix heads before and after the softmax, either of
        them None (talking heads, Shazeer et al. 2020, arXiv 2003.02436).
      sink: broadcastable to [B, N, T, 1]: one more score of each row, whose probability goes
        nowhere, so that the others sum to less than 1. 0 adds one to the sum of the softmax.
      show: of "scores" and "probs" those to return too, as a dict (`observe.NAMES` says what each
        is). They are computed aside: asking never changes a bit of the output, nor the backend.
      edit: "scores" or "probs" -> f(value, 0), which takes the value's place. The mask still hides
        what it hides from edited scores. Only `dense` can.
      return_probs: also return the probs [B, N, T, S] themselves.
      return_residual: also return log sum exp of the scores [B, T, N], a sink included; -inf for
        empty rows without one.
      implementation: a row of `BACKENDS`; None chooses (see `explain`). `dense` alone has second
        and forward-mode derivatives.

    Returns: [B, T, N, V] in the value's dtype, or a tuple (output, probs, residual, shown) of those
      asked for. The softmax and the sums run in float32 at least. A row with nothing to attend to
      gives zeros and zero gradient. Keys and values at positions that no query of their batch row
      may see reach neither outputs nor gradients, whatever they hold (NaN, inf).

    Raises: before anything runs, one TypeError for a wrong kind (a mask that is not boolean) or
      ValueError for shapes that do not fit, a missing dropout key, or a backend that cannot do
      what is asked. It names the argument, its shape and the way out; for an unknown value to show
      or edit, the known ones.

    >>> x = jnp.ones((1, 3, 2, 4))
    >>> dot_product_attention(x, x, x, is_causal=True).shape
    (1, 3, 2, 4)
    """
    show = check_names(show, edit, INSIDE)
    look = Look((*show, "probs") if return_probs else show, edit)
    out, residual = attend(
        look,
        query,
        key,
        value,
        bias,
        mask,
        scale=scale,
        is_causal=is_causal,
        query_seq_lengths=query_seq_lengths,
        key_value_seq_lengths=key_value_seq_lengths,
        local_window_size=local_window_size,
        logits_soft_cap=logits_soft_cap,
        dropout_rate=dropout_rate,
        dropout_key=dropout_key,
        mix=mix,
        sink=sink,
        return_residual=return_residual,
        implementation=implementation,
    )
    results = [out]
    results += [look.seen["probs"]] if return_probs else []
    results += [residual] if return_residual else []
    results += [{name: look.seen[name] for name in show}] if show else []
    return tuple(results) if len(results) > 1 else out


INSIDE = {name: OF_HEADS[name] for name in ("scores", "probs")}


def attend(
    look: Look,
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | masks.Edges | None = None,
    *,
    implementation: str | None = None,
    told: dict[str, Any] | None = None,
    **options: Any,
) -> tuple[Any, Any]:
    """`dot_product_attention` for callers with a `Look`: output and residual (None if not asked).

    `told`, where given, is filled with what `explain` says of this call; a backend that cannot run
    is then told of, not refused.
    """
    edit = look.replacing(*INSIDE)
    if edit and np.ndim(query) == 3:
        edit = {n: functools.partial(_of_one_row, f) for n, f in edit.items()}
    call, batched = checked(query, key, value, bias, mask, edit=edit, **options)
    _known(implementation)
    name, why, _ = Choice(implementation, "asked for") if implementation else _choose(call)
    reason = BACKENDS[name].refuse(*call)
    if told is not None:
        told["implementation"] = _described(call, name, why)
        name = "dense"  # it was asked what would run, on a device that may not be here
    elif reason:
        raise ValueError(
            f"implementation={name!r} cannot run query {call.query.shape}, key {call.key.shape}, "
            f"value {call.value.shape}: {reason}; use implementation='dense' or None"
        )
    sees, used = call.visible.sees_and_used()
    # A zero times NaN is NaN, in the gradient too: what is hidden must not be multiplied at all.
    if used is not None:
        shown = used[:, :, None, None]
        call = _of_keys(call, lambda a: jnp.where(shown, a, 0))
    if sees is not None:
        sees = sees.swapaxes(1, 2)[..., None]
        call = call._replace(query=jnp.where(sees, call.query, 0))
    call = _of_keys(call._replace(query=save_for_backward(call.query)), save_for_backward)
    seen = BACKENDS[name].run(*call)
    if sees is not None:
        # Kernels of other libraries give a uniform mean in an empty row; ours gives zeros.
        seen["out"] = jnp.where(sees, seen["out"], 0)
    as_given = lambda a: a if batched else a[0]
    if shown := [n for n in INSIDE if n in look.show]:
        values = inside(call.query, call.key, *call[3:])
        look.seen |= {n: as_given(values[n]) for n in shown}
    out = as_given(seen["out"])
    return out, as_given(seen["residual"]) if "residual" in seen else None


def _of_keys(call: Call, f: Callable[[Array], Array]) -> Call:
    """`f` of key and value. One array stays one: a backend may read it once."""
    key = f(call.key)
    return call._replace(key=key, value=key if call.key is call.value else f(call.value))


def _of_one_row(f: Callable[[Array], Array], a: Array) -> Array:
    """For a call that came without a batch axis."""
    return f(a[0])[None]


def _described(call: Call, chosen: str, why: str) -> dict[str, str]:
    """As `explain` says."""
    return {
        n: backend.refuse(*call) or (f"chosen: {why}" if n == chosen else "could run")
        for n, backend in BACKENDS.items()
    }


def explain(
    query: Any, key: Any, value: Any, bias: Any = None, mask: Any = None, **options: Any
) -> dict[str, str]:
    """Backend -> "chosen: " and why, "could run" or the reason why it could not. A choice is
    "asked for", "measured on ..." or "not measured" on devices like this one (`CHOICES`).

    Takes the arguments of `dot_product_attention`; arrays may be `jax.ShapeDtypeStruct`s. Raises
    what that call would raise, except for a backend that was asked for and cannot run.

    >>> q, v = jnp.ones((1, 3, 2, 4)), jnp.ones((1, 3, 1, 4))
    >>> explain(q, q, v)["xla"]
    'it needs as many key heads (2) as value heads (1)'
    """
    names = inspect.signature(dot_product_attention).parameters
    if unknown := sorted(set(options) - set(names)):
        raise TypeError(f"explain: unknown keywords {unknown}; known: {', '.join(names)}")
    # No backend may depend on what is shown.
    shown, _ = options.pop("show", ()), options.pop("return_probs", None)
    look = Look(edit=options.pop("edit", None))
    check_names(shown, look.edit, INSIDE)
    told: dict[str, Any] = {}
    call = functools.partial(attend, look, told=told)
    trace(call, query=query, key=key, value=value, bias=bias, mask=mask, **options)
    return told["implementation"]


def trace(call: Callable, **given: Any) -> None:
    """Traces call(**given); arrays may be shapes alone, the rest stays as it is."""
    kinds = (jax.Array, np.ndarray, jax.ShapeDtypeStruct)
    leaves, tree = jax.tree.flatten(given)
    arrays = {i: a for i, a in enumerate(leaves) if isinstance(a, kinds)}

    def run(arrays):
        call(**jax.tree.unflatten(tree, [arrays.get(i, a) for i, a in enumerate(leaves)]))

    jax.eval_shape(run, arrays)


class Choice(NamedTuple):
    """A row of `CHOICES`."""

    backend: str
    source: str
    """Where that was measured, or that it was not."""
    beyond: int = 0
    """Bytes of scores in float32: only where there are more."""


CPU = "measured on 2 CPU cores with 1 MiB of L2 each"
NOT = "not measured"
CHOICES: dict[str, tuple[Choice, ...]] = {
    "cpu": (Choice("edges", NOT), Choice("blockwise", CPU, 16 * 2**20), Choice("dense", CPU)),
    "gpu": (
        Choice("edges", NOT),
        Choice("cudnn", NOT),
        Choice("blockwise", NOT, 2**30),
        Choice("dense", NOT),
    ),
    "tpu": (Choice("edges", NOT), Choice("blockwise", NOT, 2**30), Choice("dense", NOT)),
}
"""Device -> what implementation=None runs there: the first that can."""


def _choose(call: Call) -> Choice:
    (b, t, n, _), s = call.query.shape, call.key.shape[1]
    size = 4 * b * n * t * s
    rows = CHOICES.get(jax.default_backend(), CHOICES["tpu"])
    return next(
        row for row in rows if size > row.beyond and BACKENDS[row.backend].refuse(*call) is None
    )


def _known(name: Any) -> None:
    if name is not None and name not in tuple(BACKENDS):
        raise ValueError(f"unknown implementation {name!r}; known: {', '.join(BACKENDS)}, None")
