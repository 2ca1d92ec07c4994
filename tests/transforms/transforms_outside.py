"""Two head layouts from outside the package: norms where no step expects them."""

import dataclasses

import jax.numpy as jnp

from attnlab.heads import Standard, Weight


def rms(a):
    return a / jnp.sqrt(jnp.mean(a * a, axis=-1, keepdims=True) + 1e-6)


@dataclasses.dataclass(frozen=True, kw_only=True)
class OutputNorm(Standard):
    """An RMS norm of each head before the output projection."""

    def weights(self):
        return {
            **super().weights(),
            "head_norm": Weight("attend", out_axes=("value_dim",), constant=1.0),
        }

    def project_out(self, params, heads):
        return super().project_out(params, rms(heads) * params["head_norm"])


@dataclasses.dataclass(frozen=True, kw_only=True)
class QueryNorm(Standard):
    """An RMS norm of the query of each head, without a weight."""

    def project_q(self, params, x, rotate):
        return rms(super().project_q(params, x, rotate))
