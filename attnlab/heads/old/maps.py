"""One map of a row: what its string says, the weight it needs, and how it is applied.

    "query: D -> N H"                 reads D, makes N H: a weight [D, N, H]
    "query: [N] C -> H"               for each head: a weight [N, C, H]
    "query: (N) C -> H"               for each head the same: a weight [C, H]
    "query: D / X -> X N"             a mean over X comes after: fan D / X, so that it is of size 1
    "query: N R ~ 1"                  sums over nothing: multiplied in, drawn with deviation 1
    "store: H = 1 if qk_norm"         starts at 1, there where `spec.qk_norm` is set
    "query: N H = 0 if biases has q"  starts at 0, there where `spec.biases` holds a q
    "query: D -> N if gate is head"   there where `spec.gate` is that word
    "store: E -> K H if ties lacks q" there where `spec.ties` holds no q
    "query: Q = 1 if latent_norm and query_latent_dim"  there where both are set

In front stands the function of `Layout` that applies it, so the string says when it runs: once for
a text that is read (`prepare`), for a query (`query`), for a new key (`store`), for every key held
(`read`), for an output (`merge`).
"""

import functools
import math
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array

from attnlab.norms import NORM_KINDS
from attnlab.remat import save_for_backward

Weights = dict[str, Any]
"""The weights of one set of heads: arrays named q, k, v, o and q_bias, k_bias, ..."""

Held = dict[str, Array]
"""What `store` made of some tokens: name -> [B, S, ...]. A cache keeps it, a layer may share it."""

RUNS = ("prepare", "query", "store", "read", "merge")

RESERVED = ("norm", "norm_after", "mix")

GRAMMAR = re.compile(
    rf"(?P<runs>{'|'.join(RUNS)}): "
    r"((?P<open>[\[(])(?P<each>[A-Z])[\])] )?((?P<reads>[A-Z]( [A-Z])*)( / (?P<mean>[A-Z]))? -> )?"
    r"(?P<makes>[A-Z]( [A-Z])*)( (?P<sign>[=~]) (?P<start>\d+(\.\d+)?))?"
    r"( if (?P<fields>\w+( and \w+)*)( (?P<test>has|is|lacks) (?P<word>\w+))?)?"
)


TESTS: dict[str, Callable[[Any, str], bool]] = {
    "": lambda value, word: bool(value),
    "has": lambda value, word: word in value,
    "is": lambda value, word: value == word,
    "lacks": lambda value, word: word not in value,
}
"""What stands behind the field of a spec in "if field ... word" -> does it hold of its value?"""


class Map(NamedTuple):
    """What the string of a map says."""

    runs: str
    """The function of `Layout` that applies it."""
    axes: str
    """The letters of its weight."""
    reads: str
    """The letters that an output sums over: the fan."""
    makes: str
    """The letters of an output: those of its bias."""
    mean: str
    """The letters that a mean is taken over afterwards, which would make it small: less fan."""
    products: str
    """The letters whose sizes give the multiply-adds for a token; empty where nothing is summed."""
    start: float | None
    """The number it starts at, or the standard deviation it starts with; None is 1/sqrt(fan)."""
    drawn: bool
    """At random, or all the same number?"""
    fields: tuple[str, ...]
    test: str
    word: str
    """It is there where these fields of the spec are set, or hold ("has"), are ("is") or do not
    hold ("lacks") this."""

    def is_there(self, spec: Any) -> bool:
        """Does this spec have it?"""
        values: list[Any] = [getattr(spec, field) for field in self.fields]
        return all(TESTS[self.test](value, self.word) for value in values)

    def fan(self, sizes: dict[str, int]) -> float:
        """What 1/sqrt(fan) is the standard deviation of: the product of the sizes read."""
        return math.prod(sizes[a] for a in self.reads) / math.prod(sizes[a] for a in self.mean)


@functools.cache
def parse(name: str, text: str) -> Map:
    """The map that a string of `Layout.maps` says.

    >>> parse("o", "merge: N V -> O if output")[:4]
    ('merge', 'NVO', 'NV', 'O')

    Raises ValueError for a string that is none, and for a weight that sums over nothing without
    saying where it starts: 1/sqrt(fan) would be 1 in silence.
    """
    if name in RESERVED:
        raise ValueError(
            f"a layer has a {name!r} of its own beside its heads; name the map otherwise"
        )
    found = GRAMMAR.fullmatch(text)
    if found is None:
        raise ValueError(
            f"map {name!r}: {text!r} is not of the form 'query: D -> N H'; the forms stand at the "
            "top of attnlab/heads/old/maps.py"
        )
    fields = (found["fields"] or "").split(" and ") if found["fields"] else ()
    part = {key: (value or "").replace(" ", "") for key, value in found.groupdict().items()}
    if not part["reads"] and not part["sign"]:
        raise ValueError(
            f"map {name!r}: {text!r} sums over nothing, so it has no fan: say where it starts with "
            "'= 0', '= 1', or '~ 1' for random numbers of standard deviation 1"
        )
    own = part["each"] if part["open"] == "[" else ""
    letters = part["reads"] + part["makes"]
    return Map(
        runs=part["runs"],
        axes=own + letters,
        reads=part["reads"],
        mean=part["mean"],
        makes=own + part["makes"],
        products=part["each"] + letters if part["reads"] else "",
        start=float(part["start"]) if part["sign"] else None,
        drawn=part["sign"] != "=",
        fields=tuple(fields),
        test=part["test"],
        word=part["word"],
    )


def biases(maps: dict[str, str], letters: str = "qkvo") -> dict[str, str]:
    """A bias for the maps of these letters: what stands right.

    >>> biases({"q": "query: D -> N H"}, "q")
    {'q_bias': 'query: N H = 0 if biases has q'}
    """
    found = {letter: parse(letter, maps[letter]) for letter in letters}
    return {
        f"{letter}_bias": f"{one.runs}: {' '.join(one.makes)} = 0 if biases has {letter}"
        for letter, one in found.items()
    }


def qk_norms(width: str) -> dict[str, str]:
    """The norms of queries and of keys of this width, scale and bias.

    >>> qk_norms("R")["q_norm_bias"]
    'query: R = 0 if qk_norm_bias'
    """
    ends = {"": f"{width} = 1 if qk_norm", "_bias": f"{width} = 0 if qk_norm_bias"}
    runs = {"q": "query", "k": "store"}
    return {f"{n}_norm{e}": f"{r}: {text}" for n, r in runs.items() for e, text in ends.items()}


def add_bias(y: Array, w: Weights, name: str) -> Array:
    """y + the bias `name`, where there is one."""
    bias = f"{name}_bias"
    return over_tokens(jnp.add, y, w[bias]) if bias in w else y


def over_tokens(f: Callable, y: Array, a: Array) -> Array:
    """f(y, a) of a weight that broadcasts over tokens, in float32 at least: its gradient is a sum
    over all of them, which bfloat16 would get wrong in the second digit.
    """
    wide = jnp.promote_types(y.dtype, jnp.float32)
    return f(y.astype(wide), a.astype(wide)).astype(y.dtype)


def normalise(w: Weights, name: str, a: Array, kind: str | None, eps: float) -> Array:
    """Over the last axis, with the scale `name` and, where there is one, its bias; as it is where
    `kind` is None."""
    own = {"scale": name, "bias": f"{name}_bias"}
    there = {part: w[own] for part, own in own.items() if own in w}
    return NORM_KINDS[kind](there, a, eps=eps) if kind else a


def read_all(w: Weights, name: str, x: Array) -> Array:
    """[B, T, D] x [D, N, H] -> [B, T, N, H] as one flat matmul (1.6 times as fast on a CPU)."""
    kernel = w[name].astype(x.dtype)
    flat = save_for_backward(x.reshape(-1, x.shape[-1]) @ kernel.reshape(kernel.shape[0], -1))
    return add_bias(flat.reshape(*x.shape[:-1], *kernel.shape[1:]), w, name)


def read_chunk(w: Weights, name: str, x: Array) -> Array:
    """Head n reads chunk n of x alone: [B, T, N*C] x [N, C, H] -> [B, T, N, H]."""
    kernel = w[name].astype(x.dtype)
    chunks = x.reshape(*x.shape[:2], *kernel.shape[:2])
    made = save_for_backward(jnp.einsum("BTNC,NCH->BTNH", chunks, kernel))
    return add_bias(made, w, name)


def read_tied(w: Weights, name: str, x: Array) -> Array:
    """The same [C, H] for every chunk: [B, T, N*C] -> [B, T, N, H]."""
    chunks = x.reshape(*x.shape[:2], -1, w[name].shape[0])
    return read_all(w, name, chunks)


def merge_all(w: Weights, heads: Array, spec: Any) -> Array:
    """[B, T, N, V] x [N, V, O] -> [B, T, O]; without an output map the heads side by side."""
    flat = heads.reshape(-1, heads.shape[-2] * heads.shape[-1])
    if spec.output:
        kernel = w["o"].astype(heads.dtype)
        flat = flat @ kernel.reshape(-1, kernel.shape[2])
    return add_bias(flat.reshape(*heads.shape[:2], -1), w, "o")
