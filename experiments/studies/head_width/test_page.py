"""The pages, from rows of a simulated study and from those that are published."""

import os
import runpy

import numpy as np
import pytest
from matplotlib.text import Text

from experiments.studies.head_width import analysis, design, gpu, gpu_page, hypotheses, page
from experiments.studies.head_width.rows import PUBLISHED, append_csv
from experiments.studies.head_width.tables import reading
from experiments.studies.head_width.test_simulations import ROWS, check_page


@pytest.fixture(scope="module")
def published():
    return hypotheses.read_study(ROWS)


def test_the_pages_are_those_of_the_published_rows(published):
    check_page(page.analysis_page(ROWS, published), "analysis.md")
    for name, made in (("stage0", page.stage0_page), ("stage1", page.stage1_page),
                       ("cost", page.cost_page)):  # fmt: skip
        assert made(ROWS) == (PUBLISHED / f"{name}.md").read_text()
    check_page(gpu_page.page(gpu.read_scores(PUBLISHED)), "gpu.md")


def test_what_the_words_of_the_page_say(published):
    """Of the template: heads of 16 have the lowest mean loss at every size, P1 is significant and
    equivalent, half the width is inconclusive and 3/2 worse, the trends contradict each other."""
    for width in design.STAGE_OF_WIDTH:
        rows = {h: published.points(p, width=width) for h, p in design.FULL[width].items()}
        assert min(rows, key=lambda h: page.mean_of_texts(rows[h])) == 16
    assert {one.conclusion for one in hypotheses.primary(published)} == {
        "significant, and equivalent within 0.02"
    }
    found = [hypotheses.difference(published, 64, point) for point in ("2x16", "6x16")]
    assert list(map(reading, found)) == ["inconclusive", "worse"]
    fits = hypotheses.fits(published)
    first, last = fits["D = 32 alone, without h = 2"], fits["D = 96 alone"]
    trend = analysis.optimum(published.model).slope.value
    assert trend < 0 < last.best.value - first.best.value


def test_the_files_of_a_complete_study(tmp_path):
    append_csv(tmp_path / "runs.csv", ROWS)
    paths = page.write_pages(tmp_path)
    assert {path.name for path in paths} == {path.name for path in tmp_path.glob("[!r]*")}
    drawings = [path for path in paths if path.suffix == ".svg"]
    assert [path.stem for path in drawings] == [f"figure{i}" for i in (1, 2, 3, 4)]
    for path in drawings:
        assert "prefers-color-scheme:dark" in path.read_text()
        assert "#000000" not in path.read_text()


@pytest.mark.slow
def test_numpy_alone_gives_the_same_numbers(published, monkeypatch):
    monkeypatch.chdir(PUBLISHED)
    made = runpy.run_path(os.fspath(page.CHECK))
    found = made["RESULTS"]
    alone = hypotheses.fits(published)["D = 64 alone"]
    assert made["BEST"] + 4 == pytest.approx(alone.best.value, abs=1e-3)
    ours = {r.name: r.found for r in hypotheses.secondary(published) if r.pairs is not None}
    for point in set(design.POINTS[64]) - {"4x16"}:
        ours[point] = analysis.over_texts(hypotheses.against(published, 64, point))
    assert set(found) == set(ours)
    for name, one in ours.items():
        mean, error, count = found[name]
        assert (one.value, one.error, one.count) == (
            pytest.approx(mean, abs=1e-12), pytest.approx(error, abs=1e-12), count)  # fmt: skip


def test_the_first_look_reads_stages_1_and_3_alone(published):
    worse = published.frame["bits"] + published.frame["stage"].isin((2, 4, 5, 6))
    others = published.only(published.frame.assign(bits=worse))
    found = [[r.found for r in hypotheses.primary(one)] for one in (others, published)]
    assert found[0] == found[1]


def test_texts_of_figures_are_inside_their_figures(published):
    for name, figure in page.figures(published, ROWS).items():
        figure.canvas.draw()
        for text in (t for axes in figure.axes for t in axes.get_children() if isinstance(t, Text)):
            assert text.get_window_extent().x1 <= figure.bbox.x1, (name, text.get_text())


def test_the_error_of_a_rate_is_that_of_the_parabola(published):
    """Scores k (x + 0.3)^2 at the two rates of each text: the best rate is 0.3 below in ln r."""
    x = published.frame["tuning"]
    bits = published.tuning_k * (x + 0.3) ** 2 + 0.1
    study = published.only(published.frame.assign(bits=bits))
    assert page.rate_error(study, study.points("8x8")) == pytest.approx(0.3)


def test_a_difference_at_equal_seconds_counts_the_seconds_that_are_saved(published):
    """Half the seconds are worth ln 2 times the slope of the loss; equal ones nothing."""
    by_flops = analysis.over_texts(hypotheses.against(published, 64, "2x32")).value
    for ratio in (1.0, 0.5):
        frame = published.frame.assign(cpu_seconds=1.0)
        frame.loc[published.points("2x32").index, "cpu_seconds"] = ratio
        found = float(page.at_equal_seconds(published.only(frame), 64, "2x32").split()[0])
        saved = published.slope.value * np.log(ratio)
        assert found == pytest.approx(by_flops - saved, abs=6e-5)
