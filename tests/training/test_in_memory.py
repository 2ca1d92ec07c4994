"""Training in memory leaves nothing behind but its numbers."""

import dataclasses
import tempfile

import jax
import numpy as np
import pytest
from test_train import CONFIG, DATASET, MODEL, SELDOM, assert_same_bits, evaluated

from attnlab import training
from attnlab.models import FFN, ModelConfig
from attnlab.training import FitOptions, ScheduleConfig, sharding
from attnlab.training.objectives import OBJECTIVES
from attnlab.training.step import new_params


def test_it_leaves_no_file_and_prints_nothing(tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    model = dataclasses.replace(MODEL, num_layers=1, ffn=FFN(width=0)).build()
    config = dataclasses.replace(
        CONFIG, steps=4, seeds=(0, 5), log_every=1, evaluation=evaluated(every=2)
    )
    run = training.fit_in_memory(model, OBJECTIVES["causal_lm"], config, DATASET)
    assert "".join(capfd.readouterr()) == ""
    assert list(tmp_path.iterdir()) == []
    steps, bits = run.curve("eval/bits_per_byte")
    assert (steps.tolist(), bits.shape) == ([2, 4], (2, 2))
    windows = config.evaluation.windows
    whole = dataclasses.replace(config, evaluation=evaluated(every=2, curve_windows=windows))
    again = training.fit_in_memory(model, OBJECTIVES["causal_lm"], whole, DATASET)
    last = again.curve("eval/bits_per_byte")[1][:, -1]
    np.testing.assert_array_equal(last, run.result.heldout["bits_per_byte"])
    assert run.curve("train/loss")[0].tolist() == [1, 2, 3, 4]
    with pytest.raises(ValueError, match="seed 2 is not there; 2 seeds are counted from 0"):
        run.params(2)
    assert_same_bits(run.params(1), jax.tree.map(lambda a: a[1], run.result.state.params))


@dataclasses.dataclass(frozen=True)
class Counted:
    """A model that counts how often a program of its initial parameters is made."""

    config: ModelConfig
    made: list[str] = dataclasses.field(default_factory=list, compare=False)

    def init(self, key, tokens):
        self.made.append("init")
        return self.config.build().init(key, tokens)

    def apply(self, variables, tokens, **options):
        return self.config.build().apply(variables, tokens, **options)


def test_seeds_and_runs_of_one_model_share_the_program_of_its_initial_parameters():
    """On one device."""
    options = FitOptions(mesh=sharding.data_mesh(jax.devices()[:1]))
    config = dataclasses.replace(CONFIG, **SELDOM, steps=1, schedule=ScheduleConfig())
    models = [Counted(ModelConfig(width=12, num_layers=1, ffn=FFN(width=0))) for _ in range(2)]
    for model, seeds in zip(models, [(0, 5), (3,)], strict=True):
        changed = dataclasses.replace(config, seeds=seeds)
        task = OBJECTIVES["causal_lm"]
        training.fit_in_memory(model, task, changed, DATASET, options=options)
    assert [len(model.made) for model in models] == [1, 0]
    tokens = np.zeros((1, 8), np.int32)
    expected = jax.jit(models[0].config.build().init)(jax.random.key(5), tokens)["params"]
    found = new_params(models[1], 5, {"tokens": tokens})
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), found, expected)
