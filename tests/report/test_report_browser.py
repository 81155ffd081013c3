"""The report in a real browser: it draws without errors, reacts, fits a phone, and does not run what names contain."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from helpers.chromium import launched
from helpers.report_samples import comparison_of, hostile_names, plain_names, plan_of
from helpers.step_samples import step_plan

CHARTS = ("memory", "peak-modules", "peak-sources", "kept", "recompute", "tradeoff")
PHONE = {"width": 390, "height": 844}


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with launched() as found:
        yield found


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("reports")
    plan = plan_of(plain_names())
    plan.report(folder / "plain.html", comparison=comparison_of(plan))
    plan_of(hostile_names()).report(folder / "hostile.html")
    step_plan().report(folder / "step.html")
    return {path.stem: path.as_uri() for path in Path(folder).iterdir()}


@pytest.fixture
def show(browser: Any, pages: dict[str, str]) -> Iterator[Any]:
    """Return a function that opens a page; what the page complains about fails the test."""
    complaints: list[str] = []
    contexts = []

    def opened(name: str = "plain", **settings: Any) -> Any:
        contexts.append(browser.new_context(**settings))
        page = contexts[-1].new_page()
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("request", lambda request: request.url.startswith("file:") or complaints.append(request.url))
        page.goto(pages[name])
        page.wait_for_selector("html[data-ready]")
        return page

    yield opened
    for context in contexts:
        context.close()
    assert not complaints


def texts(page: Any, chart: str) -> str:
    return " ".join(page.locator(f"#{chart}-chart svg text").all_text_contents())


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_chart_is_drawn_with_named_axes_and_units(show: Any, scheme: str) -> None:
    page = show(color_scheme=scheme)
    for chart in CHARTS:
        assert page.locator(f"#{chart}-chart svg path").count() > 5, chart
    assert "memory above the start (MiB)" in texts(page, "memory")
    assert "time in the step (ms, predicted)" in texts(page, "memory")
    assert "forward | backward" in texts(page, "memory")
    assert "planned peak" in texts(page, "memory")
    assert "budget" in texts(page, "memory")
    assert "alive at the peak (MiB)" in texts(page, "peak-modules")
    assert "alive at the peak (MiB)" in texts(page, "peak-sources")
    assert "kept for backward (MiB)" in texts(page, "kept")
    assert "time of repeated runs (ms)" in texts(page, "recompute")
    assert "peak memory (MiB)" in texts(page, "tradeoff")
    assert "extra time (% of the plain step)" in texts(page, "tradeoff")
    assert "this plan" in texts(page, "tradeoff")
    assert "greedy" in texts(page, "tradeoff")


def test_theme_follows_the_system_and_the_button(show: Any) -> None:
    page = show(color_scheme="dark")
    background = "getComputedStyle(document.body).backgroundColor"
    dark = page.evaluate(background)
    page.click("#theme")
    light = page.evaluate(background)
    assert dark != light
    page.click("#theme")
    assert page.evaluate(background) == dark
    page.emulate_media(color_scheme="light")
    assert page.evaluate(background) == dark, "what the reader chose outlasts the system's choice"


def test_memory_can_be_seen_by_kind_and_by_ops(show: Any) -> None:
    page = show()
    page.select_option("#memory-view", "kinds")
    assert "activations kept for backward" in texts(page, "memory")
    page.select_option("#memory-axis", "steps")
    assert "ops run (count)" in texts(page, "memory")


def test_pointing_at_memory_names_the_op(show: Any) -> None:
    page = show()
    box = page.locator("#memory-chart").bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    tip = page.locator("#memory-chart > div", has_text="after ")
    tip.wait_for()
    assert "planned: " in tip.inner_text()
    assert "net.py:" in tip.inner_text()


def test_ops_are_searched_filtered_and_sorted(show: Any) -> None:
    page = show()
    rows = page.locator("#ops-table tbody tr")
    everything = rows.count()
    page.fill("#ops-search", "down.1")
    assert 0 < rows.count() < everything
    assert all("down.1" in text for text in rows.all_inner_texts())
    page.fill("#ops-search", "nothing is called this")
    assert rows.count() == 0
    page.fill("#ops-search", "")
    page.select_option("#ops-filter", "recomputed")
    runs = [int(row.locator("td").nth(5).inner_text()) for row in rows.all()]
    assert runs
    assert min(runs) > 1
    page.select_option("#ops-filter", "all")
    head = page.locator("#ops-table th", has_text="time of a run")
    head.locator("button").click()
    assert head.get_attribute("aria-sort") == "descending"
    times = [float(text.split()[0]) for text in page.locator("#ops-table tbody td:nth-child(7)").all_inner_texts()]
    assert times == sorted(times, reverse=True)
    head.locator("button").click()
    assert head.get_attribute("aria-sort") == "ascending"


def test_a_click_on_a_bar_searches_its_ops(show: Any) -> None:
    page = show()
    page.locator("#peak-modules-chart svg text", has_text="down.0").first.click()
    assert page.input_value("#ops-search") == "down.0"


def test_a_phone_shows_everything_without_scrolling_sideways(show: Any) -> None:
    page = show(viewport=PHONE, has_touch=True, is_mobile=True)
    assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
    for chart in CHARTS:
        box = page.locator(f"#{chart}-chart").bounding_box()
        assert 250 < box["width"] <= PHONE["width"], chart
    written = "[...document.querySelectorAll('p, td, dd, dt, li, button, svg text')]"
    sizes = page.evaluate(f"{written}.map(each => parseFloat(getComputedStyle(each).fontSize))")
    assert min(sizes) >= 11


def test_hostile_names_are_shown_and_not_run(show: Any) -> None:
    page = show("hostile")
    box = page.locator("#peak-modules-chart").bounding_box()
    for step in range(6):
        page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 20 + 24 * step)
    page.mouse.move(box["x"] + 60, box["y"] + 20)
    page.fill("#ops-search", "onerror")
    assert page.locator("#ops-table tbody tr").count() > 0
    assert "<img" in page.locator("#ops-table tbody").inner_text()
    assert page.locator("img").count() == 0
    assert page.evaluate("window.attacked") is None
    assert page.evaluate("document.documentElement.scrollWidth") <= 1280


def test_a_step_shows_its_course_and_one_block_at_a_time(show: Any) -> None:
    page = show("step")
    assert "forward | backward" in texts(page, "step")
    assert "budget" in texts(page, "step")
    assert page.locator("#block-name").inner_text() == "embedding"
    for chart in CHARTS:
        assert page.locator(f"#{chart}-chart svg path").count() > 5, chart
    page.locator("#blocks-table a").last.click()
    page.wait_for_function("document.getElementById('block-name')?.textContent === 'decoder.layers.0'")
    page.wait_for_selector("html[data-ready]")
    assert page.locator("#memory-chart svg path").count() > 5
