"""Generates text: python -m experiments.sample --workdir=runs/one --text="def main("

--workdir is a run or the folder of experiments.run, at its newest checkpoint; --path is a folder
with config.json, safetensors and tokenizer.json of a published model. The model continues --text;
an encoder-decoder writes the target of --source. It writes token by token until its end token or
--new_tokens. --temperature=0 always takes the most probable token; --top_k and --top_p sample among
the most probable ones.
"""

import itertools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

from attnlab.lab.loaded import LoadedModel, Prompt, open_folder, open_run
from attnlab.models import Sampling, generate, stream
from experiments import app


def main() -> None:
    """Prints the prompt with what follows it, once or --count times."""
    given = flags.FLAGS
    if bool(given.workdir) == bool(given.path):
        raise ValueError("no model; give --workdir=RUN, or --path=FOLDER of a published model")
    if given.seed is not None and not given.workdir:
        raise ValueError(
            "--seed selects a seed of --workdir; leave it out with --path, which holds one model"
        )
    asked = Prompt(given.text, given.tokens, given.source, given.source_tokens)
    if not any(asked):
        raise ValueError('no text to continue; give --text="..." or --tokens=1,2,3')
    opened = open_run(Path(given.workdir), given.seed) if given.workdir else None
    opened = opened or open_folder(Path(given.path))
    drawn = {n: getattr(given, n) for n in ("temperature", "top_k", "top_p", "draw")}
    if given.count > 1:
        print("\n".join(texts(opened, asked, given.new_tokens, count=given.count, **drawn)))
        return
    for piece in pieces(opened, asked, given.new_tokens, **drawn):
        print(piece, end="", flush=True)
    print()


def texts(opened: LoadedModel, asked: Prompt, new_tokens: int, **options: Any) -> list[str]:
    """`count` texts, drawn with the key `draw`; what a decoder goes on with stands before them.
    `options` are those of `_call`."""
    before, arguments, more = _call(opened, asked, new_tokens, **options)
    new = np.asarray(generate(*arguments, **more)).tolist()
    return [opened.decode([*before, *_until(row, opened.ends)]) for row in new]


def pieces(opened: LoadedModel, asked: Prompt, new_tokens: int, **options: Any) -> Iterator[str]:
    """The first of `texts`, as it is written: a piece for each token that makes one."""
    before, arguments, more = _call(opened, asked, new_tokens, **options)
    row, said = list(before), ""
    for token in itertools.chain([None], stream(*arguments, **more)):
        if token is not None and int(token[0]) in opened.ends:
            break
        row += [] if token is None else [int(token[0])]
        text = opened.decode(row) if row else ""
        # The last character may be a part of one, which the next token completes.
        if text.startswith(said) and not text.endswith("\ufffd"):
            yield text[len(said) :]
            said = text
    text = opened.decode(row)
    yield text[len(said) :] if text.startswith(said) else f"\n{text}"


def _call(
    opened: LoadedModel,
    asked: Prompt,
    new_tokens: int,
    *,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    draw: int = 0,
    count: int = 1,
) -> tuple[list[int], tuple[Any, ...], dict[str, Any]]:
    """The tokens that stand before what is written, and what `generate` is called with."""
    inputs = opened.read(asked).inputs
    given = {name: jnp.repeat(jnp.asarray(a), count, axis=0) for name, a in inputs.items()}
    prompt, most = given["tokens"], opened.config.max_len
    if prompt.shape[1] >= most:
        raise ValueError(f"the text fills all {most} tokens of the model; give a shorter one")
    fits = min(new_tokens, most - prompt.shape[1])
    if fits < new_tokens:
        print(
            f"only {fits} of --new_tokens={new_tokens} fit: the model reads {most} tokens, its "
            f"max_len, and the text has {prompt.shape[1]}",
            file=sys.stderr,
        )
    options = {
        "source": given.get("source"),
        "source_padding_mask": given.get("source_padding_mask"),
        "end": opened.ends or None,
        "sampling": Sampling(temperature=temperature, top_k=top_k, top_p=top_p),
        "key": jax.random.key(draw) if temperature else None,
    }
    before = [] if "source" in given else prompt[0].tolist()
    return before, (opened.params, prompt, opened.config, fits), options


def _until(row: list[int], ends: tuple[int, ...]) -> list[int]:
    return list(itertools.takewhile(lambda token: token not in ends, row))


if __name__ == "__main__":
    flags.DEFINE_string("workdir", None, "The folder of a run.")
    flags.DEFINE_string("path", None, "A folder of a published model.")
    flags.DEFINE_integer("seed", None, "Seed of the run; the first if left out.")
    flags.DEFINE_string("text", "", "The prompt, which the model continues.")
    flags.DEFINE_string("tokens", "", "The same as numbers: 1,2,3.")
    flags.DEFINE_string("source", "", "Text of the encoder of an encoder-decoder.")
    flags.DEFINE_string("source_tokens", "", "The same as numbers.")
    flags.DEFINE_integer(
        "new_tokens", 100, "Number of tokens to write, as far as max_len allows.", lower_bound=1
    )
    flags.DEFINE_float("temperature", 0.8, "0: always the most probable token.", lower_bound=0.0)
    flags.DEFINE_integer(
        "top_k", None, "Sample among so many of the most probable tokens.", lower_bound=1
    )
    flags.DEFINE_float(
        "top_p", None, "Sample among the most probable tokens up to this total probability."
    )
    flags.DEFINE_integer("draw", 0, "Random seed of the samples.")
    flags.DEFINE_integer("count", 1, "Number of texts.", lower_bound=1)
    app.start(main)
