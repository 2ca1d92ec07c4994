"""A source, a task, an optimizer and a schedule of a user's own train by flag: nothing else knows
of them."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax

from attnlab.training import OPTIMIZERS, SCHEDULES
from attnlab.training.optimizers import Row
from attnlab.training.sources import SOURCES, Sizes, Source
from attnlab.training.tasks import TASKS, Example, Task, accuracy
from experiments import report
from experiments.configs import byte_lm
from experiments.running import arm

HERE = {}  # what the optimizer of this file was asked for


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chains:
    """Every token names the next: 3 t + 1 modulo `count`. Drawn on the device."""

    count: int = 7
    step: int | None = None

    def sizes(self):
        return Sizes(self.count)

    def shapes(self, length):
        return jax.eval_shape(lambda: self.rows(jax.random.key(0), 1, length))

    def rows(self, key, size, length):
        first = jax.random.randint(key, (size,), 0, self.count)
        walk = lambda t, _: ((3 * t + (self.step or 1)) % self.count, t)
        return {"walks": jax.lax.scan(walk, first, length=length)[1].T}

    def load(self, length, folder=None):
        held = self.rows(jax.random.key(99), 32, length)["walks"]
        scored = lambda count: {
            "walks": np.asarray(held)[: count or 32], "valid": np.ones(count or 32, bool)
        }  # fmt: skip
        return Source(
            name=f"chains of {self.count}",
            digest=repr(self),
            sizes=self.sizes(),
            row_tokens=length,
            draw=lambda resident, key, size: self.rows(key, size, length),
            heldout=scored,
            train=scored,
            yardsticks=lambda: {"accuracy": {"a guess": 100 / self.count}},
            facts={"links": self.count},
        )


def follow(batch, key, sizes=None):
    tokens, valid = batch["walks"][:, :-1], batch.get("valid")
    weights = jnp.ones(tokens.shape)
    weights = weights if valid is None else weights * valid[:, None]
    return Example({"tokens": tokens}, batch["walks"][:, 1:], weights)


def sign_descent(config, rate, axes):
    HERE["beta1"] = config.beta1
    return optax.chain(optax.sign_sgd(1.0), optax.scale_by_schedule(rate))


def test_rows_of_a_user_train_by_flag(tmp_path, monkeypatch):
    monkeypatch.setitem(SOURCES, "chains", Chains)
    task = Task(follow, "the next link", ("decoder",), (accuracy("links"),), needs=("walks",))
    monkeypatch.setitem(TASKS, "follow", task)
    monkeypatch.setitem(OPTIMIZERS, "signs", Row("SignSGD", sign_descent))
    monkeypatch.setitem(SCHEDULES, "halves", lambda config: lambda step: 0.01 * 0.5 ** (step // 50))
    config = byte_lm.get_config("chains,tiny")
    flags = {
        "task": "follow", "data.count": 9, "data.step": 2, "model.vocab_size": 9,
        "train.steps": 100, "train.optimizer": "signs", "train.schedule": "halves",
        "train.beta1": 0.7, "train.log_every": 100,
    }  # fmt: skip
    config.update_from_flattened_dict(flags)
    result = arm.run(config, tmp_path / "run")
    assert np.mean(result["heldout_accuracy"]) > 95
    assert HERE == {"beta1": 0.7}
    lines = (tmp_path / "run/metrics.jsonl").read_text().splitlines()
    assert '"train/learning_rate": 0.005' in "".join(lines)  # of the 100th step
    report.write([tmp_path / "run"])
    told = (tmp_path / "run/report.md").read_text()
    for fact in (
        "predict the next link?", "chains of 9, 9 links", "SignSGD, halves", "% of links right",
        "more is better", "| *a guess* | 11.11 |",
    ):  # fmt: skip
        assert fact in told
    assert "bits" not in told
