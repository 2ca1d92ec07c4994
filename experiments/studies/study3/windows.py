"""`StudyWindows`: a text as the runs of this study read it. Schedules of halves of a training."""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from attnlab.data import Batch, Dataset
from attnlab.training.schedules import SCHEDULES, Rate, ScheduleConfig, Steps, cosine
from experiments.studies.head_width.texts import StudyText, load_text

SYMBOLS = 64
"""Bytes of a text that the probe of part D draws from."""
FREQUENT = "most frequent bytes"
"""The fact of a dataset that lists them."""
FIRST_HALF, SECOND_HALF = "study3_first_half", "study3_second_half"


@dataclasses.dataclass(frozen=True, kw_only=True)
class StudyWindows(StudyText):
    """Training windows of a text, and fixed held-out and validation windows.

    Attributes:
      name: of the text.
      folder: of the files; the text "python" needs none.
      skipped: steps of an earlier training, whose batches are not read again.
    """

    skipped: int = 0

    def load(self, length: int, folder: Path | None = None) -> Dataset:
        """Learning curves score evenly spaced ones of the validation windows."""
        dataset = super().load(length, folder)
        batches = dataset.batches
        assert dataset.validation is not None
        assert callable(batches)
        whole = dataset.validation(0)

        def validation(count: int) -> Batch:
            rows = len(whole["tokens"])
            index = np.linspace(0, rows, count or rows, endpoint=False).astype(int)
            return {name: array[index] for name, array in whole.items()}

        def later(seed: int, step: int, size: int, shard: slice) -> Batch:
            return batches(seed, step + self.skipped, size, shard)

        train = load_text(self.name, Path(self.folder)).train
        facts = {**dataset.facts, FREQUENT: bytes(frequent_bytes(train)).hex()}
        return dataclasses.replace(dataset, validation=validation, batches=later, facts=facts)


def frequent_bytes(text: np.ndarray) -> list[int]:
    """The `SYMBOLS` most frequent bytes of a text, in their order.

    >>> frequent_bytes(np.frombuffer(b"abba c", np.uint8))[:3]
    [0, 1, 2]
    """
    counts = np.bincount(text, minlength=256)
    found: list[int] = np.sort(np.argsort(-counts, kind="stable")[:SYMBOLS]).tolist()
    return found


def first_half(config: ScheduleConfig, peak: float, steps: int) -> Rate:
    """The first half of a cosine over twice the steps."""
    return cosine(config, peak, 2 * steps)


def second_half(config: ScheduleConfig, peak: float, steps: int) -> Rate:
    """The second half of a cosine over twice the steps, after a rise from 0 over as many steps as
    its own warm-up: the optimizer begins without a state."""
    whole, rise = cosine(config, peak, 2 * steps), config.warmup(2 * steps) + 1

    def rate(step: Steps) -> jax.Array:
        return jnp.asarray(whole(step + steps)) * jnp.minimum(1.0, (step + 1) / rise)

    return rate


SCHEDULES[FIRST_HALF], SCHEDULES[SECOND_HALF] = first_half, second_half
