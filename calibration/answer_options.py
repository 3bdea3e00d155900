"""The options of `generate-data`: to answer data, or a part of it, and to join parts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer

from ..runtime.commands.options import RayAddress
from ..runtime.common.errors import OptionError
from ..runtime.common.options import Custom, File, Integer, Number, Switch, Text, declared_options
from ..runtime.common.parts import METAVAR, Part, read_part
from .command_options import AnswerLimit, Data, DataOptions, MachineOptions, Model, OutputFolder

Parts = Annotated[
    list[Path] | None, typer.Argument(metavar="PART…", help="With --join: the folders of all parts.")
]


@dataclass(frozen=True, kw_only=True)
class AskedData(DataOptions):
    """The same for a command that can do without."""

    model: Model = ""
    data: Data = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class AnswerSettings(OutputFolder):
    """How the target answers, and how answers are stored."""

    part: Annotated[
        Part | None,
        Custom(
            checked=read_part, group="Output", metavar=METAVAR,
            help="Answer only the records whose key falls to part I of N, counted from 0. Each part has a folder of its own, and "
            "--join puts the folders together.",
        ),
    ] = None  # fmt: skip
    join: Annotated[
        bool,
        Switch(
            group="Output",
            help="Join the folders PART… of all parts into -o: what one run without parts would have written.",
        ),
    ] = False

    max_new_tokens: AnswerLimit = 96
    temperature: Annotated[
        float, Number(group="Sampling", metavar="T", help="Draw the answers. 0: the likeliest token, always.")
    ] = 0.0
    samples: Annotated[
        int, Integer(low=1, group="Sampling", metavar="N", help="Drawn answers per record.")
    ] = 1
    seed: Annotated[int, Integer(group="Sampling", metavar="N", help="Seed of drawn answers.")] = 0
    min_answer: Annotated[
        int, Integer(expert=True, metavar="N", help="Leave out answers of fewer tokens. They are counted.")
    ] = 0
    prompt_suffix: Annotated[
        str,
        Text(
            group="Input", expert=True, metavar="TEXT",
            help="Words to put after every prompt, for example to ask for long answers. The data keeps them.",
        ),
    ] = ""  # fmt: skip
    shard_size: Annotated[
        int, Integer(low=1, group="Output", expert=True, metavar="N", help="Records in one file.")
    ] = 256
    batch_size: Annotated[
        int | None,
        Integer(
            low=1, group="Engine", expert=True, metavar="N",
            help="Answers decoded together. Default: what suits the memory. PyTorch starts with 128 and halves them when a "
            "GPU's memory runs out.",
        ),
    ] = None  # fmt: skip
    engine: Annotated[
        str,
        Text(
            group="Engine", metavar="auto|runtime|torch", help="auto: PyTorch where it has a GPU, else the runtime."
        ),
    ] = "auto"  # fmt: skip
    bundle: Annotated[
        Path | None,
        File(
            group="Engine", expert=True, metavar="DIR",
            help="A bundle of --model, in place of one that is exported and kept.",
        ),
    ] = None  # fmt: skip
    ray: RayAddress = None


def check_join(
    asked: AskedData, settings: AnswerSettings, machine: MachineOptions, parts: Sequence[Path]
) -> None:
    """OptionError where `--join` comes with what it does not read or without parts, and where answers are asked for without
    model or data."""
    if settings.join:
        given = [text for options in (asked, settings, machine) for text in _given(options)]
        if given:
            raise OptionError(f"--join reads what the parts hold: leave {' and '.join(given)} out")
        if not parts:
            raise OptionError("--join names no folder; give those of all parts: --join PART… -o DATA")
        return
    if parts:
        raise OptionError(f"{parts[0]}: generate-data takes no argument without --join")
    missing = [flag for flag, value in (("--model", asked.model), ("--data", asked.data)) if not value]
    if missing:
        raise OptionError(f"generate-data needs {' and '.join(missing)}; only --join does without")


def _given(given: Any) -> list[str]:
    """The flags of options that are not at their defaults, but those of a join itself."""
    return [
        option.flags(name)[-1]
        for name, option in declared_options(type(given)).items()
        if name not in ("join", "out") and getattr(given, name) not in (option.default, ())
    ]
