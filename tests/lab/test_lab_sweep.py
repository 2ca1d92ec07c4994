"""A sweep of specs: nothing runs twice, a kill changes no number, tables are what they say."""

import dataclasses
import json
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT
from made_results import made
from small_experiment import MODEL, experiment, train_config

from attnlab import lab
from attnlab.data import TokenFiles
from attnlab.heads import LAYOUTS, Standard
from attnlab.lab.description import read_description
from attnlab.lab.policies import tuning_specs, with_known_rates
from attnlab.lab.result import VERSION
from attnlab.lab.spec import specs_of
from attnlab.lab.workdir import add_specs, specs_in
from attnlab.models import FFN, ModelConfig, num_parameters
from attnlab.models.budget import budget_cost

TRAIN = train_config(6, every=3, curve_windows=4)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return experiment(tmp_path_factory, MODEL, TRAIN, validation=0.1)


@pytest.fixture(scope="module")
def swept(base, tmp_path_factory):
    folder = tmp_path_factory.mktemp("sweep")
    specs = lab.product(base, layout=["standard", "narrow"], seeds=[3, 5], match="parameters")
    return specs, folder, in_process(specs, folder)


def in_process(specs, folder, **options):
    return lab.sweep(specs, folder, executor=lab.InProcess(), progress=False, **options)


def test_every_spec_has_a_result_and_none_is_run_again(swept, base):
    """Nor by a list of seeds in the config: each run has its own."""
    specs, folder, results = swept
    assert [run.spec for run in results] == specs
    assert [run.status for run in results] == ["complete"] * 4
    before = {p: p.stat().st_mtime_ns for p in folder.rglob("*") if p.is_file()}
    assert in_process(specs[2:], folder).runs == results.runs[2:]
    assert {p: p.stat().st_mtime_ns for p in folder.rglob("*") if p.is_file()} == before
    train = dataclasses.replace(base.train, seeds=(3, 5, 7))
    config = dataclasses.replace(specs[0].config, train=train)
    again = dataclasses.replace(specs[0], config=config)
    assert [run.scores for run in in_process([again], folder)] == [results[0].scores]
    assert lab.run_one(again, folder) == results[0]


def test_parameters_are_equal_where_they_are_matched(swept):
    base = num_parameters(MODEL)
    counts = [run.sizes.parameters for run in swept[2]]
    assert counts[:2] == [base, base]
    assert max(counts) - base < 2 * 8 * 2 + 2  # less than one more unit in each of two layers


@pytest.mark.parametrize("match", [lab.Match("parameters"), lab.Match("flops"), "parameters"])
def test_a_budget_is_that_of_the_base_whatever_varies(match):
    model = ModelConfig(width=16, num_layers=2, vocab_size=256, ffn=FFN(width=500))
    base, values = lab.Experiment(model=model), {"model.num_layers": [1, 3], "layout": ["wide"]}
    if isinstance(match, str):
        specs = lab.product(base, seeds=[0], match=match, **values)
    else:
        specs = specs_of(base, lab.grid(**values), [0], match)
    budget = specs[0].config.matched
    costs = [budget_cost(spec.config.model, budget, base.train.length) for spec in specs]
    assert costs == pytest.approx([budget_cost(model, budget, base.train.length)] * 2, rel=0.01)


def test_specs_and_results_survive_json(swept):
    for run in swept[2]:
        assert lab.RunResult.from_json(run.to_json()) == run
        assert lab.RunResult.from_json(run.to_json(), run.spec).spec is run.spec
        assert lab.RunResult.from_json(run.to_json(), swept[0][3]) == run  # not of this spec
    for layout in LAYOUTS:
        model = dataclasses.replace(MODEL, heads=LAYOUTS[layout](num_heads=2))
        spec = lab.RunSpec("a", lab.Experiment(model=model, train=TRAIN), 4)
        assert lab.RunSpec.from_dict(json.loads(json.dumps(spec.to_dict()))) == spec
    values = {"model.heads.head_dim": None, "train.optimizer.base_fan_in": None}
    unset = lab.with_values(lab.Experiment(), values)
    assert lab.Experiment.from_json(unset.to_json()) == unset
    for text in ("[]", json.dumps({"version": VERSION + 1})):
        with pytest.raises(ValueError, match="version"):
            lab.RunResult.from_json(text)


def tried(score, rate):
    values = {"train.optimizer.learning_rate": rate}
    run = made({"name": "a", "learning_rate": rate}, 0, score, values=values)
    validation = lab.Scores(heldout=run.scores.heldout, validation={"bits_per_byte": score})
    return dataclasses.replace(run, scores=validation)


def test_rates_are_added_until_the_best_is_between_two():
    propose = lab.TuneLearningRate(most=4).propose
    runs = [tried(3.0, 0.01), tried(2.0, 0.02)]
    (proposed,) = propose(lab.Results(runs))
    assert proposed.config.train.optimizer.learning_rate == 0.04
    inside = lab.Results([*runs, tried(2.5, 0.04)])
    assert propose(inside) == []
    (rate,) = lab.best_rates(inside).values()
    assert rate == pytest.approx(0.02245, abs=1e-5)  # of the parabola through all three
    steep = [tried(-rate, rate) for rate in (0.01, 0.02, 0.04, 0.08)]
    assert propose(lab.Results(steep)) == []
    unknown = dataclasses.replace(runs[0], scores=lab.Scores(heldout=runs[0].scores.heldout))
    with pytest.raises(ValueError, match="has no validation scores"):
        propose(lab.Results([unknown]))


def test_rates_of_a_table_are_those_of_the_rows_with_the_tags(base, tmp_path):
    specs = lab.product(base, layout=["standard", "wide"], seeds=[0, 1])
    table, head = tmp_path / "rates.csv", "layout,learning_rate,loss\nstandard,0.5,1\n"
    table.write_text(f"{head}wide,0.25,1\nwide,0.25,2\n")
    rates = [s.config.train.optimizer.learning_rate for s in with_known_rates(specs, table)]
    assert rates == [0.5, 0.5, 0.25, 0.25]
    tags = {"bias": True, "head_dim": None, "scale": 1.0, "heads": 4}
    table.write_text("bias,head_dim,scale,heads,learning_rate\nTrue,,1,4.0,0.5\nTrue,,2,4.0,0.25\n")
    [spec] = with_known_rates([dataclasses.replace(specs[0], tags=tags)], table)
    assert spec.config.train.optimizer.learning_rate == 0.5
    for rows, message in (("", "wide, and has none"), ("wide,1,1\nwide,2,1\n", "1.0, 2.0")):
        table.write_text(head + rows)
        with pytest.raises(ValueError, match=message):
            with_known_rates(specs, table)


def test_seeds_are_added_while_an_interval_is_wide():
    results = lab.Results([made({"name": "a"}, seed, 2.0 + seed) for seed in (0, 1)])
    proposed = lab.AddSeeds(half_width=0.1).propose(results)
    assert [spec.seed for spec in proposed] == [2]
    assert proposed[0].id == results[0].spec.id.replace("seed0", "seed2")
    assert lab.AddSeeds(half_width=10.0).propose(results) == []
    assert lab.AddSeeds(half_width=0.1, most=2).propose(results) == []
    lacks = dataclasses.replace(results[1], scores=lab.Scores(heldout={"loss": 2.0}))
    assert len(lab.AddSeeds(half_width=0.1).propose(lab.Results([results[0], lacks]))) == 1


def test_of_several_texts_scores_are_looked_at_four_times(tmp_path):
    """As often as their p-values count, up to any number of seeds."""
    rng, looks = np.random.default_rng(0), []
    for name in "xy":
        (tmp_path / name).write_bytes(b"some text " * 500)

    def run(specs, folder=""):
        looks.append(len(specs))
        return lab.Results(
            made(dict(s.tags), s.seed, 2.0 + 0.3 * (s.tags["name"] == "a") + rng.normal(),
                 values={"data.path": s.config.data.path})
            for s in specs
        )  # fmt: skip

    first = [
        made({"name": tag}, seed, 0.0, values={"data.path": str(tmp_path / name)}).spec
        for tag in "ab" for name in "xy" for seed in range(3)
    ]  # fmt: skip
    lab.DecideComparisons(most=30)(first, run)
    assert looks[:2] == [12, 48]  # 9 of the 27 seeds that may be added
    assert len(looks) <= 4


def test_a_sweep_keeps_that_seeds_were_added(base, tmp_path):
    """Repeated without the policy, or with the added seeds in its list."""
    specs, policy = lab.product(base, seeds=[3, 4]), lab.DecideComparisons(most=2)
    in_process(specs[:1], tmp_path, policies=[policy])
    for again, policies in ((specs[:1], []), (specs, []), (specs, [policy])):
        in_process(again, tmp_path, policies=policies)
        about = read_description(tmp_path)
        assert (about.seeds_added, about.planned_seeds) == (True, (3,))


def test_results_have_the_tags_of_the_last_call(swept):
    specs, folder, _ = swept
    [found] = lab.load_results(folder, [dataclasses.replace(specs[0], tags={"size": 4})])
    assert found.spec.tags == {"size": 4}


def test_a_seed_is_added_on_every_text(tmp_path):
    runs = []
    for name, tag, loss in (("x", "a", 1.0), ("y", "a", 3.0), ("x", "b", 1.1), ("y", "b", 2.0)):
        (tmp_path / name).write_bytes(b"some text " * 500)
        values = {"data.path": str(tmp_path / name)}
        runs.append(made({"path": name, "name": tag}, 0, loss, values=values))
    results = lab.Results(runs)
    for policy in (lab.AddSeeds(half_width=0.1, most=2), lab.DecideComparisons(most=2)):
        found = [(spec.seed, *spec.tags.values()) for spec in policy.propose(results)]
        assert sorted(found) == [(1, "x", "a"), (1, "x", "b"), (1, "y", "a"), (1, "y", "b")]
    assert lab.AddSeeds(half_width=0.1, most=1).propose(results) == []


def test_the_seed_of_tuning_is_none_that_is_added_later():
    """Of two variants with seed 999, up to six seeds each: 1000 to 1004 are added."""
    runs = [made({"name": name}, 999, 2.0) for name in "ab"]
    [seed] = {spec.seed for spec in tuning_specs([run.spec for run in runs], 3)}
    results, policy = lab.Results(runs), lab.AddSeeds(half_width=0.0, most=6)
    while specs := policy.propose(results):
        results += lab.Results([made(dict(s.tags), s.seed, 2.0 + 0.01 * s.seed) for s in specs])
    seeds = {run.spec.seed for run in results}
    assert len(seeds) == 6
    assert seed not in seeds


def test_policies_are_asked_until_they_propose_nothing(base, tmp_path):
    """One of them is a function."""
    policies = [one_more_seed, lab.AddSeeds(half_width=0.0, most=3)]
    results = in_process(lab.product(base, seeds=[3]), tmp_path, policies=policies)
    assert [run.spec.seed for run in results] == [3, 4, 5]


def one_more_seed(specs, run):
    [result] = run(specs)
    return [*specs, dataclasses.replace(result.spec, id="seed4", seed=4)]


def test_specs_that_are_added_at_the_same_time_are_all_kept(base, tmp_path):
    start = threading.Barrier(8)

    def add(i):
        start.wait()
        add_specs(lab.product(base, seeds=[2 * i, 2 * i + 1]), tmp_path)

    threads = [threading.Thread(target=add, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(spec.seed for spec in specs_in(tmp_path).values()) == list(range(16))


IDS = TokenFiles(path="ids.bin", vocab_size=256, bytes_per_token=1.0)


@pytest.mark.parametrize(
    ("values", "options", "message"),
    [
        ({"data": [IDS]}, {}, "Text by"),
        ({"data__validation": [0.0]}, {}, r"Text by --config\.data\.validation"),
        ({"train__optimizer__learning_rate": [0.1, 0.2]}, {}, "tag 'learning_rate'"),
        ({}, {"policies": [lab.DecideComparisons([({"layout": "wid"}, {})])]}, "'wid'"),
        ({}, {"description": lab.Description(baseline={"layout": "wid"})}, "'wid'"),
        ({}, {"description": lab.Description(pairs=[({"layout": "x"}, {})])}, "'x'"),
    ],
)
def test_policies_and_descriptions_are_checked_before_any_run(
    base, tmp_path, monkeypatch, values, options, message
):
    monkeypatch.chdir(tmp_path)
    np.zeros(5000, np.uint16).tofile("ids.bin")
    specs = lab.product(base, layout=["standard", "wide"], seeds=[0], **values)
    with pytest.raises(ValueError, match=message):
        in_process(specs, tmp_path / "w", **{"policies": [lab.TuneLearningRate()]} | options)
    assert not (tmp_path / "w").exists()


def test_rates_that_all_diverge_are_an_error(base):
    specs = lab.product(base, layout=["standard"], seeds=[0])

    def run(specs, folder=""):
        diverged = made({}, 0, None)
        return lab.Results(dataclasses.replace(diverged, spec=spec) for spec in specs)

    with pytest.raises(ValueError, match="diverged; give lower rates"):
        lab.TuneLearningRate(most=4)(specs, run)


@pytest.mark.parametrize(
    ("biases", "expected"),
    [
        (("q", "k", "v", "o"), [("q", "k", "v", "o"), ("o",), ("o", "factors")]),
        (("k", "o"), [("k", "o"), ("o",), ("o",)]),
        ((), [(), (), ()]),
    ],
)
def test_other_layouts_have_the_biases_of_the_base(biases, expected):
    """All of theirs where the base has all, else those that both may have."""
    heads = Standard(num_heads=2, biases=biases)
    base = lab.Experiment(model=ModelConfig(width=8, heads=heads))
    specs = lab.product(base, layout=["wide", "latent", "tensor_product"], seeds=[0])
    assert [spec.config.model.heads.biases for spec in specs] == expected


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda b: lab.product(b, layout=[]), "nothing to run"),
        (lambda b: lab.product(b, seeds=[]), "nothing to run"),
        (lambda b: lab.product(b, layout="wide"), "layout.* not 'wide'"),
        (lambda b: lab.product(b, seeds=3), "seeds.* not 3"),
        (lambda b: lab.product(b, train__stepz=[1]), "'steps'"),
        (lambda b: lab.product(b, layot=["wide"]), "'layout'"),
        (lambda b: lab.product(b, layout=["wyde"]), "'wide'"),
        (lambda b: lab.product(b, steps=[3]), r"train\.steps"),
        (lambda b: lab.product(b, model__max_len=[4]), "max_len"),
        (lambda b: lab.product(b, train__steps=[3, 3]), "two runs"),
        (lambda b: lab.Experiment(model={"width": 8}), "ModelConfig"),
        (lambda b: lab.sweep([b], "nowhere"), "RunSpecs"),
        (lambda b: lab.RunSpec("a/b", b), "folder"),
        (lambda b: lab.RunSpec("a", b, seed=2**32), "seed.* not 4294967296"),
        (lambda b: lab.with_values(b, {"model.fnn": FFN()}), "'fnn'.* ffn"),
        (lambda b: lab.product(b, model=[3]), r"cannot be 3.* model\.kind"),
        (lambda b: lab.product(b, train=["adam"]), r"cannot be 'adam'.* train\.steps"),
        (lambda b: lab.product(b, data=[None]), r"cannot be None.* data\.path"),
        (lambda b: lab.product(b, callbacks=["heads"]), "callbacks must be a tuple"),
        (lambda b: lab.product(b, start=[3]), "start must be of type str"),
        (lambda b: lab.product(b, start=["", "/nowhere"]), "/nowhere"),
        (lambda b: lab.with_values(b, {"task": "masked_lm"}), r"model\.kind"),
        (lambda b: lab.with_values(b, {"init": "no_such_module:make"}), "no_such_module"),
        (lambda b: lab.with_values(b, {"init": "attnlab.names:lokup"}), "lokup"),
        (lambda b: lab.with_values(b, {"callbacks": ("head",)}), "'heads'"),
        (lambda b: lab.with_values(b, {"train.optimizer.frozen": "nothing"}), "nothing"),
    ],
)
def test_bad_input_is_refused_before_any_run(base, call, message):
    with pytest.raises((TypeError, ValueError), match=message):
        call(base)


def test_another_run_of_the_same_id_is_refused(swept):
    specs, folder, _ = swept
    other = dataclasses.replace(specs[0], seed=4)
    for run in (lambda: in_process([other], folder), lambda: lab.run_one(other, folder)):
        with pytest.raises(ValueError, match="seed: there 3, here 4"):
            run()


def test_a_run_that_failed_on_its_data_can_be_corrected(base, tmp_path):
    """Its id is free until a run has begun, as that of a run which is only planned. The others
    finish."""
    short = tmp_path / "short.txt"
    short.write_text("hi")
    good = lab.RunSpec("one", base)
    wrong = lab.RunSpec("one", lab.with_values(base, {"data.path": str(short)}))
    planned, replaced = (dataclasses.replace(spec, id="two") for spec in (wrong, good))
    other = dataclasses.replace(good, id="other")
    add_specs([wrong, planned], tmp_path)
    with pytest.raises(lab.SweepFailed, match=r"one: .*short\.txt"):
        in_process([wrong, other], tmp_path)
    assert [run.spec.id for run in lab.load_results(tmp_path)] == ["other"]
    add_specs([good, replaced], tmp_path)
    assert specs_in(tmp_path) == {"one": good, "two": replaced, "other": other}


class CannotBegin(lab.InProcess):
    """An executor whose workers end before they take a run."""

    def start(self, workdir, count):
        (workdir / "logs").mkdir(exist_ok=True)
        (workdir / "logs/worker0.log").write_text(
            "Traceback (most recent call last):\n  File 'a'\nKeyError: 'a'\n\nDuring handling of "
            "this, another exception occurred:\n\nTraceback (most recent call last):\n"
            "  File 'b'\nmine.Unknown: unknown layout 'mine'\n-----\nFor simplicity, a note\n"
        )


def test_the_reason_of_a_worker_that_cannot_begin_is_in_the_error(base, tmp_path):
    with pytest.raises(lab.SweepFailed, match=r"mine.Unknown: unknown layout 'mine' .*worker0.log"):
        lab.sweep(lab.product(base, seeds=[0]), tmp_path, executor=CannotBegin(), progress=False)


def failing(base, tmp_path):
    """A good variant, and one whose text is too short when it is run."""
    text = tmp_path / "gone.txt"
    text.write_bytes(b"abc " * 500)
    variants = [lab.Variant({}, "good"), lab.Variant({"data.path": str(text)}, "bad")]
    specs = specs_of(base, variants, [0])
    text.write_bytes(b"too short")
    return specs


@pytest.mark.slow
def test_a_failing_tuning_run_leaves_out_its_variant_alone(base, tmp_path):
    specs = failing(base, tmp_path)
    with pytest.raises(lab.SweepFailed, match=r"bad-seed1000.*gone.txt"):
        in_process(specs, tmp_path / "w", policies=[lab.TuneLearningRate()])
    (result,) = lab.load_results(tmp_path / "w")
    tuned = lab.load_results(tmp_path / "w/tuning")
    assert {run.spec.tags["name"] for run in tuned} == {"good"}
    (rate,) = lab.best_rates(tuned).values()
    assert result.spec.config.train.optimizer.learning_rate == pytest.approx(rate)
    assert result.spec.tags == {"name": "good"}


def test_results_are_read_where_the_data_are_not(swept):
    specs, folder, results = swept
    text = Path(specs[0].config.data.path)
    kept = text.read_bytes()
    text.unlink()
    try:
        assert lab.load_results(folder).runs == results.runs
    finally:
        text.write_bytes(kept)


@pytest.mark.slow
def test_kills_change_no_number():
    """SIGKILL at random moments, of runs, workers and sweeps: see kill_runs.py."""
    words = [sys.executable, str(ROOT / "tests/lab/kill_runs.py"), "4"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
