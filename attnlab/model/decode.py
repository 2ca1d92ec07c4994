"""Text from a model: the prompt once, then token by token, in one compiled program."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from attnlab.heads.cache import Cache, stacked_size
from attnlab.model.config import Model
from attnlab.model.outer import check_tokens


def prefill(
    model: Model, params: Any, tokens: Int[Array, "B T"], cache: Cache
) -> tuple[Float[Array, "B T vocab"], Cache]:
    """Logits of `tokens` behind what the cache holds, and the cache with them.

    Any length that fits. With a sliding window a cache that is smaller than the text goes round;
    the tokens are then taken in pieces of `size - window`.

    Raises ValueError where they do not fit; inside a traced function, where nobody can know how
    full the cache is, logits are NaN instead and the cache stays as it was.

    >>> from attnlab import ModelConfig
    >>> config = ModelConfig(width=8, num_heads=2, num_layers=2)
    >>> model, tokens = config.build(), jnp.array([[1, 2, 3]])
    >>> params = model.init(jax.random.key(0), tokens)["params"]
    >>> logits, cache = prefill(model, params, tokens, config.empty_cache(1, 5))
    >>> logits.shape, cache["length"].tolist()
    ((1, 3, 256), [3, 3])
    """
    config, tokens, params = model.config, check_ids(model, tokens), params_of(params)
    length = tokens.shape[1]
    size = stacked_size(cache)
    traced = isinstance(cache["length"], jax.core.Tracer)
    used = 0 if traced else int(cache["length"][0])
    goes_round = config.window is not None and config.window < size
    if used + length > size and not goes_round:
        raise ValueError(
            f"{length} tokens behind {used} do not fit a cache of size {size}; make it with "
            f"config.empty_cache(batch, size={used + length}), or give the model a window smaller "
            "than the cache"
        )
    whole = used + length <= size and not (traced and goes_round)
    piece = length if whole else size - (config.window or 0)
    if used + length > config.max_len:
        raise ValueError(
            f"{length} tokens behind {used} are longer than max_len {config.max_len}; raise max_len"
        )
    logits = []
    for start in range(0, length, piece):
        part = tokens[:, start : start + piece]
        seen, cache = model.apply({"params": params}, part, cache=cache)
        logits.append(seen)
    return jnp.concatenate(logits, axis=1), cache


def generate(
    model: Model,
    params: Any,
    prompt: Int[Array, "B T"],
    num_tokens: int,
    *,
    source: Int[Array, "B S"] | None = None,
    padding_mask: Bool[Array, "B S"] | None = None,
    end: int | None = None,
    temperature: float = 0.0,
    top_k: int | None = None,
    key: Array | None = None,
    cache_size: int | None = None,
) -> Int[Array, "B new"]:
    """The `num_tokens` tokens that follow each row of `prompt`, by `params` or variables of them.

    An encoder with a decoder reads `source` once, but for what `padding_mask` [B, S] says is none
    of it, and writes behind `prompt`, mostly one start token. Behind the token `end` a row holds
    nothing else.

    `temperature` 0 takes the likeliest token; else p ~ softmax(logits / temperature), drawn with
    `key`, of the `top_k` likeliest alone where given (Fan et al. 2018, arXiv 1805.04833).
    `cache_size` None is what the text needs; a model with a window needs no more than two windows.

    Raises ValueError, before anything is compiled, for a text longer than `max_len` or than the
    cache, for a missing key, and for a model that does not write.

    >>> from attnlab import ModelConfig
    >>> model = ModelConfig(width=8, num_heads=2, num_layers=2).build()
    >>> prompt = jnp.array([[1, 2, 3]])
    >>> params = model.init(jax.random.key(0), prompt)["params"]
    >>> generate(model, params, prompt, 4).shape
    (1, 4)
    """
    config = model.config
    if config.kind == "encoder":
        raise ValueError("only a decoder generates text, this is an encoder")
    if (config.kind == "encoder_decoder") != (source is not None):
        raise ValueError(f"source is what an encoder_decoder reads; this is a {config.kind}")
    prompt, params = check_ids(model, prompt), params_of(params)
    if prompt.shape[1] < 1 or num_tokens < 1:
        raise ValueError(
            f"prompt {prompt.shape} and num_tokens {num_tokens} need at least one token each"
        )
    if temperature < 0:
        raise ValueError(f"temperature must be at least 0, not {temperature}")
    if temperature and key is None:
        raise ValueError(
            f"temperature={temperature} draws at random; pass key=jax.random.key(seed)"
        )
    if top_k is not None and not 1 <= top_k <= config.vocab_size:
        raise ValueError(f"top_k must be from 1 to vocab_size {config.vocab_size}, not {top_k}")
    total = prompt.shape[1] + num_tokens
    if total > config.max_len:
        raise ValueError(
            f"{prompt.shape[1]} tokens and {num_tokens} new ones are longer than max_len "
            f"{config.max_len}; raise max_len"
        )
    enough = total if config.window is None else min(total, 2 * config.window + 1)
    size = enough if cache_size is None else cache_size
    if size < total and (config.window is None or size <= config.window):
        raise ValueError(f"cache_size {size} is too small for {total} tokens; leave it out")
    key = jax.random.key(0) if key is None else key
    given = {} if source is None else {"source": source, "padding_mask": padding_mask}
    return _generate(model, num_tokens, size, bool(temperature), top_k, end)(
        params, prompt, given, jnp.asarray(temperature or 1.0), key
    )


def params_of(params: Any) -> Any:
    """The params, also of the variables that a module's `init` gives."""
    return params["params"] if set(params) == {"params"} else params


def check_ids(model: Model, tokens: Any) -> Array:
    """Ids [B, T] as an array. Raises ValueError with a way out."""
    tokens = check_tokens(model.config, tokens)
    if tokens.ndim != 2:
        raise ValueError(f"tokens {tokens.shape} are mixtures of words; text goes on from ids")
    return tokens


@functools.lru_cache(maxsize=32)
def _generate(
    model: Any, num_tokens: int, size: int, draws: bool, top_k: int | None, end: int | None
) -> Any:
    """One compiled program per model and lengths; temperature and key are its arguments."""

    def choose(logits: Array, temperature: Array, key: Array) -> Array:
        if not draws:
            return jnp.argmax(logits, axis=-1)
        if top_k is not None:
            least = jax.lax.top_k(logits, top_k)[0][:, -1:]
            logits = jnp.where(logits >= least, logits, -jnp.inf)
        return jax.random.categorical(key, logits / temperature)

    @jax.jit
    def run(params: Any, prompt: Array, given: Any, temperature: Array, key: Array) -> Array:
        cache = model.config.empty_cache(prompt.shape[0], size)
        if given:
            first = model.apply(
                {"params": params}, tokens=prompt, cache=cache, return_outputs=True, **given
            )
            logits, cache = first.logits, first.cache
            given = given | {"encoded": first.encoded}
        else:
            logits, cache = prefill(model, params, prompt, cache)

        def step(carry: Any, key: Array) -> Any:
            logits, cache, ended = carry
            token = choose(logits, temperature, key).astype(prompt.dtype)
            if end is not None:
                token = jnp.where(ended, end, token)
                ended = token == end
            logits, cache = model.apply(
                {"params": params}, tokens=token[:, None], cache=cache, **given
            )
            return (logits[:, -1], cache, ended), token

        keys = jax.random.split(key, num_tokens)
        start = logits[:, -1], cache, jnp.zeros(prompt.shape[0], bool)
        _, tokens = jax.lax.scan(step, start, keys)
        return tokens.T

    return run
