"""Config files: every row of the published tables, exact counts, named models, their reports."""

import csv
import dataclasses
import json
import re

import jax
import numpy as np
import pytest
from commands import command
from conftest import assert_close
from ml_collections import ConfigDict

from attnlab import lab
from attnlab.heads import score_scale
from attnlab.lab.spec import specs_of
from attnlab.models import cache_bytes_per_token, num_parameters
from attnlab.pretrained import published_config
from attnlab.training import make_optimizer
from experiments import reference
from experiments.configs import byte_lm, heads_and_sharing
from experiments.setup import experiment_of, setup_of
from experiments.studies.tables import albert, t5, takase, vaswani
from experiments.studies.tables import table as published

# file and its extra word -> its config file and table
TABLES = {
    "albert": (albert, albert.TABLE),
    "vaswani": (vaswani, vaswani.TABLE),
    "takase": (takase, takase.TABLE),
    "t5": (t5, t5.TABLE),
    "t5:language_model": (t5, t5.ALONE),
}
READ_FILES = {"cora", "neighbours", "reviews", "scan"}
"""Their sizes are those of files that are not here: test_other_data, test_separations."""
# name of a config file, or of the study whose study.py it is -> the module
MODULES = {
    name.removesuffix("/study.py").removesuffix(".py").rpartition("/")[2]:
    reference.config_module(name)
    for name in reference.config_files()
}  # fmt: skip
# config file -> presets whose variants are looked at; other files have no variants
PRESETS = {
    name: ["tiny"]
    for name, module in MODULES.items()
    if hasattr(module, "variants") and name not in READ_FILES
} | {
    "heads_and_sharing": ["tiny", "study", "scores,tiny", "confirm,study", "match=parameters"],
    "chunks": ["", "tuned"],
    "t5": ["", "tiny", "language_model"],
    "which_matrices_learn": ["", "text,tiny"],
}


def planned(name, preset=""):
    """What `experiments.sweep` reads of a config file."""
    module = MODULES[name]
    return setup_of(module.get_config(preset), module, preset)


def variants(name, preset=""):
    """Title -> experiment, of one seed, as a sweep would run it."""
    setup = planned(name, preset)
    return {s.title: s.config for s in specs_of(setup.base, setup.variants, [0], setup.match)}


def rows(name, preset=""):
    """`variants` of a published table."""
    file, _, more = name.partition(":")
    return variants(file, ",".join(filter(None, (more, preset))))


def fits(tags, variant):
    return tags.items() <= variant.all_tags.items()


@pytest.mark.parametrize(
    ("name", "preset"), [(name, preset) for name in PRESETS for preset in PRESETS[name]]
)
def test_a_description_is_of_variants_that_the_sweep_has(name, preset):
    """Each set of tags in a pair, a baseline or an expected result names one variant."""
    setup = planned(name, preset)
    about, words = setup.description, {"mean": 1.0, "min": 1.0, "max": 1.0, "ratio": 1.0}
    named = [tags for pair in about.pairs for tags in pair]
    named += [about.baseline] if about.baseline else []
    for expected in about.expectations:
        named += [expected.tags] + ([expected.over] if expected.over else [])
        expected.text.format(**words)
    if about.published:
        named += [row.tags for row in about.published.rows]
    for tags in named:
        assert len([v for v in setup.variants if fits(tags, v)]) == 1, tags
    assert lab.Description.from_json(about.to_json()) == about


@pytest.mark.parametrize("name", TABLES)
def test_every_row_is_a_variant_with_the_paper_s_parameters(name):
    table, found = TABLES[name][1], rows(name)
    assert list(found) == list(table.rows)
    for row, one in found.items():
        output = table.paper_model(row).output  # less what the paper does not count
        model = dataclasses.replace(one.model, output=output)
        assert num_parameters(model) == table.rows[row].parameters, row
        assert model == table.paper_model(row)


def flat(model):
    """Path -> value of every field of a model."""
    found = {}

    def visit(fields, path):
        for name, value in fields.items():
            if isinstance(value, dict):
                visit(value, f"{path}.{name}")
            else:
                found[f"{path}.{name}"] = value

    visit(byte_lm.ConfigDict(byte_lm.model_fields(model)).to_dict(), "model")
    return found


@pytest.mark.parametrize("name", TABLES)
def test_tiny_keeps_the_ratios(name):
    table, full, tiny = TABLES[name][1], rows(name), rows(name, "tiny")
    by = dict(word.split("/") for word in table.tiny.shrink)
    for row, one in tiny.items():
        paper = flat(full[row].model)
        for field, size in flat(one.model).items():
            word = ("width" if field in published.WIDTHS else
                    "layers" if field in published.DEPTHS else "")  # fmt: skip
            if word and paper[field] is not None and field not in table.tiny.rows:
                assert paper[field] == size * int(by.get(word, 1)), (row, field)
        assert one.model.heads.num_heads == full[row].model.heads.num_heads or (
            "model.heads.num_heads" in table.tiny.base
        )
        assert {one.train.steps} == {table.tiny.base["train.steps"]}
    for row in tiny:
        share = [p[row].model.plan.num_groups["ffn"] / p[row].model.num_layers
                 for p in (full, tiny)]  # fmt: skip
        assert share[0] == share[1] or full[row].model.sharing == "albert"


def test_full_size_trains_as_the_paper_and_tiny_as_all_do():
    """Optimizer, schedule and the rate of the largest step and of a late one."""
    late = 99_999
    trained = {
        "albert": ("lamb", "linear", 1.76e-3, 1.76e-3 * (1 - (late - 3125) / 121_875)),
        "vaswani": ("adam", "inverse_sqrt", (512 * 4000) ** -0.5, 512**-0.5 * 1e5**-0.5),
        "takase": ("adam", "inverse_sqrt", (512 * 4000) ** -0.5, 512**-0.5 * 1e5**-0.5),
        "t5": ("adafactor", "flat_inverse_sqrt", 0.01, 1e5**-0.5),
    }  # fmt: skip
    for name, (optimizer, schedule, peak, then) in trained.items():
        table = TABLES[name][1]
        train, tiny = (rows(name, words)[table.base].train for words in ("", "tiny"))
        assert (train.optimizer.name, train.schedule.name) == (optimizer, schedule)
        rate = make_optimizer(train).schedule
        np.testing.assert_allclose(
            [rate(train.schedule.warmup_steps), rate(late)], [peak, then], rtol=1e-4
        )
        assert (tiny.optimizer.name, tiny.schedule.name) == ("adamw", "cosine")
        assert tiny.optimizer.clip_norm == 1.0
    rates = {one.model.width: one.train.optimizer.learning_rate for one in rows("vaswani").values()}
    assert rates == {d: (d * 4000) ** -0.5 for d in (256, 512, 1024)}


def test_the_paper_s_pooler_and_head_are_counted_apart():
    """Lan et al. print six of eight counts with the pooler, the rows without sharing without."""
    table = albert.TABLE
    printed = {}
    for name, row in table.rows.items():
        model = table.paper_model(name)
        alone = dataclasses.replace(model, output=dataclasses.replace(model.output, pooler=None))
        alone = num_parameters(alone)
        assert num_parameters(model) - alone == 590_592
        printed[name] = {f"{n / 1e6:.0f}M" for n in (alone, num_parameters(model))}
        assert not row.printed or row.printed in printed[name]


def test_scaled_embeddings_follow_the_width():
    for row, one in rows("vaswani", "width/4").items():
        assert one.model.embedding.scale == pytest.approx(one.model.width**0.5), row
    assert rows("takase", "tiny")["cycle M=6 N=18"].model.sharing == "cycle:2"


def test_learning_rates_and_chosen_rows():
    setup = planned("vaswani", "tiny,lr,rows=^(base|big)$")
    specs = specs_of(setup.base, setup.variants, [0])
    rates = [spec.config.train.optimizer.learning_rate for spec in specs]
    np.testing.assert_allclose(rates, [0.3 * r for r in (3e-3, 1e-2, 3e-2)] * 2, rtol=1e-9)
    assert [spec.tags["name"] for spec in specs] == ["base"] * 3 + ["big"] * 3
    assert [spec.tags["learning_rate"] for spec in specs] == rates
    assert len(setup.description.published.rows) == len(vaswani.ROWS)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("tinny", "unknown preset 'tinny'; known: tiny, width/N"),
        ("width/0", "unknown preset 'width/0'"),
        ("width/3", "width/3: model.width 512 is not divisible by 3"),
        ("rows=(", "rows=( is no regular expression: missing )"),
        ("rows=F", "rows=F finds none; the rows are base, A h=1"),
    ],
)
def test_wrong_words(words, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        rows("vaswani", words)


@pytest.mark.parametrize(
    ("preset", "message"),
    [("wide,tiny,narrow", "one model.heads.layout; .*--vary=model.heads.layout=wide,narrow"),
     ("albert,cycle:2", "presets albert and cycle:2: a model has one model.sharing; ")],
)  # fmt: skip
def test_two_presets_of_one_field_are_refused(preset, message):
    with pytest.raises(ValueError, match=message):
        byte_lm.get_config(preset)


def test_a_config_file_without_get_config(tmp_path):
    path = tmp_path / "bare.py"
    path.write_text("variants = []\n")
    done = command("experiments.sweep", f"--config={path}", f"--workdir={tmp_path}/run")
    assert done.returncode == 1
    assert done.stderr.startswith(f"error: {path} has no function get_config()"), done.stderr


def test_a_config_that_lacks_fields():
    fields = byte_lm.get_config("tiny").to_dict()
    with pytest.raises(
        ValueError, match=r"returns no ConfigDict; begin with .*byte_lm\.get_config"
    ):
        experiment_of(fields)
    del fields["start"], fields["data"]
    with pytest.raises(ValueError, match="returns a config without start, data; begin with"):
        experiment_of(ConfigDict(fields))


def test_two_variants_of_one_name():
    twice = [lab.Variant({"train.steps": n}, name) for n, name in ((7, "a b"), (8, "a  b"))]
    with pytest.raises(ValueError, match="two variants have the name 'a_b'; give each its own"):
        specs_of(lab.Experiment(), twice, [0])


def test_t5_s_table_is_of_t5_s_functions(x64):
    """W_q sqrt(d_k) and embedding / sqrt(d) turn T5 as published into the model of the table."""

    def small(model, embedding, output):
        parts = {
            "heads": dict(num_heads=3, head_dim=4),
            "ffn": dict(width=7),
            "encoder": dict(num_layers=None),
            "embedding": dict(scale=embedding),
            "output": dict(scale=output),
            "compute": dict(dtype="float64"),
        }
        made = {n: dataclasses.replace(getattr(model, n), **f) for n, f in parts.items()}
        return dataclasses.replace(model, width=20, num_layers=2, vocab_size=11, **made)

    theirs = small(published_config("t5_base"), 1.0, 20**-0.5)
    ours = small(t5.MODEL, 20**0.5, 1.0)
    factors = {"q": 4**0.5, "embedding": 20**-0.5}

    def outputs(key):
        tokens = {name: jax.random.randint(key, (2, n), 0, 11) for name, n in LENGTHS.items()}
        params = theirs.build().init(key, **tokens)["params"]
        params = jax.tree.map(lambda a: 1.5 * a.astype(float), params)
        changed = jax.tree_util.tree_map_with_path(
            lambda path, a: a * factors.get(path[-1].key, 1.0), params
        )
        pairs = ((theirs, params), (ours, changed))
        return [model.build().apply({"params": p}, **tokens).logits for model, p in pairs]

    got = jax.jit(outputs)(jax.random.key(0))
    assert float(jax.numpy.std(got[0])) > 0.1
    assert_close(*got)


LENGTHS = {"source": 5, "tokens": 6}


@pytest.mark.parametrize("words", ["match=parameters", "match=flops", "match=flops,scale=gpu"])
def test_every_variant_of_the_study_has_an_ffn_left(words):
    """At every budget wide heads leave the reference's FFN an eighth at least."""
    preset = f"study,{words}"
    found = variants("heads_and_sharing", preset).values()
    widths = [one.model.ffn.width for one in found]
    assert len(widths) == 9
    assert {f"match={one.matched}" for one in found} == {words.partition(",")[0]}
    assert min(widths) > heads_and_sharing.get_config(preset).model.ffn.width / 8


def test_scores_divided_by_the_width_of_a_head_are_variants_of_their_own():
    setup = planned("heads_and_sharing", "scores,lr")
    specs = specs_of(setup.base, setup.variants, [0], setup.match)
    assert len(specs) == 3 * 2 * 2 * 3
    for spec in specs:
        layout = spec.config.model.layout
        width = layout.size("head_dim")
        by_width = spec.tags["scores"] == "H"
        assert score_scale(layout) == (1 / width if by_width else width**-0.5)
    named = [tags for pair in planned("heads_and_sharing", "scores").description.pairs
             for tags in pair if tags["scores"] == "H"]  # fmt: skip
    assert {tuple(tags.values())[:2] for tags in named} == {
        (layout, plan) for layout in heads_and_sharing.LAYOUTS for plan in heads_and_sharing.PLANS
    }


def test_at_equal_cache_one_wide_head_stands_for_four():
    found = variants("heads_and_sharing", "match=cache")
    wide, narrow = (found[f"{name}, separate"].model for name in ("wide", "narrow"))
    assert (wide.heads.num_heads, narrow.heads.num_heads) == (1, 4)
    assert {cache_bytes_per_token(one) for one in (wide, narrow)} == {4 * 2 * 64 * 4}
    base = heads_and_sharing.get_config("match=cache").model.ffn.width
    assert {wide.ffn.width, narrow.ffn.width} == {base}


@pytest.mark.parametrize("name", byte_lm.MODELS)
def test_published_models_by_name(name):
    found = experiment_of(byte_lm.get_config(name))
    expected = published_config(name)
    assert found.model.plan == expected.plan
    assert dataclasses.replace(found.model, sharing=expected.sharing) == expected


@pytest.mark.slow
def test_a_table_from_end_to_end(tmp_path, nine_letters):
    """Two rows of ALBERT's table, few steps: the report has the paper's numbers beside ours."""
    config = "--config=experiments/studies/tables/albert.py:tiny,rows=E=128.(all|not)"
    flags = [config, f"--workdir={tmp_path}/run", f"--config.data.path={nine_letters}"]
    flags += ["--jax_disable_most_optimizations"]
    flags += [
        f"--config.train.{field}"
        for field in (
            "steps=3",
            "schedule.warmup_steps=1",
            "batch_size=2",
            "length=16",
            "evaluation.batch_size=8",
            "evaluation.windows=8",
            "seeds=(0,1)",
        )
    ]
    done = command("experiments.sweep", *flags)
    assert done.returncode == 0, done.stderr
    ours = [
        json.loads((tmp_path / f"run/runs/E=128_all-shared-seed{seed}/result.json").read_text())
        for seed in (0, 1)
    ]
    bits = np.array([one["scores"]["heldout"]["bits_per_byte"] for one in ours])
    with (tmp_path / "run/tables/published.csv").open(newline="") as lines:
        found = {row["row"]: row for row in csv.DictReader(lines)}
    row = found["E=128 all-shared"]
    assert list(found) == list(albert.ROWS)
    assert float(row["ours: held-out bits per byte"]) == pytest.approx(bits.mean())
    assert float(row["standard deviation"]) == pytest.approx(bits.std(ddof=1))
    assert int(row["parameters here"]) == ours[0]["sizes"]["parameters"]
    assert (row["at the paper's size"], row["as printed"]) == ("11683584", "12M")
    paper = [row[f"paper: {column}"] for column in albert.TABLE.columns]
    assert paper == ["80.1", "89.3", "82.3", "80.0", "77.1", "82.0", "90.3", "64.0"]
    other = found["E=768 shared-FFN"]
    assert other["ours: held-out bits per byte"] == "not run"
    assert (other["at the paper's size"], other["as printed"]) == ("57117696", "57M")
    text = (tmp_path / "run/report.md").read_text()
    assert "Rows that both have: 2, too few to compare an order" in text
