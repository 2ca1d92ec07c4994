"""Flax modules that own parameters and call the pure functions."""

from typing import Unpack

import flax.linen as nn
from jaxtyping import Array, Float

from attnlab.attention import AttentionOptions
from attnlab.heads import Layout, multi_head_attention
from attnlab.heads import init as init_heads
from attnlab.heads.inputs import Context
from attnlab.models.ffn import feed_forward, init_ffn
from attnlab.models.layer import NO_TEXT_INPUTS, TextInputs
from attnlab.models.parameters import empty_sublayers, init_sublayers
from attnlab.models.specs import FFN, LayerSpec
from attnlab.models.stack import LayersOfType, StackInputs, StackOutputs, run_layers
from attnlab.sharing import Params, Plan
from attnlab.tap import Patches, Tap


class MultiHeadAttention(nn.Module):
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
        **options: Unpack[AttentionOptions],
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
        params = self.param("heads", lambda key: init_heads(key, self.layout, std=self.init_std))
        if self.dropout_rate > 0 and not deterministic:
            options.setdefault("dropout_rate", self.dropout_rate)
            if "dropout_key" not in options:
                options["dropout_key"] = self.make_rng("dropout")
        options.setdefault("implementation", self.implementation)
        return multi_head_attention(params, x, self.layout, context, tap=tap, **options)


class FeedForward(nn.Module):
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
          ValueError: the FFN has width 0.
        """
        if not self.ffn.width:
            raise ValueError("FeedForward needs an FFN with a width of at least 1, not 0")
        params = self.param(
            "ffn", lambda key: init_ffn(key, x.shape[-1], self.ffn, std=self.init_std)
        )
        drops = self.dropout_rate > 0 and not deterministic
        key = self.make_rng("dropout") if drops else None
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


class LayerStack(nn.Module):
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
        params = _stacked_params(self)
        drops = self.spec.dropout.is_active and not deterministic
        layers = LayersOfType(params=params, plan=self.plan, spec=self.spec, text=text)
        inputs = StackInputs(
            head_mask=head_mask,
            dropout_key=self.make_rng("dropout") if drops else None,
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
