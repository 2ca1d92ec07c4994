"""A sweep of specs: nothing runs twice, a kill changes no number, tables are what they say."""

import dataclasses
import itertools
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from conftest import ROOT
from made_results import made, tuned
from small_experiment import MODEL, experiment, in_process, train_config

from attnlab import lab
from attnlab.data import Text, TokenFiles
from attnlab.heads import LAYOUTS, Standard
from attnlab.lab.description import Description, Expectation
from attnlab.lab.policies import with_known_rates
from attnlab.lab.result import VERSION
from attnlab.lab.spec import specs_of
from attnlab.lab.workdir import add_specs, specs_in
from attnlab.models import FFN, ModelConfig, num_parameters
from attnlab.models.budget import budget_cost
from attnlab.training import OBJECTIVES, callback

TRAIN = train_config(6, every=3, curve_windows=4)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return experiment(tmp_path_factory, MODEL, TRAIN, validation=0.1)


@pytest.fixture(scope="module")
def swept(base, tmp_path_factory):
    folder = tmp_path_factory.mktemp("sweep")
    specs = lab.product(base, layout=["standard", "narrow"], seeds=[3, 5], match="parameters")
    return specs, folder, in_process(specs, folder)


def test_every_spec_has_a_result_and_none_is_run_again(swept, base):
    """Nor by a list of seeds in the config: each run has its own. Sizes are those of the model."""
    specs, folder, results = swept
    assert [run.spec for run in results] == specs
    assert [run.status for run in results] == ["complete"] * 4
    counts = [num_parameters(spec.config.model) for spec in specs]
    assert [run.sizes.parameters for run in results] == counts
    before = {p: p.stat().st_mtime_ns for p in folder.rglob("*") if p.is_file()}
    assert in_process(specs[2:], folder).runs == results.runs[2:]
    assert {p: p.stat().st_mtime_ns for p in folder.rglob("*") if p.is_file()} == before
    train = dataclasses.replace(base.train, seeds=(3, 5, 7))
    config = dataclasses.replace(specs[0].config, train=train)
    again = dataclasses.replace(specs[0], config=config)
    assert [run.scores for run in in_process([again], folder)] == [results[0].scores]
    assert lab.run_one(again, folder) == results[0]


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
    """Results have the tags of the last call."""
    specs, folder, results = swept
    for run in results:
        assert lab.RunResult.from_json(run.to_json()) == run
        assert lab.RunResult.from_json(run.to_json(), run.spec).spec is run.spec
        assert lab.RunResult.from_json(run.to_json(), specs[3]) == run  # not of this spec
    [tagged] = lab.load_results(folder, [dataclasses.replace(specs[0], tags={"size": 4})])
    assert tagged.spec.tags == {"size": 4}
    for layout in LAYOUTS:
        model = dataclasses.replace(MODEL, heads=LAYOUTS[layout](num_heads=2))
        spec = lab.RunSpec("a", lab.Experiment(model=model, train=TRAIN), 4)
        assert lab.RunSpec.from_dict(json.loads(json.dumps(spec.to_dict()))) == spec
    values = {"model.heads.head_dim": None, "train.optimizer.base_fan_in": None}
    unset = lab.with_values(lab.Experiment(), values)
    assert lab.Experiment.from_json(unset.to_json()) == unset
    [counted] = lab.product(specs[0].config, train__steps=np.array([7]), seeds=np.array([0]))
    assert json.loads(json.dumps(counted.to_dict()))["tags"] == {"steps": 7}
    for text in ("[]", json.dumps({"version": VERSION + 1})):
        with pytest.raises(ValueError, match="version"):
            lab.RunResult.from_json(text)


def test_rates_are_added_until_the_best_is_between_two():
    """And none beyond four, or without validation scores."""

    def proposed(*scores):
        return lab.TuneLearningRate(most=4).propose(lab.Results(tuned(scores, first=0.01)))

    [further] = proposed(3.0, 2.0)
    assert further.config.train.optimizer.learning_rate == 0.04
    assert proposed(3.0, 2.0, 2.5) == proposed(4.0, 3.0, 2.0, 1.0) == []
    [rate] = lab.best_rates(lab.Results(tuned((3.0, 2.0, 2.5), first=0.01))).values()
    assert rate == pytest.approx(0.02245, abs=1e-5)  # of the parabola through all three
    with pytest.raises(ValueError, match="has no validation scores"):
        proposed(None)


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
    none = "wide, and has none"
    for rows, message in (("", none), ("wide,,1\n", none), ("wide,1,1\nwide,2,1\n", "1.0, 2.0")):
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


def test_of_several_texts_scores_are_looked_at_four_times():
    """As often as their p-values count, up to any number of seeds."""
    rng, looks = np.random.default_rng(0), []

    def run(specs, folder=""):
        looks.append(len(specs))
        means = [2.0 + 0.3 * (spec.tags["name"] == "a") for spec in specs]
        return lab.Results(
            made(dict(spec.tags), spec.seed, mean + rng.normal(), data=spec.config.data)
            for spec, mean in zip(specs, means, strict=True)
        )

    runs = itertools.product("ab", "xy", range(3))
    first = [made({"name": tag}, n, 0.0, data=Text(path=name)).spec for tag, name, n in runs]
    lab.DecideComparisons(most=30)(first, run)
    assert looks[:2] == [12, 48]  # 9 of the 27 seeds that may be added
    assert len(looks) <= 4


def test_policies_add_no_seeds_while_another_process_has_a_run(tmp_path):
    """Pairs of a variant that tuning left out are no error, nor are all variants."""
    specs = [made({"name": tag}, seed, 0.0).spec for tag in "ab" for seed in range(3)]
    a, b, gone = ({"name": tag} for tag in "abc")

    def run(specs, folder=""):
        others = [spec for spec in specs if spec.seed != 2]
        return lab.Results(made(dict(s.tags), s.seed, float(i)) for i, s in enumerate(others))

    for policy in (lab.DecideComparisons([(gone, a), (b, a)]), lab.AddSeeds(half_width=1e-3)):
        assert policy(specs, run) == specs
        left_out = [lambda specs, run: [], policy]
        assert not lab.sweep(specs, tmp_path, policies=left_out, waits=False)


def test_a_sweep_keeps_that_seeds_were_added(base, tmp_path):
    """Repeated without the policy, or with the added seeds in its list."""
    specs, policy = lab.product(base, seeds=[3, 4]), lab.DecideComparisons(most=2)
    in_process(specs[:1], tmp_path, policies=[policy])
    for again, policies in ((specs[:1], []), (specs, []), (specs, [policy])):
        in_process(again, tmp_path, policies=policies)
        about = lab.read_description(tmp_path)
        assert (about.seeds_added, about.planned_seeds) == (True, (3,))


def test_a_seed_is_added_on_every_text():
    results = lab.Results(
        made({"path": name, "name": tag}, 0, loss, data=Text(path=name))
        for name, tag, loss in (("x", "a", 1.0), ("y", "a", 3.0), ("x", "b", 1.1), ("y", "b", 2.0))
    )
    for policy in (lab.AddSeeds(half_width=0.1, most=2), lab.DecideComparisons(most=2)):
        found = [(spec.seed, *spec.tags.values()) for spec in policy.propose(results)]
        assert sorted(found) == [(1, "x", "a"), (1, "x", "b"), (1, "y", "a"), (1, "y", "b")]
    assert lab.AddSeeds(half_width=0.1, most=1).propose(results) == []


def test_policies_are_asked_until_they_propose_nothing(base, tmp_path):
    """One of them is a function."""
    policies = [one_more_seed, lab.AddSeeds(half_width=0.0, most=3)]
    results = in_process(lab.product(base, seeds=[3]), tmp_path, policies=policies)
    assert [run.spec.seed for run in results] == [3, 4, 5]


def one_more_seed(specs, run):
    [result] = run(specs)
    return [*specs, dataclasses.replace(result.spec, id="seed4", seed=4)]


def test_specs_that_are_added_at_the_same_time_are_all_kept(base, tmp_path):
    pairs = [lab.product(base, seeds=[2 * i, 2 * i + 1]) for i in range(8)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(add_specs, pairs, [tmp_path] * 8))
    assert sorted(spec.seed for spec in specs_in(tmp_path).values()) == list(range(16))


LOCAL = "cannot be imported"
IDS = TokenFiles(path="ids.bin", vocab_size=256, bytes_per_token=1.0)


@pytest.mark.parametrize(
    ("values", "options", "message"),
    [
        ({"data": [IDS]}, {}, "Text by"),
        ({"data__validation": [0.0]}, {}, r"Text by --config\.data\.validation"),
        ({"train__optimizer__learning_rate": [0.1, 0.2]}, {}, "tag 'learning_rate'"),
        ({}, {"policies": [lab.DecideComparisons([({"layout": "wid"}, {})])]}, "'wid'"),
        ({}, {"description": Description(baseline={"layout": "wid"})}, "'wid'"),
        ({}, {"description": Description(pairs=[({"layout": "x"}, {})])}, "'x'"),
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
        (lambda b: lab.product(b, layout="wide"), "layout.* not 'wide'"),
        (lambda b: lab.product(b, seeds=3), "seeds.* not 3"),
        (lambda b: lab.product(b, train__stepz=[1]), "'steps'"),
        (lambda b: lab.product(b, layot=["wide"]), "'layout'"),
        (lambda b: lab.product(b, layout=["wyde"]), "'wide'"),
        (lambda b: lab.product(b, steps=[3]), r"train\.steps"),
        (lambda b: lab.product(b, model__max_len=[4]), "max_len"),
        (lambda b: lab.product(b, train__steps=[3, 3]), "two runs"),
        (lambda b: specs_of(b, [lab.Variant({}, n) for n in ("a b", "a  b")], [0]), "a_b-seed0"),
        (lambda b: lab.Experiment(model={"width": 8}), "ModelConfig"),
        (lambda b: lab.Experiment(data="text"), "data must be of type DataConfig"),
        (lambda b: lab.Experiment.from_dict(b.to_dict() | {"strat": ""}), "strat"),
        (lambda b: lab.Experiment.from_json("{}"), "'model'"),
        (lambda b: lab.sweep([b], "nowhere"), "RunSpecs"),
        (lambda b: lab.RunSpec("a/b", b), "folder"),
        (lambda b: lab.RunSpec("a", b, seed=2**32), "seed.* not 4294967296"),
        (lambda b: lab.with_values(b, {"model.fnn": FFN()}), "'fnn'.* ffn"),
        (lambda b: lab.product(b, model=[3]), r"cannot be 3.* model\.kind"),
        (lambda b: lab.product(b, data=[None]), r"cannot be None.* data\.path"),
        (lambda b: lab.product(b, callbacks=["heads"]), "callbacks must be a tuple"),
        (lambda b: lab.product(b, start=[3]), "start must be of type str"),
        (lambda b: lab.product(b, start=["", "/nowhere"]), "/nowhere"),
        (lambda b: lab.with_values(b, {"task": "masked_lm"}), r"model\.kind"),
        (lambda b: lab.with_values(b, {"init": "attnlab.names:lokup"}), "lokup"),
        (lambda b: lab.with_values(b, {"callbacks": ("head",)}), "'heads'"),
        (lambda b: lab.with_values(b, {"train.optimizer.frozen": "nothing"}), "nothing"),
        (lambda b: lab.Experiment(task=OBJECTIVES["causal_lm"]._replace(description="x")), LOCAL),
        (lambda b: lab.Experiment(init=lambda key, model, inputs: {}), LOCAL),
        (lambda b: lab.Experiment(callbacks=[callback(every=1)(lambda info: None)]), LOCAL),
        (lambda b: lab.RunSpec("a", lab.Experiment(data=type("Own", (Text,), {})())).digest, LOCAL),
        (lambda b: lab.SlurmExecutor(jobs=0), "jobs .* not 0"),
        (lambda b: lab.SlurmExecutor(threads=-1), "threads .* not -1"),
        (lambda b: lab.SlurmExecutor(mode="Write"), "'write'"),
        (lambda b: Description.from_json('{"version": 99}'), "version 99"),
        (lambda b: Description.from_json('{"version": 2, "questoin": "x"}'), "questoin"),
        (lambda b: Description.from_json('{"version": 2, "expectations": [{}]}'), "tags"),
        (lambda b: Description(margin=-1.0), "margin .* at least 0"),
        (lambda b: Description(notes="one"), "notes"),
        (lambda b: Expectation(tags={}, relation="atmost", value=1.0, text=""), "'at most'"),
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


@pytest.mark.slow
def test_a_failing_tuning_run_leaves_out_its_variant_alone(base, tmp_path):
    """One whose text is too short when it is run."""
    text = tmp_path / "gone.txt"
    text.write_bytes(b"abc " * 500)
    variants = [lab.Variant({}, "good"), lab.Variant({"data.path": str(text)}, "bad")]
    specs = specs_of(base, variants, [0])
    text.write_bytes(b"too short")
    with pytest.raises(lab.SweepFailed, match=r"bad-seed1000.*gone.txt"):
        in_process(specs, tmp_path / "w", policies=[lab.TuneLearningRate()])
    (result,) = lab.load_results(tmp_path / "w")
    tuned = lab.load_results(tmp_path / "w/tuning")
    assert {run.spec.tags["name"] for run in tuned} == {"good"}
    assert result.spec.tags == {"name": "good"}
    decide = lab.DecideComparisons([({"name": "bad"}, {"name": "good"})])
    with pytest.raises(lab.SweepFailed, match=r"bad-seed1000.*gone.txt"):  # not: no such variant
        in_process(specs, tmp_path / "w", policies=[lab.TuneLearningRate(), decide])


@pytest.mark.slow
def test_kills_change_no_number():
    """SIGKILL at random moments, of workers and sweeps: see kill_runs.py."""
    words = [sys.executable, str(ROOT / "tests/lab/kill_runs.py"), "4"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
