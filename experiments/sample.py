"""Text from a model: python -m experiments.sample --workdir=runs/one --text="def main("

--workdir is a run, at its newest checkpoint, --path a folder with config.json, safetensors and
tokenizer.json of a published model. It goes on with --text, or writes what follows --source where
it is an encoder-decoder. --temperature=0 takes the likeliest token at every place.
"""

from pathlib import Path

import jax
import jax.numpy as jnp
from absl import flags

from attnlab import generate
from experiments.running import launch
from experiments.running.reading import Asked, Opened, open_folder, open_run


def main() -> None:
    """Prints the prompt with what follows it, once or --count times."""
    given = flags.FLAGS
    if bool(given.workdir) == bool(given.path):
        raise ValueError("which model? type --workdir=RUN for a run, or --path=FOLDER")
    if given.seed is not None and not given.workdir:
        raise ValueError("--seed is for --workdir; a folder holds one model")
    asked = Asked(given.text, given.tokens, given.source, given.source_tokens)
    if not asked:
        raise ValueError('what shall it go on with? give --text="...", or --tokens=1,2,3')
    opened = open_run(Path(given.workdir), given.seed) if given.workdir else None
    opened = opened or open_folder(Path(given.path))
    drawn = {name: getattr(given, name) for name in ("temperature", "top_k", "draw", "count")}
    for text in texts(opened, asked, given.new_tokens, **drawn):
        print(text)


def texts(
    opened: Opened,
    asked: Asked,
    new_tokens: int,
    *,
    temperature: float = 0.0,
    top_k: int | None = None,
    draw: int = 0,
    count: int = 1,
) -> list[str]:
    """`count` texts, drawn with the key `draw`; what a decoder goes on with stands before them."""
    inputs = opened.read(asked).inputs
    given = {name: jnp.repeat(a, count, axis=0) for name, a in inputs.items()}
    prompt, most = given["tokens"], opened.config.max_len
    if prompt.shape[1] >= most:
        raise ValueError(f"the text fills all {most} tokens of the model; give a shorter one")
    new = generate(
        opened.config.build(),
        opened.params,
        prompt,
        min(new_tokens, most - prompt.shape[1]),
        source=given.get("source"),
        temperature=temperature,
        top_k=top_k,
        key=jax.random.key(draw) if temperature else None,
    )
    rows = new if "source" in given else jnp.concatenate([prompt, new], axis=1)
    return [opened.write(row) for row in rows.tolist()]


if __name__ == "__main__":
    flags.DEFINE_string("workdir", None, "The folder of a run.")
    flags.DEFINE_string("path", None, "A folder of a published model.")
    flags.DEFINE_integer("seed", None, "Which seed of the run; the first if not given.")
    flags.DEFINE_string("text", "", "What it goes on with.")
    flags.DEFINE_string("tokens", "", "The same as numbers: 1,2,3.")
    flags.DEFINE_string("source", "", "What the encoder of an encoder-decoder reads.")
    flags.DEFINE_string("source_tokens", "", "The same as numbers.")
    flags.DEFINE_integer("new_tokens", 100, "How many to write, as far as they fit.", lower_bound=1)
    flags.DEFINE_float("temperature", 0.8, "0: always the likeliest.", lower_bound=0.0)
    flags.DEFINE_integer("top_k", None, "Draw among so many of the likeliest.", lower_bound=1)
    flags.DEFINE_integer("draw", 0, "The key of the draws.")
    flags.DEFINE_integer("count", 1, "How many texts.", lower_bound=1)
    launch.start(main)
