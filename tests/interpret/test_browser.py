"""The page of heads in a real browser: `pytest -m browser`, with playwright and a Chromium.

CHROMIUM names the browser where it is not found on the PATH (see `browser` in conftest.py).
"""

import numpy as np
import pytest
from written_page import softmax

from attnlab.interpret import AttentionMaps, Panel, view, view_panels

pytestmark = pytest.mark.browser

LAYERS, HEADS, LENGTH = 3, 4, 9
TOKENS = ["The", " cat", " sat", "</script>", "שלום", "\n", " on", " the", " mat"]


PROBS = softmax(LAYERS, HEADS, LENGTH, LENGTH, causal=True)
OTHER = softmax(2, HEADS, LENGTH, LENGTH, seed=1, causal=True)
FIRST = PROBS[..., 0].mean(-1)


@pytest.fixture
def opened(browser, tmp_path):
    """Opens a page. In the end nothing was asked for but its file, and no script has failed."""
    pages = []

    def open_page(page, width=1200, height=900, **options):
        path = page.save(tmp_path / f"{len(pages)}.html")
        context = browser.new_context(viewport={"width": width, "height": height}, **options)
        tab = context.new_page()
        asked, errors = [], []
        tab.on("request", lambda request: asked.append(request.url))
        tab.on("pageerror", lambda error: errors.append(str(error)))
        tab.on("console", lambda m: errors.append(m.text) if m.type == "error" else None)
        tab.goto(path.as_uri())
        pages.append((context, path, asked, errors))
        return tab

    yield open_page
    for context, path, asked, errors in pages:
        context.close()
        assert asked == [path.as_uri()]
        assert errors == []


@pytest.fixture
def one(opened):
    plan = {"attention": (0, 1, 0)}
    return opened(view(PROBS, TOKENS, statistics={"first": FIRST}, plan=plan))


def shown(token):
    return token.replace(" ", "·").replace("\n", "↵")


def title(tab, side=0):
    return tab.locator("h3").nth(side).text_content()


def thumb(tab, layer, head, side=0):
    return tab.locator(".panel").nth(side).locator(f'[aria-label="layer {layer}, head {head}"]')


def readout(tab, side=0):
    return tab.locator(".readout").nth(side).text_content()


def cell(tab, t, s, side=0):
    """The point of the canvas that shows who looks and who is looked at."""
    side = f"panels[{side}]"
    box = tab.locator(".stage canvas").nth(int(side[7])).bounding_box()
    left, top, size = tab.evaluate(f"[{side}.form.left, {side}.form.top, {side}.form.cell]")
    return box["x"] + left + (s + 0.5) * size, box["y"] + top + (t + 0.5) * size


def test_pointing_tells_who_looks_where(one):
    for t, s in ((6, 3), (8, 0), (2, 2)):
        one.mouse.move(*cell(one, t, s))
        p = PROBS[0, 0, t, s]
        said = readout(one)
        assert f"{t} attends to " in said
        told = float(said.split(f" {s}: ")[1][:5])
        assert abs(told - p) <= 1 / 510 + 5e-4
        most = int(np.argmax(PROBS[0, 0, t]))
        first = said.split("attends most to ")[1]
        assert first.startswith(f"{shown(TOKENS[most])} {most}: ")
    one.mouse.move(*cell(one, 1, 7))
    assert "masked, a later token" in readout(one)
    one.mouse.click(*cell(one, 4, 1))  # a click holds
    one.mouse.move(*cell(one, 8, 8))
    assert "שלום 4 attends to ·cat 1:" in readout(one)
    one.keyboard.press("Escape")
    one.mouse.move(5, 5)
    assert "Point at a token" in readout(one)


def test_the_colour_scale_says_which_probability_a_colour_is(one):
    """The ends of the scale are the colours of cells with p = 1 and, at the paper, p = 0."""
    pixel = "(c, x, y) => c.getContext('2d').getImageData(x, y, 1, 1).data.join()"
    scale = "document.querySelector('.legend canvas')"
    ends = one.evaluate(f"[0, 159].map((x) => ({pixel})({scale}, x, 0))")
    box = one.locator(".stage canvas").bounding_box()
    x, y = cell(one, 0, 0)  # the first token attends to itself alone
    at = f"{x - box['x']}, {y - box['y']}"
    assert one.evaluate(f"({pixel})(document.querySelector('.stage canvas'), {at})") == ends[1]
    assert ends[0] == "255,255,255,255"
    ticks = lambda: [float(tick) for tick in one.locator(".legend i").all_text_contents()]
    assert ticks() == [0, 0.06, 0.25, 0.56, 1]  # by the square root
    assert "attention probability" in one.locator(".legend").text_content()
    one.locator("#scale").select_option("plain")
    assert ticks() == [0, 0.25, 0.5, 0.75, 1]


def test_heads_are_chosen_by_mouse_and_keys(one):
    assert title(one) == "Layer 0, head 0"
    thumb(one, 1, 2).click()
    assert title(one) == "Layer 1, head 2"
    for key in ("ArrowDown", "ArrowRight", "ArrowRight", "ArrowUp", "ArrowLeft"):
        one.keyboard.press(key)
    assert title(one) == "Layer 1, head 2"  # there is no head 4
    assert one.locator('[aria-pressed="true"].thumb').count() == 1
    one.keyboard.press("j")
    one.keyboard.press("j")
    assert "·cat 1 attends most to" in readout(one)
    row = one.locator("tr", has_text="first")
    assert row.locator(".value").text_content() == f"{FIRST[1, 2]:.2f}"


def test_layers_with_the_same_weights_light_up(one):
    classes = lambda place: thumb(one, *place).get_attribute("class").split()
    lit = lambda: [place for place in np.ndindex(LAYERS, HEADS) if "lit" in classes(place)]
    thumb(one, 2, 3).hover()
    assert lit() == [(0, 3), (2, 3)]
    assert one.locator(".row.lit").all_text_contents() == ["0group 0", "2group 0"]
    thumb(one, 1, 3).hover()
    assert lit() == []
    one.mouse.move(900, 5)
    assert lit() == [(0, 0), (2, 0)]
    assert "attention: group 0, shared with layer 2" in one.locator(".shares").text_content()


def test_edges_and_text_show_the_same_numbers(one):
    one.keyboard.press("e")
    assert one.evaluate("panels[0].form.constructor.name") == "Edges"
    one.evaluate("panels[0].pointAt(7, null)")
    assert "·the 7 attends most to" in readout(one)
    one.locator("#views button", has_text="Text").click()
    word = one.locator(".words span", has_text="mat")
    word.hover()
    assert "·mat 8 attends most to" in readout(one)
    shown = [span.get_attribute("title") for span in one.locator(".words span").all()]
    assert np.abs(np.array(shown, float) - PROBS[0, 0, 8]).max() < 0.01
    assert one.locator(".words span").nth(3).text_content() == "</script>"
    one.keyboard.press("m")
    assert one.locator(".stage").is_visible()
    assert not one.locator(".words").is_visible()


def test_two_models_move_together_where_they_can(opened):
    named = {"one": PROBS, "other": OTHER}
    sides = [Panel([AttentionMaps(probs, TOKENS)], name) for name, probs in named.items()]
    tab = opened(view_panels(sides))
    thumb(tab, 1, 3).click()
    assert [title(tab, i) for i in (0, 1)] == ["Layer 1, head 3"] * 2
    thumb(tab, 2, 1).click()  # the other has two layers
    assert [title(tab, i) for i in (0, 1)] == ["Layer 2, head 1", "Layer 1, head 3"]
    tab.mouse.move(*cell(tab, 5, 2))
    for side, p in ((0, PROBS[2, 1, 5, 2]), (1, OTHER[1, 3, 5, 2])):
        assert abs(float(readout(tab, side).split("·sat 2: ")[1][:5]) - p) <= 1 / 510 + 5e-4
    thumb(tab, 0, 0, side=1).click()
    tab.keyboard.press("ArrowRight")  # moves the side that was touched last
    assert [title(tab, i) for i in (0, 1)] == ["Layer 0, head 1"] * 2


def test_three_attentions_of_one_model(opened):
    probs = np.full((1, 2, LENGTH, 2), [0.75, 0.25])
    cross = AttentionMaps(probs, TOKENS, ["x", "y"], name="cross")
    tab = opened(view_panels([Panel([AttentionMaps(PROBS, TOKENS), cross])]))
    thumb(tab, 2, 3).click()
    tab.locator(".choice button", has_text="cross").click()
    assert title(tab) == "Layer 0, head 1"  # as far as it has layers and heads
    tab.mouse.move(*cell(tab, 8, 1))
    assert "·mat 8 attends to y 1: 0.250" in readout(tab)


@pytest.mark.parametrize("view_key", ["m", "e", "t"])
@pytest.mark.parametrize("width", [390, 1200])
def test_nothing_is_wider_than_the_screen(opened, width, view_key):
    statistics = {"first": FIRST, "a statistic with a long name": FIRST}
    long = ["a" * 60, *TOKENS[1:]]
    side = Panel([AttentionMaps(PROBS, long, statistics=statistics)], "w" * 200, "of " * 99)
    tab = opened(view_panels([side, side], title="t" * 150), width=width)
    tab.keyboard.press(view_key)
    tab.keyboard.press("j")
    assert tab.evaluate("document.documentElement.scrollWidth") <= width


def test_in_a_notebook(opened):
    """Inside an iframe, as `_repr_html_` gives it."""
    page = view(PROBS, TOKENS)
    outer = type(page)(f"<!doctype html><meta charset='utf-8'>{page._repr_html_()}")
    tab = opened(outer)
    frame = tab.frame_locator("iframe")
    frame.locator('[aria-label="layer 2, head 1"]').click()
    assert frame.locator("h3").text_content() == "Layer 2, head 1"
    frame.locator("body").press("ArrowLeft")
    assert frame.locator("h3").text_content() == "Layer 2, head 0"
