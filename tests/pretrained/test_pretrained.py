"""Published formats without torch or transformers: golden outputs, saved files, old styles."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import peer_outputs
import pytest
from conftest import deep
from goldens import FAMILIES, FOLDER, GOLDEN, close, golden_folder, saved, split, write
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from attnlab import pretrained
from attnlab.pretrained.tensors import read_file, write_file

CLASSIFIERS = [path for path in GOLDEN if path.stem.endswith("-classes")]


@pytest.mark.parametrize(
    "path", deep(GOLDEN, *FAMILIES.values(), *CLASSIFIERS), ids=lambda path: path.stem
)
def test_outputs_equal_the_peers(path, tmp_path):
    config, tensors, given, expected = split(path)
    model, params = pretrained.load(write(tmp_path / "theirs", config, tensors))
    seen = peer_outputs.run(model, params, given)
    compared = peer_outputs.compare(seen, expected, close)
    assert set(compared) & {"logits", "last", "classes"}
    assert {"hidden", "probs"} <= set(compared)


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_saved_tensors_are_equal_bit_by_bit(path, tmp_path):
    config, tensors, _, _ = split(path)
    model, params = pretrained.load(write(tmp_path / "theirs", config, tensors))
    pretrained.save(tmp_path / "ours", model, params, family=config["model_type"])
    saved = read_file(tmp_path / "ours" / "model.safetensors")
    again, params_again = pretrained.load(tmp_path / "ours")
    assert again.config == model.config
    jax.tree.map(np.testing.assert_array_equal, params, params_again)
    if path.stem.startswith("gpt2-bare"):  # the LM is what is written: the same, with the prefix
        tensors = {f"transformer.{name}": a for name, a in tensors.items()}
    assert set(saved) == set(tensors)
    unused = pretrained.FAMILIES[config["model_type"]].table.copies_in(model.config)
    for name in set(saved) - set(unused):
        np.testing.assert_array_equal(saved[name], tensors[name], name)


BERTS = ("bert", "albert", "roberta", "distilbert")
NOT_YET = {
    **dict.fromkeys(BERTS, "architectures tie_word_embeddings is_decoder add_cross_attention"),
    "bloom": "hidden_size",
    "gpt2": "scale_attn_weights scale_attn_by_inverse_layer_idx reorder_and_upcast_attn",
    "llama": "mlp_bias attention_bias",
    "t5": "scale_decoder_outputs is_gated_act dense_act_fn",
    "vit": "pooler_act pooler_output_size dtype encoder_stride",
}
"""Family -> words of config.json that older programs did not have."""
OLDER = {
    **{name: {"position_embedding_type": "absolute"} for name in BERTS},
    "bloom": {"bias_dropout_fusion": True, "n_embed": 12},
    "falcon": {"apply_residual_connection_post_layernorm": False},
    "gemma3_text": {"sliding_window_pattern": 2, "cache_implementation": "hybrid"},
    "gpt2": {"n_ctx": 17, "summary_type": "cls_index"},
    "gpt_neox": {"attention_probs_dropout_prob": 0, "hidden_dropout_prob": 0}
    | {"rope_theta": 77.0, "partial_rotary_factor": 0.25},
    "gpt_oss": {"rope_scaling": {"rope_type": "default"}},  # null is not the same in all versions
    "modernbert": {"global_attn_every_n_layers": 3, "layer_norm_eps": 1e-5},
    "smollm3": {"max_window_layers": 28},
    "starcoder2": {"mlp_type": "default", "norm_type": "layer_norm", "rms_norm_eps": 0.5}
    | {"activation_function": "gelu", "layer_norm_epsilon": 0.5},
    "t5": {"n_positions": 512, "output_past": True, "task_specific_params": {}},
    "vit": {"id2label": {str(i): f"a kind of {i}" for i in range(5)}},
}
"""Family -> words that they had."""
OWN_BASES = {
    "gemma3_text": {"rope_theta": "full_attention", "rope_local_base_freq": "sliding_attention"},
    "modernbert": {"global_rope_theta": "full_attention", "local_rope_theta": "sliding_attention"},
}
"""Family -> its name of a base -> the layers that have it."""


def old_words(family, config):
    """The same config.json as older programs wrote it."""
    gone = NOT_YET.get(family, "").split()
    rope = config.get("rope_parameters")  # of transformers 5
    if family == "ministral3":  # no older than that
        return config
    if rope and family not in ("ministral", "cohere2", "exaone4"):  # no older than the word
        gone.append("layer_types")
    config = {n: a for n, a in config.items() if n not in (*gone, "rope_parameters")}
    if rope and family in OWN_BASES:
        config |= {n: rope[of]["rope_theta"] for n, of in OWN_BASES[family].items()}
    elif rope:
        own, is_neox = rope.get("full_attention", rope), family == "gpt_neox"
        base = "rotary_emb_base" if is_neox else "rope_theta"
        config |= {"rope_scaling": None, base: own["rope_theta"], "pretraining_tp": 1}
        if fraction := own.get("partial_rotary_factor"):
            config["rotary_pct" if is_neox else "partial_rotary_factor"] = fraction
    return config | OLDER.get(family, {})


def old_tensors(family, config, tensors):
    """The same weights as older programs stored them."""
    more, neox = {}, "gpt_neox.layers.{}.attention."
    if family in BERTS:
        for new, old in (("weight", "gamma"), ("bias", "beta")):
            end = f"LayerNorm.{new}", f"LayerNorm.{old}"
            tensors = {name.replace(*end): a for name, a in tensors.items()}
        more[f"{family}.embeddings.position_ids"] = np.arange(17)[None]
    if family == "gpt2":  # as the hub has it
        tensors = {name.removeprefix("transformer."): a for name, a in tensors.items()}
    masked = {"gpt2": ("h.{}.attn.", np.float32), "gpt_neox": (neox, bool)}
    rotary = {"falcon": "transformer.h.{}.self_attention.", "gpt_neox": neox}
    for i in range(2):
        if family in masked:
            at, dtype = masked[family]
            more[f"{at.format(i)}bias"] = np.tril(np.ones((1, 1, 17, 17), dtype))
            more[f"{at.format(i)}masked_bias"] = np.array(-1e4, np.float32)
        if "rope_parameters" in config and family != "modernbert":
            at = rotary.get(family, "model.layers.{}.self_attn.")
            more[f"{at.format(i)}rotary_emb.inv_freq"] = np.ones(2, np.float32)
    if family == "bart":
        more |= {f"model.{one}coder.version": np.full(1, 3, np.float32) for one in ("en", "de")}
    if family == "t5":
        names = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "lm_head.weight")
        more |= dict.fromkeys(names, tensors["shared.weight"])
        dead = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"
        more[dead] = np.ones((8, 4), np.float32)
    return tensors | more


@pytest.mark.parametrize("family", FAMILIES)
def test_older_styles_load(family, tmp_path):
    config, tensors, _, _ = split(FAMILIES[family])
    model, params = pretrained.load(write(tmp_path / "new", config, tensors))
    older = old_words(family, config), old_tensors(family, config, tensors)
    old, old_params = pretrained.load(write(tmp_path / "old", *older))
    assert old.config == model.config
    jax.tree.map(np.testing.assert_array_equal, params, old_params)


def test_a_pooler_that_a_classifier_does_not_read(tmp_path):
    """Classifiers of each token have one in files of before transformers 4."""
    config, tensors, _, _ = split(FOLDER / "bert-classes.npz")
    assert "bert.pooler.dense.weight" in tensors
    words = {"architectures": ["BertForTokenClassification"]}
    model, params = pretrained.load(write(tmp_path / "folder", config | words, tensors))
    assert model.config.output.pooler == "each"
    assert "classifier" in params
    assert "pooler" not in params


def test_arrays_are_written_as_they_are_seen(tmp_path):
    """Whatever their strides."""
    a = np.arange(12, dtype=np.float32).reshape(3, 4)
    write_file(tmp_path / "one.safetensors", {"a": a.T, "b": np.float32(3), "c": a[:, ::2]})
    stored = read_file(tmp_path / "one.safetensors")
    np.testing.assert_equal(stored, {"a": a.T, "b": np.array(3.0), "c": a[:, ::2]})


@pytest.mark.parametrize("family", ["gpt2", "llama", "t5"])
def test_weights_may_stay_bfloat16(family, tmp_path):
    """The outputs are those of the same numbers in float32, bit by bit: products are in float32."""
    folder = golden_folder(tmp_path / "folder", family)
    model, params = pretrained.load(folder, param_dtype="bfloat16")
    assert {a.dtype for a in jax.tree.leaves(params)} == {jnp.dtype("bfloat16")}
    exact = pretrained.load(folder)[1]
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b.astype(a.dtype)), params, exact)
    assert model.config.compute.dtype == "float32"
    given, wider = split(FAMILIES[family])[2], jax.tree.map(lambda a: a.astype("float32"), params)
    got, expected = (peer_outputs.run(model, p, given)["logits"] for p in (params, wider))
    np.testing.assert_array_equal(got, expected)
    assert saved(tmp_path / "saved", model, params)["dtype"] == "bfloat16"
    again = pretrained.load(tmp_path / "saved", param_dtype="bfloat16")[1]
    jax.tree.map(np.testing.assert_array_equal, params, again)
    with pytest.raises(ValueError, match=r"unknown param_dtype 'bf16': known: .*bfloat16"):
        pretrained.load(folder, param_dtype="bf16")


def test_each_weight_goes_where_it_belongs(tmp_path):
    """By a function of its name and shape, or by a tree."""
    folder = golden_folder(tmp_path / "folder", "llama")
    mesh = jax.make_mesh((2,), ("x",), devices=jax.devices()[:2])
    asked = {}

    def half(path, shape):
        even = next((i for i, n in enumerate(shape) if not n % 2), None)
        spec = P() if even is None else P(*[None] * even, "x")
        return asked.setdefault(path, NamedSharding(mesh, spec))

    _, plain = pretrained.load(folder)
    _, params = pretrained.load(folder, sharding=half)
    jax.tree.map(np.testing.assert_array_equal, plain, params)
    assert params["layers"]["ffn"]["up"].sharding == asked["layers", "ffn", "up"]
    held = {a.size // a.addressable_shards[0].data.size for a in jax.tree.leaves(params)}
    assert held == {2}
    found = jax.tree_util.tree_flatten_with_path(params)[0]
    assert asked.keys() == {tuple(key.key for key in keys) for keys, _ in found}
    tree = jax.tree.map(lambda a: a.sharding, params)
    _, again = pretrained.load(folder, sharding=tree)
    assert jax.tree.map(lambda a: a.sharding, again) == tree
    for part in ({}, tree | {"embedding": {}}, tree["embedding"]):
        with pytest.raises(ValueError, match=r"sharding has nothing at \w"):
            pretrained.load(folder, sharding=part)


def test_experts_of_deepseek_without_shared_ones(tmp_path):
    """transformers stores their weights all the same, of width 0."""
    config, tensors, given, _ = split(FOLDER / "deepseek_v3-experts.npz")
    shared = [name for name in tensors if "shared_experts" in name]
    empty = {n: a[:, :0] if "down_proj" in n else a[:0] for n, a in tensors.items() if n in shared}
    folder = write(tmp_path / "a", config | {"n_shared_experts": 0}, tensors | empty)
    model, params = pretrained.load(folder)
    assert model.config.ffn.experts.shared_width == 0
    # As with shared experts that write nothing.
    nothing = {n: a * ("down_proj" not in n) for n, a in tensors.items() if n in shared}
    other = pretrained.load(write(tmp_path / "b", config, tensors | nothing))
    got, expected = (peer_outputs.run(*one, given)["logits"] for one in ((model, params), other))
    close(got, expected)


@pytest.mark.parametrize("prefix", ["_orig_mod.", "module.", "module._orig_mod."])
@pytest.mark.parametrize("family", ["gpt2", "bert"])
def test_names_of_a_wrapped_module(family, prefix, tmp_path):
    """torch.compile and DistributedDataParallel put theirs before all; before some it is no name of
    the model."""
    config, tensors, _, _ = split(FAMILIES[family])
    plain = pretrained.load(write(tmp_path / "plain", config, tensors))[1]
    wrapped = {prefix + name: a for name, a in tensors.items()}
    _, params = pretrained.load(write(tmp_path / "wrapped", config, wrapped))
    jax.tree.map(np.testing.assert_array_equal, plain, params)
    first = next(iter(tensors))
    partly = tensors | {prefix + first: tensors[first]}
    with pytest.raises(ValueError, match=re.escape(prefix + first)):
        pretrained.load(write(tmp_path / "partly", config, partly))
