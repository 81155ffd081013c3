"""Repeat the experiments of the four papers and print their figures beside ours.

The papers' networks are captured at their published size on fake tensors, so no memory for activations and no GPU is
needed. Every page is printed and written as Markdown and JSON. Networks of one page are captured one after the other,
which takes seconds to minutes each; `--only` picks some.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

from rich.console import Console

from lowtide.errors import InvalidOptionError
from lowtide.reproduce.page import Page, to_json, to_markdown, to_terminal

EXAMPLES = """
lowtide reproduce hong
lowtide reproduce all --out out/reproduce --force
lowtide reproduce kusumoto --graphs path/to/graphs --only ResNet50
"""
# Wide enough for the papers' tables beside ours without breaking rows.
_WIDTH = 160
PAPERS = ("chen", "hong", "feng", "kusumoto")


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Add the options of `lowtide reproduce`."""
    parser.add_argument("paper", choices=(*PAPERS, "all"), help="whose figures")
    parser.add_argument("--out", type=Path, default=Path("out/reproduce"), help="where <paper>.md and .json go")
    parser.add_argument("--only", nargs="+", action="extend", default=[], metavar="NAME", help="only these networks")
    parser.add_argument("--graphs", type=Path, help="folder with the authors' own graph files, where there are any")
    parser.add_argument("--force", action="store_true", help="overwrite files of an earlier run")


def run(options: argparse.Namespace) -> int:
    """Print and write the pages and return the exit code."""
    papers = PAPERS if options.paper == "all" else (options.paper,)
    if not _may_write(papers, options):
        return 1
    if options.graphs is not None and not options.graphs.is_dir():
        raise InvalidOptionError(f"--graphs {options.graphs} is not a folder.")
    written: list[Path] = []
    for paper in papers:
        page = _page(paper, options)
        if page.rows:
            _show(page)
            written += _write(page, options.out / paper)
    if not written:
        raise InvalidOptionError(f"No figure of {', '.join(papers)} is about {', '.join(options.only)}.")
    print(f"Wrote {', '.join(map(str, written))}")
    return 0


def _may_write(papers: tuple[str, ...], options: argparse.Namespace) -> bool:
    """Return True if --force allows overwriting or no file exists; otherwise say which do, before any work is done."""
    files = [options.out / f"{paper}{ending}" for paper in papers for ending in (".md", ".json")]
    present = [str(file) for file in files if file.exists()]
    if present and not options.force:
        print(f"lowtide reproduce: {', '.join(present)} exist; use --force to overwrite.", file=sys.stderr)
    return options.force or not present


def _page(paper: str, options: argparse.Namespace) -> Page:
    module = import_module(f"lowtide.reproduce.{paper}")
    page: Page = module.page(only=tuple(options.only), graphs=options.graphs, progress=_progress(paper))
    return page


def _progress(paper: str) -> Callable[[str], None]:
    """Return what prints progress lines with the seconds since now."""
    start = time.monotonic()

    def show(message: str) -> None:
        print(f"[{time.monotonic() - start:6.0f} s] {paper}: {message}", file=sys.stderr, flush=True)

    return show


def _show(page: Page) -> None:
    # Where there is no terminal, figures are not to be folded into the 80 columns assumed then.
    console = Console() if sys.stdout.isatty() else Console(width=_WIDTH)
    console.print(to_terminal(page))
    console.print()


def _write(page: Page, stem: Path) -> list[Path]:
    stem.parent.mkdir(parents=True, exist_ok=True)
    files = {stem.with_name(f"{stem.name}.md"): to_markdown(page), stem.with_name(f"{stem.name}.json"): to_json(page)}
    for file, text in files.items():
        file.write_text(text, encoding="utf-8")
    return list(files)
