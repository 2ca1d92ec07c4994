"""Several sweeps in one picture, from arm folders written by hand."""

import numpy as np
import pytest
from written_arms import ARMS, write_arm, write_sweep

from attnlab import plotting
from experiments.reporting import joint, results


@pytest.fixture
def asked(monkeypatch):
    """What `plotting.scatter_with_front` is asked to draw; nothing is drawn."""
    calls = []
    monkeypatch.setattr(plotting, "scatter_with_front", lambda *given: calls.append(given))
    monkeypatch.setattr(plotting, "to_svg", lambda figure, name: "<svg/>")
    return calls


def test_costs_are_those_of_one_seed(tmp_path, asked):
    first = write_sweep(tmp_path / "first")
    second = write_sweep(tmp_path / "second", seeds=[0, 1], wall_seconds=30.0)
    panels = results.read([first, second])
    _, _, figures = joint.section(panels)
    assert [f.name for f in figures.figures] == [
        "joint-1-parameters", "joint-1-flops", "joint-1-seconds",
    ]  # fmt: skip
    parameters, flops, seconds = asked
    # 800 steps of 16 rows of 8 tokens; forward 2 FLOPs a parameter; a training step is 3 of them.
    for point, weight in zip(flops[0], parameters[0], strict=True):
        assert point.x == 800 * 16 * 8 * 3 * 2 * weight.x
    assert [p.x for p in seconds[0]] == [60.0 / 3] * 3 + [30.0 / 2] * 3
    runs = [run for panel in panels for run in panel.complete]
    assert [p.y for p in flops[0]] == [np.mean(run.heldout) for run in runs]
    assert [p.spread for p in flops[0]] == [np.std(run.heldout, ddof=1) for run in runs]


def test_marker_is_the_sweep_colour_the_layout_and_sharing_is_hollow(tmp_path, asked):
    joint.section(results.read([write_sweep(tmp_path / name) for name in ("first", "second")]))
    points, front, legend, *_ = asked[0]
    looks = [p.style for p in points]
    assert [s.marker for s in looks] == ["o"] * 3 + ["s"] * 3
    assert [s.hollow for s in looks] == [False, False, True] * 2  # narrow · albert
    assert [s.colour for s in looks[:3]] == [s.colour for s in looks[3:]]
    assert len({s.colour for s in looks}) == 3
    told = [name for name, _ in legend]
    assert told == ["standard", "wide", "narrow", "first", "second", "hollow: albert"]
    assert [p.label for p in front] == ["narrow · albert", "standard · separate", "wide · separate"]


def test_scores_of_other_texts_are_not_drawn_together(tmp_path, asked):
    one, *others = ARMS.items()
    folders = [
        write_sweep(tmp_path / "a", dict(others)),
        write_sweep(tmp_path / "b", dict([one])),
        write_sweep(tmp_path / "c", sha256="cd34"),
    ]
    panels = results.read(folders)
    *_, words = joint.section(panels)
    assert words.text == "Left out, since no other was scored on the same text: c."
    assert all(len(points) == 3 for points, *_ in asked)
    assert joint.section(panels[1:]) == []  # each alone


def test_more_may_be_better():
    """`front` takes ranks; a rank is the negative score where more is better."""
    assert joint.front([3, 1, 2], [-0.9, -0.2, -0.1]) == [1, 0]


def test_only_the_front_is_named_and_the_legend_stays_inside():
    looks = [plotting.style(i, i) for i in range(3)]
    points = [
        plotting.Point(name, look, x, y, 0.1)
        for name, look, x, y in zip("abc", looks, (1e3, 2e3, 9e3), (3.0, 3.5, 2.0), strict=True)
    ]
    figure = plotting.scatter_with_front(
        points, [points[0], points[2]], [("layout", looks[0])] * 5, "x", "y"
    )
    [axes], [legend] = figure.axes, figure.legends
    assert sorted(text.get_text() for text in axes.texts) == ["a", "c"]
    assert axes.get_xscale() == "log"
    box, label = legend.get_window_extent(), axes.xaxis.label.get_window_extent()
    assert figure.bbox.contains(*box.min)
    assert figure.bbox.contains(*box.max)
    assert box.y1 <= label.y0


def test_two_budgets_of_one_folder_are_one_sweep(tmp_path, asked):
    write_sweep(tmp_path / "a" / "runs")
    for (layout, plan), (loss, parameters) in ARMS.items():
        folder = tmp_path / "a" / "runs" / f"{layout}-equal"
        changes = {"match": "parameters", "learning_rate": 0.002}  # configs that differ
        write_arm(folder, layout, plan, loss, parameters, **changes)
    panels = results.read([tmp_path / "a" / "runs"])
    assert len(panels) == 2
    assert joint.section(panels) == []
    _, _, figures = joint.section([*panels, *results.read([write_sweep(tmp_path / "b" / "runs")])])
    assert "a/runs and b/runs together" in figures.figures[0].caption
    assert [p.style.marker for p in asked[0][0]] == ["o"] * 6 + ["s"] * 3
