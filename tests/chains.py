"""A dataset that is generated on the device and its objective, neither of the package."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from attnlab.data import Dataset, DataSizes, DeviceBatches
from attnlab.training.objectives import Example, Objective, accuracy


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chains:
    """Every token names the next: 3 t + 1 modulo `count`. Generated on the device."""

    count: int = 7
    step: int | None = None

    def sizes(self):
        return DataSizes(self.count)

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
        return Dataset(
            name=f"chains of {self.count}",
            digest=repr(self),
            sizes=self.sizes(),
            row_tokens=length,
            batches=DeviceBatches(lambda arrays, key, size: self.rows(key, size, length)),
            heldout=scored,
            train=scored,
            baselines=lambda: {"accuracy": {"a guess": 100 / self.count}},
            facts={"links": self.count},
        )


def follow(batch, key, /, sizes=None):
    tokens, valid = batch["walks"][:, :-1], batch.get("valid")
    weights = jnp.ones(tokens.shape)
    weights = weights if valid is None else weights * valid[:, None]
    return Example({"tokens": tokens}, batch["walks"][:, 1:], weights)


FOLLOW = Objective(
    follow, "the next link", ("decoder",), (accuracy("links"),), required_arrays=("walks",)
)
