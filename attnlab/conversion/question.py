"""What is asked of a pair of heads for which no map was found, and what an answer says."""

from typing import Any, NamedTuple

import numpy as np

from attnlab.conversion.measure import Situation, outputs
from attnlab.heads.old.maps import Weights
from attnlab.heads.old.spec import HeadSpec


class Witness(NamedTuple):
    """Why no exact map was made. `found` beside `allowed` is what was measured on the weights."""

    kind: str
    """One of "rank", "permutation", "bias", "mass", "gate", "symmetry", "linearity", "parameters"
    and "undecided":

    * rank: the source's scores or value maps have a rank (or a number of different heads) that no
      weights of the target have. A proof for these weights.
    * permutation: the target commutes with permuting the chunks of x, or reads its chunks apart;
      the source does not. A proof for these weights.
    * bias: the target has no bias that this function shows. A proof for these weights.
    * mass: equal keys get another share of a row than in any target: a sink, or extra keys. A proof
      for these weights.
    * gate: x moves the output where it sees one key, in more directions than the target's gates
      can. A proof for these weights.
    * symmetry: the target's scores are those of x W with y W, the source's are not symmetric or not
      positive. A proof for these weights.
    * linearity: queries, keys or values of the target grow with their text by a power of its size,
      or do not grow at all; those of the source do otherwise. A proof for these weights.
    * parameters: the functions near these weights fill more dimensions than the target has. A
      proof for almost all weights, not for each.
    * undecided: neither a map nor a proof is known.
    """
    reason: str
    what: str
    """What it was measured on."""
    found: float
    allowed: float


class Question(NamedTuple):
    """Can the target be this function?"""

    w: Weights
    source: HeadSpec
    target: HeadSpec
    situation: Situation
    rng: np.random.Generator
    absorbed: Weights | None
    """The source as `absorbed`, its scale within qk; None where it has no such form."""
    narrow: tuple[Weights, HeadSpec] | None
    """The source as `narrow`, if it has that form."""

    def measure(self, *inputs: Any, mask: Any = None) -> np.ndarray:
        """The source at these inputs."""
        return outputs(self.w, list(inputs), self.source, self.situation, mask)[0]
