"""Print the completion script of a shell: commands, their options, and the names of planners, devices and files.

bash: eval "$(lowtide completion bash)" in ~/.bashrc. zsh: the same in ~/.zshrc, after compinit.
fish: lowtide completion fish > ~/.config/fish/completions/lowtide.fish
"""

from __future__ import annotations

import argparse
import shlex

from lowtide.plan import registry

EXAMPLES = """
eval "$(lowtide completion bash)"
"""
Options = dict[str, tuple[str, ...] | None]


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Add the options of `lowtide completion`."""
    parser.add_argument("shell", choices=tuple(_SHELLS), help="whose script")


def run(options: argparse.Namespace) -> int:
    """Print the script; return the exit code."""
    print(_SHELLS[options.shell](commands()))
    return 0


def commands() -> dict[str, Options]:
    """Return every command with its options; an option has its values, () for none, None for files and free text."""
    from lowtide.cli import parser

    (subparsers,) = [action for action in parser()._actions if isinstance(action, argparse._SubParsersAction)]
    return {name: _options(command) for name, command in subparsers.choices.items()}


def _options(command: argparse.ArgumentParser) -> Options:
    found: Options = {}
    for action in command._actions:
        names = [name for name in action.option_strings if name.startswith("--")]
        if names:
            found[names[-1]] = () if action.nargs == 0 else _values(action)
        elif action.choices:
            found[""] = tuple(map(str, action.choices))
    return found


def _values(action: argparse.Action) -> tuple[str, ...] | None:
    from lowtide.costs.device_table import DEVICES

    if action.choices:
        return tuple(map(str, action.choices))
    known = {
        "planner": registry.names(),
        "planners": registry.names(),
        "device": tuple(DEVICES),
        "costs": ("measured", "analytic", *DEVICES),
        "optimizer": ("adam", "adamw", "sgd", "sgd-momentum"),
    }
    return known.get(action.dest)


def _bash(known: dict[str, Options]) -> str:
    lines = [
        "_lowtide() {",
        "  local current=${COMP_WORDS[COMP_CWORD]} previous=${COMP_WORDS[COMP_CWORD-1]} words=",
        "  COMPREPLY=()",
        "  if [ $COMP_CWORD -eq 1 ]; then",
        f'    COMPREPLY=($(compgen -W {shlex.quote(" ".join([*known, "--help", "--version"]))} -- "$current"))',
        "    return",
        "  fi",
        '  case "${COMP_WORDS[1]} $previous" in',
    ]
    for command, options in known.items():
        for name, values in options.items():
            if name and values:
                lines.append(f'    "{command} {name}") words={shlex.quote(" ".join(values))};;')
    lines += ["  esac", '  if [ -z "$words" ] && [[ $current == -* ]]; then', '    case "${COMP_WORDS[1]}" in']
    lines += [f"      {command}) words={shlex.quote(_flags(options))};;" for command, options in known.items()]
    lines += [
        "    esac",
        "  fi",
        '  if [ -z "$words" ] && [ $COMP_CWORD -eq 2 ]; then',
        '    case "${COMP_WORDS[1]}" in',
    ]
    lines += [
        f"      {command}) words={shlex.quote(' '.join(options['']))};;"  # type: ignore[arg-type]
        for command, options in known.items()
        if "" in options
    ]
    lines += [
        "    esac",
        "  fi",
        '  if [ -n "$words" ]; then',
        '    COMPREPLY=($(compgen -W "$words" -- "$current"))',
        "  else",
        '    COMPREPLY=($(compgen -f -- "$current"))',
        "  fi",
        "}",
        "complete -o filenames -F _lowtide lowtide",
    ]
    return "\n".join(lines)


def _zsh(known: dict[str, Options]) -> str:
    return "autoload -Uz bashcompinit && bashcompinit\n" + _bash(known)


def _fish(known: dict[str, Options]) -> str:
    from lowtide.cli import COMMANDS

    lines = [
        "complete -c lowtide -f -n __fish_use_subcommand -l help",
        "complete -c lowtide -f -n __fish_use_subcommand -l version",
    ]
    for command, options in known.items():
        summary = shlex.quote(COMMANDS[command])
        lines.append(f"complete -c lowtide -f -n __fish_use_subcommand -a {command} -d {summary}")
        inside = f"complete -c lowtide -n '__fish_seen_subcommand_from {command}'"
        for name, values in options.items():
            if not name:
                lines.append(f"{inside} -f -a {shlex.quote(' '.join(values or ()))}")
            elif values is None:
                lines.append(f"{inside} -l {name[2:]} -r")
            elif values:
                lines.append(f"{inside} -l {name[2:]} -x -a {shlex.quote(' '.join(values))}")
            else:
                lines.append(f"{inside} -l {name[2:]}")
    return "\n".join(lines)


def _flags(options: Options) -> str:
    return " ".join(name for name in options if name)


_SHELLS = {"bash": _bash, "zsh": _zsh, "fish": _fish}
