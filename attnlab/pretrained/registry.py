"""The families of published models."""

from attnlab.pretrained.albert import ALBERT
from attnlab.pretrained.bart import BART, MARIAN, MBART, PEGASUS
from attnlab.pretrained.bert import BERT
from attnlab.pretrained.decoders import (
    GLM,
    GLM4,
    GRANITE,
    PHI3,
    SMOLLM3,
    STABLELM,
    STARCODER2,
)
from attnlab.pretrained.deepseek import DEEPSEEK_V3
from attnlab.pretrained.distilbert import DISTILBERT
from attnlab.pretrained.electra import ELECTRA
from attnlab.pretrained.family import Family
from attnlab.pretrained.gemma import GEMMA, GEMMA2, GEMMA3
from attnlab.pretrained.gpt2 import GPT2
from attnlab.pretrained.gpt_neox import GPT_NEOX
from attnlab.pretrained.llama import LLAMA, MINISTRAL, MISTRAL, QWEN2, QWEN3
from attnlab.pretrained.mixtures import GPT_OSS, MIXTRAL, QWEN2_MOE, QWEN3_MOE
from attnlab.pretrained.modernbert import MODERNBERT
from attnlab.pretrained.olmo import OLMO, OLMO2, OLMO3
from attnlab.pretrained.opt_bloom import BLOOM, OPT
from attnlab.pretrained.parallel import COHERE, FALCON, GPTJ, PHI
from attnlab.pretrained.roberta import CAMEMBERT, MPNET, ROBERTA, XLM_ROBERTA
from attnlab.pretrained.t5 import MT5, T5
from attnlab.pretrained.vit import DINOV2, VIT

KNOWN = (
    *(ALBERT, BERT, DEEPSEEK_V3, DISTILBERT, GEMMA3, GPT2, GPT_NEOX),
    *(LLAMA, MINISTRAL, MISTRAL, QWEN2, QWEN3, ROBERTA, T5, VIT),
    *(CAMEMBERT, ELECTRA, GEMMA, GEMMA2, GRANITE, PHI3, STABLELM, STARCODER2, XLM_ROBERTA),
    *(BLOOM, COHERE, FALCON, OPT, GLM, GLM4, GPTJ, OLMO, OLMO2, OLMO3, PHI, SMOLLM3),
    *(GPT_OSS, MIXTRAL, QWEN2_MOE, QWEN3_MOE),
    DINOV2,
    *(MT5, MODERNBERT, MPNET, BART, MARIAN, MBART, PEGASUS),
)
FAMILIES: dict[str, Family] = {family.name: family for family in KNOWN}
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
