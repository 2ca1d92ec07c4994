"""What a model with an encoder beside its decoder asks of its config."""

from typing import Any

from attnlab.sharing.plan import mixtures

CROSS = {
    "own": "a part of its own, behind self-attention (Vaswani et al. 2017)",
    "merged": "self-attention reads both texts in one softmax (T5Gemma 2, arXiv 2512.14856)",
}
"""How a decoder reads the source."""


def check_encoder(config: Any) -> None:
    """Raises ValueError where an encoder beside the decoder, or what it may share, does not fit."""
    both = config.kind == "encoder_decoder"
    own = config.encoder_layers, config.encoder_heads, config.encoder_plan
    if not both and (any(a is not None for a in own) or config.share_encoder):
        raise ValueError(
            "encoder_layers, encoder_heads, encoder_plan and share_encoder are for "
            f"kind='encoder_decoder', this is a {config.kind}"
        )
    if not both and "cross" in config.layer_plan:
        raise ValueError(
            f"the plan has the part 'cross', a {config.kind} has nothing to attend to but "
            "itself; leave the part out or set kind='encoder_decoder'"
        )
    if config.cross == "merged" and (not both or "cross" in config.layer_plan):
        raise ValueError(
            "cross='merged' is of a decoder beside an encoder, and leaves no part 'cross' to a "
            "plan; set kind='encoder_decoder' and leave that part out, or set cross='own'"
        )
    if not both:
        return
    if config.encoder_heads is not None:
        if config.share_encoder:
            raise ValueError(
                "share_encoder: both stacks have the same heads; leave encoder_heads out"
            )
        try:
            config.as_encoder  # noqa: B018, which checks them
        except ValueError as error:
            raise ValueError(f"encoder_heads={config.encoder_heads}: {error}") from None
    ours, encoder = config.layer_plan.num_groups, config.encoder_layer_plan
    if encoder.num_layers != (config.encoder_layers or config.num_layers):
        raise ValueError(
            f"encoder_plan has {encoder.num_layers} layers, encoder_layers is "
            f"{config.encoder_layers or config.num_layers}"
        )
    if config.share_encoder and ("kv" in encoder) != ("kv" in config.layer_plan):
        raise ValueError(
            "share_encoder: both stacks or neither need the part 'kv'; give encoder_plan one "
            "like that of plan"
        )
    if config.pooler:
        raise ValueError("an encoder_decoder has no pooler; leave it out")
    for part, mixture in mixtures(encoder).items():
        if config.share_encoder and encoder.num_groups[part] != ours.get(part):
            raise ValueError(
                f"share_encoder: {mixture} has a coefficient for each slot of {part!r}, so both "
                "stacks need equally many; give encoder_plan as many as plan has"
            )
    for part, count in encoder.num_groups.items():
        if config.share_encoder and count > ours.get(part, 0):
            raise ValueError(
                f"share_encoder: the encoder uses {count} slots of {part!r}, the decoder has "
                f"{ours.get(part, 0)}; give both as many layers, or an encoder_plan that fits"
            )
