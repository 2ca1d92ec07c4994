"""What a trained language model writes behind a text that is held out."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from attnlab.data import Dataset
from attnlab.models import ModelConfig, Sampling, generate
from experiments.running.maps import Row

TASK = "causal_lm"
"""Whose models write."""
PROMPT, LENGTH = 32, 160
"""Tokens that it goes on with, and that it writes."""
TEMPERATURE = 0.8


def sample(
    config: ModelConfig, params: Any, source: Dataset, row: Row, seed: int
) -> dict[str, Any]:
    """The beginning of `row` and what the model makes of it, drawn with key 0.

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
    # A vocabulary may be larger than what the source can write.
    told = lambda tokens: source.decode([t for t in tokens if t < source.sizes.vocab_size])
    return {
        "prompt": told(prompt[0].tolist()),
        "written": told(text[0, size : size + LENGTH].tolist()),
        "temperature": TEMPERATURE,
        "seed": seed,
    }
