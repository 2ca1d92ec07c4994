"""Pitfalls of attention, measured: python -m experiments.benchmarks.pitfalls [--out=DIR]

A row of the table is one function of `PITFALLS`, a column one system: attnlab and every peer that
is installed (jax.nn, Flax Linen, Flax NNX, Equinox, Haiku). Every cell is measured on this machine.
"""

import functools
import importlib.metadata
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from flax import linen, nnx

from attnlab import heads
from attnlab.attention import dot_product_attention
from attnlab.report.page import table as markdown_table
from attnlab.tap import capture
from experiments import app


class System(NamedTuple):
    """One implementation of attention."""

    attend: Callable
    """(q, k, v, **what it offers of mask and return_residual) -> [B, T, N, V]"""
    with_probs: Callable | None = None
    """(q, k, v) -> the output of a call that also returns the probabilities"""
    decode: Callable | None = None
    """(x [1, steps, 8], size) -> outputs [steps, 8], token by token into a cache of `size`"""


class NotOfferedError(Exception):
    """The system has no such option."""


class Finding(NamedTuple):
    """A cell: what was measured, and whether it is right (None: not offered)."""

    text: str
    is_right: bool | None = None

    def __str__(self) -> str:
        return {True: "✓ ", False: "✗ ", None: ""}[self.is_right] + self.text


# ---------------------------------------------------------------- systems


def attnlab_decode(x, size):
    layout = heads.Standard(width=8, num_heads=2)
    params, cache = heads.init(jax.random.key(0), layout), heads.init_cache(layout, 1, size)
    step, outs = jax.jit(functools.partial(heads.decode, layout=layout)), []
    for t in range(x.shape[1]):
        out, cache = step(params, x[:, t : t + 1], cache=cache)
        outs.append(out[0, 0])
    return jnp.stack(outs)


def linen_decode(x, size):
    module = linen.MultiHeadDotProductAttention(2, decode=True)
    variables = dict(module.init(jax.random.key(0), jnp.ones((1, size, 8))))
    outs = []
    for t in range(x.shape[1]):
        out, new = module.apply(variables, x[:, t : t + 1], mutable=["cache"])
        variables |= new
        outs.append(out[0, 0])
    return jnp.stack(outs)


def nnx_decode(x, size):
    module = nnx.MultiHeadAttention(2, 8, decode=True, rngs=nnx.Rngs(0))
    module.init_cache((1, size, 8))
    return jnp.stack([module(x[:, t : t + 1])[0, 0] for t in range(x.shape[1])])


class Sow:
    """In the place of the Flax module that stores the probabilities."""

    def sow(self, *args: Any, **options: Any) -> None:
        """Ignores them: the pitfall compares the outputs."""


def check_one_head_count(*qkv: Any) -> None:
    """Raises NotOfferedError for modules that have one number of heads."""
    if len({a.shape[2] for a in qkv}) > 1:
        raise NotOfferedError("key and value head counts")


def equinox_attend(q, k, v, *, mask=None):
    """Its module with identities as projections: it has no function."""
    import equinox

    (b, t, n, h), s, vo = q.shape, k.shape[1], v.shape[-1]
    check_one_head_count(q, k, v)
    sizes = {"value_size": n * vo, "output_size": n * vo, "qk_size": h, "vo_size": vo}
    module = equinox.nn.MultiheadAttention(n, n * h, **sizes, key=jax.random.key(0))
    weights = lambda m: [p.weight for p in (m.query_proj, m.key_proj, m.value_proj, m.output_proj)]
    eyes = [jnp.eye(len(w), dtype=q.dtype) for w in weights(module)]
    mask = jnp.broadcast_to(True if mask is None else mask, (b, n, t, s))
    flat = (a.reshape(*a.shape[:2], -1) for a in (q, k, v))
    return jax.vmap(equinox.tree_at(weights, module, eyes))(*flat, mask).reshape(b, t, n, -1)


def haiku_attend(q, k, v, *, mask=None):
    """Its module with identities as projections: it has no function."""
    import haiku

    (n, h), vo = q.shape[-2:], v.shape[-1]
    check_one_head_count(q, k, v)
    sizes = {"with_bias": False, "value_size": vo, "model_size": n * vo}
    eye = lambda shape, dtype: jnp.eye(shape[0], shape[1], dtype=dtype)
    module = lambda *a: haiku.MultiHeadAttention(n, h, w_init=eye, **sizes)(*a)
    run: Any = haiku.without_apply_rng(haiku.transform(module))
    flat = [a.reshape(*a.shape[:2], -1) for a in (q, k, v)]
    return run.apply(run.init(None, *flat), *flat, mask).reshape(*q.shape[:3], vo)


def systems() -> dict[str, System]:
    """Name -> system, for all that are installed."""
    attend = linen.dot_product_attention, nnx.dot_product_attention
    sow: Any = Sow()
    sown = [functools.partial(function, module=sow) for function in attend]
    probs = lambda *a: capture(dot_product_attention, *a, names=("probs",))[0]
    found = {
        "attnlab": System(dot_product_attention, probs, attnlab_decode),
        "jax.nn": System(jax.nn.dot_product_attention),
        "Linen": System(attend[0], sown[0], linen_decode),
        "NNX": System(attend[1], sown[1], nnx_decode),
    }
    if installed("equinox"):
        found["Equinox"] = System(equinox_attend)
    if installed("dm-haiku"):
        found["Haiku"] = System(haiku_attend)
    return found


def installed(package: str) -> str | None:
    """Its version, or None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


# ---------------------------------------------------------------- one function = one row


def arrays(dtype=jnp.float32, *, heads=(4, 4, 4), t=5, s=7, v=8, scale=1.0):
    """q [2, T, N, 8], k [2, S, K, 8], v [2, S, Kv, V], normal."""
    rng, (n, k, kv) = np.random.default_rng(0), heads
    shapes = (2, t, n, 8), (2, s, k, 8), (2, s, kv, v)
    return tuple(jnp.asarray(scale * rng.normal(size=shape), dtype) for shape in shapes)


def call(system: System, *qkv: Any, **options: Any) -> Any:
    """One call under jit. Raises NotOfferedError for an option that the system does not have."""
    if missing := set(options) - set(inspect.signature(system.attend).parameters):
        raise NotOfferedError(missing)
    return jax.jit(lambda *a: system.attend(*a, **options))(*qkv)


def gradient(system: System, of: int, *qkv: Any, **options: Any) -> Any:
    """Of a sum of sines of the output, by the argument with number `of`."""
    loss = lambda *a: jnp.sum(jnp.sin(system.attend(*a, **options).astype(jnp.float32)))
    return jax.jit(jax.grad(loss, of))(*qkv)


def reference(q, k, v, *, mask=True) -> np.ndarray:
    """Attention by NumPy in float64."""
    q, k, v = (np.asarray(a, np.float64) for a in (q, k, v))
    k, v = (np.repeat(a, q.shape[2] // a.shape[2], axis=2) for a in (k, v))
    scores = np.where(mask, np.einsum("btnh,bsnh->bnts", q, k) * q.shape[-1] ** -0.5, -np.inf)
    p = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("bnts,bsnv->btnv", p / p.sum(-1, keepdims=True), v)


def largest(a: Any) -> float:
    """The largest magnitude; NaN and inf come through."""
    return float(np.max(np.abs(np.asarray(a, np.float64)), initial=0))


def number(x: float) -> str:
    return "NaN" if np.isnan(x) else f"{x:.2g}"


def equal(system: System, *qkv: Any) -> Finding:
    """Is the output that of NumPy?"""
    error = largest(np.asarray(call(system, *qkv), np.float64) - reference(*qkv))
    return Finding(f"error {error:.0e}", error < 1e-5)


def padded():
    """[2, 1, 5, 7]: in batch row 0 the last two keys are hidden, in row 1 all of them."""
    return jnp.asarray(np.arange(7) < np.array([5, 0])[:, None])[:, None, None].repeat(5, 2)


def empty_row(system: System) -> Finding:
    """All keys hidden: zeros, and no gradient into the padding."""
    qkv = arrays()
    out = largest(call(system, *qkv, mask=padded())[1])
    grad = largest(gradient(system, 2, *qkv, mask=padded())[1])
    return Finding(f"output {number(out)}, gradient {number(grad)}", out == grad == 0)


def empty_row_float16(system: System) -> Finding:
    """The same where -1e30 overflows."""
    out = largest(call(system, *arrays(jnp.float16), mask=padded())[1])
    return Finding(f"output {number(out)}", out == 0)


def hidden_nan(system: System) -> Finding:
    """NaN in keys and values at hidden positions must not reach output or gradient."""
    q, k, v = arrays()
    mask = padded().at[1].set(True).at[1, :, :, 5:].set(False)
    nan = jnp.nan
    bad = {
        "output": call(system, q, k.at[:, 5:].set(nan), v, mask=mask),
        "gradient": gradient(system, 0, q, k.at[:, 5:].set(nan), v, mask=mask),
        "output by value": call(system, q, k, v.at[:, 5:].set(nan), mask=mask),
    }
    names = [name for name, a in bad.items() if not np.isfinite(a).all()]
    return Finding(f"NaN in {', '.join(names)}" if names else "no NaN", not names)


def float_mask(system: System) -> Finding:
    """A mask to be added (0 and -1e9) given as `mask`: raise, do not read it inverted."""
    qkv, mask = arrays(), padded().at[1].set(True).at[1, :, :, 3:].set(False)
    out = np.asarray(call(system, *qkv, mask=jnp.where(mask, 0.0, -1e9)), np.float64)
    kept, inverted = (largest(out - reference(*qkv, mask=m)) for m in (mask, ~mask))
    if inverted < 1e-5:
        return Finding("inverted", False)
    return Finding("added" if kept < 1e-5 else "something else", kept < 1e-5)


def probabilities(system: System) -> Finding:
    """Asking for the probabilities, bfloat16: the output must not change."""
    if system.with_probs is None:
        raise NotOfferedError("probabilities")
    qkv = arrays(jnp.bfloat16, t=64, s=64, scale=4.0)
    change = largest(call(system, *qkv) - jax.jit(system.with_probs)(*qkv))
    return Finding(f"changes by {number(change)}", change == 0)


def residual_dtype(system: System) -> Finding:
    """log sum exp for bfloat16 inputs: too coarse for a recompute unless it is float32."""
    _, residual = call(system, *arrays(jnp.bfloat16), return_residual=True)
    return Finding(str(residual.dtype), residual.dtype == jnp.float32)


def decode_overflow(system: System) -> Finding:
    """6 tokens, one by one, into a cache of 4: an error or NaN, never an overwritten position."""
    if system.decode is None:
        raise NotOfferedError("cache")
    x = jnp.asarray(np.random.default_rng(0).normal(size=(1, 6, 8)), jnp.float32)
    fits = np.isfinite(system.decode(x[:, :4], 4)).all()
    try:
        out = np.asarray(system.decode(x, 4))
    except ValueError:
        return Finding("error", fits)
    lost = np.isnan(out[4:]).all()
    return Finding("NaN" if lost else "overwrites the last position", bool(fits and lost))


PITFALLS: dict[str, Callable[[System], Finding]] = {
    "query that may attend to nothing": empty_row,
    "the same in float16": empty_row_float16,
    "NaN at masked positions": hidden_nan,
    "float mask (0 and -1e9)": float_mask,
    "asking for probabilities, bfloat16": probabilities,
    "values wider than keys": lambda system: equal(system, *arrays(v=24)),
    "6 query, 3 key, 2 value heads": lambda system: equal(system, *arrays(heads=(6, 3, 2))),
    "log-sum-exp of bfloat16 inputs": residual_dtype,
    "6 tokens into a cache of 4": decode_overflow,
}


def check(pitfall: Callable[[System], Finding], system: System) -> Finding:
    """What the system does; an error is right where the call is a mistake, else "not offered"."""
    try:
        return pitfall(system)
    except NotOfferedError:
        return Finding("–")
    except (TypeError, ValueError, AssertionError, NotImplementedError) as error:
        return Finding(f"raises {type(error).__name__}", True if pitfall is float_mask else None)


def table(known: dict[str, System]) -> str:
    """All pitfalls on all systems, in Markdown."""
    rows = [
        [name, *(str(check(pitfall, system)) for system in known.values())]
        for name, pitfall in PITFALLS.items()
    ]
    return markdown_table(("", *known), rows)


def main() -> None:
    """Prints the table."""
    packages = ("jax", "flax", "equinox", "dm-haiku")
    versions = ", ".join(f"{name} {installed(name) or 'missing'}" for name in packages)
    text = f"{versions}, {jax.devices()[0].device_kind}\n\n{table(systems())}\n"
    print(text)
    if folder := flags.FLAGS.out:
        Path(folder).mkdir(parents=True, exist_ok=True)
        (Path(folder) / "pitfalls.md").write_text(text)


def define_flags() -> None:
    """The flags of this command."""
    flags.DEFINE_string("out", "", "Folder to write pitfalls.md to; none if left out.")


if __name__ == "__main__":
    define_flags()
    app.start(main)
