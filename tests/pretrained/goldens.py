"""Published models in small: a config, tensors, inputs and what the peer gave for them."""

import json
from pathlib import Path

import numpy as np

from attnlab import pretrained
from attnlab.heads import Standard
from attnlab.models import FFN, ModelConfig
from attnlab.pretrained.tensors import write_file

FOLDER = Path(__file__).parent / "golden"
TORCH, GOLDEN = (sorted(folder.glob("*.npz")) for folder in (FOLDER / "torch", FOLDER))
# The plainest of each family.
FAMILIES = {name: FOLDER / f"{name}.npz" for name in pretrained.FAMILIES}
SOME_FAMILIES = list(FAMILIES)[::4]
"""Those that the default run tests where a test of all takes long."""
SMALL = ModelConfig(
    vocab_size=11, max_len=9, width=12, num_layers=2,
    heads=Standard(num_heads=3, biases=("q", "k", "v", "o")),
    ffn=FFN(width=7, activation="gelu_tanh"),
)  # fmt: skip
"""A model of ours that GPT-2's format can say."""
FULL, SLIDING = "full_attention", "sliding_attention"
# Family -> attributes that change what is computed, as they are not supported.
ATTRIBUTES = {
    "bert": {"is_decoder": True, "is_causal": True, "position_embedding_type": "relative_key"},
    "albert": {"gap_size": 2, "num_hidden_groups": 10**4, "num_hidden_layers": 10**5},
    "roberta": {"add_cross_attention": True},
    "gpt2": {"scale_attn_by_inverse_layer_idx": 2, "hidden_size": 24, "n_layer": 10**5},
    "deepseek_v3": {"scoring_func": "softmax", "attention_bias": True, "num_key_value_heads": 2}
    | {"qk_head_dim": 99},
    "gemma3_text": {"attn_logit_softcapping": 50.0, "use_bidirectional_attention": "yes"}
    | {"layer_types": [FULL, "chunked_attention"], "rope_parameters": {"rope_theta": 10.0}}
    | {"sliding_window": None},
    "gpt_neox": {"rotary_pct": 0.9, "is_causal": False},
    "llama": {"partial_rotary_factor": 0.5, "rope_theta": 77.0, "is_causal": False}
    | {"sliding_window": 4, "layer_types": [SLIDING] * 2},
    "mistral": {"layer_types": [FULL] * 2},
    "ministral": {"layer_types": [FULL], "sliding_window": None},
    "ministral3": {"sliding_window": 0.5},
    "qwen2": {"layer_types": [SLIDING, "chunked_attention"]},
    "qwen3": {"layer_types": [FULL, SLIDING], "rope_parameters": "llama3"},
    "vit": {"image_size": "large", "patch_size": [4, 2, 3], "pooler_output_size": 7}
    | {"pooler_act": "mish"},
    "mixtral": {"router_jitter_noise": 0.1},
    "qwen2_moe": {"layer_types": [SLIDING] * 2},
    "gpt_oss": {"swiglu_alpha": 1.0},
    "xlm-roberta": {"position_embedding_type": "relative_key"},
    **{name: {"is_decoder": True} for name in ("camembert", "roberta-prelayernorm")},
    "gemma": {"hidden_activation": "relu", "use_bidirectional_attention": True},
    "gemma2": {"attn_logit_softcapping": 0.0},
    "starcoder2": {"norm_type": "rms_norm"},
    "granite": {"logits_scaling": 0.0},
    "opt": {"word_embed_proj_dim": 3},  # opt-350m's
    "bloom": {"n_embed": 7, "apply_residual_connection_post_layernorm": True},
    "mbart": {"num_hidden_layers": 4},
    "pegasus": {"num_hidden_layers": 1},
    **{name: {"clip_qkv": 8.0} for name in ("olmo", "olmoe")},
    **{name: {"layer_types": ["chunked_attention"]} for name in ("olmo3", "cohere2", "exaone4")},
    "falcon": {"alibi": True, "num_ln_in_parallel_attn": 2},
    "glm": {"partial_rotary_factor": 2.0},
    "gptj": {"rotary_dim": 99},
    "smollm3": {"no_rope_layers": [1], "layer_types": [SLIDING] * 4},
    **{n: {"feed_forward_proj": "gated-mish", "is_gated_act": False} for n in ("mt5", "umt5")},
    "mpnet": {"relative_attention_num_buckets": 8, "is_decoder": True},
    "modernbert": {"layer_types": ["chunked"]}
    | {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    "bart": {"encoder_ffn_dim": 7, "tie_word_embeddings": False, "num_hidden_layers": 1},
    "marian": {"share_encoder_decoder_embeddings": False, "num_hidden_layers": 4},
    "t5": {"feed_forward_proj": "gated-mish", "is_gated_act": True},
}

YARN = {"rope_type": "yarn", "factor": 4.0, "beta_fast": 4.0, "attention_factor": 1.3}
LENGTH = "original_max_position_embeddings"
YARN[LENGTH] = 16
LINEAR = {"rope_type": "linear", "factor": 3.0}
PLAIN = {"rope_type": "default"}
GROWTH = {"llama_4_scaling_beta": 0.5, "rope_theta": 50.0, LENGTH: 8}
GROWING = [rope | GROWTH for rope in (LINEAR, YARN, PLAIN)]
"""Rotary words of Ministral 3, whose queries grow with their position."""
# (family, words of config.json, words that say the same)
SAME = [
    ("llama", {"position_embedding_type": "rope"}, {}),
    ("llama", {"is_decoder": True, "is_causal": True}, {}),
    ("llama", {"layer_types": [FULL] * 2}, {}),
    ("llama", {"partial_rotary_factor": 1.0}, {}),
    ("llama", {"rope_parameters": LINEAR | {"attention_factor": 2.0, "rope_theta": 9.0}},
     {"rope_parameters": LINEAR | {"rope_theta": 9.0}}),
    ("llama", {"rope_parameters": LINEAR | {"original_max_position_embeddings": 8}},
     {"rope_parameters": LINEAR}),
    ("llama", {"rope_parameters": YARN | {"factor": None}, "max_position_embeddings": 40},
     {"rope_parameters": YARN | {"factor": 2.5}, "max_position_embeddings": 40}),
    ("llama", {"rope_scaling": LINEAR, "rope_parameters": LINEAR | {"rope_theta": 9.0},
               "rope_theta": 9.0},
     {"rope_parameters": LINEAR | {"rope_theta": 9.0}}),
    # The length of training beside the rotary words counts: Phi-3 writes it there.
    *((family, {"rope_parameters": rope, LENGTH: 64}, {"rope_parameters": rope | {LENGTH: 64}})
      for family, rope in (("llama", YARN), ("qwen3", YARN), ("ministral3", GROWING[1]))),
    # Queries that grow, as before transformers 5.
    *(("ministral3", {"rope_parameters": None, "rope_scaling": rope}, {"rope_parameters": rope})
      for rope in GROWING),
    ("gpt2", {"is_decoder": True}, {}),
    ("deepseek_v3", {"num_mtp_layers": 2}, {}),
    ("bert", {"is_causal": False}, {}),
    ("modernbert", {"position_embedding_type": "sans_pos"}, {}),
    ("cohere2", {"position_embedding_type": "rope_gptj", "sliding_window_pattern": None}, {}),
    ("gemma", {"use_bidirectional_attention": False}, {}),
    ("gemma2", {"use_bidirectional_attention": False}, {}),
    ("gemma3_text", {"use_bidirectional_attention": None, "sliding_window_pattern": None}, {}),
    ("exaone4", {"sliding_window_pattern": "LLLG"}, {}),
    ("bloom", {"slow_but_exact": True}, {}),
    ("bloom", {"pretraining_tp": 3}, {}),
    ("bart", {"num_hidden_layers": 2}, {}),
    ("ernie4_5", {"attention_dropout": 0.5}, {}),
    # As before transformers 5: of layers without a window alone.
    ("gemma3_text",
     {"rope_parameters": None, "rope_theta": 300.0, "rope_local_base_freq": 20.0,
      "rope_scaling": LINEAR},
     {"rope_parameters": {FULL: LINEAR | {"rope_theta": 300.0},
                          SLIDING: PLAIN | {"rope_theta": 20.0}}}),
    ("olmo3",
     {"rope_scaling": YARN, "rope_parameters": {FULL: YARN | {"rope_theta": 9.0},
                                                SLIDING: PLAIN | {"rope_theta": 7.0}}},
     {"rope_parameters": {FULL: YARN | {"rope_theta": 9.0}, SLIDING: PLAIN | {"rope_theta": 7.0}}}),
    ("olmo3", {"rope_parameters": None, "rope_theta": 5e5, "rope_scaling": YARN},
     {"rope_parameters": {FULL: YARN | {"rope_theta": 5e5}, SLIDING: PLAIN | {"rope_theta": 5e5}}}),
]  # fmt: skip


def split(path):
    """(config.json, tensors, inputs, outputs) of a golden file."""
    found = {"tensor": {}, "input": {}, "output": {}}
    with np.load(path, allow_pickle=False) as file:
        config = json.loads(file["config"].tobytes())
        for key in file.files:
            if key != "config":
                kind, name = key.split(" ", 1)
                found[kind][name] = file[key]
    given = {n: a.astype(np.int32) if a.dtype == np.int8 else a for n, a in found["input"].items()}
    return config, found["tensor"], given, found["output"]


def write(folder, config, tensors):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    write_file(folder / "model.safetensors", tensors)
    return folder


def golden_folder(folder, family, words=(), tensors=()):
    """The folder of a family with these words in its config.json, and these tensors."""
    config, held, _, _ = split(FAMILIES[family])
    return write(folder, config | dict(words), held | dict(tensors))


def said(folder, file="config.json"):
    return json.loads((folder / file).read_text())


def saved(folder, model, params, **options):
    """config.json as `save` writes it."""
    pretrained.save(folder, model, params, **options)
    return said(folder)


def close(got, expected):
    np.testing.assert_allclose(np.asarray(got), expected, rtol=1e-4, atol=1e-4)
