"""Study 3: its plan in code, rows, copy bytes by hand, exact widening, runs that resume."""

import dataclasses
import math
import os
import signal

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest
from commands import command

from attnlab import lab
from attnlab.lab.workdir import run_folder
from attnlab.models import cache_bytes_per_token, flops_per_token, num_parameters
from attnlab.training import Stopped
from attnlab.training.config import make_optimizer
from attnlab.training.objectives.objective import Example
from experiments.studies.head_width import texts
from experiments.studies.study3 import copying, parts
from experiments.studies.study3.cost import run_seconds, status
from experiments.studies.study3.rows import (
    COLUMNS,
    LATER_FIELDS,
    NEW,
    OLD,
    PUBLISHED,
    add_rows,
    done_in,
    new_rows,
    read_rows,
    runs_of,
)
from experiments.studies.study3.spec import (
    Run,
    Variant,
    cache_numbers,
    half_spec,
    model_config,
    num_steps,
    rate_centre,
    run_spec,
    train_config,
)
from experiments.studies.study3.widen import widen, write_start
from experiments.studies.study3.windows import StudyWindows

STUDY = "experiments.studies.study3"
COUNTS = {
    "A": 226, "B": 42, "C": 84, "A64": 126, "D": 80, "A32": 406, "E": 412, "F": 396,
}  # fmt: skip


def rows_of(runs, bits=2.0, seconds=100.0):
    """Rows without a training."""
    own = [
        dataclasses.asdict(run) | dataclasses.asdict(run.variant) | {"validation_bits": bits}
        for run in runs
    ]
    more = {"status": "complete", "commit": "abc", "text_sha256": "d1", "probe_bits": "",
            "seconds": seconds, "heldout_bits": bits, "steps": 1920, "version": 2}  # fmt: skip
    return pd.DataFrame(own, columns=COLUMNS).assign(**more)


def best_at(run):
    """Validation bits whose best rate is 1.2 x the centre, away from the grid's ends."""
    centre = run.first_rate or rate_centre(run.variant)
    return 2 + 0.05 * np.log(run.learning_rate / (1.2 * centre)) ** 2


def complete(part, done):
    """`done` with every run of a part, in the order in which it starts them."""
    while runs := parts.next_runs(part, {run.id: bits for run, bits in done.items()}):
        done = done | {run: best_at(run) for run in runs}
    return done


@pytest.fixture(scope="module")
def whole():
    """The runs of every part."""
    done = {}
    for part in parts.PARTS:
        done = complete(part, done)
    return list(done)


def test_the_planned_counts_and_ids(whole):
    assert {p: sum(run.part == p for run in whole) for p in parts.PARTS} == COUNTS
    planned = {
        part: sum(parts.count_runs(part, cell) for group in groups for cell in group.cells)
        for part, groups in parts.PARTS.items()
    }
    assert planned == COUNTS
    assert len({run.id for run in whole}) == sum(COUNTS.values())


def test_seeds_are_new_and_paired(whole):
    """Every variant of a text, D, T, role and replicate has one seed; no other group has it."""
    owners = {}
    for run in whole:
        key = run.role, run.variant.width, run.variant.length, run.text, run.replicate
        owners.setdefault(run.seed, set()).add(key)
    assert all(len(keys) == 1 for keys in owners.values())
    assert len(owners) == len({key for keys in owners.values() for key in keys})
    assert min(owners) >= 3_000_000


def test_rates_come_from_the_grids(whole):
    of = lambda **fields: [
        run
        for run in whole
        if all(getattr(run.variant, k) == v for k, v in fields.items()) and run.part not in "EF"
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


def test_rates_of_later_parts_follow_the_formula(whole):
    """E at equal FLOPs: (steps / 1,920)^-0.588; F: the formula's ratio of widths and bytes."""

    def rate(variant):
        [found] = {r.learning_rate for r in whole if r.variant == variant and r.role == "judged"}
        return found

    mla = parts.cache_variant("mla", 4)
    longer = rate(parts.equal_flops(mla)) / rate(mla)
    assert longer == pytest.approx((1610 / 1920) ** -0.588, rel=2e-3)
    narrow, wide = parts.layers_variant("ffn", 4), parts.layers_variant("ffn", 4, width=128)
    ratio = 2**-1.885 * (5 / 20) ** -0.588 * 2**0.024  # of width, bytes and heads
    assert rate(wide) / rate(narrow) == pytest.approx(ratio, rel=2e-3)


def test_a_grid_is_extended_where_its_end_is_best():
    variant = Variant(16, 4)
    done, counts = {}, []
    while True:
        runs, rate = parts.tuning("A", variant, done)
        if rate is not None:
            break
        counts.append(len(runs))
        done |= {run.id: 2 - run.learning_rate for run in runs}  # higher is always better
    assert counts == [6, 8, 10]
    assert rate == pytest.approx(rate_centre(variant) * 1.7**3, rel=0.01)


@pytest.mark.parametrize("variant", [v for c in (4, 2, 8) for v in parts.at_cache(c)],
                         ids=lambda v: f"{v.kind}-{v.cache}-{v.optimizer}")  # fmt: skip
def test_the_models_of_part_e_have_their_cache_and_the_parameters(variant):
    model, mha = model_config(variant), model_config(parts.MHA)
    numbers = cache_bytes_per_token(model) / (4 * model.num_layers)
    # attnlab keeps the rotated key beside the value; the plan counts the value alone.
    kept = numbers / 2 if variant.kind == "tied" else numbers
    assert kept == cache_numbers(variant) == 128 / variant.cache
    # Half a unit of the FFN.
    assert num_parameters(model) == pytest.approx(num_parameters(mha), abs=258)
    equal = parts.equal_flops(variant)
    flops = flops_per_token(model, 256) * num_steps(equal)
    assert flops == pytest.approx(flops_per_token(mha, 256) * 1920, rel=1e-3)


def test_the_models_of_part_f_share_and_are_scaled():
    for cell in parts.layers_cells(96, 960):
        variant, model = cell.variant, model_config(cell.variant)
        groups = {name: len(set(model.plan[name])) for name in ("attention", "ffn")}
        shared = {"both": ("attention", "ffn"), "none": ()}.get(variant.shared, (variant.shared,))
        for name, count in groups.items():
            expected = variant.num_layers // (variant.repeats if name in shared else 1)
            assert count == expected
        scale = 1 / variant.num_layers
        assert (model.attention.output_scale, model.ffn.output_scale) == (scale, scale)
        assert num_steps(variant) == 960


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
        parts.next_runs("D", {})


def test_rows_of_both_versions_are_read_and_a_run_is_kept_once(tmp_path):
    """The published rows are of version 1, whose columns are those of version 2 but for some."""
    old = read_rows(PUBLISHED / OLD)
    first = runs_of(old)[0]
    assert first == Run("A", "tuning", Variant(16, 4), "wikitext2", 0, 3564010, 0.00972)
    assert done_in(old)[first.id] == 1.934855578586433  # no digit is lost
    rows = rows_of([first, Run("E", "judged", parts.MHA, "web", 0, 7, 0.01)])
    assert add_rows(tmp_path / NEW, rows) == [run.id for run in runs_of(rows)]
    assert add_rows(tmp_path / NEW, rows) == []
    assert runs_of(read_rows(tmp_path / NEW)) == runs_of(rows)
    twice = pd.concat([rows, rows])
    twice.to_csv(tmp_path / "twice.csv", index=False)
    with pytest.raises(ValueError, match="twice"):
        read_rows(tmp_path / "twice.csv")
    rows.drop(columns="seconds").to_csv(tmp_path / "other.csv", index=False)
    with pytest.raises(ValueError, match="other columns"):
        read_rows(tmp_path / "other.csv")
    assert set(LATER_FIELDS) < set(COLUMNS)


def test_status_projects_from_measured_seconds():
    run = parts.next_runs("A", {})[0]
    total = sum(
        parts.count_runs("A", cell) * run_seconds(cell.variant)
        for group in parts.PARTS["A"]
        for cell in group.cells
    )
    assert status("A", rows_of([]))[-1].endswith(f"{total / 3600:.1f} to go")
    twice = rows_of([run], seconds=2 * run_seconds(run.variant))  # this machine takes twice as long
    left = 2 * (total - run_seconds(run.variant)) / 3600
    assert status("A", twice)[-1].endswith(f"{left:.1f} to go")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--part=G"], "no part G"),
        (["--part=A", "--workdir=x"], "part A is run at commit 7986c4264a3d alone"),
        (["--part=E", "--data=."], "--workdir is needed"),
        (["--part=E", "--workdir=x", "--data=."], "wikitext2/train.txt.gz of the text wikitext2"),
        (["--part=D", "--workdir=x", "--data=."], "part A lacks tuning runs"),
    ],
)
def test_what_cannot_be_done_is_refused_before_training(tmp_path, flags, said):
    done = command(STUDY, f"--results={tmp_path}", *flags)
    assert done.returncode == 1
    [line] = done.stderr.splitlines()
    assert said in line
    assert list(tmp_path.iterdir()) == []


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
        scores[metric.name] = float(jnp.sum(amounts) / jnp.sum(counts) / metric.divisor)
    log_p = np.asarray(jax.nn.log_softmax(logits))
    bits = -np.take_along_axis(log_p, np.asarray(targets)[..., None], -1)[..., 0] / np.log(2)
    is_copy = np.zeros(tokens.shape, bool)
    is_copy[0, 18:20] = True  # and 20, which is padding
    counted = np.asarray(weights, bool)
    expected = bits[counted].mean(), bits[is_copy].mean(), bits[counted & ~is_copy].mean(), 2 / 40
    np.testing.assert_allclose(copying.split_bits(scores), expected, rtol=1e-5)


def test_the_probe_scores_the_second_half():
    """A model that predicts the byte 64 before has 0 bits, a uniform one 8."""
    tokens = copying.probe_tokens(range(40, 104))
    assert (tokens.shape, len(np.unique(tokens))) == ((64, 128), 64)
    assert np.array_equal(tokens[:, :64], tokens[:, 64:])

    class Copies:
        @staticmethod
        def apply(variables, tokens):
            back = jnp.roll(tokens, copying.HALF - 1, axis=1)  # of the target, 64 before it
            return type("Outputs", (), {"logits": variables["params"] * jax.nn.one_hot(back, 256)})

    bits = lambda scale: float(copying.probe_bits(Copies, scale, jnp.asarray(tokens)))
    assert bits(100.0) == pytest.approx(0, abs=1e-5)
    assert bits(0.0) == pytest.approx(8, rel=1e-4)
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


def test_the_rates_of_both_halves_are_those_of_one_training(tmp_path):
    run = Run("C", "judged", parts.RESET, "python", 0, 1, 0.01, 0.01)
    whole = make_optimizer(train_config(run)).schedule
    halves = half_spec(run, tmp_path), run_spec(run, tmp_path)
    assert [spec.config.train.steps for spec in halves] == [960, 960]
    first, later = (make_optimizer(spec.config.train).schedule for spec in halves)
    for step in (0, 95, 96, 959):
        np.testing.assert_allclose(first(step), whole(step), rtol=1e-5)
    np.testing.assert_allclose(later(0), whole(960) / 97, rtol=1e-5)
    np.testing.assert_allclose(later(96), whole(1056), rtol=1e-5)
    np.testing.assert_allclose(later(959), whole(1919), rtol=1e-5)


def test_the_second_half_reads_the_batches_that_follow(tmp_path):
    whole, later = (StudyWindows(skipped=n).load(16) for n in (0, 5))
    rows = later.batches(3, 2, 4, slice(None))["tokens"]
    assert np.array_equal(rows, whole.batches(3, 7, 4, slice(None))["tokens"])


# Runs -------------------------------------------------------------------------------------------


def small(variant, number):
    return dataclasses.replace(variant, bytes_per_parameter=number)


TINY = Variant(4, 4, 16, positions="half", bytes_per_parameter=4.0)
KINDS = {
    "scratch": Run("A64", "judged", TINY, "python", 0, 5, 0.01),
    "probe": Run("D", "judged", Variant(4, 4, 16, 256, bytes_per_parameter=33.0), "python", 0, 5,
                 0.01),
    "warm start": Run("C", "judged", dataclasses.replace(TINY, start="reset"), "python", 0, 5,
                      0.01, 0.02),
    "conversion": Run("C", "judged", Variant(4, 64, 16, positions="t5", start="converted",
                                             bytes_per_parameter=4.0), "python", 0, 5, 0.01, 0.02),
    "cache": Run("E", "judged", small(parts.cache_variant("mla", 4, "muon_per_head"), 0.2),
                 "python", 0, 5, 0.01),
    "sharing": Run("F", "judged", small(parts.layers_variant("ffn", 4), 0.2), "python", 0, 5, 0.01),
}  # fmt: skip


def rows_by_lab(run, work, data, stop=None):
    """The row of a run by `lab.run_one`, stopped at a step of it and of its first half."""
    start = None
    if run.variant.start != "scratch":
        half = half_spec(run, data)
        start = run_folder(work, half)
        finished(half, work, stop)
        if run.variant.start == "converted":
            write_start(start, work / "converted", model_config(run.variant), run.seed)
            start = work / "converted"
    spec = run_spec(run, data, start)
    result = finished(spec, work, stop)
    results = lab.Results([result])
    return new_rows({run.id: run}, results, data, work / "shared", "c")


def finished(spec, work, stop):
    """The result of a run, which gets SIGTERM when it reads the batch of the step `stop`."""
    quiet = lab.RunOptions(speaks=False)
    if stop is not None:
        data = spec.config.data.load(spec.config.train.length)

        def batch(seed, step, size, part):
            if step == stop:
                os.kill(os.getpid(), signal.SIGTERM)
            return data.batches(seed, step, size, part)

        stopping = dataclasses.replace(data, batches=batch)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(StudyWindows, "load", lambda *args: stopping)
            with pytest.raises(Stopped, match="the state is saved"):
                lab.run_one(spec, work, options=quiet)
    return lab.run_one(spec, work, options=quiet)


@pytest.mark.slow
@pytest.mark.parametrize("run", KINDS.values(), ids=KINDS)
def test_stopped_and_resumed_it_has_the_same_row(run, tmp_path, monkeypatch):
    """Both halves are stopped, too. A row has all but seconds, which are those of every start."""
    monkeypatch.setattr(texts, "HELDOUT_BYTES", 1 << 14)
    monkeypatch.setattr(texts, "VALIDATION_BYTES", 1 << 13)
    whole = rows_by_lab(run, tmp_path / "whole", tmp_path)
    steps = num_steps(run.variant) // (1 if run.variant.start == "scratch" else 2)
    stopped = rows_by_lab(run, tmp_path / "stopped", tmp_path, stop=steps // 2 + 1)
    timed = ["seconds", "cpu_seconds"]
    pd.testing.assert_frame_equal(
        stopped.drop(columns=timed), whole.drop(columns=timed), check_exact=True
    )
    row = whole.iloc[0]
    assert row["status"] == "complete"
    assert row["heldout_bits"] < math.log2(256)
    share = row["heldout_copy_bytes"] / row["heldout_bytes"]
    together = share * row["heldout_copy_bits"] + (1 - share) * row["heldout_other_bits"]
    assert together == pytest.approx(row["heldout_bits"], rel=1e-5)
    if run.part == "D":
        assert [int(p.split(":")[0]) for p in row["probe_bits"].split()] == [0, 96, 192, 198]
        log = next((tmp_path / "whole").rglob("metrics.jsonl"))
        log.write_text(log.read_text().replace('"probe"', '"other"', 1))
        with pytest.raises(ValueError, match="no probe at step 0"):
            rows_by_lab(run, tmp_path / "whole", tmp_path)


@pytest.mark.slow
def test_the_command_trains_the_runs_without_rows(tmp_path, monkeypatch):
    """Of the small runs, two of which have a row."""
    runs = parts.tiny_runs()
    kept = [run for run in runs if run.variant.start == "scratch" and run.part == "tiny"][2:]
    there = rows_of(kept).assign(text_sha256=texts.load_text("python", tmp_path).sha256)
    add_rows(tmp_path / NEW, there)
    flags = [f"--results={tmp_path}", f"--workdir={tmp_path / 'work'}", f"--data={tmp_path}"]
    done = command(STUDY, "--part=tiny", "--jobs=1", "--accept_commit=abc", *flags)
    assert done.returncode == 0, done.stderr
    rows = read_rows(tmp_path / NEW)
    assert {run.id for run in runs_of(rows)} == {run.id for run in runs}
    new = rows[rows["commit"] != "abc"]
    assert len(new) == len(runs) - len(kept)
    assert (new["heldout_bits"] < 8).all()
