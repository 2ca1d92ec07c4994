from typing import Any, NamedTuple, TypedDict, Sequence
from jax import Array
from jax.typing import ArrayLike
from attnlab.attention import core
from attnlab.observe import Look
class AttentionOptions(TypedDict, total=False):
    bias: Any
    mask: Any
    scale: Any
    is_causal: bool
    query_seq_lengths: Any
    key_value_seq_lengths: Any
    local_window_size: int | tuple[int, int] | None
    logits_soft_cap: float | None
    score_mods: Sequence[Any]
    dropout_rate: float
    dropout_key: Array | None
    talking_heads: Any
    sink: ArrayLike | None
    implementation: str | None
class AttentionOutput(NamedTuple):
    output: Array
    residual: Array | None = None
def attend(q, k, v, *, tap=None, return_residual=False, report=None, **options):
    look = Look(tap.capture if tap else (), tap.patch if tap else None, tap.layer if tap else 0)
    options = dict(options)
    if "talking_heads" in options: options["mix"] = options.pop("talking_heads")
    options.pop("score_mods", None)
    told = None if report is None else {}
    out, res = core.attend(look, q, k, v, options.pop("bias", None), options.pop("mask", None), return_residual=return_residual, told=told, **options)
    if told is not None: report.update(told["implementation"])
    if tap: tap.captured |= look.seen
    return AttentionOutput(out, res)
