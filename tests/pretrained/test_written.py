"""Models of ours as published folders: shared, tied and with deltas."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import peer_outputs
import pytest
from conftest import deep
from goldens import FAMILIES, close, split, write

from attnlab import pretrained
from attnlab.heads import Standard, Wide
from attnlab.models import FFN, Attention, Compute, EncoderConfig, ModelConfig


@pytest.mark.parametrize("family", deep(["bert", "albert", "t5"], "t5"))
def test_a_shared_model_is_written_unshared(family, tmp_path):
    """Where the format cannot say it, every layer gets its copy: the same outputs."""
    config, tensors, given, _ = split(FAMILIES[family])
    model, params = pretrained.load(write(tmp_path / "theirs", config, tensors))
    apart = {"encoder": EncoderConfig(sharing="separate")} if family == "t5" else {}
    shared = dataclasses.replace(model.config, sharing="ffn_only", **apart).build()
    sizes = shared.config.plan.num_groups
    layers = {
        part: jax.tree.map(lambda a, n=n: jnp.concatenate([a, 0.9 * a])[:n], params["layers"][part])
        for part, n in sizes.items()
    }
    params = params | {"layers": layers}
    pretrained.save(tmp_path / "ours", shared, params)
    again, params_again = pretrained.load(tmp_path / "ours")
    ours, theirs = (
        peer_outputs.run(m, p, given)["logits"]
        for m, p in ((shared, params), (again, params_again))
    )
    close(ours, theirs)
    found, once = pretrained.load(tmp_path / "ours", detect_sharing=True)
    assert found.config.plan == shared.config.plan
    jax.tree.map(np.testing.assert_array_equal, once["layers"], layers)


def test_an_encoder_tied_to_its_decoder_is_written_twice(tmp_path):
    config, tensors, given, _ = split(FAMILIES["t5"])
    model, params = pretrained.load(write(tmp_path / "theirs", config, tensors))
    tied = dataclasses.replace(model.config, encoder=EncoderConfig(shares_decoder=True)).build()
    params = {name: a for name, a in params.items() if not name.startswith("encoder_")}
    pretrained.save(tmp_path / "ours", tied, params)
    again, params_again = pretrained.load(tmp_path / "ours")
    assert "encoder_layers" in params_again
    ours, theirs = (
        peer_outputs.run(m, p, given)["logits"] for m, p in ((tied, params), (again, params_again))
    )
    close(ours, theirs)
    compute = Compute(dtype="bfloat16")
    found, once = pretrained.load(tmp_path / "ours", detect_sharing=True, compute=compute)
    assert (found.config.encoder.shares_decoder, found.config.compute) == (True, compute)
    jax.tree.map(np.testing.assert_array_equal, once, params)


@pytest.mark.slow
def test_a_model_of_ours_is_written_where_a_format_can_say_it(tmp_path):
    config = ModelConfig(
        vocab_size=19,
        max_len=9,
        width=12,
        heads=Standard(num_heads=3, biases=("q", "k", "v", "o")),
        ffn=FFN(activation="gelu_tanh"),
    )
    for fields, family in (
        (dict(), "gpt2"),
        (dict(heads=Wide(num_heads=3)), ""),
        (dict(attention=Attention(window=2)), ""),
    ):
        model = dataclasses.replace(config, **fields).build()
        params = model.init(jax.random.key(0), jnp.zeros((1, 2), jnp.int32))["params"]
        if not family:
            with pytest.raises(ValueError, match=r"can store this model.*gpt2: "):
                pretrained.save(tmp_path / "folder", model, params)
            continue
        pretrained.save(tmp_path / "folder", model, params)
        said = json.loads((tmp_path / "folder" / "config.json").read_text())
        assert said["model_type"] == family
        params_again = pretrained.load(tmp_path / "folder")[1]
        jax.tree.map(np.testing.assert_array_equal, params, params_again)


PARTS = ["relaxed:1", "attention=0,1 kv=0,1 ffn=0,0"]


@pytest.mark.slow
@pytest.mark.parametrize("plan", deep(PARTS, "relaxed:1"))
def test_parts_that_no_format_knows_are_added_up(plan, tmp_path):
    """Deltas are not lost without a word; keys that layers reuse are refused."""
    config = dataclasses.replace(
        pretrained.published_config("gpt2"),
        vocab_size=11, max_len=9, width=12, heads=Standard(num_heads=3, biases=tuple("qkvo")),
        ffn=FFN(width=7, activation="gelu_tanh"), num_layers=2, sharing=plan, delta_rank=2,
    )  # fmt: skip
    model, tokens, rng = config.build(), jnp.asarray([[3, 1, 4]]), np.random.default_rng(0)
    init = jax.eval_shape(model.init, jax.random.key(0), tokens)["params"]
    params = jax.tree.map(lambda a: jnp.asarray(rng.normal(size=a.shape), a.dtype), init)
    pretrained.save(tmp_path / "model", model, params)
    again, read = pretrained.load(tmp_path / "model")
    got, expected = again.apply({"params": read}, tokens), model.apply({"params": params}, tokens)
    close(got.logits, expected.logits)
    reuses = dataclasses.replace(config, sharing="cla:1").build()
    with pytest.raises(ValueError, match="params are not those of this model"):
        pretrained.save(tmp_path / "other", reuses, params)
    params = reuses.init(jax.random.key(0), tokens)["params"]
    with pytest.raises(ValueError, match="have no maps of their own to give back"):
        pretrained.save(tmp_path / "other", reuses, params)
    assert not (tmp_path / "other").exists()
