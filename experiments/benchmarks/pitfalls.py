"""Pitfalls of attention, measured: python -m experiments.benchmarks.pitfalls [--out=DIR]

A row of the table is one function of `PITFALLS`, a column one system: attnlab's backends that run
on this device, attnlab inside Flax, and every peer that is installed (jax.nn, Flax Linen, Flax
NNX, Equinox, Haiku). Nothing is written down beforehand: a cell is what this machine gave.

Three other pitfalls are held by tests: lowered size of a program at every depth (tests/sharing),
a checkpoint that is half written or of another shape (tests/training), flags that are
unknown, of a wrong type or None (tests/experiments).
"""

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import flags

from experiments import app
from experiments.benchmarks.peers.systems import NotOfferedError, System, installed, systems


class Finding(NamedTuple):
    """A cell: what was measured, and whether it is as it should be (None: not offered)."""

    text: str
    is_right: bool | None = None

    def __str__(self) -> str:
        return {True: "✓ ", False: "✗ ", None: ""}[self.is_right] + self.text


# ---------------------------------------------------------------- inputs


def arrays(dtype=jnp.float32, *, heads=(4, 4, 4), t=5, s=7, v=8, scale=1.0, seed=0):
    """q [2, T, N, 8], k [2, S, K, 8], v [2, S, Kv, V], normal."""
    rng, (n, k, kv) = np.random.default_rng(seed), heads
    shapes = (2, t, n, 8), (2, s, k, 8), (2, s, kv, v)
    return tuple(jnp.asarray(scale * rng.normal(size=shape), dtype) for shape in shapes)


def call(system: System, *qkv: Any, **options: Any) -> Any:
    """One call under jit. Raises NotOfferedError for an option that the system does not have."""
    missing = set(options) - set(inspect.signature(system.attend).parameters)
    if missing:
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


def equal(out: Any, expected: Any) -> Finding:
    error = largest(np.asarray(out, np.float64) - expected)
    return Finding(f"error {error:.0e}", error < 1e-5)


def padded():
    """[2, 1, 5, 7]: in batch row 0 the last two keys are hidden, in row 1 all of them."""
    return jnp.asarray(np.arange(7) < np.array([5, 0])[:, None])[:, None, None].repeat(5, 2)


# ---------------------------------------------------------------- one function = one row


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


def bias_of_minus_infinity(system: System) -> Finding:
    """A row that a bias hides: zeros, not NaN."""
    out = call(system, *arrays(), bias=jnp.where(padded(), 0.0, -jnp.inf))
    return Finding(f"output {number(largest(out[1]))}", largest(out[1]) == 0)


def hidden_nan(system: System) -> Finding:
    """NaN in keys and values at hidden positions: neither output nor gradient may know."""
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


def huge_scores(system: System) -> Finding:
    """Scores near -1e5 beside hidden ones near 1e5: an added mask of -1e5 would lose."""
    q, k, v = (jnp.ones((1, n, 1, 1)) for n in (1, 2, 2))
    q, k = 300 * q, k.at[0, 0].set(-330).at[0, 1].set(330)
    out = call(system, q, k, v.at[0, 1].set(9.0), mask=jnp.array([[[[True, False]]]]))
    return Finding(f"output {number(largest(out))}", largest(out) == 1)


def float_mask(system: System) -> Finding:
    """A mask to be added (0 and -1e9) given as `mask`: refuse it, do not read it the other way."""
    qkv, mask = arrays(), padded().at[1].set(True).at[1, :, :, 3:].set(False)
    out = np.asarray(call(system, *qkv, mask=jnp.where(mask, 0.0, -1e9)), np.float64)
    kept, inverted = (largest(out - reference(*qkv, mask=m)) for m in (mask, ~mask))
    if inverted < 1e-5:
        return Finding("inverted", False)
    return Finding("added" if kept < 1e-5 else "something else", kept < 1e-5)


def asking_for_probabilities(system: System) -> Finding:
    """Asking for the probabilities, bfloat16: the output must not change."""
    if system.with_probs is None:
        raise NotOfferedError("probabilities")
    qkv = arrays(jnp.bfloat16, heads=(4, 4, 4), t=64, s=64, scale=4.0)
    change = largest(call(system, *qkv) - jax.jit(system.with_probs)(*qkv))
    return Finding(f"changes by {number(change)}", change == 0)


def value_width(system: System) -> Finding:
    """Values wider than keys."""
    qkv = arrays(v=24)
    return equal(call(system, *qkv), reference(*qkv))


def head_counts(system: System) -> Finding:
    """6 query heads, 3 key heads, 2 value heads."""
    qkv = arrays(heads=(6, 3, 2))
    return equal(call(system, *qkv), reference(*qkv))


def causal_alignment(system: System) -> Finding:
    """Fewer queries than keys, causal: the first query sees the first key (top left)."""
    q, k, v = arrays()
    v = jnp.broadcast_to(jnp.pad(jnp.eye(7), ((0, 0), (0, 1)))[None, :, None], (2, 7, 4, 8))
    seen = int(np.sum(np.asarray(call(system, 0 * q, k, v, is_causal=True))[0, 0, 0] > 0))
    return Finding(f"query 0 of 5 sees {seen} of 7", seen == 1)


def residual_dtype(system: System) -> Finding:
    """log sum exp for bfloat16 inputs: too coarse for a recompute unless it is float32."""
    _, residual = call(system, *arrays(jnp.bfloat16), return_residual=True)
    return Finding(str(residual.dtype), residual.dtype == jnp.float32)


def initial_scale(system: System) -> Finding:
    """Heads 8 and 64 wide: does an initial projection keep the variance, std * sqrt(fan in)?"""
    if system.init is None:
        raise NotOfferedError("initialiser")
    rows = []
    for head_dim in (8, 64):
        q, o = system.init(jax.random.key(0), 64, 8, head_dim)
        rows.append((float(jnp.std(q)) * 8, float(jnp.std(o)) * (8 * head_dim) ** 0.5))
    (q8, o8), (q64, o64) = rows
    same = max(abs(q64 / q8 - 1), abs(o64 / o8 - 1)) < 0.1
    return Finding(f"q {q8:.2f} to {q64:.2f}, o {o8:.2f} to {o64:.2f}", same)


def decode_overflow(system: System) -> Finding:
    """6 tokens, one by one, into a cache of 4: an error or NaN, never a place written over."""
    if system.decode is None:
        raise NotOfferedError("cache")
    x = jnp.asarray(np.random.default_rng(0).normal(size=(1, 6, 8)), jnp.float32)
    fits = np.isfinite(system.decode(x[:, :4], 4)).all()
    try:
        out = np.asarray(system.decode(x, 4))
    except ValueError:
        return Finding("error", fits)
    lost = np.isnan(out[4:]).all()
    return Finding("NaN" if lost else "goes on, last place written over", bool(fits and lost))


def identical_heads(system: System) -> Finding:
    """Heads that start with the same weights: after 200 Adam steps still exactly the same."""
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
    same = lambda a, axis: jnp.repeat(a, 4, axis)
    w = {n: same(draw(16, 1, 8) / 4, 1) for n in "qkv"} | {"o": same(draw(1, 8, 16) / 6, 0)}
    x, y, adam = draw(2, 7, 16), draw(2, 7, 16), optax.adam(1e-2)

    def loss(w):
        q, k, v = (jnp.einsum("btd,dnh->btnh", x, w[n]) for n in "qkv")
        return jnp.mean((jnp.einsum("btnv,nvo->bto", system.attend(q, k, v), w["o"]) - y) ** 2)

    def step(state, _):
        w, moments = state
        value, grads = jax.value_and_grad(loss)(w)
        updates, moments = adam.update(grads, moments)
        return (optax.apply_updates(w, updates), moments), value

    train = jax.jit(lambda w: jax.lax.scan(step, (w, adam.init(w)), length=200))
    (w, _), losses = train(w)
    apart = max(largest(w[n] - w[n][:, :1]) for n in "qkv")
    apart = max(apart, largest(w["o"] - w["o"][:1]))
    return Finding(
        f"apart by {number(apart)} (loss {losses[0]:.2f} to {losses[-1]:.2f})", apart == 0
    )


PITFALLS: dict[str, Callable[[System], Finding]] = {
    "row with nothing to attend to": empty_row,
    "the same in float16": empty_row_float16,
    "row of bias -inf": bias_of_minus_infinity,
    "NaN at hidden positions": hidden_nan,
    "huge hidden scores": huge_scores,
    "float mask (0, -1e9) as mask": float_mask,
    "asking for probabilities, bfloat16": asking_for_probabilities,
    "V = 3 H": value_width,
    "6 query, 3 key, 2 value heads": head_counts,
    "causal, T < S": causal_alignment,
    "residual of bfloat16": residual_dtype,
    "6 tokens into a cache of 4": decode_overflow,
    "initial heads 8 and 64 wide": initial_scale,
    "200 steps from identical heads": identical_heads,
}


def check(pitfall: Callable[[System], Finding], system: System) -> Finding:
    """What the system does; an error is right where the call is a mistake, else "not offered"."""
    try:
        return pitfall(system)
    except NotOfferedError:
        return Finding("–")
    except (TypeError, ValueError, AssertionError, NotImplementedError) as error:
        return Finding(f"refuses ({type(error).__name__})", True if pitfall is float_mask else None)


def table(known: dict[str, System]) -> str:
    """All pitfalls on all systems, in Markdown."""
    lines = [f"| | {' | '.join(known)} |", "|---" * (len(known) + 1) + "|"]
    for name, pitfall in PITFALLS.items():
        lines.append(f"| {name} | {' | '.join(str(check(pitfall, s)) for s in known.values())} |")
    return "\n".join(lines)


_OUT = flags.DEFINE_string("out", "", "Folder to write pitfalls.md to; none if left out.")


def main() -> None:
    """Prints the table."""
    packages = ("jax", "flax", "equinox", "dm-haiku")
    versions = ", ".join(f"{name} {installed(name) or 'missing'}" for name in packages)
    text = f"{versions}, {jax.devices()[0].device_kind}\n\n{table(systems())}\n"
    print(text)
    if _OUT.value:
        Path(_OUT.value).mkdir(parents=True, exist_ok=True)
        (Path(_OUT.value) / "pitfalls.md").write_text(text)


if __name__ == "__main__":
    app.start(main)
