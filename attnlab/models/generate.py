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

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypedDict, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int

from attnlab.attention.mask_checks import checked_padding_mask
from attnlab.fields import as_count
from attnlab.heads.cache import stacked_size
from attnlab.models.config import ModelConfig
from attnlab.models.embed import check_range, check_tokens
from attnlab.models.forward import ModelCache, ModelInputs, cache_by_type, run_model
from attnlab.models.parameters import check_params, params_of
from attnlab.models.sampling import Sampling, SamplingArrays, next_token
from attnlab.names import check_keywords
from attnlab.sharing import Params


class Prefilled(NamedTuple):
    """What `prefill` returns."""

    logits: Float[Array, "B T vocab"]
    cache: ModelCache


class SourceInputs(TypedDict, total=False):
    """The second text of an encoder_decoder, as in `ModelInputs`."""

    source: ArrayLike | None
    source_padding_mask: ArrayLike | None
    encoded: Array | None


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
    **source: Unpack[SourceInputs],
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
      **source: of an encoder_decoder, see `SourceInputs`.

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
    shape = check_tokens(config, tokens).shape
    if not shape[1]:
        raise ValueError(f"tokens {shape} hold no token; give at least 1")
    mask = checked_padding_mask("padding_mask", padding_mask, tokens)
    params, tokens = params_of(params, config), check_ids(config, tokens, mask)
    piece = _piece_length(config, cache, tokens.shape[1], mask)
    logits = []
    for start in range(0, tokens.shape[1], piece):
        part = slice(start, start + piece)
        own = None if mask is None else mask[:, part]
        seen, cache = _next_logits(
            params, tokens[:, part], config, cache, padding_mask=own, **source
        )
        logits.append(seen)
    return Prefilled(jnp.concatenate(logits, axis=1), cache)


def _piece_length(config: ModelConfig, cache: ModelCache, length: int, mask: Array | None) -> int:
    """How many of `length` tokens one call may read.

    Raises:
      ValueError: they do not fit the cache, or `max_len`.
    """
    piece = length
    for name, held in cache_by_type(config, cache).items():
        assert held is not None
        size, window = stacked_size(held), config.stacks[name].attention.window
        is_traced = any(isinstance(a, jax.core.Tracer) for a in (held["length"], mask))
        # How many tokens the fullest row holds, and will hold.
        used = 0 if is_traced else int(jnp.max(held["length"]))
        more = held["length"][0] + (length if mask is None else jnp.sum(mask, axis=1))
        total = length if is_traced else int(jnp.max(more))
        is_ring = window is not None and window < size
        if total > size and not is_ring:
            raise ValueError(
                f"{length} tokens behind {used} do not fit a cache of size {size}; make it with "
                f"config.init_cache(batch, size={total}), or give the model a window smaller than "
                "the cache"
            )
        fits = total <= size and not (is_traced and is_ring)
        piece = min(piece, size if fits else size - (window or 0))
        if total > config.max_len:
            raise ValueError(
                f"{length} tokens behind {used} are longer than max_len {config.max_len}; raise "
                "max_len"
            )
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
    request = _check(params, prompt, config, num_tokens, options)
    return request.programs.whole(request.arrays, request.keys)


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
    request = _check(params, prompt, config, num_tokens, options)

    def tokens() -> Iterator[Array]:
        params, limits = request.arrays.params, request.arrays.limits
        state = request.programs.first(request.arrays, request.keys[0])
        yield state.token
        for key in request.keys[1:]:
            if request.ends and bool(jnp.all(state.ended)):
                return
            rest = state._replace(cache={})
            state = request.programs.next(params, state.cache, rest, limits, key)
            yield state.token

    return tokens()


# Checks -------------------------------------------------------------------------------------------


def check_ids(
    config: ModelConfig, tokens: ArrayLike, padding_mask: Array | None = None
) -> Int[Array, "B T"]:
    """Ids [B, T] as an array.

    Raises:
      ValueError: text, floats, another number of axes, or (outside of traced functions) an id that
        is not in the vocabulary.

    >>> check_ids(ModelConfig(), [[1, 256]])
    Traceback (most recent call last):
    ValueError: token id 256 at [0, 1] is out of range: ids are 0 to 255
    """
    ids = check_tokens(config, tokens)
    if ids.ndim != 2:
        raise ValueError(f"tokens {ids.shape} are mixtures of tokens; a text continues from ids")
    check_range("token id", ids, config.vocab_size, padding_mask)
    return ids


def _check_mask(name: str, mask: ArrayLike | None, tokens: Array) -> Array | None:
    checked = checked_padding_mask(name, mask, tokens)
    if checked is None:
        return None
    if not isinstance(checked, jax.core.Tracer) and not bool(checked.any(axis=1).all()):
        empty = int(np.argmin(checked.any(axis=1)))
        raise ValueError(f"{name}: row {empty} holds no token; give it one, or leave it out")
    return checked


class _Source(NamedTuple):
    """The second text: its tokens, then what the encoder returns for them."""

    tokens: Array
    padding_mask: Array | None = None
    encoded: Array | None = None


def _source_inputs(source: _Source | None) -> SourceInputs:
    """What the model receives of an encoded source."""
    if source is None:
        return {}
    return {"encoded": source.encoded, "source_padding_mask": source.padding_mask}


class _Arrays(NamedTuple):
    """Arguments of the compiled programs."""

    params: Params
    prompt: Array
    padding_mask: Array | None
    source: _Source | None
    limits: SamplingArrays


class _Request(NamedTuple):
    """A text to write, checked."""

    programs: "_Programs"
    arrays: _Arrays
    keys: Array
    """One for each token."""
    ends: tuple[int, ...]


def _check(
    params: Params,
    prompt: ArrayLike,
    config: ModelConfig,
    num_tokens: int,
    options: GenerateOptions,
) -> _Request:
    check_keywords("generate", options, GenerateOptions.__annotations__)
    params = params_of(params, config)
    _check_model(config, options)
    num_tokens = as_count("num_tokens", num_tokens, 1)
    sampling, key = options.get("sampling", Sampling()), options.get("key")
    if not isinstance(sampling, Sampling):
        raise TypeError(
            f"sampling must be a Sampling such as Sampling(temperature=0), not {sampling!r}"
        )
    if sampling.top_k is not None and sampling.top_k > config.vocab_size:
        raise ValueError(
            f"top_k must be from 1 to vocab_size {config.vocab_size}, not {sampling.top_k}"
        )
    if not sampling.is_greedy and key is None:
        raise ValueError(
            f"temperature={sampling.temperature} draws at random; pass key=jax.random.key(seed)"
        )
    ends = _check_ends(config, options.get("end"))
    ids = check_tokens(config, prompt)
    mask = _check_mask("padding_mask", options.get("padding_mask"), ids)
    ids = check_ids(config, ids, mask)
    size = _check_length(config, ids.shape[1], num_tokens, options.get("cache_size"))
    source = None
    if (source_tokens := options.get("source")) is not None:
        tokens = check_tokens(config, source_tokens)
        source_mask = _check_mask("source_padding_mask", options.get("source_padding_mask"), tokens)
        tokens = check_ids(config, tokens, source_mask) if tokens.ndim == 2 else tokens
        source = _Source(tokens, source_mask)
    check_params(config, params)
    keys = _split_key(jax.random.key(0) if key is None else key, num_tokens)
    programs = _programs(_Settings(config, size, sampling.top_k, ends))
    return _Request(programs, _Arrays(params, ids, mask, source, sampling.limits), keys, ends)


def _check_model(config: ModelConfig, options: GenerateOptions) -> None:
    """Raises ValueError for a model that cannot generate text, or options that do not fit it."""
    if config.kind == "encoder":
        raise ValueError("only a decoder generates text, this is an encoder")
    if config.output.kind == "none":
        raise ValueError(
            "output.kind='none' has no logits to choose tokens by; use 'tied' or 'own'"
        )
    source = options.get("source")
    if (config.kind == "encoder_decoder") != (source is not None):
        raise ValueError(
            f"source is for kind='encoder_decoder', which needs one; this is a {config.kind}"
        )
    if source is None and options.get("source_padding_mask") is not None:
        raise ValueError(
            "source_padding_mask is of a source; for padding of the prompt set padding_mask"
        )


def _check_ends(config: ModelConfig, end: int | Sequence[int] | None) -> tuple[int, ...]:
    given = np.ravel([] if end is None else end)
    if given.size and not np.issubdtype(given.dtype, np.integer):
        raise ValueError(f"end must be one or several token ids, not {end!r}")
    ends = tuple(map(int, given))
    if wrong := [e for e in ends if not 0 <= e < config.vocab_size]:
        raise ValueError(f"end {wrong[0]} is not a token id: ids are 0 to {config.vocab_size - 1}")
    return ends


def _split_key(key: Array, count: int) -> Array:
    try:
        return jax.random.split(key, count)
    except (TypeError, ValueError):
        raise ValueError(f"key must be one key such as jax.random.key(0), not {key!r}") from None


def _check_length(config: ModelConfig, length: int, num_tokens: int, cache_size: int | None) -> int:
    """The size of the cache."""
    if length < 1:
        raise ValueError("the prompt has no tokens; it needs at least 1")
    total = length + num_tokens
    if total > config.max_len:
        raise ValueError(
            f"{length} tokens and {num_tokens} new ones are longer than max_len {config.max_len}; "
            "raise max_len"
        )
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
    cache: ModelCache
    source: _Source | None


class _Programs(NamedTuple):
    """Compiled programs; their arguments are arrays alone."""

    first: Callable[[_Arrays, Array], _State]
    next: Callable[[Params, ModelCache, _State, SamplingArrays, Array], _State]
    whole: Callable[[_Arrays, Array], Array]


class _Settings(NamedTuple):
    """Static arguments of the programs."""

    config: ModelConfig
    cache_size: int
    top_k: int | None
    ends: tuple[int, ...]

    @property
    def fill(self) -> int:
        """The token after the end of a text."""
        return self.ends[0] if self.ends else 0

    def is_end(self, token: Int[Array, " B"]) -> Bool[Array, " B"]:
        """Which rows end with this token."""
        return jnp.isin(token, jnp.asarray(self.ends, jnp.int32))


@functools.lru_cache(maxsize=32)
def _programs(settings: _Settings) -> _Programs:
    """The programs of one model and cache; the number of tokens is the number of keys."""
    first, next_, whole = (functools.partial(f, settings) for f in (_first, _next, _whole))
    # The cache alone is donated: the caller of `stream` keeps the tokens.
    return _Programs(jax.jit(first), jax.jit(next_, donate_argnums=1), jax.jit(whole))


def _first(settings: _Settings, arrays: _Arrays, key: Array) -> _State:
    """The prompt and the first new token."""
    config = settings.config
    params, prompt, mask, source, limits = arrays
    if source is not None:
        source = _encode(params, prompt, config, source)
    windows = [c.attention.window for c in config.stacks.values()]
    least = min((w for w in windows if w is not None), default=0)
    cache = config.init_cache(prompt.shape[0], settings.cache_size, least + 1)
    logits, cache = prefill(
        params, prompt, config, cache, padding_mask=mask, **_source_inputs(source)
    )
    last = logits[:, -1]
    if mask is not None:
        end = mask.shape[1] - 1 - jnp.argmax(mask[:, ::-1], axis=1)
        last = jnp.take_along_axis(logits, end[:, None, None], axis=1)[:, 0]
    token = next_token(last, key, limits, settings.top_k)
    return _State(token, settings.is_end(token), cache, source)


def _next(
    settings: _Settings,
    params: Params,
    cache: ModelCache,
    state: _State,
    limits: SamplingArrays,
    key: Array,
) -> _State:
    """One more token; `cache` is that of the state."""
    token, inputs = state.token[:, None], _source_inputs(state.source)
    logits, cache = _next_logits(params, token, settings.config, cache, **inputs)
    chosen = next_token(logits[:, -1], key, limits, settings.top_k)
    token = jnp.where(state.ended, settings.fill, chosen)
    return _State(token, state.ended | settings.is_end(token), cache, state.source)


def _whole(settings: _Settings, arrays: _Arrays, keys: Array) -> Int[Array, "B new"]:
    """One token for each key, in one loop that stops when all rows have ended."""
    params, limits = arrays.params, arrays.limits
    state = _first(settings, arrays, keys[0])
    written = jnp.full((len(arrays.prompt), len(keys)), settings.fill, jnp.int32)
    encoded = state.source  # the same in every step

    def goes_on(carry: tuple[Array, Array, _State]) -> Array:
        return (carry[0] < len(keys)) & ~jnp.all(carry[2].ended)

    def step(carry: tuple[Array, Array, _State]) -> tuple[Array, Array, _State]:
        i, written, state = carry
        with_source = state._replace(source=encoded)
        state = _next(settings, params, state.cache, with_source, limits, keys[i])
        return i + 1, written.at[:, i].set(state.token), state._replace(source=None)

    start = jnp.array(1), written.at[:, 0].set(state.token), state._replace(source=None)
    text: Array = jax.lax.while_loop(goes_on, step, start)[1]
    return text


def _encode(params: Params, prompt: Array, config: ModelConfig, source: _Source) -> _Source:
    """The source after the encoder."""
    tokens, mask = source.tokens, source.padding_mask
    if mask is not None:
        # Padding is moved after the text: positions are then counted without it.
        order = jnp.argsort(~mask, axis=1, stable=True)
        mask = jnp.take_along_axis(mask, order, axis=1)
        tokens = jnp.take_along_axis(
            tokens, order.reshape(*order.shape, *(1,) * (tokens.ndim - 2)), 1
        )
    # What the decoder computes of one token is unused, so that XLA leaves it out.
    inputs = ModelInputs(source=tokens, source_padding_mask=mask)
    outputs = run_model(params, prompt[:, :1], config, inputs)
    return _Source(tokens, mask, outputs.encoded)


def _next_logits(
    params: Params,
    tokens: Array,
    config: ModelConfig,
    cache: ModelCache,
    *,
    padding_mask: Array | None = None,
    **source: Unpack[SourceInputs],
) -> Prefilled:
    """Logits of the next tokens, and the cache with them."""
    inputs = ModelInputs(cache=cache, padding_mask=padding_mask, **source)  # type: ignore[arg-type]
    outputs = run_model(params, tokens, config, inputs)
    assert outputs.logits is not None
    assert outputs.cache is not None
    return Prefilled(outputs.logits, outputs.cache)
