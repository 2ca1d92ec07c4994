"""The hypothesis strategy of whole models, layouts x sharing plans x options, and random params."""

import contextlib
import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st

from attnlab import heads, models, plan_names
from attnlab.models import LayerOverrides, ModelConfig

WIDTH, VOCAB, LENGTH = 12, 11, 7
PLANS = tuple(plan_names(2))
OURS = tuple(n for n, kind in heads.LAYOUTS.items() if kind.__module__.startswith("attnlab."))
"""Layouts of the library, without those that other tests add."""
EXTRAS = (
    heads.Gate(), heads.Gate("element"), heads.Sink(), heads.Sink(learnt=False),
    heads.SoftCap(3.0), heads.ExtraKeys(2), heads.TalkingHeads(),
)  # fmt: skip


def random_params(config, seed=1, scale=1.0):
    """Large random parameters, so that attention is not uniform, in the precision of the config."""
    dtype = jnp.promote_types("float32", config.compute.dtype)
    return random_like(models.param_shapes(config), seed, scale, dtype)


def random_like(shapes, seed=1, scale=1.0, dtype="float32"):
    """Random arrays of the shapes of a tree."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda a: jnp.asarray(scale * rng.normal(size=a.shape), dtype), shapes)


@st.composite
def configs(draw, layouts=OURS):
    """Models that exist: combinations that are refused are drawn again.

    Args:
      draw: of hypothesis.
      layouts: names of the head layouts to draw from.
    """
    for _ in range(200):
        with contextlib.suppress(ValueError):
            return _draw_config(_Draws(draw), layouts)
    raise AssertionError("no model in 200 draws")


class _Draws:
    """Shorthands for draws."""

    def __init__(self, draw):
        self.draw = draw

    def one(self, *values):
        return self.draw(st.sampled_from(values))

    def sometimes(self, probability: float) -> bool:
        return self.draw(st.integers(0, 99)) < 100 * probability


def _draw_layout(rng: _Draws, layouts: Sequence[str]) -> heads.Layout:
    kind = heads.LAYOUTS[rng.one(*layouts)]
    choices = {
        "head_dim": (None, None, 4, 6),
        "value_dim": (None, None, 3, 5),
        "num_kv_heads": (None, None, 1),
        "tie": ("", "", "", "kv", "qk", "qkv"),
        "qk_norm": (None, None, heads.HeadNorm(), heads.HeadNorm("layer", bias=True)),
        "latent_dim": (None, 5),
        "rotary_dim": (None, 2, 4),
        "query_latent_dim": (None, 6),
        "latent_norm": (True, False),
        "query_rank": (None, 2),
        "key_rank": (None, 1),
        "scale": (None, None, 0.3),
    }
    known = {field.name for field in dataclasses.fields(kind)}
    fields = {name: rng.one(*values) for name, values in choices.items() if name in known}
    defaults = {f.name: f.default for f in dataclasses.fields(kind)}
    fields = {n: a for n, a in fields.items() if a is not None or defaults[n] is None}
    biases = tuple(name for name in kind.bias_names if rng.sometimes(0.4))
    extras = [extra for extra in EXTRAS if rng.sometimes(0.12)]
    return kind(num_heads=rng.one(2, 3, 4), biases=biases, extras=tuple(extras), **fields)


def _draw_positions(rng: _Draws) -> models.specs.Positions:
    return rng.one(
        models.Learned(), models.Sinusoidal(halves=rng.sometimes(0.5)),
        models.Rotary(base=100.0), models.Rotary(fraction=0.5), models.Rotary(scaling="linear:2"),
        models.Relative(buckets=8, max_distance=20, per_layer=rng.sometimes(0.5)),
        models.NoPositions(), models.Alibi(),
    )  # fmt: skip


def _draw_ffn(rng: _Draws) -> models.FFN:
    width = rng.one(0, 10, 10, 10)
    experts = models.Experts(num_experts=4, shared_width=rng.one(0, 5))
    return models.FFN(
        width=width, activation=rng.one("gelu", "relu", "gated_silu", "tanh"),
        bias=rng.sometimes(0.5), residual_scale=rng.one(1.0, 1.0, 0.5),
        output_scale=rng.one(1.0, 1.0, 0.5),
        experts=rng.one(None, None, None, experts if width else None),
    )  # fmt: skip


def _draw_layer_types(rng: _Draws, layout: heads.Layout) -> tuple[tuple[int, LayerOverrides], ...]:
    if rng.sometimes(0.75):
        return ()
    other = rng.one(
        LayerOverrides(),
        LayerOverrides(ffn=models.FFN(width=6)),
        LayerOverrides(heads=heads.Standard(num_heads=layout.num_heads)),
        LayerOverrides(sharing="albert", full_attention=True),
        LayerOverrides(positions=models.NoPositions()),
    )
    return ((rng.one(1, 2), LayerOverrides(window=2)), (1, other))


def _draw_config(rng: _Draws, layouts: Sequence[str]) -> ModelConfig:
    kind = rng.one("decoder", "decoder", "encoder", "encoder_decoder")
    layout = _draw_layout(rng, layouts)
    mixes = any(isinstance(extra, heads.TalkingHeads) for extra in layout.extras)
    num_layers = rng.one(3, 4)
    norm_kind = rng.one("layer", "rms", "rms_plus_one")
    encoder, positions = None, _draw_positions(rng)
    if kind == "encoder_decoder":
        encoder = models.EncoderConfig(
            num_layers=rng.one(None, None, 2),
            sharing=rng.one(None, None, "albert"),
            shares_decoder=rng.sometimes(0.3) and not getattr(positions, "per_layer", False),
        )
    pooler = rng.one(None, "first", "mean", "max", "each") if kind != "encoder_decoder" else None
    scales = tuple(1 / (i + 1) for i in range(num_layers)) if rng.sometimes(0.15) else None
    return ModelConfig(
        kind=kind, vocab_size=VOCAB, max_len=LENGTH, width=WIDTH, num_layers=num_layers,
        heads=layout, sharing=rng.one(*PLANS), delta_rank=2, encoder=encoder,
        attention=models.Attention(
            window=rng.one(None, None, None, 2),
            order=rng.one(None, None, None, "factored", "absorbed"),
            implementation=None if mixes else rng.one(None, None, "dense", "blockwise"),
            layer_scales=scales, position_scale=rng.one(None, None, None, (0.5, 2.0)),
            output_scale=rng.one(1.0, 1.0, 0.7),
        ),
        ffn=_draw_ffn(rng),
        norm=models.Norm(
            kind=norm_kind, position=rng.one("pre", *models.specs.NORM_PLACES),
            bias=rng.one(None, False), layer_scale=rng.one(None, None, 0.5),
        ),
        positions=positions,
        embedding=models.Embedding(
            width=rng.one(None, None, None, 5, WIDTH), scale=rng.one(1.0, 2.0),
            token_types=rng.one(0, 0, 2), norm=rng.sometimes(0.3),
            zero_token=rng.one(None, None, 0),
        ),
        dropout=models.Dropout(
            rate=rng.one(0.0, 0.1), attention=rng.one(0.0, 0.1), ffn=rng.one(0.0, 0.2)
        ),
        output=models.OutputHead(
            kind=rng.one("tied", "own"), bias=rng.sometimes(0.3),
            transform=rng.one(None, None, "gelu"), pooler=pooler, num_classes=3 if pooler else 0,
        ),
        layer_types=_draw_layer_types(rng, layout),
        init=models.Init(residual=rng.one("plain", "depth")),
        compute=models.Compute(remat=rng.sometimes(0.5)),
    )  # fmt: skip
