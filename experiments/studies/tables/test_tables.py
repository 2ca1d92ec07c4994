"""The published tables: exact counts, training, sizes of `tiny`."""

import dataclasses

import jax
import numpy as np
import pytest
from config_files import experiments
from conftest import assert_close

from attnlab.models import num_parameters, to_dict
from attnlab.nested import flatten
from attnlab.pretrained import published_config
from attnlab.training import make_optimizer
from experiments.studies.tables import albert, t5, t5_language_model, takase, vaswani

TABLES = {
    "albert": albert.TABLE,
    "vaswani": vaswani.TABLE,
    "takase": takase.TABLE,
    "t5": t5.TABLE,
    "t5_language_model": t5_language_model.TABLE,
}
WIDTHS = ("width", "heads.head_dim", "heads.value_dim", "ffn.width", "embedding.width")
DEPTHS = ("num_layers", "encoder.num_layers")


@pytest.mark.parametrize("name", TABLES)
def test_every_row_has_the_paper_s_parameters(name):
    found = {row: one.model for row, one in experiments(name).items()}
    if name == "albert":  # less the masked-LM head, which the paper does not count
        plain = dataclasses.replace(
            albert.TABLE.model.output, kind="none", bias=False, transform=None
        )
        found = {row: dataclasses.replace(model, output=plain) for row, model in found.items()}
    expected = {row: one.parameters for row, one in TABLES[name].rows.items()}
    assert {row: num_parameters(model) for row, model in found.items()} == expected


@pytest.mark.parametrize("name", TABLES)
def test_tiny_keeps_the_ratios(name):
    """But for the embedding of ALBERT, which would be too narrow."""
    table, full, tiny = TABLES[name], experiments(name), experiments(name, "tiny")
    by = dict.fromkeys(WIDTHS, table.widths) | dict.fromkeys(DEPTHS, table.depths)
    for row, one in tiny.items():
        large, small = (flatten(to_dict(e.model)) for e in (full[row], one))
        for field, divisor in by.items():
            if large.get(field) and (name, field) != ("albert", "embedding.width"):
                assert large[field] == small[field] * divisor, (row, field)
        if large["embedding.scale"] != 1:
            assert small["embedding.scale"] == pytest.approx(one.model.width**0.5)
        shares = [e.model.plan.num_groups["ffn"] / e.model.num_layers for e in (full[row], one)]
        assert shares[0] == shares[1] or one.model.sharing == "albert"
        assert one.train.steps == table.tiny["train.steps"]


@pytest.mark.parametrize(
    ("name", "optimizer", "schedule", "peak", "late"),
    [
        ("albert", "lamb", "linear", 1.76e-3, 1.76e-3 * (1 - (99_999 - 3125) / 121_875)),
        ("vaswani", "adam", "inverse_sqrt", (512 * 4000) ** -0.5, 512**-0.5 * 1e5**-0.5),
        ("t5", "adafactor", "flat_inverse_sqrt", 0.01, 1e5**-0.5),
    ],
)
def test_full_size_trains_as_the_paper_and_tiny_as_all_do(name, optimizer, schedule, peak, late):
    """The rate of the largest step and of step 100,000."""
    train, tiny = TABLES[name].train, next(iter(experiments(name, "tiny").values())).train
    assert (train.optimizer.name, train.schedule.name) == (optimizer, schedule)
    rate = make_optimizer(train).schedule
    found = [rate(train.schedule.warmup_steps), rate(99_999)]
    np.testing.assert_allclose(found, [peak, late], rtol=1e-4)
    assert (tiny.optimizer.name, tiny.schedule.name) == ("adamw", "cosine")


def test_wider_transformers_have_smaller_rates():
    rates = {
        e.model.width: e.train.optimizer.learning_rate for e in experiments("vaswani").values()
    }
    assert rates == {d: (d * 4000) ** -0.5 for d in (256, 512, 1024)}


def test_some_of_the_rows():
    assert list(experiments("vaswani", "tiny,rows=^(base|big)$")) == ["base", "big"]


@pytest.mark.parametrize("preset", ["tinny", "width/4", "rows=(", "rows=F"])
def test_wrong_presets(preset):
    with pytest.raises(ValueError, match=preset.replace("(", r"\(")):
        experiments("vaswani", preset)


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
    ours = small(t5.TABLE.model, 20**0.5, 1.0)
    factors = {"q": 4**0.5, "embedding": 20**-0.5}

    def outputs(key):
        lengths = {"source": 5, "tokens": 6}
        tokens = {name: jax.random.randint(key, (2, n), 0, 11) for name, n in lengths.items()}
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
