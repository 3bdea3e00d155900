"""What `--help` shows in terminals of common widths."""

from __future__ import annotations

import re

import pytest

pytest.importorskip("torch")

import typer
from vlmexport.runtime import cli


@pytest.mark.parametrize("columns", [80, cli.ROOM_FOR_A_TABLE, 160])
@pytest.mark.parametrize("command", [*cli.RUNTIME_COMMANDS, *cli.MOUNTED_COMMANDS])
def test_no_option_is_cut(
    command: str, columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    assert cli.main([command, "--help"]) == 0
    shown = capsys.readouterr().out
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


@pytest.mark.parametrize("command", ["train", "eval", "generate-data", "search", "calibrate"])
def test_eval_help_explains_prompt_templates(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([command, "--help"]) == 0
    assert "{question}" in capsys.readouterr().out


def test_train_says_what_changes_its_target(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", "--help"]) == 0
    said = " ".join(capsys.readouterr().out.split("Options")[0].split())
    assert "only --joint and --fine-tune change it" in said and "frozen" not in said
