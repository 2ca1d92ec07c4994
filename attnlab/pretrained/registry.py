"""The families of published models: those that the modules of `families` define."""

import importlib
import pkgutil

from attnlab.pretrained import families
from attnlab.pretrained.family import Family

FIRST = (
    *("albert", "bert", "deepseek_v3", "distilbert", "gemma3_text", "gpt2", "gpt_neox", "llama"),
    *("ministral", "mistral", "qwen2", "qwen3", "roberta", "t5", "vit"),
)
"""Where several families can write a model, these come first, in this order."""


def _find() -> dict[str, Family]:
    found: dict[str, Family] = {}
    for module in pkgutil.iter_modules(families.__path__, f"{families.__name__}."):
        defined = vars(importlib.import_module(module.name)).values()
        found |= {one.name: one for one in defined if isinstance(one, Family)}
    return {name: found[name] for name in (*FIRST, *(n for n in found if n not in FIRST))}


FAMILIES = _find()
"""`model_type` of config.json -> its family."""
STATE_SPACE = (
    "it mixes tokens with a state-space or linear-attention layer, which has no heads here"
)
REFUSED: dict[str, str] = {
    **dict.fromkeys(("mamba", "mamba2", "falcon_mamba", "jamba", "bamba", "zamba2"), STATE_SPACE),
    **dict.fromkeys(("qwen3_next", "rwkv", "recurrent_gemma", "nemotron_h"), STATE_SPACE),
    **dict.fromkeys(
        ("deberta", "deberta-v2"),
        "its disentangled attention adds products of contents and relative positions to the "
        "scores, which no layout has",
    ),
    "gemma3": "it reads images too, with a vision_config that is not supported; of its text_config "
    "and its tensors under language_model make a folder of model_type 'gemma3_text'",
}
"""model_type -> why there is no such family."""
