"""Config files: every arm of the published tables, exact counts, named models, their reports."""

import dataclasses
import re

import jax
import numpy as np
import pytest
from commands import command
from conftest import assert_close

from attnlab import lab
from attnlab.heads import score_scale
from attnlab.models import cache_bytes_per_token, num_parameters, to_dict
from attnlab.pretrained import published_config
from attnlab.training import make_optimizer
from experiments import published
from experiments.configs import (
    albert_table4,
    byte_lm,
    heads_and_sharing,
    t5_table2,
    takase,
    vaswani_table3,
)
from experiments.setup import experiment_of, setup_of

# file and its extra word -> its config file and table
TABLES = {
    "albert_table4": (albert_table4, albert_table4.TABLE),
    "vaswani_table3": (vaswani_table3, vaswani_table3.TABLE),
    "takase": (takase, takase.TABLE),
    "t5_table2": (t5_table2, t5_table2.TABLE),
    "t5_table2:language_model": (t5_table2, t5_table2.ALONE),
}


def setup(module, preset=""):
    return setup_of(module.get_config(preset), module, preset)


def variants(name, preset=""):
    """Name -> experiment, as a sweep would run it."""
    _, _, more = name.partition(":")
    found = setup(TABLES[name][0], ",".join(filter(None, (more, preset))))
    return {one.name: lab.with_values(found.base, one.values) for one in found.variants}


@pytest.mark.parametrize("name", TABLES)
def test_every_row_is_an_arm_with_the_paper_s_parameters(name):
    table, found = TABLES[name][1], variants(name)
    assert list(found) == list(table.rows)
    for row, one in found.items():
        output = table.paper_model(row).output  # less what the paper does not count
        model = dataclasses.replace(one.model, output=output)
        assert num_parameters(model) == table.rows[row].parameters, row
        assert model == table.paper_model(row)


def flat(model):
    """Path -> value of every field of a model."""

    def visit(fields, prefix):
        for name, value in fields.items():
            if isinstance(value, dict):
                yield from visit(value, f"{prefix}{name}.")
            else:
                yield prefix + name, value

    return dict(visit(to_dict(model), "model."))


@pytest.mark.parametrize("name", TABLES)
def test_tiny_keeps_the_ratios(name):
    table, full, tiny = TABLES[name][1], variants(name), variants(name, "tiny")
    by = dict(word.split("/") for word in table.shrink)
    for row, one in tiny.items():
        paper = flat(full[row].model)
        for field, size in flat(one.model).items():
            word = ("width" if field in published.WIDTHS else
                    "layers" if field in published.DEPTHS else "")  # fmt: skip
            if word and paper[field] is not None and field not in table.tiny_rows:
                assert paper[field] == size * int(by.get(word, 1)), (row, field)
        assert one.model.heads.num_heads == full[row].model.heads.num_heads or (
            "model.heads.num_heads" in table.tiny
        )
        assert {one.train.steps} == {table.tiny["train.steps"]}
    for row in tiny:
        share = [p[row].model.plan.num_groups["ffn"] / p[row].model.num_layers
                 for p in (full, tiny)]  # fmt: skip
        assert share[0] == share[1] or full[row].model.sharing == "albert"


def test_full_size_trains_as_the_paper_and_tiny_as_all_do():
    """Optimizer, schedule and the rate of the largest step and of a late one."""
    late = 99_999
    trained = {
        "albert_table4": ("lamb", "linear", 1.76e-3, 1.76e-3 * (1 - (late - 3125) / 121_875)),
        "vaswani_table3": ("adam", "inverse_sqrt", (512 * 4000) ** -0.5, 512**-0.5 * 1e5**-0.5),
        "takase": ("adam", "inverse_sqrt", (512 * 4000) ** -0.5, 512**-0.5 * 1e5**-0.5),
        "t5_table2": ("adafactor", "flat_inverse_sqrt", 0.01, 1e5**-0.5),
    }  # fmt: skip
    for name, (optimizer, schedule, peak, then) in trained.items():
        table = TABLES[name][1]
        train, tiny = (variants(name, words)[table.base].train for words in ("", "tiny"))
        assert (train.optimizer, train.schedule) == (optimizer, schedule)
        rate = make_optimizer(train).schedule
        np.testing.assert_allclose([rate(train.warmup_steps), rate(late)], [peak, then], rtol=1e-4)
        assert (tiny.optimizer, tiny.schedule, tiny.clip_norm) == ("adamw", "cosine", 1.0)
    rates = {
        one.model.width: one.train.learning_rate for one in variants("vaswani_table3").values()
    }
    assert rates == {d: (d * 4000) ** -0.5 for d in (256, 512, 1024)}


def test_the_paper_s_pooler_and_head_are_counted_apart():
    """Lan et al. print six of eight counts with the pooler, the rows without sharing without."""
    table = albert_table4.TABLE
    printed = {}
    for name, row in table.rows.items():
        model = table.paper_model(name)
        alone = dataclasses.replace(model, output=dataclasses.replace(model.output, pooler=None))
        alone = num_parameters(alone)
        assert num_parameters(model) - alone == 590_592
        printed[name] = {f"{n / 1e6:.0f}M" for n in (alone, num_parameters(model))}
        assert not row.printed or row.printed in printed[name]


def test_scaled_embeddings_follow_the_width():
    for row, one in variants("vaswani_table3", "width/4").items():
        assert one.model.embedding.scale == pytest.approx(one.model.width**0.5), row
    assert variants("takase", "tiny")["cycle M=6 N=18"].model.sharing == "cycle:2"


def test_learning_rates_and_chosen_rows():
    found = setup(vaswani_table3, "tiny,lr,rows=^(base|big)$")
    rates = [one.values["train.learning_rate"] for one in found.variants]
    np.testing.assert_allclose(rates, [0.3 * r for r in (3e-3, 1e-2, 3e-2)] * 2, rtol=1e-9)
    assert [one.name for one in found.variants] == ["base"] * 3 + ["big"] * 3
    assert len(found.description.published.rows) == len(vaswani_table3.ROWS)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("tinny", "unknown word 'tinny'; known: tiny, width/N"),
        ("width/0", "unknown word 'width/0'"),
        ("width/3", "width/3: model.width 512 is not divisible by 3"),
        ("rows=F", "rows=F finds none; the rows are base, A h=1"),
    ],
)
def test_wrong_words(words, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        variants("vaswani_table3", words)


def test_two_variants_of_one_name():
    """None is merged with another, whatever differs."""
    both = [lab.Variant({"train.optimizer": one}, "a b") for one in ("adamw", "lion")]
    with pytest.raises(ValueError, match="two variants have the name 'a_b'"):
        lab.specs_of(lab.Experiment(), both, [0])
    specs = lab.specs_of(lab.Experiment(), lab.grid(train__optimizer=["adamw", "lion"]), [0])
    assert [spec.tags for spec in specs] == [{"optimizer": "adamw"}, {"optimizer": "lion"}]


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
    ours = small(t5_table2.MODEL, 20**0.5, 1.0)
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
def test_every_variant_of_the_study_has_a_ffn_left(words):
    """At every budget wide heads leave the reference's FFN an eighth at least."""
    found = setup(heads_and_sharing, f"study,{words}")
    specs = lab.specs_of(found.base, found.variants, [0], found.match)
    widths = [spec.config.model.ffn.width for spec in specs]
    assert len(widths) == 9
    assert min(widths) > found.base.model.ffn.width / 8
    assert {spec.config.matched for spec in specs} == {found.match.budget}


def test_scores_divided_by_the_width_of_a_head_are_variants_of_their_own():
    found = setup(heads_and_sharing, "scores,lr")
    assert len(found.variants) == 3 * 2 * 2 * 3
    for one in found.variants:
        layout = lab.with_values(found.base, one.values).model.layout
        width = layout.size("head_dim")
        by_width = one.all_tags["scores"] == "H"
        assert score_scale(layout) == (1 / width if by_width else width**-0.5)


def test_pairs_are_of_variants_that_the_sweep_has():
    for preset in ("", "study", "scores", "confirm"):
        found = setup(heads_and_sharing, preset)
        tags = [one.all_tags for one in found.variants]
        for pair in found.description.pairs:
            for side in pair:
                assert sum(side.items() <= one.items() for one in tags) == 1, (preset, side)


def test_at_equal_cache_one_wide_head_stands_for_four():
    found = setup(heads_and_sharing, "match=cache")
    wanted = lab.grid(layout=["wide", "narrow"])
    models = [s.config.model for s in lab.specs_of(found.base, wanted, [0], found.match)]
    assert [model.heads.num_heads for model in models] == [1, 4]
    assert {cache_bytes_per_token(model) for model in models} == {4 * 2 * 64 * 4}
    assert {model.ffn.width for model in models} == {found.base.model.ffn.width}


@pytest.mark.parametrize("name", byte_lm.MODELS)
def test_published_models_by_name(name):
    resolved = experiment_of(byte_lm.get_config(name))
    expected = published_config(name)
    assert resolved.model.plan == expected.plan
    assert dataclasses.replace(resolved.model, sharing=expected.sharing) == expected


@pytest.mark.slow
def test_a_table_from_end_to_end(tmp_path, nine_letters):
    """Two rows of ALBERT's table, few steps: the report has the paper's numbers beside ours."""
    config = "--config=experiments/configs/albert_table4.py:tiny,rows=E=128.(all|not)"
    flags = [config, f"--workdir={tmp_path}/run", f"--config.data.path={nine_letters}"]
    flags += ["--jax_disable_most_optimizations"]
    flags += [f"--config.train.{f}" for f in ("steps=3", "warmup_steps=1", "batch_size=2",
              "length=16", "eval_batch_size=8", "eval_windows=8", "seeds=(0,1)")]  # fmt: skip
    done = command("experiments.sweep", *flags)
    assert done.returncode == 0, done.stderr
    report = (tmp_path / "run/report.md").read_text()
    [row] = [line for line in report.splitlines() if "11,683,584" in line]
    assert "E=128 all-shared" in row
    assert "80.1" in row
