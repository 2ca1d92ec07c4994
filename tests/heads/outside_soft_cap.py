"""A learnt soft cap for each head, from a file outside the package.

python -m experiments.run --config=outside_soft_cap.py:tiny \
    --config.model.heads.extras.my_soft_cap.on=True --workdir=DIR
"""

import dataclasses

import jax.numpy as jnp

from attnlab.attention import score_mods
from attnlab.heads import Extra, Weight, register_extra
from experiments.configs import byte_lm

get_config = byte_lm.get_config


@register_extra("my_soft_cap")
@dataclasses.dataclass(frozen=True)
class MySoftCap(Extra):
    """c_n tanh(scores / c_n), before the mask, with a learnt c_n > 0 that starts at `start`."""

    between = ""
    shift_invariant = False
    excludes = ("extra_keys",)
    start: float = 3.0

    def weights(self, layout):
        start = float(jnp.log(jnp.expm1(self.start)))
        return {"cap": Weight("attend", out_axes=("num_score_maps",), constant=start)}

    def before_attention(self, params, call):
        cap = score_mods.SoftCap(jnp.logaddexp(params["cap"], 0.0))
        return call.bind(score_mods=(*call.options.score_mods, cap))
