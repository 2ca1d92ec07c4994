"""The picture of a model, and that its numbers are those of the accounting."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from commands import command

from attnlab import pretrained
from attnlab.heads import Standard, TalkingHeads, Wide
from attnlab.lab.model_summary import inspect_model
from attnlab.models import (
    FFN,
    Attention,
    EncoderConfig,
    ModelConfig,
    applied_parameters,
    flops_per_token,
    num_parameters,
)
from attnlab.sharing.plan import Plan

WIDE = Wide(num_heads=3, biases=("q", "k", "v", "o"))
CONFIG = ModelConfig(width=12, num_layers=10, heads=WIDE, sharing="cycle_rev:4")

# What GPT-2's config.json can say.
STANDARD = Standard(num_heads=3, biases=("q", "k", "v", "o"))
PUBLISHED = ModelConfig(width=12, heads=STANDARD, ffn=FFN(activation="gelu_tanh"))


def test_the_plan_as_a_picture():
    lines = inspect_model(CONFIG, 8, 16).splitlines()
    assert lines[0] == "decoder, 10 layers of width 12, 3 wide heads, plan cycle_rev:4"
    assert lines[2] == "decoder      0 1 2 3 4 5 6 7 8 9"
    assert lines[3] == "  attention  0 1 2 3 0 1 2 3 3 2"
    assert lines[4] == "  ffn        0 1 2 3 0 1 2 3 3 2"


def test_who_makes_keys_and_who_reads_them():
    config = dataclasses.replace(CONFIG, num_layers=4, sharing="cla:2")
    lines = inspect_model(config, 8, 16).splitlines()
    assert lines[3:6] == ["  attention  0 1 2 3", "  kv         0 < 1 <", "  ffn        0 1 2 3"]
    unshared = inspect_model(dataclasses.replace(config, sharing="separate"), 8, 16)
    stored = [
        int(re.search(r"cache per token *([0-9,]+)", t)[1].replace(",", ""))
        for t in ("\n".join(lines), unshared)
    ]
    assert 2 * stored[0] == stored[1]


def test_parts_add_up():
    plan = Plan(attention=(0, 0, 1), ffn=(0, 1, 2))
    config = dataclasses.replace(CONFIG, num_layers=3, sharing=plan)
    text = inspect_model(config, 8, 16)
    rows = [line.split() for line in text.split("\n\n")[2].splitlines()[1:]]
    unique, applied = (sum(int(r[i].replace(",", "")) for r in rows) for i in (-2, -1))
    assert (unique, applied) == (num_parameters(config), applied_parameters(config))
    assert [row[1:3] for row in rows[:2]] == [["attention", "2"], ["ffn", "3"]]
    assert f"{flops_per_token(config, 16):,} at length 16" in text
    assert "plan by hand" in text
    assert f"({applied / unique:.2f} x unique)" in text
    held = [a.nbytes for name, a in config.init_cache(1, 1).items() if name != "length"]
    assert f"{sum(held):,} bytes in float32" in text


def test_an_encoder_alone_adds_up():
    config = dataclasses.replace(CONFIG, kind="encoder", num_layers=3, sharing="albert")
    rows = [line.split() for line in inspect_model(config, 8, 16).split("\n\n")[2].splitlines()[1:]]
    assert sum(int(row[-2].replace(",", "")) for row in rows) == num_parameters(config)


@pytest.mark.parametrize("share", [False, True])
def test_two_stacks_add_up(share):
    fields = {"kind": "encoder_decoder", "num_layers": 3, "sharing": "albert", "heads": STANDARD}
    config = dataclasses.replace(CONFIG, **fields, encoder=EncoderConfig(shares_decoder=share))
    text = inspect_model(config, 8, 16)
    rows = [line.split() for line in text.split("\n\n")[2].splitlines()[1:]]
    unique, applied = (sum(int(r[i].replace(",", "")) for r in rows) for i in (-2, -1))
    assert (unique, applied) == (num_parameters(config), applied_parameters(config))
    assert "  cross      0 0 0" in text
    assert ("both stacks use the same parameter groups" in text) == share


def test_a_published_folder(tmp_path):
    config = dataclasses.replace(PUBLISHED, num_layers=4)
    tokens = jnp.zeros((1, 3), jnp.int32)
    params = jax.eval_shape(config.build().init, jax.random.key(0), tokens)["params"]
    params = jax.tree.map(lambda a: np.zeros(a.shape, a.dtype), params)
    pretrained.save(tmp_path / "model", config.build(), params)
    told = command("experiments.inspect_model", f"--path={tmp_path / 'model'}")
    assert told.returncode == 0, told.stderr
    assert told.stdout.startswith("decoder, 4 layers of width 12, 3 standard heads")
    assert f"{num_parameters(config):,}" in told.stdout
    assert f"at 1 texts of {config.max_len} tokens" in told.stdout
    neither = command("experiments.inspect_model")
    assert neither.returncode == 1
    assert "--config" in neither.stderr


def test_the_chosen_order_and_backend_are_marked():
    config = dataclasses.replace(CONFIG, attention=Attention(implementation="xla"))
    told = inspect_model(config, 8, 16)
    assert "  * absorbed" in told
    assert "  * xla" in told
    factored = dataclasses.replace(CONFIG, attention=Attention(order="factored"))
    assert "  * factored" in inspect_model(factored, 8, 16)


def test_what_is_told_of_attention_is_what_runs():
    """Talking heads leave the blocks, shared keys the other orders; a source is read apart."""
    talking = dataclasses.replace(WIDE, extras=(TalkingHeads(),))
    config = dataclasses.replace(CONFIG, max_len=2048, heads=talking)
    told = inspect_model(config, 64, 2048)
    assert "  * dense" in told
    assert "    blockwise    talking_heads needs the scores of all heads at once" in told
    assert "  * blockwise" in inspect_model(dataclasses.replace(config, heads=WIDE), 64, 2048)
    shared = inspect_model(dataclasses.replace(CONFIG, sharing="cla:2"), 8, 16)
    assert "  * factored" in shared
    assert "    absorbed     the cache holds k, v" in shared
    both = dataclasses.replace(CONFIG, kind="encoder_decoder", sharing="albert")
    sections = [text.split(",")[0] for text in inspect_model(both, 8, 16).split("\n\n")[-3:]]
    assert sections == ["the encoder's attention", "attention", "cross-attention"]


def test_from_the_command_line():
    config = "--config=experiments/configs/byte_lm.py:tiny,sharing=sandwich"
    result = command("experiments.inspect_model", config, "--config.model.num_layers=3")
    assert result.returncode == 0, result.stderr
    assert "  attention  0 1 2" in result.stdout
    wrong = command("experiments.inspect_model", config, "--config.model.heads.layout=narow")
    assert wrong.returncode == 1
    assert "'narrow'" in wrong.stderr
