"""A tiny model, a training of a few steps and a text of 4 kB, for tests of the lab."""

import random
import time

from attnlab import lab
from attnlab.data import Text
from attnlab.heads import Standard
from attnlab.models import FFN, ModelConfig
from attnlab.training import EvaluationConfig, ScheduleConfig, TrainConfig

MODEL = ModelConfig(
    width=8, num_layers=2, max_len=16, heads=Standard(num_heads=2), ffn=FFN(width=12)
)

SWEEP = """
import sys
from attnlab import lab
from attnlab.lab.workdir import specs_in
from pathlib import Path
workdir = Path(sys.argv[1])
lab.sweep(specs_in(workdir).values(), workdir, executor=lab.LocalExecutor(1), progress=False)
"""


def train_config(
    steps: int, *, every: int, windows: int = 8, curve_windows: int = 8, checkpoint_every: int = 2
) -> TrainConfig:
    """Steps of 8 rows of 16 tokens, logged at every second one."""
    return TrainConfig(
        steps=steps,
        schedule=ScheduleConfig(warmup_steps=1),
        length=16,
        batch_size=8,
        log_every=2,
        evaluation=EvaluationConfig(
            every=every, windows=windows, curve_windows=curve_windows, batch_size=8
        ),
        checkpoint_every=checkpoint_every,
    )


def wait_for(condition, seconds=120):
    """Until it holds."""
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.05)


def in_process(specs, folder, *options, **more) -> lab.Results:
    """The results of a sweep in this process; `options` of its runs."""
    executor = lab.InProcess(*options)
    return lab.sweep(specs, folder, executor=executor, progress=False, **more)


def experiment(tmp_path_factory, model, train, **data) -> lab.Experiment:
    """On random bytes of 8 letters; `data` are fields of `Text`."""
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_bytes(bytes(random.Random(0).choices(b"abcdef \n", k=4000)))
    return lab.Experiment(model=model, train=train, data=Text(path=str(path), **data))
