"""Figures: nothing covers anything, and colours mean one thing."""

import math
import re

import numpy as np
import pytest

from attnlab.report import labels
from attnlab.report.curves import learning_curves, metric_curves
from attnlab.report.intervals import bar_plot, dot_plot
from attnlab.report.maps import attention_map
from attnlab.report.scatter import scatter
from attnlab.report.style import Bar, Curve, Point, style, to_svg


def test_labels_of_points_cover_nothing():
    look = style(0, 0)
    points = [
        Point(f"layout · plan {i}", look, x, y, 0.02)
        for i, (x, y) in enumerate(
            [
                (1e5, 2.80),
                (1e5, 2.81),
                (1.1e5, 2.80),
                (9e5, 2.9),
                (9.5e5, 2.91),
                (9e5, 3.0),
            ]
        )
    ]
    figure = scatter(points, "parameters", "bits")
    [axes] = figure.axes
    assert axes.get_xscale() == "log"
    renderer = figure.canvas.get_renderer()
    from matplotlib.text import Text

    boxes = [Text.get_window_extent(text, renderer) for text in axes.texts]
    inside = axes.bbox.padded(1)
    for i, box in enumerate(boxes):
        assert inside.contains(*box.min)
        assert inside.contains(*box.max)
        assert not any(box.overlaps(other) for other in boxes[:i])
        ends = [axes.transData.transform((p.x, p.y + s)) for p in points for s in (-0.02, 0, 0.02)]
        assert not any(box.contains(*end) for end in ends)


def test_x_is_linear_where_it_spans_little():
    points = [Point(str(x), style(0, 0), x, 2.0, math.nan) for x in (100, 300)]
    assert scatter(points, "x", "y").axes[0].get_xscale() == "linear"


@pytest.mark.parametrize("x", [0.0, -1.0])
def test_a_point_that_is_not_above_zero_is_in_sight(x):
    points = [Point(str(x), style(0, 0), x, 2.0, math.nan) for x in (x, 10.0)]
    axes = scatter(points, "x", "y").axes[0]
    assert axes.get_xscale() == "linear"
    assert axes.get_xlim()[0] < x


def test_bars_below_zero_and_without_a_value():
    values = {"a": math.nan, "b": -2.0, "c": 1.0}
    rows = [Bar(n, style(0, 0), v, math.nan) for n, v in values.items()]
    low, high = bar_plot(rows, {}, "x").axes[0].get_xlim()
    assert low < -2 < 1 < high


def test_labels_of_curves_keep_their_order_and_distance():
    places = labels.spread([0.5, 0.1, 0.52, 0.51, 0.9], 0.1)
    np.testing.assert_allclose(places, [0.41, 0.1, 0.61, 0.51, 0.9])


def test_each_x_has_its_number_and_equal_scores_a_point():
    """Learning rates too; the mean of three times 0.1 is more than 0.1."""
    steps = np.array([1e-3, 3e-3, 1.0, 1.5, 1e6])
    curve = Curve("a", style(0, 0), steps, np.full((3, 5), 0.1))
    axes = metric_curves([curve], "rate", "loss").axes[0]
    shown = " ".join(t.get_text() for t in axes.get_xticklabels())
    assert shown == "0.001 0.003 1 1.5 1000000"
    np.testing.assert_allclose(axes.get_xticks(), steps)


def test_a_broken_curve_does_not_set_the_range():
    steps = np.array([1, 2])
    sound = Curve("a", style(0, 0), steps, np.array([[3.0, 2.0]]), False)
    broken = Curve("b", style(1, 0), steps, np.array([[3.0, 1e9]]), True)
    axes = learning_curves([sound, broken], "bits").axes[0]
    assert axes.get_ylim()[1] < 4
    broken = broken._replace(values=np.array([[3.0, np.nan]]))
    assert learning_curves([broken], "bits").axes[0].get_ylim()[0] < 3


def test_the_fall_at_the_start_does_not_set_the_range():
    steps, values = np.array([10, 100, 400]), np.array([[9.0, 3.0, 2.0]])
    curve = Curve("a", style(0, 0), steps, values, False)
    low, high = learning_curves([curve], "bits").axes[0].get_ylim()
    assert 1.5 < low < 2.0
    assert 3.0 < high < 3.5


def test_layouts_differ_in_colour_and_plans_in_pattern():
    a, b, c = style(0, 0), style(1, 0), style(0, 1)
    assert a.colour != b.colour
    assert a[1:] == b[1:]
    assert a.colour == c.colour
    assert a.marker != c.marker
    assert a.dashes != c.dashes


def test_attention_map_is_as_opaque_as_attention():
    probs = np.array([[[[1.0, 0.0], [0.25, 0.75]]]], np.float16)
    figure = attention_map(probs, ["layer 0"], ["head 0"], "#0072b2")
    image = figure.axes[0].images[0].get_array()
    np.testing.assert_allclose(image[..., 3], [[1, 0], [0.5, 0.75**0.5]], atol=1e-3)


def test_attention_map_of_captured_probs():
    """[L, B, N, T, S] of the text that is asked for, words at both sides, names counted from 0."""
    probs = np.random.default_rng(0).random((2, 3, 4, 2, 5)).astype(np.float32)
    figure = attention_map(probs, tokens=["a", "cat"], keys=list("vwxyz"), text=1)
    maps = [axes for axes in figure.axes if axes.images]
    np.testing.assert_allclose(
        [axes.images[0].get_array()[..., 3] ** 2 for axes in maps[:8]],
        probs[:, 1].reshape(8, 2, 5), atol=1e-6,
    )  # fmt: skip
    assert [t.get_text() for t in maps[5].get_yticklabels()] == ["a", "cat"]
    assert [t.get_text() for t in maps[5].get_xticklabels()] == list("vwxyz")
    assert (maps[3].get_title(), maps[4].get_ylabel()) == ("head 3", "layer 1")
    for changes, message in (
        ({"tokens": list("abc")}, "3 tokens do not fit"),
        ({"heads": ["a"]}, r"1 heads do not fit probs \(3, 4, 2, 5\): give 4"),
        ({"layers": ["a"]}, r"1 layers do not fit probs \(3, 4, 2, 5\): give 3"),
        ({"tokens": np.array(["a"])}, "1 tokens do not fit"),
    ):
        with pytest.raises(ValueError, match=message):
            attention_map(probs[0], **changes)
    with pytest.raises(ValueError, match=r"text 3 is not there; .* have 3 texts"):
        attention_map(probs, text=3)
    with pytest.raises(ValueError, match=r"must be \[L, B, N, T, S\]"):
        attention_map(probs[0, 0, 0])


def test_dots_stand_where_the_values_are_on_an_axis_around_them():
    rows = [
        Bar("a", style(0, 0), 2.65, 0.02),
        Bar("b", style(1, 0), 2.9, math.nan),
    ]
    axes = dot_plot(rows, "bits", 2).axes[0]
    assert [line.get_xydata().tolist() for line in axes.lines] == [[[2.65, 0]], [[2.9, 1]]]
    [spread] = axes.collections[0].get_segments()
    np.testing.assert_allclose(spread, [[2.63, 0], [2.67, 0]])
    assert [t.get_text() for t in axes.texts] == ["2.65", "2.90"]
    low, high = axes.get_xlim()
    assert 2.5 < low < 2.63
    assert 2.9 < high < 3.1


def test_svg_is_the_same_each_time_and_loads_nothing():
    def draw(name):
        points = [Point("p", style(0, 0), 1.0, 2.0, 0.1)]
        return to_svg(scatter(points, "x", "y"), name)

    assert draw("a") == draw("a")
    ids = [set(re.findall(r'id="([^"]+)"', draw(name))) for name in "ab"]
    assert ids[0]
    assert not ids[0] & ids[1]
    assert draw("a").startswith("<svg")
