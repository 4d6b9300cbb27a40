"""The page in a browser: it opens, shows its charts, fits a phone, sorts, and asks for nothing."""

import re

import pytest

from lab.pages.browser import BROWSERS, DRIVERS, find_program, open_browser, open_page
from lab.pages.fixtures import MECHANISMS, make_unfinished, write_folder
from linattn.lab.pages import write_report

pytest.importorskip("selenium", reason="selenium drives the browser: pip install 'linattn[dev]'")
pytestmark = [
    pytest.mark.skipif(find_program(BROWSERS) is None, reason=f"no browser: none of {', '.join(BROWSERS)}"),
    pytest.mark.skipif(find_program(DRIVERS) is None, reason=f"no driver: none of {', '.join(DRIVERS)}"),
]

WIDTHS = (360, 390, 430, 768, 1280)
BOX = "const b = arguments[0].getBoundingClientRect(); return [b.left, b.right, b.width, b.height]"


@pytest.fixture(scope="module")
def driver(tmp_path_factory):
    with open_browser(tmp_path_factory.mktemp("profile")) as found:
        yield found


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    folders = {name: tmp_path_factory.mktemp(name) for name in ("finished", "unfinished")}
    write_folder(folders["finished"])
    write_folder(folders["unfinished"], make_unfinished())
    return {name: write_report(folder) for name, folder in folders.items()}


def select(driver, selector):
    return driver.find_elements("css selector", selector)


@pytest.mark.parametrize("name", ["finished", "unfinished"])
@pytest.mark.parametrize("width", WIDTHS)
def test_fits_the_screen_without_errors_or_requests(driver, pages, name, width):
    open_page(driver, pages[name], width)
    driver.execute_script("for (const part of document.querySelectorAll('details')) part.open = true")
    assert driver.execute_script("return innerWidth") == width
    assert driver.execute_script("return document.documentElement.scrollWidth") <= width
    assert driver.execute_script("return performance.getEntriesByType('resource').length") == 0
    assert driver.get_log("browser") == []


@pytest.mark.parametrize("width", [390, 1280])
def test_charts_are_visible_and_large_enough(driver, pages, width):
    open_page(driver, pages["finished"], width)
    charts = select(driver, "figure svg[role=img]")
    assert len(charts) == 8
    for chart in charts:
        left, right, chart_width, height = driver.execute_script(BOX, chart)
        assert chart.is_displayed()
        assert left >= 0
        assert right <= width
        assert chart_width >= 320
        assert 150 <= height <= 600
    sizes = driver.execute_script(
        "return [...document.querySelectorAll('figure svg text')].map(t => t.getBoundingClientRect().height)"
    )
    assert min(sizes) >= 9  # readable without zooming
    spill = driver.execute_script(
        "return [...document.querySelectorAll('figure svg text')].filter(t => {"
        "const b = t.getBoundingClientRect(); return b.left < 0 || b.right > innerWidth }).map(t => t.textContent)"
    )
    assert spill == []
    images = select(driver, ".maps img")
    assert len(images) == 2 * (len(MECHANISMS) + 1)
    for image in images:
        assert driver.execute_script("return arguments[0].naturalWidth", image) == 112
        assert driver.execute_script(BOX, image)[2] >= 70


def order(driver):
    return [cell.get_attribute("data-value") for cell in select(driver, "#results tbody th")]


@pytest.mark.parametrize("width", [390, 1280])
def test_a_click_on_a_heading_sorts(driver, pages, width):
    open_page(driver, pages["finished"], width)
    assert order(driver) == list(MECHANISMS)
    top1, state = (select(driver, f"#results thead th:nth-child({i}) button")[0] for i in (2, 5))
    best_first = sorted(MECHANISMS, key=lambda name: -sum(MECHANISMS[name][0]))
    top1.click()
    assert order(driver) == best_first
    heading = top1.find_element("xpath", "..")
    assert heading.get_attribute("aria-sort") == "descending"
    top1.click()
    assert order(driver) == best_first[::-1]
    assert heading.get_attribute("aria-sort") == "ascending"
    for _ in range(2):  # softmax has no state: last, from high to low and from low to high
        driver.execute_script("arguments[0].click()", state)
        assert order(driver)[-1] == "softmax"
    assert heading.get_attribute("aria-sort") is None
    name = select(driver, "#results thead th:nth-child(1) button")[0]
    driver.execute_script("arguments[0].scrollIntoView({inline: 'end'})", name)
    name.click()
    assert order(driver) == sorted(MECHANISMS)


def test_what_is_tapped_is_large_enough_for_a_finger(driver, pages):
    open_page(driver, pages["finished"], 390)
    targets = select(driver, "summary") + select(driver, "#results thead button")
    assert len(targets) > 15
    assert all(driver.execute_script(BOX, target)[3] >= 44 for target in targets)


def test_without_scripts_the_table_is_there(driver, pages):
    driver.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": True})
    try:
        open_page(driver, pages["finished"], 390)
        assert not select(driver, "button")
        assert [cell.is_displayed() for cell in select(driver, "#results tbody th")] == [True] * len(MECHANISMS)
    finally:
        driver.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": False})


def luminance(color: str) -> float:
    """Relative luminance of WCAG 2."""
    channels = [int(part) / 255 for part in re.findall(r"\d+", color)[:3]]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def contrast(a: str, b: str) -> float:
    light, dark = sorted((luminance(a), luminance(b)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_and_charts_stand_out_in_light_and_dark(driver, pages, scheme):
    open_page(driver, pages["finished"], 1280, scheme)
    paper = driver.execute_script("return getComputedStyle(document.body).backgroundColor")
    assert (luminance(paper) < 0.05) == (scheme == "dark")
    words = driver.execute_script(
        "return [...document.querySelectorAll('p, figcaption, td, th, small, dt, dd, summary')]"
        ".map(e => getComputedStyle(e).color)"
    )
    labels = driver.execute_script(
        "return [...document.querySelectorAll('figure svg text')].map(e => getComputedStyle(e).fill)"
    )
    marks = driver.execute_script(
        "return [...document.querySelectorAll('.legend .mark path')].map(e => getComputedStyle(e).fill)"
    )
    assert min(contrast(color, paper) for color in {*words, *labels}) >= 4.5
    # The palette is Okabe and Ito's; its lightest tones reach 2.2 on white, so every mark has a shape of its own too.
    assert min(contrast(color, paper) for color in set(marks)) >= (5 if scheme == "dark" else 2.2)
