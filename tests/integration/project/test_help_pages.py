"""What `--help` shows in terminals of common widths."""

from __future__ import annotations

import dataclasses
import inspect
import re
import typing
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("torch")

import typer
from vlmexport.calibration.objectives import KINDS, options_of
from vlmexport.calibration.objectives.training_options import LoopOptions, flag_of
from vlmexport.runtime import cli
from vlmexport.runtime.commands.examples import EXAMPLES
from vlmexport.runtime.common.options import declared_options
from vlmexport.runtime.session.options import GenerateOptions


def shown_help(command: str, capsys: pytest.CaptureFixture[str]) -> str:
    """The help of a command with all its options."""
    for flag in ("--help", "--help-all"):
        assert cli.main([command, flag]) == 0
        shown = capsys.readouterr().out
        if "--help-all" not in shown:
            break
    return shown


FIRST_PAGE = {"run": 15}
"""Options of the first page at most; 20 of a command that is not named."""


@pytest.mark.parametrize("command", [*cli.RUNTIME_COMMANDS, *cli.MOUNTED_COMMANDS])
def test_the_first_page_is_short_and_ends_with_an_example(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert cli.main([command, "--help"]) == 0
    shown = capsys.readouterr().out
    options = re.findall(r"^│ (?:\*| ) *(?:-\w, )?--[a-z]|^│ --[a-z]", shown, re.M)
    assert 3 <= len(options) <= FIRST_PAGE.get(command, 20), len(options)
    assert " ".join(shown.split()).rpartition("Example: ")[2] == EXAMPLES[command]


@pytest.mark.parametrize("columns", [80, 160])
def test_expert_options_are_in_groups_on_the_whole_page(
    columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    assert cli.main(["run", "--help"]) == 0
    first = capsys.readouterr().out
    whole = shown_help("run", capsys)
    assert "--top-k" not in first and "--top-k" in whole
    groups = ("Input", "Generation", "Sampling", "Speculation", "Engine", "Output")
    for page in (first, whole):
        at = [re.search(rf"^(╭─ )?{group}", page, re.M) for group in groups]
        starts = [match.start() for match in at if match is not None]
        assert len(starts) == len(groups) and starts == sorted(starts)
    assert "--force-acceptance" not in whole and "--verify-width" not in whole, "deprecated flags are hidden"


@pytest.mark.parametrize("columns", [80, cli.ROOM_FOR_A_TABLE, 160])
@pytest.mark.parametrize("command", [*cli.RUNTIME_COMMANDS, *cli.MOUNTED_COMMANDS])
def test_no_option_is_cut(
    command: str, columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    shown = shown_help(command, capsys)
    found = typer.main.get_command(cli.build_app(command))
    every = found.commands[command].params  # type: ignore[attr-defined]
    options = [option for option in every if not getattr(option, "hidden", False)]
    missing = [
        flag
        for option in options
        for flag in option.opts
        if flag.startswith("-") and not re.search(rf"(?<![\w-]){flag}(?![\w-])", shown)
    ]
    assert options and not missing
    assert max(map(len, shown.splitlines())) <= columns


def declarations(command: str) -> Iterator[type]:
    """The dataclasses and TypedDicts whose fields a command has as options, as its function is written."""
    (info,) = (each for each in cli.build_app(command).registered_commands if each.name == command)
    function: Any = info.callback
    while hasattr(function, "command"):
        function = function.command
    for parameter in inspect.signature(function, eval_str=True).parameters.values():
        owner = parameter.annotation
        if dataclasses.is_dataclass(owner) or typing.is_typeddict(owner):
            yield typing.cast(type, owner)


DECLARED = (
    "run",
    "serve",
    "caption",
    "bench",
    "profile",
    "build",
    "verify",
    "compile",
    "train",
    "search",
    "generate-data",
    "eval",
    "quantize",
    "tune",
)
"""Commands with declarations of options; the few options of the others stand in their functions."""


def test_no_command_is_left_out() -> None:
    every = [*cli.RUNTIME_COMMANDS, *cli.MOUNTED_COMMANDS]
    assert {command for command in every if list(declarations(command))} == set(DECLARED)


@pytest.mark.parametrize("command", DECLARED)
def test_every_field_of_its_declarations_is_an_option_on_the_whole_page(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Apart from those that are declared as hidden or for Python alone."""
    monkeypatch.setenv("COLUMNS", "200")
    shown = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", shown_help(command, capsys)))
    owners = list(declarations(command))
    missing = [
        f"{owner.__name__}.{field.name}"
        for owner in owners
        if dataclasses.is_dataclass(owner)
        for field in dataclasses.fields(owner)
        if field.name not in declared_options(owner)
    ]
    for owner in owners:
        for name, option in declared_options(owner).items():
            flags = option.flags(name)
            left_out = command == "bench" and owner is GenerateOptions and name in NOT_OF_BENCH
            if flags and not option.hidden and not left_out and flags[-1] not in shown:
                missing.append(f"{owner.__name__}.{name}: {flags[-1]}")
    assert not missing


NOT_OF_BENCH = ("deadline", "plain_text", "similar", "stop")


@pytest.mark.parametrize("kind", [None, *KINDS])
def test_every_field_of_the_training_options_is_an_option_of_train(
    kind: str | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    shown = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", shown_help("train", capsys)))
    owner = LoopOptions if kind is None else options_of(kind)
    flags = {flag_of(field.name, field.metadata) for field in dataclasses.fields(owner)}  # type: ignore[arg-type]
    assert flags and not flags - shown


@pytest.mark.parametrize("command", ["train", "eval", "generate-data", "search", "quantize", "tune"])
def test_eval_help_explains_prompt_templates(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert "{question}" in shown_help(command, capsys)


def test_train_says_what_changes_its_target(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", "--help"]) == 0
    said = " ".join(capsys.readouterr().out.split("Input")[0].split())
    assert "only --joint and --fine-tune change it" in said and "frozen" not in said
