"""What `--help` shows in terminals of common widths."""

from __future__ import annotations

import re

import pytest

pytest.importorskip("torch")

import typer
from vlmexport.runtime import cli
from vlmexport.runtime.commands.examples import EXAMPLES


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


@pytest.mark.parametrize("command", ["train", "eval", "generate-data", "search", "tune"])
def test_eval_help_explains_prompt_templates(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert "{question}" in shown_help(command, capsys)


def test_train_says_what_changes_its_target(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", "--help"]) == 0
    said = " ".join(capsys.readouterr().out.split("Input")[0].split())
    assert "only --joint and --fine-tune change it" in said and "frozen" not in said
