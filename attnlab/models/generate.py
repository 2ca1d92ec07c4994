"""Text from a model: the prompt in one call, then token by token.

`generate` writes the whole text in one compiled program, `stream` yields each token as it comes.

>>> config = ModelConfig(width=8, num_layers=2)
>>> prompt = jnp.array([[1, 2, 3]])
>>> params = config.build().init(jax.random.key(0), prompt)["params"]
>>> generate(params, prompt, config, 4).shape
(1, 4)
>>> sampling = Sampling(temperature=0.8, top_p=0.9)
>>> generate(params, prompt, config, 4, sampling=sampling, key=jax.random.key(1)).shape
(1, 4)
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypedDict, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int

from attnlab.attention.call import checked_padding_mask
from attnlab.attention.dropout import is_key
from attnlab.fields import Spec, as_count, bounded
from attnlab.heads.cache import stacked_size
from attnlab.models.config import ModelConfig, check_cached_length
from attnlab.models.embed import check_range, check_tokens
from attnlab.models.forward import ModelCache, ModelInputs, cache_by_type, check_inputs, run_model
from attnlab.models.params import check_params
from attnlab.names import check_keywords
from attnlab.sharing import Params

SMALLEST = 1e-30
"""Of temperature and top_p: smaller ones choose the same tokens, but are 0 in float32."""

# Sampling -----------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Sampling(Spec):
    """How the next token is chosen.

    Attributes:
      temperature: 0 takes the likeliest token; else it is drawn from softmax(logits / temperature).
      top_k: only tokens at least as likely as the k-th (Fan et al. 2018, arXiv 1805.04833).
      top_p: only the likeliest tokens, down to the first at which their probabilities sum to top_p
        (Holtzman et al. 2019, arXiv 1904.09751).

    Raises:
      ValueError: a value that nothing can be drawn with.

    >>> Sampling(temperature=0.7, top_p=0.9)
    Sampling(temperature=0.7, top_p=0.9)
    """

    temperature: float = bounded(0.0, least=0.0)
    top_k: int | None = bounded(None, least=1)
    top_p: float | None = bounded(None, above=0.0, most=1.0)


def limit_logits(
    logits: Float[Array, "*B vocab"],
    *,
    temperature: ArrayLike = 1.0,
    top_k: int | None = None,
    top_p: ArrayLike | None = None,
) -> Float[Array, "*B vocab"]:
    """logits / temperature, and -inf for tokens that may not be drawn.

    First top_k, then top_p of what is left, as in transformers. Of equally likely tokens that need
    not all be in, top_p keeps those with smaller ids.

    Args:
      logits: [..., vocab].
      temperature: above 0.
      top_k, top_p: as in `Sampling`.

    Raises:
      ValueError: top_k is less than 1, or more than the vocabulary.

    >>> logits = jnp.log(jnp.array([0.1, 0.5, 0.25, 0.15]))
    >>> keeps = lambda **limits: jnp.isfinite(limit_logits(logits, **limits)).astype(int).tolist()
    >>> keeps(top_k=3), keeps(top_p=0.7), keeps(top_p=0.8), keeps(top_k=2, top_p=0.7)
    ([0, 1, 1, 1], [0, 1, 1, 0], [0, 1, 1, 1], [0, 1, 1, 0])
    """
    logits = logits / jnp.maximum(temperature, SMALLEST)
    if top_k is not None:
        if not 1 <= top_k <= logits.shape[-1]:
            raise ValueError(f"top_k must be from 1 to vocab_size {logits.shape[-1]}, not {top_k}")
        least = jax.lax.top_k(logits, top_k)[0][..., -1:]
        logits = jnp.where(logits >= least, logits, -jnp.inf)
    if top_p is not None:
        order = jnp.argsort(-logits, axis=-1)
        probs = jax.nn.softmax(jnp.take_along_axis(logits, order, axis=-1), axis=-1)
        likelier = jnp.cumsum(probs, axis=-1) - probs
        kept = jnp.take_along_axis(
            likelier < jnp.maximum(top_p, SMALLEST), jnp.argsort(order, axis=-1), axis=-1
        )
        logits = jnp.where(kept, logits, -jnp.inf)
    return logits


def next_token(
    logits: Float[Array, "B vocab"],
    key: Array,
    *,
    temperature: ArrayLike | None = None,
    top_k: int | None = None,
    top_p: ArrayLike | None = None,
) -> Int[Array, " B"]:
    """The likeliest token, or with a temperature one drawn with `key`.

    >>> next_token(jnp.array([[0.0, 2.0, 1.0]]), jax.random.key(0)).tolist()
    [1]
    """
    if temperature is None:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    allowed = limit_logits(logits, temperature=temperature, top_k=top_k, top_p=top_p)
    return jax.random.categorical(key, allowed).astype(jnp.int32)


# Decoding -----------------------------------------------------------------------------------------


class Prefilled(NamedTuple):
    """What `prefill` returns."""

    logits: Float[Array, "B T vocab"]
    cache: ModelCache


class GenerateOptions(TypedDict, total=False):
    """Options of `generate` and `stream`.

    padding_mask: [B, T], True = a token of the prompt. Padding, wherever it is, is neither attended
      to nor counted: each row continues as it would alone.
    source: tokens [B, S] that the encoder of an encoder_decoder reads, once.
    source_padding_mask: [B, S], True = a token of the source.
    sampling: how a token is chosen; default: the likeliest.
    key: random key, if tokens are drawn.
    end: one or several tokens that end a row. Behind it the row holds the first of them; when all
      rows have ended, the computation stops.
    cache_size: tokens that the cache holds; default: those of the whole text. A model with a window
      needs no more than two windows.
    """

    padding_mask: ArrayLike | None
    source: ArrayLike | None
    source_padding_mask: ArrayLike | None
    sampling: Sampling
    key: Array | None
    end: int | Sequence[int] | None
    cache_size: int | None


def prefill(
    params: Params,
    tokens: ArrayLike,
    config: ModelConfig,
    cache: ModelCache,
    *,
    padding_mask: ArrayLike | None = None,
    **source: Any,
) -> Prefilled:
    """Logits of the next tokens of a text, and the cache that holds them too.

    Where a window is smaller than the cache, and the cache than the text, old tokens are replaced;
    the tokens are then read in pieces of `size - window`.

    Args:
      params: of the model.
      tokens: ids [B, T], any number that fits.
      config: of the model.
      cache: of `config.init_cache`, or of an earlier call.
      padding_mask: [B, T], True = a token. Padding is neither kept nor counted.
      **source: of an encoder_decoder: source, source_padding_mask, encoded of `ModelInputs`.

    Raises:
      ValueError: the tokens do not fit, or there are none. Inside a traced function, where the
        number of tokens in the cache is unknown, logits are NaN instead and the cache stays as it
        is.

    >>> config = ModelConfig(width=8, num_layers=2)
    >>> tokens = jnp.array([[1, 2, 3]])
    >>> params = config.build().init(jax.random.key(0), tokens)["params"]
    >>> logits, cache = prefill(params, tokens, config, config.init_cache(1, 5))
    >>> logits.shape, cache["length"].tolist()
    ((1, 3, 256), [3, 3])
    """
    tokens = check_tokens(config, tokens)
    length = tokens.shape[1]
    if not length:
        raise ValueError(f"tokens {tokens.shape} hold no token; give at least 1")
    mask = checked_padding_mask("padding_mask", padding_mask, tokens)
    piece = _piece_length(config, cache, length, mask)
    logits: list[Array] = []
    for part in (slice(start, start + piece) for start in range(0, length, piece)):
        own = None if mask is None else mask[:, part]
        inputs = ModelInputs(cache=cache, padding_mask=own, **source)
        outputs = run_model(params, tokens[:, part], config, inputs)
        assert outputs.cache is not None
        assert outputs.logits is not None
        logits, cache = [*logits, outputs.logits], outputs.cache
    return Prefilled(jnp.concatenate(logits, axis=1), cache)


def _piece_length(config: ModelConfig, cache: ModelCache, length: int, mask: Array | None) -> int:
    """How many of `length` tokens one call may read.

    Raises:
      ValueError: they do not fit the cache, or `max_len`.
    """
    piece = length
    for name, held in cache_by_type(config, cache).items():
        size, window = stacked_size(held), config.stacks[name].attention.window
        is_traced = any(isinstance(a, jax.core.Tracer) for a in (held["length"], mask))
        # How many tokens the fullest row will hold.
        more = held["length"][0] + (length if mask is None else jnp.sum(mask, axis=1))
        total = length if is_traced else int(jnp.max(more))
        is_ring = window is not None and window < size
        if total > size and not is_ring:
            raise ValueError(
                f"{total} tokens do not fit a cache of size {size}; make it with size={total}, or "
                "give the model a window smaller than the cache"
            )
        if total > config.max_len:
            raise ValueError(f"{total} tokens are longer than max_len {config.max_len}; raise it")
        check_cached_length(config, total)
        fits = total <= size and not (is_traced and is_ring)
        piece = min(piece, size if fits else size - (window or 0))
    return piece


def generate(
    params: Params,
    prompt: ArrayLike,
    config: ModelConfig,
    num_tokens: int,
    **options: Unpack[GenerateOptions],
) -> Int[Array, "B new"]:
    """The `num_tokens` tokens that follow each row of a prompt.

    Args:
      params: of the model, or the variables {"params": ...}.
      prompt: ids [B, T]; of an encoder_decoder mostly one start token.
      config: of a decoder or encoder_decoder.
      num_tokens: how many.
      **options: see `GenerateOptions`.

    Raises:
      TypeError: an unknown option.
      ValueError: before anything is compiled: tokens outside the vocabulary, a text longer than
        `max_len` or the cache, a missing key, weights of another model, or a model without logits.

    >>> config = ModelConfig(width=8, num_layers=2)
    >>> params = config.build().init(jax.random.key(0), jnp.array([[1, 2, 3]]))["params"]
    >>> generate(params, [[1, 2, 3]], config, 4).shape
    (1, 4)
    """
    programs, *given = _check(params, prompt, config, num_tokens, options)
    tokens: Array = programs.whole(*given)
    return tokens


def stream(
    params: Params,
    prompt: ArrayLike,
    config: ModelConfig,
    num_tokens: int,
    **options: Unpack[GenerateOptions],
) -> Iterator[Int[Array, " B"]]:
    """The columns of `generate`, with the same arguments, each as soon as it is computed.

    Ends early when all rows have ended. The next token is computed when the iterator is advanced.

    Args:
      params, prompt, config, num_tokens, options: as in `generate`.

    Returns:
      An iterator over at most `num_tokens` arrays of ids [B].

    Raises:
      TypeError, ValueError: as `generate`, at the call and not at the first token.

    >>> config = ModelConfig(width=8, num_layers=2)
    >>> params = config.build().init(jax.random.key(0), jnp.array([[1, 2, 3]]))["params"]
    >>> tokens = [int(token[0]) for token in stream(params, [[1, 2, 3]], config, 4)]
    >>> tokens == generate(params, [[1, 2, 3]], config, 4)[0].tolist()
    True
    """
    programs, weights, text, limits, keys = _check(params, prompt, config, num_tokens, options)

    def tokens() -> Iterator[Array]:
        state, cache, source = programs.first(weights, text, limits, keys[0])
        yield state.token
        for key in keys[1:]:
            if bool(jnp.all(state.ended)):
                return
            state, cache = programs.next(cache, weights, state, source, limits, key)
            yield state.token

    return tokens()


# Checks -------------------------------------------------------------------------------------------


def _check(
    params: Params,
    prompt: ArrayLike,
    config: ModelConfig,
    num_tokens: int,
    options: GenerateOptions,
) -> "tuple[_Programs, Params, dict[str, Any], dict[str, Array], Array]":
    """The programs that write a text, and their arguments: params, texts and masks by name,
    "temperature" and "top_p" where tokens are drawn, and a key for each token."""
    check_keywords("generate", options, GenerateOptions.__annotations__)
    params = check_params(config, params)
    if config.kind == "encoder" or config.output.kind == "none":
        kinds = f"kind {config.kind!r} and output.kind {config.output.kind!r}"
        raise ValueError(f"only a decoder with logits generates text; this model has {kinds}")
    num_tokens = as_count("num_tokens", num_tokens, 1)
    sampling, limits, key = _check_sampling(config, options)
    text = _check_texts(config, prompt, options)
    size = _check_length(config, text["prompt"].shape[1], num_tokens, options.get("cache_size"))
    end = options.get("end")
    ends = tuple(as_count("end", one) for one in np.ravel([] if end is None else end))
    check_range("end", np.array(ends, int), config.vocab_size)
    programs = _programs(config, size, sampling.top_k, ends)
    return programs, params, text, limits, jax.random.split(key, num_tokens)


def _check_sampling(
    config: ModelConfig, options: GenerateOptions
) -> tuple[Sampling, dict[str, Array], Array]:
    """How tokens are drawn: the options, those that are arguments of programs, and the key."""
    sampling, key = options.get("sampling", Sampling()), options.get("key")
    if not isinstance(sampling, Sampling):
        raise TypeError(f"sampling must be such as Sampling(temperature=0), not {sampling!r}")
    if sampling.top_k is not None and sampling.top_k > config.vocab_size:
        raise ValueError(f"top_k {sampling.top_k} must be at most vocab_size {config.vocab_size}")
    if key is None and not sampling.temperature:
        key = jax.random.key(0)  # not used
    if key is None or not is_key(key):
        raise ValueError(f"to draw tokens, key must be such as jax.random.key(0), not {key!r}")
    limits: dict[str, Array] = {}
    if sampling.temperature:
        limits["temperature"] = jnp.asarray(sampling.temperature)
        if sampling.top_p not in (None, 1):
            limits["top_p"] = jnp.asarray(sampling.top_p)
    return sampling, limits, key


def _check_texts(
    config: ModelConfig, prompt: ArrayLike, options: GenerateOptions
) -> dict[str, Any]:
    """The prompt, the source and their masks by name. Only a source may be of mixtures."""
    names = ("padding_mask", "source_padding_mask", "source")
    given: dict[str, Any] = {name: options.get(name) for name in names}
    tokens, inputs = check_inputs(config, prompt, ModelInputs(**given))
    if tokens.ndim != 2:
        raise ValueError(f"tokens {tokens.shape} are mixtures of tokens; a text continues from ids")
    for name in names[:2]:
        mask = getattr(inputs, name)
        known = mask is not None and not isinstance(mask, jax.core.Tracer)
        if known and (empty := np.flatnonzero(~np.asarray(mask).any(axis=1))).size:
            raise ValueError(f"{name}: row {empty[0]} holds no token; give it one, or leave it out")
    return {"prompt": tokens} | {name: getattr(inputs, name) for name in names}


def _check_length(config: ModelConfig, length: int, num_tokens: int, cache_size: int | None) -> int:
    """The size of the cache."""
    if length < 1:
        raise ValueError("the prompt has no tokens; it needs at least 1")
    total = length + num_tokens
    if total > config.max_len:
        raise ValueError(f"{length} + {num_tokens} tokens are longer than max_len {config.max_len}")
    check_cached_length(config, total)
    size = total if cache_size is None else as_count("cache_size", cache_size, 1)
    windows = [stack.attention.window for stack in config.stacks.values()]
    if size < total and any(window is None or size <= window for window in windows):
        raise ValueError(f"cache_size {size} is too small for {total} tokens; leave it out")
    return size


# Programs -----------------------------------------------------------------------------------------


class _State(NamedTuple):
    """A text so far."""

    token: Int[Array, " B"]
    """The last one."""
    ended: Bool[Array, " B"]


class _Programs(NamedTuple):
    """Compiled programs; their arguments are arrays alone."""

    first: Callable[..., Any]
    """(params, text, limits, key) -> (state, cache, source)"""
    next: Callable[..., Any]
    """(cache, params, state, source, limits, key) -> (state, cache)"""
    whole: Callable[..., Any]
    """(params, text, limits, keys) -> tokens [B, new]"""


@functools.lru_cache(maxsize=32)
def _programs(
    config: ModelConfig, cache_size: int, top_k: int | None, ends: tuple[int, ...]
) -> _Programs:
    """The programs of one model and cache; the number of tokens is the number of keys."""
    fill = ends[0] if ends else 0  # the token after the end of a text

    def is_end(token: Array) -> Array:
        return jnp.isin(token, jnp.asarray(ends, jnp.int32))

    def first(params: Params, text: dict[str, Any], limits: Any, key: Array) -> Any:
        prompt, mask = text["prompt"], text["padding_mask"]
        source = {} if text["source"] is None else _encode(params, text, config)
        windows = [c.attention.window for c in config.stacks.values()]
        least = min((w for w in windows if w is not None), default=0)
        cache = config.init_cache(prompt.shape[0], cache_size, least + 1)
        logits, cache = prefill(params, prompt, config, cache, padding_mask=mask, **source)
        last = logits[:, -1]
        if mask is not None:
            end = mask.shape[1] - 1 - jnp.argmax(mask[:, ::-1], axis=1)
            last = jnp.take_along_axis(logits, end[:, None, None], axis=1)[:, 0]
        token = next_token(last, key, top_k=top_k, **limits)
        return _State(token, is_end(token)), cache, source

    def step(
        cache: ModelCache, params: Params, state: _State, source: Any, limits: Any, key: Array
    ) -> Any:
        inputs = ModelInputs(cache=cache, **source)
        outputs = run_model(params, state.token[:, None], config, inputs)
        assert outputs.logits is not None
        chosen = next_token(outputs.logits[:, -1], key, top_k=top_k, **limits)
        token = jnp.where(state.ended, fill, chosen)
        return _State(token, state.ended | is_end(token)), outputs.cache

    def whole(params: Params, text: dict[str, Any], limits: Any, keys: Array) -> Array:
        state, cache, source = first(params, text, limits, keys[0])
        written = jnp.full((len(text["prompt"]), len(keys)), fill, jnp.int32)

        def goes_on(carry: Any) -> Any:
            return (carry[0] < len(keys)) & ~jnp.all(carry[2].ended)

        def body(carry: Any) -> Any:
            i, written, state, cache = carry
            state, cache = step(cache, params, state, source, limits, keys[i])
            return i + 1, written.at[:, i].set(state.token), state, cache

        start = jnp.array(1), written.at[:, 0].set(state.token), state, cache
        tokens: Array = jax.lax.while_loop(goes_on, body, start)[1]
        return tokens

    # The cache alone is donated: the caller of `stream` keeps the tokens.
    return _Programs(jax.jit(first), jax.jit(step, donate_argnums=0), jax.jit(whole))


def _encode(params: Params, text: dict[str, Any], config: ModelConfig) -> dict[str, Array | None]:
    """The source after the encoder, as the model takes it."""
    tokens, mask = text["source"], text["source_padding_mask"]
    if mask is not None:
        # Padding is moved after the text: positions are then counted without it.
        order = jnp.argsort(~mask, axis=1, stable=True)
        mask = jnp.take_along_axis(mask, order, axis=1)
        tokens = jnp.take_along_axis(
            tokens, order.reshape(*order.shape, *(1,) * (tokens.ndim - 2)), 1
        )
    # What the decoder computes of one token is unused, so that XLA leaves it out.
    inputs = ModelInputs(source=tokens, source_padding_mask=mask)
    outputs = run_model(params, text["prompt"][:, :1], config, inputs)
    return {"encoded": outputs.encoded, "source_padding_mask": mask}
