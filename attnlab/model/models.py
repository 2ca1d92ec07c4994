"""`ModelConfig` -> a decoder (causal LM), an encoder (masked LM) or both (text to text)."""

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from attnlab.attention.masks import Edges
from attnlab.heads.old.cache import Cache, held_positions, next_positions, stacked_size
from attnlab.model.block import values_of
from attnlab.model.config import MODELS, ModelConfig
from attnlab.model.decode import generate, stream
from attnlab.model.kinds import by_stack
from attnlab.model.layers import Kind, run_kinds, run_layers, values_of_all
from attnlab.model.mismatch import describe_mismatch
from attnlab.model.modules import Pool
from attnlab.model.outer import (
    DTYPES,
    POOLERS,
    check_range,
    check_tokens,
    embed,
    init_outer,
    number_positions,
    read_out,
    relative_bias,
    rotary_of,
)
from attnlab.model.pointwise import dropout, linear
from attnlab.model.shapes import param_shapes
from attnlab.norms import NORM_KINDS
from attnlab.observe import NAMES, OF_LAYER, Edit, Given, check_names


class Outputs(NamedTuple):
    """What a model shows; None for what it does not have, or was not asked for."""

    logits: Float[Array, "B T vocab"] | None
    last: Float[Array, "B T D"]
    """What the readout reads: the last layer's output, after the final norm where there is one."""
    pooled: Float[Array, "B *T D"] | None = None
    classes: Float[Array, "B *T C"] | None = None
    cache: Cache | None = None
    encoded: Float[Array, "B S D"] | None = None
    """What cross-attention reads: the encoder's last output."""
    first: Float[Array, "B T D"] | None = None
    """What the first layer reads."""
    encoder_first: Float[Array, "B S D"] | None = None
    shown: dict[str, Any] | None = None
    """Name of `observe.NAMES` -> value [L, ...] of every layer."""

    @property
    def probs(self) -> Float[Array, "L B N T S"] | None:
        """Where they were asked for; with cross="merged" [.., T + S]: to its own text, then to the
        source."""
        return self._shown("probs")

    @property
    def cross_probs(self) -> Float[Array, "L B N T S"] | None:
        """Of the decoder to the source, where it has a part of its own for that."""
        return self._shown("cross.probs")

    @property
    def encoder_probs(self) -> Float[Array, "L B N S S"] | None:
        """Of the encoder."""
        return self._shown("encoder.probs")

    @property
    def hidden(self) -> Float[Array, "L1 B T D"] | None:
        """What the first layer reads, and the output of every layer."""
        return _all_hidden(self.first, self._shown("residual"))

    @property
    def encoder_hidden(self) -> Float[Array, "L1 B S D"] | None:
        """The same of the encoder."""
        return _all_hidden(self.encoder_first, self._shown("encoder.residual"))

    def _shown(self, name: str) -> Any:
        return (self.shown or {}).get(name)

    def asked(self, show: tuple[str, ...], return_probs: bool, return_outputs: bool) -> Any:
        """All of it, or the logits (without a readout: `last`) with the probs, the cache and the
        shown values asked for.

        Probabilities of a decoder with an encoder are a triple: own, cross, encoder's.
        """
        if return_outputs:
            return self
        result: list[Any] = [self.last if self.logits is None else self.logits]
        if return_probs:
            three = self.probs, self.cross_probs, self.encoder_probs
            result.append(self.probs if self.encoded is None else three)
        result += [] if self.cache is None else [self.cache]
        result += [{name: self._shown(name) for name in show}] if show else []
        return tuple(result) if len(result) > 1 else result[0]


def _all_hidden(first: Any, residual: Any) -> Array | None:
    return None if residual is None else jnp.concatenate([first[None], residual])


class LanguageModel(nn.Module):
    """What all models have besides their computation."""

    config: ModelConfig

    @nn.nowrap
    def apply(self, variables: Any, *tokens: Any, **options: Any) -> Any:
        """Flax's `apply`, for weights that are those of the model: {"params": weights}.

        Raises ValueError for others, with whose they look like (see `describe_mismatch`).
        """
        wrong = describe_mismatch({"params": param_shapes(self.config)}, variables)
        if wrong is not None:
            raise ValueError(f"the weights do not fit the model: {wrong}")
        return super().apply(variables, *tokens, **options)

    @nn.nowrap
    def generate(self, params: Any, prompt: Array, num_tokens: int, **options: Any) -> Array:
        """`attnlab.generate` of this model."""
        return generate(self, params, prompt, num_tokens, **options)

    @nn.nowrap
    def stream(
        self, params: Any, prompt: Array, num_tokens: int, **options: Any
    ) -> Iterator[Array]:
        """`attnlab.stream` of this model."""
        return stream(self, params, prompt, num_tokens, **options)


class Transformer(LanguageModel):
    """Embeddings, a stack of layers, a readout."""

    @nn.compact
    def __call__(
        self,
        tokens: Int[Array, "B T"] | Float[Array, "B T vocab"] | Float[Array, "B H W C"],
        *,
        token_types: Int[Array, "B T"] | None = None,
        positions: Int[Array, "*B T"] | None = None,
        padding_mask: Bool[Array, "B S"] | None = None,
        mask: Bool[Array, "..."] | Edges | None = None,
        head_gate: Float[Array, "..."] | None = None,
        cache: Cache | None = None,
        show: Iterable[str] = (),
        edit: Edit | None = None,
        deterministic: bool = True,
        return_probs: bool = False,
        return_outputs: bool = False,
        told: dict[str, Any] | None = None,
    ) -> Any:
        """tokens -> logits [B, T, vocab_size] in float32 at least.

        Raises ValueError for a token id or type outside its table; within `jax.jit`, where values
        are not known, it makes the outputs of its text NaN. Padding may hold any id.

        `show` are names of `observe.OF_LAYER`, returned last as a dict name -> [L, ...]; the logits
        are the same bits. `edit` puts f(value, layer) in the place of values, name -> f. With
        `return_probs` also the attention probabilities [L, B, N, T, T]; with `return_outputs` all
        of `Outputs`. `mask` is boolean, True = may attend, or `Edges`; `padding_mask` [B, T] True =
        a token, seen by all and counted by the pooler; `positions` default to 0, 1, 2, ... or
        what the row of `POSITIONS` says; `head_gate` is [L, N] or [L, B, N]; where layers differ
        in their number of heads, L arrays, and so is what is shown. Tokens that are floats are
        mixtures of words, or features (see `embed`), or images where the config says so.
        With `cache` (of `ModelConfig.empty_cache`) the tokens are the next ones, and the longer
        cache is returned behind the logits; positions past `max_len` or a full cache give NaN.
        Padding of `padding_mask`, wherever it stands, is then not kept and takes no position.
        Dropout takes the "dropout" random stream when not `deterministic`. `told`: see
        `explain_model`.
        """
        c = self.config
        known = values_of_all([stack.block for stack in c.stacks.values()])
        show = check_names(show, edit, known)
        if cache is not None and c.kind != "decoder":
            raise ValueError(f"only a decoder goes on from a cache, not the {c.kind}")
        w = {name: self.param(name, init) for name, init in init_outer(c).items()}
        real = None if padding_mask is None else jnp.asarray(padding_mask, bool)
        caches = by_stack(c, cache)
        behind = next(iter(caches.values())), real
        text = _Text(self, w, c, tokens, token_types, positions, behind, deterministic)
        asked = Given(
            mask=mask,
            padding_mask=real,
            head_gate=head_gate,
            show=_to_show(show, return_probs, return_outputs),
            edit=edit,
            told=told,
        )
        layers = {}
        for name, stack in c.stacks.items():
            pool = Pool(stack.block, stack.layer_plan, c.init_std, _residual_scale(c), name=name)
            own = {
                "rotary": rotary_of(stack, text.numbers),
                "bias": text.bias("relative_bias", caches[name], two_sided=c.kind == "encoder"),
                "cache": caches[name],
                "told": asked.tell(name) if c.kinds else told,
            }
            layers[name] = Kind(pool(), stack.layer_plan, stack.block, own)
        drops = any(kind.spec.drops for kind in layers.values()) and not deterministic
        key = self.make_rng("dropout") if drops else None
        ran = run_kinds(layers, c.layer_names, text.x, None, asked, dropout_key=key, remat=c.remat)
        last = text.finish(ran.x, "final_norm")
        real = jnp.ones((1, last.shape[1]), bool) if real is None else real
        pooled: Any = POOLERS[c.pooler](w, last, real[..., None]) if c.pooler else None
        outputs = Outputs(
            logits=None if c.readout == "none" else read_out(w, last, config=c),
            last=last,
            pooled=pooled,
            classes=linear(w, "classes", pooled) if c.pooled_classes else None,
            cache=None if cache is None else ran.cache if c.kinds else ran.cache["layers"],
            first=text.x,
            shown=ran.shown,
        )
        return outputs.asked(show, return_probs, return_outputs)


class Decoder(Transformer):
    """Each position sees itself and the past: predicts the next token."""


class Encoder(Transformer):
    """Each position sees all: predicts the tokens that were masked."""


class EncoderDecoder(LanguageModel):
    """An encoder reads one text; a decoder that attends to it writes another (Vaswani 2017)."""

    @nn.compact
    def __call__(
        self,
        source: Int[Array, "B S"] | Float[Array, "B S vocab"],
        tokens: Int[Array, "B T"] | Float[Array, "B T vocab"],
        *,
        padding_mask: Bool[Array, "B S"] | None = None,
        target_padding_mask: Bool[Array, "B R"] | None = None,
        encoded: Float[Array, "B S D"] | None = None,
        cache: Cache | None = None,
        show: Iterable[str] = (),
        edit: Edit | None = None,
        deterministic: bool = True,
        return_probs: bool = False,
        return_outputs: bool = False,
        told: dict[str, Any] | None = None,
    ) -> Any:
        """source, tokens -> logits [B, T, vocab_size] of the token after each of `tokens`.

        `padding_mask` [B, S] True = a token of the source, for the encoder and for the decoder
        that reads it; `target_padding_mask` [B, T] the same for `tokens`, which with `cache` are
        kept and counted without their padding. With `encoded`
        (`Outputs.encoded` of an earlier call) the encoder is not run again; with `cache` the
        tokens are the next ones. `show` and `edit` as in `Decoder`, with the names of
        `observe.NAMES`: those of the decoder, `cross.` and `encoder.` before those of attention to
        the source and of the encoder. With `return_probs` also the probabilities: of the decoder
        [L, B, N, T, T], of the decoder to the source [L, B, N, T, S], of the encoder
        [Le, B, N, S, S] (None with `encoded`); with `return_outputs` all of `Outputs`. A decoder
        whose config has cross="merged" has no `cross.` names: the keys, values, scores and probs
        are of its own text and, behind it, of the source, [L, B, N, T, T + S] (with a cache its
        size in the place of T).
        """
        c = self.config
        mine, theirs = values_of(c.block), values_of(c.encoder_block)
        source_too = {f"encoder.{n}": value for n, value in theirs.items()}
        show = check_names(show, edit, mine | (source_too if encoded is None else {}))
        asked = Given(
            show=_to_show(show, return_probs, return_outputs, NAMES), edit=edit, told=told
        )
        w = {name: self.param(name, init) for name, init in init_outer(c).items()}
        pool_of = lambda name, block, plan: Pool(
            block, plan, c.init_std, _residual_scale(c), name=name
        )()
        pools = {"layers": pool_of("layers", c.block, c.layer_plan)}
        own = "" if c.share_encoder else "encoder_"
        if own:
            pools["encoder_layers"] = pool_of(
                "encoder_layers", c.encoder_block, c.encoder_layer_plan
            )
        drops = c.block.drops and not deterministic
        key = lambda: self.make_rng("dropout") if drops else None
        real = lambda mask: None if mask is None else jnp.asarray(mask, bool)
        in_source, in_text = real(padding_mask), real(target_padding_mask)
        outputs: dict[str, Any] = {}
        shown: dict[str, Any] = {}
        if encoded is None:
            text = _Text(self, w, c, source, None, None, (None, in_source), deterministic)
            ran = run_layers(
                pools[f"{own}layers"],
                c.encoder_layer_plan,
                text.x,
                None,
                Given(
                    padding_mask=in_source,
                    bias=text.bias(f"{own}relative_bias", two_sided=True),
                    rotary=rotary_of(c.as_encoder, text.numbers),
                    dropout_key=key(),
                    told=asked.tell("encoder"),
                    **asked.of(theirs, "encoder."),
                ),
                spec=c.encoder_block,
                remat=c.remat,
            )
            encoded = text.finish(ran.x, f"{own}final_norm")
            outputs["encoder_first"] = text.x
            shown = {f"encoder.{name}": a for name, a in ran.shown.items()}
        text = _Text(self, w, c, tokens, None, None, (cache, in_text), deterministic)
        ran = run_layers(
            pools["layers"],
            c.layer_plan,
            text.x,
            encoded,
            Given(
                padding_mask=in_text,
                bias=text.bias("relative_bias", cache, two_sided=False),
                context_mask=None if in_source is None else in_source[:, None, None, :],
                rotary=rotary_of(c, text.numbers),
                dropout_key=key(),
                cache=cache,
                told=told,
                **asked.of(mine),
            ),
            spec=c.block,
            remat=c.remat,
        )
        last = text.finish(ran.x, "final_norm")
        return Outputs(
            logits=None if c.readout == "none" else read_out(w, last, config=c),
            last=last,
            cache=ran.cache,
            encoded=encoded,
            first=text.x,
            shown=shown | ran.shown,
            **outputs,
        ).asked(show, return_probs, return_outputs)


MODELS.update(decoder=Decoder, encoder=Encoder, encoder_decoder=EncoderDecoder)


class _Text:
    """One text on its way through a model: embedded, with its positions, and out again."""

    def __init__(self, module, w, config, tokens, token_types, numbers, behind, deterministic):
        tokens = check_tokens(config, tokens)
        c, length = config, tokens.shape[1]
        if length > c.max_len:
            raise ValueError(f"{length} tokens are longer than max_len {c.max_len}; raise max_len")
        cache, padding_mask = behind
        check_range("token id", tokens, c.vocab_size, padding_mask)
        check_range("token type", token_types, c.token_types or c.vocab_size, padding_mask)
        self.w, self.config = w, c
        self.keys = module.make_rng if not deterministic else lambda stream: None
        self.behind = None
        if cache is not None:
            self.behind = next_positions({"length": cache["length"][0]}, length, padding_mask)
        if numbers is None:
            numbers = number_positions(c, tokens) if cache is None else self.behind
        x = embed(w, tokens, config=c, numbers=numbers, token_types=token_types)
        self.numbers = jnp.arange(length) if numbers is None else numbers
        rate = c.dropout_rate if c.embedding_dropout_rate is None else c.embedding_dropout_rate
        self.x = self._drop("embeddings", x, rate).astype(DTYPES[c.dtype])

    def bias(self, name: str, cache: Cache | None = None, *, two_sided: bool) -> Array | None:
        """What relative positions add to the scores of layers with this cache."""
        if name not in self.w:
            return None
        keys = self.numbers
        if cache is not None and self.behind is not None:
            # What is not there is masked.
            keys = held_positions(self.behind[..., -1], stacked_size(cache))
        return relative_bias(
            self.w[name], self.numbers, keys, config=self.config, two_sided=two_sided
        )

    def finish(self, x: Array, norm: str) -> Array:
        """The final norm, where there is one, and what is dropped behind it."""
        c = self.config
        if norm in self.w:
            x = NORM_KINDS[c.norm_kind](self.w[norm], x, eps=c.norm_eps)
        return self._drop("final", x, c.dropout_rate)

    def _drop(self, place: str, x: Array, rate: float) -> Array:
        if not rate or place not in self.config.dropout_places:
            return x
        return dropout(x, rate, self.keys("dropout"))


def _residual_scale(c: ModelConfig) -> float:
    return (2 * c.num_layers) ** -0.5 if c.init_residual == "depth" else 1.0


def _to_show(
    show: tuple[str, ...], probs: bool, hidden: bool, known: Iterable[str] = OF_LAYER
) -> tuple[str, ...]:
    """The names to show, and those of probabilities and hidden states where these are asked for."""
    more = ("probs",) * probs + ("residual",) * hidden
    known = [n for n in known if n.rpartition(".")[2] in more]
    return tuple(dict.fromkeys((*show, *known)))
