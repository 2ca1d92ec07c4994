"""From a published folder to a run and back to a folder."""

import dataclasses
import re
import shlex

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from config_files import succeed
from conftest import ROOT
from goldens import golden_folder
from random_models import random_params
from small_data import word_tokenizer

from attnlab import pretrained
from attnlab.load import open_folder, open_run, with_plan_of
from attnlab.models import num_parameters
from attnlab.pretrained import hub
from attnlab.sharing.plan import Plan
from experiments.config import experiment_of, load, parse_variants, setup_of
from experiments.configs import pretrained as config_file

BASE = pretrained.published_config("albert_base")
ALBERT = dataclasses.replace(
    BASE, sharing="albert", width=16, num_layers=3, vocab_size=300, max_len=20,
    heads=dataclasses.replace(BASE.heads, num_heads=2),
    ffn=dataclasses.replace(BASE.ffn, width=24),
    embedding=dataclasses.replace(BASE.embedding, width=8),
)  # fmt: skip
PLANS_OF_RECIPE = ("separate", "attention_only")
TOKENS = np.random.default_rng(0).integers(0, 300, (2, 7), np.int32)


def write(folder, config=ALBERT):
    """A folder of large random weights, every number different."""
    pretrained.save(folder, config.build(), random_params(config, scale=0.4))
    return folder


def logits(config, params):
    return np.asarray(jax.jit(config.build().apply)({"params": params}, TOKENS).logits)


@pytest.mark.slow
def test_the_recipe(tmp_path, nine_letters):
    """The commands of docs/howto/checkpoints.md with a tiny ALBERT: the outputs stay."""
    folder = write(tmp_path / "albert")
    page = (ROOT / "docs" / "howto" / "checkpoints.md").read_text()
    block = re.search("```bash\n(.*?)```", page, re.DOTALL)[1].replace("\\\n", " ")
    lines = [line.replace("FOLDER", str(folder)) for line in block.splitlines()]
    said = []
    for line in lines:
        python, m, module, *flags = shlex.split(line.replace("runs/", f"{tmp_path}/"))
        assert (python, m) == ("python", "-m")
        if module == "experiments.run":
            flags += [f"--config.data.path={nine_letters}", "--config.train.evaluation.windows=8"]
            flags += ["--config.train.evaluation.batch_size=8", "--config.train.seeds=(4, 2)"]
        done = succeed(module, *flags)
        said.append(done.stdout + done.stderr)
    for told, plans in ((said[0], "albert -> separate"), (said[1], "separate -> attention_only")):
        difference = re.search(rf"plan {plans}: outputs differ by (\S+) of the largest", told)[1]
        assert float(difference) < 1e-6
    unique = [num_parameters(dataclasses.replace(ALBERT, sharing=p)) for p in PLANS_OF_RECIPE]
    assert f"{unique[0]:,} parameters ({unique[1]:,} before it was written)" in said[2]
    assert "sharing separate" in said[3]

    run = open_run(tmp_path / "attention_only")
    groups = run.params["layers"]["attention"]["q"].shape[0]
    assert (run.config.sharing, groups) == ("attention_only", 1)
    trained = logits(run.config, run.params)
    model, params = pretrained.load(tmp_path / "trained")
    np.testing.assert_allclose(logits(model.config, params), trained, rtol=1e-5, atol=1e-5)
    before = open_folder(tmp_path / "separate")
    moved = np.abs(run.params["embedding"] - before.params["embedding"]).max()
    assert 1e-4 < moved < 20 * 2e-4  # 20 steps of Adam, each about the learning rate
    other = open_run(tmp_path / "attention_only", 2)
    assert np.abs(trained - logits(other.config, other.params)).max() > 1e-5


def test_the_config_is_the_folders(tmp_path):
    config = config_file.get_config(str(write(tmp_path / "albert")))
    stored = pretrained.load_config(tmp_path / "albert")
    resolved = experiment_of(config)
    assert resolved.model == dataclasses.replace(stored, sharing="albert")
    assert (resolved.task, resolved.train.length) == ("masked_lm", 20)
    assert resolved.start == str(tmp_path / "albert")
    config.model.update(sharing="cycle:2", dropout={"rate": 0.1}, compute={"remat": False})
    assert experiment_of(config).model.sharing == "cycle:2"
    config.model.update(ffn={"width": 25}, norm={"position": "pre"})
    both = r"than model\.ffn\.width=25 \(there 24\), model\.norm\.position='pre' \(there 'post'"
    with pytest.raises(ValueError, match=both):
        experiment_of(config)


def test_a_sweep_over_a_model_of_the_hub(tmp_path, monkeypatch):
    """Its text is tokenized by the tokenizer.json that was fetched; the plan is varied."""
    folder = write(tmp_path / "albert")
    words = word_tokenizer(folder / "tokenizer.json", {"?": 0, "rose": 5})
    monkeypatch.setattr(hub, "_fetch", lambda name, revision: folder)
    setup = setup_of(
        load("experiments/configs/pretrained.py:org/tiny"),
        parse_variants(["model.sharing=albert,separate"]),
    )
    assert (setup.base.start, setup.base.data.tokenizer) == ("org/tiny", words)
    assert [spec.config.model.sharing for spec in setup.specs()] == ["albert", "separate"]


def test_a_folder_that_cannot_train_is_refused(tmp_path):
    none = {"kind": "none", "bias": False, "transform": None, "num_classes": 0}
    bare = dataclasses.replace(ALBERT, output=dataclasses.replace(ALBERT.output, **none))
    with pytest.raises(ValueError, match="start from"):
        experiment_of(config_file.get_config(str(write(tmp_path / "bare", bare))))
    plan = Plan(attention=(0, 1, 0, 1), ffn=(0, 1, 0, 1))
    inner = dataclasses.replace(ALBERT, num_layers=4, sharing=plan)
    assert config_file.get_config(str(write(tmp_path / "inner", inner))).model.sharing == "cycle:2"
    t5 = pretrained.load_config(golden_folder(tmp_path / "small", "t5"))
    t5 = dataclasses.replace(t5, vocab_size=400)
    config = config_file.get_config(str(write(tmp_path / "t5", t5)))
    assert experiment_of(config).task == "span_corruption"
    config.model.encoder.sharing = "albert"  # of the encoder alone
    assert experiment_of(config).model.encoder.sharing == "albert"
    stored, tokens = open_folder(tmp_path / "t5"), jnp.zeros((1, 3), int)
    albert = dataclasses.replace(stored.config, sharing="albert")
    both, _ = with_plan_of(stored.config, stored.params, albert, tokens)
    assert {both[stack]["ffn"]["up"].shape[0] for stack in ("layers", "encoder_layers")} == {1}
    with pytest.raises(ValueError, match="FOLDER"):
        config_file.get_config("")
