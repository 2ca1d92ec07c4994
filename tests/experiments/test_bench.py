"""The benchmark's own arithmetic, and that it notices a peer that computes something else."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from commands import command
from conftest import assert_close

from attnlab import heads
from attnlab.attention import dot_product_attention
from attnlab.models import FFN
from attnlab.training import ScheduleConfig, TrainConfig
from experiments import bench
from experiments.benchmarks import attention, measure, train
from experiments.benchmarks.attention import Size
from experiments.benchmarks.flops import matmul_flops
from experiments.benchmarks.measure import Bar, Case, Entry
from experiments.benchmarks.peers.attention import FUNCTIONS, LAYERS, Peer

TINY = Size(2, 5, 3, 4, 6, is_causal=True)
EXTRAS = {"Equinox", "torch module", "torch sdpa", "tokamax", "tokamax xla_chunked"}


@pytest.fixture
def clock(monkeypatch):
    """A clock that only entries move: `clock(s)` is an entry's work of s seconds."""
    now = [0.0]

    def work(seconds):
        def run():
            now[0] += seconds
            return seconds

        return run

    monkeypatch.setattr(measure.time, "perf_counter", lambda: now[0])
    return work


def case(entries, *bars, **fields):
    return Case("a case", 1000, lambda: entries, bars=bars, **fields)


def test_a_row_is_ours_over_theirs(clock):
    seconds = {"ours": 2.0, "theirs": 4.0, "theirs, again": 6.0, "quick": 1.6, "even": 1.9}
    entries = [
        Entry(n, clock(s), ours=n == "ours", twin="again" in n, temp_bytes=int(s * 2**20))
        for n, s in seconds.items()
    ]
    entries.append(measure.refuse("unable", "heads too wide"))
    rows = measure.measure(entries, 5)
    ratios = [r.ratio.median if r.ratio else None for r in rows]
    assert ratios[:5] == pytest.approx([1.0, 0.5, 1.5, 1.25, 2 / 1.9])
    assert [r.ratio[1:] for r in rows[:5]] == [pytest.approx((x, x)) for x in ratios[:5]]
    # 1.05 is within the bar of 1.10, yet its interval does not reach 1.00.
    words = ["ours", "not slower", "A/A, the noise", "SLOWER", "SLOWER", "refuses: heads too wide"]
    assert [r.verdict for r in rows] == words
    assert [r.milliseconds for r in rows[:2]] == pytest.approx([2000, 4000])
    assert ratios[5] is None
    assert rows[5].seconds == []
    peer = measure.fastest_peer(rows)
    assert peer is not None
    assert peer[0] == "quick"  # neither the twin nor the one that refuses
    bar = Bar("theirs", 0.5, memory=0.5)
    misses = [Bar("theirs", 0.49), Bar("theirs", 0.49, 0.5), Bar("theirs", 0.5, 0.49)]
    met = [measure.judge(b, rows).rpartition(": ")[2] for b in [bar, *misses, Bar("unable", 1.0)]]
    assert met == ["met", *["NOT MET"] * 3, "it did not run"]
    text = measure.table(case(entries, bar), rows, 5)
    assert "| theirs | 4000 | 4000 | 250 | 0.500 | 0.500 to 0.500 | not slower | 4.0 |" in text
    assert "fastest peer: quick, time ours / this 1.250 (1.250 to 1.250): SLOWER" in text
    assert "0.500; at most 0.50 of its XLA temporary memory: 0.500: met" in text


def test_ratios_are_taken_within_a_round():
    # Both entries slow down threefold in the third round; no ratio of theirs moves.
    seconds = np.array([[1.0, 2.0], [1.1, 2.2], [3.0, 6.0]])
    entries = [Entry("ours", lambda: None, ours=True), Entry("theirs", lambda: None)]
    row = measure.measurement(entries, 1, seconds, np.random.default_rng(0))
    assert row.ratio == pytest.approx((0.5, 0.5, 0.5))


def test_interval_holds_the_median_of_noisy_rounds():
    ratios = np.exp(np.random.default_rng(1).normal(np.log(0.8), 0.1, 21))
    median, low, high = measure.interval(ratios, np.random.default_rng(0))
    assert median == np.median(ratios)
    assert np.sort(ratios)[4] <= low < 0.8 < high <= np.sort(ratios)[16]


def test_ours_refusing_leaves_times_of_peers(clock):
    entries = [measure.refuse("ours", "too long", ours=True), Entry("theirs", clock(1.0))]
    rows = measure.measure(entries, 2)
    assert [r.verdict for r in rows] == ["refuses: too long", "ours refuses"]
    assert rows[1].milliseconds == pytest.approx(1000)
    assert measure.fastest_peer(rows) is None


def test_fast_entries_fill_the_clock(clock):
    rows = measure.measure([Entry("ours", clock(0.003), ours=True)], 2)
    assert rows[0].seconds == pytest.approx([0.003, 0.003])


def test_a_slow_entry_is_not_called_as_often_as_a_fast_one(clock):
    entries = [Entry("ours", clock(0.004), ours=True), Entry("theirs", clock(0.5))]
    began = measure.time.perf_counter()
    rows = measure.measure(entries, 100, most_seconds=5.2)
    # A round is 5 calls of ours and one of theirs, 0.52 seconds; before it 2 calls each.
    assert [len(r.seconds) for r in rows] == [10, 10]
    assert measure.time.perf_counter() - began == pytest.approx(10 * 0.52 + 2 * 0.504)
    assert len(measure.measure(entries, 100, most_seconds=0.1)[0].seconds) == 3
    assert len(measure.measure(entries, 2, most_seconds=0.1)[0].seconds) == 2


@pytest.mark.slow
@pytest.mark.parametrize("mode", attention.MODES)
def test_suite_at_tiny_sizes(mode, tmp_path, monkeypatch, capsys):
    """Every peer that is installed computes what ours does, and all files are written."""
    monkeypatch.setattr(measure, "SECONDS_PER_ROUND", 0.0)
    wide = TINY._replace(D=4, H=4)
    cases = [
        attention.layer_case("layer", TINY._replace(H=2), mode, tuple(LAYERS)),
        attention.layer_case("wide layer", wide, mode, ("Linen",), (Bar("Linen", 0.8),)),
        attention.function_case(TINY._replace(D=0, is_causal=False), mode, tuple(FUNCTIONS)),
    ]
    bench.run(cases, 2, str(tmp_path), "tiny")
    report = json.loads((tmp_path / "tiny.json").read_text())
    rows = [{r["name"]: r for r in c["rows"]} for c in report["cases"]]
    for peers, found in zip((LAYERS, ("Linen",), FUNCTIONS), rows, strict=True):
        names = [n for n in found if not n.startswith("attnlab")]
        assert set(peers) - EXTRAS <= set(names)
        able = [n for n in names if n != "jax.nn cudnn"]
        assert all(found[n]["ratio"] > 0 for n in able)
        assert found["Linen, again"]["verdict"] == "A/A, the noise"
    assert {"attnlab, factored", "attnlab, bilinear"} & set(rows[1])
    assert rows[2]["jax.nn cudnn"]["verdict"].startswith("refuses: cuDNN")
    assert rows[2]["Linen"]["temp_bytes"] >= 0
    assert all(c["fastest_peer"] for c in report["cases"])
    text = (tmp_path / "tiny.md").read_text()
    assert text.count("fastest peer: ") == 3
    assert text.count("bar: at most 0.80 of the time of Linen") == 1
    assert text.rpartition("\n\n")[2] in capsys.readouterr().out


@pytest.mark.slow
def test_bfloat16_as_on_a_gpu():
    size = Size(2, 6, 3, 8, is_causal=True, dtype="bfloat16")
    peers = ("jax.nn", "jax.nn cudnn", "torch sdpa")
    built = attention.function_case(size, "with gradient", peers, twin="torch sdpa").build()
    assert [e.name for e in built if e.refusal] == ["jax.nn cudnn"]


def plain(q, k, v):
    return jax.nn.dot_product_attention(q, k, v)


WRONG = {
    "another scale": (lambda q, k, v: 1.01 * plain(q, k, v), "forward"),
    "key and value swapped": (lambda q, k, v: plain(q, v, k), "forward"),
    "another shape": (lambda q, k, v: plain(q, k, v)[:, :4], "forward"),
    "not a number": (lambda q, k, v: jnp.nan * q, "forward"),
    "no gradient of k": (
        lambda q, k, v: plain(q, jax.lax.stop_gradient(k), v),
        "with gradient",
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_peer_is_noticed(wrong):
    q, k, v = np.random.default_rng(0).standard_normal((3, 2, 5, 3, 4), np.float32)
    call, mode = WRONG[wrong]
    own = {"attnlab": dot_product_attention}
    peers = {"right": lambda: Peer(plain), wrong: lambda: Peer(call)}
    with pytest.raises(attention.DifferentResultsError, match=wrong):
        attention.entries(own, peers, (q, k, v), mode, twin="")


def test_a_failure_of_ours_is_no_row():
    def broken(q, k, v):
        raise ValueError("broken") if isinstance(q, jax.core.Tracer) else q

    args = (jnp.ones((1, 2, 3, 4)),) * 3
    with pytest.raises(ValueError, match="broken"):
        attention.entries({"attnlab": broken}, {}, args, "forward", twin="")


def test_a_peer_with_other_weights_is_noticed():
    layout = heads.Standard(width=6, num_heads=3)
    w, x = heads.init(jax.random.key(0), layout), jnp.ones((2, 5, 6)).at[:, 1:].add(0.5)
    peer = LAYERS["jax.nn"](layout, False)
    swapped = peer._replace(arrange=lambda w, x: (w | {"q": w["k"], "k": w["v"]}, x))
    own = {"attnlab": lambda w, x: heads.multi_head_attention(w, x, layout)}
    with pytest.raises(attention.DifferentResultsError, match=r"jax\.nn computes something"):
        attention.entries(own, {"jax.nn": lambda: swapped}, (w, x), "forward", twin="")


def test_missing_and_failing_peers(capsys, monkeypatch):
    def missing():
        raise ModuleNotFoundError("No module named 'lost'", name="lost")

    def failing(*args):
        raise NotImplementedError("heads wider than 3")

    args = (jnp.ones((1, 2, 3, 4)),) * 3
    own = {"attnlab": dot_product_attention}
    others = {"a": missing, "b": missing, "c": lambda: Peer(failing)}
    built = attention.entries(own, others, args, "forward", twin="a")
    assert [(e.name, e.refusal) for e in built[1:]] == [("c", "heads wider than 3")]
    assert capsys.readouterr().out.count("lost is left out") == 1
    monkeypatch.setattr(attention, "free_bytes", lambda: 100)
    (entry,) = attention.entries(own, {}, args, "forward", twin="")
    assert entry.refusal.startswith("needs")
    assert entry.temp_bytes is not None


def test_flops_of_a_layer_and_of_a_loop():
    layout = heads.Standard(width=6, num_heads=3, head_dim=4, value_dim=5)
    w, x = heads.init(jax.random.key(0), layout), jnp.ones((2, 7, 6))

    def layer(w, x):
        return heads.multi_head_attention(w, x, layout, implementation="dense")

    once = matmul_flops(jax.make_jaxpr(layer)(w, x))
    assert once == 2 * 7 * heads.flops_per_token(layout, 7)

    def many(w, x):
        return jax.lax.scan(lambda x, _: (jax.checkpoint(layer)(w, x), None), x, length=5)[0]

    assert matmul_flops(jax.jit(many).trace(w, x).jaxpr) == 5 * once
    unknown = jax.make_jaxpr(lambda a: jax.lax.while_loop(jnp.all, lambda a: a @ a, a))
    assert matmul_flops(unknown(jnp.ones((2, 2)))) is None


@pytest.mark.slow
def test_training_step_at_tiny_sizes():
    """Ours, Linen and (where installed) torch learn the same from the same weights."""
    tiny = {"vocab_size": 11, "max_len": 8, "width": 6, "num_layers": 1}
    layout = dataclasses.replace(train.SMALL_DECODER.heads, num_heads=3)
    ffn = FFN(width=10, activation="gelu_tanh")
    config = dataclasses.replace(train.SMALL_DECODER, **tiny, heads=layout, ffn=ffn)
    trains = TrainConfig(
        batch_size=4, length=8, schedule=ScheduleConfig(warmup_steps=1), seeds=(0,)
    )
    (only,) = train.step_cases(config, trains)
    entries = only.build()
    assert [e.name for e in entries][:4] == [
        "attnlab",
        "Linen, nn.scan",
        "Linen, loop",
        "Linen, loop, again",
    ]
    assert_close(np.float32(entries[0].run()), np.float32(entries[1].run()), loosen=50)
    wrong = [entries[0], Entry("wrong", lambda: 1.0)]
    with pytest.raises(AssertionError, match="wrong"):
        train.check_equal(wrong, steps=1)


def test_cases_are_chosen_by_name():
    every = list(attention.cases())
    assert len({c.name for c in every}) == len(every)
    assert [c.name for c in bench.chosen(iter(every), "16384")] == [every[-1].name]
    with pytest.raises(ValueError, match="T4096"):
        bench.chosen(iter(every), "nothing like it")
    with pytest.raises(ValueError, match="nor does one of another suite"):
        bench.chosen(iter(every), "nothing like it")
    with pytest.raises(ValueError, match="matches --cases=albert; there are some in --suite=plans"):
        bench.chosen(iter(every), "albert")
    with pytest.raises(ValueError, match=r"--cases=\( is no regular expression: missing \)"):
        bench.chosen(iter(every), "(")


@pytest.mark.parametrize(
    ("flag", "suite"), [("--tiny", "train"), ("--minutes=1", "plans"), ("--data=x", "train")]
)
def test_flags_of_another_suite_are_refused(flag, suite):
    run = command("experiments.bench", f"--suite={suite}", flag, "--cases=no such case")
    its = "nanogpt" if flag == "--data=x" else "accelerator"
    assert run.returncode == 1
    assert run.stderr.strip() == (
        f"error: {flag.partition('=')[0]} is of --suite={its} alone; "
        f"leave it out with --suite={suite}"
    )


def test_command_names_what_it_lacks():
    run = command("experiments.bench", "--suite=nanogpt")
    assert run.returncode == 1
    assert run.stderr.strip() == (
        "error: suite nanogpt needs --data, the folder or file of Tiny Shakespeare"
    )
