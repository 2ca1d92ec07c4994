"""Tiny random models of transformers and what they give, for parity tests and golden files."""

import functools
import os
import warnings

os.environ["HF_HUB_OFFLINE"] = "1"

import numpy as np
import torch
import transformers as tr

torch.set_num_threads(1)  # more of them wait for each other at these sizes

BERT = dict(vocab_size=97, hidden_size=32, num_hidden_layers=2, num_attention_heads=4)
BERT |= dict(intermediate_size=56, max_position_embeddings=40)
ALBERT = BERT | dict(embedding_size=16)
DISTILBERT = dict(vocab_size=97, dim=32, n_layers=2, n_heads=4, hidden_dim=56)
DISTILBERT |= dict(max_position_embeddings=40)
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
LINEAR = dict(rope_type="linear", factor=2.5, rope_theta=50.0)
ROPES = dict(full_attention=LINEAR, sliding_attention=dict(rope_type="default", rope_theta=20.0))
SCALED = dict(rope_type="llama3", factor=4.0, low_freq_factor=1.0, high_freq_factor=3.0)
SCALED |= dict(original_max_position_embeddings=16, rope_theta=100.0)

BART = dict(vocab_size=97, d_model=32, encoder_layers=2, decoder_layers=2, pad_token_id=1)
BART |= dict(encoder_attention_heads=4, decoder_attention_heads=4, decoder_start_token_id=2)
BART |= dict(encoder_ffn_dim=56, decoder_ffn_dim=56, max_position_embeddings=40)
MARIAN = BART | dict(scale_embedding=True, activation_function="swish")

MODERNBERT = BERT | dict(num_hidden_layers=4, local_attention=6, pad_token_id=0, cls_token_id=1)
MODERNBERT |= dict(sep_token_id=2, bos_token_id=1, eos_token_id=2)

PHI3 = LLAMA | dict(pad_token_id=0)

OLMO = {name: a for name, a in LLAMA.items() if name != "rms_norm_eps"}

FALCON = {name: a for name, a in BERT.items() if name != "intermediate_size"}

PLAIN = dict(rope_type="default", rope_theta=50.0)
YARN = PLAIN | dict(rope_type="yarn", factor=4.0, beta_fast=4.0)
YARN |= dict(original_max_position_embeddings=16)

LONG = dict(rope_type="longrope", rope_theta=50.0, original_max_position_embeddings=8)
LONG |= dict(short_factor=[1.0, 1.1, 1.2, 1.4], long_factor=[1.5, 2.0, 3.0, 4.0])
OLMOE = LLAMA | dict(num_experts=5, num_experts_per_tok=2)
GLM4_MOE = LLAMA | dict(head_dim=12, n_routed_experts=8, n_group=4, topk_group=2)
GLM4_MOE |= dict(num_experts_per_tok=3, moe_intermediate_size=20, use_qk_norm=True)
GLM4_MOE |= dict(attention_bias=True, num_mtp_layers=0, routed_scaling_factor=1.7)

OPT = FALCON | dict(ffn_dim=56)
BLOOM = dict(vocab_size=97, hidden_size=32, n_layer=2, n_head=4, layer_norm_epsilon=1e-5)


def peer(model, attributes, **more):
    """(class of the model, class of its config, attributes)"""
    return model, model.config_class, attributes | more


# name -> a model
PEERS = {
    "bert": peer(tr.BertForPreTraining, BERT),
    "bert-bare-3-heads-big-eps": peer(tr.BertModel, BERT,
        hidden_size=21, num_attention_heads=3, layer_norm_eps=0.05, type_vocab_size=3),
    "bert-untied-gelu_new": peer(tr.BertForMaskedLM, BERT,
        tie_word_embeddings=False, hidden_act="gelu_new", num_hidden_layers=3),
    "albert": peer(tr.AlbertForPreTraining, ALBERT),
    "albert-groups-inner": peer(tr.AlbertModel, ALBERT,
        num_hidden_layers=6, num_hidden_groups=3, inner_group_num=2, layer_norm_eps=0.05),
    "albert-square-map": peer(tr.AlbertForMaskedLM, ALBERT,
        embedding_size=32, num_hidden_layers=3, num_hidden_groups=2, hidden_act="relu"),
    "albert-one-call-two-blocks": peer(tr.AlbertForMaskedLM, ALBERT,
        num_hidden_layers=1, inner_group_num=2, tie_word_embeddings=False),
    "roberta": peer(tr.RobertaForMaskedLM, BERT, hidden_act="relu"),
    "roberta-bare-pad-4": peer(tr.RobertaModel, BERT,
        pad_token_id=4, type_vocab_size=1, layer_norm_eps=0.05, num_attention_heads=2),
    "distilbert": peer(tr.DistilBertForMaskedLM, DISTILBERT),
    "distilbert-bare-sinusoids": peer(tr.DistilBertModel, DISTILBERT,
        sinusoidal_pos_embds=True, n_layers=3, activation="relu"),
    "gpt2": peer(tr.GPT2LMHeadModel, GPT2),
    "gpt2-bare-inner-relu": peer(tr.GPT2Model, GPT2,
        n_inner=24, activation_function="relu", n_head=2, layer_norm_epsilon=0.05),
    "gpt2-unscaled-untied": peer(tr.GPT2LMHeadModel, GPT2,
        scale_attn_weights=False, tie_word_embeddings=False, n_layer=3),
    "gpt2-scores-by-layer": peer(tr.GPT2LMHeadModel, GPT2,
        scale_attn_by_inverse_layer_idx=True, n_layer=3),
    "t5": peer(tr.T5ForConditionalGeneration, T5),
    "t5-1.1-own-readout": peer(tr.T5ForConditionalGeneration, T5,
        feed_forward_proj="gated-gelu", tie_word_embeddings=False, num_decoder_layers=3),
    "t5-scaled-own-readout-big-eps": peer(tr.T5ForConditionalGeneration, T5,
        feed_forward_proj="gated-silu", layer_norm_epsilon=0.05, num_heads=3),
    "t5-bare-gelu": peer(tr.T5Model, T5, feed_forward_proj="gelu"),
    "llama": peer(tr.LlamaForCausalLM, LLAMA),
    "llama-llama3-biases-tied": peer(tr.LlamaForCausalLM, LLAMA,
        head_dim=6, num_key_value_heads=4, hidden_act="gelu_new", rms_norm_eps=0.05,
        attention_bias=True, mlp_bias=True, tie_word_embeddings=True, rope_parameters=SCALED),
    "llama-bare-linear": peer(tr.LlamaModel, LLAMA,
        num_key_value_heads=1, num_hidden_layers=3, rope_parameters=LINEAR),
    "mistral": peer(tr.MistralForCausalLM, LLAMA, head_dim=10, sliding_window=4),
    "qwen3": peer(tr.Qwen3ForCausalLM, LLAMA,
        head_dim=10, rms_norm_eps=0.05, tie_word_embeddings=True),
    "qwen3-mixed-biases": peer(tr.Qwen3ForCausalLM, LLAMA,
        head_dim=10, use_sliding_window=True, sliding_window=4, num_hidden_layers=4,
        attention_bias=True, layer_types=[*LOCAL, "full_attention", *LOCAL, *LOCAL]),
    "qwen2": peer(tr.Qwen2ForCausalLM, LLAMA,
        use_sliding_window=True, sliding_window=4, max_window_layers=1, tie_word_embeddings=True),
    "ministral": peer(tr.MinistralForCausalLM, LLAMA,
        head_dim=10, sliding_window=4, layer_types=["full_attention", *LOCAL]),
    "ministral3": peer(tr.Ministral3ForCausalLM, LLAMA,
        head_dim=10, rope_parameters=YARN | dict(llama_4_scaling_beta=0.7, mscale=1.0,
            mscale_all_dim=1.0, original_max_position_embeddings=3)),
    "ministral3-window-untied": peer(tr.Ministral3ForCausalLM, LLAMA,
        num_key_value_heads=4, sliding_window=4, tie_word_embeddings=False,
        rope_parameters=PLAIN | dict(llama_4_scaling_beta=0.2, original_max_position_embeddings=4)),
    "gemma3_text": peer(tr.Gemma3ForCausalLM, GEMMA),
    "gemma3_text-untied-linear-biases": peer(tr.Gemma3ForCausalLM, GEMMA,
        num_hidden_layers=7, layer_types=[*LOCAL, *LOCAL, "full_attention"] * 2 + LOCAL,
        tie_word_embeddings=False, attention_bias=True, rope_parameters=ROPES),
    "gemma3_text-bare-all-local": peer(tr.Gemma3TextModel, GEMMA,
        num_hidden_layers=2, layer_types=LOCAL * 2, tie_word_embeddings=False),
    "gpt_neox": peer(tr.GPTNeoXForCausalLM, NEOX),
    "gpt_neox-in-turn-tied": peer(tr.GPTNeoXForCausalLM, NEOX,
        use_parallel_residual=False, attention_bias=False, tie_word_embeddings=True,
        rotary_pct=1.0, rotary_emb_base=50.0, hidden_act="gelu_new", layer_norm_eps=0.05),
    "gpt_neox-bare": peer(tr.GPTNeoXModel, NEOX, rotary_pct=0.34),
    "deepseek_v3": peer(tr.DeepseekV3ForCausalLM, DEEPSEEK),
    "deepseek_v3-plain-queries": peer(tr.DeepseekV3ForCausalLM, DEEPSEEK,
        q_lora_rank=None, tie_word_embeddings=True, rms_norm_eps=0.05, rope_parameters=SCALED),
    "deepseek_v3-yarn": peer(tr.DeepseekV3ForCausalLM, DEEPSEEK,
        rope_parameters=YARN | dict(mscale=0.8, mscale_all_dim=0.8)),
    "deepseek_v3-halves": peer(tr.DeepseekV3ForCausalLM, DEEPSEEK,
        rope_interleave=False, num_hidden_layers=3),
    "deepseek_v3-experts": peer(tr.DeepseekV3ForCausalLM, DEEPSEEK_MOE),
    "deepseek_v3-experts-2-shared": peer(tr.DeepseekV3ForCausalLM, DEEPSEEK_MOE,
        n_shared_experts=2, norm_topk_prob=False, n_group=1, topk_group=1, first_k_dense_replace=0,
        num_hidden_layers=3, tie_word_embeddings=True),
    "mixtral": peer(tr.MixtralForCausalLM, MIXTRAL),
    "mixtral-window-bare": peer(tr.MixtralModel, MIXTRAL,
        sliding_window=4, num_experts_per_tok=4, rms_norm_eps=0.05),
    "qwen2_moe": peer(tr.Qwen2MoeForCausalLM, QWEN2_MOE),
    "qwen2_moe-dense-and-window": peer(tr.Qwen2MoeForCausalLM, QWEN2_MOE,
        num_hidden_layers=5, mlp_only_layers=[1, 2], norm_topk_prob=True, qkv_bias=False,
        use_sliding_window=True, sliding_window=4, max_window_layers=3),
    "qwen3_moe": peer(tr.Qwen3MoeForCausalLM, QWEN3_MOE),
    "qwen3_moe-every-second": peer(tr.Qwen3MoeForCausalLM, QWEN3_MOE,
        decoder_sparse_step=2, num_hidden_layers=4, norm_topk_prob=False, use_sliding_window=True,
        sliding_window=5, attention_bias=True),
    "gpt_oss": peer(tr.GptOssForCausalLM, GPT_OSS),
    "xlm-roberta": peer(tr.XLMRobertaForMaskedLM, BERT),
    "camembert": peer(tr.CamembertForMaskedLM, BERT),
    "electra": peer(tr.ElectraForMaskedLM, ALBERT),
    "electra-bare-one-width": peer(tr.ElectraModel, BERT, embedding_size=32),
    "phi3": peer(tr.Phi3ForCausalLM, PHI3),
    "phi3-window-partial": peer(tr.Phi3ForCausalLM, PHI3,
        sliding_window=4, partial_rotary_factor=0.5, tie_word_embeddings=True),
    "gemma": peer(tr.GemmaForCausalLM, LLAMA, head_dim=10),
    "gemma2": peer(tr.Gemma2ForCausalLM, GEMMA,
        attn_logit_softcapping=1.5, final_logit_softcapping=2.0),
    "gemma2-no-caps": peer(tr.Gemma2ForCausalLM, GEMMA,
        attn_logit_softcapping=None, final_logit_softcapping=None),
    "starcoder2": peer(tr.Starcoder2ForCausalLM, BERT, num_key_value_heads=2, sliding_window=4),
    "starcoder2-no-biases": peer(tr.Starcoder2ForCausalLM, BERT,
        num_key_value_heads=2, use_bias=False, tie_word_embeddings=False),
    "stablelm": peer(tr.StableLmForCausalLM, BERT,
        num_key_value_heads=2, use_qkv_bias=True, partial_rotary_factor=0.5),
    "granite": peer(tr.GraniteForCausalLM, LLAMA,
        embedding_multiplier=3.0, residual_multiplier=0.3, attention_multiplier=0.2,
        logits_scaling=5.0),
    "olmo": peer(tr.OlmoForCausalLM, OLMO),
    "olmo2": peer(tr.Olmo2ForCausalLM, OLMO, rms_norm_eps=0.05),
    "olmo3": peer(tr.Olmo3ForCausalLM, OLMO,
        rms_norm_eps=1e-05, sliding_window=4, num_hidden_layers=5),
    "smollm3": peer(tr.SmolLM3ForCausalLM, LLAMA, num_hidden_layers=4, pad_token_id=0),
    "cohere": peer(tr.CohereForCausalLM, OLMO, logit_scale=0.3),
    "cohere-normed-heads": peer(tr.CohereForCausalLM, OLMO,
        use_qk_norm=True, layer_norm_eps=0.05, attention_bias=True),
    "phi": peer(tr.PhiForCausalLM, OLMO),
    "phi-normed-heads-tied": peer(tr.PhiForCausalLM, OLMO,
        qk_layernorm=True, layer_norm_eps=0.05, tie_word_embeddings=True),
    "gptj": peer(tr.GPTJForCausalLM, GPT2, rotary_dim=4),
    "falcon": peer(tr.FalconForCausalLM, FALCON),
    "falcon-grouped": peer(tr.FalconForCausalLM, FALCON,
        new_decoder_architecture=True, num_kv_heads=2, bias=True),
    "falcon-in-turn": peer(tr.FalconForCausalLM, FALCON,
        parallel_attn=False, multi_query=False, ffn_hidden_size=40),
    "glm": peer(tr.GlmForCausalLM, LLAMA, head_dim=12, pad_token_id=0),
    "glm4": peer(tr.Glm4ForCausalLM, LLAMA,
        head_dim=12, partial_rotary_factor=0.34, pad_token_id=0),
    "llama-yarn": peer(tr.LlamaForCausalLM, LLAMA, rope_parameters=YARN),
    "qwen2-yarn-smooth": peer(tr.Qwen2ForCausalLM, LLAMA,
        rope_parameters=YARN | dict(truncate=False, attention_factor=1.3)),
    "llama-dynamic": peer(tr.LlamaForCausalLM, LLAMA,
        rope_parameters=dict(rope_type="dynamic", factor=3.0, rope_theta=50.0)),
    "olmo3-yarn": peer(tr.Olmo3ForCausalLM, OLMO,
        rms_norm_eps=1e-05, sliding_window=4, num_hidden_layers=5,
        rope_parameters=dict(full_attention=YARN, sliding_attention=PLAIN)),
    "opt": peer(tr.OPTForCausalLM, OPT),
    "opt-post": peer(tr.OPTForCausalLM, OPT,
        do_layer_norm_before=False, enable_bias=False, layer_norm_elementwise_affine=False),
    "bloom": peer(tr.BloomForCausalLM, BLOOM),
    "bloom-3-heads": peer(tr.BloomForCausalLM, BLOOM,
        hidden_size=21, n_head=3, tie_word_embeddings=False),
    "stablelm-parallel": peer(tr.StableLmForCausalLM, BERT,
        num_key_value_heads=2, use_parallel_residual=True),
    "vit": peer(tr.ViTForImageClassification, VIT, num_labels=5),
    "vit-bare-square-no-biases": peer(tr.ViTModel, VIT,
        hidden_size=21, num_attention_heads=3, image_size=9, patch_size=3, num_channels=2,
        qkv_bias=False, hidden_act="gelu_new", layer_norm_eps=0.05),
    "dinov2": peer(tr.Dinov2Model, SQUARE),
    "dinov2-gated": peer(tr.Dinov2Model, SQUARE,
        use_swiglu_ffn=True, qkv_bias=False, mlp_ratio=3, use_mask_token=False),
    "umt5": peer(tr.UMT5ForConditionalGeneration, T5, num_decoder_layers=3),
    "umt5-unscaled-gelu": peer(tr.UMT5ForConditionalGeneration, T5,
        tie_word_embeddings=False, feed_forward_proj="gelu", layer_norm_epsilon=0.05),
    "umt5-tokens": peer(tr.UMT5ForTokenClassification, T5, num_labels=3),
    "mt5": peer(tr.MT5ForConditionalGeneration, T5,
        feed_forward_proj="gated-gelu", num_decoder_layers=3),
    "mpnet": peer(tr.MPNetForMaskedLM, BERT),
    "mpnet-bare": peer(tr.MPNetModel, BERT,
        layer_norm_eps=0.05, num_attention_heads=2, hidden_act="relu"),
    "modernbert": peer(tr.ModernBertForMaskedLM, MODERNBERT),
    "modernbert-biases-untied": peer(tr.ModernBertForMaskedLM, MODERNBERT,
        num_hidden_layers=7, norm_bias=True, attention_bias=True, mlp_bias=True,
        classifier_bias=True, decoder_bias=False, tie_word_embeddings=False,
        classifier_activation="relu", norm_eps=0.05),
    "modernbert-bare-one-layer": peer(tr.ModernBertModel, MODERNBERT, num_hidden_layers=1),
    "bart": peer(tr.BartForConditionalGeneration, BART),
    "bart-bare-3-layers": peer(tr.BartModel, BART,
        encoder_layers=3, encoder_attention_heads=2, activation_function="relu"),
    "bart-scaled": peer(tr.BartForConditionalGeneration, BART, scale_embedding=True, num_labels=7),
    "marian": peer(tr.MarianMTModel, MARIAN),
    "mbart": peer(tr.MBartForConditionalGeneration, BART),
    "pegasus": peer(tr.PegasusForConditionalGeneration, MARIAN),
    "t5-encoder": peer(tr.T5EncoderModel, T5, num_layers=3),
    "cohere2": peer(tr.Cohere2ForCausalLM, OLMO,
        num_hidden_layers=3, layer_types=[*LOCAL, "full_attention", *LOCAL], sliding_window=4,
        rope_parameters=PLAIN, logit_scale=0.3),
    "olmoe": peer(tr.OlmoeForCausalLM, OLMOE),
    "glm4_moe": peer(tr.Glm4MoeForCausalLM, GLM4_MOE),
    "ernie4_5": peer(tr.Ernie4_5ForCausalLM, LLAMA, head_dim=10, use_bias=True),
    "seed_oss": peer(tr.SeedOssForCausalLM, LLAMA, head_dim=10, attention_out_bias=True),
    "exaone4": peer(tr.Exaone4ForCausalLM, LLAMA,
        num_hidden_layers=4, sliding_window=4, sliding_window_pattern=2),
    "exaone4-rotary": peer(tr.Exaone4ForCausalLM, LLAMA,
        sliding_window=None, layer_types=["full_attention"] * 2),
    "roberta-prelayernorm": peer(tr.RobertaPreLayerNormForMaskedLM, BERT),
    "smollm3-window": peer(tr.SmolLM3ForCausalLM, LLAMA,
        num_hidden_layers=4, pad_token_id=0, use_sliding_window=True, sliding_window=4),
    "gemma3_text-both-ways": peer(tr.Gemma3TextModel, GEMMA,
        use_bidirectional_attention=True, sliding_window=40),
    "phi3-longrope": peer(tr.Phi3ForCausalLM, PHI3,
        rope_parameters=LONG, original_max_position_embeddings=8),
    "phi3-longrope-short": peer(tr.Phi3ForCausalLM, PHI3,
        rope_parameters=LONG | dict(partial_rotary_factor=0.5, short_factor=[1.0, 1.5],
        long_factor=[2.0, 3.0]), original_max_position_embeddings=32),
    "phi-yarn": peer(tr.PhiForCausalLM, OLMO,
        rope_parameters=YARN | dict(partial_rotary_factor=0.5)),
    "deepseek_v3-yarn-two-scales": peer(tr.DeepseekV3ForCausalLM, DEEPSEEK,
        rope_parameters=YARN | dict(mscale=0.7, mscale_all_dim=1.0)),
    "stablelm-normed-heads": peer(tr.StableLmForCausalLM, BERT,
        num_key_value_heads=2, qk_layernorm=True, layer_norm_eps=0.05),
    "gpt_oss-other-act": peer(tr.GptOssForCausalLM, GPT_OSS, hidden_act="gelu", swiglu_limit=7.0),
    "vit-relu-pooler": peer(tr.ViTModel, VIT, pooler_act="relu"),
    "t5-tokens": peer(tr.T5ForTokenClassification, T5, num_labels=3),
    "bert-classes": peer(tr.BertForSequenceClassification, BERT, num_labels=3),
    "bert-next": peer(tr.BertForNextSentencePrediction, BERT),
    "bert-questions": peer(tr.BertForQuestionAnswering, BERT),
    "albert-classes": peer(tr.AlbertForSequenceClassification, ALBERT),
    "roberta-classes": peer(tr.RobertaForSequenceClassification, BERT, num_labels=3),
    "roberta-tokens": peer(tr.RobertaForTokenClassification, BERT, num_labels=5),
    "distilbert-classes": peer(tr.DistilBertForSequenceClassification, DISTILBERT),
    "electra-classes": peer(tr.ElectraForSequenceClassification, ALBERT),
    "modernbert-classes": peer(tr.ModernBertForSequenceClassification, MODERNBERT),
    "modernbert-mean": peer(tr.ModernBertForSequenceClassification, MODERNBERT,
        classifier_pooling="mean", classifier_bias=True, norm_bias=True, num_labels=4),
    "modernbert-tokens": peer(tr.ModernBertForTokenClassification, MODERNBERT),
    "llama-classes": peer(tr.LlamaForSequenceClassification, LLAMA, num_labels=3, pad_token_id=0),
    "llama-tokens": peer(tr.LlamaForTokenClassification, LLAMA, num_labels=3),
    "llama-questions": peer(tr.LlamaForQuestionAnswering, LLAMA),
    "gpt2-classes": peer(tr.GPT2ForSequenceClassification, GPT2, pad_token_id=0),
    "gpt2-tokens": peer(tr.GPT2ForTokenClassification, GPT2, num_labels=3),
}  # fmt: skip
SEQ2SEQ = ("t5", "mt5", "umt5", "bart", "marian", "mbart", "pegasus")
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
    if name.startswith(SEQ2SEQ) and not name.endswith(("encoder", "tokens")):
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


TORCH = {
    "attention": ("MultiheadAttention", {}),
    "attention-no-bias": ("MultiheadAttention", dict(bias=False)),
    "attention-widths": ("MultiheadAttention", dict(kdim=5, vdim=7)),
    "attention-widths-no-bias": ("MultiheadAttention", dict(kdim=5, vdim=7, bias=False)),
    "attention-more-keys": ("MultiheadAttention", dict(add_bias_kv=True, add_zero_attn=True)),
    "encoder-layer": ("TransformerEncoderLayer", {}),
    "encoder-layer-first": ("TransformerEncoderLayer", dict(norm_first=True, bias=False)),
    "encoder": ("TransformerEncoder", dict(layer_norm_eps=0.05)),
    "encoder-first": ("TransformerEncoder", dict(norm_first=True, norm=True)),
    "encoder-norm": ("TransformerEncoder", dict(norm=True)),
    "decoder-layer": ("TransformerDecoderLayer", {}),
    "decoder-layer-gelu": ("TransformerDecoderLayer",
        dict(norm_first=True, activation="gelu", bias=False)),
    "decoder-first": ("TransformerDecoder", dict(norm_first=True, norm=True)),
    "transformer": ("Transformer", {}),
    "transformer-first": ("Transformer", dict(norm_first=True, activation="gelu")),
}  # fmt: skip
"""Name -> class of torch.nn, and its arguments; `norm` is of a stack."""


def torch_case(name):
    """What `goldens.split` gives, of a module of torch.nn with large weights: with padding in what
    is read, and a causal target."""
    kind, options = TORCH[name]
    torch.manual_seed(0)
    is_attention = kind == "MultiheadAttention"
    attention = functools.partial(torch.nn.MultiheadAttention, 12, 3, batch_first=True)
    module = attention(**options) if is_attention else torch_layers(kind, options)
    with torch.no_grad():
        for key, p in module.eval().named_parameters():
            std = 1.0 if is_attention else 0.4
            p.normal_(std=std).add_(1.0 if "norm" in key and key.endswith("weight") else 0.0)
    run = attention_outputs if is_attention else layer_outputs
    given, expected = run(module, kind)
    tensors = {key: p.detach().numpy() for key, p in module.named_parameters()}
    heads = dict(embed_dim=12, num_heads=3) if is_attention else dict(nhead=3)
    config = heads | {n: a for n, a in options.items() if n not in ("norm", "bias")}
    system = "torch_mha" if is_attention else "torch_layers"
    return config | {"system": system}, tensors, given, expected


def attention_outputs(module, kind):
    rng = np.random.default_rng(0)
    sizes = {"x": (2, 5, 12), "key": (2, 4, module.kdim), "value": (2, 4, module.vdim)}
    given = {n: rng.normal(size=size).astype(np.float32) for n, size in sizes.items()}
    # A text with nothing to attend to is a number where there are keys that no input has.
    hidden = np.arange(4) >= np.array([[4], [0 if module.add_zero_attn else 2]])
    with torch.no_grad():
        said, probs = module(
            *map(torch.from_numpy, given.values()),
            key_padding_mask=torch.from_numpy(hidden),
            average_attn_weights=False,
        )
    expected = {"output": said.numpy(), "probs": probs.numpy()[..., :4]}
    return given | {"mask": ~hidden[:, None, None]}, expected


def torch_layers(kind, options):
    given = dict(batch_first=True, dropout=0.0) | {n: a for n, a in options.items() if n != "norm"}
    if kind == "Transformer":
        with warnings.catch_warnings(action="ignore"):  # of a fast path that it cannot take
            return torch.nn.Transformer(12, 3, 1, 2, 10, **given)
    layer = getattr(torch.nn, f"{kind.removesuffix('Layer')}Layer")(12, 3, 10, **given)
    final = torch.nn.LayerNorm(12) if options.get("norm") else None
    if kind == "TransformerEncoder":
        return torch.nn.TransformerEncoder(layer, 2, final, enable_nested_tensor=False)
    return torch.nn.TransformerDecoder(layer, 2, final) if kind == "TransformerDecoder" else layer


def layer_outputs(module, kind):
    rng = np.random.default_rng(0)
    x, y = (rng.normal(size=size).astype(np.float32) for size in ((2, 6, 12), (2, 4, 12)))
    real = np.arange(6) < np.array([[6], [4]])
    hidden = torch.from_numpy(~real)
    texts, padding = [torch.from_numpy(a) for a in (x, y)], {"src_key_padding_mask": hidden}
    if "Encoder" in kind:
        out = module(texts[0], **padding).detach().numpy()
        return {"x": x, "padding_mask": real}, {"output": out, "valid": real}
    causal = torch.nn.Transformer.generate_square_subsequent_mask(4)
    options = dict(memory_key_padding_mask=hidden, tgt_is_causal=True, tgt_mask=causal)
    alone = "Decoder" in kind
    said = module(*texts[::-1], **options) if alone else module(*texts, **options, **padding)
    source = {"encoded" if alone else "source": x}
    return {"x": y, "source_padding_mask": real} | source, {"output": said.detach().numpy()}


def _large(key, shape, rng):
    values = rng.normal(size=shape)
    key = key.removeprefix("roberta_prelayernorm.")
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
