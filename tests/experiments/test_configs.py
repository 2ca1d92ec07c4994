"""Config files: descriptions, named models, and a tiny run of every study."""

import dataclasses

import numpy as np
import optax
import pytest
import small_data
from config_files import MODULES, config, experiments, planned, succeed
from ml_collections import ConfigDict

from attnlab import lab
from attnlab.lab.description import read_description
from attnlab.lab.workdir import specs_in
from attnlab.models import cache_bytes_per_token
from attnlab.pretrained import PUBLISHED, published_config
from attnlab.training import OPTIMIZERS, SCHEDULES
from attnlab.training.loggers import read_metrics
from experiments import config as files
from experiments import report
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


REFUSED = [
    # config file, preset, fields, what the error names
    ("byte_lm", "wide", {}, "layout="),
    ("byte_lm", "layout=wide,layout=narrow", {}, "'layout'"),
    ("byte_lm", "tiny=3", {}, "'tiny'"),
    ("byte_lm", "layout", {}, "'layout='"),
    ("byte_lm", "layout=", {}, "no value"),
    ("byte_lm", "model=bert_bse", {}, "'bert_base'"),
    ("byte_lm", "layout=wde", {}, "'wide'"),
    ("byte_lm", "data=txt", {}, "'text'"),
    ("byte_lm", "tiny", {"data.paht": "3"}, "no field 'data.paht'"),
    ("byte_lm", "tiny", {"model.ffn.widht": "3"}, "no field 'model.ffn.widht'"),
    ("byte_lm", "tiny", {"strat": "3"}, "no field 'strat'"),
    ("byte_lm", "tiny", {"match.bugdet": "3"}, "no field 'match.bugdet'"),
    ("byte_lm", "tiny", {"match.sharing": "albert"}, "match.budget"),  # without a budget
    ("heads_and_sharing", "study,data=tokens", {}, "validation"),
    ("chunks", "reviews,tuned", {}, "validation"),
    ("which_matrices_learn", "text,paper", {}, "'paper'"),
    # The variants set it, too.
    ("heads_and_sharing", "tiny,sharing=albert", {}, "model.sharing=albert"),
    ("reviews", "tiny,max", {}, "model.output.pooler=max"),
    ("token_lm", "tokenizer=bytes,tiny", {}, "data.tokenizer=bytes"),
    ("frontier_heads", "layout=wide", {}, "model.heads.layout=wide"),
]


@pytest.mark.parametrize(("name", "preset", "fields", "named"), REFUSED)
def test_the_error_names_what_is_wrong(name, preset, fields, named, tmp_path):
    with pytest.raises(ValueError, match=named):
        planned(name, preset, tmp_path, fields)


def test_presets_are_typed():
    known = {"tiny": False, "count": 3, "share": 0.5, "scale": ("", "gpu"), "rows": ""}
    found = files.parse("count=4,tiny,rows=A h=1,share=1", known)
    assert vars(found) == dict(tiny=True, count=4, share=1.0, scale="", rows="A h=1")
    for wrong in ("count=a", "scale=tpu"):
        with pytest.raises(ValueError, match=wrong.partition("=")[2]):
            files.parse(wrong, known)


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
    succeed("experiments.sweep", *words)
    specs = specs_in(tmp_path / "x").values()
    assert [(s.config.model.num_layers, s.seed) for s in specs] == [(1, 3), (2, 3)]
    assert {spec.config.train.steps for spec in specs} == {60}
    assert read_description(tmp_path / "x").question == "How deep?"
    varied = files.parse_variants(["model.ffn.width=8"])
    [spec] = files.setup_of(files.load(str(file)), varied).specs([3])
    assert spec.config.model.ffn.width == 8
    with pytest.raises(ValueError, match="--vary"):
        files.read(str(file), {"train.steps": "3"})


def test_a_config_file_that_cannot_be_called(tmp_path):
    """It has no get_config; or one that needs a preset, and none is given."""
    for name, text in (("bare", "variants = []\n"), ("mine", EXPERIMENT.replace('arg=""', "arg"))):
        path = tmp_path / f"{name}.py"
        path.write_text(text)
        with pytest.raises(ValueError, match="get_config"):
            files.load(str(path))
    assert files.load(f"{path}:60").config.train.steps == 60


def test_a_dataset_that_is_chosen_again_keeps_its_fields():
    config = byte_lm.get_config("tiny")
    config.data.path = "mine.txt"
    files.set_values(config, {files.SOURCE: "text"})
    assert config.data.path == "mine.txt"


def test_a_config_that_is_none():
    for wrong in (byte_lm.get_config("tiny").to_dict(), ConfigDict({"task": "causal_lm"})):
        with pytest.raises(ValueError, match="ConfigDict"):
            files.experiment_of(wrong)


def test_a_variant_with_seeds_of_its_own(tmp_path):
    """Of neighbours.py, where a dense mask is too slow for more than one."""
    specs = planned("neighbours", "tiny", tmp_path).specs([3, 4])
    names = neighbours.EDGES, neighbours.DENSE
    assert [[s.seed for s in specs if s.title == name] for name in names] == [[3, 4], [0]]


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
    found = files.experiment_of(byte_lm.get_config(f"model={name}"))
    expected = published_config(name)
    assert found.model.plan == expected.plan
    assert dataclasses.replace(found.model, sharing=expected.sharing) == expected


TINY = [name for name in MODULES if name not in ("pretrained", "token_lm")]
"""One needs a folder, one a text of many tokens."""


def test_every_dataset_has_a_config(tmp_path):
    read = {config(name, "tiny", tmp_path).data.source for name in TINY}
    read |= {"tokens", "huggingface"}  # of byte_lm: its preset data=
    known = {name for name in small_data.DATASETS if not name.endswith("_packed")}
    assert read - {"maxima"} == known


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
    files.set_values(one, {**variants[-1].values, **short, **few})
    [result] = run_config(one, tmp_path / "run")
    assert result.status == "complete"
    [metrics] = (tmp_path / "run").glob("runs/*/metrics.jsonl")
    losses = [np.mean(row["train/loss"]) for row in read_metrics(metrics) if "train/loss" in row]
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
