"""Flax modules that own parameters and call the pure functions.

model = ModelConfig(width=64, num_layers=4).build()
params = model.init(jax.random.key(0), tokens)["params"]
outputs = model.apply({"params": params}, tokens, capture=("probs",))
"""

import contextvars
import functools
from collections.abc import Iterable, Mapping
from typing import Any

import flax.linen as nn
import jax
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from attnlab.attention.dropout import is_key
from attnlab.fields import check_field
from attnlab.heads import Layout, multi_head_attention
from attnlab.heads import init as init_heads
from attnlab.heads.attention import Context
from attnlab.heads.layout import describe_mismatch, shapes_by_path
from attnlab.models.config import MODULES, ModelConfig
from attnlab.models.ffn import feed_forward, init_ffn
from attnlab.models.forward import ModelInputs, Outputs, run_model
from attnlab.models.layer import LayerInputs, layer_values
from attnlab.models.params import (
    empty_sublayers,
    init_outer,
    init_sublayers,
    owned_stacks,
    residual_scale,
)
from attnlab.models.specs import FFN, Compute, LayerSpec
from attnlab.models.stack import HeadMask, LayersOfType, StackOutputs, check_values, run_layers
from attnlab.sharing import Params, Plan, PyTree
from attnlab.tap import Patches, Tap

SHAPES_ONLY = contextvars.ContextVar("SHAPES_ONLY", default=False)
"""Within `init`, which drops the outputs: a model checks the call and does not compute it."""


class CheckedModule(nn.Module):
    """Checks the arguments of `init` and `apply` before Flax, whose messages name no weight."""

    @nn.nowrap
    def init(self, rngs: Any, *args: Any, **kwargs: Any) -> Any:
        """`flax.linen.Module.init`: {"params": initial parameters} for a random key and the
        arguments of a call.

        Raises:
          ValueError: `rngs` is neither a random key nor a dict of random keys.
        """
        keys = rngs.values() if isinstance(rngs, Mapping) else [rngs]
        if not all(map(is_key, keys)):
            raise ValueError(
                f"init takes a random key first, as of jax.random.key(0), not {rngs!r:.80}"
            )
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
          ValueError: `variables` are not {"params": params}, or params are those of another module.
        """
        params = variables.get("params") if isinstance(variables, Mapping) else None
        if not isinstance(params, Mapping) or "params" in params:
            raise ValueError(
                "apply takes {'params': params} as its first argument, with the params of init, "
                f"not {variables if params is None else params!r:.60}"
            )
        return super().apply(variables, *args, **kwargs)

    @nn.nowrap
    def dropout_key(self) -> Array:
        """The next random key for dropout.

        Raises:
          ValueError: the call has none.
        """
        if not (self.has_rng("dropout") or self.has_rng("params")):  # Flax takes either
            raise ValueError("dropout: pass rngs={'dropout': key}, or deterministic=True")
        return self.make_rng("dropout")

    @nn.nowrap
    def check(self, params: object, expected: Mapping[str, tuple[int, ...]]) -> None:
        """Raises ValueError for params that differ from the expected `shapes_by_path`."""
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
            expected = {f"heads/{name}": shape for name, shape in self.layout.shapes.items()}
            self.check(self.variables.get("params", {}), expected)
        params = self.param("heads", lambda key: init_heads(key, self.layout, std=self.init_std))
        if self.dropout_rate > 0 and not deterministic:
            options.setdefault("dropout_rate", self.dropout_rate)
            if "dropout_key" not in options:
                options["dropout_key"] = self.dropout_key()
        options.setdefault("implementation", self.implementation)
        out: Array = multi_head_attention(params, x, self.layout, context, tap=tap, **options)
        return out


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
            self.check(self.variables.get("params", {}), _ffn_shapes(x.shape[-1], self.ffn))
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
        inputs: LayerInputs = LayerInputs(),  # noqa: B008  # frozen
        *,
        head_mask: HeadMask | None = None,
        capture: Iterable[str] = (),
        patch: Patches | None = None,
        deterministic: bool = True,
    ) -> StackOutputs:
        """x after all layers.

        Args:
          x: input of the first layer [B, T, D].
          inputs: masks, positions and second text, the same for all layers.
          head_mask, capture, patch: as in `run_layers`.
          deterministic: no dropout; else pass rngs={"dropout": key}.

        Raises:
          ValueError: a plan with other sublayers than the layer, or inputs that do not fit.
        """
        check_field("plan", self.plan, Plan)
        if not self.is_mutable_collection("params"):
            own = {"layers": self.variables.get("params", {})}  # names as in a model
            self.check(own, _stack_shapes(self.spec, self.plan))
        params = _stacked_params(self)
        drops = self.spec.dropout.is_active and not deterministic
        names, patches = check_values(capture, patch, layer_values(self.spec))
        layers = LayersOfType(params=params, plan=self.plan, spec=self.spec, inputs=inputs)
        return run_layers(
            {"layers": layers},
            ["layers"] * self.plan.num_layers,
            x,
            head_mask=head_mask,
            dropout_key=self.dropout_key() if drops else None,
            capture=names,
            patch=patches,
            compute=Compute(remat=self.remat),
        )


def _stacked_params(module: StackedParams | LayerStack) -> Params:
    """Sublayer -> parameters that the module owns; empty where a sublayer has none."""
    inits = init_sublayers(
        module.spec, module.plan, std=module.init_std, residual_scale=module.residual_scale
    )
    params: Params = {name: module.param(name, init) for name, init in inits.items()}
    return empty_sublayers(module.spec) | params


@functools.lru_cache(maxsize=64)
def _ffn_shapes(width: int, ffn: FFN) -> Mapping[str, tuple[int, ...]]:
    init = functools.partial(init_ffn, width=width, ffn=ffn)
    return shapes_by_path({"ffn": jax.eval_shape(init, jax.random.key(0))})


@functools.lru_cache(maxsize=64)
def _stack_shapes(spec: LayerSpec, plan: Plan) -> Mapping[str, tuple[int, ...]]:
    inits = init_sublayers(spec, plan, std=None, residual_scale=1.0)
    key = jax.random.key(0)
    return shapes_by_path({"layers": {n: jax.eval_shape(f, key) for n, f in inits.items()}})


class Transformer(CheckedModule):
    """Embeddings, layers and output heads: `run_model` with parameters of its own."""

    config: ModelConfig

    @nn.compact
    def __call__(self, tokens: ArrayLike, *, deterministic: bool = True, **inputs: Any) -> Outputs:
        """tokens -> `Outputs` with logits [B, T, vocab_size] in float32 at least.

        Args:
          tokens: ids [B, T]; floats [B, T, vocab_size], which mix tokens; images [B, H, W, C] if
            the config has them.
          deterministic: no dropout; else pass rngs={"dropout": key}.
          **inputs: fields of `ModelInputs`, such as `padding_mask`, `segments`, `cache`, `source`,
            `capture`.

        Raises:
          TypeError: an unknown input.
          ValueError: inputs, names or params that do not fit the model, saying what to change.
        """
        config = self.config
        # Not `self.param`, for which Flax traces each initialiser to check a shape.
        params: Params = dict(self.variables.get("params", {}))
        if self.is_initializing():
            params = {name: self.param(name, init) for name, init in init_outer(config).items()}
            for name, c in owned_stacks(config).items():
                scale = residual_scale(config, name)
                params[name] = StackedParams(c.layer, c.plan, config.init.std, scale, name=name)()
        given = ModelInputs(**inputs)
        next_key = None if deterministic else self.dropout_key
        if self.is_initializing() and SHAPES_ONLY.get():
            run = functools.partial(run_model, config=config, inputs=given, next_key=next_key)
            outputs: Outputs = jax.eval_shape(lambda params: run(params, tokens), params)
            return outputs
        return run_model(params, tokens, config, given, next_key=next_key)


class Decoder(Transformer):
    """Each position attends to itself and the past: predicts the next token.

    Made by `config.build()`. A call takes tokens [B, T] and the fields of `ModelInputs` by keyword.

    Attributes:
      config: everything that makes the model, with kind "decoder".

    >>> model, tokens = ModelConfig(width=8, num_layers=2).build(), jax.numpy.zeros((1, 3), int)
    >>> variables = jax.eval_shape(model.init, jax.random.key(0), tokens)
    >>> cache = model.config.init_cache(batch=1, size=9)
    >>> outputs = jax.eval_shape(model.apply, variables, tokens, cache=cache)
    >>> outputs.logits.shape, outputs.cache["k"].shape  # [L, B, size, N, H]
    ((1, 3, 256), (2, 1, 9, 4, 2))
    """


class Encoder(Transformer):
    """Each position attends to all positions: predicts masked tokens, or classes.

    Made by `config.build()`. A call takes tokens [B, T] and the fields of `ModelInputs` by keyword.

    Attributes:
      config: everything that makes the model, with kind "encoder".

    >>> from attnlab.models import OutputHead
    >>> output = OutputHead(pooler="first", num_classes=3)
    >>> model = ModelConfig(kind="encoder", width=8, num_layers=2, output=output).build()
    >>> tokens = jax.numpy.zeros((1, 5), int)
    >>> variables = jax.eval_shape(model.init, jax.random.key(0), tokens)
    >>> outputs = jax.eval_shape(model.apply, variables, tokens)
    >>> outputs.logits.shape, outputs.classes.shape
    ((1, 5, 256), (1, 3))
    """


class EncoderDecoder(Transformer):
    """An encoder reads `source`; a decoder that attends to it predicts the next of `tokens`.

    Made by `config.build()`. A call takes tokens [B, T] and the fields of `ModelInputs` by keyword.

    Attributes:
      config: everything that makes the model, with kind "encoder_decoder".

    >>> model = ModelConfig(kind="encoder_decoder", width=8, num_layers=2).build()
    >>> tokens, source = jax.numpy.zeros((1, 3), int), jax.numpy.zeros((1, 5), int)
    >>> variables = jax.eval_shape(model.init, jax.random.key(0), tokens, source=source)
    >>> outputs = jax.eval_shape(model.apply, variables, tokens, source=source)
    >>> outputs.logits.shape, outputs.encoded.shape
    ((1, 3, 256), (1, 5, 8))
    """


MODULES |= {"decoder": Decoder, "encoder": Encoder, "encoder_decoder": EncoderDecoder}
