"""Show what lowtide keeps on disk, measured op costs and plans, or delete it.

The folder is LOWTIDE_CACHE_DIR, or else in the user's cache folder. It only saves time: deleting it is always safe.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from lowtide.cli.common import show
from lowtide.text_table import text_table
from lowtide.units import format_bytes

EXAMPLES = """
lowtide cache
lowtide cache --clear
"""


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Add the options of `lowtide cache`."""
    parser.add_argument("--clear", action="store_true", help="delete everything in it")
    parser.add_argument("--json", action="store_true", help="print JSON for machines")


def run(options: argparse.Namespace) -> int:
    """Show or clear the cache; return the exit code."""
    from lowtide.costs import cache as costs
    from lowtide.environment import cache_dir
    from lowtide.plan.plan_cache import plan_store

    store = plan_store()
    folder = cache_dir()
    if options.clear:
        deleted = costs.clear() + store.clear()
        show(options, f"Deleted {deleted} files in {folder}", {"folder": str(folder), "deleted": deleted})
        return 0
    kinds = {"op costs": costs.files(), "plans": store.files()}
    sizes = {kind: sum(map(_size, files)) for kind, files in kinds.items()}
    rows = [(kind, str(len(files)), format_bytes(sizes[kind])) for kind, files in kinds.items()]
    data = {
        "folder": str(folder),
        "kinds": {kind: {"files": len(files), "bytes": sizes[kind]} for kind, files in kinds.items()},
    }
    show(options, "\n".join([f"Cache in {folder}", "", *text_table(("", "files", "size"), rows)]), data)
    return 0


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError:  # another process has just deleted it
        return 0
