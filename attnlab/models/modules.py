"""Flax modules that own parameters and call the pure functions."""

import contextvars
import dataclasses
import functools
import inspect
from collections.abc import Mapping
from typing import Any, TypeVar

import flax.linen as nn
import jax
from jaxtyping import Array, Float

from attnlab.attention.dropout import is_key
from attnlab.fields import check_field
from attnlab.heads import Layout, multi_head_attention
from attnlab.heads import init as init_heads
from attnlab.heads.attention import Context
from attnlab.heads.layout import check_params as check_head_params
from attnlab.models.ffn import feed_forward, init_ffn
from attnlab.models.layer import NO_TEXT_INPUTS, TextInputs
from attnlab.models.mismatch import describe_mismatch
from attnlab.models.parameters import empty_sublayers, init_sublayers
from attnlab.models.specs import FFN, LayerSpec
from attnlab.models.stack import LayersOfType, StackInputs, StackOutputs, run_layers
from attnlab.names import check_keywords
from attnlab.sharing import Params, Plan, PyTree
from attnlab.tap import Patches, Tap

ModuleT = TypeVar("ModuleT", bound="CheckedModule")
SHAPES_ONLY = contextvars.ContextVar("SHAPES_ONLY", default=False)
"""Within `init`, which drops the outputs: a model checks the call and does not compute it."""


class CheckedModule(nn.Module):
    """Checks fields, and the arguments of `init` and `apply`, before Flax, whose messages name no
    weight."""

    def __new__(cls: type["ModuleT"], *args: object, **fields: object) -> "ModuleT":
        """Raises TypeError for an unknown field; the message lists the fields."""
        of_flax = {"parent", "name"}
        known = [f.name for f in dataclasses.fields(cls) if f.name not in of_flax]
        check_keywords(cls.__name__, [n for n in fields if n not in of_flax], known)
        return object.__new__(cls)

    @nn.nowrap
    def init(self, rngs: Any, *args: Any, **kwargs: Any) -> Any:
        """`flax.linen.Module.init`: {"params": initial parameters} for a random key and the
        arguments of a call.

        Raises:
          TypeError: a call has no such keyword.
          ValueError: `rngs` is neither a random key nor a dict of random keys.
        """
        keys = rngs.values() if isinstance(rngs, Mapping) else [rngs]
        if not all(map(is_key, keys)):
            raise ValueError(
                f"init takes a random key first, as of jax.random.key(0), not {rngs!r:.80}; the "
                "order is (key, inputs)"
            )
        self._check_keywords("init", kwargs)
        token = SHAPES_ONLY.set(True)
        try:
            return super().init(rngs, *args, **kwargs)
        finally:
            SHAPES_ONLY.reset(token)

    @nn.nowrap
    def apply(self, variables: Mapping[str, PyTree], *args: Any, **kwargs: Any) -> Any:
        """`flax.linen.Module.apply`: the outputs for {"params": params} and the arguments of a
        call.

        Raises:
          TypeError: a call has no such keyword.
          ValueError: `variables` are not {"params": params}, or params are those of another module.
        """
        if not isinstance(variables, Mapping):
            raise ValueError(
                f"apply takes {{'params': params}} first, not {type(variables).__name__}; the "
                "order is (variables, inputs)"
            )
        if "params" not in variables:
            raise ValueError(
                "apply takes {'params': params} as its first argument, not params alone"
            )
        params = variables["params"]
        if not isinstance(params, Mapping) or "params" in params:
            self._check(params, {})
        self._check_keywords("apply", kwargs)
        return super().apply(variables, *args, **kwargs)

    @nn.nowrap
    def dropout_key(self) -> Array:
        """The next random key for dropout.

        Raises:
          ValueError: the call has none.
        """
        if not (self.has_rng("dropout") or self.has_rng("params")):  # Flax takes either
            raise ValueError(
                "dropout needs a random key: pass rngs={'dropout': key}, or deterministic=True"
            )
        return self.make_rng("dropout")

    @nn.nowrap
    def _check_keywords(self, function: str, given: Mapping[str, object]) -> None:
        """Of the keywords of a call; options of `multi_head_attention` are checked there."""
        call = inspect.signature(self.__call__).parameters
        if given.get("method") is None and "options" not in call:
            flax = inspect.signature(getattr(nn.Module, function)).parameters
            check_keywords(type(self).__name__, [n for n in given if n not in flax], call)

    @nn.nowrap
    def _check(self, params: object, expected: Mapping[str, object]) -> None:
        if problem := describe_mismatch(expected, params):
            raise ValueError(f"params are not those of this {type(self).__name__}: {problem}")


class MultiHeadAttention(CheckedModule):
    """`multi_head_attention` with parameters of its own: {"heads": {q, k, v, o, ...}}.

    Attributes:
      layout: the heads, with their width.
      dropout_rate: of attention probabilities, in calls with deterministic=False.
      init_std: one standard deviation for all initial matrices; None is 1/sqrt(fan-in).
      implementation: backend, see `attnlab.explain`; None chooses.

    >>> import jax
    >>> from attnlab.heads import Standard
    >>> module = MultiHeadAttention(Standard(width=6, num_heads=2, num_kv_heads=1))
    >>> shapes = jax.eval_shape(module.init, jax.random.key(0), jax.numpy.ones((1, 5, 6)))["params"]
    >>> {name: a.shape for name, a in shapes["heads"].items()}
    {'k': (6, 1, 3), 'o': (2, 3, 6), 'q': (6, 2, 3), 'v': (6, 1, 3)}
    """

    layout: Layout
    dropout_rate: float = 0.0
    init_std: float | None = None
    implementation: str | None = None

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "B T D"],
        context: Context | None = None,
        *,
        deterministic: bool = True,
        tap: Tap | None = None,
        **options: Any,
    ) -> Float[Array, "B T O"]:
        """Heads of x, which attend to the context (default x).

        Options of the call, such as `implementation`, take precedence over those of the module.

        Args:
          x: query input [B, T, D].
          context: key/value input [B, S, E], or a pair (key input, value input); None is x.
          deterministic: no dropout; else pass rngs={"dropout": key}.
          tap: records or replaces values, as in `multi_head_attention`.
          **options: of `attnlab.dot_product_attention`: mask, is_causal, ...

        Raises:
          TypeError, ValueError: inputs or options that do not fit, as in `multi_head_attention`.
        """
        if not self.is_mutable_collection("params"):
            if "heads" not in (given := self.variables.get("params", {})):
                raise ValueError(
                    f"'heads' is missing in params, which have {', '.join(given) or 'nothing'}; "
                    "pass {'params': {'heads': weights}}"
                )
            check_head_params(given["heads"], self.layout)
        params = self.param("heads", lambda key: init_heads(key, self.layout, std=self.init_std))
        if self.dropout_rate > 0 and not deterministic:
            options.setdefault("dropout_rate", self.dropout_rate)
            if "dropout_key" not in options:
                options["dropout_key"] = self.dropout_key()
        options.setdefault("implementation", self.implementation)
        output: Array = multi_head_attention(params, x, self.layout, context, tap=tap, **options)
        return output


class FeedForward(CheckedModule):
    """`feed_forward` with parameters of its own: {"ffn": {up, down, ...}}.

    Attributes:
      ffn: width of the hidden layer, activation, experts. The width of x is that of the input.
      dropout_rate: of the hidden layer, in calls with deterministic=False.
      init_std: one standard deviation for all initial matrices; None is 1/sqrt(fan-in).

    >>> import jax
    >>> module = FeedForward(FFN(width=8, activation="gated_silu", bias=False))
    >>> shapes = jax.eval_shape(module.init, jax.random.key(0), jax.numpy.ones((1, 5, 6)))["params"]
    >>> {name: a.shape for name, a in shapes["ffn"].items()}
    {'down': (8, 6), 'gate': (6, 8), 'up': (6, 8)}
    """

    ffn: FFN = FFN()
    dropout_rate: float = 0.0
    init_std: float | None = None

    @nn.compact
    def __call__(
        self, x: Float[Array, "*B D"], *, deterministic: bool = True
    ) -> Float[Array, "*B D"]:
        """The FFN at each position.

        Args:
          x: [..., D].
          deterministic: no dropout; else pass rngs={"dropout": key}.

        Raises:
          ValueError: `ffn` is no FFN, or has width 0.
        """
        check_field("ffn", self.ffn, FFN)
        if not self.ffn.width:
            raise ValueError("FeedForward needs an FFN with a width of at least 1, not 0")
        if not self.is_mutable_collection("params"):
            self._check(self.variables.get("params", {}), _ffn_shapes(x.shape[-1], self.ffn))
        params = self.param(
            "ffn", lambda key: init_ffn(key, x.shape[-1], self.ffn, std=self.init_std)
        )
        drops = self.dropout_rate > 0 and not deterministic
        key = self.dropout_key() if drops else None
        return feed_forward(params, x, self.ffn, dropout_rate=self.dropout_rate, dropout_key=key)


class StackedParams(nn.Module):
    """The parameters of layers of one type: sublayer -> arrays [G, ...]."""

    spec: LayerSpec
    plan: Plan
    init_std: float | None = None
    residual_scale: float = 1.0

    @nn.compact
    def __call__(self) -> Params:
        """Sublayer -> parameters, initialized where there are none."""
        return _stacked_params(self)


class LayerStack(CheckedModule):
    """`run_layers` of one layer type with parameters of its own: sublayer -> arrays [G, ...].

    Attributes:
      spec: one layer.
      plan: which layer uses which parameter group of each sublayer.
      init_std: one standard deviation for all initial matrices; None is 1/sqrt(fan-in).
      residual_scale: multiplies the initial matrices that write into the residual stream.
      remat: compute activations again in the backward pass, which saves memory.

    >>> import jax
    >>> from attnlab.heads import Standard
    >>> spec = LayerSpec(heads=Standard(width=6, num_heads=2), ffn=FFN(width=8))
    >>> stack = LayerStack(spec, Plan(attention=(0, 0, 0), ffn=(0, 1, 2)))
    >>> shapes = jax.eval_shape(stack.init, jax.random.key(0), jax.numpy.ones((1, 5, 6)))["params"]
    >>> shapes["attention"]["q"].shape, shapes["ffn"]["up"].shape
    ((1, 6, 2, 3), (3, 6, 8))
    """

    spec: LayerSpec
    plan: Plan
    init_std: float | None = None
    residual_scale: float = 1.0
    remat: bool = True

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "B T D"],
        text: TextInputs = NO_TEXT_INPUTS,
        *,
        head_mask: Array | None = None,
        capture: tuple[str, ...] = (),
        patch: Patches | None = None,
        deterministic: bool = True,
    ) -> StackOutputs:
        """x after all layers.

        Args:
          x: input of the first layer [B, T, D].
          text: masks, positions and second text, the same for all layers.
          head_mask, capture, patch: as in `StackInputs`.
          deterministic: no dropout; else pass rngs={"dropout": key}.

        Raises:
          ValueError: a plan with other sublayers than the layer, or inputs that do not fit.
        """
        if not isinstance(self.plan, Plan):
            raise ValueError(
                f"plan must be a Plan, not {self.plan!r}; write one such as "
                "attnlab.sharing.as_plan('albert', num_layers)"
            )
        if not self.is_mutable_collection("params"):
            own = {"layers": self.variables.get("params", {})}  # names as in a model
            self._check(own, _stack_shapes(self.spec, self.plan))
        params = _stacked_params(self)
        drops = self.spec.dropout.is_active and not deterministic
        layers = LayersOfType(params=params, plan=self.plan, spec=self.spec, text=text)
        inputs = StackInputs(
            head_mask=head_mask,
            dropout_key=self.dropout_key() if drops else None,
            capture=capture,
            patch=patch,
            remat=self.remat,
        )
        return run_layers({"layers": layers}, ["layers"] * self.plan.num_layers, x, inputs)


def _stacked_params(module: StackedParams | LayerStack) -> Params:
    """Sublayer -> parameters that the module owns; empty where a sublayer has none."""
    inits = init_sublayers(
        module.spec, module.plan, std=module.init_std, residual_scale=module.residual_scale
    )
    params: Params = {name: module.param(name, init) for name, init in inits.items()}
    return empty_sublayers(module.spec) | params


@functools.lru_cache(maxsize=64)
def _ffn_shapes(width: int, ffn: FFN) -> Mapping[str, object]:
    return {"ffn": jax.eval_shape(lambda key: init_ffn(key, width, ffn), jax.random.key(0))}


@functools.lru_cache(maxsize=64)
def _stack_shapes(spec: LayerSpec, plan: Plan) -> Mapping[str, object]:
    inits = init_sublayers(spec, plan, std=None, residual_scale=1.0)
    return {"layers": {n: jax.eval_shape(init, jax.random.key(0)) for n, init in inits.items()}}
