"""The backends, what each cannot do, and which one runs."""

import dataclasses
import logging
import math
import types
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import jax

from attnlab.attention.blockwise import blockwise, refuse_blockwise
from attnlab.attention.call import DEFAULT_OPTIONS, AttentionCall, AttentionOutput
from attnlab.attention.dense import dense
from attnlab.attention.edges import edges, refuse_edges
from attnlab.attention.jax_nn import ASSUMED, cudnn, refuse_cudnn, refuse_jax_nn, xla
from attnlab.names import lookup

LOG = logging.getLogger(__name__)


Run: TypeAlias = Callable[[AttentionCall], AttentionOutput]
Refuse: TypeAlias = Callable[[AttentionCall], str | None]


class Backend(NamedTuple):
    """One way to compute attention."""

    run: Run
    """marks what its own backward pass reads by `save_for_backward`, each array once"""
    refuse: Refuse = lambda call: None
    """why it cannot run a call, or None; depends on shapes, dtypes and options only"""


BACKENDS: dict[str, Backend] = {
    "dense": Backend(dense),
    "blockwise": Backend(blockwise, refuse_blockwise),
    "xla": Backend(xla, refuse_jax_nn),
    "cudnn": Backend(cudnn, refuse_cudnn),
    "edges": Backend(edges, refuse_edges),
}
"""Every backend by its name, as in `implementation`."""

CONTRIB = ("splash",)
"""The names that `import attnlab.contrib` registers."""


def register_backend(name: str, run: Run, refuse: Refuse | None = None) -> None:
    """Makes a backend available as `implementation=name`. `implementation=None` never chooses it.

    Args:
      name: the name.
      run: computes a call that `refuse` accepts. Queries, keys and values that the mask hides from
        everyone are zero in the call, and the output of queries that attend to nothing is set to
        zero afterwards.
      refuse: call -> why the backend cannot run it, or None. Calls in which a tap replaces values
        are refused already: only "dense" can.

    Raises:
      ValueError: another backend has this name.

    >>> register_backend("dense", dense)
    >>> register_backend("dense", cudnn)
    Traceback (most recent call last):
    ValueError: implementation 'dense' is registered already, with another function
    """
    backend = Backend(run) if refuse is None else Backend(run, refuse)
    if BACKENDS.setdefault(name, backend) != backend:
        raise ValueError(f"implementation {name!r} is registered already, with another function")


class Choice(NamedTuple):
    """An entry of `CHOICES`."""

    backend: str
    source: str
    """the device this choice was measured on, or that it was not"""
    min_bytes: int = 0
    """only where the scores take more bytes in float32"""


CPU = "measured on 2 CPU cores with 1 MiB of L2 each"
GPU = "measured on one H200, bfloat16, causal, with gradient, 4,096 tokens"
NOT = "not measured"
EDGES = Choice("edges", NOT)
"""For every mask that is a list of edges and nothing else, on every device."""
CHOICES: dict[str, tuple[Choice, ...]] = {
    "cpu": (Choice("blockwise", CPU, 16 * 2**20), Choice("dense", CPU)),
    "gpu": (
        Choice("cudnn", GPU),
        Choice("blockwise", NOT, 2**31),  # up to where XLA was measured; it needs less memory
        Choice("xla", GPU),
        Choice("dense", NOT),
    ),
    "tpu": (Choice("blockwise", NOT, 2**30), Choice("dense", NOT)),
}
"""Device -> what implementation=None runs there: the first entry that can; "dense" always can."""


def choose(call: AttentionCall, implementation: str | None) -> Choice:
    """The requested backend, or the first of `CHOICES` that can run the call.

    Raises ValueError for a name that is not in `BACKENDS`.
    """
    if implementation is not None:
        check_implementation(implementation)
        return Choice(implementation, "requested")
    device = ASSUMED.get()
    platform = jax.default_backend() if device is None else device.platform
    *choices, last = CHOICES.get(platform, CHOICES["tpu"])
    is_known = all(isinstance(size, int) for size in call.scores_shape)
    num_bytes = 4 * math.prod(call.scores_shape) if is_known else math.inf
    for choice in choices if call.mask.edges is None else (EDGES, *choices):
        if num_bytes > choice.min_bytes:
            reason = refusal(choice.backend, call)
            if reason is None:
                return choice
            LOG.debug("attention does not run on %r: %s", choice.backend, reason)
    return last


def refusal(name: str, call: AttentionCall) -> str | None:
    """Why a backend cannot run the call, or None."""
    if call.patch and name != "dense":  # the others never hold all values
        return f"it has no {' and no '.join(call.patch)} to patch"
    return BACKENDS[name].refuse(call)


def explain_choice(call: AttentionCall, chosen: Choice) -> dict[str, str]:
    """Backend -> "chosen: " and why, "could run", or the reason why it could not."""
    words = {chosen.backend: "; ".join([f"chosen: {chosen.source}", *_prices(call)])}
    return {name: refusal(name, call) or words.get(name, "could run") for name in BACKENDS}


def _prices(call: AttentionCall) -> list[str]:
    """What a bias, a soft cap and score modifications cost, and which backends they exclude."""
    options, bias = call.options, call.options.bias
    costs = {
        "logits_soft_cap": "a tanh of each score",
        "score_mods": "computed for each score, and again in the backward pass",
    }
    if bias is not None:
        size = bias.size * bias.dtype.itemsize
        costs["bias"] = f"{size:,} bytes to read, and as many numbers in its gradient"
    prices = []
    for name, cost in costs.items():
        default = getattr(DEFAULT_OPTIONS, name)
        if getattr(options, name) is not default:
            without = call._replace(options=dataclasses.replace(options, **{name: default}))
            freed = [b for b in BACKENDS if refusal(b, call) and not refusal(b, without)]
            excluded = f" (without it {' and '.join(freed)} could run)" if freed else ""
            prices.append(f"{name}: {cost}{excluded}")
    return prices


def check_implementation(name: str) -> None:
    """Raises ValueError for a name that is not in `BACKENDS`."""
    if name in CONTRIB and name not in BACKENDS:
        raise ValueError(f"implementation {name!r} is in attnlab.contrib; import attnlab.contrib")
    # A view, in which `lookup` does not register what a reference names.
    lookup(types.MappingProxyType(BACKENDS), name, what="implementation")
