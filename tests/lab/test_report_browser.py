"""A report in a real browser: `pytest -m browser`, with playwright and a Chromium."""

import pytest
from made_results import noisy, with_curves

from attnlab import lab

pytestmark = pytest.mark.browser

MEANS = {
    (("layout", layout), ("sharing", plan)): 2.7 + 0.1 * i + 0.2 * j
    for i, layout in enumerate(("standard", "wide", "narrow"))
    for j, plan in enumerate(("separate", "albert"))
}


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    results = with_curves(noisy(MEANS, [0, 1, 2]), folder)
    return lab.report(results, folder / "report.html")


@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_fits_and_loads_nothing(browser, page, width, scheme):
    context = browser.new_context(viewport={"width": width, "height": 844}, color_scheme=scheme)
    tab = context.new_page()
    asked, errors = [], []
    tab.on("request", lambda request: asked.append(request.url))
    tab.on("pageerror", lambda error: errors.append(str(error)))
    tab.goto(page.as_uri())
    tab.wait_for_timeout(200)
    assert asked == [page.as_uri()]
    assert errors == []
    assert tab.evaluate("document.documentElement.scrollWidth") == width
    # At 1280 no table scrolls; on a phone the first column stays where it is.
    wide = tab.evaluate(
        "[...document.querySelectorAll('.scroll:has(table)')]"
        ".filter(box => box.scrollWidth > box.clientWidth + 1).length"
    )
    assert width < 1280 or wide == 0
    first = tab.locator("#comparisons tbody td").first
    before = first.bounding_box()["x"]
    tab.locator(".scroll:has(#comparisons)").evaluate("box => { box.scrollLeft = 10000 }")
    assert first.bounding_box()["x"] == pytest.approx(before, abs=1)
    # The question, the conclusion and the figure are on the first screen.
    assert tab.locator("#differences .drawing").bounding_box()["y"] < 600
    # Text in figures is at least 9 px high.
    sizes = tab.evaluate(
        "[...document.querySelectorAll('svg text')].filter(t => t.textContent.trim())"
        ".map(t => [parseFloat(getComputedStyle(t).fontSize), t.getScreenCTM()])"
        ".map(([size, scale]) => size * Math.hypot(scale.a, scale.b))"
    )
    assert min(sizes) > 9
    light = tab.evaluate("getComputedStyle(document.body).backgroundColor").startswith("rgb(2")
    assert light == (scheme == "light")
    context.close()


def test_columns_sort_by_number_and_by_name(browser, page):
    tab = browser.new_page()
    tab.goto(page.as_uri())

    def column(number):
        return tab.locator(f"#budgets tbody tr > :nth-child({number})").all_inner_texts()

    tab.locator("#budgets thead button").nth(1).click()
    counts = [int(text.replace(",", "")) for text in column(2)]
    assert counts == sorted(counts)
    tab.locator("#budgets thead button").nth(1).click()
    assert [int(text.replace(",", "")) for text in column(2)] == counts[::-1]
    tab.locator("#budgets thead button").nth(0).click()
    assert column(1) == sorted(column(1))
    tab.close()
