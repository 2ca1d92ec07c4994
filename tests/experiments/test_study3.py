"""Study 3: its plan in code, copy bytes by hand, exact widening, runs that resume bit for bit."""

import dataclasses
import os
import signal
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import ROOT

from attnlab.models import flops_per_token, num_parameters
from attnlab.training import Stopped
from attnlab.training.objectives.objective import Example
from experiments.studies.head_width import texts
from experiments.studies.study3 import copying, parts
from experiments.studies.study3 import run as study_run
from experiments.studies.study3.cost import run_seconds, status
from experiments.studies.study3.rows import (
    VERSION,
    Baselines,
    Origin,
    Row,
    Scores,
    Sizes,
    append_row,
    columns,
    read_rows,
)
from experiments.studies.study3.spec import (
    Run,
    Variant,
    model_config,
    num_steps,
    rate_centre,
    train_config,
)
from experiments.studies.study3.widen import widen

COUNTS = {"A": 226, "B": 42, "C": 84, "A64": 126, "D": 80, "A32": 406}
COLUMNS = [
    "part", "role", "num_heads", "head_dim", "width", "length", "positions", "optimizer", "start",
    "scale", "bytes_per_parameter", "text", "replicate", "seed", "learning_rate", "first_rate",
    "ffn_width", "parameters", "flops_per_token", "training_flops", "steps", "bytes_trained",
    "status", "heldout_bits", "heldout_copy_bits", "heldout_other_bits", "heldout_bytes",
    "heldout_copy_bytes", "validation_bits", "validation_copy_bits", "validation_other_bits",
    "train_bits", "copy_step", "probe_bits", "unigram", "ngram3", "ngram4", "ngram5", "gzip",
    "text_sha256", "commit", "python", "jax", "numpy", "optax", "flax", "machine", "seconds",
    "cpu_seconds", "version",
]  # fmt: skip


def row_of(run, bits=2.0, cpu=100.0):
    """A row without a training."""
    return Row(
        run,
        Sizes(256, 216_448, 557_056, 6.6e12, 1920, 3_932_160),
        Scores("complete", bits, 1.0, 2.1, 262_144, 3000, bits, 1.0, 2.1, 1.9, 0, ""),
        Baselines(4.5, 2.6, 2.1, 2.0, 2.5),
        Origin("d1", "abc", "3.11.7", "0.10", "2", "0.2", "0.12", "a machine", 200.0, cpu),
    )


def best_at(run):
    """Validation bits whose best rate is 1.2 x the centre, away from the grid's ends."""
    centre = run.first_rate or rate_centre(run.variant)
    return 2 + 0.05 * np.log(run.learning_rate / (1.2 * centre)) ** 2


def complete(part, rows):
    """`rows` and those of every run of a part, in the order in which it starts them."""
    while runs := parts.next_runs(part, rows):
        rows = [*rows, *(row_of(run, best_at(run)) for run in runs)]
    return rows


@pytest.fixture(scope="module")
def whole():
    """Rows of every part."""
    rows = []
    for part in parts.PARTS:
        rows = complete(part, rows)
    return rows


def test_the_planned_counts_and_ids(whole):
    counts = {p: sum(row.spec.part == p for row in whole) for p in parts.PARTS}
    assert counts == COUNTS
    planned = {
        part: sum(parts.count_runs(cell) for group in groups for cell in group.cells)
        for part, groups in parts.PARTS.items()
    }
    assert planned == COUNTS
    assert len({row.spec.id for row in whole}) == sum(COUNTS.values())


def test_seeds_are_new_and_paired(whole):
    """Every variant of a text, D, T, role and replicate has one seed; no other group has it."""
    owners = {}
    for run in (row.spec for row in whole):
        key = run.role, run.variant.width, run.variant.length, run.text, run.replicate
        owners.setdefault(run.seed, set()).add(key)
    assert all(len(keys) == 1 for keys in owners.values())
    assert len(owners) == len({key for keys in owners.values() for key in keys})
    assert min(owners) >= 3_000_000


def test_rates_come_from_the_grids(whole):
    of = lambda **fields: [
        row.spec
        for row in whole
        if all(getattr(row.spec.variant, k) == v for k, v in fields.items())
    ]
    narrow = [r for r in of(num_heads=4, head_dim=16, positions="t5", optimizer="muon")
              if r.variant.start == "scratch" and r.variant.width == 64]  # fmt: skip
    centre = rate_centre(Variant(4, 16))
    [rate] = {r.learning_rate for r in narrow if r.role == "judged"}
    assert rate == pytest.approx(1.2 * centre, rel=0.01)
    tuned = sorted({r.learning_rate for r in narrow if r.role == "tuning"})
    assert tuned == pytest.approx([0.6 * centre, centre, 1.7 * centre], rel=0.01)
    converted = of(start="converted", scale="root")
    assert {r.first_rate for r in converted} == {rate}
    [second] = {r.learning_rate for r in converted if r.role == "judged"}
    assert second == pytest.approx(1.2 * rate, rel=0.01)
    longer = of(length=256, num_heads=4)
    rotary = [r for r in of(num_heads=4, head_dim=16, positions="rotary", length=128, width=64)
              if r.role == "judged" and r.variant.optimizer == "muon"]  # fmt: skip
    assert longer[0].learning_rate == pytest.approx(rotary[0].learning_rate * 2**0.273, rel=0.01)


def test_a_grid_is_extended_where_its_end_is_best():
    variant = Variant(16, 4)
    bits = lambda run: 2 - run.learning_rate  # higher is always better
    rows, counts = [], []
    while True:
        runs, rate = parts.tuning("A", variant, rows)
        if rate is not None:
            break
        counts.append(len(runs))
        done = {row.spec.id for row in rows}
        rows += [row_of(run, bits(run)) for run in runs if run.id not in done]
    assert counts == [6, 8, 10]
    assert rate == pytest.approx(rate_centre(variant) * 1.7**3, rel=0.01)


def test_the_budget_is_that_of_the_second_study():
    for n, h in parts.POINTS[64]:
        model = model_config(Variant(n, h))
        assert (flops_per_token(model, 128), num_parameters(model)) == (557_056, 216_448)
    assert num_steps(Variant(4, 16)) == 1920
    assert train_config(Run("A", "judged", Variant(4, 16), "python", 0, 1, 0.01)).batch_size == 16
    assert model_config(Variant(16, 4, positions="half")).positions.fraction == 0.5
    assert train_config(
        Run("B", "judged", Variant(4, 16, optimizer="muon_per_head"), "python", 0, 1, 0.01)
    ).optimizer.per_head


def test_other_parts_first():
    with pytest.raises(parts.NotReady, match="part A lacks"):
        complete("C", [])


def test_the_columns_are_frozen(tmp_path):
    assert (columns(Row), VERSION) == (COLUMNS, 1)
    row = row_of(parts.next_runs("A", [])[0])
    assert append_row(tmp_path / "runs.csv", row)
    assert not append_row(tmp_path / "runs.csv", row)
    assert read_rows(tmp_path / "runs.csv") == [row]


def test_status_projects_from_measured_seconds():
    run = parts.next_runs("A", [])[0]
    total = sum(
        parts.count_runs(cell) * run_seconds(cell.variant)
        for group in parts.PARTS["A"]
        for cell in group.cells
    )
    assert status("A", [])[-1].endswith(f"{total / 3600:.1f} to go")
    twice = row_of(run, cpu=2 * run_seconds(run.variant))  # this machine takes twice as long
    left = 2 * (total - run_seconds(run.variant)) / 3600
    assert status("A", [twice])[-1].endswith(f"{left:.1f} to go")


# Copy bytes -------------------------------------------------------------------------------------


def by_hand(text, context):
    """Is the context before target i in the text before it, without its last byte?"""
    found = []
    for end in range(1, len(text) + 1):
        last = text[end - context : end] if end >= context else None
        found.append(last is not None and text.find(last, 0, end - 1) >= 0)
    return found


@pytest.mark.parametrize("context", [1, 3, 8])
def test_copy_targets_by_hand(context):
    texts = [b"abcdefghij abcdefghij!", b"aaaaaaaaaaaaaaaaaaaaaa", b"abcdefghijklmnopqrstuv"]
    got = copying.copy_targets(jnp.array([list(text) for text in texts]), context)
    assert got.tolist() == [by_hand(text, context) for text in texts]
    if context == 8:  # after "abcdefgh", "bcdefghi", "cdefghij"
        assert np.flatnonzero(got[0]).tolist() == [18, 19, 20]
        assert np.flatnonzero(got[1]).tolist() == list(range(8, 22))
        assert not got[2].any()


def test_copy_and_other_bits_by_hand():
    """Two windows; the target of the padding counts nowhere."""
    rng = np.random.default_rng(0)
    tokens = jnp.array([list(b"abcdefghij abcdefghij"), list(b"the quick brown fox j")])
    targets = jnp.array(rng.integers(0, 256, tokens.shape))
    weights = jnp.ones(tokens.shape).at[:, -1].set(0)
    logits = jnp.asarray(rng.normal(size=(*tokens.shape, 256)), jnp.float32)
    example = Example({"tokens": tokens}, targets, weights)
    scores = {}
    for metric in copying.copy_objective().metrics:
        amounts, counts = metric.measure(logits, example)
        scores[metric.name] = np.array([jnp.sum(amounts) / jnp.sum(counts) / metric.divisor])
    log_p = np.asarray(jax.nn.log_softmax(logits))
    bits = -np.take_along_axis(log_p, np.asarray(targets)[..., None], -1)[..., 0] / np.log(2)
    is_copy = np.zeros(tokens.shape, bool)
    is_copy[0, 18:20] = True  # and 20, which is padding
    counted = np.asarray(weights, bool)
    expected = bits[counted].mean(), bits[is_copy].mean(), bits[counted & ~is_copy].mean(), 2 / 40
    np.testing.assert_allclose(copying.split_bits(scores), expected, rtol=1e-5)


def test_the_probe_scores_the_second_half():
    """A model that predicts the byte 64 before has 0 bits, a uniform one 8."""
    text = np.random.default_rng(1).integers(40, 140, 9999)
    tokens = copying.probe_tokens(text)
    assert (tokens.shape, len(np.unique(tokens))) == ((64, 128), 64)
    assert np.array_equal(tokens[:, :64], tokens[:, 64:])

    class Copies:
        @staticmethod
        def apply(variables, tokens):
            back = jnp.roll(tokens, copying.HALF - 1, axis=1)  # of the target, 64 before it
            return type("Outputs", (), {"logits": variables["params"] * jax.nn.one_hot(back, 256)})

    measure = copying.probe_measure(Copies, text)
    assert float(measure(0.0, 100.0)["probe"]) == pytest.approx(0, abs=1e-5)
    assert float(measure(0.0, 0.0)["probe"]) == pytest.approx(8, rel=1e-4)
    assert copying.copy_step({0: 8.0, 96: 2.0}) == -1


# Widening ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", ["old", "root"])
def test_widening_keeps_the_function_and_lets_the_new_width_learn(scale):
    narrow = model_config(Variant(2, 4, 8, 16, positions="t5"))
    wide = model_config(Variant(2, 16, 8, 16, positions="t5"))
    # The old scale of 4x16 is 1/4; here heads of 4 have 1/2.
    kept = dataclasses.replace(wide.heads, scale=0.5 if scale == "old" else None)
    wide = dataclasses.replace(wide, heads=kept)
    tokens = jax.random.randint(jax.random.key(2), (3, 16), 0, 256)
    init = lambda model, seed: model.build().init(jax.random.key(seed), tokens)["params"]
    large = jax.tree.map(
        lambda a: a + jax.random.normal(jax.random.key(a.size), a.shape), init(narrow, 0)
    )
    factor = narrow.layout.score_scale / wide.layout.score_scale
    assert factor == {"old": 1.0, "root": 2.0}[scale]
    wider = widen(large, init(wide, 1), factor)
    logits = lambda model, params: model.build().apply({"params": params}, tokens).logits
    before, after = logits(narrow, large), logits(wide, wider)
    assert jnp.abs(after - before).max() <= 1e-6 * jnp.abs(before).max() + 1e-6
    grads = jax.grad(lambda params: jnp.sum(logits(wide, params) ** 2))(wider)
    attention = grads["layers"]["attention"]
    assert jnp.abs(attention["k"][..., 4:]).min(axis=(1, 3)).min() > 0
    assert jnp.abs(attention["o"][:, :, 4:]).min(axis=(2, 3)).min() > 0
    assert jnp.abs(wider["layers"]["attention"]["q"][..., 4:]).min() > 0
    assert jnp.abs(wider["layers"]["attention"]["v"][..., 4:]).min() > 0


def test_the_rate_after_a_reset_rises_to_the_schedule():
    run = Run("C", "judged", parts.RESET, "python", 0, 1, 0.01, 0.01)
    config = train_config(run)
    whole = study_run.make_optimizer(config).schedule
    model = model_config(run.variant)
    later = study_run.reset_optimizer(config, 960, model).schedule
    np.testing.assert_allclose(later(0), whole(960) / 97, rtol=1e-5)
    np.testing.assert_allclose(later(96), whole(1056), rtol=1e-5)
    np.testing.assert_allclose(later(959), whole(1919), rtol=1e-5)


# Runs -------------------------------------------------------------------------------------------


def numbers(row):
    """All but what depends on time."""
    return dataclasses.replace(row, origin=None)


KINDS = [
    Run("A", "judged", Variant(4, 4, 16, positions="half", bytes_per_parameter=4.0),
        "python", 0, 5, 0.01),
    Run("C", "judged",
        Variant(4, 64, 16, positions="t5", start="converted", bytes_per_parameter=4.0),
        "python", 0, 5, 0.01, 0.02),
    Run("D", "judged", Variant(4, 4, 16, 256, bytes_per_parameter=4.0), "python", 0, 5, 0.01),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("run", KINDS, ids=["A", "C", "D"])
def test_stopped_and_resumed_it_has_the_same_row(run, tmp_path, monkeypatch):
    """Stopped twice: of C, step 4 of 24 is before the reset and step 17 after it."""
    assert num_steps(run.variant) == 24
    monkeypatch.setattr(texts, "HELDOUT_BYTES", 1 << 14)
    monkeypatch.setattr(texts, "VALIDATION_BYTES", 1 << 13)
    whole = study_run.run_one(run, study_run.Place(tmp_path, tmp_path / "whole", "c"))
    place = study_run.Place(tmp_path, tmp_path / "stopped", "c")
    make = study_run.dataset_of
    for stop in (4, 17):

        def stopping(corpus, length, stop=stop):
            dataset = make(corpus, length)

            def batch(seed, step, size, part):
                if step == stop:
                    os.kill(os.getpid(), signal.SIGTERM)
                return dataset.batches(seed, step, size, part)

            return dataclasses.replace(dataset, batches=batch)

        monkeypatch.setattr(study_run, "dataset_of", stopping)
        with pytest.raises(Stopped, match=r"the state is saved"):
            study_run.run_one(run, place)
    monkeypatch.setattr(study_run, "dataset_of", make)
    resumed = study_run.run_one(run, place)
    assert numbers(resumed) == numbers(whole)
    assert whole.scores.status == "complete"
    s = whole.scores
    share = s.heldout_copy_bytes / s.heldout_bytes
    together = share * s.heldout_copy_bits + (1 - share) * s.heldout_other_bits
    assert together == pytest.approx(s.heldout_bits, rel=1e-5)
    if run.part == "D":
        assert [int(p.split(":")[0]) for p in s.probe_bits.split()] == list(range(25))


def start(folder, *more):
    words = [sys.executable, "-m", "experiments.studies.study3", "--part=tiny",
             f"--rows={folder / 'runs.csv'}", f"--data={folder}",
             f"--workdir={folder / 'work'}", *more]  # fmt: skip
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    return subprocess.Popen(words, cwd=ROOT, **pipes)


@pytest.mark.slow
def test_the_command_is_stopped_and_goes_on(tmp_path):
    """Of the small runs; SIGTERM ends with 75, and a row that is there is not trained again."""
    first = start(tmp_path)
    until = time.monotonic() + 300
    while not read_rows(tmp_path / "runs.csv"):
        assert time.monotonic() < until
        time.sleep(0.2)
    first.send_signal(signal.SIGTERM)
    assert "stopped; repeat the command to resume" in first.communicate(timeout=100)[0]
    assert first.returncode == 75
    before = read_rows(tmp_path / "runs.csv")
    assert len(before) < len(parts.tiny_runs())
    again = start(tmp_path)
    out = again.communicate(timeout=500)[0]
    assert again.returncode == 0, out
    after = read_rows(tmp_path / "runs.csv")
    assert after[: len(before)] == before
    assert {row.spec.id for row in after} == {run.id for run in parts.tiny_runs()}
