"""`HeadSpec` -> the layout of the same heads, while both exist: for tests of parity."""

from typing import Any

from attnlab import heads
from attnlab.heads.old.spec import HeadSpec

NAMES = {"tensor": "tensor_product", "low_rank_q": "low_rank_query"}
WEIGHTS = {
    "collaborative": {"m": "mixing"},
    "alt": {"down": "mix"},
    **{
        key: {"q_turned": "q_rotary", "k_turned": "k_rotary"}
        for key in ("latent", "latent_absorbed", "grouped_tied")
    },
}
SIZES = (
    "num_kv_heads", "head_dim", "value_dim", "key_width", "value_width", "out_width", "latent_dim",
    "query_latent_dim", "rotary_dim", "query_rank", "key_rank", "value_rank",
)  # fmt: skip


def as_layout(spec: HeadSpec) -> heads.Layout:
    """The layout with the sizes and options of a spec."""
    given = {n: getattr(spec, n) for n in SIZES}
    fields: dict[str, Any] = {n: v for n, v in given.items() if v is not None}
    name = NAMES.get(spec.layout, spec.layout)
    if spec.layout == "collaborative" and spec.shared_dim is not None:
        fields["head_dim"] = spec.shared_dim
    known = heads.LAYOUTS[name].__dataclass_fields__
    for field in ("key_width", "value_width"):
        if fields.get(field) == spec.width and field not in known:
            del fields[field]
    fields["biases"] = tuple({"a": "factors"}.get(b, b) for b in spec.biases)
    fields["output_projection"] = spec.output
    fields["scale"] = spec.scale
    if spec.norm_eps != 1e-6:
        fields["norm_eps"] = spec.norm_eps
    if spec.qk_norm:
        fields["qk_norm"] = heads.HeadNorm(spec.qk_norm, bias=spec.qk_norm_bias)  # type: ignore[arg-type]
    if not spec.latent_norm:
        fields["latent_norm"] = False
    if spec.ties:
        fields["tie"] = spec.ties
    extras: list[heads.Extra] = []
    if spec.extra_keys:
        extras.append(heads.ExtraKeys(spec.extra_keys))
    if spec.gate:
        extras.append(heads.Gate(spec.gate))  # type: ignore[arg-type]
    if spec.sink:
        extras.append(heads.Sink(learnt=spec.sink == "learnt"))
    return heads.make_layout(
        name, width=spec.width, num_heads=spec.num_heads, extras=tuple(extras), **fields
    )


def as_params(spec: HeadSpec, w: dict[str, Any]) -> dict[str, Any]:
    """The weights under their new names."""
    names = WEIGHTS.get(spec.layout, {})
    return {names.get(name, name): a for name, a in w.items()}
