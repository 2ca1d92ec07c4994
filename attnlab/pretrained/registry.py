"""The families of published models."""

from attnlab.pretrained.albert import ALBERT
from attnlab.pretrained.bert import BERT
from attnlab.pretrained.deepseek import DEEPSEEK_V3
from attnlab.pretrained.distilbert import DISTILBERT
from attnlab.pretrained.family import Family
from attnlab.pretrained.gemma import GEMMA3
from attnlab.pretrained.gpt2 import GPT2
from attnlab.pretrained.gpt_neox import GPT_NEOX
from attnlab.pretrained.llama import LLAMA, MINISTRAL, MISTRAL, QWEN2, QWEN3
from attnlab.pretrained.mixtures import GPT_OSS, MIXTRAL, QWEN2_MOE, QWEN3_MOE
from attnlab.pretrained.roberta import ROBERTA
from attnlab.pretrained.t5 import T5
from attnlab.pretrained.vit import VIT

KNOWN = (
    *(ALBERT, BERT, DEEPSEEK_V3, DISTILBERT, GEMMA3, GPT2, GPT_NEOX),
    *(LLAMA, MINISTRAL, MISTRAL, QWEN2, QWEN3, ROBERTA, T5, VIT),
    *(GPT_OSS, MIXTRAL, QWEN2_MOE, QWEN3_MOE),
)
FAMILIES: dict[str, Family] = {family.name: family for family in KNOWN}
REFUSED: dict[str, str] = {
    "gemma3": "it reads images too, with a vision_config that is not supported; of its text_config "
    "and its tensors under language_model make a folder of model_type 'gemma3_text'",
}
"""model_type -> why there is no such family."""
