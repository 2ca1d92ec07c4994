"""The Transformer of SummAE (Liu et al. 2019, arXiv 1910.00998; google-research/summae), in the
names of its graph.

Its decoder adds the input of the feed-forward part twice, 2 x + f(norm(x)): the residual is added
once by the sublayer's post-processing and once more by the layer.
"""

from typing import Any

from attnlab.model.config import ModelConfig
from attnlab.pretrained.rows import Row

WORDS = {"attention": "self_attention", "cross": "encdec_attention", "ffn": "ffn"}
MAPS = {"q": "q_proj", "k": "k_proj", "v": "v_proj", "o": "output_proj"}


def build(
    tensors: dict[str, Any], encoder_heads: int, num_heads: int, max_len: int
) -> tuple[ModelConfig, list[Row]]:
    """(config, name table). Widths and depths are those of the arrays."""
    for name in ("embedding", "encoder/layer_0/ffn/ffn/dense/kernel"):
        if name not in tensors:
            raise ValueError(f"the variable {name!r} is missing")
    depth = {
        stack: len({n.split("/")[1] for n in tensors if n.startswith(f"{stack}/layer_")})
        for stack in ("encoder", "decoder")
    }
    vocab, width = tensors["embedding"].shape
    config = ModelConfig(
        kind="encoder_decoder",
        vocab_size=vocab,
        max_len=max_len,
        width=width,
        num_layers=depth["decoder"],
        encoder_layers=depth["encoder"],
        num_heads=num_heads,
        encoder_heads=encoder_heads,
        attention_biases="",
        ffn_width=tensors["encoder/layer_0/ffn/ffn/dense/kernel"].shape[1],
        ffn_skip=2.0,
        norm_eps=1e-12,
        activation="relu",
        positions="sinusoidal_halves",
        zero_token=0,
        readout="none",
    )
    rows = [Row("embedding", (("embedding",),))]
    for stack, plan in {"encoder": config.encoder_layer_plan, "decoder": config.layer_plan}.items():
        own = "encoder_" if stack == "encoder" else ""
        for i in range(plan.num_layers):
            for part in plan:
                where, at = (f"{own}layers", part), f"{stack}/layer_{i}/{WORDS[part]}"
                rows += _norm(at, *where, "norm", slot=i)
                if part != "ffn":
                    rows += [
                        Row(f"{at}/{theirs}/kernel", ((*where, ours),), i, "conv1d")
                        for ours, theirs in MAPS.items()
                    ]
                    continue
                for ours, theirs in {"up": "dense", "down": "dense_1"}.items():
                    rows.append(Row(f"{at}/ffn/{theirs}/kernel", ((*where, ours),), i))
                    rows.append(Row(f"{at}/ffn/{theirs}/bias", ((*where, f"{ours}_bias"),), i))
        rows += _norm(stack, f"{own}final_norm")
    return config, rows


def _norm(path: str, *where: str, slot: int | None = None) -> list[Row]:
    file = f"{path}/preprocess/LayerNorm"
    names = {"scale": "gamma", "bias": "beta"}
    return [Row(f"{file}/{theirs}", ((*where, ours),), slot) for ours, theirs in names.items()]
