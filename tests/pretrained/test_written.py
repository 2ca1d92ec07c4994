"""Models of ours as published folders: shared, tied and with deltas."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import peer_outputs
import pytest
from conftest import deep
from goldens import FAMILIES, SMALL, close, golden_folder, split
from random_models import random_params

from attnlab import pretrained
from attnlab.heads import Wide
from attnlab.models import FFN, Attention, Compute, EncoderConfig
from attnlab.transforms import detect_sharing


def check_written(model, params, given, folder):
    """Saved and loaded again: the same outputs, and the same sharing where it is looked for."""
    pretrained.save(folder, model, params)
    again, read = pretrained.load(folder)
    both = (peer_outputs.run(m, p, given)["logits"] for m, p in ((model, params), (again, read)))
    close(*both)
    found, once = pretrained.load(folder, detect_sharing=True, compute=Compute(dtype="bfloat16"))
    assert found.config.compute == Compute(dtype="bfloat16")
    jax.tree.map(np.testing.assert_array_equal, once, params)
    return found.config, read


@pytest.mark.parametrize("family", deep(["bert", "albert", "t5"], "t5"))
def test_a_shared_model_is_written_unshared(family, tmp_path):
    """Where the format cannot say it, every layer gets its copy."""
    model, params = pretrained.load(golden_folder(tmp_path / "theirs", family))
    apart = {"encoder": EncoderConfig(sharing="separate")} if family == "t5" else {}
    shared = dataclasses.replace(model.config, sharing="ffn_only", **apart).build()
    layers = {
        part: jax.tree.map(lambda a, n=n: jnp.concatenate([a, 0.9 * a])[:n], params["layers"][part])
        for part, n in shared.config.plan.num_groups.items()
    }
    given, params = split(FAMILIES[family])[2], params | {"layers": layers}
    found, _ = check_written(shared, params, given, tmp_path / "ours")
    assert found.plan == shared.config.plan


def test_an_encoder_tied_to_its_decoder_is_written_twice(tmp_path):
    model, params = pretrained.load(golden_folder(tmp_path / "theirs", "t5"))
    tied = dataclasses.replace(model.config, encoder=EncoderConfig(shares_decoder=True)).build()
    params = {name: a for name, a in params.items() if not name.startswith("encoder_")}
    found, read = check_written(tied, params, split(FAMILIES["t5"])[2], tmp_path / "ours")
    assert "encoder_layers" in read
    assert found.encoder.shares_decoder


BITS = [
    # of a weight in each layer, groups of attention: NaN, zeros of different sign, NaNs
    ([0x7FC00000] * 3, (0, 0, 0)),
    ([1 << 31] * 3, (0, 0, 0)),
    ([0, 1 << 31, 0], (0, 1, 0)),
    ([0x7FC00000, 0x7FC00001, 0x7FC00000], (0, 1, 0)),
]


@pytest.mark.parametrize(("bits", "groups"), BITS)
def test_layers_of_equal_bits_are_shared_and_no_others(bits, groups):
    config = dataclasses.replace(SMALL, num_layers=3)
    params = random_params(config, seed=0)
    params["layers"] = jax.tree.map(lambda a: np.stack([a[0]] * 3), params["layers"])
    params["layers"]["attention"]["q"].view(np.uint32)[:, 0, 0, 0] = bits
    found, once = detect_sharing(config, params)
    assert (found.plan["attention"], found.plan["ffn"]) == (groups, (0, 0, 0))
    q = np.asarray(once["layers"]["attention"]["q"]).view(np.uint32)
    assert q[:, 0, 0, 0].tolist() == bits[: max(groups) + 1]


def test_a_model_of_ours_is_written_where_a_format_can_say_it(tmp_path):
    params = random_params(SMALL, seed=0)
    pretrained.save(tmp_path / "folder", SMALL.build(), params)
    assert json.loads((tmp_path / "folder" / "config.json").read_text())["model_type"] == "gpt2"
    jax.tree.map(np.testing.assert_array_equal, params, pretrained.load(tmp_path / "folder")[1])
    for fields in (dict(heads=Wide(num_heads=3)), dict(attention=Attention(window=2))):
        other = dataclasses.replace(SMALL, **fields)
        with pytest.raises(ValueError, match=r"can store this model.*gpt2: "):
            pretrained.save(tmp_path / "other", other.build(), random_params(other, seed=0))


def test_the_error_of_a_model_that_no_format_can_store_is_short(tmp_path):
    """Three families at most: the one it was loaded as, then those that differ least."""
    model, params = pretrained.load(golden_folder(tmp_path / "folder", "opt"))
    changes = dict(heads=Wide(num_heads=4), norm=dataclasses.replace(model.config.norm, eps=0.5))
    other = dataclasses.replace(model.config, **changes).build()
    with pytest.raises(
        ValueError, match=r"model\. opt: \w.*; \w+: .*; \w+: .*Checkpoints"
    ) as caught:
        pretrained.save(tmp_path / "saved", other, params)
    message = str(caught.value)
    assert sum(f" {family}: " in message for family in pretrained.FAMILIES) == 3
    assert len(message) < 800
    with pytest.raises(ValueError, match=r"model\. llama: ") as caught:
        pretrained.save(tmp_path / "saved", other, params, family="llama")
    assert sum(f" {family}: " in str(caught.value) for family in pretrained.FAMILIES) == 1


def test_the_names_that_an_error_lists_are_listed_once():
    config = dataclasses.replace(SMALL, ffn=FFN(activation="gated_relu"))
    with pytest.raises(ValueError, match=r"ffn\.activation must be one of") as caught:
        pretrained.FAMILIES["gpt2"].write(config)
    assert str(caught.value).count("'gelu_tanh'") == 1


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["relaxed:1", "attention=0,1 kv=0,1 ffn=0,0"])
def test_parts_that_no_format_knows_are_added_up(plan, tmp_path):
    """Deltas are not lost without a word; keys that layers reuse are refused."""
    config = dataclasses.replace(SMALL, sharing=plan, delta_rank=2)
    model, params, tokens = config.build(), random_params(config, seed=0), jnp.asarray([[3, 1, 4]])
    pretrained.save(tmp_path / "model", model, params)
    again, read = pretrained.load(tmp_path / "model")
    got, expected = again.apply({"params": read}, tokens), model.apply({"params": params}, tokens)
    close(got.logits, expected.logits)
    reuses = dataclasses.replace(config, sharing="cla:1")
    for wrong, message in (
        (params, "params are not those of this model"),
        (random_params(reuses, seed=0), "have no projections of their own"),
    ):
        with pytest.raises(ValueError, match=message):
            pretrained.save(tmp_path / "other", reuses.build(), wrong)
    assert not (tmp_path / "other").exists()
