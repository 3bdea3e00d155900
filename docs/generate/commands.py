"""A page for every command, from what `--help` shows."""

from __future__ import annotations

import re
from typing import Any

import typer
from vlmexport.runtime.cli import MOUNTED_COMMANDS, RUNTIME_COMMANDS, build_app

from docs.generate.markdown import cell, code, table

COMMANDS = {**RUNTIME_COMMANDS, **MOUNTED_COMMANDS}
NEEDS = {"exporter": "the extra `[export]`", "calibration": "the extra `[train]`"}
WITHOUT_EXTRA = ("tune", "compile")
"""Mounted commands that say themselves what they need."""


def pages() -> dict[str, str]:
    """The list of commands, and a page for each."""
    rows = [(f"[`vlmexport {name}`]({name}.md)", cell(text)) for name, (_, text) in COMMANDS.items()]
    index = f"# Commands\n\n{table(('command', 'does'), rows)}\n\nEvery command has `-h`, `-v` and `-q`.\n"
    return {
        "reference/cli/index.md": index,
        **{f"reference/cli/{name}.md": _page(name) for name in COMMANDS},
    }


def _page(name: str) -> str:
    command: Any = typer.main.get_command(build_app(name)).commands[name]  # type: ignore[attr-defined]
    shown = [each for each in command.params if not getattr(each, "hidden", False)]
    arguments = [each for each in shown if each.param_type_name == "argument"]
    options = [each for each in shown if each.param_type_name == "option"]
    usage = " ".join(["vlmexport", name, *map(_argument, arguments), "[OPTIONS]"])
    parts = [f"# vlmexport {name}", COMMANDS[name][1], f"```text\n{usage}\n```"]
    needs = NEEDS.get(COMMANDS[name][0])
    if needs and name not in WITHOUT_EXTRA:
        parts.append(f"Needs {needs}: see [Install](../../get-started/install.md).")
    if arguments:
        rows = [(code(each.metavar or each.name.upper()), _help(each)) for each in arguments]
        parts.append("## Arguments\n\n" + table(("argument", "meaning"), rows))
    groups: dict[str, list[Any]] = {}
    for option in options:
        groups.setdefault(getattr(option, "rich_help_panel", None) or "Options", []).append(option)
    for group, members in groups.items():
        rows = [(_names(each), _help(each)) for each in members]
        parts.append(f"## {group}\n\n" + table(("option", "meaning"), rows))
    if command.epilog:
        parts.append("## More\n\n" + cell(command.epilog.replace("\\[", "[")))
    return "\n\n".join(parts) + "\n"


def _argument(argument: Any) -> str:
    name = argument.metavar or argument.name.upper()
    return name if argument.required else f"[{name}]"


def _names(option: Any) -> str:
    names = ", ".join(code(name) for name in [*option.opts, *option.secondary_opts])
    if option.is_flag:
        return names
    return f"{names} {code(option.metavar or _kind(option.type))}"


def _kind(kind: Any) -> str:
    choices = getattr(kind, "choices", None)
    return "|".join(map(str, choices)) if choices else kind.name.upper().replace(" RANGE", "")


def _help(parameter: Any) -> str:
    said = [re.sub(r"\\\[", "[", getattr(parameter, "help", None) or "")]
    default = parameter.default
    if parameter.required:
        said.append("Required.")
    elif isinstance(default, (int, float, str)) and not isinstance(default, bool) and default != "":
        said.append(f"Default: {default}.")
    return cell(" ".join(said))
