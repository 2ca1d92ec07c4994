"""Conversions whose answer is known by construction: no false "exact", no false "not equivalent".

Each case is a pair (source, target), most of them made from weights of the target. A `Conversion`
is checked on inputs that `convert` has not seen; a `NotEquivalent` of a source that was made from
the target is an error.
"""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from conftest import deep
from conversions import difference, each_head, hidden, random_params, small

from attnlab.heads import Gate, Sink, Standard, Weight
from attnlab.transforms import Conversion, NotEquivalent, convert, permute_heads


def grouped(rng):
    """Grouped heads, ungrouped, in another order and other bases."""
    biases = tuple(b for b in "qkvo" if rng.random() < 0.5)
    target = small(width=8, num_kv_heads=int(rng.choice([1, 2])), head_dim=3, biases=biases)
    params, each = each_head(random_params(target, rng), target)
    params = hidden(params, each, int(rng.integers(1e6)))
    params = permute_heads(params, each, rng.permutation(4))
    return params, each, target


def cancelling_biases(rng):
    """Value biases of heads that add up to 0, or to rounding."""
    target = small(width=6, num_heads=2, head_dim=4, biases=("q",))
    w = random_params(target, rng)
    source = small("absorbed", width=6, num_heads=2, scale=0.5, biases=("q", "v"))
    bias = rng.normal(size=6) * rng.choice([1.0, 1e8])
    params = {
        "qk": np.einsum("dnh,enh->dne", w["q"], w["k"]),
        "q_bias": np.einsum("nh,enh->ne", w["q_bias"], w["k"]),
        "vo": np.einsum("dnv,nvo->ndo", w["v"], w["o"]),
        "v_bias": np.stack([bias, -bias * (1 + rng.choice([0, 1e-15]))]),
    }
    return params, source, target


def equal_heads(rng):
    """Heads that attend alike, their values shared out among them; the target has fewer."""
    target = small(width=6, num_heads=2, head_dim=3)
    w = random_params(target, rng)
    share = rng.normal()
    params = {n: np.concatenate([w[n], w[n][:, :1]], axis=1) for n in "qkv"}
    params["o"] = np.stack([share * w["o"][0], w["o"][1], (1 - share) * w["o"][0]])
    return params, small(width=6, num_heads=3, head_dim=3), target


def swapped_slices(rng):
    """Narrow heads in another order, as standard heads in other bases."""
    name, biases = rng.choice(["narrow", "narrow_tied"]), (b for b in "qkvo" if rng.random() < 0.4)
    target = small(name, num_heads=3, head_dim=3, biases=tuple(biases))
    w = random_params(target, rng)
    source, params = small(num_heads=3, head_dim=3, biases=target.biases), {}
    is_tied = target.name == "narrow_tied"
    for name, a in w.items():
        tied = is_tied and name[0] in "qkv"
        a = np.broadcast_to(a, (3, *a.shape)) if tied else a
        params[name] = a
        if name in "qkv":
            params[name] = np.zeros((12, 3, a.shape[-1]))
            for n in range(3):
                params[name][4 * n : 4 * n + 4, n] = a[n]
    params = permute_heads(params, source, rng.permutation(3))
    return (hidden(params, source) if rng.random() < 0.5 else params), source, target


def tied_with_dead_head(rng):
    """Narrow heads of one projection; one has another, and an effect of 1e-17."""
    target = small("narrow_tied", width=8, num_heads=4)
    w, n = random_params(target, rng), int(rng.integers(4))
    params = {name: np.repeat(w[name][None], 4, axis=0) for name in "qkv"} | {"o": w["o"].copy()}
    for name in "qk":
        params[name][n] = rng.normal(size=params[name][n].shape)
    params["o"][n] = rng.normal(size=params["o"][n].shape) * rng.choice([0, 1e-17])
    return params, small("narrow", width=8, num_heads=4), target


def tied_projections(rng):
    """One projection for two of q, k and v, as separate ones in other bases."""
    tie = ["kv", "qk", "qkv"][rng.integers(3)]
    target = small(width=8, num_heads=2, tie=tie)
    w = random_params(target, rng)
    by = {"kv": "qkk", "qk": "qqv", "qkv": "qqq"}[tie]
    source = small(width=8, num_heads=2)
    params = {name: w[of] for name, of in zip("qkv", by, strict=True)} | {"o": w["o"]}
    return hidden(params, source, int(rng.integers(1e6))), source, target


def products(rng):
    """W_Q W_K^T with rounding of 1e-15 to 1e-11, of float32, or of 1e-9, which no softmax shows."""
    target = small(width=6, num_heads=2, head_dim=2)
    w = random_params(target, rng)
    qk = np.einsum("dnh,enh->dne", w["q"], w["k"]) * rng.choice([1, 1e-9])
    qk += rng.choice([1e-15, 1e-13, 1e-11]) * rng.normal(size=qk.shape)
    dtype = rng.choice([np.float32, np.float64])
    params = {n: a.astype(dtype) for n, a in (w | {"qk": qk}).items() if n not in ("q", "k")}
    return params, small("bilinear", width=6, num_heads=2, value_dim=2, scale=2**-0.5), target


MADE_FROM_TARGET = (
    grouped, cancelling_biases, equal_heads, swapped_slices, tied_with_dead_head,
    tied_projections, products,
)  # fmt: skip


def rms(a):
    return a / jnp.sqrt(jnp.mean(a * a, axis=-1, keepdims=True) + 1e-6)


@dataclasses.dataclass(frozen=True, kw_only=True)
class OutputNorm(Standard):
    """An RMS norm of each head before the output projection."""

    def weights(self):
        return {
            **super().weights(),
            "head_norm": Weight("attend", out_axes=("value_dim",), constant=1.0),
        }

    def project_out(self, params, heads):
        return super().project_out(params, rms(heads) * params["head_norm"])


@dataclasses.dataclass(frozen=True, kw_only=True)
class QueryNorm(Standard):
    """An RMS norm of the query of each head, without a weight."""

    def project_q(self, params, x, rotate):
        return rms(super().project_q(params, x, rotate))


def outside(rng):
    """Layouts that the steps do not know: their norms see what a step would add or drop."""
    kind = [OutputNorm, QueryNorm][rng.integers(2)]
    source = kind(width=6, num_heads=2, head_dim=3, value_dim=3)
    changes = [dict(value_dim=5), dict(extras=(Gate(),)), dict(scale=0.3), dict(head_dim=4),
               dict(num_heads=3), dict(biases=("v",)), dict(extras=(Sink(),))]  # fmt: skip
    target = dataclasses.replace(source, **changes[rng.integers(7)])
    if rng.random() < 0.3:
        target = small(width=6, num_heads=2, value_dim=4)
    if rng.random() < 0.2:
        source, target = target, source
    return random_params(source, rng), source, target


def other_functions(rng):
    """Two layouts that have nothing in common but their sizes."""
    names = ["standard", "narrow", "narrow_tied", "bilinear", "absorbed", "collaborative"]
    one, two = (small(name, width=6, num_heads=2) for name in rng.choice(names, size=2))
    return random_params(one, int(rng.integers(1e6))), one, two


def check(params, source, target, made_from_target):
    """An answer that is not true is an error that says which of the two it is."""
    found = convert(params, source, target)
    if isinstance(found, Conversion):
        rounded = next(iter(params.values())).dtype != np.float64
        apart = difference(found.params, target, params, source)
        assert apart < (1e-5 if rounded else 1e-8), f"false exact: {apart} {found.steps}"
        assert found.forward_error < (1e-5 if rounded else 1e-9)
    if isinstance(found, NotEquivalent):
        assert not made_from_target, f"false proof: {found} {source} {target}"


def disturbed(rng, params, source):
    """The weights with a head without an effect, with one weight of another size, or rounded.

    The first is still in the target where the target has a projection out of each head.
    """
    kind = rng.integers(3)
    if kind == 0 and "o" in params and source.num_heads > 1:
        params, noise = params | {"o": params["o"].copy()}, rng.choice([0, 1e-17, 1e-9])
        params["o"][rng.integers(len(params["o"]))] *= noise  # 0, or rounding
        return params, True
    if kind == 1:
        name, by = rng.choice(list(params)), rng.choice([1e-3, 1e3, 1e30, 1e150])
        return {n: a * by if n == name else a for n, a in params.items()}, False
    return {n: a.astype(np.float32) for n, a in params.items()}, False


STILL_IN_TARGET = grouped, swapped_slices, tied_with_dead_head
"""Cases in which a head that is removed leaves a function of the target."""


def run(case, seed):
    rng = np.random.default_rng(seed)
    params, source, target = case(rng)
    check(params, source, target, case in MADE_FROM_TARGET)
    params, removed = disturbed(rng, params, source)
    biased = "v" in source.biases or "v" in target.biases
    known = removed and case in STILL_IN_TARGET and not biased
    with np.errstate(all="ignore"):
        check(params, source, target, known)


CASES = [*MADE_FROM_TARGET, outside, other_functions]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
@pytest.mark.parametrize("seeds", deep([range(1), range(1, 32)], range(1)), ids=len)
def test_answers_are_true(case, seeds):
    for seed in seeds:
        run(case, seed)
