"""Text that a stored model writes behind a prompt; `experiments.sample` is the command."""

import itertools
import sys
from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from attnlab.lab.loaded import LoadedModel, Prompt, until_end
from attnlab.models import Sampling, generate, stream
from attnlab.models.generate import GenerateOptions


class _Request(NamedTuple):
    """A call of `generate`."""

    prompt: jax.Array
    num_tokens: int
    options: GenerateOptions
    before: list[int]
    """Tokens that the text begins with: those of the prompt, unless it has a source."""


def texts(
    opened: LoadedModel,
    prompt: Prompt,
    new_tokens: int,
    count: int = 1,
    sampling: Sampling = Sampling(),  # noqa: B008
    draw: int = 0,
) -> list[str]:
    """`count` texts; one of a model without an encoder begins with its prompt.

    Args:
      opened: the model.
      prompt: what it continues.
      new_tokens: of each text, as many as fit.
      count: texts.
      sampling: how tokens are chosen; temperature 0: the likeliest.
      draw: of the random key.

    Raises:
      ValueError: the prompt cannot be read, or leaves no space for a token.
    """
    request = _request(opened, prompt, new_tokens, sampling, draw)
    rows = jnp.repeat(request.prompt, count, axis=0)
    options = request.options
    for name in ("source", "source_padding_mask"):
        if (a := options.get(name)) is not None:
            options[name] = jnp.repeat(jnp.asarray(a), count, axis=0)
    new = np.asarray(generate(opened.params, rows, opened.config, request.num_tokens, **options))
    until = [until_end(row, opened.ends) for row in new.tolist()]
    return [opened.decode([*request.before, *row]) for row in until]


def pieces(
    opened: LoadedModel,
    prompt: Prompt,
    new_tokens: int,
    sampling: Sampling = Sampling(),  # noqa: B008
    draw: int = 0,
) -> Iterator[str]:
    """The first of `texts`, as it is written: a piece for each token that makes one."""
    request = _request(opened, prompt, new_tokens, sampling, draw)
    columns = stream(
        opened.params, request.prompt, opened.config, request.num_tokens, **request.options
    )
    tokens = until_end((int(column[0]) for column in columns), opened.ends)
    row, written = request.before, ""
    for new in itertools.chain([[]], ([token] for token in tokens)):
        row = [*row, *new]
        text = opened.decode(row) if row else ""
        # The last character may be a part of one, which the next token completes.
        if text.startswith(written) and not text.endswith("\ufffd"):
            yield text[len(written) :]
            written = text
    text = opened.decode(row)
    yield text[len(written) :] if text.startswith(written) else f"\n{text}"


def _request(
    opened: LoadedModel, prompt: Prompt, new_tokens: int, sampling: Sampling, draw: int
) -> _Request:
    given = {name: jnp.asarray(a) for name, a in opened.read(prompt).inputs.items()}
    tokens, most = given["tokens"], opened.config.max_len
    length = tokens.shape[1]
    if length >= most:
        raise ValueError(f"the text fills all {most} tokens of the model; give a shorter one")
    fits = min(new_tokens, most - length)
    if fits < new_tokens:
        print(
            f"only {fits} of --new_tokens={new_tokens} fit: the model reads {most} tokens, its "
            f"max_len, and the text has {length}",
            file=sys.stderr,
        )
    options: GenerateOptions = {
        "source": given.get("source"),
        "source_padding_mask": given.get("source_padding_mask"),
        "end": opened.ends or None,
        "sampling": sampling,
        "key": jax.random.key(draw) if sampling.temperature else None,
    }
    return _Request(tokens, fits, options, [] if "source" in given else tokens[0].tolist())
