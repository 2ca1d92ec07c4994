"""Hard-concrete gates: heads that learn to close (Voita et al. 2019), for any model and objective.

`GatedModel` is a model with gates on its heads that trains like any other; `gated_optimizer` adds
the penalty that closes gates; `remove_closed_heads` makes the smaller model.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from attnlab.interpret.importance import SUBLAYERS, HeadGates
from attnlab.models.config import FlaxModel, ModelConfig
from attnlab.models.forward import Outputs
from attnlab.sharing import Params, PyTree
from attnlab.tap import Patches
from attnlab.transforms import remove_heads, scale_heads

if TYPE_CHECKING:
    import optax

BETA, GAMMA, ZETA = 2 / 3, -0.1, 1.1
"""Temperature, and the ends to which the gate is stretched (Louizos et al. 2018, section 4.1)."""
GATE_KEY = 2**31 - 1
"""Folded into the dropout key for the gates."""


def hard_concrete(log_alpha: Float[ArrayLike, "*R"], key: Array) -> Float[Array, "*R"]:
    """A random sample of every gate, in [0, 1] and often exactly 0 or 1, with a gradient.

    u ~ U(0, 1), s = sigmoid((ln u - ln(1 - u) + log_alpha) / beta),
    z = min(1, max(0, s (zeta - gamma) + gamma)), beta = 2/3, gamma = -0.1, zeta = 1.1: equations 10
    and 11 of Louizos et al. 2018 (arXiv 1712.01312); equation 6 of Voita et al. 2019 (arXiv
    1905.09418), whose code has beta = 0.33.

    Args:
      log_alpha: of every gate; the larger, the more often it is open (`open_probability`).
      key: random key.

    >>> hard_concrete(jnp.array([-9.0, 9.0]), jax.random.key(0)).tolist()
    [0.0, 1.0]
    """
    log_alpha = 1.0 * jnp.asarray(log_alpha)  # whole numbers too
    tiny = float(jnp.finfo(log_alpha.dtype).tiny)  # type: ignore[no-untyped-call]
    u = jax.random.uniform(key, log_alpha.shape, log_alpha.dtype, minval=tiny)
    return _stretched((jnp.log(u) - jnp.log1p(-u) + log_alpha) / BETA)


def gate_values(log_alpha: Float[ArrayLike, "*R"]) -> Float[Array, "*R"]:
    """The gates of a trained model, without sampling (Louizos et al. 2018, equation 13).

    min(1, max(0, sigmoid(log_alpha) (zeta - gamma) + gamma)): 0 for log_alpha <= -ln 11 = -2.4, 1
    for log_alpha >= ln 11.

    >>> gate_values(jnp.array([-2.5, 0.0, 2.5])).tolist()
    [0.0, 0.5, 1.0]
    """
    return _stretched(1.0 * jnp.asarray(log_alpha))  # whole numbers too


def open_probability(log_alpha: Float[ArrayLike, "*R"]) -> Float[Array, "*R"]:
    """P(z > 0) = sigmoid(log_alpha - beta ln(-gamma / zeta)), the expected L0 norm of every gate
    (Louizos et al. 2018, equation 12).

    >>> print(f"{open_probability(0.0):.4f}")
    0.8318
    """
    return jax.nn.sigmoid(jnp.asarray(log_alpha) - BETA * np.log(-GAMMA / ZETA))


def expected_open_share(log_alphas: PyTree) -> Float[Array, ""]:
    """Mean `open_probability` of all gates of a tree.

    >>> bool(expected_open_share({"layers": jnp.full((2, 4), 9.0)}) > 0.99)
    True
    """
    leaves = [jnp.ravel(open_probability(a)) for a in jax.tree.leaves(log_alphas)]
    return jnp.mean(jnp.concatenate(leaves))


def _stretched(score: Array) -> Array:
    return jnp.clip(jax.nn.sigmoid(score) * (ZETA - GAMMA) + GAMMA, 0, 1)


@dataclasses.dataclass(frozen=True)
class GatedModel:
    """A model whose heads are multiplied by gates, which are sampled in training.

    Its parameters are {"model": those of the model, "gates": name -> log_alpha [R, N]}. A call
    samples every gate once for all texts unless it is `deterministic`, with the rng "dropout"; else
    it takes `gate_values`. Gates by parameter group are the same in all layers of the group. It can
    be trained in the place of a model.

    Attributes:
      model: the model.
      gates: of `all_head_gates`.
      initial: first log_alpha; with 2, 97 % of the samples are not 0 and 60 % are 1.

    >>> from attnlab.interpret.importance import all_head_gates
    >>> config = ModelConfig(width=8, num_layers=3, sharing="albert")
    >>> gated = GatedModel(config.build(), all_head_gates(config, by="group"))
    >>> params = gated.init(jax.random.key(0), jnp.ones((1, 4), int))["params"]
    >>> params["gates"]["heads"].tolist()
    [[2.0, 2.0, 2.0, 2.0]]
    """

    model: FlaxModel
    gates: tuple[HeadGates, ...]
    initial: float = 2.0

    @property
    def config(self) -> ModelConfig:
        """The config of the model."""
        return self.model.config

    def init(self, key: Array, *texts: ArrayLike, **inputs: ArrayLike) -> dict[str, Params]:
        """{"params": initial parameters, with open gates}."""
        params = self.model.init(key, *texts, **inputs)["params"]
        return {"params": self.with_gates(params)}

    def with_gates(self, params: Params) -> Params:
        """Parameters of the model together with open gates, to start from a trained model."""
        gates = {one.name: jnp.full(one.shape, self.initial, jnp.float32) for one in self.gates}
        return {"model": params, "gates": gates}

    def patch(self, values: Mapping[str, Float[ArrayLike, "R N"]]) -> Patches:
        """Name -> gates, as `patch` of a call."""
        return {k: f for one in self.gates for k, f in one.patch(values[one.name]).items()}

    def apply(
        self,
        variables: Mapping[str, Params],
        *texts: ArrayLike,
        deterministic: bool = True,
        rngs: Mapping[str, Array] | None = None,
        patch: Patches | None = None,
        **inputs: object,
    ) -> Outputs:
        """The call of the model with gated heads; other arguments are those of the model.

        Args:
          variables: {"params": of `init` or `with_gates`}.
          *texts: tokens [B, T].
          deterministic: take `gate_values`, and no dropout; else gates are sampled.
          rngs: {"dropout": key}, for gates and dropout.
          patch: of values other than the gated heads.
          **inputs: fields of `ModelInputs`.

        Raises:
          ValueError: gates are to be sampled without a key, or `patch` has the heads that they
            gate.
        """
        alphas: dict[str, Array] = variables["params"]["gates"]
        if deterministic:
            values = {name: gate_values(a) for name, a in alphas.items()}
        else:
            if not rngs or "dropout" not in rngs:
                raise ValueError(
                    'gates are sampled: pass rngs={"dropout": key}, or deterministic=True'
                )
            keys = jax.random.split(jax.random.fold_in(rngs["dropout"], GATE_KEY), len(alphas))
            values = {
                name: hard_concrete(a, key)
                for (name, a), key in zip(sorted(alphas.items()), keys, strict=True)
            }
        gates, others = self.patch(values), dict(patch or {})
        if both := sorted(gates.keys() & others):
            raise ValueError(f"the gates patch {', '.join(both)}; leave it out of patch")
        params = {"params": variables["params"]["model"]}
        options = {"deterministic": deterministic, "rngs": rngs, "patch": {**others, **gates}}
        return cast(Outputs, self.model.apply(params, *texts, **options, **inputs))


def gated_optimizer(
    optimizer: "optax.GradientTransformation", *, penalty: float, learning_rate: float = 0.05
) -> "optax.GradientTransformation":
    """The optimizer of a `GatedModel`: `optimizer` for the model, Adam for the gates on
    loss + `penalty` * `expected_open_share`.

    The penalty does not depend on data, so its gradient is added here and the reported loss stays
    that of the objective.

    Args:
      optimizer: of the parameters of the model.
      penalty: what all heads together cost, in units of the loss (lambda of Voita et al. 2019,
        section 5.1, times the number of heads).
      learning_rate: of the gates.

    Raises:
      ValueError: `penalty` is negative or NaN.

    >>> import optax
    >>> gated_optimizer(optax.sgd(0.1), penalty=-1.0)
    Traceback (most recent call last):
    ValueError: penalty must be 0 or more, not -1.0
    """
    import optax

    if not penalty >= 0:
        raise ValueError(f"penalty must be 0 or more, not {penalty}")
    adam = optax.adam(learning_rate)

    def init(params: optax.Params) -> optax.OptState:
        tree = cast(Params, params)
        return optimizer.init(tree["model"]), adam.init(tree["gates"])

    def update(
        updates: optax.Updates, state: optax.OptState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, optax.OptState]:
        grads, tree = cast(Params, updates), cast(Params, params)
        model_state, gate_state = cast(tuple[optax.OptState, optax.OptState], state)
        pull = jax.grad(lambda alphas: penalty * expected_open_share(alphas))(tree["gates"])
        gradient = jax.tree.map(jnp.add, grads["gates"], pull)
        model, model_state = optimizer.update(grads["model"], model_state, tree["model"])
        gates, gate_state = adam.update(gradient, gate_state, tree["gates"])
        return {"model": model, "gates": gates}, (model_state, gate_state)

    return optax.GradientTransformation(init, update)


class PrunedModel(NamedTuple):
    """A smaller model that computes the same as one with gates."""

    config: ModelConfig
    """Of the smaller model."""
    params: Params
    """Its parameters."""
    patch: Patches
    """The remaining gates, for `patch` of a call; {} if all are in the parameters."""
    zeroed: dict[str, dict[int, tuple[int, ...]]]
    """Removed heads that stay as padding, as `remove_heads` returns them."""


def remove_closed_heads(
    config: ModelConfig,
    params: Params,
    gates: Sequence[HeadGates],
    values: Mapping[str, Float[ArrayLike, "R N"]],
) -> PrunedModel:
    """The model without the heads whose gate is 0 in every layer that uses them.

    Gates that are equal in all layers of a parameter group go into the output projection; others
    stay a patch.

    Args:
      config, params: of the model.
      gates: of `all_head_gates`.
      values: name -> gates, concrete arrays.

    Raises:
      ValueError: where `remove_heads` raises (the model becomes no smaller, ...), or the
        encoder and the decoder share their layers.

    >>> from attnlab.interpret import all_head_gates
    >>> config = ModelConfig(width=8, num_layers=2)
    >>> params = jax.jit(config.build().init)(jax.random.key(0), jnp.zeros((1, 2), int))["params"]
    >>> gates = all_head_gates(config)
    >>> closed = {gates[0].name: jnp.array([[1.0, 0.0, 1.0, 0.0]] * 2)}
    >>> remove_closed_heads(config, params, gates, closed).config.heads
    Standard(num_heads=2, biases=('q', 'k', 'v', 'o'), head_dim=2, value_dim=2, num_kv_heads=2)
    """
    if config.encoder is not None and config.encoder.shares_decoder:
        raise ValueError(
            "encoder and decoder share their heads; use attnlab.transforms.untie_encoder first, or "
            "keep the gates"
        )
    per_layer, groups, closed = {}, {}, {}
    for one in gates:
        name = one.name.removesuffix(".heads")  # as remove_heads calls them
        is_encoder, sublayer = SUBLAYERS[one.name]
        plan = config.encoder_model.plan if is_encoder else config.plan
        per_layer[name] = np.asarray(values[one.name])[list(one.rows)]
        groups[name] = np.array(plan.indices(sublayer))
        zero = per_layer[name] == 0
        closed[name] = {
            group: np.flatnonzero(zero[groups[name] == group].all(0)).tolist()
            for group in range(plan.num_groups[sublayer])
        }
    smaller, params, zeroed = remove_heads(
        config,
        params,
        closed.get("heads", {}),
        cross=closed.get("cross"),
        encoder=closed.get("encoder"),
    )
    absorbed: dict[str, Array] = {}
    patch: Patches = {}
    for one, (name, removed) in zip(gates, closed.items(), strict=True):
        filled = zeroed.get(name, {})
        kept = {
            group: sorted(set(range(one.num_heads)) - set(lost) | set(filled.get(group, ())))
            for group, lost in removed.items()
        }
        rows = zip(per_layer[name], groups[name], strict=True)
        left = jnp.stack([row[kept[group]] for row, group in rows])
        first = left[np.array([list(groups[name]).index(group) for group in removed])]
        if (left == first[groups[name]]).all():
            absorbed[name] = first
        else:
            remaining = HeadGates(one.name, tuple(range(len(left))), left.shape[1])
            patch = {**patch, **remaining.patch(left)}
    return PrunedModel(smaller, scale_heads(smaller, params, absorbed), patch, zeroed)
