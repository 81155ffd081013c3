"""The command line: one module per subcommand, each with `prepare_parser` and `run`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module

from lowtide.errors import LowtideError

COMMANDS: dict[str, str] = {
    "demo": "train two small models plain and inside a budget, and compare",
    "reproduce": "repeat the papers' experiments: published figures beside ours",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Return the exit code of the command: 0 if it succeeded, 1 if it failed, 2 if the arguments are wrong."""
    try:
        options = _parser().parse_args(argv)
    except SystemExit as exit_:
        return exit_.code if isinstance(exit_.code, int) else 2
    try:
        return options.run(options)
    except LowtideError as error:
        print(f"lowtide {options.command}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("lowtide: interrupted", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="lowtide", description="Train PyTorch models inside a byte budget.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    for name, summary in COMMANDS.items():
        module = import_module(f"lowtide.cli.{name}")
        command = commands.add_parser(name, help=summary, description=module.__doc__)
        module.prepare_parser(command)
        command.set_defaults(run=module.run)
    return parser
