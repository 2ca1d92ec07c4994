"""Generates text: python -m experiments.sample --workdir=runs/one --text="def main("

--workdir is a run or the folder of experiments.run, at its newest checkpoint; --path is a folder
with config.json, safetensors and tokenizer.json of a published model. The model continues --text;
an encoder-decoder writes the target of --source. It writes token by token until its end token or
--new_tokens. --temperature=0 always takes the most probable token; --top_k and --top_p sample among
the most probable ones.
"""

from absl import flags

from attnlab.models import Sampling
from experiments import app


def define_flags() -> None:
    """The flags of the command."""
    app.define_model()
    app.define_prompt("The prompt, which the model continues.")
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
    flags.DEFINE_integer("draw", 0, "Random seed of the first text; the others have the next ones.")
    flags.DEFINE_integer("count", 1, "Number of texts.", lower_bound=1)


def main() -> None:
    """Prints the prompt with what follows it, once or --count times."""
    given = flags.FLAGS
    app.check_one_model()
    of_draws = [name for name in ("top_k", "top_p", "draw", "count") if given[name].present]
    if of_draws and not given.temperature:
        raise ValueError(
            "--temperature=0 always takes the most probable token; leave out "
            f"--{', --'.join(of_draws)} or give a temperature above 0"
        )
    text, source = app.given_prompt()
    if not text and not source:
        raise ValueError('no text to continue; give --text="..." or --tokens=1,2,3')
    opened = app.given_model()
    sampling = Sampling(temperature=given.temperature, top_k=given.top_k, top_p=given.top_p)
    for draw in range(given.draw, given.draw + given.count):
        for piece in opened.write(text, given.new_tokens, sampling, source=source, draw=draw):
            print(piece, end="", flush=True)
        print()


if __name__ == "__main__":
    define_flags()
    app.start(main)
