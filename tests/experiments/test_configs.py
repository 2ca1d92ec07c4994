"""Config files: descriptions, named models, and a tiny run of every study."""

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import optax
import pytest
import small_data
from commands import command
from config_files import MODULES, config, experiments, planned
from ml_collections import ConfigDict

from attnlab import lab
from attnlab.lab.description import read_description
from attnlab.lab.spec import specs_of
from attnlab.lab.workdir import specs_in
from attnlab.models import cache_bytes_per_token
from attnlab.pretrained import PUBLISHED, published_config
from attnlab.training import OPTIMIZERS, SCHEDULES
from attnlab.training.loggers import read_metrics
from experiments import report
from experiments.config import (
    ConfigFile,
    experiment_of,
    load,
    parse,
    parse_variants,
    read,
    set_values,
    setup_of,
)  # fmt: skip
from experiments.configs import byte_lm, heads_and_sharing
from experiments.run import run_config
from experiments.studies.known_answers import neighbours

# config file -> presets whose variants are looked at; other files have no variants
PRESETS = {name: ["tiny"] for name, module in MODULES.items() if hasattr(module, "variants")} | {
    "heads_and_sharing": ["tiny", "study", "confirm,study", "match=parameters"],
    "chunks": ["", "tuned"],
    "which_matrices_learn": ["", "text,tiny"],
    "scan": ["tiny", "jump,tiny"],
    "token_lm": ["tiny", "masked,tiny"],
}
TEXT_MODELS = [name for name in PUBLISHED if not published_config(name).embedding.images]


def fits(tags, variant):
    return tags.items() <= variant.all_tags.items()


@pytest.mark.parametrize(
    ("name", "preset"), [(name, preset) for name in PRESETS for preset in PRESETS[name]]
)
def test_a_description_is_of_variants_that_the_sweep_has(name, preset, tmp_path):
    """Each set of tags in a pair, a baseline or an expected result names one variant; every variant
    is an experiment."""
    setup = planned(name, preset, tmp_path)
    assert len(setup.specs([0])) == len(setup.variants)
    about, words = setup.description, {"mean": 1.0, "min": 1.0, "max": 1.0, "ratio": 1.0}
    named = [tags for pair in about.pairs for tags in pair]
    named += [about.baseline] if about.baseline else []
    for expected in about.expectations:
        named += [expected.tags] + ([expected.over] if expected.over else [])
        expected.text.format(**words)
    for tags in named:
        assert len([v for v in setup.variants if fits(tags, v)]) == 1, tags
    assert lab.Description.from_json(about.to_json()) == about


@pytest.mark.parametrize(
    ("preset", "named"),
    [("wide", "layout="), ("layout=wide,layout=narrow", "'layout'"), ("tiny=3", "'tiny'"),
     ("layout", "'layout='"), ("layout=", "no value"), ("model=bert_bse", "'bert_base'"),
     ("layout=wde", "'wide'"), ("data=txt", "'text'")],
)  # fmt: skip
def test_presets_that_there_are_not(preset, named):
    with pytest.raises(ValueError, match=named):
        byte_lm.get_config(preset)


def test_presets_are_typed():
    known = {"tiny": False, "count": 3, "share": 0.5, "scale": ("", "gpu"), "rows": ""}
    assert parse("count=4,tiny,rows=A h=1,share=1", known) == SimpleNamespace(
        tiny=True, count=4, share=1.0, scale="", rows="A h=1"
    )
    for wrong in ("count=a", "scale=tpu"):
        with pytest.raises(ValueError, match=wrong.partition("=")[2]):
            parse(wrong, known)


EXPERIMENT = """
from __future__ import annotations
from attnlab import lab
from attnlab.heads import Wide
from attnlab.models import ModelConfig
from attnlab.training import TrainConfig

def get_config(arg=""):
    model = ModelConfig(width=16, heads=Wide(num_heads=2))
    return lab.Experiment(model=model, train=TrainConfig(steps=int(arg or 70)))

variants = lab.grid(model__num_layers=(1, 2))
description = lab.Description(question="How deep?")
"""


def test_a_config_file_may_return_an_experiment(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(EXPERIMENT)
    words = [f"--config={file}:60", "--print_only", "--seeds=3", f"--workdir={tmp_path}/x"]
    done = command("experiments.sweep", *words)
    assert done.returncode == 0, done.stderr
    specs = specs_in(tmp_path / "x").values()
    assert [(s.config.model.num_layers, s.seed) for s in specs] == [(1, 3), (2, 3)]
    assert {spec.config.train.steps for spec in specs} == {60}
    assert read_description(tmp_path / "x").question == "How deep?"
    [varied] = setup_of(load(str(file)), parse_variants(["model.ffn.width=8"])).specs([3])
    assert varied.config.model.ffn.width == 8
    with pytest.raises(ValueError, match="--vary"):
        read(str(file), {"train.steps": "3"})


OWN = """
from experiments.configs import byte_lm

def get_config(arg):
    return byte_lm.get_config(arg)
"""


def test_a_config_file_that_cannot_be_called(tmp_path):
    for name, text in (("bare", "variants = []\n"), ("mine", OWN)):
        path = tmp_path / f"{name}.py"
        path.write_text(text)
        with pytest.raises(ValueError, match="get_config"):
            load(str(path))
    varied = parse_variants(["model.num_layers=1,3"])
    assert len(setup_of(load(f"{path}:tiny"), varied).specs([4])) == 2


def test_a_config_that_lacks_fields_or_has_others():
    fields = byte_lm.get_config("tiny").to_dict()
    for wrong in (fields, ConfigDict({"task": "causal_lm"})):
        with pytest.raises(ValueError, match="ConfigDict"):
            experiment_of(wrong)
    for path in ("data.paht", "model.ffn.widht", "strat", "match.bugdet"):
        other = byte_lm.get_config("tiny")
        set_values(other, {path: "3"})
        with pytest.raises(ValueError, match=f"no field '{path}'"):
            experiment_of(other)
    for name, preset in (("heads_and_sharing", "study,data=tokens"), ("chunks", "reviews,tuned")):
        with pytest.raises(ValueError, match="validation"):
            experiment_of(MODULES[name].get_config(preset))


@pytest.mark.parametrize(
    ("name", "preset", "fields", "named"),
    [
        ("heads_and_sharing", "tiny,sharing=albert", {}, "model.sharing=albert"),
        ("reviews", "tiny,max", {}, "model.output.pooler=max"),
        ("token_lm", "tokenizer=bytes,tiny", {}, "data.tokenizer=bytes"),
        ("frontier_heads", "layout=wide", {}, "model.heads.layout=wide"),
        ("byte_lm", "tiny", {"match.sharing": "albert"}, "match.budget"),
    ],
)
def test_what_would_have_no_effect_is_refused(name, preset, fields, named, tmp_path):
    """Presets that set what the variants set, and a reference without a budget."""
    changed = config(name, preset, tmp_path)
    set_values(changed, fields)
    with pytest.raises(ValueError, match=named):
        setup_of(ConfigFile(Path(name), preset, MODULES[name], changed))


def test_a_variant_with_seeds_of_its_own(tmp_path):
    """Of neighbours.py, where a dense mask is too slow for more than one."""
    specs = planned("neighbours", "tiny", tmp_path).specs([3, 4])
    names = neighbours.EDGES, neighbours.DENSE
    assert [[s.seed for s in specs if s.title == name] for name in names] == [[3, 4], [0]]


def test_two_variants_of_one_name():
    twice = [lab.Variant({"train.steps": n}, name) for n, name in ((7, "a b"), (8, "a  b"))]
    with pytest.raises(ValueError, match="a_b-seed0"):
        specs_of(lab.Experiment(), twice, [0])


@pytest.mark.parametrize("words", ["match=parameters", "match=flops"])
def test_every_variant_of_the_study_has_an_ffn_left(words):
    """At every budget wide heads leave the reference's FFN an eighth at least."""
    preset = f"study,{words}"
    found = experiments("heads_and_sharing", preset).values()
    widths = [one.model.ffn.width for one in found]
    assert len(widths) == 9
    assert {f"match={one.matched}" for one in found} == {words}
    assert min(widths) > heads_and_sharing.get_config(preset).model.ffn.width / 8


def test_at_equal_cache_one_wide_head_stands_for_four():
    found = experiments("heads_and_sharing", "match=cache")
    wide, narrow = (found[f"{name}, separate"].model for name in ("wide", "narrow"))
    assert (wide.heads.num_heads, narrow.heads.num_heads) == (1, 4)
    assert {cache_bytes_per_token(one) for one in (wide, narrow)} == {4 * 2 * 64 * 4}
    base = heads_and_sharing.get_config("match=cache").model.ffn.width
    assert {wide.ffn.width, narrow.ffn.width} == {base}


@pytest.mark.parametrize("name", [*TEXT_MODELS, "transformer_base"])
def test_published_models_by_name(name):
    found = experiment_of(byte_lm.get_config(f"model={name}"))
    expected = published_config(name)
    assert found.model.plan == expected.plan
    assert dataclasses.replace(found.model, sharing=expected.sharing) == expected


TINY = [name for name in MODULES if name not in ("pretrained", "token_lm")]
"""One needs a folder, one a text of many tokens."""


def test_every_dataset_has_a_config(tmp_path):
    read = {config(name, "tiny", tmp_path).data.source for name in TINY}
    of_byte_lm = {"tokens", "huggingface"}  # its preset data=
    assert read - {"maxima"} | of_byte_lm == {
        name for name in small_data.DATASETS if not name.endswith("_packed")
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "preset"),
    [*((name, "tiny") for name in TINY), ("byte_lm", "masked,tiny"), ("byte_lm", "seq2seq,tiny")],
)
def test_the_tiny_run_of_a_config_trains_and_is_reported(name, preset, tmp_path, nine_letters):
    """Its last variant, with another text where it reads one; heads of other tasks too."""
    one = config(name, preset, tmp_path)
    if one.data.source == "text":
        one.data.path = str(nine_letters)
    variants = planned(name, preset, tmp_path).variants or [lab.Variant({})]
    short = {"train.steps": 20, "train.schedule.warmup_steps": 2, "train.log_every": 5}
    few = {"train.evaluation.windows": 16, "train.seeds": (0,)}
    set_values(one, {**variants[-1].values, **short, **few})
    [result] = run_config(one, tmp_path / "run")
    assert result.status == "complete"
    [metrics] = (tmp_path / "run").glob("runs/*/metrics.jsonl")
    rows = [json.loads(line) for line in metrics.open()]
    losses = [np.mean(row["train/loss"]) for row in rows if "train/loss" in row]
    assert losses[-1] < losses[0]
    assert all(np.isfinite(result.scores.heldout[metric.name]) for metric in result.task.metrics)
    report.write([tmp_path / "run"], heads=preset != "tiny")
    assert (tmp_path / "run/figures/map-0.svg").exists() == (preset != "tiny")
    page, main = (tmp_path / "run/report.md").read_text(), result.task.metrics[0]
    assert main.unit in page
    for baseline in result.scores.baselines.get(main.name, {}):
        assert baseline in page


@pytest.mark.slow
def test_an_optimizer_and_a_schedule_of_a_user_train_by_name(tmp_path, nine_letters, monkeypatch):
    seen = []

    def sign_descent(config, rate, axes):
        seen.append(config.beta1)
        return optax.chain(optax.sign_sgd(1.0), optax.scale_by_schedule(rate))

    monkeypatch.setitem(OPTIMIZERS, "signs", sign_descent)
    monkeypatch.setitem(SCHEDULES, "halves", lambda *given: lambda step: 0.01 * 0.5 ** (step // 50))
    config = byte_lm.get_config("tiny")
    config.data.path = str(nine_letters)
    config.train.update(steps=100, log_every=100, seeds=(0,))
    config.train.optimizer.update(name="signs", beta1=0.7)
    config.train.schedule.name = "halves"
    [result] = run_config(config, tmp_path / "run")
    assert set(seen) == {0.7}
    assert result.scores.heldout["loss"] < np.log(256) - 1
    rows = read_metrics(tmp_path / "run/runs/seed0/metrics.jsonl")
    rates = [row["train/learning_rate"] for row in rows if "train/learning_rate" in row]
    assert rates[-1] == pytest.approx(0.005)  # of the 100th step
