"""The new config of the same model as an old one, while both exist."""

import dataclasses

from attnlab import heads
from attnlab.heads.old.as_layout import as_layout
from attnlab.model.images import read_images
from attnlab.model.kinds import read_kinds
from attnlab.models import specs
from attnlab.models.config import Encoder, LayerOverrides, ModelConfig


def new_config(old):
    if old.kinds:
        bare = dataclasses.replace(old, kinds="")
        return dataclasses.replace(new_config(bare), layer_types=_layer_types(old, bare))
    layout = dataclasses.replace(as_layout(old.heads), width=0)
    if old.talking_heads:
        layout = dataclasses.replace(layout, extras=(*layout.extras, heads.TalkingHeads()))
    encoder = None
    if old.kind == "encoder_decoder":
        encoder = Encoder(
            num_layers=old.encoder_layers,
            num_heads=old.encoder_heads,
            sharing=old.encoder_plan,
            shares_decoder=old.share_encoder,
            cross=old.cross,
        )
    return ModelConfig(
        **{n: getattr(old, n) for n in ("kind", "vocab_size", "max_len", "width", "num_layers")},
        heads=layout,
        attention=specs.Attention(
            window=old.window,
            order=old.order,
            implementation=old.implementation,
            layer_scales=old.layer_scales,
            output_scale=old.attention_gain,
        ),
        ffn=specs.FFN(
            width=old.ffn_width,
            activation=old.activation,
            bias=old.ffn_bias,
            residual_scale=old.ffn_skip,
        ),
        norm=specs.Norm(
            kind=old.norm_kind, position=old.norm, eps=old.norm_eps, bias=old.norm_bias
        ),
        dropout=specs.Dropout(
            rate=old.dropout_rate,
            embedding=old.embedding_dropout_rate,
            attention=old.attention_dropout_rate,
            ffn=old.ffn_dropout_rate,
            places=old.dropout_places,
        ),
        positions=_positions(old),
        embedding=_embedding(old),
        output=specs.OutputHead(
            kind=old.readout,
            bias=old.readout_bias,
            scale=old.readout_scale,
            transform=old.readout_transform,
            pooler=old.pooler,
            num_classes=old.pooled_classes,
        ),
        sharing=old.plan,
        delta_rank=old.delta_rank,
        encoder=encoder,
        init=specs.Init(std=old.init_std, residual=old.init_residual),
        compute=specs.Compute(dtype=old.dtype, remat=old.remat),
    )


def _embedding(old):
    images = None
    if old.images:
        i = read_images(old.images)
        images = specs.Images(
            height=i.height, width=i.width, channels=i.channels,
            patch_height=i.patch[0], patch_width=i.patch[1],
        )  # fmt: skip
    return specs.Embedding(
        width=old.embedding_width,
        scale=old.embedding_scale,
        token_types=old.token_types,
        norm=old.embedding_norm,
        zero_token=old.zero_token,
        images=images,
    )


def _positions(old):
    return {
        "learned": specs.Learned(),
        "learned_unpadded": specs.Learned(pad_token=old.pad_token),
        "sinusoidal": specs.Sinusoidal(),
        "sinusoidal_halves": specs.Sinusoidal(halves=True),
        "rotary": specs.Rotary(
            base=old.rotary_base, fraction=old.rotary_fraction, scaling=old.rotary_scaling
        ),
        "relative": specs.Relative(
            buckets=old.relative_buckets, max_distance=old.relative_distance
        ),
        "none": specs.NoPositions(),
    }[old.positions]


def _layer_types(old, bare):
    types = []
    for run in read_kinds(old.kinds, type(old)):
        one, base = (new_config(dataclasses.replace(bare, **f)) for f in (run.fields, {}))
        changed = {
            name: getattr(one, name)
            for name in ("heads", "ffn", "positions", "sharing")
            if getattr(one, name) != getattr(base, name)
        }
        for name in ("window", "order", "implementation"):
            value = getattr(one.attention, name)
            if value != getattr(base.attention, name):
                changed |= {"full_attention": True} if value is None else {name: value}
        types.append((run.layers, LayerOverrides(**changed)))
    return tuple(types)
