"""The matrices of a head for any text, QK and OV, and how heads of different layers compose.

    scores ~ x A_n y^T,  A_n = W_Q,n W_K,n^T   (QK)
    writes   y B_n,      B_n = W_V,n W_O,n     (OV)

Elhage et al. 2021, A Mathematical Framework for Transformer Circuits. W_Q alone depends on a basis
that the function does not: W_Q G and W_K G^-T are the same head for any G. So only numbers that
depend on the products are returned. The centring and scale of norms next to the matrices belong to
the products; the divisor of a norm depends on the text and does not. Biases are left out. All is
NumPy in float64.
"""

import functools
from collections.abc import Callable
from typing import Literal, NamedTuple, TypeAlias, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Complex, Float

from attnlab.fields import check_choice
from attnlab.heads.attention import project_kv, rotated
from attnlab.interpret.linearize import linearize_at
from attnlab.interpret.scores import AttentionName, head_params, query_scale
from attnlab.models.config import ModelConfig
from attnlab.models.embed import rotary_embedding
from attnlab.models.layer import LAYER_SCALE
from attnlab.models.params import check_params, encoder_params
from attnlab.ops import NORM_STARTS
from attnlab.sharing import Params, layer_params
from attnlab.transforms.measure import float64

Matrices: TypeAlias = Float[np.ndarray, "..."]
CircuitName: TypeAlias = Literal["qk", "ov"]
ReadBy: TypeAlias = Literal["q", "k", "v"]
ONE = {"scale": 1.0}
"""The layer scale of a layer without one."""
TINY = 1e-300
"""In place of 0 in divisors and logarithms."""


class Circuit(NamedTuple):
    """A matrix of every head of every layer as left diag(singular_values) right^T.

    Signs are such that the largest entry of each left vector is positive; beyond the rank of a
    matrix all entries are zero.
    """

    left: Float[np.ndarray, "L N D r"]
    """Unit vectors: directions of the input of the queries (QK), or of the values (OV)."""
    singular_values: Float[np.ndarray, "L N r"]
    """In descending order."""
    right: Float[np.ndarray, "L N E r"]
    """Unit vectors: directions of the input of the keys (QK), or of what a head writes (OV)."""

    @property
    def norms(self) -> Float[np.ndarray, "L N"]:
        """Frobenius norms."""
        return np.asarray(np.linalg.norm(self.singular_values, axis=-1))

    @property
    def effective_rank(self) -> Float[np.ndarray, "L N"]:
        """exp of the entropy of the singular values over their sum (Roy and Vetterli 2007); 0 for
        a matrix of zeros."""
        total = np.sum(self.singular_values, axis=-1, keepdims=True)
        share = self.singular_values / np.maximum(total, TINY)
        entropy = -np.sum(share * np.log(np.maximum(share, TINY)), axis=-1)
        return np.where(total[..., 0] > 0, np.exp(entropy), 0)

    @property
    def eigenvalues(self) -> Complex[np.ndarray, "L N r"]:
        """The eigenvalues that may differ from 0. Positive ones of an OV matrix mean that the head
        copies: sum Re / sum |.| measures it, from -1 to 1."""
        core = np.einsum("lndr,lnds->lnrs", self.right, self.left)
        return np.linalg.eigvals(self.singular_values[..., None] * core)

    def matrix(self, layer: int, head: int) -> Float[np.ndarray, "D E"]:
        """The matrix of one head."""
        left, right = self.left[layer, head], self.right[layer, head]
        return np.asarray((left * self.singular_values[layer, head]) @ right.T)


def circuit(
    config: ModelConfig,
    params: Params,
    name: CircuitName,
    *,
    distance: int = 0,
    attention: AttentionName = "self",
) -> Circuit:
    """The QK or OV matrices of all heads, by singular value decomposition.

    Args:
      config, params: of the model.
      name: "qk" (with the scale of the scores) or "ov".
      distance: with rotary positions "qk" is that of a key so many tokens before the query; the
        key is at position 0 (`Attention.position_scale`).
      attention: which attention.

    Raises:
      ValueError: params of another model, an unknown name, an attention that the model does not
        have, or layers of several types; queries, keys or values are not linear in the input (a
        norm of a latent or of queries and keys, layout `tensor_product`); several softmax
        distributions in a head; for "qk" talking heads, for "ov" a gate per element.

    >>> config = ModelConfig(width=8, num_layers=3, sharing="albert")
    >>> params = jax.jit(config.build().init)(jax.random.key(0), jnp.zeros((1, 2), int))["params"]
    >>> circuit(config, params, "ov").singular_values.shape
    (3, 4, 2)
    """
    check_choice("circuit", name, get_args(CircuitName))
    with float64():
        weights = _HeadMatrices(config, params, attention)
        factors = weights.qk(distance) if name == "qk" else weights.ov()
    left, first = np.linalg.qr(factors[0])
    right, second = np.linalg.qr(factors[1].swapaxes(-1, -2))
    u, values, v = np.linalg.svd(first @ second.swapaxes(-1, -2), full_matrices=False)
    left, right = left @ u, right @ v.swapaxes(-1, -2)
    largest = np.take_along_axis(left, np.argmax(abs(left), axis=-2)[..., None, :], axis=-2)
    in_rank = values > 1e-10 * values[..., :1]
    sign = np.where(largest < 0, -1.0, 1.0) * in_rank[..., None, :]
    return Circuit(left * sign, values * in_rank, right * sign)


def composition_scores(
    config: ModelConfig,
    params: Params,
    by: ReadBy,
    *,
    distance: int = 0,
    attention: Literal["self", "encoder"] = "self",
) -> Float[np.ndarray, "L N L N"]:
    """How much of the output of one head a head of a later layer reads (Elhage et al. 2021).

        Q: |B_n A_m| / (|B_n| |A_m|),  K: A_m^T for A_m,  V: B_m for A_m,  |.| Frobenius

    Two random matrices of full rank in D dimensions give about 1/sqrt(D): compare with an untrained
    model. Norms in the residual stream (post-norm) act on B_n on its way.

    Args:
      config, params: of the model.
      by: Q-, K- or V-composition.
      distance: as in `circuit`.
      attention: self-attention of the model, or of its encoder.

    Returns:
      [l, n, j, m], between 0 and 1: head n of layer l, read by head m of layer j; 0 where a matrix
      is zeros, NaN where j reads before l writes.

    Raises:
      ValueError: `by` is none of q, k and v; attention is "cross", which reads what the encoder
        writes; or `circuit` raises it, for "ov" or, unless `by` is "v", for "qk".

    >>> config = ModelConfig(width=8, num_layers=3)
    >>> params = jax.jit(config.build().init)(jax.random.key(0), jnp.zeros((1, 2), int))["params"]
    >>> scores = composition_scores(config, params, "q")
    >>> scores.shape, bool(np.isnan(scores[1, 0, 0, 0]))
    ((3, 4, 3, 4), True)
    """
    check_choice("composition", by, get_args(ReadBy))
    check_choice("attention", attention, ("self", "encoder"))
    with float64():
        weights = _HeadMatrices(config, params, attention)
        num_layers, (v, o) = weights.config.num_layers, weights.ov()
        left, right = (v, o) if by == "v" else weights.qk(distance)
    if by == "k":
        left, right = right.swapaxes(-1, -2), left.swapaxes(-1, -2)
    reads_at = tuple(range(num_layers)) if by == "q" else weights.kv_sources
    # Norms of products follow from the triangular factors, which are as small as a head.
    ends = np.asarray(np.linalg.qr(right.swapaxes(-1, -2), mode="r"))
    starts = np.asarray(np.linalg.qr(v, mode="r"))
    sizes = np.linalg.norm(left @ ends.swapaxes(-1, -2), axis=(-2, -1))
    scores = np.full((num_layers, weights.layout.num_heads) * 2, np.nan)
    for i in range(num_layers):
        written = o[i]
        for j in range(i, num_layers):
            whole = starts[i] @ written
            for reader in [m for m in range(num_layers) if reads_at[m] == j and j > i]:
                core = np.einsum("nrd,mde,mfe->nmrf", whole, left[reader], ends[reader])
                size = np.linalg.norm(whole, axis=(-2, -1))[:, None] * sizes[reader]
                scores[i, :, reader] = np.linalg.norm(core, axis=(-2, -1)) / np.maximum(size, TINY)
            written = weights.after_norms(j, written)
    return scores


class _HeadMatrices:
    """Factors of the matrices of all heads of one attention, [L, N, D, r] and [L, N, r, E]; their
    inner basis is arbitrary."""

    def __init__(self, config: ModelConfig, params: Params, attention: AttentionName) -> None:
        check_choice("attention", attention, get_args(AttentionName))
        if attention != "self" and config.encoder is None:
            raise ValueError(
                f"a model of kind {config.kind!r} has no attention {attention!r}; use 'self'"
            )
        if config.layer_types:
            raise ValueError("layers of several types (layer_types) have no common matrices")
        params = check_params(config, params)
        params = jax.tree.map(lambda a: np.asarray(a, np.float64), params)
        self.is_cross, self.encoder_norm = attention == "cross", None
        if self.is_cross and config.norm.places.final:
            self.encoder_norm = encoder_params(config, params).get("final_norm", {})
        if attention == "encoder":
            params, config = encoder_params(config, params), config.encoder_model
        self.config, self.layout, self.each = config, config.layout, range(config.num_layers)
        maps, heads = self.layout.num_score_maps, self.layout.num_heads
        if maps != heads:  # with a norm between W_V and W_O
            raise ValueError(
                f"layout {self.layout.name!r} has {maps} softmax distributions for {heads} heads: "
                "no head has one QK and one OV matrix"
            )
        self.layers = [layer_params(params["layers"], config.plan, i) for i in self.each]
        self.heads = [head_params(weights, self.is_cross) for weights in self.layers]
        self.kv_sources = tuple(self.each) if self.is_cross else config.plan.kv_sources
        self.sublayer = "cross" if self.is_cross else "attention"

    def qk(self, distance: int) -> tuple[Matrices, Matrices]:
        """scale W_Q [L, N, D, r], W_K^T [L, N, r, E]."""
        if any(extra.name == "talking_heads" for extra in self.layout.extras):
            raise ValueError("talking heads mix the scores of heads: no head has a QK matrix")
        queries = np.stack([self._query(i, distance) for i in self.each])
        return queries, np.stack([self._key_value(i, 0) for i in self.each]).swapaxes(-1, -2)

    def ov(self) -> tuple[Matrices, Matrices]:
        """W_V [L, N, D, r], scale W_O [L, N, r, D]."""
        if extra := self.layout.blocks("vo"):
            raise ValueError(f"extra {extra!r} per element acts between W_V and W_O: no OV matrix")
        values = np.stack([self._key_value(i, 1) for i in self.each])
        return values, np.stack([self._output(i) for i in self.each])

    def after_norms(self, layer: int, written: Matrices) -> Matrices:
        """Outputs [.., D] after the norms of a layer that normalize the residual stream."""
        if self.config.norm.places.after_sum:
            for name in self.config.layer.sublayers:
                written = written @ self._norm(self.layers[layer][name].get("norm", {}))
        return written

    def _norm(self, norm: Params | None) -> Matrices:
        """A norm without its divisor as a matrix [D, D], centring diag(scale); None: no norm."""
        eye = np.eye(self.config.width)
        if norm is None:
            return eye
        kind = self.config.norm.kind
        centred = eye - 1 / len(eye) if kind == "layer" else eye
        return np.asarray(centred * (norm.get("scale", NORM_STARTS[kind]) + 1 - NORM_STARTS[kind]))

    def _norm_before(self, layer: int) -> Params | None:
        """The norm between the residual stream and the heads of a layer."""
        places = self.config.norm.places
        is_own = self.sublayer in places.before
        if not (is_own or places.parallel):
            return None
        norm: Params = self.layers[layer][self.sublayer if is_own else "attention"].get("norm", {})
        return norm

    def _matrix(self, f: Callable[[Array], Array], shape: tuple[int, ...], what: str) -> Matrices:
        """The linear part of f [1, I, *shape] -> [1, I, N, r] as [N, I, r]."""
        size = int(np.prod(shape))
        eye = jnp.eye(size).reshape(1, size, *shape)
        what = f"the {what} of layout {self.layout.name!r}"
        linear = linearize_at(f, eye, what=what, hold_norms=False).linear
        found = np.asarray(linear(eye), np.float64)[0]
        return np.asarray(found.swapaxes(0, 1) if found.ndim == 3 else found)

    def _angles(self, position: int) -> Array | None:
        if self.is_cross:
            return None
        positions = jnp.full(self.config.width, position)
        return rotary_embedding(self.config.positions, self.layout, positions)

    def _query(self, layer: int, distance: int) -> Matrices:
        params, rotate = self.heads[layer], functools.partial(rotated, self._angles(distance))

        def query(x: Array) -> Array:
            return self.layout.project_q(params, self.layout.prepare(params, x), rotate)

        found = self._matrix(query, (self.config.width,), "query")
        matrices = self.layout.score_scale * self._norm(self._norm_before(layer)) @ found
        if self.is_cross:
            return np.asarray(matrices)
        position = jnp.array([max(distance, 0)])
        return np.asarray(query_scale(self.config.attention, layer, position) * matrices)

    def _key_value(self, layer: int, which: int) -> Matrices:
        """[N, E, r] of the keys (0) or values (1) that a layer attends to."""
        source, angles = self.kv_sources[layer], self._angles(0)

        def project(x: Array) -> Array:
            entries = project_kv(self.heads[source], x, self.layout, angles)
            return self.layout.keys_values(self.heads[layer], entries)[which]

        norm = self.encoder_norm if self.is_cross else self._norm_before(source)
        found = self._matrix(project, (self.config.width,), ("key", "value")[which])
        found = self._norm(norm) @ found
        return np.repeat(found, self.layout.num_heads // len(found), axis=0)

    def _output(self, layer: int) -> Matrices:
        params, shape = self.heads[layer], (self.layout.num_heads, self.layout.head_width)
        found = self._matrix(lambda a: self.layout.project_out(params, a), shape, "output")
        scale = 1.0 if self.is_cross else self.config.attention.output_scale
        weights = self.layers[layer][self.sublayer]
        written = scale * found.reshape(*shape, -1) * weights.get(LAYER_SCALE, ONE)["scale"]
        after = weights.get("norm_after", {}) if self.config.norm.places.after else None
        return np.asarray(written @ self._norm(after))
