"""Models of ours as published folders: shared, tied and with deltas."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import peer_outputs
import pytest
from goldens import FAMILIES, SMALL, close, golden_folder, split
from random_models import random_params

from attnlab import pretrained
from attnlab.heads import Wide
from attnlab.models import FFN, Attention, Dropout, EncoderConfig
from attnlab.transforms import detect_sharing


def test_an_encoder_tied_to_its_decoder_is_written_twice(tmp_path):
    """And is one again where sharing is looked for."""
    model, params = pretrained.load(golden_folder(tmp_path / "theirs", "t5"))
    tied = dataclasses.replace(model.config, encoder=EncoderConfig(shares_decoder=True)).build()
    params = {name: a for name, a in params.items() if not name.startswith("encoder_")}
    pretrained.save(tmp_path / "ours", tied, params)
    again, read = pretrained.load(tmp_path / "ours")
    assert "encoder_layers" in read
    given = split(FAMILIES["t5"])[2]
    both = (peer_outputs.run(m, p, given)["logits"] for m, p in ((tied, params), (again, read)))
    close(*both)
    found, once = pretrained.load(tmp_path / "ours", detect_sharing=True)
    assert found.config.encoder.shares_decoder
    jax.tree.map(np.testing.assert_array_equal, once, params)


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


def test_the_error_of_a_model_that_no_format_can_store_is_short(tmp_path):
    """Three families at most: the one it was loaded as, then those that differ least."""
    opt = pretrained.load_config(golden_folder(tmp_path / "folder", "opt"))
    wide = dict(heads=Wide(num_heads=4), norm=dataclasses.replace(opt.norm, eps=0.5))
    drops = dict(dropout=Dropout(embedding=0.5, places=opt.dropout.places))
    for config, fields, family, reasons, count in (
        (opt, wide, "", r"opt: \w.*; \w+: .*; \w+: .*Checkpoints", 3),
        (opt, wide, "llama", "llama: ", 1),
        (opt, drops, "opt", "opt: dropout at each place would be ", 1),
        (SMALL, dict(heads=Wide(num_heads=3)), "", ".*gpt2: ", 3),
        (SMALL, dict(attention=Attention(window=2)), "", ".*gpt2: ", 3),
    ):
        other = dataclasses.replace(config, **fields).build()
        with pytest.raises(ValueError, match=rf"can store this model\. {reasons}") as caught:
            pretrained.save(tmp_path / "saved", other, {}, family=family)
        message = str(caught.value)
        assert sum(f" {one}: " in message for one in pretrained.FAMILIES) == count
        assert len(message) < 800


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
        (random_params(reuses, seed=0), "attend to earlier keys"),
    ):
        with pytest.raises(ValueError, match=message):
            pretrained.save(tmp_path / "other", reuses.build(), wrong)
    assert not (tmp_path / "other").exists()
