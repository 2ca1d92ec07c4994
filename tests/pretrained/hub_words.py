"""The words of config.json of folders on the hub, with tiny sizes."""

REMOTE = dict(AutoConfig="configuration_x.XConfig", AutoModelForCausalLM="modeling_x.XForCausalLM")
SIZES = dict(vocab_size=97, hidden_size=32, num_hidden_layers=2, num_attention_heads=4)
LIKE_LLAMA = (
    SIZES
    | dict(attention_dropout=0.0, hidden_act="silu", initializer_range=0.02)
    | dict(intermediate_size=56, max_position_embeddings=40, num_key_value_heads=2)
    | dict(torch_dtype="bfloat16", transformers_version="4.44.0", use_cache=True)
)
QWEN = (
    LIKE_LLAMA
    | dict(architectures=["Qwen2ForCausalLM"], bos_token_id=43, eos_token_id=43)
    | dict(max_window_layers=24, model_type="qwen2", rms_norm_eps=1e-06, rope_theta=1000000.0)
    | dict(sliding_window=4096, tie_word_embeddings=True, use_mrope=False)
    | dict(use_sliding_window=False)
)
HUB = {
    "SmolLM2-135M": LIKE_LLAMA
    | dict(architectures=["LlamaForCausalLM"], attention_bias=False, bos_token_id=0)
    | dict(eos_token_id=0, is_llama_config=True, model_type="llama", pretraining_tp=1)
    | dict(rms_norm_eps=1e-05, rope_interleaved=False, rope_scaling=None, rope_theta=100000)
    | dict(tie_word_embeddings=True)
    | {"transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16", "fp16": "float16"}}},
    "Qwen2.5-0.5B": QWEN,
    "DeepSeek-R1-Distill-Qwen-7B": QWEN
    | dict(rope_theta=10000, tie_word_embeddings=False, model_max_length=16384)
    | dict(unsloth_fixed=True),
    "Phi-3-mini-4k-instruct": LIKE_LLAMA
    | dict(_name_or_path="Phi-3-mini-4k-instruct", architectures=["Phi3ForCausalLM"])
    | dict(attention_bias=False, bos_token_id=1, embd_pdrop=0.0, eos_token_id=32)
    | dict(model_type="phi3", original_max_position_embeddings=40, pad_token_id=32)
    | dict(resid_pdrop=0.0, rms_norm_eps=1e-05, rope_scaling=None, rope_theta=10000.0)
    | dict(sliding_window=9, tie_word_embeddings=False)
    | dict(auto_map=REMOTE),
    "falcon-40b": SIZES
    | dict(alibi=False, apply_residual_connection_post_layernorm=False)
    | dict(architectures=["FalconForCausalLM"], attention_dropout=0.0, bias=False)
    | dict(bos_token_id=11, eos_token_id=11, hidden_dropout=0.0, initializer_range=0.02)
    | dict(layer_norm_epsilon=1e-05, model_type="falcon", multi_query=True)
    | dict(new_decoder_architecture=True, num_kv_heads=2, parallel_attn=True)
    | dict(torch_dtype="bfloat16", transformers_version="4.27.4", use_cache=True)
    | dict(use_flash_attn=True)
    | dict(auto_map=REMOTE),
}
"""Name on the hub -> config.json."""
PASSED = {
    "SmolLM2-135M": {"is_llama_config", "transformers.js_config"},
    "Qwen2.5-0.5B": set(),
    "DeepSeek-R1-Distill-Qwen-7B": {"model_max_length", "unsloth_fixed"},
    "Phi-3-mini-4k-instruct": {"auto_map"},
    "falcon-40b": {"auto_map", "use_flash_attn"},
}
"""Name on the hub -> the words that a warning names."""
