"""Text from a model: the prompt once, then token by token. `generate` writes all of it in one
compiled program, `stream` hands out each token as it comes."""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from attnlab.heads.old.cache import Cache, stacked_size
from attnlab.model.config import Model
from attnlab.model.draw import check_limits, choose
from attnlab.model.kinds import by_stack
from attnlab.model.outer import check_range, check_tokens


def prefill(
    model: Model,
    params: Any,
    tokens: Int[Array, "B T"],
    cache: Cache,
    *,
    padding_mask: Bool[Array, "B T"] | None = None,
    **source: Any,
) -> tuple[Float[Array, "B T vocab"], Cache]:
    """Logits of `tokens` behind what the cache holds, and the cache with them.

    Any length that fits. With a sliding window a cache that is smaller than the text goes round;
    the tokens are then taken in pieces of `size - window`. What `padding_mask` says is no token is
    neither kept nor counted, wherever it stands: every row goes on as it would alone. An encoder
    with a decoder takes `source` and `encoded` (`Outputs.encoded`) too, and `source_mask` for
    padding of the source.

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
    real = None if padding_mask is None else jnp.asarray(padding_mask, bool)
    length = piece = tokens.shape[1]
    for name, held in by_stack(config, cache).items():
        size, window = stacked_size(held), config.stacks[name].window
        traced = any(isinstance(a, jax.core.Tracer) for a in (held["length"], real))
        # How many tokens the fullest row holds, and will hold.
        used = 0 if traced else int(jnp.max(held["length"]))
        more = held["length"][0] + (length if real is None else jnp.sum(real, axis=1))
        total = length if traced else int(jnp.max(more))
        goes_round = window is not None and window < size
        if total > size and not goes_round:
            raise ValueError(
                f"{length} tokens behind {used} do not fit a cache of size {size}; make it with "
                f"config.empty_cache(batch, size={total}), or give the model a window smaller "
                "than the cache"
            )
        whole = total <= size and not (traced and goes_round)
        piece = min(piece, size if whole else size - (window or 0))
    if total > config.max_len:
        raise ValueError(
            f"{length} tokens behind {used} are longer than max_len {config.max_len}; raise max_len"
        )
    logits = []
    for start in range(0, length, piece):
        part = slice(start, start + piece)
        own = None if real is None else real[:, part]
        seen, cache = _apply(model, params, tokens[:, part], own, cache=cache, **source)
        logits.append(seen)
    return jnp.concatenate(logits, axis=1), cache


def generate(
    model: Model,
    params: Any,
    prompt: Int[Array, "B T"],
    num_tokens: int,
    *,
    prompt_mask: Bool[Array, "B T"] | None = None,
    source: Int[Array, "B S"] | None = None,
    padding_mask: Bool[Array, "B S"] | None = None,
    end: int | Sequence[int] | None = None,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    key: Array | None = None,
    cache_size: int | None = None,
) -> Int[Array, "B new"]:
    """The `num_tokens` tokens that follow each row of `prompt`, by `params` or variables of them.

    Rows may have lengths of their own: `prompt_mask` True = a token, wherever the padding stands
    (mostly on the left). Padding is not seen and not counted, so a row goes on as it would alone.

    An encoder with a decoder reads `source` once, but for what `padding_mask` [B, S] says is none
    of it, and writes behind `prompt`, mostly one start token. A row is over with a token of `end`,
    one or several, and behind it holds the first of them; when all rows are over no more is run.

    `temperature` 0 takes the likeliest token; else p ~ softmax(logits / temperature), drawn with
    `key`, of those that `top_k` and then `top_p` leave (see `limit_logits`).
    `cache_size` None is what the text needs; a model with a window needs no more than two windows.

    Raises ValueError, before anything is compiled, for a text longer than `max_len` or than the
    cache, for a missing key, and for a model that does not write.

    >>> from attnlab import ModelConfig
    >>> model = ModelConfig(width=8, num_heads=2, num_layers=2).build()
    >>> prompt, real = jnp.array([[1, 2, 3], [0, 0, 3]]), jnp.array([[True] * 3, [0, 0, True]])
    >>> params = model.init(jax.random.key(0), prompt)["params"]
    >>> generate(model, params, prompt, 4, prompt_mask=real).shape
    (2, 4)
    """
    asked = _check(
        model,
        params,
        prompt,
        num_tokens,
        prompt_mask=prompt_mask,
        source=source,
        padding_mask=padding_mask,
        end=end,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        key=key,
        cache_size=cache_size,
    )
    return asked.programs.whole(*asked.arrays, asked.keys)


def stream(
    model: Model, params: Any, prompt: Int[Array, "B T"], num_tokens: int, **options: Any
) -> Iterator[Int[Array, "B"]]:
    """The columns of `generate`, whose options these are, each as soon as it is there.

    Ends early when all rows are over. The next token is computed when it is asked for; whoever
    stops asking stops the work.

    >>> from attnlab import ModelConfig
    >>> model = ModelConfig(width=8, num_heads=2, num_layers=2).build()
    >>> params = model.init(jax.random.key(0), jnp.array([[1, 2, 3]]))["params"]
    >>> told = [int(token[0]) for token in stream(model, params, [[1, 2, 3]], 4)]
    >>> told == generate(model, params, [[1, 2, 3]], 4)[0].tolist()
    True
    """
    # Here, not where the first token is asked for, bad input fails.
    asked = _check(model, params, prompt, num_tokens, **options)

    def tokens() -> Iterator[Array]:
        at = asked.programs.first(*asked.arrays, asked.keys[0])
        yield at.token
        for key in asked.keys[1:]:
            if asked.ends and bool(jnp.all(at.over)):
                return
            at = asked.programs.then(asked.arrays[0], *at, asked.arrays[-1], key)
            yield at.token

    return tokens()


def params_of(params: Any) -> Any:
    """The params, also of the variables that a module's `init` gives."""
    return params["params"] if set(params) == {"params"} else params


def check_ids(model: Model, tokens: Any) -> Array:
    """Ids [B, T] as an array. Raises ValueError with a way out."""
    tokens = check_tokens(model.config, tokens)
    if tokens.ndim != 2:
        raise ValueError(f"tokens {tokens.shape} are mixtures of words; text goes on from ids")
    return tokens


class _Asked(NamedTuple):
    """A text to write, checked."""

    programs: "_Programs"
    arrays: tuple[Any, ...]
    """What they read: params, prompt, its mask, source, limits of the draw"""
    keys: Array
    """One for each token"""
    ends: tuple[int, ...]


def _check(
    model: Any,
    params: Any,
    prompt: Any,
    num_tokens: int,
    *,
    prompt_mask: Any = None,
    source: Any = None,
    padding_mask: Any = None,
    end: int | Sequence[int] | None = None,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    key: Array | None = None,
    cache_size: int | None = None,
) -> _Asked:
    config = model.config
    if config.kind == "encoder":
        raise ValueError("only a decoder generates text, this is an encoder")
    if (config.kind == "encoder_decoder") != (source is not None):
        raise ValueError(f"source is what an encoder_decoder reads; this is a {config.kind}")
    if source is None and padding_mask is not None:
        raise ValueError("padding_mask is of a source; for padding of the prompt, set prompt_mask")
    prompt, params = check_ids(model, prompt), params_of(params)
    if prompt.shape[1] < 1 or num_tokens < 1:
        raise ValueError(
            f"prompt {prompt.shape} and num_tokens {num_tokens} need at least one token each"
        )
    check_limits(config.vocab_size, temperature, top_k, top_p, key)
    ends = () if end is None else tuple(map(int, np.ravel(end)))
    if wrong := [e for e in ends if not 0 <= e < config.vocab_size]:
        raise ValueError(f"end {wrong[0]} is no token: they are 0 to {config.vocab_size - 1}")
    total = prompt.shape[1] + num_tokens
    if total > config.max_len:
        raise ValueError(
            f"{prompt.shape[1]} tokens and {num_tokens} new ones are longer than max_len "
            f"{config.max_len}; raise max_len"
        )
    size = total if cache_size is None else cache_size
    windows = [stack.window for stack in config.stacks.values()]
    if size < total and any(window is None or size <= window for window in windows):
        raise ValueError(f"cache_size {size} is too small for {total} tokens; leave it out")
    mask = None if prompt_mask is None else _check_mask("prompt_mask", prompt_mask, prompt)
    check_range("token id", prompt, config.vocab_size, mask)
    given = {}
    if source is not None:
        given["source"] = check_tokens(config, source)
        if padding_mask is not None:
            given["source_mask"] = _check_mask("padding_mask", padding_mask, given["source"])
        check_range("token id", given["source"], config.vocab_size, given.get("source_mask"))
    limits = {"temperature": jnp.asarray(temperature)} if temperature else {}
    limits |= {"top_p": jnp.asarray(top_p)} if limits and top_p is not None and top_p < 1 else {}
    keys = jax.random.split(jax.random.key(0) if key is None else key, num_tokens)
    programs = _programs(model, size, top_k, ends)
    return _Asked(programs, (params, prompt, mask, given, limits), keys, ends)


def _check_mask(name: str, mask: Any, tokens: Array) -> Array:
    mask = jnp.asarray(mask).astype(bool)
    if mask.shape != tokens.shape[:2]:
        raise ValueError(
            f"{name} {mask.shape} must be {tokens.shape[:2]}, True where there is a token"
        )
    if not isinstance(mask, jax.core.Tracer) and not bool(mask.any(axis=1).all()):
        empty = int(np.argmin(mask.any(axis=1)))
        raise ValueError(f"{name}: row {empty} holds no token; give it one, or leave it out")
    return mask


class _At(NamedTuple):
    """How far a text has come."""

    token: Int[Array, "B"]
    over: Bool[Array, "B"]
    cache: Cache
    source: dict[str, Any]


class _Programs(NamedTuple):
    """Compiled; arguments are arrays alone."""

    first: Callable[..., _At]
    then: Callable[..., _At]
    whole: Callable[..., Array]


@functools.lru_cache(maxsize=32)
def _programs(model: Any, size: int, top_k: int | None, ends: tuple[int, ...]) -> _Programs:
    """Those of one model and cache; the number of tokens is the number of keys."""
    fill = ends[0] if ends else 0

    def first(params, prompt, mask, source, limits, key) -> _At:
        windows = [c.window for c in model.config.stacks.values() if c.window is not None]
        cache = model.config.empty_cache(prompt.shape[0], size, min(windows, default=0) + 1)
        if source:
            source = _encoded(model, params, prompt, source)
        logits, cache = prefill(model, params, prompt, cache, padding_mask=mask, **source)
        last = logits[:, -1]
        if mask is not None:
            end = mask.shape[1] - 1 - jnp.argmax(mask[:, ::-1], axis=1)
            last = jnp.take_along_axis(logits, end[:, None, None], axis=1)[:, 0]
        token = choose(last, key, limits, top_k)
        return _At(token, _is_any(token, ends), cache, source)

    def then(params, token, over, cache, source, limits, key) -> _At:
        logits, cache = _apply(model, params, token[:, None], None, cache=cache, **source)
        token = jnp.where(over, fill, choose(logits[:, -1], key, limits, top_k))
        return _At(token, over | _is_any(token, ends), cache, source)

    def whole(params, prompt, mask, source, limits, keys) -> Array:
        at = first(params, prompt, mask, source, limits, keys[0])
        written = jnp.full((prompt.shape[0], len(keys)), fill, jnp.int32)
        source = at.source  # goes round unchanged

        def body(carry: Any) -> Any:
            i, written, at = carry
            at = then(params, at.token, at.over, at.cache, source, limits, keys[i])
            return i + 1, written.at[:, i].set(at.token), at._replace(source={})

        going = lambda carry: (carry[0] < len(keys)) & ~jnp.all(carry[2].over)
        start = 1, written.at[:, 0].set(at.token), at._replace(source={})
        return jax.lax.while_loop(going, body, start)[1]

    return _Programs(jax.jit(first), jax.jit(then, donate_argnums=3), jax.jit(whole))


def _is_any(token: Array, ends: tuple[int, ...]) -> Array:
    return jnp.isin(token, jnp.asarray(ends, jnp.int32))


def _encoded(model: Any, params: Any, prompt: Array, source: dict[str, Any]) -> dict[str, Any]:
    """The source, read once."""
    text, mask = source["source"], source.get("source_mask")
    if mask is not None:
        # Padding behind the text: positions are then counted without it.
        order = jnp.argsort(~mask, axis=1, stable=True)
        mask = jnp.take_along_axis(mask, order, axis=1)
        text = jnp.take_along_axis(text, order.reshape(*order.shape, *(1,) * (text.ndim - 2)), 1)
    # Nobody reads what the decoder makes of one token, so that XLA leaves it out.
    seen = _apply(
        model, params, prompt[:, :1], None, source=text, source_mask=mask, return_outputs=True
    )
    return {"source": text, "source_mask": mask, "encoded": seen.encoded}


def _apply(model: Any, params: Any, tokens: Array, real: Any, *, source_mask: Any = None, **given):
    """The model's call under one name for each mask."""
    both = model.config.kind == "encoder_decoder"
    masks = {"target_padding_mask": real, "padding_mask": source_mask} if both else {}
    masks = masks or {"padding_mask": real}
    return model.apply({"params": params}, tokens=tokens, **masks, **given)
