"""A sweep of specs: nothing runs twice, a kill changes no number, tables are what they say."""

import dataclasses
import json
import random
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT
from scipy import stats
from small_experiment import MODEL, experiment, train_config

from attnlab import lab
from attnlab.data import Text
from attnlab.heads import LAYOUTS, Standard
from attnlab.lab.policies import with_rates
from attnlab.lab.result import VERSION
from attnlab.lab.spec import specs_of
from attnlab.lab.sweep import add_specs
from attnlab.lab.workdir import specs_in
from attnlab.models import ModelConfig, num_parameters

TRAIN = train_config(6, every=3, curve_windows=4)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return experiment(tmp_path_factory, MODEL, TRAIN, validation=0.1)


@pytest.fixture(scope="module")
def swept(base, tmp_path_factory):
    folder = tmp_path_factory.mktemp("sweep")
    specs = lab.product(base, layout=["standard", "narrow"], seeds=[3, 5], match="parameters")
    return specs, folder, lab.sweep(specs, folder, executor=lab.InProcess(), progress=False)


def test_every_spec_has_a_result_and_none_is_run_again(swept):
    specs, folder, results = swept
    assert [run.spec for run in results] == specs
    assert [run.status for run in results] == ["complete"] * 4
    before = {p: p.stat().st_mtime_ns for p in folder.rglob("*") if p.is_file()}
    again = lab.sweep(specs[2:], folder, executor=lab.InProcess(), progress=False)
    assert again.runs == results.runs[2:]
    assert {p: p.stat().st_mtime_ns for p in folder.rglob("*") if p.is_file()} == before
    assert lab.load_results(folder).runs == results.runs


def test_parameters_are_equal_where_they_are_matched(swept):
    base = num_parameters(MODEL)
    counts = [run.sizes.parameters for run in swept[2]]
    assert counts[:2] == [base, base]
    assert max(counts) - base < 2 * 8 * 2 + 2  # less than one more unit in each of two layers


def test_specs_and_results_survive_json(swept):
    for run in swept[2]:
        assert lab.RunResult.from_json(run.to_json()) == run
    for layout in LAYOUTS:
        heads = LAYOUTS[layout](num_heads=2)
        model = dataclasses.replace(MODEL, heads=heads)
        spec = lab.RunSpec("a", lab.Experiment(model=model, train=TRAIN), 4)
        assert lab.RunSpec.from_dict(json.loads(json.dumps(spec.to_dict()))) == spec
    with pytest.raises(ValueError, match="version is 99"):
        lab.RunResult.from_json(json.dumps({"version": 99}))


@pytest.mark.parametrize("text", ["[]", json.dumps({"version": VERSION + 1})])
def test_what_is_no_result_is_refused(text):
    with pytest.raises(ValueError, match="no result of a run"):
        lab.RunResult.from_json(text)


def test_the_table_has_means_and_deviations(swept):
    table = swept[2].table().set_index("layout")
    for layout in ("standard", "narrow"):
        runs = [run for run in swept[2] if run.spec.tags["layout"] == layout]
        scores = [run.scores.heldout["bits_per_byte"] for run in runs]
        assert table.loc[layout, "mean"] == pytest.approx(np.mean(scores))
        assert table.loc[layout, "sd"] == pytest.approx(np.std(scores, ddof=1))
    frame = swept[2].to_pandas()
    assert list(frame["seed"]) == [3, 5, 3, 5]
    assert frame["heldout_bits_per_byte"].notna().all()


def test_differences_are_paired_over_seeds(swept):
    results = swept[2]
    score = {(r.spec.tags["layout"], r.spec.seed): r.scores.heldout["loss"] for r in results}
    test = stats.ttest_rel(*[[score[one, s] for s in (3, 5)] for one in ("narrow", "standard")])
    row = results.compare({"layout": "standard"}, "loss").iloc[0]
    assert row["p"] == pytest.approx(test.pvalue)
    assert (row["low"], row["high"]) == pytest.approx(tuple(test.confidence_interval(0.95)))
    with pytest.raises(ValueError, match="names 0 variants"):
        results.compare({"layout": "wide"})


def made(tags, seed, loss, rate=None):
    """A result as a run of this spec would have left it."""
    spec = lab.product(lab.Experiment(model=MODEL, train=TRAIN), seeds=[seed])[0]
    spec = dataclasses.replace(spec, id="-".join([*map(str, tags.values()), f"seed{seed}"]))
    spec = dataclasses.replace(spec, tags=tags)
    spec = with_rates([spec], [rate])[0] if rate else spec
    scores = {"loss": loss}
    return lab.RunResult(
        spec=spec,
        status="complete",
        scores=lab.Scores(heldout=scores, train=scores, validation=scores),
        sizes=lab.ModelSizes(parameters=1, applied_parameters=1, flops_per_token=1, ffn_width=1),
        timing=lab.Timing(seconds=1.0, tokens_per_second=1.0),
        provenance=lab.Provenance(environment={"jax": "0"}),
    )


def test_rates_are_added_until_the_best_is_between_two():
    propose = lab.TuneLearningRate(factor=2.0, most=4).propose
    runs = [made({"name": "a"}, 0, loss, rate) for loss, rate in ((3.0, 0.01), (2.0, 0.02))]
    (proposed,) = propose(lab.Results(runs))
    assert proposed.config.train.optimizer.learning_rate == 0.04
    inside = [*runs, made({"name": "a"}, 0, 2.5, 0.04)]
    assert propose(lab.Results(inside)) == []
    (rate,) = lab.best_rates(lab.Results(inside)).values()
    assert rate == pytest.approx(0.02245, abs=1e-5)  # of the parabola through all three
    steep = [made({"name": "a"}, 0, -rate, rate) for rate in (0.01, 0.02, 0.04, 0.08)]
    assert propose(lab.Results(steep)) == []


def test_seeds_are_added_while_an_interval_is_wide():
    runs = [made({"name": "a"}, 0, 2.0), made({"name": "a"}, 1, 3.0)]
    proposed = lab.AddSeeds(half_width=0.1).propose(lab.Results(runs))
    assert [(spec.seed, spec.id) for spec in proposed] == [(2, "a-seed2")]
    assert lab.AddSeeds(half_width=10.0).propose(lab.Results(runs)) == []
    assert lab.AddSeeds(half_width=0.1, most=2).propose(lab.Results(runs)) == []


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


def test_a_mistyped_shortcut_is_named():
    with pytest.raises(ValueError, match=r"'layot': did you mean 'layout'\? known: .*, sharing$"):
        lab.product(layot=["wide"])


def test_a_seed_is_added_on_every_text(tmp_path):
    runs = []
    for name, tag, loss in (("x", "a", 1.0), ("y", "a", 3.0), ("x", "b", 1.1), ("y", "b", 2.0)):
        (tmp_path / name).write_bytes(b"some text " * 500)
        run = made({"path": name, "name": tag}, 0, loss)
        config = lab.with_values(run.spec.config, {"data.path": str(tmp_path / name)})
        runs.append(dataclasses.replace(run, spec=dataclasses.replace(run.spec, config=config)))
    results = lab.Results(runs)
    for policy in (lab.AddSeeds(half_width=0.1, most=2), lab.DecideComparisons(most=2)):
        ids = {spec.id for spec in policy.propose(results)}
        assert ids == {"x-a-seed1", "y-a-seed1", "x-b-seed1", "y-b-seed1"}
    assert lab.AddSeeds(half_width=0.1, most=1).propose(results) == []


def test_a_policy_is_asked_until_it_proposes_nothing(swept, tmp_path):
    """Of one seed that is complete it makes two."""
    specs, folder, _ = swept
    shutil.copytree(folder / "runs" / specs[0].id, tmp_path / "runs" / specs[0].id)
    policy = lab.AddSeeds(half_width=0.0, most=2)
    results = lab.sweep(
        specs[:1], tmp_path, executor=lab.InProcess(), policies=[policy], progress=False
    )
    assert [run.spec.seed for run in results] == [3, 4]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda b: lab.product(b, layout=[]), "nothing to run"),
        (lambda b: lab.product(b, seeds=[]), "nothing to run"),
        (lambda b: lab.product(b, layout="wide"), r"layout: give a list of values, .* not 'wide'"),
        (lambda b: lab.product(b, layout=3), "layout: give a list of values, .* not 3"),
        (lambda b: lab.product(b, seeds=3), "seeds: give a list of values, .* not 3"),
        (lambda b: lab.product(b, train__stepz=[1]), "did you mean 'steps'"),
        (lambda b: lab.product(b, layout=["wyde"]), "did you mean 'wide'"),
        (lambda b: lab.product(b, model__max_len=[4]), "longer than model.max_len"),
        (lambda b: lab.product(b, steps=[3]), "no field 'steps': write train.steps"),
        (lambda b: lab.with_values(b, {"ffn.width": 8}), "'ffn.width': write model.ffn.width; kno"),
        (
            lambda b: lab.Experiment(model={"width": 8}),
            r"model must be of type ModelConfig, not \{'width",
        ),
        (lambda b: lab.sweep([b], "nowhere"), "must be RunSpecs, as lab.product makes, not Experi"),
        (lambda b: lab.RunSpec("a/b", b), "names a folder"),
        (lambda b: lab.with_values(b, {"task": "masked_lm"}), "needs model.kind"),
    ],
)
def test_bad_input_is_refused_before_any_run(base, call, message):
    with pytest.raises((TypeError, ValueError), match=message):
        call(base)


def test_another_run_of_the_same_id_is_refused(swept, base):
    specs, folder, _ = swept
    other = dataclasses.replace(specs[0], seed=4)
    with pytest.raises(ValueError, match="holds another run"):
        lab.sweep([other], folder, executor=lab.InProcess(), progress=False)
    with pytest.raises(ValueError, match="seed: there 3, here 4"):
        lab.run_one(other, folder)


def test_a_run_that_failed_on_its_data_can_be_corrected(base, tmp_path):
    """Its id is free until a run has begun, as that of a run which is only planned."""
    short = tmp_path / "short.txt"
    short.write_text("hi")
    good = lab.RunSpec("one", base)
    wrong = lab.RunSpec("one", lab.with_values(base, {"data.path": str(short)}))
    behind = [dataclasses.replace(spec, id="two") for spec in (good, wrong)]
    add_specs([wrong, behind[1]], tmp_path)
    with pytest.raises(lab.SweepFailed, match=r"1 run without a result:\n  one: .*short.txt"):
        lab.sweep([wrong], tmp_path, executor=lab.InProcess(), progress=False)
    shutil.rmtree(tmp_path / "runs" / "two", ignore_errors=True)  # planned, not tried
    add_specs([good, behind[0]], tmp_path)
    assert specs_in(tmp_path) == {"one": good, "two": behind[0]}


def test_a_list_of_seeds_makes_no_other_run(swept, base):
    """`train.seeds` says which runs there are; each has its own seed."""
    specs, folder, results = swept
    train = dataclasses.replace(base.train, seeds=(3, 5, 7))
    more = [
        dataclasses.replace(s, config=dataclasses.replace(s.config, train=train)) for s in specs
    ]
    again = lab.sweep(more, folder, executor=lab.InProcess(), progress=False)
    assert [run.scores for run in again] == [run.scores for run in results]
    assert lab.run_one(more[0], folder) == results[0]


class CannotBegin:
    """An executor whose workers end before they take a run."""

    def start(self, workdir, count):
        (workdir / "logs").mkdir(exist_ok=True)
        (workdir / "logs/worker0.log").write_text("Traceback:\nValueError: unknown layout 'mine'\n")

    def running(self):
        return False

    def stop(self):
        pass


def test_the_reason_of_a_worker_that_cannot_begin_is_told(base, tmp_path):
    specs = lab.product(base, seeds=[0])
    with pytest.raises(lab.SweepFailed, match=r"unknown layout 'mine' .*worker0.log"):
        lab.sweep(specs, tmp_path, executor=CannotBegin(), progress=False)


def test_data_without_a_name_are_refused():
    @dataclasses.dataclass(frozen=True)
    class Rows(Text):
        pass

    with pytest.raises(ValueError, match="Rows"):
        lab.product(lab.Experiment(data=Rows()), seeds=[0])[0].to_dict()


def test_a_run_that_fails_is_named_and_the_others_finish(base, tmp_path):
    good, other = lab.product(base, seeds=[0, 1])
    text = tmp_path / "gone.txt"
    text.write_bytes(b"abc " * 500)
    bad = dataclasses.replace(other, config=lab.with_values(base, {"data.path": str(text)}))
    text.write_bytes(b"too short")
    with pytest.raises(lab.SweepFailed, match=r"seed1: .*gone.txt"):
        lab.sweep([bad, good], tmp_path / "w", executor=lab.InProcess(), progress=False)
    assert [run.spec for run in lab.load_results(tmp_path / "w")] == [good]


@pytest.mark.slow
def test_a_failing_tuning_run_leaves_out_its_variant_alone(base, tmp_path):
    text = tmp_path / "gone.txt"
    text.write_bytes(b"abc " * 500)
    variants = [lab.Variant({}, "good"), lab.Variant({"data.path": str(text)}, "bad")]
    specs = specs_of(base, variants, [0])
    text.write_bytes(b"too short")
    with pytest.raises(lab.SweepFailed, match=r"bad-seed1000.*gone.txt"):
        lab.sweep(
            specs,
            tmp_path / "w",
            executor=lab.InProcess(),
            policies=[lab.TuneLearningRate()],
            progress=False,
        )
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


SCRIPT = """
    import sys
    from attnlab import lab
    from attnlab.lab.spec import read_specs
    specs = read_specs(open(sys.argv[1]).read())
    if __name__ == "__main__":
        lab.sweep(specs, sys.argv[2], executor=lab.LocalExecutor(2), progress=False)
"""


def left_behind(folder):
    """The result, without seconds, and the metrics of each run."""
    found = {}
    for path in sorted(folder.glob("runs/*")):
        result = json.loads((path / "result.json").read_text())
        del result["timing"]
        found[path.name] = result, (path / "metrics.jsonl").read_text()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("kills", [3, 100])
def test_kills_change_no_number(base, tmp_path, kills):
    from attnlab.lab.spec import write_specs

    longer = lab.with_values(base, {"train.steps": 60})
    specs = lab.product(longer, layout=["standard", "narrow"], seeds=[3])
    (tmp_path / "specs.json").write_text(write_specs(specs))
    (tmp_path / "script.py").write_text(textwrap.dedent(SCRIPT))
    command = [sys.executable, str(tmp_path / "script.py"), str(tmp_path / "specs.json")]

    def start(folder):
        return subprocess.Popen([*command, str(folder)], cwd=ROOT, stderr=subprocess.PIPE)

    def finish(folder):
        process = start(folder)
        _, error = process.communicate(timeout=300)
        assert process.returncode == 0, error.decode()

    finish(tmp_path / "whole")
    rng, moments, rounds = random.Random(kills), [], 0
    while len(moments) < kills:
        folder = tmp_path / f"killed{rounds}"
        rounds += 1
        for _ in range(5):
            process = start(folder)
            time.sleep(rng.uniform(2.0, 9.0))
            if process.poll() is None and len(moments) < kills:
                process.send_signal(signal.SIGKILL)
                moments.append(len(list(folder.glob("runs/*/result.json"))))
            process.communicate()
        finish(folder)
        assert left_behind(folder) == left_behind(tmp_path / "whole")
