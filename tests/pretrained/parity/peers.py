"""Tiny random models of transformers and what they give, for parity tests and golden files."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"

import numpy as np
import torch
import transformers as tr

torch.set_num_threads(1)  # more of them wait for each other at these sizes

BERT = dict(
    vocab_size=97,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    intermediate_size=56,
    max_position_embeddings=40,
)
ALBERT = BERT | dict(embedding_size=16)
DISTILBERT = dict(
    vocab_size=97, dim=32, n_layers=2, n_heads=4, hidden_dim=56, max_position_embeddings=40
)
GPT2 = dict(vocab_size=97, n_positions=40, n_embd=32, n_layer=2, n_head=4)
GPT2 |= dict(bos_token_id=1, eos_token_id=2)
VIT = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=56)
VIT |= dict(image_size=[8, 12], patch_size=[4, 2], num_channels=3)
SQUARE = VIT | dict(image_size=8, patch_size=4)
T5 = dict(vocab_size=97, d_model=32, d_kv=6, d_ff=56, num_layers=2, num_heads=4)
T5 |= dict(decoder_start_token_id=0, relative_attention_num_buckets=8)
T5 |= dict(relative_attention_max_distance=10)

LLAMA = BERT | dict(rms_norm_eps=1e-5, num_key_value_heads=2)
NEOX = BERT | dict(hidden_size=48, rotary_pct=0.5)
DEEPSEEK = LLAMA | dict(num_key_value_heads=4, kv_lora_rank=14, q_lora_rank=10, v_head_dim=9)
DEEPSEEK |= dict(qk_nope_head_dim=7, qk_rope_head_dim=6, first_k_dense_replace=3)
LOCAL = ["sliding_attention"]
# Experts of which each text of the tests uses all.
MIXTRAL = LLAMA | dict(num_local_experts=5, num_experts_per_tok=2)
QWEN2_MOE = LLAMA | dict(num_experts=5, moe_intermediate_size=20, num_experts_per_tok=3)
QWEN2_MOE |= dict(shared_expert_intermediate_size=24)
QWEN3_MOE = QWEN2_MOE | dict(head_dim=10, norm_topk_prob=True)
del QWEN3_MOE["shared_expert_intermediate_size"]
GPT_OSS = MIXTRAL | dict(head_dim=10, sliding_window=4, num_hidden_layers=3, swiglu_limit=0.9)
GPT_OSS |= dict(rope_parameters=dict(rope_type="default", rope_theta=100.0))
DEEPSEEK_MOE = DEEPSEEK | dict(n_routed_experts=8, n_group=4, topk_group=2, num_experts_per_tok=3)
DEEPSEEK_MOE |= dict(moe_intermediate_size=20, first_k_dense_replace=1)
GEMMA = LLAMA | dict(head_dim=10, query_pre_attn_scalar=7, sliding_window=4, rms_norm_eps=0.05)
GEMMA |= dict(num_hidden_layers=3, layer_types=[*LOCAL, "full_attention", *LOCAL])
ROPES = dict(
    full_attention=dict(rope_type="linear", factor=2.5, rope_theta=50.0),
    sliding_attention=dict(rope_type="default", rope_theta=20.0),
)
SCALED = dict(rope_type="llama3", factor=4.0, low_freq_factor=1.0, high_freq_factor=3.0)
SCALED |= dict(original_max_position_embeddings=16, rope_theta=100.0)

BART = dict(vocab_size=97, d_model=32, encoder_layers=2, decoder_layers=2, pad_token_id=1)
BART |= dict(encoder_attention_heads=4, decoder_attention_heads=4, decoder_start_token_id=2)
BART |= dict(encoder_ffn_dim=56, decoder_ffn_dim=56, max_position_embeddings=40)
MARIAN = BART | dict(scale_embedding=True, activation_function="swish")

MODERNBERT = BERT | dict(num_hidden_layers=4, local_attention=6, pad_token_id=0, cls_token_id=1)
MODERNBERT |= dict(sep_token_id=2, bos_token_id=1, eos_token_id=2)

ELECTRA = BERT | dict(embedding_size=16)
PHI3 = LLAMA | dict(pad_token_id=0)

OLMO = {name: a for name, a in LLAMA.items() if name != "rms_norm_eps"}

FALCON = {name: a for name, a in BERT.items() if name != "intermediate_size"}

PLAIN = dict(rope_type="default", rope_theta=50.0)
YARN = dict(rope_type="yarn", factor=4.0, rope_theta=50.0, beta_fast=4.0)
YARN |= dict(original_max_position_embeddings=16)

OPT = FALCON | dict(ffn_dim=56)
BLOOM = dict(vocab_size=97, hidden_size=32, n_layer=2, n_head=4, layer_norm_epsilon=1e-5)

# name -> (class of the model, class of the config, its attributes)
PEERS = {
    "bert": (tr.BertForPreTraining, tr.BertConfig, BERT),
    "bert-bare-3-heads-big-eps": (
        tr.BertModel,
        tr.BertConfig,
        BERT | dict(hidden_size=21, num_attention_heads=3, layer_norm_eps=0.05, type_vocab_size=3),
    ),
    "bert-untied-gelu_new": (
        tr.BertForMaskedLM,
        tr.BertConfig,
        BERT | dict(tie_word_embeddings=False, hidden_act="gelu_new", num_hidden_layers=3),
    ),
    "albert": (tr.AlbertForPreTraining, tr.AlbertConfig, ALBERT),
    "albert-groups-inner": (
        tr.AlbertModel,
        tr.AlbertConfig,
        ALBERT
        | dict(num_hidden_layers=6, num_hidden_groups=3, inner_group_num=2, layer_norm_eps=0.05),
    ),
    "albert-square-map": (
        tr.AlbertForMaskedLM,
        tr.AlbertConfig,
        ALBERT
        | dict(embedding_size=32, num_hidden_layers=3, num_hidden_groups=2, hidden_act="relu"),
    ),
    "albert-one-call-two-blocks": (
        tr.AlbertForMaskedLM,
        tr.AlbertConfig,
        ALBERT | dict(num_hidden_layers=1, inner_group_num=2, tie_word_embeddings=False),
    ),
    "roberta": (tr.RobertaForMaskedLM, tr.RobertaConfig, BERT | dict(hidden_act="relu")),
    "roberta-bare-pad-4": (
        tr.RobertaModel,
        tr.RobertaConfig,
        BERT | dict(pad_token_id=4, type_vocab_size=1, layer_norm_eps=0.05, num_attention_heads=2),
    ),
    "roberta-untied": (
        tr.RobertaForMaskedLM,
        tr.RobertaConfig,
        BERT | dict(tie_word_embeddings=False),
    ),
    "distilbert": (tr.DistilBertForMaskedLM, tr.DistilBertConfig, DISTILBERT),
    "distilbert-bare-sinusoids": (
        tr.DistilBertModel,
        tr.DistilBertConfig,
        DISTILBERT | dict(sinusoidal_pos_embds=True, n_layers=3, activation="relu"),
    ),
    "gpt2": (tr.GPT2LMHeadModel, tr.GPT2Config, GPT2),
    "gpt2-bare-inner-relu": (
        tr.GPT2Model,
        tr.GPT2Config,
        GPT2 | dict(n_inner=24, activation_function="relu", n_head=2, layer_norm_epsilon=0.05),
    ),
    "gpt2-unscaled-untied": (
        tr.GPT2LMHeadModel,
        tr.GPT2Config,
        GPT2 | dict(scale_attn_weights=False, tie_word_embeddings=False, n_layer=3),
    ),
    "gpt2-scores-by-layer": (
        tr.GPT2LMHeadModel,
        tr.GPT2Config,
        GPT2 | dict(scale_attn_by_inverse_layer_idx=True, n_layer=3),
    ),
    "t5": (tr.T5ForConditionalGeneration, tr.T5Config, T5),
    "t5-1.1-own-readout": (
        tr.T5ForConditionalGeneration,
        tr.T5Config,
        T5 | dict(feed_forward_proj="gated-gelu", tie_word_embeddings=False, num_decoder_layers=3),
    ),
    "t5-scaled-own-readout-big-eps": (
        tr.T5ForConditionalGeneration,
        tr.T5Config,
        T5 | dict(feed_forward_proj="gated-silu", layer_norm_epsilon=0.05, num_heads=3),
    ),
    "t5-bare-gelu": (tr.T5Model, tr.T5Config, T5 | dict(feed_forward_proj="gelu")),
    "llama": (tr.LlamaForCausalLM, tr.LlamaConfig, LLAMA),
    "llama-llama3-biases-tied": (
        tr.LlamaForCausalLM,
        tr.LlamaConfig,
        LLAMA
        | dict(head_dim=6, num_key_value_heads=4, hidden_act="gelu_new", rms_norm_eps=0.05)
        | dict(attention_bias=True, mlp_bias=True, tie_word_embeddings=True)
        | dict(rope_parameters=SCALED),
    ),
    "llama-bare-linear": (
        tr.LlamaModel,
        tr.LlamaConfig,
        LLAMA
        | dict(num_key_value_heads=1, num_hidden_layers=3)
        | dict(rope_parameters=dict(rope_type="linear", factor=2.5, rope_theta=50.0)),
    ),
    "mistral": (
        tr.MistralForCausalLM,
        tr.MistralConfig,
        LLAMA | dict(head_dim=10, sliding_window=4),
    ),
    "qwen3": (
        tr.Qwen3ForCausalLM,
        tr.Qwen3Config,
        LLAMA | dict(head_dim=10, rms_norm_eps=0.05, tie_word_embeddings=True),
    ),
    "qwen3-sliding-biases": (
        tr.Qwen3ForCausalLM,
        tr.Qwen3Config,
        LLAMA
        | dict(head_dim=6, use_sliding_window=True, sliding_window=5, max_window_layers=0)
        | dict(attention_bias=True, num_key_value_heads=4),
    ),
    "qwen3-mixed": (
        tr.Qwen3ForCausalLM,
        tr.Qwen3Config,
        LLAMA
        | dict(head_dim=10, use_sliding_window=True, sliding_window=4, num_hidden_layers=4)
        | dict(layer_types=[*LOCAL, "full_attention", *LOCAL, *LOCAL]),
    ),
    "qwen2": (
        tr.Qwen2ForCausalLM,
        tr.Qwen2Config,
        LLAMA
        | dict(use_sliding_window=True, sliding_window=4, max_window_layers=1)
        | dict(tie_word_embeddings=True),
    ),
    "qwen2-bare-all-see-all": (
        tr.Qwen2Model,
        tr.Qwen2Config,
        LLAMA | dict(num_key_value_heads=4, rms_norm_eps=0.05, hidden_act="gelu_new"),
    ),
    "ministral": (
        tr.MinistralForCausalLM,
        tr.MinistralConfig,
        LLAMA | dict(head_dim=10, sliding_window=4, layer_types=["full_attention", *LOCAL]),
    ),
    "gemma3_text": (tr.Gemma3ForCausalLM, tr.Gemma3TextConfig, GEMMA),
    "gemma3_text-untied-linear-biases": (
        tr.Gemma3ForCausalLM,
        tr.Gemma3TextConfig,
        GEMMA
        | dict(num_hidden_layers=7, layer_types=[*LOCAL, *LOCAL, "full_attention"] * 2 + LOCAL)
        | dict(tie_word_embeddings=False, attention_bias=True, rope_parameters=ROPES),
    ),
    "gemma3_text-bare-all-local": (
        tr.Gemma3TextModel,
        tr.Gemma3TextConfig,
        GEMMA | dict(num_hidden_layers=2, layer_types=LOCAL * 2, tie_word_embeddings=False),
    ),
    "gpt_neox": (tr.GPTNeoXForCausalLM, tr.GPTNeoXConfig, NEOX),
    "gpt_neox-in-turn-tied": (
        tr.GPTNeoXForCausalLM,
        tr.GPTNeoXConfig,
        NEOX
        | dict(use_parallel_residual=False, attention_bias=False, tie_word_embeddings=True)
        | dict(rotary_pct=1.0, rotary_emb_base=50.0, hidden_act="gelu_new", layer_norm_eps=0.05),
    ),
    "gpt_neox-bare": (tr.GPTNeoXModel, tr.GPTNeoXConfig, NEOX | dict(rotary_pct=0.34)),
    "deepseek_v3": (tr.DeepseekV3ForCausalLM, tr.DeepseekV3Config, DEEPSEEK),
    "deepseek_v3-plain-queries": (
        tr.DeepseekV3ForCausalLM,
        tr.DeepseekV3Config,
        DEEPSEEK
        | dict(q_lora_rank=None, tie_word_embeddings=True, rms_norm_eps=0.05)
        | dict(rope_parameters=SCALED),
    ),
    "deepseek_v3-yarn": (
        tr.DeepseekV3ForCausalLM,
        tr.DeepseekV3Config,
        DEEPSEEK | dict(rope_parameters=YARN | dict(mscale=0.8, mscale_all_dim=0.8)),
    ),
    "deepseek_v3-halves": (
        tr.DeepseekV3ForCausalLM,
        tr.DeepseekV3Config,
        DEEPSEEK | dict(rope_interleave=False, num_hidden_layers=3),
    ),
    "deepseek_v3-experts": (tr.DeepseekV3ForCausalLM, tr.DeepseekV3Config, DEEPSEEK_MOE),
    "deepseek_v3-experts-2-shared": (
        tr.DeepseekV3ForCausalLM,
        tr.DeepseekV3Config,
        DEEPSEEK_MOE
        | dict(n_shared_experts=2, norm_topk_prob=False, n_group=1, topk_group=1)
        | dict(first_k_dense_replace=0, num_hidden_layers=3, tie_word_embeddings=True),
    ),
    "mixtral": (tr.MixtralForCausalLM, tr.MixtralConfig, MIXTRAL),
    "mixtral-window-bare": (
        tr.MixtralModel,
        tr.MixtralConfig,
        MIXTRAL | dict(sliding_window=4, num_experts_per_tok=4, rms_norm_eps=0.05),
    ),
    "qwen2_moe": (tr.Qwen2MoeForCausalLM, tr.Qwen2MoeConfig, QWEN2_MOE),
    "qwen2_moe-dense-and-window": (
        tr.Qwen2MoeForCausalLM,
        tr.Qwen2MoeConfig,
        QWEN2_MOE
        | dict(num_hidden_layers=5, mlp_only_layers=[1, 2], norm_topk_prob=True, qkv_bias=False)
        | dict(use_sliding_window=True, sliding_window=4, max_window_layers=3),
    ),
    "qwen3_moe": (tr.Qwen3MoeForCausalLM, tr.Qwen3MoeConfig, QWEN3_MOE),
    "qwen3_moe-every-second": (
        tr.Qwen3MoeForCausalLM,
        tr.Qwen3MoeConfig,
        QWEN3_MOE
        | dict(decoder_sparse_step=2, num_hidden_layers=4, norm_topk_prob=False)
        | dict(use_sliding_window=True, sliding_window=5, attention_bias=True),
    ),
    "gpt_oss": (tr.GptOssForCausalLM, tr.GptOssConfig, GPT_OSS),
    "gpt_oss-all-see-all": (
        tr.GptOssForCausalLM,
        tr.GptOssConfig,
        GPT_OSS | dict(layer_types=["full_attention"] * 3, num_experts_per_tok=5, swiglu_limit=7.0),
    ),
    "xlm-roberta": (tr.XLMRobertaForMaskedLM, tr.XLMRobertaConfig, BERT),
    "camembert": (tr.CamembertForMaskedLM, tr.CamembertConfig, BERT),
    "electra": (tr.ElectraForMaskedLM, tr.ElectraConfig, ELECTRA),
    "electra-bare-one-width": (tr.ElectraModel, tr.ElectraConfig, BERT | dict(embedding_size=32)),
    "phi3": (tr.Phi3ForCausalLM, tr.Phi3Config, PHI3),
    "phi3-window-partial": (
        tr.Phi3ForCausalLM,
        tr.Phi3Config,
        PHI3 | dict(sliding_window=4, partial_rotary_factor=0.5, tie_word_embeddings=True),
    ),
    "gemma": (tr.GemmaForCausalLM, tr.GemmaConfig, LLAMA | dict(head_dim=10)),
    "gemma2": (
        tr.Gemma2ForCausalLM,
        tr.Gemma2Config,
        GEMMA | dict(attn_logit_softcapping=1.5, final_logit_softcapping=2.0),
    ),
    "gemma2-no-caps": (
        tr.Gemma2ForCausalLM,
        tr.Gemma2Config,
        GEMMA | dict(attn_logit_softcapping=None, final_logit_softcapping=None),
    ),
    "starcoder2": (
        tr.Starcoder2ForCausalLM,
        tr.Starcoder2Config,
        BERT | dict(num_key_value_heads=2, sliding_window=4),
    ),
    "starcoder2-no-biases": (
        tr.Starcoder2ForCausalLM,
        tr.Starcoder2Config,
        BERT | dict(num_key_value_heads=2, use_bias=False, tie_word_embeddings=False),
    ),
    "stablelm": (
        tr.StableLmForCausalLM,
        tr.StableLmConfig,
        BERT | dict(num_key_value_heads=2, use_qkv_bias=True, partial_rotary_factor=0.5),
    ),
    "granite": (
        tr.GraniteForCausalLM,
        tr.GraniteConfig,
        LLAMA
        | dict(embedding_multiplier=3.0, residual_multiplier=0.3, attention_multiplier=0.2)
        | dict(logits_scaling=5.0),
    ),
    "olmo": (tr.OlmoForCausalLM, tr.OlmoConfig, OLMO),
    "olmo2": (tr.Olmo2ForCausalLM, tr.Olmo2Config, OLMO | dict(rms_norm_eps=0.05)),
    "olmo3": (
        tr.Olmo3ForCausalLM,
        tr.Olmo3Config,
        OLMO | dict(rms_norm_eps=1e-5, sliding_window=4, num_hidden_layers=5),
    ),
    "smollm3": (
        tr.SmolLM3ForCausalLM,
        tr.SmolLM3Config,
        LLAMA | dict(num_hidden_layers=4, pad_token_id=0),
    ),
    "cohere": (tr.CohereForCausalLM, tr.CohereConfig, OLMO | dict(logit_scale=0.3)),
    "cohere-normed-heads": (
        tr.CohereForCausalLM,
        tr.CohereConfig,
        OLMO | dict(use_qk_norm=True, layer_norm_eps=0.05, attention_bias=True),
    ),
    "phi": (tr.PhiForCausalLM, tr.PhiConfig, OLMO),
    "phi-normed-heads-tied": (
        tr.PhiForCausalLM,
        tr.PhiConfig,
        OLMO | dict(qk_layernorm=True, layer_norm_eps=0.05, tie_word_embeddings=True),
    ),
    "gptj": (tr.GPTJForCausalLM, tr.GPTJConfig, GPT2 | dict(rotary_dim=4)),
    "falcon": (tr.FalconForCausalLM, tr.FalconConfig, FALCON),
    "falcon-grouped": (
        tr.FalconForCausalLM,
        tr.FalconConfig,
        FALCON | dict(new_decoder_architecture=True, num_kv_heads=2, bias=True),
    ),
    "falcon-in-turn": (
        tr.FalconForCausalLM,
        tr.FalconConfig,
        FALCON | dict(parallel_attn=False, multi_query=False, ffn_hidden_size=40),
    ),
    "glm": (tr.GlmForCausalLM, tr.GlmConfig, LLAMA | dict(head_dim=12, pad_token_id=0)),
    "glm4": (
        tr.Glm4ForCausalLM,
        tr.Glm4Config,
        LLAMA | dict(head_dim=12, partial_rotary_factor=0.34, pad_token_id=0),
    ),
    "llama-yarn": (tr.LlamaForCausalLM, tr.LlamaConfig, LLAMA | dict(rope_parameters=YARN)),
    "qwen2-yarn-smooth": (
        tr.Qwen2ForCausalLM,
        tr.Qwen2Config,
        LLAMA | dict(rope_parameters=YARN | dict(truncate=False, attention_factor=1.3)),
    ),
    "llama-dynamic": (
        tr.LlamaForCausalLM,
        tr.LlamaConfig,
        LLAMA | dict(rope_parameters=dict(rope_type="dynamic", factor=3.0, rope_theta=50.0)),
    ),
    "olmo3-yarn": (
        tr.Olmo3ForCausalLM,
        tr.Olmo3Config,
        OLMO
        | dict(rms_norm_eps=1e-5, sliding_window=4, num_hidden_layers=5)
        | dict(rope_parameters=dict(full_attention=YARN, sliding_attention=PLAIN)),
    ),
    "opt": (tr.OPTForCausalLM, tr.OPTConfig, OPT),
    "opt-post": (
        tr.OPTForCausalLM,
        tr.OPTConfig,
        OPT | dict(do_layer_norm_before=False, enable_bias=False),
    ),
    "bloom": (tr.BloomForCausalLM, tr.BloomConfig, BLOOM),
    "bloom-3-heads": (
        tr.BloomForCausalLM,
        tr.BloomConfig,
        BLOOM | dict(hidden_size=21, n_head=3, tie_word_embeddings=False),
    ),
    "stablelm-parallel": (
        tr.StableLmForCausalLM,
        tr.StableLmConfig,
        BERT | dict(num_key_value_heads=2, use_parallel_residual=True),
    ),
    "vit": (tr.ViTForImageClassification, tr.ViTConfig, VIT | dict(num_labels=5)),
    "vit-bare-square-no-biases": (
        tr.ViTModel,
        tr.ViTConfig,
        VIT
        | dict(hidden_size=21, num_attention_heads=3, image_size=9, patch_size=3, num_channels=2)
        | dict(qkv_bias=False, hidden_act="gelu_new", layer_norm_eps=0.05),
    ),
    "dinov2": (tr.Dinov2Model, tr.Dinov2Config, SQUARE),
    "dinov2-gated": (
        tr.Dinov2Model,
        tr.Dinov2Config,
        SQUARE | dict(use_swiglu_ffn=True, qkv_bias=False, mlp_ratio=3, use_mask_token=False),
    ),
    "mt5": (
        tr.MT5ForConditionalGeneration,
        tr.MT5Config,
        T5 | dict(feed_forward_proj="gated-gelu", num_decoder_layers=3),
    ),
    "mpnet": (tr.MPNetForMaskedLM, tr.MPNetConfig, BERT),
    "mpnet-bare": (
        tr.MPNetModel,
        tr.MPNetConfig,
        BERT | dict(layer_norm_eps=0.05, num_attention_heads=2, hidden_act="relu"),
    ),
    "modernbert": (tr.ModernBertForMaskedLM, tr.ModernBertConfig, MODERNBERT),
    "modernbert-biases-untied": (
        tr.ModernBertForMaskedLM,
        tr.ModernBertConfig,
        MODERNBERT
        | dict(num_hidden_layers=7, norm_bias=True, attention_bias=True, mlp_bias=True)
        | dict(classifier_bias=True, decoder_bias=False, tie_word_embeddings=False)
        | dict(classifier_activation="relu", norm_eps=0.05),
    ),
    "modernbert-bare-one-layer": (
        tr.ModernBertModel,
        tr.ModernBertConfig,
        MODERNBERT | dict(num_hidden_layers=1),
    ),
    "bart": (tr.BartForConditionalGeneration, tr.BartConfig, BART),
    "bart-bare-3-layers": (
        tr.BartModel,
        tr.BartConfig,
        BART | dict(encoder_layers=3, encoder_attention_heads=2, activation_function="relu"),
    ),
    "bart-scaled": (
        tr.BartForConditionalGeneration,
        tr.BartConfig,
        BART | dict(scale_embedding=True, num_labels=7),
    ),
    "marian": (tr.MarianMTModel, tr.MarianConfig, MARIAN),
    "mbart": (tr.MBartForConditionalGeneration, tr.MBartConfig, BART),
    "pegasus": (tr.PegasusForConditionalGeneration, tr.PegasusConfig, MARIAN),
    "t5-encoder": (tr.T5EncoderModel, tr.T5Config, T5 | dict(num_layers=3)),
}
SEQ2SEQ = ("t5", "mt5", "bart", "marian", "mbart", "pegasus")
OWN_READOUT = ("own-readout", "own-readout-big-eps")


def make(name, **sizes):
    """The model, with large weights in place of the small ones it starts from."""
    model_class, config_class, attributes = PEERS[name]
    config = config_class(**attributes | sizes)
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    model = model_class(config).eval()
    rng = np.random.default_rng(1)
    with torch.no_grad():
        for key, p in sorted(model.named_parameters()):
            if name == "marian" and key.endswith("embed_positions.weight"):
                continue  # sinusoids, which no file has
            p.copy_(torch.from_numpy(_large(key, tuple(p.shape), rng).astype(np.float32)))
        for key, a in model.named_buffers():
            if key.endswith(("e_score_correction_bias", "final_logits_bias")):
                a.copy_(torch.from_numpy(0.3 * rng.normal(size=a.shape)))
        if name.endswith(OWN_READOUT):
            # The file decides whether a T5 has a readout of its own, so give it one.
            own = torch.empty_like(model.lm_head.weight).normal_() * config.d_model**-0.5
            model.lm_head.weight = torch.nn.Parameter(own)
    return model


def inputs(name, length=11, vocab=97):
    """A batch of three texts, with padding at the end of two of them and types given; or of three
    images of whole numbers."""
    rng = np.random.default_rng(2)
    if "image_size" in PEERS[name][2]:
        config = PEERS[name][1](**PEERS[name][2])
        sides = np.broadcast_to(config.image_size, 2)
        pixels = rng.integers(-3, 4, (3, config.num_channels, *sides))
        return {"pixel_values": pixels.astype(np.float32)}
    pad = PEERS[name][2].get("pad_token_id", 1)
    ids = rng.integers(5, vocab, (3, length))
    # A window that only saw padding would see nothing, which is no number to compare.
    window = PEERS[name][2].get("local_attention", 2 * length) // 2
    most = (PEERS[name][2].get("sliding_window") or window) - 1
    real = np.arange(length) < length - np.minimum([[0], [4], [7]], most)
    ids = np.where(real, ids, pad)
    given = {"input_ids": ids, "attention_mask": real.astype(np.int64)}
    types = PEERS[name][2].get("type_vocab_size", 2)
    if name.startswith(("bert", "albert", "roberta", "xlm", "camembert", "electra", "gpt2")):
        given["token_type_ids"] = rng.integers(0, types, ids.shape)
    if name.startswith("opt"):  # else it counts them by the mask, also of padding
        given["position_ids"] = np.broadcast_to(np.arange(length), ids.shape).copy()
    if name.startswith(SEQ2SEQ) and "encoder" not in name:
        given["decoder_input_ids"] = rng.integers(2, vocab, (3, 7))
    return given


def outputs(model, given):
    """What the peer says, as NumPy arrays; a list of layers becomes one array."""
    tensors = {key: torch.from_numpy(np.asarray(a)) for key, a in given.items()}
    with torch.no_grad():
        said = model(**tensors, output_hidden_states=True, output_attentions=True)
    found = {}
    for key, value in said.items():
        if isinstance(value, tuple) and value and isinstance(value[0], torch.Tensor):
            found[key] = np.stack([a.numpy() for a in value])
        elif isinstance(value, torch.Tensor):
            found[key] = value.numpy()
    if "pixel_values" in given:
        # Others show the output of the final norm in the last layer's place.
        if "last_hidden_state" not in found:
            last = torch.from_numpy(found["hidden_states"][-1])
            found["last_hidden_state"] = model.vit.layernorm(last).detach().numpy()
        found["hidden_states"][-1] = found["last_hidden_state"]
    return found


def _large(key, shape, rng):
    values = rng.normal(size=shape)
    if "norm" in key.lower() or "ln_" in key:
        return (1 + 0.3 * values) if key.endswith("weight") else 0.3 * values
    if key.endswith("bias"):
        return 0.3 * values
    if key.endswith("lambda1"):
        return 1 + 0.3 * values
    if any(part in key for part in ("embed", "wte", "wpe", "shared", "relative")):
        return 0.7 * values
    if "sinks" in key or key.endswith("_bias"):
        return 0.5 * values
    fan_in = shape[0] if ".c_" in key else shape[1]
    if len(shape) == 3:  # experts, (in, out) or (out, in)
        fan_in = min(shape[1:])
    return 1.2 * values / np.sqrt(fan_in)
