"""Options that several commands share, each with its help in one place. Those of a request are in `session/options.py`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from ..common.options import File, Integer, Switch, Text
from ..engines import DEVICES

Bundle = Annotated[Path, typer.Argument(metavar="BUNDLE", help="Folder written by `vlmexport build`.")]
AsJson = Annotated[
    bool, typer.Option("--json", rich_help_panel="Output", help="Print one JSON object on stdout.")
]


PromptText = Annotated[
    str | None,
    Text(group="Input", metavar="TEXT", help="Prompt; - reads standard input. Default: the bundle's."),
]
SchemaFile = Annotated[
    Path | None,
    File(
        expert=True, metavar="FILE",
        help="Answer in JSON that keeps to this JSON schema (needs the extra [grammar]).",
    ),
]  # fmt: skip
RayAddress = Annotated[
    str | None,
    Text(
        group="Engine", expert=True, metavar="ADDRESS",
        help="Decode on the nodes of a Ray cluster (needs the extra [ray]): auto, HOST:PORT or ray://HOST:PORT. All nodes share "
        "the folders of bundle and pictures.",
    ),
]  # fmt: skip
RawPrompt = Annotated[
    bool, Switch(group="Input", expert=True, help="Use the prompt as it is, without the chat template.")
]


def thread_count(default: str) -> Integer:
    """`--threads`, whose help says in words what the default is."""
    return Integer(low=1, group="Engine", expert=True, metavar="N", help=f"CPU threads. Default: {default}.")


@dataclass(frozen=True, kw_only=True)
class DeviceOptions:
    """What computes."""

    device: Annotated[
        str,
        Text(
            group="Engine",
            metavar="|".join(DEVICES),
            help="What computes: the CPU, a GPU by ONNX Runtime (cuda), or the bundle's TensorRT plans.",
        ),
    ] = "cpu"
    threads: Annotated[int | None, thread_count("all cores; one for small models")] = None


@dataclass(frozen=True, kw_only=True)
class EngineOptions(DeviceOptions):
    """What computes, and what it keeps."""

    kernel_cache: Annotated[
        Path | None,
        File(
            group="Engine", expert=True, metavar="DIR",
            help="For --device tensorrt: keep compiled TensorRT-RTX kernels here for the next run.",
        ),
    ] = None  # fmt: skip
