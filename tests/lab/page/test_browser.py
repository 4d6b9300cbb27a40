"""The page of a comparison in a headless Chromium: it fits a phone, asks for nothing, shows its charts, and sorts."""

import shutil

import pytest
from tests.lab.compare.results_of import MECHANISMS, make_examples, make_meta, make_rows, score

from linattn.lab.compare.findings import Findings
from linattn.lab.compare.page import comparison_page
from linattn.lab.page import write_page

webdriver = pytest.importorskip("selenium.webdriver", reason="selenium drives the browser: pip install 'linattn[dev]'")
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
DRIVERS = ("chromedriver", "chromium.chromedriver", "chromium-driver")
BROWSER, DRIVER = (next(filter(None, map(shutil.which, names)), None) for names in (BROWSERS, DRIVERS))
pytestmark = pytest.mark.skipif(not (BROWSER and DRIVER), reason=f"none of {BROWSERS}, or none of {DRIVERS}")
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run")


@pytest.fixture(scope="module")
def driver(tmp_path_factory):
    options = webdriver.ChromeOptions()
    options.binary_location = BROWSER
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    found = webdriver.Chrome(options=options, service=webdriver.ChromeService(executable_path=DRIVER))
    yield found
    found.quit()


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    parts = comparison_page(Findings(make_meta(), make_rows()), make_examples())
    return write_page(tmp_path_factory.mktemp("page") / "report.html", *parts)


@pytest.fixture(params=[360, 1280])
def width(request, driver, page):
    """The page is open on a screen of that width."""
    size = {"width": request.param, "height": 844, "deviceScaleFactor": 1, "mobile": request.param < 600}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    driver.get(page.resolve().as_uri())
    return request.param


def boxes(driver, selector):
    """Left and right edge, width and height of what is selected."""
    return driver.execute_script(
        "return [...document.querySelectorAll(arguments[0])].map(part => part.getBoundingClientRect())"
        ".map(box => [box.left, box.right, box.width, box.height])",
        selector,
    )


def test_it_fits_the_screen_without_errors_or_requests(driver, width):
    driver.execute_script("for (const part of document.querySelectorAll('details')) part.open = true")
    assert driver.execute_script("return document.documentElement.scrollWidth") <= width
    assert driver.execute_script("return performance.getEntriesByType('resource').length") == 0
    assert driver.get_log("browser") == []


def test_charts_are_readable_and_buttons_large_enough_for_a_finger(driver, width):
    charts = boxes(driver, "figure svg[role=img]")
    assert len(charts) == 8
    assert all(left >= 0 and right <= width and wide >= 300 and high >= 150 for left, right, wide, high in charts)
    assert all(left >= 0 and right <= width and high >= 8 for left, right, _, high in boxes(driver, "figure svg text"))
    assert all(high >= 44 for *_, high in boxes(driver, "summary, #results thead button"))


def test_a_click_on_a_heading_sorts(driver, width):
    def order():
        return [cell.get_attribute("data-value") for cell in driver.find_elements("css selector", "#results tbody th")]

    def click(title):
        for button in driver.find_elements("css selector", "#results thead button"):
            if button.text.split("\n")[0] == title:
                driver.execute_script("arguments[0].click()", button)

    assert order() == list(MECHANISMS)
    best_first = sorted(MECHANISMS, key=lambda name: -sum(score(name, seed) for seed in range(5)))
    for expected in (best_first, best_first[::-1]):
        click("top-1")
        assert order() == expected
    for _ in range(2):  # softmax has no state: last, from high to low and from low to high
        click("state")
        assert order()[-1] == "softmax"
    click("mechanism")
    assert order() == sorted(MECHANISMS)
