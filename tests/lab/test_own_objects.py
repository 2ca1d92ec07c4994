"""Objects of one's own, without registration: the page that shows them, and what cannot be."""

import dataclasses
import re
import subprocess
import sys

import numpy as np
import pytest
from commands import user_environment
from conftest import ROOT
from small_experiment import MODEL, train_config

from attnlab import lab
from attnlab.data import Text
from attnlab.heads import Standard
from attnlab.models import ModelConfig
from attnlab.names import load, reference
from attnlab.training import TrainConfig, callback
from attnlab.training.loggers import read_metrics
from attnlab.training.objectives import OBJECTIVES

PAGE = (ROOT / "docs/howto/own_experiment.md").read_text()
MINE, GO = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


def code_lines(text):
    return len([line for line in map(str.strip, text.splitlines()) if line and line[0] != "#"])


@pytest.mark.slow
def test_the_page_runs_from_another_folder(tmp_path):
    """Two of its steps and seeds are fewer. Its workers have no import but the page's own files."""
    assert code_lines(MINE) <= 45
    assert code_lines(GO) <= 12
    (tmp_path / "code").mkdir()
    (tmp_path / "code/mine.py").write_text(MINE)
    short = GO.replace("steps=300", "steps=30").replace("data=data", "data=data, seeds=[0]")
    (tmp_path / "code/go.py").write_text(short)
    environment = user_environment() | {"PYTHONPATH": str(ROOT)}
    words = [sys.executable, "code/go.py"]
    done = subprocess.run(
        words, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    results = lab.load_results(tmp_path / "runs/mine")
    assert len(results) == 4
    assert "svg" in (tmp_path / "runs/mine/report.html").read_text()
    kinds = {type(run.spec.config.model.heads).__name__ for run in results}
    assert kinds == {"Standard", "OneQuery"}
    rows = list(read_metrics(tmp_path / f"runs/mine/runs/{results.runs[0].spec.id}/metrics.jsonl"))
    assert [row["step"] for row in rows if "norm" in row] == [0, 30]


@dataclasses.dataclass(frozen=True)
class Own(Text):
    own: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class OwnLayout(Standard):
    pass


own_task = OBJECTIVES["causal_lm"]._replace(description="mine")


@callback(every=2)
def own_callback(info):
    info.log("own", info.step)


def own_init(key, model, inputs):
    return model.build().init(key, **inputs)["params"]


def test_an_experiment_of_own_objects_survives_json(nine_letters):
    model = dataclasses.replace(MODEL, heads=OwnLayout(num_heads=2))
    one = lab.Experiment(
        model=model, train=train_config(2, every=2), data=Own(path=str(nine_letters), own=3),
        task=own_task, init=own_init, callbacks=[own_callback],
    )  # fmt: skip
    again = lab.Experiment.from_json(one.to_json())
    assert again == one
    assert again.objective is own_task
    assert again.data.own == 3
    assert type(again.model.heads) is OwnLayout
    assert load(one.init) is own_init
    named = lab.Experiment(task=OBJECTIVES["causal_lm"]).to_dict()
    assert (named["task"], named["data"]["source"]) == ("causal_lm", "text")
    assert "imports" not in named


@pytest.mark.parametrize(
    "make",
    [
        lambda: lab.Experiment(task=OBJECTIVES["causal_lm"]._replace(description="x")),
        lambda: lab.Experiment(init=lambda key, model, inputs: {}),
        lambda: lab.Experiment(callbacks=[callback(every=1)(lambda info: None)]),
        lambda: lab.RunSpec("a", lab.Experiment(data=type("Local", (Text,), {})())).digest,
    ],
)
def test_what_cannot_be_imported_is_an_error_before_any_run(make):
    with pytest.raises(ValueError, match="cannot be imported"):
        make()


def test_a_file_is_one_module_however_it_is_named(tmp_path):
    file = tmp_path / "one.py"
    file.write_text("import helper\nclass A:\n    pass\n")
    (tmp_path / "helper.py").write_text("")
    first = load(f"{file}:A")
    assert load(f"{tmp_path}/../{tmp_path.name}/one.py:A") is first
    assert load(reference(first)) is first
    for wrong in (f"{tmp_path}/two.py:A", f"{file}:B", "no_such_module:A"):
        with pytest.raises(ValueError, match="cannot import"):
            load(wrong)


def test_a_record_replaces_its_field_at_every_level(nine_letters):
    text = Text(path=str(nine_letters))
    base = lab.Experiment(model=MODEL, train=TrainConfig(steps=9, length=MODEL.max_len), data=text)
    adam = dataclasses.replace(base.train.optimizer, name="adam", weight_decay=0.0)
    specs = lab.product(
        base,
        model=[MODEL, dataclasses.replace(MODEL, width=16)],
        layout=[Standard(num_heads=4)],
        train__optimizer=[adam],
        data=[dataclasses.replace(text, validation=0.1)],
        seeds=[0],
    )
    found = [(s.config.model.width, s.config.model.heads.num_heads) for s in specs]
    assert found == [(MODEL.width, 4), (16, 4)]
    assert {(s.config.train.optimizer.name, s.config.data.validation) for s in specs} == {
        ("adam", 0.1)
    }
    with pytest.raises(ValueError, match="modle"):
        lab.with_values(base, {"modle": ModelConfig()})


def test_a_callback_that_fails_later_ends_alone(nine_letters, tmp_path, capsys):
    """At step 0 its error is raised: nothing is lost yet."""
    base = lab.Experiment(
        model=MODEL, train=train_config(4, every=2), data=Text(path=str(nine_letters)),
        callbacks=[fails_at_2, own_callback],
    )  # fmt: skip
    assert lab.run_one(lab.RunSpec("a", base), tmp_path).status == "complete"
    rows = list(read_metrics(tmp_path / "runs/a/metrics.jsonl"))
    steps = {name: [r["step"] for r in rows if name in r] for name in ("own", "before")}
    assert steps == {"own": [0, 2, 4], "before": [0]}
    assert "fails_at_2" in capsys.readouterr().err
    broken = dataclasses.replace(base, callbacks=(fails_at_0,))
    with pytest.raises(ZeroDivisionError):
        lab.run_one(lab.RunSpec("b", broken), tmp_path)


@callback(every=2)
def fails_at_2(info):
    info.log("before", np.float32(1 / (2 - info.step)))


@callback(every=1)
def fails_at_0(info):
    info.log("before", 1 / info.step)


loads: list = []


@dataclasses.dataclass(frozen=True)
class Counted(Text):
    def load(self, length, folder=None):
        loads.append(self)
        return super().load(length, folder)


def test_the_runs_of_a_process_read_their_data_once(nine_letters, tmp_path):
    data = [Counted(path=str(nine_letters)), Counted(path=str(nine_letters), validation=0.1)]
    base = lab.Experiment(model=MODEL, train=train_config(2, every=2))
    specs = lab.product(base, data=data, seeds=[0, 1])
    lab.sweep(specs, tmp_path, executor=lab.InProcess(), progress=False)
    assert loads == data
