"""The published tables: exact counts, rates at the papers' sizes, T5's functions."""

import dataclasses

import jax
import numpy as np
import pytest
from config_files import experiments
from conftest import assert_close

from attnlab.models import num_parameters
from attnlab.pretrained import published_config
from attnlab.training import make_optimizer
from experiments.studies.tables.study import TABLES

BASE, SIX = 63_045_632, 60_878_848
PARAMETERS = {
    "vaswani": [
        *[BASE] * 5, 55_967_744, 58_327_040, 33_644_544, 48_345_088, 77_746_176, 26_816_512,
        163_815_424, 50_450_432, 88_236_032, *[BASE] * 4, BASE + 1024 * 512, 214_171_648,
    ],
    "albert": [
        89_650_176, 11_683_584, 63_647_232, 37_686_528, 109_081_344, 31_114_752, 83_078_400,
        57_117_696, 18_771_456, 25_859_328, 32_947_200, 47_122_944,
    ],
    "t5": [222_903_552, 137_949_312, 123_790_080],
    "t5_language_model": [109_628_544],
    "takase": [SIX, 209_838_080, 62_935_040, *[SIX] * 6],
}  # fmt: skip
"""Of every row. Vaswani: for 37,000 symbols, attention without biases and sinusoidal positions.
ALBERT: with the pooler, and neither the masked-LM head nor the classifier, as the paper counts all
rows but those without sharing. T5: sharing leaves 61.9 %, half depth 55.5 %, since the paper's P
leaves cross-attention and embedding out. Takase: for 32,768 symbols."""


@pytest.mark.parametrize("name", TABLES)
def test_every_row_has_the_paper_s_parameters(name):
    models = [one.model for one in experiments("tables", f"table={name}").values()]
    if name == "albert":
        plain = dataclasses.replace(models[0].output, kind="none", bias=False, transform=None)
        models = [dataclasses.replace(model, output=plain) for model in models]
    assert list(map(num_parameters, models)) == PARAMETERS[name]


@pytest.mark.parametrize("name", TABLES)
def test_tiny_has_the_same_rows_in_proportion(name):
    full, tiny = (experiments("tables", f"table={name}{preset}") for preset in ("", ",tiny"))
    assert list(full) == list(tiny)
    for row, one in tiny.items():
        large, small = full[row].model, one.model
        ratio = TABLES[name].widths
        assert (large.width, large.ffn.width) == (small.width * ratio, small.ffn.width * ratio)
        assert large.num_layers == small.num_layers * TABLES[name].depths
        if large.embedding.scale != 1:
            assert small.embedding.scale == pytest.approx(small.width**0.5)
        shares = [m.plan.num_groups["ffn"] / m.num_layers for m in (large, small)]
        assert shares[0] == shares[1] or small.sharing == "albert"


@pytest.mark.parametrize(
    ("name", "optimizer", "peak", "late"),
    [
        ("albert", "lamb", 1.76e-3, 1.76e-3 * (1 - (99_999 - 3125) / 121_875)),
        ("vaswani", "adam", (512 * 4000) ** -0.5, 512**-0.5 * 1e5**-0.5),
        ("t5", "adafactor", 0.01, 1e5**-0.5),
    ],
)
def test_full_size_trains_as_the_paper(name, optimizer, peak, late):
    """The rate of the largest step and of step 100,000."""
    train = next(iter(experiments("tables", f"table={name}").values())).train
    assert train.optimizer.name == optimizer
    rate = make_optimizer(train).schedule
    found = [rate(train.schedule.warmup_steps), rate(99_999)]
    np.testing.assert_allclose(found, [peak, late], rtol=1e-4)


def test_some_of_the_rows():
    assert list(experiments("tables", "tiny,rows=base+d_k")) == ["base", "B d_k=16", "B d_k=32"]
    for wrong, named in (("tinny", "tinny"), ("rows=base+Z", "rows=Z")):
        with pytest.raises(ValueError, match=named):
            experiments("tables", wrong)


@pytest.mark.slow
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
    ours = small(TABLES["t5"].model, 20**0.5, 1.0)
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
