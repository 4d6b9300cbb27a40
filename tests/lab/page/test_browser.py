"""The page of a comparison in a browser: it opens, shows its charts, fits a phone, sorts, and asks for nothing."""

import re

import pytest
from tests.lab.compare.results_of import MECHANISMS, make_examples, make_meta, make_rows, score
from tests.lab.page.browser import BROWSERS, DRIVERS, find_program, open_browser, open_page

from linattn.lab.compare.page import write_comparison

pytest.importorskip("selenium", reason="selenium drives the browser: pip install 'linattn[dev]'")
pytestmark = [
    pytest.mark.skipif(find_program(BROWSERS) is None, reason=f"no browser: none of {', '.join(BROWSERS)}"),
    pytest.mark.skipif(find_program(DRIVERS) is None, reason=f"no driver: none of {', '.join(DRIVERS)}"),
]
BOX = "const b = arguments[0].getBoundingClientRect(); return [b.left, b.right, b.width, b.height]"


@pytest.fixture(scope="module")
def driver(tmp_path_factory):
    with open_browser(tmp_path_factory.mktemp("profile")) as found:
        yield found


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    return write_comparison(tmp_path_factory.mktemp("page"), make_meta(), make_rows(), make_examples())


def select(driver, selector):
    return driver.find_elements("css selector", selector)


@pytest.mark.parametrize("width", [360, 390, 430, 768, 1280])
def test_it_fits_the_screen_without_errors_or_requests(driver, page, width):
    open_page(driver, page, width)
    driver.execute_script("for (const part of document.querySelectorAll('details')) part.open = true")
    assert driver.execute_script("return innerWidth") == width
    assert driver.execute_script("return document.documentElement.scrollWidth") <= width
    assert driver.execute_script("return performance.getEntriesByType('resource').length") == 0
    assert driver.get_log("browser") == []


@pytest.mark.parametrize("width", [390, 1280])
def test_charts_are_visible_and_large_enough(driver, page, width):
    open_page(driver, page, width)
    charts = select(driver, "figure svg[role=img]")
    assert len(charts) == 8
    for chart in charts:
        left, right, chart_width, height = driver.execute_script(BOX, chart)
        assert left >= 0
        assert right <= width
        assert chart_width >= 320
        assert 150 <= height <= 600
    boxes = driver.execute_script(
        "return [...document.querySelectorAll('figure svg text')].map(t => t.getBoundingClientRect())"
        ".map(b => [b.left, b.right, b.height])"
    )
    assert all(left >= 0 and right <= width and height >= 9 for left, right, height in boxes), "readable"
    images = select(driver, ".maps img")
    assert len(images) == 2 * (len(MECHANISMS) + 1)
    for image in images:
        assert driver.execute_script("return arguments[0].naturalWidth", image) == 112
        assert driver.execute_script(BOX, image)[2] >= 70


def order(driver):
    return [cell.get_attribute("data-value") for cell in select(driver, "#results tbody th")]


@pytest.mark.parametrize("width", [390, 1280])
def test_a_click_on_a_heading_sorts(driver, page, width):
    open_page(driver, page, width)
    assert order(driver) == list(MECHANISMS)
    titles = [heading.text.split("\n")[0] for heading in select(driver, "#results thead th")]
    best_first = sorted(MECHANISMS, key=lambda name: -sum(score(name, seed) for seed in range(5)))
    top1, state, name = (
        select(driver, f"#results thead th:nth-child({titles.index(title) + 1}) button")[0]
        for title in ("top-1", "state", "mechanism")
    )
    for expected, way in ((best_first, "descending"), (best_first[::-1], "ascending")):
        top1.click()
        assert order(driver) == expected
        assert top1.find_element("xpath", "..").get_attribute("aria-sort") == way
    for _ in range(2):  # softmax has no state: last, from high to low and from low to high
        driver.execute_script("arguments[0].click()", state)
        assert order(driver)[-1] == "softmax"
    driver.execute_script("arguments[0].click()", name)
    assert order(driver) == sorted(MECHANISMS)


def test_what_is_tapped_is_large_enough_for_a_finger(driver, page):
    open_page(driver, page, 390)
    targets = select(driver, "summary") + select(driver, "#results thead button")
    assert len(targets) > 15
    assert all(driver.execute_script(BOX, target)[3] >= 44 for target in targets)


def test_without_scripts_the_table_is_there(driver, page):
    driver.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": True})
    try:
        open_page(driver, page, 390)
        assert not select(driver, "button")
        assert [cell.is_displayed() for cell in select(driver, "#results tbody th")] == [True] * len(MECHANISMS)
    finally:
        driver.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": False})


def luminance(color):
    """Relative luminance of WCAG 2."""
    channels = [int(part) / 255 for part in re.findall(r"\d+", color)[:3]]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def contrast(a, b):
    light, dark = sorted((luminance(a), luminance(b)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_and_charts_stand_out_in_light_and_dark(driver, page, scheme):
    open_page(driver, page, 1280, scheme)

    def colors(selector, property):
        script = f"return [...document.querySelectorAll('{selector}')].map(e => getComputedStyle(e).{property})"
        return set(driver.execute_script(script))

    (paper,) = colors("body", "backgroundColor")
    assert (luminance(paper) < 0.05) == (scheme == "dark")
    words = colors("p, figcaption, td, th, small, dt, dd, summary", "color") | colors("figure svg text", "fill")
    assert min(contrast(color, paper) for color in words) >= 4.5
    # The palette is Okabe and Ito's; its lightest tones reach 2.2 on white, so every mark has a shape of its own too.
    marks = colors(".legend .mark path", "fill")
    assert min(contrast(color, paper) for color in marks) >= (5 if scheme == "dark" else 2.2)
