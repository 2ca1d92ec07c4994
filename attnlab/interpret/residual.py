"""The residual stream and the logits as sums over heads, biases, FFNs and embeddings.

The residual stream after a layer follows from what its sublayers add to it and from the norms. With
the statistics of the norms held at their own values this is linear (`linearize.py`), so each term
passes through the later norms on its own, and what a norm adds is a term too. Pre-norm, post-norm
and scaled residual connections are all this one sum.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Int

from attnlab.interpret.linearize import AffineMap, linearize_at
from attnlab.models.config import ModelConfig
from attnlab.models.embed import check_tokens, default_positions
from attnlab.models.forward import EMBEDDINGS, ENCODER, NO_INPUTS, ModelInputs, Outputs, run_model
from attnlab.models.head import lm_head
from attnlab.models.layer import LAYER_SCALE, Sublayer, add_sublayers
from attnlab.models.params import check_params
from attnlab.models.positionwise import normalize
from attnlab.models.specs import LayerSpec, SublayerName
from attnlab.names import lookup
from attnlab.sharing import Params, Plan, layer_params

Terms: TypeAlias = dict[str, Array]
"""Name -> terms [*X, B, T, D]: X is () for embeddings, (L, N) for heads, else (L,)."""
CROSS = "cross."


class Recording(NamedTuple):
    """One call of a model, with the activations that a decomposition needs."""

    config: ModelConfig
    """Of the model."""
    params: Params
    """Of the model."""
    tokens: Array
    """[B, T]"""
    inputs: ModelInputs
    """As given, with the names of the values to capture."""
    outputs: Outputs
    """With `captured`."""


def record(
    config: ModelConfig, params: Params, tokens: ArrayLike, inputs: ModelInputs = NO_INPUTS
) -> Recording:
    """Runs the model and keeps the activations that the functions of this package read.

    Args:
      config, params: of the model.
      tokens: [B, T].
      inputs: masks, source, what to patch, ... A patch may change what a sublayer reads or writes,
        but not "residual". `capture` is ignored.

    Returns:
      The recording; its memory is that of "outputs", [L, B, N, T, D].

    Raises:
      ValueError: a cache, a patch of "residual", layers of several types, params of another model,
        or inputs that do not fit.

    >>> config = ModelConfig(width=8, num_layers=3, sharing="albert")
    >>> tokens = jnp.array([[1, 2, 3]])
    >>> params = jax.jit(config.build().init)(jax.random.key(0), tokens)["params"]
    >>> terms = decompose_residual(record(config, params, tokens))
    >>> {name: a.shape for name, a in terms.items() if name != "ffn"}
    {'embedding': (1, 3, 8), 'heads': (3, 4, 1, 3, 8), 'attention_bias': (3, 1, 3, 8)}
    """
    if patched := [n for n in inputs.patch or {} if n.rpartition(".")[2] == "residual"]:
        raise ValueError(
            f"a patch of {patched[0]!r} would break the sum of terms; patch what a sublayer "
            "adds (outputs, attention_out, ffn_out) instead"
        )
    if inputs.cache is not None:
        raise ValueError("a cache holds keys of earlier tokens; pass the whole text instead")
    if config.layer_types:
        raise ValueError("layers of several types (layer_types) have no decomposition")
    check_params(config, params)
    names = [EMBEDDINGS, *_layer_names(config.layer)]
    if config.encoder is not None and inputs.encoded is None:
        theirs = (EMBEDDINGS, *_layer_names(config.encoder_layer))
        names += [ENCODER + name for name in theirs]
    inputs = dataclasses.replace(inputs, capture=tuple(names))
    outputs = run_model(params, tokens, config, inputs)
    return Recording(config, params, check_tokens(config, tokens), inputs, outputs)


def _layer_names(spec: LayerSpec) -> list[str]:
    """Values of a layer that a decomposition reads."""
    attention = ["attention_in", "scores", "outputs", "attention_out"]
    cross = [CROSS + name for name in attention] if spec.cross is not None else []
    return [*attention, *cross, *(["ffn_out"] if spec.ffn.width else []), "residual"]


class LayerStack(NamedTuple):
    """One stack of layers of a recording."""

    recording: Recording
    is_encoder: bool
    """The encoder beside a decoder."""

    @property
    def prefix(self) -> str:
        """Prefix of the names of its values."""
        return ENCODER if self.is_encoder else ""

    @property
    def weights_prefix(self) -> str:
        """Prefix of the names of its parameters."""
        encoder = self.recording.config.encoder
        own = self.is_encoder and encoder is not None and not encoder.shares_decoder
        return "encoder_" if own else ""

    @property
    def plan(self) -> Plan:
        config = self.recording.config
        return config.encoder_plan if self.is_encoder else config.plan

    @property
    def spec(self) -> LayerSpec:
        config = self.recording.config
        return config.encoder_layer if self.is_encoder else config.layer

    @property
    def positions(self) -> Array:
        """The position of each token."""
        config, inputs = self.recording.config, self.recording.inputs
        if self.is_encoder:
            assert inputs.source is not None
            tokens, positions = check_tokens(config, inputs.source), None
        else:
            tokens, positions = self.recording.tokens, inputs.positions
        positions = default_positions(config, tokens) if positions is None else positions
        return jnp.arange(tokens.shape[1]) if positions is None else jnp.asarray(positions)

    def captured(self, name: str) -> Array:
        return self.recording.outputs.captured[self.prefix + name]

    def outer_weight(self, name: str) -> Params | Array | None:
        """A weight outside of the layers; None where the model has none."""
        return self.recording.params.get(self.weights_prefix + name)

    def layer_weights(self, layer: int) -> dict[str, Params]:
        """Sublayer -> the parameters that this layer computes with."""
        stacked: Params = self.recording.params[f"{self.weights_prefix}layers"]
        return layer_params(stacked, self.plan, layer)

    def norms(self, layer: int) -> dict[str, Params]:
        """Sublayer -> the parameters of its norms, and its layer scale, by name."""
        weights, names = self.layer_weights(layer), ("norm", "norm_after", LAYER_SCALE)
        return {
            s: {n: weights[s][n] for n in names if n in weights[s]} for s in self.spec.sublayers
        }

    def run(
        self,
        norms: Mapping[str, Params],
        x: Array,
        written: tuple[Array, ...],
        inputs_of: dict[str, Array] | None = None,
    ) -> Array:
        """x after a layer whose sublayers add `written`; fills `inputs_of` with the input of each
        sublayer."""

        def sublayer(name: str, output: Array) -> Callable[[Array], Array]:
            def function(read: Array) -> Array:
                if inputs_of is not None:
                    inputs_of[name] = read
                return output

            return function

        sublayers = [
            Sublayer(name, norms[name], sublayer(name, a), scale)
            for (name, scale), a in zip(self.spec.sublayers.items(), written, strict=True)
        ]
        return add_sublayers(sublayers, x, self.spec.norm)


def layer_stack(recording: Recording, *, encoder: bool = False) -> LayerStack:
    """The layers of the decoder, or of the only stack; with `encoder` those of the encoder."""
    kind = recording.config.kind
    if encoder and kind != "encoder_decoder":
        raise ValueError(f"a {kind} has one stack of layers; leave encoder=True out")
    if encoder and recording.inputs.encoded is not None:
        raise ValueError("the call had `encoded`, so its encoder did not run; pass source instead")
    return LayerStack(recording, encoder)


def decompose_residual(
    recording: Recording, *, encoder: bool = False, layer: int | None = None
) -> dict[str, Float[Array, "*X B T D"]]:
    """The residual stream before the final norm as a sum of terms.

    Direct effects only: what a head changes because a later sublayer reads it is in that sublayer's
    term. In a post-norm model terms are scaled and centred by every norm behind them.

    Args:
      recording: of `record`.
      encoder: the encoder's residual stream.
      layer: the input of this layer (counted from 0) instead.

    Returns:
      "embedding" [B, T, D], "heads" [L, N, B, T, D], "attention_bias" and "ffn" [L, B, T, D], with
      an encoder also "cross.heads" and "cross.attention_bias"; where norms stand in the residual
      stream also "norm_bias" [L, B, T, D]. Only the layers before `layer`. Their sum
      (`sum_terms`) is the residual stream.

    Raises:
      ValueError: no such layer; `encoder` where the model has none, or where it did not run because
        the call had `encoded`.

    >>> config = ModelConfig(width=8, num_layers=2, vocab_size=5)
    >>> tokens = jnp.array([[1, 2, 3, 4], [4, 3, 2, 1]])
    >>> params = jax.jit(config.build().init)(jax.random.key(0), tokens)["params"]
    >>> recording = record(config, params, tokens)
    >>> terms = decompose_residual(recording)
    >>> terms["heads"].shape, terms["ffn"].shape
    ((2, 4, 2, 4, 8), (2, 2, 4, 8))
    """
    stack = layer_stack(recording, encoder=encoder)
    if layer is not None and not 0 <= layer < stack.plan.num_layers:
        raise ValueError(f"layer is {layer}; the layers are 0 to {stack.plan.num_layers - 1}")
    count = stack.plan.num_layers if layer is None else layer
    written = {name: _written(stack, name) for name in stack.spec.sublayers}
    x = stack.captured(EMBEDDINGS)
    terms = {"embedding": x}
    for outputs in written.values():
        terms |= {n: jnp.zeros((count, *a.shape[1:]), x.dtype) for n, a in outputs.items()}
    if _norms_add_bias(stack, x):
        terms["norm_bias"] = jnp.zeros((count, *x.shape), x.dtype)
    if not count:
        return terms
    norms = jax.tree.map(lambda *a: jnp.stack(a), *(stack.norms(i) for i in range(count)))
    outputs_of = [jax.tree.map(lambda a: a[:count], written[name]) for name in stack.spec.sublayers]
    step = functools.partial(_add_layer, stack)
    (_, found), _ = lax.scan(step, (x, terms), (jnp.arange(count), norms, outputs_of))
    return {name: found[name] for name in terms}


def _add_layer(
    stack: LayerStack,
    carry: tuple[Array, Terms],
    layer: tuple[Array, dict[str, Params], list[Terms]],
) -> tuple[tuple[Array, Terms], None]:
    """The residual stream and its terms after one more layer."""
    (x, terms), (i, norms, outputs) = carry, layer
    affine = linearize_at(
        lambda x, *written: stack.run(norms, x, written), x, *map(sum_terms, outputs)
    )
    terms = {name: affine.apply(a) for name, a in terms.items()}
    for argument, made in enumerate(outputs, 1):
        for name, a in made.items():
            terms[name] = terms[name].at[i].set(affine.apply(a, argument))
    if affine.constant is not None:
        terms["norm_bias"] = terms["norm_bias"].at[i].set(affine.constant)
    return (affine.value, terms), None


def decompose_input(
    recording: Recording, layer: int, sublayer: SublayerName = "attention", *, encoder: bool = False
) -> dict[str, Float[Array, "*X B T D"]]:
    """The input of a sublayer of one layer as a sum: `decompose_residual` after the norm before the
    sublayer, if there is one, whose bias is the term "input_norm_bias".

    Args:
      recording: of `record`.
      layer: counted from 0.
      sublayer: "attention", "cross" or "ffn".
      encoder: a layer of the encoder.

    Returns:
      The terms of `decompose_residual`, with those that earlier sublayers of this layer add.

    Raises:
      ValueError: the layer has no such sublayer, or as `decompose_residual`.

    >>> config = ModelConfig(width=8, num_layers=2, vocab_size=5)
    >>> tokens = jnp.array([[1, 2, 3, 4], [4, 3, 2, 1]])
    >>> params = jax.jit(config.build().init)(jax.random.key(0), tokens)["params"]
    >>> recording = record(config, params, tokens)
    >>> sorted(decompose_input(recording, 1))
    ['attention_bias', 'embedding', 'ffn', 'heads', 'input_norm_bias']
    """
    stack = layer_stack(recording, encoder=encoder)
    lookup(dict.fromkeys(stack.spec.sublayers), sublayer, what="sublayer")
    terms = decompose_residual(recording, encoder=encoder, layer=layer)
    names = list(stack.spec.sublayers)
    before = names[: names.index(sublayer)]
    outputs = [jax.tree.map(lambda a: a[layer], _written(stack, name)) for name in before]
    x = sum_terms(terms)
    missing = (jnp.zeros_like(x),) * (len(names) - len(before))

    def read(x: Array, *written: Array) -> Array:
        inputs_of: dict[str, Array] = {}
        stack.run(stack.norms(layer), x, (*written, *missing), inputs_of)
        return inputs_of[sublayer]

    affine = linearize_at(read, x, *map(sum_terms, outputs))
    terms = {name: affine.apply(a) for name, a in terms.items()}
    for argument, made in enumerate(outputs, 1):
        for name, a in made.items():
            terms[name] = jnp.concatenate([terms[name], affine.apply(a, argument)[None]])
    return _with_constant(terms, "input_norm_bias", affine)


def _with_constant(terms: Terms, name: str, affine: AffineMap) -> Terms:
    return terms if affine.constant is None else terms | {name: affine.constant}


def _written(stack: LayerStack, sublayer: SublayerName) -> Terms:
    """Name -> what the sublayer adds in every layer, [L, ...]."""
    if sublayer == "ffn":
        return {"ffn": stack.spec.ffn.output_scale * stack.captured("ffn_out")}
    is_cross = sublayer == "cross"
    prefix, scale = (CROSS, 1.0) if is_cross else ("", stack.spec.attention.output_scale)
    heads = stack.captured(f"{prefix}outputs")
    bias = stack.captured(f"{prefix}attention_out") - jnp.sum(heads, axis=2)
    return {
        f"{prefix}heads": scale * jnp.moveaxis(heads, 2, 1),
        f"{prefix}attention_bias": scale * bias,
    }


def _norms_add_bias(stack: LayerStack, x: Array) -> bool:
    """Do norms in the residual stream add a bias?"""
    norms, ones = stack.norms(0), jnp.ones_like(x)
    affine = linearize_at(
        lambda x, *written: stack.run(norms, x, written), ones, *[ones] * len(stack.spec.sublayers)
    )
    return affine.constant is not None


def sum_terms(terms: Mapping[str, Array], ndim: int = 3) -> Array:
    """The sum of all terms, over all axes but the last `ndim`.

    Args:
      terms: name -> terms, such as of `decompose_residual`.
      ndim: axes of one term: 3 for [B, T, D].

    >>> float(sum_terms({"embedding": jnp.ones((1, 1, 1)), "ffn": jnp.ones((4, 1, 1, 1))})[0, 0, 0])
    5.0
    """
    sums = [jnp.sum(a, axis=tuple(range(a.ndim - ndim))) for a in terms.values()]
    return functools.reduce(jnp.add, sums)


def decompose_final(
    recording: Recording, *, encoder: bool = False
) -> dict[str, Float[Array, "*X B T D"]]:
    """`decompose_residual` after the final norm: the input of the LM head or, of an encoder, of
    cross-attention. The bias of that norm is the term "final_norm_bias".

    Args:
      recording: of `record`.
      encoder: the final norm of the encoder.

    Raises:
      ValueError: as `decompose_residual`.

    >>> config = ModelConfig(width=8, num_layers=2, vocab_size=5)
    >>> tokens = jnp.array([[1, 2, 3, 4], [4, 3, 2, 1]])
    >>> params = jax.jit(config.build().init)(jax.random.key(0), tokens)["params"]
    >>> recording = record(config, params, tokens)
    >>> sorted(decompose_final(recording))
    ['attention_bias', 'embedding', 'ffn', 'final_norm_bias', 'heads']
    """
    stack = layer_stack(recording, encoder=encoder)
    terms, spec = decompose_residual(recording, encoder=encoder), stack.spec.norm
    if not spec.places.final:
        return terms
    found = stack.outer_weight("final_norm")
    params = found if isinstance(found, dict) else {}
    affine = linearize_at(lambda x: normalize(params, x, spec), sum_terms(terms))
    terms = {name: affine.apply(a) for name, a in terms.items()}
    return _with_constant(terms, "final_norm_bias", affine)


def direct_logit_attribution(
    recording: Recording, tokens: Int[Array, "B T"] | None = None
) -> dict[str, Float[Array, "..."]]:
    """The logits as a sum over heads, biases, FFNs and embeddings.

    nostalgebraist 2020 (logit lens); Elhage et al. 2021. A single logit means little, since the
    softmax depends on differences: attribute the correct token and another one, and subtract.

    Args:
      recording: of `record`.
      tokens: attribute only the logit of this token at each position.

    Returns:
      The terms of `decompose_final` times the LM head, [*X, B, T, vocab] or with `tokens`
      [*X, B, T], and "lm_head_bias". Their sum is the logits.

    Raises:
      ValueError: the model has no logits, or a nonlinear transform before them.

    >>> config = ModelConfig(width=8, num_layers=2, vocab_size=5)
    >>> tokens = jnp.array([[1, 2, 3, 4], [4, 3, 2, 1]])
    >>> params = jax.jit(config.build().init)(jax.random.key(0), tokens)["params"]
    >>> recording = record(config, params, tokens)
    >>> terms = direct_logit_attribution(recording, tokens)
    >>> terms["heads"].shape
    (2, 4, 2, 4)
    """
    config, params = recording.config, recording.params
    if config.output.kind == "none":
        raise ValueError("output.kind='none' has no logits; use decompose_final")
    if config.output.transform:
        raise ValueError(
            f"output.transform={config.output.transform!r} before the logits is not linear; use "
            "decompose_final, which decomposes its input"
        )
    terms = decompose_final(recording)
    if tokens is None:
        affine = linearize_at(lambda x: lm_head(params, x, config), sum_terms(terms))
        bias = affine.constant
    else:
        own = config.output.kind == "own"
        table = (params["lm_head"].T if own else params["embedding"])[jnp.asarray(tokens)]
        scale = config.output.scale
        affine = linearize_at(lambda x: scale * jnp.sum(x * table, axis=-1), sum_terms(terms))
        bias = params["lm_head_bias"][jnp.asarray(tokens)] if config.output.bias else None
    terms = {name: affine.apply(a) for name, a in terms.items()}
    return terms if bias is None else terms | {"lm_head_bias": bias}


TermName: TypeAlias = tuple[str | int, ...]
"""(name,), (name, layer) or (name, layer, head)."""


def flatten_terms(
    terms: Mapping[str, Array], ndim: int = 3
) -> tuple[list[TermName], Float[Array, "M ..."]]:
    """The name of every term, and all terms on one axis.

    Args:
      terms: name -> terms, such as of `decompose_residual`.
      ndim: axes of one term: 3 for [B, T, D].

    Returns:
      (names, terms [M, ...]); a name is (name,), (name, layer) or (name, layer, head).

    >>> terms = {"embedding": jnp.ones((1, 1, 1)), "heads": jnp.ones((1, 2, 1, 1, 1))}
    >>> names, a = flatten_terms(terms)
    >>> names, a.shape
    ([('embedding',), ('heads', 0, 0), ('heads', 0, 1)], (3, 1, 1, 1))
    """
    names: list[TermName] = []
    for name, a in terms.items():
        names += [(name, *map(int, index)) for index in np.ndindex(a.shape[: a.ndim - ndim])]
    rows = [a.reshape(-1, *a.shape[a.ndim - ndim :]) for a in terms.values()]
    return names, jnp.concatenate(rows)
