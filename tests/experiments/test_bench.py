"""The benchmarks: their arithmetic, that they notice a peer that computes something else, and that
a stopped run continues."""

import csv
import functools
import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from commands import command

from attnlab import heads
from attnlab.attention import BACKENDS, Backend, dot_product_attention, explain
from experiments.benchmarks import accelerator, attention, measure, train
from experiments.benchmarks.measure import Case, Entry, Records, measure_cases
from experiments.benchmarks.peaks import fraction_of_peak
from experiments.benchmarks.peers.attention import FUNCTIONS, LAYERS, Peer

ABOUT = {"device": "1 x NVIDIA H200", "jax": "1"}


@pytest.fixture
def clock(monkeypatch):
    """A clock that only entries move: `clock(s)` is the work of s seconds."""
    now = [0.0]

    def work(seconds):
        def run():
            now[0] += seconds
            return seconds

        return run

    monkeypatch.setattr(measure.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(measure.time, "monotonic", lambda: now[0])
    return work


def test_a_ratio_is_ours_over_theirs(clock):
    seconds = {"ours": 2.0, "theirs": 4.0, "theirs, again": 6.0, "quick": 1.6, "even": 1.9}
    entries = [Entry(n, clock(s), n == "ours", "again" in n) for n, s in seconds.items()]
    shallow = Entry("ours, 2 layers", clock(0.3), True, same_work=False)
    rows = measure.measure([*entries, measure.refuse("unable", "heads too wide"), shallow], 5)
    assert [r["ratio"] for r in rows[:5]] == pytest.approx([1.0, 0.5, 1.5, 1.25, 2 / 1.9])
    assert [r["low"] for r in rows[:5]] == pytest.approx([r["high"] for r in rows[:5]])
    # 1.05 is within the bar of 1.10, yet its interval does not reach 1.00.
    verdicts = ["ours", "not slower", "A/A, the noise", "SLOWER", "SLOWER"]
    verdicts += ["refuses: heads too wide", "ours, other work"]
    assert [r["verdict"] for r in rows] == verdicts
    assert rows[1]["milliseconds"] == pytest.approx(4000)
    assert (rows[5]["seconds"], rows[5].get("ratio")) == ([], None)
    [best] = measure.summary([{"name": "a case", "rows": rows}]).to_dict("records")
    assert (best["fastest of ours"], best["fastest of others"]) == ("ours", "quick")
    assert best["time, ours / theirs"] == pytest.approx(1.25)
    alone = measure.measure([measure.refuse("ours", "too long", True), entries[1]], 2)
    assert [r["verdict"] for r in alone] == ["refuses: too long", "ours refuses"]
    assert alone[1]["milliseconds"] == pytest.approx(4000)
    record = {"name": "a case", "tokens": 1000, "about": {}, "rows": rows}
    line = "| theirs | 0.5 | 0.5 | 0.5 | 4000 | 4000 | 250 | not slower |"
    assert line in measure.case_table(record, ABOUT)


def test_ratios_are_taken_within_a_round():
    # Both entries slow down threefold in the third round; no ratio of theirs moves.
    seconds = np.array([[1.0, 2.0], [1.1, 2.2], [3.0, 6.0]])
    entries = [Entry("ours", lambda: None, ours=True), Entry("theirs", lambda: None)]
    row = measure.row(entries, 1, seconds, np.random.default_rng(0))
    assert [row[n] for n in ("ratio", "low", "high")] == pytest.approx([0.5, 0.5, 0.5])


def test_interval_holds_the_median_of_noisy_rounds():
    ratios = np.exp(np.random.default_rng(1).normal(np.log(0.8), 0.1, 21))
    median, low, high = measure.interval(ratios, np.random.default_rng(0))
    assert median == np.median(ratios)
    assert np.sort(ratios)[4] <= low < 0.8 < high <= np.sort(ratios)[16]


def test_rounds_stop_in_time(clock):
    entries = [Entry("ours", clock(0.004), ours=True), Entry("theirs", clock(0.5))]
    rows = measure.measure(entries, 100, most_seconds=5.3)
    # A round is 5 calls of ours, which fill 20 ms, and one of theirs: 0.52 seconds.
    assert [len(r["seconds"]) for r in rows] == [10, 10]
    assert rows[0]["seconds"][0] == pytest.approx(0.004)
    for warm in (True, False):
        found = measure.measure(entries, 100, most_seconds=0.1, warm=warm)
        assert len(found[0]["seconds"]) == 3


def case(name, build=lambda: [Entry("ours", lambda: None, ours=True)], **about):
    return Case(name, 10, build, about)


def raising(error):
    def build():
        raise error

    return build


class Killed(BaseException):
    """No handler runs."""


def test_a_case_that_the_user_stops_is_measured_later(tmp_path):
    for _ in range(3):
        with pytest.raises(KeyboardInterrupt):
            measure_cases([case("a", raising(KeyboardInterrupt()))], Records(tmp_path, ABOUT), 3)
    records = Records(tmp_path, ABOUT)
    assert measure_cases([case("a")], records, 3) == 0
    assert [len(record["rows"]) for record in records.cases] == [1]


def test_a_killed_run_continues_and_repeats_nothing(tmp_path):
    killed = case("c", raising(Killed()))
    cases = [case("a"), case("b", raising(ValueError("too  wide\nfor it")), H=8), killed, case("d")]
    for _ in range(2):
        with pytest.raises(Killed):
            measure_cases(cases, Records(tmp_path, ABOUT), 3)
        with (tmp_path / measure.RECORDS).open("a") as file:
            file.write('{"name": "c", "rows": [{"na')  # killed while it wrote
    records = Records(tmp_path, ABOUT | {"load": 1.0})
    assert [r["name"] for r in records.cases] == ["a", "b"]
    assert measure_cases(cases[:3], records, 3) == 0
    found = {r["name"]: r for r in records.cases}
    assert found["b"]["trouble"] == "ValueError: too wide for it"
    assert found["c"]["trouble"] == "the process ended in it, 2 times"
    assert measure_cases(cases, records, 3) == 0
    names = [json.loads(line) for line in (tmp_path / measure.RECORDS).read_text().splitlines()]
    assert [line["name"] for line in names if "rows" in line] == list("abcd")
    measure.write(tmp_path, records)
    lines = list(csv.DictReader((tmp_path / "cases.csv").open()))
    assert [line["case"] for line in lines] == list("abcd")
    assert (lines[1]["H"], lines[1]["trouble"]) == ("8", "ValueError: too wide for it")
    with pytest.raises(ValueError, match="jax was 1, is 2"):
        Records(tmp_path, ABOUT | {"jax": "2"})


def test_it_stops_in_time(clock):
    work = lambda s: lambda: clock(s)() and [Entry("ours", clock(0.0), ours=True)]
    cases = [case("a", work(20)), case("b", work(25)), case("c", work(5))]
    # After a and b 45 seconds are gone: one as long as b might end at 70.
    assert measure_cases(cases, Records(None, ABOUT), 3, minutes=1) == 1
    assert measure_cases(cases, Records(None, ABOUT), 3, minutes=0) == 3


def plain(q, k, v):
    return jax.nn.dot_product_attention(q, k, v)


WRONG = {
    "another scale": lambda q, k, v: 1.01 * plain(q, k, v),
    "key and value swapped": lambda q, k, v: plain(q, v, k),
    "another shape": lambda q, k, v: plain(q, k, v)[:, :4],
    "not a number": lambda q, k, v: jnp.nan * q,
    "twice the gradient of k": lambda q, k, v: plain(q, 2 * k - jax.lax.stop_gradient(k), v),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_peer_is_refused(wrong):
    args = tuple(np.random.default_rng(0).standard_normal((3, 2, 5, 3, 4), np.float32))
    peers = {"right": lambda: Peer(plain), wrong: lambda: Peer(WRONG[wrong])}
    own = {"attnlab": dot_product_attention}
    made = attention.entries(own, peers, args, "with gradient", twin="right")
    assert [e.name for e in made if e.refusal] == [wrong]
    assert [e.again for e in made] == [False, False, True, False]


def test_a_peer_with_other_weights_is_refused():
    layout = heads.Standard(width=6, num_heads=3)
    w, x = heads.init(jax.random.key(0), layout), jnp.ones((2, 5, 6)).at[:, 1:].add(0.5)
    swapped = LAYERS["jax.nn"](layout, False)
    swapped = swapped._replace(arrange=lambda w, x: (w | {"q": w["k"], "k": w["v"]}, x))
    own = {"attnlab": lambda w, x: heads.multi_head_attention(w, x, layout)}
    made = attention.entries(own, {"jax.nn": lambda: swapped}, (w, x), "forward")
    assert "computes something else" in made[1].refusal


def test_every_backend_is_a_row(monkeypatch, capsys):
    """One that refuses beforehand, one that raises, one too large; a missing library is none."""
    new = Backend(BACKENDS["dense"].run, lambda call: "not on this device")
    monkeypatch.setitem(BACKENDS, "new", new)
    q = jnp.asarray(np.random.default_rng(0).standard_normal((1, 2, 3, 4)), jnp.float32)
    own, refused = attention.by_backend(explain(q, q, q), dot_product_attention, "attnlab")
    names = sorted([*own, *(entry.name for entry in refused)])
    assert names == sorted(f"attnlab {name}" for name in BACKENDS)
    assert {e.name: e.refusal for e in refused}["attnlab new"] == "not on this device"

    def broken(q, k, v):
        raise RuntimeError("no such\n shared memory")

    calls = {"right": plain, "wrong": lambda *a: 1.01 * plain(*a), "broken": broken}
    peers = {"theirs": lambda: Peer(broken), "lost": raising(ImportError("lost"))}
    made = attention.entries(calls, peers, (q, q, q), "forward")
    assert [(e.name, e.ours, bool(e.refusal)) for e in made] == [
        ("right", True, False), ("wrong", True, True), ("broken", True, True),
        ("theirs", False, True),
    ]  # fmt: skip
    assert made[2].refusal == "no such shared memory"
    assert made[0].numbers["compile_seconds"] > 0
    assert made[0].numbers["lowered_lines"] > 3


def test_a_step_that_learns_something_else_is_refused():
    first = []
    for losses, fine in (([3.0, 2.5, 2.0], True), ([3.0, 2.5, 2.0], True), ([3, 2.5, 2.2], False)):
        make = lambda losses=losses: Entry("", iter(losses).__next__)
        [entry] = measure.tried("a", functools.partial(train.learning, make, first))
        assert bool(entry.refusal) != fine
    [entry] = measure.tried("a", lambda: train.learning(lambda: Entry("", lambda: 3.0), []))
    assert "does not fall" in entry.refusal


def test_the_design_has_every_point_once_and_begins_at_its_centre():
    cases = list(accelerator.cases(tiny=False))
    assert len({c.name for c in cases}) == len(cases) == 404
    points = list(accelerator.attention_cases(accelerator.FULL))
    asked = itertools.product(
        ("bfloat16", "float32"), (True, False), ("function", "layer"), ("forward", "with gradient"),
        (1024, 2048, 4096, 8192, 16384), (64, 128, 256, 512, 1024),
    )  # fmt: skip
    fields = ("dtype", "is_causal", "word", "mode", "T", "H")
    assert sorted(tuple(c.about[f] for f in fields) for _, c in points) == sorted(asked)
    assert [distance for distance, _ in points] == sorted(distance for distance, _ in points)
    assert [c.about["H"] for c in cases[:5]] == [512, 1024, 256, 128, 64]
    assert cases[0].name == "function B4 T4096 N8 H512, causal, bfloat16, with gradient"
    assert [c.about["word"] for c in cases[5:9]] == ["training"] * 2 + ["decoding"] * 2
    # 4 texts, 8 heads, 4096^2 pairs of which half are seen, 512 wide, two products, 3.5 passes.
    assert cases[0].about["flops"] == 3.5 * 4 * 8 * 4096**2 / 2 * 512 * 2 * 2


def test_fraction_of_peak_by_hand():
    assert fraction_of_peak(1e12, 0.01, "NVIDIA A100-SXM4-80GB", "bfloat16") == 1e14 / 312e12
    assert fraction_of_peak(1e12, 0.01, "TPU v4", "float32") is None


@pytest.mark.slow
@pytest.mark.parametrize("suite", ["attention", "train", "decoding", "accelerator"])
def test_suites_in_small(suite, tmp_path):
    """Every case gives a number or a reason, in two calls; every peer computes what ours does."""
    pattern = {"train": "^training|plan (separate|cla)", "accelerator": "bfloat16|seeds|decoder"}
    words = ["experiments.bench", f"--suite={suite}", "--tiny", f"--out={tmp_path}"]
    words += [f"--cases={pattern.get(suite, '')}"]
    for minutes in (["--minutes=0.2"], []):
        run = command(*words, *minutes)
        assert run.returncode == 0, run.stderr
    lines = map(json.loads, (tmp_path / measure.RECORDS).read_text().splitlines())
    records = [line for line in lines if "rows" in line]
    assert [r["trouble"] for r in records if "trouble" in r] == []
    for record in records:
        found = {one["name"]: one for one in record["rows"]}
        assert record["rows"][0]["seconds"], record["name"]
        refused = [n for n, one in found.items() if not one["seconds"] and not one["ours"]]
        assert set(refused) <= {"jax.nn cudnn"}
        if suite == "attention":
            peers = LAYERS if record["about"]["word"] == "layer" else FUNCTIONS
            assert {"Linen", "NNX", "jax.nn", "jax.nn cudnn"} & set(peers) <= set(found)
            assert sum(one["again"] for one in record["rows"]) == 1
    others = {row["name"] for r in records for row in r["rows"] if not row["same_work"]}
    expected = {"attention": set(), "train": {"attnlab, 8 layers"}}
    assert others == expected.get(suite, {"attnlab latent"})
    assert len({r["name"] for r in records}) == len(records) > 0
    assert (tmp_path / "cases.md").stat().st_size > 500
