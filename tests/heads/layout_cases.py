"""What the tests of head layouts run over: CASES, and random arrays for each.

A new layout needs a case here and its q, k and v of head n in `head_definitions.py`. The layout and
the extra of `outside_layouts.py` are not attnlab's and pass what the others pass.
"""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
import outside_layouts as outside

from attnlab import heads
from attnlab.heads import ExtraKeys, Gate, HeadNorm, MixtureOfHeads, Sink, SoftCap, TalkingHeads

CROSS = {"key_width": 5, "value_width": 9}
GROUPED = {"num_heads": 6, "num_kv_heads": 2}
LATENT = {"head_dim": 4, "value_dim": 5, "latent_dim": 7, "rotary_dim": 2}


def case(kind, *extras, num_heads=3, biases="", **sizes) -> heads.Layout:
    """`biases`: a letter each."""
    fields = {"width": 12, "num_heads": num_heads, "biases": tuple(biases), "extras": extras}
    return kind(**fields | sizes)


# Every axis has its own size, so that a swapped one cannot pass. B = 2, T = 7, S = 8.
CASES: dict[str, heads.Layout] = {
    "standard": case(heads.Standard, num_heads=4, biases="qkvo", out_width=10),
    "free sizes": case(heads.Standard, width=11, num_heads=4, head_dim=5, value_dim=3, biases="kv"),
    "grouped": case(heads.Standard, **GROUPED, head_dim=5),
    "multi-query": case(heads.Standard, num_kv_heads=1, biases="q"),
    "cross": case(heads.Standard, **CROSS),
    "wide": case(heads.Wide, width=6, num_heads=5, biases="qo"),
    "narrow": case(heads.Narrow, value_dim=5, biases="qkvo"),
    "tied": case(heads.NarrowTied, value_dim=5, biases="qkvo", scale=0.3),
    "tied, no output projection": case(heads.NarrowTied, value_dim=5, output_projection=False),
    "alt": case(heads.Alt, head_dim=6, value_dim=5, biases="qkvo"),
    "two stages": case(heads.TwoStage, **GROUPED, **CROSS, biases="kv"),
    "collaborative": case(
        heads.Collaborative, **GROUPED, **CROSS, head_dim=8, value_dim=3, out_width=10,
        biases="qkvo",
    ),
    "bilinear": case(heads.Bilinear, **GROUPED, **CROSS, value_dim=3, out_width=10, biases="qvo"),
    "absorbed": case(heads.Absorbed, **CROSS, out_width=10, biases="qvo"),
    "outside extra": case(heads.Narrow, outside.HeadScale(2.0), Gate(), num_heads=2),
    "layer norm of q and k": case(
        heads.Standard, **GROUPED, head_dim=6, biases="q", qk_norm=HeadNorm("layer", bias=True)
    ),
    "rms norm of q and k": case(heads.Narrow, qk_norm=HeadNorm("rms")),
    "latent": case(heads.Latent, **LATENT, biases="o", out_width=10),
    "latent for queries too": case(
        heads.Latent, head_dim=5, value_dim=3, latent_dim=7, rotary_dim=4, query_latent_dim=6,
        norm_eps=1e-2,
    ),
    "absorbed latent": case(
        heads.LatentAbsorbed, **LATENT, query_latent_dim=6, biases="o", out_width=10
    ),
    "outside": case(
        outside.GatedDifferential, outside.HeadScale(), Sink(), num_heads=4, num_kv_heads=2,
        head_dim=4, value_dim=3, **CROSS, out_width=10, biases="kv", qk_norm=HeadNorm("rms"),
    ),
    "low-rank queries": case(
        heads.LowRankQuery, **GROUPED, **CROSS, query_latent_dim=7, head_dim=4, value_dim=3,
        out_width=10, biases="qkvo", norm_eps=1e-2,
    ),
    "low-rank queries without a norm": case(
        heads.LowRankQuery, head_dim=8, latent_norm=False, qk_norm=HeadNorm("rms")
    ),
    "tensor product": case(
        heads.TensorProduct, **CROSS, head_dim=4, value_dim=7, query_rank=6, key_rank=2,
        value_rank=8, out_width=10, biases=("factors", "o"),
    ),
    "tensor product, one text": case(heads.TensorProduct, key_rank=5),
    "grouped and tied": case(
        heads.GroupedTied, **GROUPED, head_dim=3, value_dim=5, rotary_dim=4, biases="o",
        out_width=10,
    ),
    "tied to all of the value": case(heads.GroupedTied, head_dim=5, value_dim=5, rotary_dim=2),
    "keys are values": case(heads.Standard, **GROUPED, head_dim=6, biases="qk", tie="kv"),
    "one projection for all": case(
        heads.TwoStage, head_dim=6, biases="qo", tie="qkv", qk_norm=HeadNorm("rms")
    ),
    "tied low-rank queries": case(heads.LowRankQuery, tie="kv"),
    "tied slices": case(heads.Narrow, tie="qk", biases="q"),
    "extra keys": case(
        heads.Narrow, ExtraKeys(4), Gate("element"), Sink(), head_dim=2, value_dim=5, biases="ko"
    ),
    "extra keys, grouped": case(heads.Standard, SoftCap(2.0), ExtraKeys(3), **GROUPED, head_dim=4),
    "gated heads": case(heads.Absorbed, Gate(), Sink(), biases="qvo"),
    "gated elements": case(
        heads.TensorProduct, Gate("element"), Sink(learnt=False), head_dim=4, value_dim=7,
        biases=("factors", "o"),
    ),
    "soft cap": case(heads.Latent, SoftCap(3.0), biases="o"),
    "talking heads": case(heads.Standard, TalkingHeads(), Gate(), num_kv_heads=1, biases="qkvo"),
    "talking absorbed heads": case(heads.Absorbed, TalkingHeads(), width=7, biases="v"),
    "differential": case(
        heads.Differential, **GROUPED, **CROSS, head_dim=4, value_dim=3, out_width=10,
        biases="qkvo",
    ),
    "differential with extras": case(
        heads.Differential, Gate("element"), Sink(), MixtureOfHeads(top=1), width=16, num_heads=4,
        num_kv_heads=2, qk_norm=HeadNorm("rms"),
    ),
    "mixture of heads": case(
        heads.Standard, MixtureOfHeads(top=3, shared=2), num_heads=6, head_dim=5
    ),
    "learnt soft cap": case(
        heads.Standard, heads.LearntSoftCap(), **GROUPED, head_dim=4, biases="k"
    ),
}  # fmt: skip
# The first case of every class of layouts.
FIRST = list({type(layout): name for name, layout in reversed(CASES.items())}.values())
# Queries, keys and values may be of one text.
SELF = [name for name, layout in CASES.items() if len(set(layout.input_widths)) == 1]


class Arrays(NamedTuple):
    params: dict
    x: jnp.ndarray
    y: jnp.ndarray
    z: jnp.ndarray


def make(layout: heads.Layout, dtype=jnp.float32, batch=2, length=7) -> Arrays:
    """Large random weights (biases too) and inputs."""
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(2 * rng.normal(size=shape), dtype)
    params = {name: draw(*shape) for name, shape in heads.weight_shapes(layout).items()}
    lengths = zip((length, length + 1, length + 1), layout.input_widths, strict=True)
    return Arrays(params, *(draw(batch, size, width) for size, width in lengths))
