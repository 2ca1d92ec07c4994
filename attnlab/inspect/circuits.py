"""What a head can do, whatever the text: its two matrices, and how heads of different layers fit.

    scores ~ x A_n y^T,  A_n = W_Q,n W_K,n^T   (QK: what looks at what)
    writes   y B_n,      B_n = W_V,n W_O,n     (OV: what is written of what is looked at)

Elhage et al. 2021, A Mathematical Framework for Transformer Circuits. W_Q alone means nothing: W_Q
G and W_K G^-T are the same head for any G. So only what depends on the products is given: singular
values and vectors, eigenvalues, norms. The centring and the scale of the norms on the way belong
to the products (a scale can move between a norm and the matrix behind it); what they divide by is
a number of the text and does not. Biases are left out. All is NumPy in float64.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from attnlab.conversion.measure import float64
from attnlab.heads.old.layouts import LAYOUTS
from attnlab.heads.old.project import merge_heads, query_alone, turning
from attnlab.inspect.linear import linear_at
from attnlab.model.config import ModelConfig
from attnlab.model.outer import rotary_of
from attnlab.names import find
from attnlab.norms import CENTRES, STARTS
from attnlab.sharing.low_rank_delta import layer_params
from attnlab.sharing.plan import Plan

CIRCUITS = ("qk", "ov")
STANDS = {
    "pre": "before", "pre_open": "before", "parallel": "before",
    "post": "in the stream", "post_final": "in the stream", "sandwich": "before",
}  # fmt: skip
"""Row of `model.block.NORMS` -> where the norm of a part stands; what is written may have another
behind it (`norm_after`)."""


class Circuit(NamedTuple):
    """A matrix of every head of every layer, left diag(sizes) right^T: its singular vectors and
    values, found in a core as small as a head. Signs are such that the largest number of each left
    vector is positive; beyond the rank of a matrix all is zero.
    """

    left: Float[np.ndarray, "L N D r"]
    sizes: Float[np.ndarray, "L N r"]
    """From the largest"""
    right: Float[np.ndarray, "L N E r"]

    @property
    def norms(self) -> Float[np.ndarray, "L N"]:
        """Frobenius."""
        return np.linalg.norm(self.sizes, axis=-1)

    @property
    def effective_rank(self) -> Float[np.ndarray, "L N"]:
        """exp of the entropy of the singular values over their sum (Roy and Vetterli 2007)."""
        share = self.sizes / np.sum(self.sizes, axis=-1, keepdims=True)
        return np.exp(-np.sum(share * np.log(np.maximum(share, 1e-300)), axis=-1))

    @property
    def eigenvalues(self) -> np.ndarray:
        """[L, N, r] complex, those that may differ from 0. Of an OV matrix, positive ones mean that
        a head writes what it reads: it copies. sum Re / sum |.| says how much, from -1 to 1."""
        core = np.einsum("lndr,lnds->lnrs", self.right, self.left)
        return np.linalg.eigvals(self.sizes[..., None] * core)

    def matrix(self, layer: int, head: int) -> Float[np.ndarray, "D E"]:
        """Of one head, whole."""
        left, right = self.left[layer, head], self.right[layer, head]
        return (left * self.sizes[layer, head]) @ right.T


def circuit(
    config: ModelConfig,
    params: Any,
    name: str,
    *,
    distance: int = 0,
    encoder: bool = False,
    cross: bool = False,
) -> Circuit:
    """The matrices "qk" or "ov" of the heads of every application: of the decoder, with `encoder`
    of the encoder beside it, with `cross` of what reads that one.

    Rotary positions stand between W_Q and W_K: "qk" then is that of a key `distance` tokens before
    the query. Of a layer that reuses keys it is with the keys it reads. Scores are scaled.

    Raises ValueError where a query, a key or a value is no linear map of what is read: behind a
    norm of a latent or of queries and keys, or as a product of two (`tensor`); and for "ov" where a
    gate per element stands within.

    >>> import jax
    >>> from attnlab import ModelConfig
    >>> config = ModelConfig(width=8, num_heads=2, num_layers=3, plan="albert")
    >>> params = jax.jit(config.build().init)(jax.random.key(0), jnp.zeros((1, 2), int))["params"]
    >>> circuit(config, params, "ov").sizes.shape
    (3, 2, 4)
    """
    find("circuit", name, dict.fromkeys(CIRCUITS))
    with float64():
        stack = _Weights(config, params, encoder, cross)
        factors = stack.qk(distance) if name == "qk" else stack.ov()
    left, first = np.linalg.qr(factors[0])
    right, second = np.linalg.qr(factors[1].swapaxes(-1, -2))
    u, sizes, v = np.linalg.svd(first @ second.swapaxes(-1, -2), full_matrices=False)
    left, right = left @ u, right @ v.swapaxes(-1, -2)
    largest = np.take_along_axis(left, np.argmax(abs(left), axis=-2)[..., None, :], axis=-2)
    sign = np.where(largest < 0, -1.0, 1.0)
    # Beyond the rank of a matrix its vectors are any.
    there = sizes > 1e-10 * sizes[..., :1]
    sign = sign * there[..., None, :]
    return Circuit(left * sign, sizes * there, right * sign)


def composition(
    config: ModelConfig, params: Any, by: str, *, distance: int = 0, encoder: bool = False
) -> Float[np.ndarray, "L N L N"]:
    """How much of what head n of layer l writes head m of a later layer j can read, by its queries
    ("q"), keys ("k") or values ("v"): [l, n, j, m], NaN where j reads before l writes.

        q: |B_n A_m| / (|B_n| |A_m|),  k: A_m^T for A_m,  v: B_m for A_m,  |.| Frobenius

    Between 0 and 1 (Elhage et al. 2021). Two random matrices of full rank in D dimensions give
    about 1/sqrt(D): look at a fresh model beside it. Norms that stand in the stream (post-norm) act
    on B_n on its way. Of the self-attention of one stack; of the encoder's with `encoder`.
    """
    find("reader", by, dict.fromkeys("qkv"))
    with float64():
        stack = _Weights(config, params, encoder, False)
        plan, (v, o) = stack.plan, stack.ov()
        left, right = (v, o) if by == "v" else stack.qk(distance)
    if by == "k":
        left, right = right.swapaxes(-1, -2), left.swapaxes(-1, -2)
    at = stack.makers if by in "kv" else tuple(range(plan.num_layers))
    root = lambda a: np.asarray(np.linalg.qr(a, mode="r"))
    ends, starts = root(right.swapaxes(-1, -2)), root(v)
    sizes = np.linalg.norm(left @ ends.swapaxes(-1, -2), axis=(-2, -1))
    found = np.full((plan.num_layers, stack.spec.num_heads) * 2, np.nan)
    for i in range(plan.num_layers):
        wrote = o[i]
        for j in range(i, plan.num_layers):
            whole = starts[i] @ wrote
            for reader in [m for m in range(plan.num_layers) if at[m] == j and j > i]:
                core = np.einsum("nrd,mde,mfe->nmrf", whole, left[reader], ends[reader])
                size = np.linalg.norm(whole, axis=(-2, -1))[:, None] * sizes[reader]
                found[i, :, reader] = np.linalg.norm(core, axis=(-2, -1)) / size
            wrote = stack.passing(j, wrote)
    return found


class _Weights:
    """The factors of the heads of a stack, [L, N, D, r] and [L, N, r, E]; a gauge changes them."""

    def __init__(self, config: ModelConfig, params: Any, encoder: bool, cross: bool):
        both = config.kind == "encoder_decoder"
        if (encoder or cross) and not both:
            raise ValueError(f"a {config.kind} has one stack; leave encoder and cross out")
        if encoder and cross:
            raise ValueError("an encoder reads no other text; choose encoder or cross")
        if cross and config.cross == "merged":
            raise ValueError("one set of maps reads both texts (cross='merged'); leave cross out")
        find("norm", config.norm, STANDS)
        config = config.as_encoder if encoder else config
        self.config, self.spec, self.cross = config, config.heads, cross
        params = jax.tree.map(lambda a: np.asarray(a, np.float64), params)
        own = "" if config.share_encoder or not both else "encoder_"
        self.plan: Plan = config.encoder_layer_plan if encoder else config.layer_plan
        pool = params[f"{own}layers" if encoder else "layers"]
        self.layers = [layer_params(pool, self.plan, i) for i in range(self.plan.num_layers)]
        self.parts = ["attention", *(["cross"] if "cross" in self.plan else [])]
        self.parts += ["ffn"] if config.ffn_width else []
        self.encoded = params.get(f"{own}final_norm") if cross else None
        every = tuple(range(self.plan.num_layers))
        self.makers = every if cross else self.plan.kv_sources

    def qk(self, distance: int) -> tuple[np.ndarray, np.ndarray]:
        """scale W_Q [L, N, D, r], W_K^T [L, N, r, E]"""
        if self.config.talking_heads:
            raise ValueError("talking heads mix the scores of all heads: none has a matrix alone")
        layers, query = range(len(self.layers)), lambda i: self._query(i, distance)
        queries, keys = ([f(i) for i in layers] for f in (query, self._key))
        return np.stack(queries), np.stack(keys).swapaxes(-1, -2)

    def ov(self) -> tuple[np.ndarray, np.ndarray]:
        """W_V [L, N, D, r], gain W_O [L, N, r, D]"""
        if self.spec.gate == "element":
            raise ValueError("a gate per element stands between W_V and W_O: no matrix alone")
        layers = range(len(self.layers))
        return np.stack([self._value(i) for i in layers]), np.stack(
            [self._output(i) for i in layers]
        )

    def passing(self, layer: int, wrote: np.ndarray) -> np.ndarray:
        """What is written [.., D] behind the norms of a layer that stand in the stream."""
        if STANDS[self.config.norm] == "in the stream":
            for part in self.parts:
                wrote = self._normed(self.layers[layer][part]["norm"], wrote)
        return wrote

    def _heads(self, layer: int) -> Any:
        w = self.layers[layer]
        return w["cross"] if self.cross else w["attention"] | w.get("kv", {})

    def _normed(self, norm: Any, a: np.ndarray) -> np.ndarray:
        """x -> centre(x) scale, of rows."""
        return np.asarray(CENTRES[self.config.norm_kind](a)) * self._scale(norm)

    def _scale(self, norm: Any) -> np.ndarray:
        """What a norm multiplies by."""
        return np.asarray(norm["scale"]) + 1 - STARTS[self.config.norm_kind]

    def _read(self, norm: Any, a: np.ndarray) -> np.ndarray:
        """The matrix [N, D, r] behind a norm: centre diag(scale) a."""
        if norm is None:
            return a
        scaled = a.swapaxes(-1, -2) * self._scale(norm)
        return np.asarray(CENTRES[self.config.norm_kind](scaled)).swapaxes(-1, -2)

    def _norm_of(self, layer: int) -> Any:
        """What stands between the stream and what the heads of a layer read."""
        part = "cross" if self.cross else "attention"
        before = STANDS[self.config.norm] == "before"
        return self.layers[layer][part]["norm"] if before else None

    def _matrix(self, f: Any, *shape: int, what: str) -> np.ndarray:
        """The linear part of f [1, I, *shape] -> [1, I, N, r], as [N, I, r]."""
        size = int(np.prod(shape))
        eye = jnp.eye(size).reshape(1, size, *shape)
        why = f"the {what} of layout {self.config.layout!r}"
        made = np.asarray(linear_at(f, eye, why=why, hold=False).linear(eye), np.float64)[0]
        return made.swapaxes(0, 1) if made.ndim == 3 else made

    def _turn(self, place: int) -> Any:
        return None if self.cross else rotary_of(self.config, jnp.full(self.config.width, place))

    def _query(self, layer: int, distance: int) -> np.ndarray:
        w, turn = self._heads(layer), self._turn(distance)
        f = lambda x: query_alone(w, x, spec=self.spec, rotary=turn)
        made = self._matrix(f, self.config.width, what="query")
        more = self.config.layer_scales
        scale = self.spec.score_scale * (more[layer] if more else 1)
        return scale * self._read(self._norm_of(layer), made)

    def _key(self, layer: int) -> np.ndarray:
        return self._of_keys(layer, 0, "key")

    def _value(self, layer: int) -> np.ndarray:
        return self._of_keys(layer, 1, "value")

    def _of_keys(self, layer: int, which: int, what: str) -> np.ndarray:
        """[N, E, r] of the keys or values that a layer reads."""
        layer = self.makers[layer]
        w, row, turn = self._heads(layer), LAYOUTS[self.config.layout], turning(self._turn(0))

        def f(x: Any) -> Any:
            ready = row.prepare(w, x)
            return row.read(w, row.store(w, ready, ready, self.spec, turn), self.spec)[which]

        norm = self.encoded if self.cross else self._norm_of(layer)
        made = self._read(norm, self._matrix(f, self.config.width, what=what))
        return np.repeat(made, self.spec.num_heads // len(made), axis=0)

    def _output(self, layer: int) -> np.ndarray:
        w, row = self._heads(layer), LAYOUTS[self.config.layout]
        shape = self.spec.num_heads, self.spec.size(row.values)
        f = lambda heads: merge_heads(w, heads, spec=self.spec)
        gain = 1.0 if self.cross else self.config.attention_gain
        wrote = gain * self._matrix(f, *shape, what="output").reshape(*shape, -1)
        after = self.layers[layer]["cross" if self.cross else "attention"].get("norm_after")
        return wrote if after is None else self._normed(after, wrote)
