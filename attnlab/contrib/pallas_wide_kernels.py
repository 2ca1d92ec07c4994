"""The three programs of `wide` in Pallas: output, gradient of queries, gradient of keys or values.

A program keeps the sums of one *block* of rows and meets the other rows in *steps*. Widths are cut
into *chunks*: scores are summed over all chunks of a head, one after the other, and a program keeps
the sums of its `own` chunks alone. As many programs as a width needs stand side by side, and each
computes all scores. Of keys and values that are one array, what the first product of a step has
read is in the cache for the second one (kept in registers it drives the sums out of them).

Arrays come padded to whole blocks and chunks. Inside a program they are [rows, chunk] of one head.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from attnlab.attention.scores import lowest


class Tiling(NamedTuple):
    """Kernel calls of heads up to a width are divided into programs, and options of Triton."""

    width: int
    block: int
    step: int
    chunk: int
    own: int
    """most chunks of a program's sums"""
    warps: int
    stages: int


TILINGS = {
    2: (Tiling(256, 64, 64, 64, 4, 8, 2), Tiling(1024, 64, 32, 64, 8, 8, 2)),
    4: (Tiling(1024, 64, 32, 32, 8, 8, 2),),
}
"""Bytes of a number -> cuts; the first that is as wide as the heads is taken.

Not measured. Chosen so that Triton 3.9 (not the one inside XLA) and ptxas keep the sums in
registers on a Hopper GPU: 40 KiB of shared memory, nothing spilled up to 256 columns and in
float32, at most 110 bytes a thread at 512 in bfloat16. For an A100 the latter spills up to 4 KB.
"""


class Width(NamedTuple):
    """The width of heads in chunks."""

    chunk: int
    total: int
    own: int
    """chunks whose sums one program keeps; divides `total`"""

    @property
    def size(self) -> int:
        """Columns, with padding."""
        return self.chunk * self.total


class Kernel(NamedTuple):
    """What is known of a call before any array is."""

    tiling: Tiling
    h: Width
    v: Width
    scale: float
    bias: bool
    """Has the row that is added to the scores a gradient?"""
    interpret: bool


class Place(NamedTuple):
    """What is added to the scores, and who sees whom."""

    row: Any
    """[B or 1, N or 1, S], float32: added to all scores of a key, -inf where it is hidden"""
    ranges: Any
    """[B or 1, 2, T]: the first key that a query sees, and the one behind the last"""
    of_queries: Any
    """[B or 1, 2, T / block]: the first step of keys that a block of queries meets, and the one
    behind the last; `of_keys` the other way round"""
    of_keys: Any


def tiling_of(size: int, dtype: Any) -> Tiling:
    """Of heads that are so wide."""
    return next(t for t in TILINGS[jnp.dtype(dtype).itemsize] if size <= t.width)


def width(size: int, tiling: Tiling) -> Width:
    """As few programs side by side as can be, and as little padding.

    >>> tiling = Tiling(1024, block=64, step=32, chunk=64, own=8, warps=8, stages=2)
    >>> [tuple(width(size, tiling)) for size in (96, 320, 576, 1024)]
    [(64, 2, 2), (64, 5, 5), (64, 10, 5), (64, 16, 8)]
    """
    chunks = -(-size // tiling.chunk)
    beside = -(-chunks // tiling.own)
    own = -(-chunks // beside)
    return Width(tiling.chunk, beside * own, own)


def forward(spec: Kernel, q: Array, k: Array, v: Array | None, place: Place) -> Any:
    """Output [B, T, N, V], and of each row the largest score and 1 / the sum of exp, [B, N, T].

    v None: the values are the keys.
    """
    made = _like(q, (*q.shape[:3], spec.v.chunk * spec.v.total), k.dtype)
    number = _like(q, (q.shape[0], q.shape[2], q.shape[1]), jnp.float32)
    kernel = functools.partial(_forward, spec)
    return _over_queries(spec, kernel, spec.v, (q, k, v, place), (), (made, number, number))


def gradients(
    spec: Kernel, q: Array, k: Array, v: Array | None, place: Place, *of_rows: Array
) -> tuple[Any, ...]:
    """Those of q, k, v and, where it has one, of the row: [B, N, S].

    `of_rows`: the output's gradient, and top, share and delta [B, N, T]. v None: the gradient of
    k is that of the one array, and there is none of v.
    """
    call = q, k, v, place
    kernel = functools.partial(_of_queries, spec, v is None)
    [d_q] = _over_queries(spec, kernel, spec.h, call, of_rows, (_like(q, q.shape, q.dtype),))
    d_k, *d_row = _over_keys(spec, "k" if v is not None else "kv", call, of_rows)
    d_v = None if v is None else _over_keys(spec, "v", call, of_rows)[0]
    return d_q, d_k, d_v, d_row[0] if d_row else None


def _forward(
    spec: Kernel, q: Any, k: Any, v: Any, row: Any, ranges: Any, reach: Any, out: Any, top_out: Any,
    share_out: Any,
) -> None:  # fmt: skip
    """o = softmax(x) v with x = scale q k^T + row.

    Over the steps of keys, with the sums so far (online softmax): top' = max(top, max_s x),
    fade = exp(top - top'), p = exp(x - top'), total' = fade total + sum_s p, o' = fade o + p v.
    """
    mine, seen = pl.program_id(1), _seen(ranges)

    def step(j: Any, carry: Any) -> Any:
        sums, top, total = carry
        at = pl.ds(j * spec.tiling.step, spec.tiling.step)
        [x] = _products(spec, spec.h, (_rows(q), _rows(k, at)))
        x = _hidden(x * spec.scale + row[at][None], seen, j * spec.tiling.step, 1)
        new = jnp.maximum(top, jnp.max(x, axis=1))
        fade, p = jnp.exp(top - new), jnp.exp(x - new[:, None])
        values = _own(_rows(v, at), spec.v, mine)
        sums = _add([a * fade[:, None] for a in sums], p, values)
        return sums, new, total * fade + jnp.sum(p, axis=1)

    number: Callable[..., Any] = lambda value: jnp.full(spec.tiling.block, value, jnp.float32)
    carry = _zeros(spec, spec.v), number(lowest(jnp.float32) / 2), number(0)
    sums, top, total = lax.fori_loop(reach[0], reach[1], step, carry)
    share = jnp.where(total > 0, 1 / jnp.where(total > 0, total, 1), 0)
    _write(out, spec.v, [a * share[:, None] for a in sums])

    @pl.when(mine == 0)
    def _() -> None:
        top_out[...] = top
        share_out[...] = share


def _of_queries(
    spec: Kernel, same: bool, q: Any, k: Any, v: Any, row: Any, ranges: Any, reach: Any, d_out: Any,
    top: Any, share: Any, delta: Any, d_q: Any,
) -> None:  # fmt: skip
    """dq = scale sum_s dx k, where p = exp(x - top) share, dp = do v^T, dx = p (dp - delta)."""
    mine, seen = pl.program_id(1), _seen(ranges)
    top, share, delta = (a[...][:, None] for a in (top, share, delta))

    def step(j: Any, sums: Any) -> Any:
        at = pl.ds(j * spec.tiling.step, spec.tiling.step)
        keys = _rows(k, at)
        if same:
            [x, dp] = _products(spec, spec.h, (_rows(q), keys), (_rows(d_out), keys))
        else:
            [x] = _products(spec, spec.h, (_rows(q), keys))
            [dp] = _products(spec, spec.v, (_rows(d_out), _rows(v, at)))
        x = _hidden(x * spec.scale + row[at][None], seen, j * spec.tiling.step, 1)
        dx = jnp.exp(x - top) * share * (dp - delta)
        return _add(sums, dx, _own(keys, spec.h, mine))

    sums = lax.fori_loop(reach[0], reach[1], step, _zeros(spec, spec.h))
    _write(d_q, spec.h, [a * spec.scale for a in sums])


def _of_keys(
    spec: Kernel, of: str, q: Any, k: Any, v: Any, row: Any, ranges: Any, reach: Any, d_out: Any,
    top: Any, share: Any, delta: Any, d: Any, *d_row: Any,
) -> None:  # fmt: skip
    """`of` "k": dk = scale sum_t dx q; "v": dv = sum_t p do; "kv": both, of the one array.

    Over all query heads of a key head; the scores lie as [keys, queries]. Where dx is at hand its
    sum over the queries is the gradient of the row, of each query head.
    """
    mine, head, heads = pl.program_id(1), pl.program_id(2), q.shape[1]
    kept, group = spec.v if of == "v" else spec.h, heads // (v if of == "v" else k).shape[1]
    start = pl.program_id(0) * spec.tiling.block

    def of_head(r: Any, sums: Any) -> Any:
        n = head * group + r
        k_rows, v_rows = (_rows(a, head=lax.div(n, heads // a.shape[1])) for a in (k, v))
        of_row = row[lax.min(n, row.shape[0] - 1), :][:, None]

        def step(i: Any, carry: Any) -> Any:
            sums, d_bias = carry
            at = pl.ds(i * spec.tiling.step, spec.tiling.step)
            of_q, of_out = _rows(q, at, n), _rows(d_out, at, n)
            if of == "kv":
                [x, dp] = _products(spec, spec.h, (k_rows, of_q), (k_rows, of_out))
            else:
                [x] = _products(spec, spec.h, (k_rows, of_q))
            seen = ranges[0, at][None], ranges[1, at][None]
            x = _hidden(x * spec.scale + of_row, seen, start, 0)
            p = jnp.exp(x - top[n, at][None]) * share[n, at][None]
            if of != "k":
                sums = _add(sums, p, _own(of_out, spec.v, mine))
            if of == "v":
                return sums, d_bias
            if of == "k":
                [dp] = _products(spec, spec.v, (v_rows, of_out))
            dx = p * (dp - delta[n, at][None])
            sums = _add(sums, dx * spec.scale, _own(of_q, spec.h, mine))
            return sums, d_bias + jnp.sum(dx, axis=1)

        carry = sums, jnp.zeros(spec.tiling.block, jnp.float32)
        sums, d_bias = lax.fori_loop(reach[0], reach[1], step, carry)
        for ref in d_row:

            @pl.when(mine == 0)
            def _(ref: Any = ref) -> None:
                ref[r, :] = d_bias

        return sums

    _write(d, kept, lax.fori_loop(0, group, of_head, _zeros(spec, kept)))


Rows = Callable[[Any], Array]
"""Columns -> some rows of an array at these columns."""


def _rows(ref: Any, at: Any = slice(None), head: Any = None) -> Rows:
    return lambda columns: ref[at, columns] if head is None else ref[at, head, columns]


def _products(spec: Kernel, width: Width, *pairs: tuple[Rows, Rows]) -> Any:
    """a b^T of each pair [block, step], summed over the whole width, chunk by chunk.

    What stands in two pairs is read once.
    """

    def add(i: Any, totals: Any) -> Any:
        columns = _columns(width, i)
        read = {rows: rows(columns) for pair in pairs for rows in pair}
        return tuple(x + _dot(read[a], read[b], 1) for x, (a, b) in zip(totals, pairs, strict=True))

    nothing = jnp.zeros((spec.tiling.block, spec.tiling.step), jnp.float32)
    return lax.fori_loop(0, width.total, add, (nothing,) * len(pairs))


def _dot(a: Array, b: Array, axis: int) -> Array:
    """a b (axis 0) or a b^T (axis 1), summed in float32."""
    return lax.dot_general(a, b, (((1,), (axis,)), ((), ())), preferred_element_type=jnp.float32)


def _columns(width: Width, i: Any) -> Any:
    return pl.ds(i * width.chunk, width.chunk)


def _own(b: Rows, width: Width, mine: Any) -> list[Array]:
    return [b(_columns(width, mine * width.own + i)) for i in range(width.own)]


def _zeros(spec: Kernel, width: Width) -> tuple[Array, ...]:
    return tuple(jnp.zeros((spec.tiling.block, width.chunk), jnp.float32) for _ in range(width.own))


def _add(sums: Any, weights: Array, rows: list[Array]) -> tuple[Array, ...]:
    """sums + weights rows, chunk by chunk."""
    return tuple(a + _dot(weights.astype(b.dtype), b, 0) for a, b in zip(sums, rows, strict=True))


def _write(ref: Any, width: Width, sums: Any) -> None:
    for i, a in enumerate(sums):
        ref[:, _columns(width, i)] = a.astype(ref.dtype)


def _seen(ranges: Any) -> tuple[Array, Array]:
    """Of each query the first key that it sees and the one behind the last, [queries, 1]."""
    return ranges[0, :][:, None], ranges[1, :][:, None]


def _hidden(x: Array, seen: tuple[Array, Array], start: Any, axis: int) -> Array:
    """`x` where queries see keys, which lie along `axis` from `start` on; far below elsewhere."""
    key = start + lax.broadcasted_iota(jnp.int32, x.shape, axis)
    return jnp.where((seen[0] <= key) & (key < seen[1]), x, lowest(jnp.float32))


def _like(a: Array, shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    """Inside `shard_map` an output says over which axes of the mesh it varies: here as `a`."""
    made: jax.ShapeDtypeStruct = jax.eval_shape(
        lambda a: jnp.broadcast_to(jnp.ravel(a)[0], shape).astype(dtype), a
    )
    return made


# The grid: (blocks of rows, programs side by side, heads, batch rows); `i, m, n, b` in the maps.
# Programs that run at once read the same keys, and mostly find them in the cache.


def _of_batch(a: Any, shape: tuple[Any, ...], index: Callable[..., tuple[Any, ...]]) -> Any:
    """A block of `a`, whose batch axis may be 1."""
    return pl.BlockSpec(
        (None, *shape), lambda i, m, n, b: (b if a.shape[0] > 1 else 0, *index(i, m, n))
    )


def _over_queries(
    spec: Kernel,
    kernel: Any,
    kept: Width,
    call: tuple[Any, ...],
    of_rows: tuple[Any, ...],
    made: tuple[Any, ...],
) -> Any:
    q, k, v, place = call
    block, heads = spec.tiling.block, q.shape[2]
    mine: Callable[..., Any] = lambda a: _of_batch(
        a, (block, None, a.shape[3]), lambda i, m, n: (i, n, 0)
    )
    number: Callable[..., Any] = lambda a: _of_batch(a, (None, block), lambda i, m, n: (n, i))
    of_keys: Callable[..., Any] = lambda a: _of_batch(
        a, (a.shape[1], None, a.shape[3]), lambda i, m, n: (0, n // (heads // a.shape[2]), 0)
    )
    out = _of_batch(made[0], (block, None, kept.chunk * kept.own), lambda i, m, n: (i, n, m))
    row, ranges, reach = place.row, place.ranges, place.of_queries
    inputs = [
        (q, mine(q)),
        (k, of_keys(k)),
        *([] if v is None else [(v, of_keys(v))]),
        (
            row,
            _of_batch(row, (None, row.shape[2]), lambda i, m, n: (n if row.shape[1] > 1 else 0, 0)),
        ),
        (ranges, _of_batch(ranges, (2, block), lambda i, m, n: (0, i))),
        (reach, _of_batch(reach, (2, None), lambda i, m, n: (0, i))),
        *((a, mine(a) if a.ndim == 4 else number(a)) for a in of_rows),
    ]
    outputs = [(a, out if a.ndim == 4 else number(a)) for a in made]
    grid = q.shape[1] // block, kept.total // kept.own, heads, q.shape[0]
    return _run(spec, kernel, v is None, grid, inputs, outputs)


def _over_keys(spec: Kernel, of: str, call: tuple[Any, ...], of_rows: tuple[Any, ...]) -> Any:
    q, k, v, place = call
    block, like, kept = spec.tiling.block, v if of == "v" else k, spec.v if of == "v" else spec.h
    whole: Callable[..., Any] = lambda a: _of_batch(
        a, a.shape[1:], lambda i, m, n: (0,) * (a.ndim - 1)
    )
    mine: Callable[..., Any] = lambda a: _of_batch(
        a, (block, *a.shape[2:]), lambda i, m, n: (i, 0, 0)
    )
    row, ranges, reach = place.row, place.ranges, place.of_keys
    inputs = [
        (q, whole(q)),
        *((a, mine(a)) for a in (k, v) if a is not None),
        (row, _of_batch(row, (row.shape[1], block), lambda i, m, n: (0, i))),
        (ranges, whole(ranges)),
        (reach, _of_batch(reach, (2, None), lambda i, m, n: (0, i))),
        *((a, whole(a)) for a in of_rows),
    ]
    made = _like(like, like.shape, like.dtype)
    columns = block, None, kept.chunk * kept.own
    outputs = [(made, _of_batch(made, columns, lambda i, m, n: (i, n, m)))]
    if spec.bias and of != "v":
        sums = _like(q, (q.shape[0], q.shape[2], k.shape[1]), jnp.float32)
        group = q.shape[2] // k.shape[2]
        outputs.append((sums, _of_batch(sums, (group, block), lambda i, m, n: (n, i))))
    grid = like.shape[1] // block, kept.total // kept.own, like.shape[2], q.shape[0]
    kernel = functools.partial(_of_keys, spec, of)
    return _run(spec, kernel, v is None, grid, inputs, outputs)


def _run(
    spec: Kernel,
    kernel: Any,
    same: bool,
    grid: tuple[int, ...],
    inputs: list[Any],
    outputs: list[Any],
) -> Any:
    arrays, in_specs = zip(*inputs, strict=True)
    shapes, out_specs = zip(*outputs, strict=True)

    def program(q: Any, k: Any, *refs: Any) -> None:
        kernel(q, k, *((k,) if same else ()), *refs)

    return pl.pallas_call(
        program,
        grid=grid,
        in_specs=in_specs,
        out_specs=out_specs,
        out_shape=shapes,
        interpret=spec.interpret,
        compiler_params=triton.CompilerParams(
            num_warps=spec.tiling.warps, num_stages=spec.tiling.stages
        ),
        name=f"wide_{kernel.func.__name__.strip('_')}",
    )(*arrays)
