"""Suite accelerator: what is measured first, that nothing is measured twice, and what follows."""

import csv
import itertools
import json
import math
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from commands import command

from attnlab.attention import BACKENDS, Backend, dot_product_attention, explain
from attnlab.models import num_parameters
from experiments.benchmarks import accelerator, attention, fastest, ledger
from experiments.benchmarks import accelerator_page as report
from experiments.benchmarks.accelerator import FULL, TINY
from experiments.benchmarks.ledger import DeviceLostError, Ledger, go_through
from experiments.benchmarks.measure import Case
from experiments.benchmarks.peaks import PEAKS, fraction_of_peak
from experiments.config import ConfigFile, setup_of
from experiments.configs import heads_and_sharing
from experiments.sweep import training_flops

ABOUT = {
    "device": "1 x NVIDIA H200", "machine": "a machine", "python": "3", "jax": "0", "flax": "0",
    "torch": "missing", "tokamax": "missing", "commit": "abc", "tiny": False, "cases": 404,
}  # fmt: skip


def test_every_point_once_and_the_most_telling_first():
    cases = list(accelerator.cases())
    names = [c.name for c in cases]
    assert len(set(names)) == len(names) == ABOUT["cases"]
    points = accelerator.settings(FULL)
    asked = itertools.product(
        ("bfloat16", "float32"), (True, False), ("function", "layer"), ("forward", "with gradient"),
        (1024, 2048, 4096, 8192, 16384), (64, 128, 256, 512, 1024),
    )  # fmt: skip
    found = [(p.size.dtype, p.size.is_causal, p.word, p.mode, p.size.T, p.size.H) for p in points]
    assert sorted(found) == sorted(asked)
    assert {p.size.B * p.size.T for p in points} == {16 * 1024}
    assert [p.distance for p in points] == sorted(p.distance for p in points)
    # The middle in all widths, training, seeds and decoding; then one thing is another.
    assert [c.about.get("H") for c in cases[:5]] == [512, 1024, 256, 128, 64]
    assert all("causal, bfloat16, with gradient" in name for name in names[:5])
    assert [c.about["word"] for c in cases[5:9]] == ["training"] * 2 + ["decoding"] * 2
    once = names[9 : 9 + 5 * (4 + 1 + 1 + 1 + 1)]
    assert sum("T4096" not in name for name in once) == 5 * 4
    assert once[-1] == "function B4 T4096 N8 H64, causal, with gradient"
    assert [c.about["word"] for c in accelerator.cases(TINY)].count("layer") == 8


def case(name, **about):
    return Case(name, 10, list, about={"word": "function"} | about)


class Worker:
    """Does cases; some of them end otherwise."""

    def __init__(self, **ends):
        self.ends, self.did = ends, []

    def __call__(self, one):
        self.did.append(one.name)
        if one.name in self.ends:
            raise self.ends[one.name]
        return {"tokens": one.tokens, "rows": [{"name": one.name}], "peak_bytes": None}


def test_it_goes_on_where_it_was_killed_and_repeats_nothing(tmp_path):
    cases = [case(name) for name in "abcd"]
    first = Worker(c=KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        go_through(cases, Ledger(tmp_path, ABOUT), first, minutes=1, say=str)
    with (tmp_path / ledger.FILE).open("a") as file:
        file.write('{"name": "c", "rows": [{"na')  # killed while it wrote
    second, again = Worker(), Ledger(tmp_path, ABOUT)
    assert [r["name"] for r in again.records] == ["a", "b"]
    assert go_through(cases, again, second, minutes=1, say=str) == 0
    assert (first.did, second.did) == (list("abc"), list("cd"))
    third = Worker()
    assert go_through(cases, Ledger(tmp_path, ABOUT), third, minutes=1, say=str) == 0
    assert third.did == []
    lines = [json.loads(line) for line in (tmp_path / ledger.FILE).read_text().splitlines()]
    assert [line["name"] for line in lines if "rows" in line] == list("abcd")


def test_a_case_that_fails_is_a_row_and_one_that_kills_twice_too(tmp_path):
    cases = [case(name, H=8) for name in "abc"]
    for _ in range(2):
        work = Worker(a=ValueError("too  wide\nfor it"), b=SystemExit())
        with pytest.raises(SystemExit):
            go_through(cases, Ledger(tmp_path, ABOUT), work, minutes=1, say=str)
    assert work.did == ["b"]
    last = Worker(c=DeviceLostError("gone"))
    with pytest.raises(DeviceLostError):  # what comes after would fail for nothing
        go_through(cases, Ledger(tmp_path, ABOUT), last, minutes=1, say=str)
    found = {r["name"]: r for r in Ledger(tmp_path, ABOUT).records}
    assert found["a"]["trouble"] == "ValueError: too wide for it"
    assert found["b"]["trouble"] == "the process ended in it, 2 times"
    assert found["b"]["about"] == {"word": "function", "H": 8}
    assert "c" not in found
    assert fastest.of(found.values()) == []


def test_it_stops_in_time_and_takes_no_other_numbers(tmp_path, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(ledger.time, "monotonic", lambda: now[0])
    seconds = {"a": 20.0, "b": 25.0, "c": 5.0}

    def work(one):
        now[0] += seconds[one.name]
        return {"rows": [], "trouble": "none"}

    # After a and b 45 seconds are gone: one as long as b might end at 70.
    left = go_through([case(n) for n in "abc"], Ledger(tmp_path, {"jax": "1"}), work, minutes=1)
    assert left == 1
    assert go_through([case("c")], Ledger(tmp_path, {"jax": "1"}), work, minutes=0) == 1
    with pytest.raises(ValueError, match="jax was 1, is 2; use another --out"):
        Ledger(tmp_path, {"jax": "2"})
    Ledger(tmp_path, {"jax": "1", "machine": "another host of the same GPU"})


def test_every_backend_is_a_row(monkeypatch):
    """Also one that is new, and one that fails or computes something else when it runs."""
    refuses = Backend(BACKENDS["dense"].run, lambda call: "not on this device")
    monkeypatch.setitem(BACKENDS, "new", refuses)
    q = jnp.ones((1, 2, 3, 4))
    would = explain(q, q, q)
    own, refused = accelerator.by_backend(would, dot_product_attention)
    assert [f"attnlab {n}" for n in sorted(BACKENDS)] == sorted([*own, *(e.name for e in refused)])
    assert next(iter(own)) == f"attnlab {attention.chosen_in(would)}"
    assert {e.name: e.refusal for e in refused}["attnlab new"] == "not on this device"

    def broken(q, k, v):
        raise RuntimeError("no such\n shared memory")

    x = tuple(jnp.asarray(np.random.default_rng(0).standard_normal((3, 1, 2, 3, 4), np.float32)))
    right = dot_product_attention
    calls = {"right": right, "wrong": lambda *a: 1.01 * right(*a), "broken": broken}
    peers = {"theirs": lambda: attention.Peer(broken)}
    made = attention.entries(calls, peers, x, "forward", "", lenient=True)
    assert [(e.name, e.ours, e.refusal[:31]) for e in made] == [
        ("right", True, ""),
        ("wrong", True, "wrong computes something else: "),
        ("broken", True, "no such shared memory"),
        ("theirs", False, "no such shared memory"),
    ]
    assert made[0].compile_seconds > 0


def test_fraction_of_peak_by_hand():
    assert fraction_of_peak(1e12, 0.01, "NVIDIA A100-SXM4-80GB", "bfloat16") == 1e14 / 312e12
    assert fraction_of_peak(1e12, 0.01, "TPU v4", "float32") is None
    assert fraction_of_peak(1e12, 0.01, "cpu", "bfloat16") is None
    assert all(peak.source and peak.flops for peak in PEAKS.values())
    place = next(p for p in accelerator.settings(FULL) if p.size.T == 4096)
    # 4 texts, 8 heads, 4096^2 pairs of which half are seen, 512 wide, two products, 3.5 passes.
    assert accelerator.attention_flops(place) == 3.5 * 4 * 8 * 4096**2 / 2 * 512 * 2 * 2


def row(name, milliseconds):
    seconds = [] if milliseconds is None else [milliseconds / 1e3] * 3
    numbers = dict.fromkeys(report.NUMBERS) | {"milliseconds": milliseconds}
    told = "refuses: too wide" if milliseconds is None else "ours"
    ours = name.startswith("attnlab")
    return {"name": name, "ours": ours, "seconds": seconds} | numbers | {"verdict": told}


def record(h, t=4096, mode="with gradient", **times):
    about = {"word": "function", "mode": mode, "dtype": "bfloat16", "is_causal": True}
    about |= {"H": h, "T": t, "B": 4, "N": 8, "D": 0, "flops": 1e12}
    rows = [row(name.replace("_", " ").replace("jax ", "jax."), ms) for name, ms in times.items()]
    return {"name": f"{h} {t} {mode}", "about": about, "tokens": 10, "rows": rows}


RECORDS = [
    record(64, attnlab_dense=4.0, attnlab_cudnn=1.0, attnlab_wide=2.0, jax_nn=5.0),
    record(512, attnlab_dense=4.0, attnlab_cudnn=None, attnlab_wide=2.0, jax_nn=8.0),
    record(512, 8192, attnlab_dense=3.0, attnlab_cudnn=None, attnlab_wide=6.0, jax_nn=8.0),
]


def test_the_order_that_loses_least():
    tried = fastest.cost(("wide", "cudnn", "dense"), RECORDS)
    assert tried.mean == pytest.approx((2.0 * 1.0 * 2.0) ** (1 / 3))
    assert tried.worst == 2.0
    assert fastest.cost(("cudnn",), RECORDS) is None
    best = fastest.best_order(RECORDS)
    assert best.names[0] == "cudnn"
    assert best.mean == pytest.approx(2 ** (1 / 3))
    assert fastest.best_order(RECORDS[:2]).names == ("cudnn", "wide")  # never comes to dense
    assert fastest.chosen(RECORDS[0]) == "dense"


def test_the_page_of_made_up_numbers(tmp_path):
    gone = {"name": "lost", "about": {"word": "layer"}, "rows": [], "trouble": "out of memory"}
    place = report.write(tmp_path, ABOUT, [*RECORDS, gone])
    text = (tmp_path / "accelerator.md").read_text()
    assert "heads 512 wide: wide takes 0.25 (0.25 to 0.25) of the time of jax.nn" in text
    assert "| 512 | 8,192 | dense | jax.nn | 0.38 (0.38 to 0.38) |" in text
    assert "| 512 | wide 500 (dense 2.00) | dense 333 |" in text
    assert "| attnlab cudnn | 2 | too wide | 512 4096 with gradient |" in text
    assert "| the whole case | 1 | out of memory | lost |" in text
    choices = (tmp_path / "choices.md").read_text()
    assert 'Choice("cudnn", SOURCE),' in choices
    assert "measured on NVIDIA H200, jax 0, commit abc" in choices
    assert "function-bfloat16-causal-with-gradient-4096.svg" in text
    assert "<svg" in place.read_text()
    lines = list(csv.DictReader((tmp_path / "cases.csv").open()))
    assert [line["milliseconds"] for line in lines][:4] == ["4.0", "1.0", "2.0", "5.0"]
    assert lines[-1]["trouble"] == "out of memory"


def test_the_study_at_the_scale_of_a_gpu():
    """Nine variants of about 10 million parameters, and the minutes that the lab note names."""
    preset = "study,match=parameters,scale=gpu"
    config = heads_and_sharing.get_config(preset)
    assert config == heads_and_sharing.get_config("scale=gpu,match=parameters,study")
    specs = setup_of(ConfigFile(Path(), preset, heads_and_sharing, config)).specs()
    assert len(specs) == 9 * 10
    sizes = [num_parameters(spec.config.model) for spec in specs]
    assert 9e6 < min(sizes) <= max(sizes) < 1.01 * min(sizes) < 11e6
    assert {(s.config.model.compute.dtype, s.config.train.steps) for s in specs} == {
        ("bfloat16", 1000)
    }
    # Standard heads of separate layers: 4 D^2 + 2 D F in each of 4 layers and the LM head are
    # multiplied once a token, keys and values of 256 tokens beside; 3 passes of a seed.
    d, f, t = 352, 8 * 352, 256
    each = 2 * (4 * (4 * d**2 + 2 * d * f) + d * 256) + 4 * (2 * 2 * t * d)
    one = next(s for s in specs if s.tags == {"layout": "standard", "sharing": "separate"})
    assert training_flops([one]) == 3 * each * 1000 * 32 * t
    # With 5 learning rates of one seed each; three texts.
    minutes = 3 * training_flops(specs) * 1.5 / (0.3 * 989.4e12) / 60
    assert math.isclose(minutes, 27.6, abs_tol=0.1)
    assert "27.6 minutes" in heads_and_sharing.__doc__
    with pytest.raises(ValueError, match="gpu"):
        heads_and_sharing.get_config("scale=tpu")


@pytest.mark.slow
def test_the_whole_suite_in_small(tmp_path):
    """Every case gives a number or a reason, in several calls; none repeats anything."""
    words = ["experiments.bench", "--suite=accelerator", "--tiny", f"--out={tmp_path}"]
    text, said = "", "cases are left"
    for flags in (["--minutes=1", "--cases=^decoding|forward$"], *[["--minutes=4"]] * 9):
        run = command(*words, *flags)
        assert run.returncode == 0, run.stderr
        before, text = text, (tmp_path / ledger.FILE).read_text()
        assert text.startswith(before)
        if (said := run.stdout.splitlines()[-1]) == "all cases are done" and len(flags) == 1:
            break
    assert said == "all cases are done"
    records = [line for line in map(json.loads, text.splitlines()) if "rows" in line]
    assert sorted(r["name"] for r in records) == sorted(c.name for c in accelerator.cases(TINY))
    assert [r["trouble"] for r in records if "trouble" in r] == []
    for one in records:
        for entry in one["rows"]:
            assert entry["seconds"] or entry["verdict"].startswith("refuses: "), one["name"]
        assert one["rows"][0]["seconds"], one["name"]
        if one["about"]["word"] in ("function", "layer"):
            found = [e["name"].split()[-1] for e in one["rows"] if e["ours"]]
            assert set(BACKENDS) <= set(found)
    for name in ("accelerator.html", "accelerator.md", "choices.md", "cases.csv"):
        assert (tmp_path / name).stat().st_size > 500
