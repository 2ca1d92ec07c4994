"""What a trained language model writes behind a held-out text."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from attnlab.data import Dataset
from attnlab.load import Row
from attnlab.models import ModelConfig, Sampling, generate
from attnlab.sharing import Params

TASK = "causal_lm"
"""The task whose models write."""
PROMPT, LENGTH = 32, 160
"""Tokens of the prompt, and that are written."""
TEMPERATURE = 0.8


@dataclasses.dataclass(frozen=True)
class Sample:
    """A text that a model wrote.

    Attributes:
      prompt: the beginning of a held-out row.
      written: what the model wrote behind it.
      temperature: of the draws.
      seed: of the run.
    """

    prompt: str
    written: str
    temperature: float
    seed: int


def sample(config: ModelConfig, params: Params, dataset: Dataset, row: Row, seed: int) -> Sample:
    """The beginning of `row` and what the model writes behind it, drawn with key 0.

    Where the model's longest text is full it goes on from the last tokens alone, as many as the
    prompt has.
    """
    prompt = np.asarray(row.example.inputs["tokens"])[:, : min(PROMPT, config.max_len // 2)]
    size = prompt.shape[1]
    new = min(LENGTH, config.max_len - size)
    text = prompt
    for part in range(-(-LENGTH // new)):
        more = generate(
            params,
            jnp.asarray(text[:, -size:]),
            config,
            new,
            sampling=Sampling(temperature=TEMPERATURE),
            key=jax.random.fold_in(jax.random.key(0), part),
        )
        text = np.concatenate([text, np.asarray(more)], axis=1)

    def decode(tokens: list[int]) -> str:  # a vocabulary may be larger than the dataset's
        return dataset.decode([t for t in tokens if t < dataset.sizes.vocab_size])

    written = decode(text[0, size : size + LENGTH].tolist())
    return Sample(decode(prompt[0].tolist()), written, TEMPERATURE, seed)
