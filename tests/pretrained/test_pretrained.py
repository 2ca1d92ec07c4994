"""Published formats without torch or transformers: golden outputs, old styles, damage, abuse."""

import dataclasses
import json
import os
import pickle
import re

import jax
import jax.numpy as jnp
import numpy as np
import peer_outputs
import pytest
from conftest import deep
from goldens import ACTIVATIONS, ATTRIBUTES, FAMILIES, GOLDEN, SOME_FAMILIES, close, split, write
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from attnlab import pretrained
from attnlab.pretrained.tensors import read_file, write_file


@pytest.mark.parametrize("family", FAMILIES)
def test_defaults_of_a_variant_are_attributes(family):
    one = pretrained.FAMILIES[family]
    assert set(one.defaults) <= {attribute.name for attribute in one.attributes}


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
    "gpt2": "scale_attn_weights scale_attn_by_inverse_layer_idx reorder_and_upcast_attn",
    "t5": "scale_decoder_outputs is_gated_act dense_act_fn",
    "vit": "pooler_act pooler_output_size dtype encoder_stride",
}
"""Family -> words of config.json that older programs did not have."""
OLDER = {
    **{name: {"position_embedding_type": "absolute"} for name in BERTS},
    "bloom": {"bias_dropout_fusion": True},
    "falcon": {"apply_residual_connection_post_layernorm": False},
    "gemma3_text": {"sliding_window_pattern": 2, "cache_implementation": "hybrid"},
    "gpt2": {"n_ctx": 17, "summary_type": "cls_index"},
    "gpt_neox": {"rotary_pct": 0.5, "attention_probs_dropout_prob": 0, "hidden_dropout_prob": 0},
    "gpt_oss": {"rope_scaling": {"rope_type": "default"}},  # null is not the same in all versions
    "modernbert": {"global_attn_every_n_layers": 3, "layer_norm_eps": 1e-5},
    "smollm3": {"max_window_layers": 28},
    "starcoder2": {"mlp_type": "default", "norm_type": "layer_norm", "rms_norm_eps": 0.5}
    | {"activation_function": "gelu", "layer_norm_epsilon": 0.5},
    "t5": {"n_positions": 512, "output_past": True, "task_specific_params": {}},
    "vit": {"id2label": {str(i): f"a kind of {i}" for i in range(5)}},
}
"""Family -> words that they had."""


def old_words(family, config):
    """The same config.json as older programs wrote it."""
    config = {n: a for n, a in config.items() if n not in NOT_YET.get(family, "").split()}
    if family == "bloom":
        config["n_embed"] = config.pop("hidden_size")
    if family == "ministral3":  # no older than transformers 5
        return config
    said = config.pop("rope_parameters", None)  # before transformers 5
    if said and family == "modernbert":
        bases = {f"{n}_rope_theta": said[t] for n, t in zip(("global", "local"), said, strict=True)}
        config |= {name: one["rope_theta"] for name, one in bases.items()}
    elif said:
        if family == "gemma3_text":
            config["rope_local_base_freq"] = said["sliding_attention"]["rope_theta"]
        said = said.get("full_attention", said)
        base = "rotary_emb_base" if family == "gpt_neox" else "rope_theta"
        config |= {"rope_scaling": None, base: said["rope_theta"], "pretraining_tp": 1}
        if family in ("stablelm", "glm", "glm4", "glm4_moe", "phi"):
            config["partial_rotary_factor"] = said["partial_rotary_factor"]
        gone = ("mlp_bias", "attention_bias" if family == "llama" else "")
        config = {name: a for name, a in config.items() if name not in gone}
    if said and family not in ("ministral", "cohere2", "exaone4"):  # no older than the word
        config.pop("layer_types", None)
    return config | OLDER.get(family, {})


def old_tensors(family, config, tensors):
    """The same weights as older programs stored them."""
    more, mask, one = {}, np.tril(np.ones((1, 1, 17, 17), np.float32)), np.ones(2, np.float32)
    if family in BERTS:
        for new, old in (("weight", "gamma"), ("bias", "beta")):
            end = f"LayerNorm.{new}", f"LayerNorm.{old}"
            tensors = {name.replace(*end): a for name, a in tensors.items()}
        more[f"{family}.embeddings.position_ids"] = np.arange(17)[None]
    if family == "bert":
        more["cls.predictions.decoder.weight"] = tensors["bert.embeddings.word_embeddings.weight"]
    if family == "gpt2":  # as the hub has it
        tensors = {name.removeprefix("transformer."): a for name, a in tensors.items()}
        more |= {f"h.{i}.attn.bias": mask for i in range(2)}
        more |= {f"h.{i}.attn.masked_bias": np.float32(-1e4).reshape(()) for i in range(2)}
    if family == "gpt_neox":
        more |= {f"gpt_neox.layers.{i}.attention.bias": mask > 0 for i in range(2)}
        more |= {f"gpt_neox.layers.{i}.attention.masked_bias": one[0] for i in range(2)}
    if "rope_parameters" in config and family != "modernbert":
        places = {
            "falcon": "transformer.h.{}.self_attention",
            "gpt_neox": "gpt_neox.layers.{}.attention",
        }
        at = places.get(family, "model.layers.{}.self_attn")
        more |= {f"{at.format(i)}.rotary_emb.inv_freq": one for i in range(2)}
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


@pytest.mark.parametrize("family", deep(FAMILIES, *SOME_FAMILIES))
def test_a_tensor_that_is_missing_or_of_a_wrong_shape_is_named(family, tmp_path):
    """Any one of them, unless its absence means another model: a bare one, or one without heads."""
    config, tensors, _, _ = split(FAMILIES[family])
    for name, a in tensors.items():
        short = name.removeprefix(pretrained.FAMILIES[family].table.prefix)
        wrong = np.concatenate([a] * 2)
        shapes = [re.escape(str(one.shape)) for one in (wrong, a)]
        left = {other: one for other, one in tensors.items() if other != name}
        for changed, message in (
            (left, f"missing, the first is '{short}'"),
            (left | {name: wrong}, rf"'{short}' has shape {shapes[0]}, .* asks for {shapes[1]}"),
        ):
            with pytest.raises(ValueError, match=message):
                pretrained.load(write(tmp_path / "folder", config, changed))


@pytest.mark.parametrize("family", FAMILIES)
def test_an_extra_tensor_is_named_and_can_be_ignored(family, tmp_path):
    config, tensors, _, _ = split(FAMILIES[family])
    name = "decoder.0.weight" if family == "vit" else "classifier.weight"
    more = tensors | {name: np.ones((2, 12), np.float32)}
    folder = write(tmp_path / "folder", config, more)
    with pytest.raises(ValueError, match=rf"1 tensors have no place .* '{re.escape(name)}'"):
        pretrained.load(folder)
    pretrained.load(folder, ignore=(f"{name.split('.')[0]}.*",))


@pytest.mark.parametrize(
    ("family", "copy", "original"),
    [
        ("gpt2", "lm_head.weight", "transformer.wte.weight"),
        ("bert", "cls.predictions.decoder.weight", "bert.embeddings.word_embeddings.weight"),
        ("bert", "cls.predictions.decoder.bias", "cls.predictions.bias"),
        ("modernbert", "decoder.weight", "model.embeddings.tok_embeddings.weight"),
        ("bart", "model.encoder.embed_tokens.weight", "model.shared.weight"),
        ("t5", "decoder.embed_tokens.weight", "shared.weight"),
    ],
)
def test_a_tensor_that_is_stored_twice_has_the_same_numbers(family, copy, original, tmp_path):
    """transformers 5 reads both where they differ, 4 the one or the other."""
    config, tensors, _, _ = split(FAMILIES[family])
    again = tensors[original].astype(np.float64)
    pretrained.load(write(tmp_path / "folder", config, tensors | {copy: again}))
    again[..., -1] += 1
    folder = write(tmp_path / "folder", config, tensors | {copy: again})
    short = copy.removeprefix("model.")
    with pytest.raises(ValueError, match=f"the tensor '{short}' differs"):
        pretrained.load(folder)
    for name in (copy, short):
        pretrained.load(folder, ignore=(name,))


def test_a_damaged_file_is_named(tmp_path):
    config, tensors, _, _ = split(FAMILIES["bert"])
    folder = write(tmp_path / "folder", config, tensors)
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    length = int.from_bytes(whole[:8], "little")
    damaged = [whole[:kept] for kept in (0, 5, 100, len(whole) - 1)]
    damaged.append(whole[:8] + b"x" * length + whole[8 + length :])
    damaged.append(whole.replace(b'"F32"', b'"F33"', 1))
    for found in damaged:
        path.write_bytes(found)
        with pytest.raises(ValueError, match=r"model\.safetensors is no whole safetensors file"):
            pretrained.load(folder)
    write_file(path, tensors | {"more": np.ones(2, np.uint32)})
    with pytest.raises(ValueError, match="'more' has the unknown dtype 'U32'"):
        pretrained.load(folder)


def test_arrays_are_written_as_they_are_seen(tmp_path):
    """Whatever their strides."""
    a = np.arange(12, dtype=np.float32).reshape(3, 4)
    write_file(tmp_path / "one.safetensors", {"a": a.T, "b": np.float32(3), "c": a[:, ::2]})
    stored = read_file(tmp_path / "one.safetensors")
    assert set(stored) == {"a", "b", "c"}
    np.testing.assert_array_equal(stored["a"], a.T)
    np.testing.assert_array_equal(stored["c"], a[:, ::2])
    assert (stored["b"].shape, stored["b"].item()) == ((), 3.0)


class Trap:
    """Unpickled, it leaves a folder behind."""

    def __init__(self, place):
        self.place = place

    def __reduce__(self):
        return os.mkdir, (str(self.place),)


def test_a_pickle_is_refused_and_never_opened(tmp_path):
    config, tensors, _, _ = split(FAMILIES["bert"])
    folder = write(tmp_path / "folder", config, tensors)
    trap = [pickle.dumps(Trap(tmp_path / "sprung"), protocol) for protocol in range(2, 6)]
    for content in (*trap, b"PK" + bytes(700)):
        (folder / "model.safetensors").write_bytes(content)
        with pytest.raises(ValueError, match=r"pickle .* never opened"):
            pretrained.load(folder)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"holds no model\.safetensors .* never opened"):
        pretrained.load(folder)
    assert not (tmp_path / "sprung").exists()


@pytest.mark.parametrize("family", FAMILIES)
def test_attributes_that_change_the_computation_are_refused_by_name(family, tmp_path):
    config, tensors, _, _ = split(FAMILIES[family])
    folder = write(tmp_path / "folder", config, tensors)

    def load(**words):
        (folder / "config.json").write_text(json.dumps(config | words))
        return pretrained.load_config(folder, ignore=("my_note",))

    read = {one.name for one in pretrained.FAMILIES[family].attributes}
    wrong = {name: "mish" for name in ACTIVATIONS if name in read & set(config)}
    wrong |= ATTRIBUTES.get(family, {}) | {"per_layer_config": {"0": {}}}
    for name, value in wrong.items():
        with pytest.raises(ValueError, match=f"config.json: .*{name} ="):
            load(**{name: value})
    assert load(my_note=1).width > 0
    with pytest.raises(ValueError, match=r"unknown model_type .* did you mean"):
        load(model_type=family + "x")


def rope(kind, **words):
    """rope_parameters of a kind."""
    return {"rope_parameters": {"rope_type": kind} | words}


YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 50.0, "truncate": False}
NO_ROPE = {"rope_parameters": None}


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("llama", rope("su3", factor=4.0), "rope_type = 'su3' is not supported"),
        ("llama", rope("yarn_smooth", factor=2.0, beta_fast=32, beta_slow=1),
         "rope_type = 'yarn_smooth' is not supported"),
        ("llama", rope("longrope", short_factor="x"), "short_factor = 'x' of the rotary"),
        ("llama", rope("longrope", short_factor=[1.0]), "rope_type 'longrope' needs long_factor"),
        ("llama", rope("longrope", short_factor=[1.0], long_factor=[1.0, 2.0]),
         "long_factor = [1.0, 2.0] has 2 numbers, short_factor 1"),
        ("llama", rope("longrope", short_factor=[1.0], long_factor=[2.0]),
         "longrope needs 2 of each"),
        ("llama", rope("yarn", factor=2.0, truncate=1), "truncate = 1 of the rotary"),
        ("llama", rope("yarn", factor=2.0, mscale=0), "mscale = 0 of the rotary"),
        ("llama", rope("linear", factor="two"), "factor = 'two' of the rotary positions"),
        ("llama", rope("linear"), "rope_type 'linear' needs factor"),
        ("llama", NO_ROPE | {"rope_scaling": {"type": "linear"}}, "rope_type 'linear' needs"),
        ("llama", rope("default", mscale=2), "mscale = 2 of the rotary positions"),
        ("llama", rope("llama3", factor=2, low_freq_factor=4, high_freq_factor=1),
         "low_freq_factor must be less than high_freq_factor"),
        ("llama", rope("default", partial_rotary_factor=0.5),
         "partial_rotary_factor = 0.5 is not supported in this"),
        # What versions of transformers read differently.
        ("cohere", NO_ROPE, "rope_parameters has no rope_theta"),
        ("olmo3", NO_ROPE, "rope_parameters has no rope_theta"),
        ("olmo3", NO_ROPE | {"rope_theta": 9.0}, "rope_theta = 9.0 is not supp"),
        ("gpt_oss", NO_ROPE | {"rope_theta": 9.0}, "no rope_type, and its"),
        ("modernbert", {"rope_scaling": rope("linear", factor=2.0)}, "rope_scaling = {'rope_param"),
        ("gemma3_text", {"rope_parameters": {"full_attention": YARN}}, "truncate = False"),
        ("phi3", rope("linear", factor=2.0), "rope_type = 'linear' is not supported"),
    ],
)  # fmt: skip
def test_rotary_positions_that_are_not_known_are_refused_by_name(
    family, changes, message, tmp_path
):
    config, tensors, _, _ = split(FAMILIES[family])
    with pytest.raises(ValueError, match=re.escape(message)):
        pretrained.load_config(write(tmp_path / "folder", config | changes, tensors))


def test_gelu_of_gemma_is_the_tanh_kind(tmp_path):
    """What config.json of the first releases calls "gelu", and no file that is written."""
    config, tensors, _, _ = split(FAMILIES["gemma"])
    for words in ({}, {"hidden_activation": "gelu_new"}):
        folder = write(tmp_path / "one", config | {"hidden_act": "gelu"} | words, tensors)
        model, params = pretrained.load(folder)
        assert model.config.ffn.activation == "gated_gelu_tanh"
    for kind in ("gated_gelu", "gated_gelu_tanh"):
        ffn = dataclasses.replace(model.config.ffn, activation=kind)
        changed = dataclasses.replace(model.config, ffn=ffn).build()
        pretrained.save(tmp_path / "two", changed, params, family="gemma")
        saved = json.loads((tmp_path / "two" / "config.json").read_text())
        assert saved["hidden_act"] != "gelu"
        assert pretrained.load_config(tmp_path / "two") == changed.config


def test_a_folder_without_a_config(tmp_path):
    with pytest.raises(ValueError, match=r"config\.json is missing"):
        pretrained.load(tmp_path)
    with pytest.raises(ValueError, match=r"there is no folder '.*nowhere'"):
        pretrained.load(tmp_path / "nowhere")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="is not JSON"):
        pretrained.load(tmp_path)


def test_several_files_with_an_index(tmp_path):
    config, tensors, _, _ = split(FAMILIES["bert"])
    whole = pretrained.load(write(tmp_path / "whole", config, tensors))[1]
    folder = tmp_path / "parts"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    names = sorted(tensors)
    index = {name: f"part-{i % 2}.safetensors" for i, name in enumerate(names)}
    for i in range(2):
        write_file(folder / f"part-{i}.safetensors", {name: tensors[name] for name in names[i::2]})

    def say(index):
        text = json.dumps({"weight_map": index})
        (folder / "model.safetensors.index.json").write_text(text)

    say(index)
    jax.tree.map(np.testing.assert_array_equal, whole, pretrained.load(folder)[1])
    say(index | {names[0]: "part-1.safetensors"})
    with pytest.raises(ValueError, match=f"disagree about the tensor '{names[0]}'"):
        pretrained.load(folder)
    say(index | {names[0]: "../whole/model.safetensors"})
    with pytest.raises(ValueError, match=r"names the file '\.\./whole/model\.safetensors'"):
        pretrained.load(folder)


def test_a_config_is_read_without_a_weight(tmp_path):
    """So weights that cannot be loaded do not matter, and may be larger than memory."""
    config, tensors, _, _ = split(FAMILIES["bert"])
    wrong = {name: np.full_like(a, np.nan) for name, a in tensors.items()}
    folder = write(tmp_path / "folder", config, wrong)
    assert pretrained.load_config(folder).width == config["hidden_size"]
    with pytest.raises(ValueError, match=r"NaN|nan"):
        pretrained.load(folder)


@pytest.mark.parametrize("family", ["gpt2", "llama", "t5"])
def test_weights_may_stay_bfloat16(family, tmp_path):
    """The outputs are those of the same numbers in float32, bit by bit: products are in float32."""
    config, tensors, given, _ = split(FAMILIES[family])
    folder = write(tmp_path / "folder", config, tensors)
    model, params = pretrained.load(folder, param_dtype="bfloat16")
    assert {a.dtype for a in jax.tree.leaves(params)} == {jnp.dtype("bfloat16")}
    exact = pretrained.load(folder)[1]
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b.astype(a.dtype)), params, exact)
    assert model.config.compute.dtype == "float32"
    wider = jax.tree.map(lambda a: a.astype(jnp.float32), params)
    got, expected = (peer_outputs.run(model, p, given)["logits"] for p in (params, wider))
    np.testing.assert_array_equal(got, expected)
    pretrained.save(tmp_path / "saved", model, params)
    assert json.loads((tmp_path / "saved" / "config.json").read_text())["dtype"] == "bfloat16"
    again = pretrained.load(tmp_path / "saved", param_dtype="bfloat16")[1]
    jax.tree.map(np.testing.assert_array_equal, params, again)
    with pytest.raises(ValueError, match=r"unknown param_dtype 'bf16': known: .*bfloat16"):
        pretrained.load(folder, param_dtype="bf16")


def test_each_weight_goes_where_it_belongs(tmp_path):
    """By a function of its name and shape, or by a tree."""
    config, tensors, _, _ = split(FAMILIES["llama"])
    folder = write(tmp_path / "folder", config, tensors)
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
    assert asked.keys() == {tuple(k.key for k in keys) for keys, _ in
                            jax.tree_util.tree_flatten_with_path(params)[0]}  # fmt: skip
    tree = jax.tree.map(lambda a: a.sharding, params)
    _, again = pretrained.load(folder, sharding=tree)
    assert jax.tree.map(lambda a: a.sharding, again) == tree
    for part in ({}, tree | {"embedding": {}}, tree["embedding"]):
        with pytest.raises(ValueError, match=r"sharding has nothing at \w"):
            pretrained.load(folder, sharding=part)


@pytest.mark.parametrize(
    ("name", "reason"),
    [("qwen3_next", "linear-attention"), ("mamba", "state-space"), ("deberta-v2", "disentangled")],
)
def test_what_has_no_heads_here_is_refused_with_the_reason(name, reason, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": name}))
    with pytest.raises(ValueError, match=f"'{name}': .*{reason}"):
        pretrained.load_config(tmp_path)


def test_yarn_of_deepseek_scales_scores_and_rotated_numbers(tmp_path):
    config, tensors, _, _ = split(FAMILIES["deepseek_v3"])
    yarn = {"rope_type": "yarn", "factor": 40.0, "rope_theta": 1e4, "mscale": 1.0}
    yarn |= {"mscale_all_dim": 1.0, "original_max_position_embeddings": 8}
    folder = write(tmp_path / "folder", config | {"rope_parameters": yarn}, tensors)
    scales = pretrained.load_config(folder).attention.layer_scales
    assert set(scales) == {(0.1 * np.log(40.0) + 1) ** 2}
    assert pretrained.load_config(folder).positions.scale == 1
    other = config | {"rope_parameters": yarn | {"mscale": 0.7}}
    found = pretrained.load_config(write(tmp_path / "folder", other, tensors))
    assert found.attention.layer_scales == scales
    expected = (0.07 * np.log(40.0) + 1) / (0.1 * np.log(40.0) + 1)
    np.testing.assert_allclose(found.positions.scale, expected)


def test_yarn_scales_the_scores_of_layers_with_rotary_positions_alone(tmp_path):
    config, tensors, _, _ = split(FAMILIES["smollm3"])
    yarn = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 50.0, "attention_factor": 1.5}
    yarn |= {"original_max_position_embeddings": 8}
    folder = write(tmp_path / "folder", config | {"rope_parameters": yarn}, tensors)
    model, params = pretrained.load(folder)
    assert config["no_rope_layers"] == [1, 1, 1, 0]
    assert model.config.attention.layer_scales == (2.25, 2.25, 2.25, 1.0)
    pretrained.save(tmp_path / "saved", model, params, family="smollm3")
    assert pretrained.load_config(tmp_path / "saved") == model.config


def test_the_token_that_positions_do_not_count(tmp_path):
    """transformers has no choice of it for MPNet."""

    def load_pad(family, pad):
        config, tensors, _, _ = split(FAMILIES[family])
        folder = write(tmp_path / "folder", config | {"pad_token_id": pad}, tensors)
        return pretrained.load_config(folder).positions.pad_token

    assert [load_pad("roberta", 0), load_pad("roberta", 4), load_pad("mpnet", 4)] == [0, 4, 1]


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
