"""Objects of one's own, without registration: the page that shows them, and what cannot be."""

import dataclasses
import re
import subprocess
import sys

import pytest
from commands import user_environment
from conftest import ROOT
from small_experiment import MODEL, in_process, train_config

from attnlab import lab
from attnlab.data import Text
from attnlab.heads import Standard
from attnlab.models import ModelConfig
from attnlab.names import load, lookup, reference
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
    done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True)
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
    [spec] = lab.product(one, callbacks=[(own_callback,)], seeds=[0])
    assert spec.tags == {"callbacks": "('own_callback',)"}  # the same in every process
    named = lab.Experiment(task=OBJECTIVES["causal_lm"]).to_dict()
    assert (named["task"], named["data"]["source"]) == ("causal_lm", "text")
    assert "imports" not in named


def test_a_file_is_one_module_however_it_is_named(tmp_path):
    folder = tmp_path / "C++ (my own)"
    folder.mkdir()
    file = folder / "one.py"
    file.write_text("import helper\nclass A:\n    pass\n")
    (folder / "helper.py").write_text("")
    first = load(f"{file}:A")
    assert load(f"{tmp_path}/{folder.name}/../{folder.name}/one.py:A") is first
    assert lookup({}, reference(first), what="class") is first
    for wrong in (f"{tmp_path}/two.py:A", f"{file}:B", "no_such_module:A"):
        with pytest.raises(ValueError, match="cannot import"):
            load(wrong)


def test_a_record_replaces_its_field_at_every_level(nine_letters):
    text = Text(path=str(nine_letters))
    base = lab.Experiment(model=MODEL, train=TrainConfig(steps=9, length=MODEL.max_len), data=text)
    adam = dataclasses.replace(base.train.optimizer, name="adam", weight_decay=0.0)
    records = {
        "model": [MODEL, dataclasses.replace(MODEL, width=16)],
        "layout": [Standard(num_heads=4)],
        "train.optimizer": [adam],
        "data": [dataclasses.replace(text, validation=0.1)],
    }
    configs = [spec.config for spec in lab.product(base, seeds=[0], **records)]
    found = [(one.model.width, one.model.heads.num_heads) for one in configs]
    assert found == [(MODEL.width, 4), (16, 4)]
    found = {(one.train.optimizer.name, one.data.validation) for one in configs}
    assert found == {("adam", 0.1)}
    with pytest.raises(ValueError, match="modle"):
        lab.with_values(base, {"modle": ModelConfig()})


loads: list = []


@dataclasses.dataclass(frozen=True)
class Counted(Text):
    def load(self, length, folder=None):
        loads.append(self)
        return super().load(length, folder)


def test_the_runs_of_a_process_read_their_data_once_and_call_back(nine_letters, tmp_path):
    """Callbacks that fail: `test_in_memory.py`."""
    data = [Counted(path=str(nine_letters)), Counted(path=str(nine_letters), validation=0.1)]
    base = lab.Experiment(model=MODEL, train=train_config(2, every=2), callbacks=[own_callback])
    specs = lab.product(base, data=data, seeds=[0, 1])
    for run in in_process(specs, tmp_path):
        rows = read_metrics(run.folder / "metrics.jsonl")
        assert [row["step"] for row in rows if "own" in row] == [0, 2]
    assert loads == data
