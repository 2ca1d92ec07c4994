"""The residual stream and the logits as sums over heads, biases, FFNs and embeddings.

The residual stream after a layer follows from what its sublayers add to it and from the norms. With
the statistics of the norms held at their own values this is linear (`linearize.py`), so each term
passes through the later norms on its own, and what a norm adds is a term too. Pre-norm, post-norm
and scaled residual connections are all this one sum.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Int

from attnlab.attention.call import check_array
from attnlab.fields import check_choice
from attnlab.interpret.linearize import linearize_at
from attnlab.models.config import ModelConfig
from attnlab.models.embed import check_range
from attnlab.models.ffn import normalize
from attnlab.models.forward import (
    EMBEDDINGS,
    ENCODER,
    NO_INPUTS,
    ModelInputs,
    Outputs,
    check_inputs,
    encoder_call,
    run_model,
)
from attnlab.models.head import lm_head
from attnlab.models.layer import CROSS, LAYER_SCALE, add_sublayers
from attnlab.models.params import check_params
from attnlab.models.specs import LayerSpec, SublayerName
from attnlab.sharing import Params, layer_params

Terms: TypeAlias = dict[str, Array]
"""Name -> terms [*X, B, T, D]: X is () for embeddings, (L, N) for heads, else (L,)."""


class Recording(NamedTuple):
    """One call of a model, with the activations that a decomposition needs."""

    config: ModelConfig
    """Of the model."""
    params: Params
    """Of the model."""
    tokens: Array
    """[B, T]"""
    inputs: ModelInputs
    """Of `check_inputs`, with the positions and segments of the call and the names of the values to
    capture."""
    outputs: Outputs
    """With `captured`."""

    def of_encoder(self) -> "Recording":
        """The encoder of an encoder-decoder as a model of its own.

        Raises:
          ValueError: there is none, or it did not run because the call had `encoded`.
        """
        config, captured = self.config, self.outputs.captured
        if config.encoder is None:
            raise ValueError(f"a {config.kind} has one stack of layers, no encoder")
        if self.inputs.encoded is not None:
            raise ValueError(
                "the call had `encoded`, so its encoder did not run; pass source instead"
            )
        own = {n.removeprefix(ENCODER): a for n, a in captured.items() if n.startswith(ENCODER)}
        params, tokens, config, inputs = encoder_call(self.params, config, self.inputs)
        return Recording(config, params, tokens, inputs, self.outputs._replace(captured=own))

    @property
    def positions(self) -> Array:
        """The position of each token in the layers: with a table and distances (`Relative.table`)
        positions of the call are those of the table alone."""
        scheme, positions = self.config.positions, self.inputs.positions
        if positions is None or (scheme.is_learned and scheme.is_relative):
            return jnp.arange(self.tokens.shape[1])
        return positions

    def layer_weights(self, layer: int) -> dict[str, Params]:
        """Sublayer -> the parameters that this layer computes with."""
        return layer_params(self.params["layers"], self.config.plan, layer)

    def norms(self, layer: int) -> dict[str, Params]:
        """Sublayer -> the parameters of its norms, and its layer scale, by name."""
        weights, names = self.layer_weights(layer), ("norm", "norm_after", LAYER_SCALE)
        sublayers = self.config.layer.sublayers
        return {s: {n: weights[s][n] for n in names if n in weights[s]} for s in sublayers}

    def run(
        self,
        norms: Mapping[str, Params],
        x: Array,
        written: tuple[Array, ...],
        inputs_of: dict[str, Array] | None = None,
    ) -> Array:
        """x after a layer whose sublayers add `written`; fills `inputs_of` with the input of each
        sublayer."""
        spec = self.config.layer
        outputs = dict(zip(spec.sublayers, written, strict=True))

        def function(name: SublayerName, read: Array) -> Array:
            if inputs_of is not None:
                inputs_of[name] = read
            return outputs[name]

        return add_sublayers(norms, x, spec, function)


def record(
    config: ModelConfig, params: Params, tokens: ArrayLike, inputs: ModelInputs = NO_INPUTS
) -> Recording:
    """Runs the model and keeps the activations that the functions of this package read.

    Args:
      config, params: of the model.
      tokens: [B, T].
      inputs: masks, source, what to patch, ... A patch may change what a sublayer reads or writes,
        but not "residual"; what is patched on the way from the residual stream to a sublayer's
        input, or to the scores, has no decomposition. `capture` is ignored.

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
    params = jax.tree.map(jnp.asarray, check_params(config, params))
    names = _value_names(config.layer)
    if config.encoder is not None and inputs.encoded is None:
        names += [ENCODER + name for name in _value_names(config.encoder_model.layer)]
    inputs = dataclasses.replace(inputs, capture=tuple(names))
    outputs = run_model(params, tokens, config, inputs)
    return Recording(config, params, *check_inputs(config, tokens, inputs), outputs)


def _value_names(spec: LayerSpec) -> list[str]:
    """Values of a model with such layers that a decomposition reads."""
    attention = ["attention_in", "scores", "outputs", "attention_out"]
    cross = [CROSS + name for name in attention] if spec.cross is not None else []
    ffn = ["ffn_out"] if spec.ffn.width else []
    return [EMBEDDINGS, *attention, *cross, *ffn, "residual"]


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
    stack = recording.of_encoder() if encoder else recording
    num_layers, sublayers = stack.config.num_layers, stack.config.layer.sublayers
    if layer is not None and not 0 <= layer < num_layers:
        raise ValueError(f"layer is {layer}; the layers are 0 to {num_layers - 1}")
    count = num_layers if layer is None else layer
    written = {name: _written(stack, name) for name in sublayers}
    x = stack.outputs.captured[EMBEDDINGS]
    terms = {"embedding": x}
    for outputs in written.values():
        terms |= {n: jnp.zeros((count, *a.shape[1:]), x.dtype) for n, a in outputs.items()}
    norm = stack.config.norm
    if norm.has_bias and (norm.places.after or norm.places.after_sum):
        terms["norm_bias"] = jnp.zeros((count, *x.shape), x.dtype)
    if not count:
        return terms
    norms = jax.tree.map(lambda *a: jnp.stack(a), *(stack.norms(i) for i in range(count)))
    outputs_of = [jax.tree.map(lambda a: a[:count], written[name]) for name in sublayers]
    step = functools.partial(_add_layer, stack)
    (_, found), _ = lax.scan(step, (x, terms), (jnp.arange(count), norms, outputs_of))
    return {name: found[name] for name in terms}


def _add_layer(
    stack: Recording,
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
      ValueError: the layer has no such sublayer; a patch of this input; or as `decompose_residual`.

    >>> config = ModelConfig(width=8, num_layers=2, vocab_size=5)
    >>> tokens = jnp.array([[1, 2, 3, 4], [4, 3, 2, 1]])
    >>> params = jax.jit(config.build().init)(jax.random.key(0), tokens)["params"]
    >>> recording = record(config, params, tokens)
    >>> sorted(decompose_input(recording, 1))
    ['attention_bias', 'embedding', 'ffn', 'heads', 'input_norm_bias']
    """
    stack = recording.of_encoder() if encoder else recording
    names = tuple(stack.config.layer.sublayers)
    check_choice("sublayer", sublayer, names)
    check_unpatched(stack, CROSS + "attention_in" if sublayer == "cross" else f"{sublayer}_in")
    terms = decompose_residual(stack, layer=layer)
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
    return terms if affine.constant is None else terms | {"input_norm_bias": affine.constant}


def check_unpatched(stack: Recording, *values: str) -> None:
    """Raises ValueError for a patch of one of these values, which follow from a sum of terms."""
    for name in values:
        if name in (stack.inputs.patch or {}):
            raise ValueError(
                f"a patch of {name!r} replaces what is decomposed here; record a call without it"
            )


def _written(stack: Recording, sublayer: SublayerName) -> Terms:
    """Name -> what the sublayer adds in every layer, [L, ...]."""
    config, captured = stack.config, stack.outputs.captured
    if sublayer == "ffn":
        return {"ffn": config.ffn.output_scale * captured["ffn_out"]}
    is_cross = sublayer == "cross"
    prefix, scale = (CROSS, 1.0) if is_cross else ("", config.attention.output_scale)
    heads = captured[f"{prefix}outputs"]
    bias = captured[f"{prefix}attention_out"] - jnp.sum(heads, axis=2)
    return {
        f"{prefix}heads": scale * jnp.moveaxis(heads, 2, 1),
        f"{prefix}attention_bias": scale * bias,
    }


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
    stack = recording.of_encoder() if encoder else recording
    terms, spec = decompose_residual(stack), stack.config.norm
    if not spec.places.final:
        return terms
    params = stack.params.get("final_norm", {})
    affine = linearize_at(lambda x: normalize(params, x, spec), sum_terms(terms))
    terms = {name: affine.apply(a) for name, a in terms.items()}
    return terms if affine.constant is None else terms | {"final_norm_bias": affine.constant}


def direct_logit_attribution(
    recording: Recording, tokens: Int[Array, "B T"] | None = None
) -> dict[str, Float[Array, "..."]]:
    """The logits as a sum over heads, biases, FFNs and embeddings.

    nostalgebraist 2020 (logit lens); Elhage et al. 2021. A single logit means little, since the
    softmax depends on differences: attribute the correct token and another one, and subtract.

    Args:
      recording: of `record`.
      tokens: attribute only the logit of this token at each position; any id where the padding mask
        or segments of the call have no token.

    Returns:
      The terms of `decompose_final` times the LM head, [*X, B, T, vocab] or with `tokens`
      [*X, B, T], and "lm_head_bias". Their sum is the logits.

    Raises:
      TypeError: tokens that are no integers.
      ValueError: the model has no logits, or a nonlinear transform before or after them; tokens of
        another shape, or out of range.

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
    for name in ("transform", "soft_cap"):
        if value := getattr(config.output, name):
            raise ValueError(
                f"output.{name}={value!r} is not linear; use decompose_final, which decomposes the "
                "input of the LM head, or for a soft cap a config with soft_cap=None"
            )
    terms = decompose_final(recording)
    if tokens is None:
        affine = linearize_at(lambda x: lm_head(params, x, config), sum_terms(terms))
        bias = affine.constant
    else:
        shape, mask = recording.tokens.shape[:2], recording.inputs.padding_mask
        tokens = check_array("tokens", tokens, "an integer", "[B, T]", shape, exact=True)
        check_range("token id", tokens, config.vocab_size, mask)
        own = config.output.kind == "own"
        table = (params["lm_head"].T if own else params["embedding"])[tokens]
        scale = config.output.scale
        affine = linearize_at(lambda x: scale * jnp.sum(x * table, axis=-1), sum_terms(terms))
        bias = params["lm_head_bias"][tokens] if config.output.bias else None
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
