"""The page in a browser: headless Chromium on desktop and phone, in light and in dark.

Without Chromium and its driver these tests are skipped, and the end of the test run says so.
"""

from __future__ import annotations

import json
import shutil
from contextlib import contextmanager

import pytest

from tests.report.runs import HOSTILE_USERS, KINDS

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")
pytestmark = pytest.mark.skipif(
    not (CHROMIUM and DRIVER),
    reason="the report was NOT looked at in a browser: chromium and chromedriver are missing "
    "(Debian: apt-get install chromium chromium-driver)",
)

VIEWS = [(1280, "light"), (1280, "dark"), (390, "light"), (390, "dark")]

# Texts whose contrast with what is behind them is below WCAG AA: 4.5, or 3 for large ones.
CONTRAST = """
const parse = (c) => (c.match(/[\\d.]+/g) || []).map(Number);
const lum = ([r, g, b]) => {
  const f = (v) => { v /= 255; return v <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4; };
  return .2126 * f(r) + .7152 * f(g) + .0722 * f(b);
};
const behind = (node) => {
  for (; node; node = node.parentElement) {
    const c = parse(getComputedStyle(node).backgroundColor);
    if (c.length === 3 || c[3] === 1) return c;
  }
  return [255, 255, 255];
};
const bad = [];
for (const node of document.querySelectorAll("body *")) {
  const own = [...node.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim());
  if (!own || !node.getClientRects().length || node.closest("script")) continue;
  const style = getComputedStyle(node);
  const colour = parse(node.closest("svg") ? style.fill : style.color);
  const [a, b] = [lum(colour), lum(behind(node))].sort((x, y) => y - x);
  const size = parseFloat(style.fontSize);
  const large = size >= 24 || (size >= 18.66 && +style.fontWeight >= 700);
  const ratio = (a + .05) / (b + .05);
  if (ratio < (large ? 3 : 4.5)) bad.push([node.tagName, node.textContent.slice(0, 40), ratio]);
}
return bad;
"""

STRUCTURE = """
const levels = [...document.querySelectorAll("h1,h2,h3,h4")].map((h) => +h.tagName[1]);
return {
  skips: levels.filter((level, i) => level > (levels[i - 1] ?? 0) + 1),
  uncaptioned: [...document.querySelectorAll("table")].filter((t) => !t.caption).length,
  unscoped: [...document.querySelectorAll("th")].filter((t) => !t.scope).length,
  unnamed: [...document.querySelectorAll("[role=img],[role=region]")]
    .filter((n) => !n.getAttribute("aria-label")).length,
  unlabelled: [...document.querySelectorAll("input")].filter((n) => !n.labels.length).length,
  lang: document.documentElement.lang,
  hacked: window.hacked ?? null,
};
"""


@pytest.fixture(scope="session")
def browser():
    from selenium import webdriver
    from selenium.webdriver.chrome.options import Options
    from selenium.webdriver.chrome.service import Service

    options = Options()
    options.binary_location = CHROMIUM
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(DRIVER))
    yield driver
    driver.quit()


@contextmanager
def opened(browser, page, width, theme, anchor=""):
    """The page at a width and in a theme; afterwards: no message, no request but for the file."""
    features = {"prefers-color-scheme": theme, "prefers-reduced-motion": "reduce"}
    media = {"features": [{"name": name, "value": value} for name, value in features.items()]}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
    size = {"width": width, "height": 850, "deviceScaleFactor": 1, "mobile": width < 500}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    browser.get("about:blank")
    for kind in ("browser", "performance"):
        browser.get_log(kind)
    browser.get(page.as_uri() + anchor)
    yield
    assert browser.get_log("browser") == []
    events = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    urls = [e["params"]["request"]["url"] for e in events
            if e["method"] == "Network.requestWillBeSent"]  # fmt: skip
    assert urls
    assert {u for u in urls if not u.startswith("data:")} == {page.as_uri()}


def find(browser, css):
    return browser.find_elements("css selector", css)


@pytest.mark.parametrize(
    ("kind", "width", "theme"),
    [("everything", *view) for view in VIEWS]
    + [(kind, *view) for kind in KINDS if kind != "everything" for view in (VIEWS[0], VIEWS[3])],
)
def test_a_page_is_quiet_and_fits_its_window(browser, made, kind, width, theme):
    with opened(browser, made(kind).page, width, theme):
        wide = browser.execute_script("return document.documentElement.scrollWidth")
        assert wide <= width
        assert browser.execute_script(CONTRAST) == []
        assert browser.execute_script(STRUCTURE) == {
            "skips": [], "uncaptioned": 0, "unscoped": 0, "unnamed": 0, "unlabelled": 0,
            "lang": "en", "hacked": None,
        }  # fmt: skip
        dark = browser.execute_script("return getComputedStyle(document.body).backgroundColor")
        assert (max(int(x) for x in dark[4:-1].split(",")) < 60) == (theme == "dark")


@pytest.mark.parametrize(("width", "theme"), [VIEWS[0], VIEWS[3]])
def test_what_is_rendered_is_what_the_manifest_says(browser, made, width, theme):
    run_ = made("everything")
    with opened(browser, run_.page, width, theme):
        rendered = browser.execute_script(
            "return [...document.querySelectorAll('data[data-key]')].map((n) => "
            "[n.dataset.key, JSON.parse(n.value), n.innerText, n.checkVisibility()])"
        )
    for key, value, text, visible in rendered:
        assert visible
        if key in run_.numbers and isinstance(run_.numbers[key], int):
            assert text == f"{run_.numbers[key]:,}"
            assert value == run_.numbers[key]
    shown = {key for key, *_ in rendered}
    assert {"users_in", "users_recommended", "rows_published", "exact_share", "cost"} <= shown


def type_in(browser, text):
    query = find(browser, "#query")[0]
    query.clear()
    query.send_keys(text)
    return [card.text for card in find(browser, "#cards article")]


@pytest.mark.parametrize("width", [1280, 390])
def test_the_search_finds_a_user_by_id_and_by_title(browser, made, width):
    from selenium.webdriver.common.keys import Keys
    from selenium.webdriver.support.ui import WebDriverWait

    run_ = made("wide")
    with opened(browser, run_.page, width, "light"):
        assert "40 users on this page" in find(browser, "#found")[0].text
        first = find(browser, "#cards article bdi")[0].text
        assert type_in(browser, "23")[0].startswith("User 23")
        assert find(browser, "#found")[0].text.startswith("1 by id, ")
        titled = type_in(browser, "title 10")
        assert titled
        assert all("Title 10" in card for card in titled)
        assert type_in(browser, "nobody") == []
        assert "None of the users" in find(browser, "#found")[0].text
        find(browser, "#search button")[0].send_keys(Keys.ENTER)
        WebDriverWait(browser, 10).until(lambda _: "40 users" in find(browser, "#found")[0].text)
        assert find(browser, "#cards article bdi")[0].text == first
        before = len(find(browser, "#cards article"))
        find(browser, "#more")[0].send_keys(Keys.ENTER)
        assert len(find(browser, "#cards article")) > before


def test_the_search_is_reached_by_keyboard_and_by_link(browser, made):
    from selenium.webdriver.common.keys import Keys

    run_ = made("wide")
    with opened(browser, run_.page, 1280, "light", anchor="#user=31"):
        assert find(browser, "#cards article")[0].text.startswith("User 31")
    with opened(browser, run_.page, 1280, "light"):
        stops = len(find(browser, '.scroll[tabindex="0"]'))
        assert stops < len(find(browser, ".scroll")) / 4  # what does not scroll is no stop
        find(browser, "body")[0].send_keys(Keys.TAB)
        assert browser.switch_to.active_element.text == "Skip to the report"
        for _ in range(60):
            if browser.switch_to.active_element.get_attribute("id") == "query":
                break
            browser.switch_to.active_element.send_keys(Keys.TAB)
        browser.switch_to.active_element.send_keys("12" + Keys.ENTER)
        assert find(browser, "#cards article")[0].text.startswith("User 12")


def test_hostile_texts_are_shown_as_they_are(browser, made):
    run_ = made("everything")
    with opened(browser, run_.page, 390, "light"):
        (card,) = type_in(browser, HOSTILE_USERS[0])
        assert card.startswith(f"User {HOSTILE_USERS[0]}")
        assert type_in(browser, "window.hacked = 1")
        for bdi in find(browser, "#cards bdi, h1 bdi, td bdi"):
            assert bdi.value_of_css_property("unicode-bidi") == "isolate"
        assert browser.execute_script("return window.hacked ?? null") is None
        assert browser.execute_script("return document.documentElement.scrollWidth") <= 390


def test_a_page_on_paper_has_no_controls(browser, made):
    with opened(browser, made("wide").page, 1280, "dark"):
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
        for css in ("nav", "#search", "#more"):
            assert not find(browser, css)[0].is_displayed()
        assert find(browser, "#chart-scores svg")[0].is_displayed()
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})
