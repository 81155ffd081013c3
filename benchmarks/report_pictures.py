"""Pictures of a report for the documentation: a page is written, opened in a headless Chromium and photographed.

python benchmarks/report_pictures.py --chromium .browser/chromium
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lowtide
from lowtide.testing.models import gpt

OUT = Path(__file__).parents[1] / "docs" / "images"
BUDGETS = ("80%", "65%", "50%", "40%")
PLANNERS = ("auto", "drop_cheap", "chen_sqrt", "chen_greedy", "kusumoto", "rotor")


def write_page(path: Path) -> None:
    """Write the report of a small GPT in half its memory, among other planners; costs are analytic."""
    model, args, kwargs = gpt(layers=6, dim=128, heads=4, tokens=192)
    plan = lowtide.plan(model, args, kwargs, budget="50%", costs="analytic")
    comparison = lowtide.compare(model, args, kwargs, budgets=BUDGETS, planners=PLANNERS, costs="analytic")
    plan.report(path, comparison=comparison)


def photograph(page: Any, out: Path) -> None:
    """Write the pictures of an open report."""
    page.screenshot(path=out / "report.png")
    page.locator("#tradeoff").screenshot(path=out / "tradeoff.png")
    page.select_option("#memory-view", "kinds")
    page.locator("#memory-chart").screenshot(path=out / "kinds.png")
    page.emulate_media(color_scheme="dark")
    page.select_option("#memory-view", "both")
    page.screenshot(path=out / "report-dark.png")
    page.set_viewport_size({"width": 390, "height": 844})
    page.emulate_media(color_scheme="light")
    page.locator("#memory").scroll_into_view_if_needed()
    page.screenshot(path=out / "report-phone.png")


def main(argv: Sequence[str] | None = None) -> int:
    """Take all pictures and return the exit code."""
    from playwright.sync_api import sync_playwright

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--chromium", help="path of a Chromium; by default the one that playwright installed")
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as session:
        path = Path(folder) / "plan.html"
        write_page(path)
        browser = session.chromium.launch(executable_path=options.chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1280, "height": 900}, color_scheme="light")
        page.goto(path.as_uri())
        page.wait_for_selector("html[data-ready]")
        photograph(page, options.out)
        browser.close()
    print(f"Wrote the pictures of a report to {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
