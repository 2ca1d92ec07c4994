"""What heads of any row may have beside the maps of the row.

A gate multiplies what each head gives by a sigmoid of x, before the output map (Qiu et al. 2025,
arXiv 2505.06708): one number per head, or one for each of its V numbers.

    heads_n = sigmoid(x G_n) * sum_s p_ns v_ns
"""

from typing import Any

import jax
from jaxtyping import Array, Float

from attnlab.heads.maps import Weights, read_all
from attnlab.observe import Look

MAPS = {
    "head_gate": "query: D -> N if gate is head",
    "gate": "query: D -> N V if gate is element",
}
GATES = ("head", "element")
FIELDS = ("gate",)


def told(spec: Any) -> str:
    """The fields of a spec that put something beside its row, as "gate='head'"; "" for none."""
    set_fields = {n: getattr(spec, n) for n in FIELDS if getattr(spec, n)}
    return ", ".join(f"{name}={value!r}" for name, value in set_fields.items())


def gate(
    look: Look, w: Weights, x: Float[Array, "B T D"], heads: Float[Array, "B T N V"], spec: Any
) -> Float[Array, "B T N V"]:
    """What the heads gave, times their gate; as it is where they have none."""
    if spec.gate is None:
        return heads
    made = (
        read_all(w, "gate", x) if spec.gate == "element" else read_all(w, "head_gate", x)[..., None]
    )
    return heads * look("gate", jax.nn.sigmoid(made))
