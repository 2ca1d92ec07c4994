"""`Decoder`, `Encoder` and `EncoderDecoder`: Flax modules that own the parameters of a model.

model = ModelConfig(width=64, num_layers=4).build()
params = model.init(jax.random.key(0), tokens)["params"]
outputs = model.apply({"params": params}, tokens, capture=("probs",))
"""

from collections.abc import Iterable, Mapping

import flax.linen as nn
import jax
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int

from attnlab.attention.masks import Edges
from attnlab.models.config import Kind, ModelConfig
from attnlab.models.forward import ModelCache, ModelInputs, Outputs, run_model
from attnlab.models.modules import SHAPES_ONLY, CheckedModule, StackedParams
from attnlab.models.parameters import init_outer, residual_scale, stack_specs
from attnlab.models.stack import HeadMask
from attnlab.sharing import Params
from attnlab.tap import Patches


class Transformer(CheckedModule):
    """Embeddings, layers and output heads: `run_model` with parameters of its own."""

    config: ModelConfig

    @nn.compact
    def __call__(
        self,
        tokens: ArrayLike,
        *,
        padding_mask: Bool[Array, "B T"] | None = None,
        mask: Bool[Array, "..."] | Edges | None = None,
        positions: Int[Array, "*B T"] | None = None,
        token_types: Int[Array, "B T"] | None = None,
        head_mask: HeadMask | None = None,
        cache: ModelCache | None = None,
        source: ArrayLike | None = None,
        source_padding_mask: Bool[Array, "B S"] | None = None,
        encoded: Float[Array, "B S D"] | None = None,
        capture: Iterable[str] = (),
        patch: Patches | None = None,
        deterministic: bool = True,
    ) -> Outputs:
        """tokens -> `Outputs` with logits [B, T, vocab_size] in float32 at least.

        Args:
          tokens: ids [B, T]; floats [B, T, vocab_size], which mix tokens; images [B, H, W, C] if
            the config has them.
          padding_mask, mask, positions, token_types, head_mask, cache, source,
            source_padding_mask, encoded, capture, patch: as in `ModelInputs`.
          deterministic: no dropout; else pass rngs={"dropout": key}.

        Raises:
          ValueError: inputs, names or params that do not fit the model, saying what to change.
        """
        config = self.config
        # Not `self.param`, for which Flax traces each initialiser to check a shape.
        params: Params = dict(self.variables.get("params", {}))
        if self.is_initializing():
            params = {name: self.param(name, init) for name, init in init_outer(config).items()}
            std, scale = config.init.std, residual_scale(config)
            for name, (spec, plan) in stack_specs(config).items():
                params[name] = StackedParams(spec, plan, std, scale, name=name)()
        inputs = ModelInputs(
            padding_mask=padding_mask,
            mask=mask,
            positions=positions,
            token_types=token_types,
            head_mask=head_mask,
            cache=cache,
            source=source,
            source_padding_mask=source_padding_mask,
            encoded=encoded,
            capture=capture,
            patch=patch,
        )
        next_key = None if deterministic else self.dropout_key

        def run(params: Params) -> Outputs:
            return run_model(params, tokens, config, inputs, next_key=next_key)

        shapes_only = self.is_initializing() and SHAPES_ONLY.get()
        return jax.eval_shape(run, params) if shapes_only else run(params)


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


MODELS: Mapping[Kind, type[Transformer]] = {
    "decoder": Decoder,
    "encoder": Encoder,
    "encoder_decoder": EncoderDecoder,
}
