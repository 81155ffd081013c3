"""The command line: one module per subcommand, each with `prepare_parser` and `run`."""

from __future__ import annotations

import argparse
import os
import sys
import textwrap
import traceback
from collections.abc import Iterable, Sequence
from importlib import import_module
from typing import NoReturn

from lowtide.environment import show_compiler_messages
from lowtide.errors import InfeasibleBudgetError, LowtideError

FAILED, WRONG_ARGUMENTS, DOES_NOT_FIT, INTERRUPTED = 1, 2, 3, 130
COMMANDS: dict[str, str] = {
    "demo": "train two small models plain and inside a budget, and compare",
    "plan": "plan a model inside a budget or a device; write the plan and a report",
    "compare": "planners and budgets side by side: memory against time",
    "explain": "what is alive at the peak and why, and what less memory would cost",
    "max-batch": "the largest batch that fits the memory",
    "bench": "run a model plain and planned: measured memory and time beside the predicted",
    "reproduce": "repeat the papers' experiments: published figures beside ours",
    "cache": "show or clear what lowtide keeps on disk",
    "completion": "print the completion script of a shell",
}
_EPILOG = """\
examples:
  lowtide plan my_model.py:make --budget 50% --report plan.html
  lowtide explain my_model.py:make
  lowtide max-batch my_model.py:make --memory 24GiB --batch my_model.py:make_batch

A model is named package.module:factory or path/to/file.py:factory. The factory takes nothing and returns (model, args)
or (model, args, kwargs): the model and the arguments of one training call.

exit codes: 0 done, 1 failed, 2 wrong arguments, 3 does not fit the memory, 130 interrupted.
"""


class _Parser(argparse.ArgumentParser):
    """A parser whose mistakes become exit code 2 without leaving the process."""

    def error(self, message: str) -> NoReturn:
        """Print usage and `message` on stderr and stop."""
        self.print_usage(sys.stderr)
        self.exit(WRONG_ARGUMENTS, f"{self.prog}: {message}\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Return the exit code of the command: 0 done, 1 failed, 2 wrong arguments, 3 does not fit, 130 interrupted."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        options = parser(commands=_named(arguments)).parse_args(arguments)
    except SystemExit as exit_:
        return exit_.code if isinstance(exit_.code, int) else WRONG_ARGUMENTS
    if options.debug:
        # PyTorch's own messages are wanted, too.
        show_compiler_messages()
    try:
        code: int = options.run(options)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        print("lowtide: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # The reader of our output has left, as `head` does; nothing can be said to it any more.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except Exception as error:
        return _report(error, options)


def parser(*, commands: Iterable[str] = COMMANDS) -> argparse.ArgumentParser:
    """Return the parser of the command line.

    Args:
        commands: The commands whose options are filled in, which imports what they need.
    """
    top = _Parser(
        prog="lowtide",
        description="Train PyTorch models inside the memory you have.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    top.add_argument("--version", action=_Version, help="print the version and stop")
    choices = top.add_subparsers(dest="command", required=True, metavar="command", parser_class=_Parser)
    for name, summary in COMMANDS.items():
        if name not in commands:
            choices.add_parser(name, help=summary, add_help=False)
            continue
        module = import_module(f"lowtide.cli.{name.replace('-', '_')}")
        command = choices.add_parser(
            name,
            help=summary,
            description=module.__doc__,
            epilog=_examples(getattr(module, "EXAMPLES", "")),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.prepare_parser(command)
        command.add_argument("--debug", action="store_true", help="show an error's traceback and PyTorch's messages")
        command.set_defaults(run=module.run)
    return top


class _Version(argparse.Action):
    """Prints the version."""

    def __init__(self, option_strings: Sequence[str], dest: str, help: str | None = None) -> None:
        super().__init__(option_strings, dest, nargs=0, help=help)

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        """Print it and stop."""
        from lowtide import __version__

        print(f"lowtide {__version__}")
        parser.exit()


def _named(arguments: Sequence[str]) -> tuple[str, ...]:
    """Return the command that `arguments` name: only its options are looked at, so only its module is imported."""
    return tuple(argument for argument in arguments[:1] if argument in COMMANDS)


def _examples(text: str) -> str:
    return f"examples:\n{textwrap.indent(textwrap.dedent(text).strip(), '  ')}" if text else ""


def _report(error: Exception, options: argparse.Namespace) -> int:
    """Print `error` on stderr and return the exit code."""
    if options.debug:
        traceback.print_exception(error, file=sys.stderr)
    if isinstance(error, LowtideError):
        words = str(error)
    elif isinstance(error, OSError):
        words = f"{error.strerror or error}: {error.filename}" if error.filename else f"{error.strerror or error}"
    else:
        words = f"unexpected {type(error).__name__}: {error}. --debug shows where; please report it."
    print(f"lowtide {options.command}: {words}", file=sys.stderr)
    return DOES_NOT_FIT if isinstance(error, InfeasibleBudgetError) else FAILED
