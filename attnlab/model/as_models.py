"""Old `ModelConfig` and params -> those of `attnlab.models`, while both exist: for parity tests."""

import dataclasses
from typing import Any

from attnlab import heads
from attnlab.heads.old.as_layout import as_layout, as_params
from attnlab.heads.old.spec import HeadSpec
from attnlab.model.config import ModelConfig as OldConfig
from attnlab.model.images import read_images
from attnlab.model.kinds import layer_names, read_kinds
from attnlab.models import config as new
from attnlab.models import specs

NAMES = {
    "readout": "lm_head",
    "readout_bias": "lm_head_bias",
    "embedding_map": "embedding_projection",
    "embedding_map_bias": "embedding_projection_bias",
    "classes": "classifier",
    "classes_bias": "classifier_bias",
}
"""Renamed weights outside the layers."""


def as_heads(old: OldConfig, spec: HeadSpec) -> heads.Layout:
    """The layout, without its width, with talking heads as an extra."""
    layout = as_layout(spec)
    extras = layout.extras
    if old.talking_heads:
        extras = (*extras, heads.TalkingHeads())
    return dataclasses.replace(layout, width=0, extras=extras)


def as_positions(old: OldConfig) -> specs.Positions:
    """How the model knows where a token is."""
    made: dict[str, specs.Positions] = {
        "learned": specs.Learned(),
        "sinusoidal": specs.Sinusoidal(),
        "sinusoidal_halves": specs.Sinusoidal(halves=True),
        "none": specs.NoPositions(),
    }
    if old.positions == "learned_unpadded":
        return specs.Learned(pad_token=old.pad_token)
    if old.positions == "rotary":
        return specs.Rotary(
            base=old.rotary_base, fraction=old.rotary_fraction, scaling=old.rotary_scaling
        )
    if old.positions == "relative":
        return specs.Relative(buckets=old.relative_buckets, max_distance=old.relative_distance)
    return made[old.positions]


def as_ffn(old: OldConfig) -> specs.FFN:
    """The FFN."""
    activation: Any = old.activation
    return specs.FFN(
        width=old.ffn_width, activation=activation, bias=old.ffn_bias, residual_scale=old.ffn_skip
    )


def as_config(old: OldConfig) -> new.ModelConfig:
    """The new config of the same model."""
    first: Any = next(iter(old.stacks.values()))
    same: Any = {
        name: getattr(old, name)
        for name in ("kind", "vocab_size", "max_len", "width", "num_layers", "delta_rank")
    }
    encoder = None
    if old.kind == "encoder_decoder":
        encoder = new.Encoder(
            num_layers=old.encoder_layers,
            num_heads=old.encoder_heads,
            sharing=old.encoder_plan,
            shares_decoder=old.share_encoder,
            cross=old.cross,  # type: ignore[arg-type]
        )
    base = old if old.kinds else first
    return new.ModelConfig(
        **same,
        heads=as_heads(first, first.heads),
        attention=specs.Attention(
            window=base.window,
            order=base.order,
            implementation=base.implementation,
            layer_scales=old.layer_scales,
            output_scale=base.attention_gain,
        ),
        ffn=as_ffn(base),
        norm=specs.Norm(
            kind=old.norm_kind,  # type: ignore[arg-type]
            position=old.norm,  # type: ignore[arg-type]
            eps=old.norm_eps,
            bias=old.norm_bias,
        ),
        dropout=specs.Dropout(
            rate=old.dropout_rate,
            embedding=old.embedding_dropout_rate,
            attention=old.attention_dropout_rate,
            ffn=old.ffn_dropout_rate,
            places=old.dropout_places,  # type: ignore[arg-type]
        ),
        positions=as_positions(old),
        embedding=as_embedding(old),
        output=as_output(old),
        sharing=old.plan,
        layer_types=as_layer_types(old),
        encoder=encoder,
        init=specs.Init(std=old.init_std, residual=old.init_residual),  # type: ignore[arg-type]
        compute=specs.Compute(dtype=old.dtype, remat=old.remat),  # type: ignore[arg-type]
    )


def as_embedding(old: OldConfig) -> specs.Embedding:
    """Embedding and images."""
    images = None
    if old.images is not None:
        one = read_images(old.images)
        images = specs.Images(
            height=one.height,
            width=one.width,
            channels=one.channels,
            patch_height=one.patch[0],
            patch_width=one.patch[1],
        )
    return specs.Embedding(
        width=old.embedding_width,
        scale=old.embedding_scale,
        token_types=old.token_types,
        norm=old.embedding_norm,
        zero_token=old.zero_token,
        images=images,
    )


def as_output(old: OldConfig) -> specs.OutputHead:
    """LM head, pooler and classifier."""
    given: Any = dict(kind=old.readout, transform=old.readout_transform, pooler=old.pooler)
    return specs.OutputHead(
        bias=old.readout_bias, scale=old.readout_scale, num_classes=old.pooled_classes, **given
    )


def as_layer_types(old: OldConfig) -> tuple[new.LayerType, ...]:
    """The layer types, with every override spelt out."""
    if not old.kinds:
        return ()
    names, made, at = layer_names(old), [], 0
    for run in read_kinds(old.kinds, OldConfig):
        one: Any = old.stacks[names[at]]
        at += run.layers
        overrides = new.LayerOverrides(
            heads=as_heads(one, one.heads),
            ffn=as_ffn(one),
            positions=as_positions(one),
            sharing=one.plan,
            window=one.window,
            full_attention=one.window is None,
            order=one.order,
            implementation=one.implementation,
        )
        made.append((run.layers, overrides))
    return tuple(made)


def as_model_params(old: OldConfig, params: dict[str, Any]) -> dict[str, Any]:
    """The parameters under their new names."""
    specs_of = {name: c.heads for name, c in old.stacks.items()}
    if old.kind == "encoder_decoder":
        specs_of["encoder_layers"] = old.as_encoder.heads
    return {
        NAMES.get(name, name): _sublayers(specs_of[name], a) if name in specs_of else a
        for name, a in params.items()
    }


def _sublayers(spec: HeadSpec, params: dict[str, Any]) -> dict[str, Any]:
    made = {}
    for name, weights in params.items():
        if name == "delta":
            made[name] = _sublayers(spec, weights)
        elif name.startswith("ffn"):
            made[name] = weights
        else:
            mix = weights.get("mix")
            rest = as_params(spec, {n: a for n, a in weights.items() if n != "mix"})
            named = {} if mix is None else {f"mix_{n}": mix[o] for o, n in MIX.items()}
            made[name] = rest | named
    return made


MIX = {"before": "scores", "after": "probs"}
