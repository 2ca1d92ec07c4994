"""The runs of the published table have its sizes; the figure has its numbers."""

import re
from pathlib import Path

import pytest

from attnlab import lab
from attnlab.models import flops_per_token, num_parameters
from experiments.studies.first_study import effects, study
from experiments.studies.head_width import hypotheses
from experiments.studies.head_width.rows import read_rows
from experiments.studies.head_width.tables import ends


def test_the_runs_have_the_sizes_of_the_table():
    rows = study.read_table(["code"])  # the other texts have the same models, at other seconds
    rows = rows[rows["seed"] == 0]
    specs = study.run_specs(rows, Path("data"))
    assert len(specs) == 3 * 9
    for row, spec in zip(rows.itertuples(), specs, strict=True):
        model = spec.config.model
        assert num_parameters(model) == row.unique_parameters
        assert flops_per_token(model, 64) == row.flops_per_token
        assert spec.config.train.steps == row.steps


def test_texts_and_budgets_that_there_are_not():
    for given, named in (((["code", "shakespear"],), "'shakespeare'"), (([], ["flop"]), "'flops'")):
        with pytest.raises(ValueError, match=named):
            study.read_table(*given)


def test_the_figure_has_the_numbers_of_the_pages():
    study_of_widths = hypotheses.read_study(read_rows(effects.RESULTS / "head_width/runs.csv"))
    widths, sharing = effects.head_widths(study_of_widths), effects.shared_layers(study_of_widths)
    [one] = [e for e in widths if e.label == "2 heads of 32"]
    [albert] = [e for e in sharing if (e.label, e.budget) == ("all layers shared", "flops")]
    page = (effects.RESULTS / "head_width/analysis.md").read_text()
    for effect in (one, albert):
        assert ends(effect.found) in page
    page = (effects.RESULTS / "heads_and_sharing.md").read_text()
    first = effects.budgets(study.read_table())
    assert len(first) == 12
    for _, _, found in first:
        assert f"| {found.value:.3f} | ({found.low:.3f} to {found.high:.3f}) |" in page
    drawn = effects.draw(widths, sharing, first)
    assert labels(drawn) == labels((effects.RESULTS / "effects.svg").read_text())
    drawn = effects.draw_summary(widths, sharing)
    assert labels(drawn) == labels((effects.RESULTS / "summary.svg").read_text())


def labels(svg):
    """Texts, and points to a unit: fonts and libraries move the rest."""
    points = re.findall(r'<use [^>]*x="([\d.]+)" y="([\d.]+)"', svg)
    return re.findall(r"<text.*?>(.*?)</text>", svg), [f"{float(x):.0f}" for x, _ in points]


@pytest.mark.slow
def test_a_run_of_the_table_is_repeated(tmp_path):
    """Standard heads, separate layers, equal parameters: the published score to a hundredth."""
    rows = study.read_table(["code"], ["parameters"])
    rows = rows[(rows["layout"] == "standard") & (rows["sharing"] == "separate")][:1]
    [run] = lab.sweep(study.run_specs(rows, tmp_path), tmp_path, executor=lab.LocalExecutor(jobs=1))
    [expected] = rows["heldout_bits_per_byte"]
    assert run.scores.heldout["bits_per_byte"] == pytest.approx(expected, abs=0.01)
