"""Heads that learn to close: hard-concrete gates (Voita et al. 2019), for any model and task.

`Gated` is a model with gates before its heads, for whatever trains a model; `with_gates` makes of
the optimizer of the weights one that pulls the gates shut; `close_gates` makes the smaller model.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from attnlab.inspect.importance import HEADS, Gates, gates_of
from attnlab.model.config import ModelConfig
from attnlab.observe import Edit
from attnlab.transforms import remove_heads, scale_heads

BETA, GAMMA, ZETA = 2 / 3, -0.1, 1.1
"""Temperature, and the ends to which the gate is stretched (Louizos et al. 2018, section 4.1)."""


def hard_concrete(log_alpha: Float[Array, "*R"], key: Array) -> Float[Array, "*R"]:
    """A draw of every gate, in [0, 1], with a gradient; 0 and 1 themselves are likely.

    u ~ U(0, 1), s = sigmoid((ln u - ln(1 - u) + log_alpha) / beta),
    z = min(1, max(0, s (zeta - gamma) + gamma)), beta = 2/3, gamma = -0.1, zeta = 1.1: equations 10
    and 11 of Louizos et al. 2018 (arXiv 1712.01312); equation 6 of Voita et al. 2019 (arXiv
    1905.09418), whose code has beta = 0.33.

    >>> z = hard_concrete(jnp.array([-9.0, 9.0]), jax.random.key(0))
    >>> z.tolist()
    [0.0, 1.0]
    """
    log_alpha = jnp.asarray(log_alpha)
    tiny = float(jnp.finfo(log_alpha.dtype).tiny)
    u = jax.random.uniform(key, log_alpha.shape, log_alpha.dtype, minval=tiny)
    noise = jnp.log(u) - jnp.log1p(-u)
    return _stretched((noise + log_alpha) / BETA)


def gate_values(log_alpha: Float[Array, "*R"]) -> Float[Array, "*R"]:
    """What the gates are once they are learnt, without a draw:
    min(1, max(0, sigmoid(log_alpha) (zeta - gamma) + gamma)) (Louizos et al. 2018, equation 13).
    0 from log_alpha = -ln 11 = -2.4 down, 1 from ln 11 up.

    >>> gate_values(jnp.array([-2.5, 0.0, 2.5])).tolist()
    [0.0, 0.5, 1.0]
    """
    return _stretched(jnp.asarray(log_alpha))


def chance_open(log_alpha: Float[Array, "*R"]) -> Float[Array, "*R"]:
    """P(z > 0) = sigmoid(log_alpha - beta ln(-gamma / zeta)) of every gate: its expected L0 norm
    (Louizos et al. 2018, equation 12).

    >>> print(f"{chance_open(0.0):.4f}")
    0.8318
    """
    return jax.nn.sigmoid(log_alpha - BETA * np.log(-GAMMA / ZETA))


def open_share(log_alphas: Any) -> Array:
    """Expected L0 of all gates of a tree, divided by their number."""
    leaves = [jnp.ravel(chance_open(a)) for a in jax.tree.leaves(log_alphas)]
    return jnp.mean(jnp.concatenate(leaves))


def _stretched(score: Array) -> Array:
    return jnp.clip(jax.nn.sigmoid(score) * (ZETA - GAMMA) + GAMMA, 0, 1)


def every_gate(config: ModelConfig, *, by: str = "layer") -> tuple[Gates, ...]:
    """`gates_of` all heads of a model: of an encoder-decoder three, else one."""
    both = config.kind == "encoder_decoder"
    names = [name for name, (_, part) in HEADS.items() if both or name == "heads"]
    if "cross" not in config.layer_plan and both:
        names.remove("cross.heads")
    return tuple(gates_of(config, name, by=by) for name in names)


@dataclasses.dataclass(frozen=True)
class Gated:
    """A model with gates that are drawn in training: z heads in the place of heads.

    Its weights are {"model": those of the model, "gates": name -> log_alpha [R, N]}. A call draws
    every gate once for all texts when it is not `deterministic`, from the stream "dropout", and
    takes `gate_values` when it is. Where the rows of `gates` are parameter groups, a head of a
    group has one gate in all its layers. It has what `attnlab.training` asks of a model.

    >>> config = ModelConfig(width=8, num_layers=3, num_heads=2, plan="albert")
    >>> gated = Gated(config.build(), every_gate(config, by="group"))
    >>> params = gated.init(jax.random.key(0), jnp.ones((1, 4), int))["params"]
    >>> params["gates"]["heads"].tolist()
    [[2.0, 2.0]]
    """

    model: Any
    gates: tuple[Gates, ...]
    begin: float = 2.0
    """The first log_alpha: 97 % of the draws are not 0, 60 % are 1"""

    @property
    def config(self) -> ModelConfig:
        """That of the model."""
        return self.model.config

    def init(self, key: Any, *texts: Any, **inputs: Any) -> dict[str, Any]:
        """{"params": fresh weights, and gates that are open}."""
        return {"params": self.around(self.model.init(key, *texts, **inputs)["params"])}

    def around(self, params: Any) -> dict[str, Any]:
        """Weights that are there, with gates that are open: to start from a trained model."""
        start = {one.name: jnp.full(one.shape, self.begin, jnp.float32) for one in self.gates}
        return {"model": params, "gates": start}

    def edit(self, values: Mapping[str, Array]) -> Edit:
        """Name -> gates [R, N], as an edit of a call."""
        return {k: f for one in self.gates for k, f in one.edit(values[one.name]).items()}

    def apply(
        self,
        variables: Mapping[str, Any],
        *texts: Any,
        deterministic: bool = True,
        rngs: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> Any:
        """The call of the model behind the gates; `options` are its own, without edits of heads."""
        params = variables["params"]
        alphas = params["gates"]
        if deterministic:
            values = {name: gate_values(a) for name, a in alphas.items()}
        else:
            if not rngs or "dropout" not in rngs:
                raise ValueError(
                    'gates are drawn: give rngs={"dropout": key}, or deterministic=True'
                )
            keys = jax.random.split(jax.random.fold_in(rngs["dropout"], OF_GATES), len(alphas))
            values = {
                name: hard_concrete(a, key)
                for (name, a), key in zip(sorted(alphas.items()), keys, strict=True)
            }
        own, given = self.edit(values), dict(options.pop("edit", None) or {})
        if both := sorted(own.keys() & given):
            raise ValueError(f"the gates are the edit of {', '.join(both)}; leave it out")
        return self.model.apply(
            {"params": params["model"]},
            *texts,
            deterministic=deterministic,
            rngs=rngs,
            edit={**given, **own},
            **options,
        )


OF_GATES = 2**31 - 1
"""Folded into the key of dropout for the gates."""


def with_gates(transform: Any, *, pressure: float, rate: float = 0.05) -> Any:
    """The optimizer of a `Gated` model: `transform` of its weights, and of its gates Adam at
    `rate` on loss + `pressure` `open_share`.

    The loss stays the task's own: the penalty has no data in it, so its gradient is added here.
    `pressure` is what all heads together cost, in nats where the loss is (lambda of Voita et al.
    2019, section 5.1, times the number of heads). `transform` sees the model's weights alone.

    >>> import optax
    >>> with_gates(optax.sgd(0.1), pressure=-1.0)
    Traceback (most recent call last):
    ValueError: pressure must be 0 or more, not -1.0
    """
    import optax

    if pressure < 0:
        raise ValueError(f"pressure must be 0 or more, not {pressure}")
    gates = optax.adam(rate)

    def init(params: Any) -> Any:
        return transform.init(params["model"]), gates.init(params["gates"])

    def update(grads: Any, state: Any, params: Any = None) -> Any:
        pulled = jax.grad(lambda alphas: pressure * open_share(alphas))(params["gates"])
        felt = jax.tree.map(jnp.add, grads["gates"], pulled)
        model, of_model = transform.update(grads["model"], state[0], params["model"])
        alphas, of_gates = gates.update(felt, state[1], params["gates"])
        return {"model": model, "gates": alphas}, (of_model, of_gates)

    return optax.GradientTransformation(init, update)


class Closed(NamedTuple):
    """A smaller model that is the same function as one with gates."""

    config: ModelConfig
    params: dict[str, Any]
    edit: Edit
    """What is left of the gates, for `edit` of a call; {} where all of it is in the weights"""
    idle: dict[str, dict[int, tuple[int, ...]]]
    """The heads that fill up a place, as `remove_heads` gives them"""


def close_gates(
    config: ModelConfig,
    params: Any,
    gates: Sequence[Gates],
    values: Mapping[str, Float[Array, "R N"]],
) -> Closed:
    """The model without the heads whose gate is 0 in every use; `values` are numbers, name ->
    [R, N], not traced.

    A gate that is the same in all layers of a parameter group goes into the output map; where
    layers of a group have different gates, these stay an edit. Raises ValueError where
    `remove_heads` does (nothing would be saved, ...), and where encoder and decoder share their
    layers.
    """
    if config.share_encoder:
        raise ValueError(
            "encoder and decoder share their heads; use attnlab.transforms.untie_encoder first, or "
            "keep the gates"
        )
    of_layer, groups, lost = {}, {}, {}
    for one in gates:
        name = one.name.removesuffix(".heads")  # as remove_heads calls them
        encoder, part = HEADS[one.name]
        plan = config.encoder_layer_plan if encoder else config.layer_plan
        of_layer[name] = np.asarray(values[one.name])[list(one.rows)]
        groups[name] = np.array(plan.indices(part))
        shut = of_layer[name] == 0
        in_all = [shut[groups[name] == group].all(0) for group in range(plan.num_groups[part])]
        lost[name] = {group: np.flatnonzero(gone).tolist() for group, gone in enumerate(in_all)}
    small, weights, idle = remove_heads(
        config, params, lost.get("heads", {}), cross=lost.get("cross"), encoder=lost.get("encoder")
    )
    into: dict[str, Array] = {}
    edit: dict[str, Any] = {}
    for name, gone in lost.items():
        every, filled = set(range(config.num_heads)), idle.get(name, {})
        stays = [sorted(every - set(gone[group]) | set(filled.get(group, ()))) for group in gone]
        rows = zip(of_layer[name], groups[name], strict=True)
        left = jnp.stack([row[stays[group]] for row, group in rows])
        first = left[np.array([list(groups[name]).index(group) for group in gone])]
        if (left == first[groups[name]]).all():
            into[name] = first
        else:
            own = "heads" if name == "heads" else f"{name}.heads"
            edit |= Gates(own, tuple(range(len(left))), left.shape[1]).edit(left)
    return Closed(small, scale_heads(small, weights, into), edit, idle)
