"""Options that several commands share, each with its help in one place."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..common.validation import ADAPTIVE
from ..engines import DEVICES

Bundle = Annotated[Path, typer.Argument(metavar="BUNDLE", help="Folder written by `vlmexport build`.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")]
Threads = Annotated[
    int | None,
    typer.Option("--threads", min=1, help="Processor threads. Default: all cores; one for small models."),
]
Device = Annotated[
    str,
    typer.Option(
        "--device",
        metavar="|".join(DEVICES),
        help="What computes; cuda: a GPU, by ONNX Runtime; tensorrt: the bundle's plans for it.",
    ),
]
KernelCache = Annotated[
    Path | None,
    typer.Option(
        "--kernel-cache",
        metavar="DIR",
        help="Of --device tensorrt: keep what TensorRT-RTX compiles for the next time.",
    ),
]
VerifyWidth = Annotated[
    int | None,
    typer.Option(
        "--verify-width",
        metavar="W",
        help="Rows of every pass, for kernels that give other bits at other widths; 0: as many as are verified. Default: "
        "the bundle's.",
    ),
]
DraftLength = Annotated[
    int | None, typer.Option("--draft-length", metavar="D", help="Tokens drafted per cycle.")
]
ConfidenceThreshold = Annotated[
    float | None,
    typer.Option(
        "--confidence-threshold",
        metavar="P",
        min=0.0,
        max=1.0,
        help="Stop drafting after a token that the draft gives a lower probability.",
    ),
]
Adaptive = Annotated[
    str | None,
    typer.Option(
        "--adaptive",
        metavar="|".join(ADAPTIVE),
        help="What the draft length follows: nothing, this request, all so far, the position (FastVLM), or how sure the "
        "draft is (Draft & Verify). Default: the bundle's; session, unless it says otherwise.",
    ),
]
Temperature = Annotated[float, typer.Option("--temperature", min=0.0, help="0 takes the likeliest token.")]
Lossy = Annotated[
    str | None,
    typer.Option(
        "--lossy",
        metavar="typical",
        help="Accept drafts that are likely enough: the text is NOT distributed as the model's. Needs --temperature.",
    ),
]
TypicalEpsilon = Annotated[
    float,
    typer.Option(
        "--typical-epsilon", metavar="E", help="Of --lossy typical: accept above min(E, D · exp(−entropy))."
    ),
]
TypicalDelta = Annotated[
    float, typer.Option("--typical-delta", metavar="D", help="Of --lossy typical: see E.")
]
DraftSampling = Annotated[
    str | None,
    typer.Option(
        "--draft-sampling",
        metavar="match|drawn|auto",
        help="At a temperature: match the model's own draws, draw proposals, or whichever accepts more. "
        "Default: match with --seed, else auto.",
    ),
]
DraftNodes = Annotated[
    int | None,
    typer.Option(
        "--draft-nodes",
        metavar="N",
        help="Of drafts that propose trees: tokens per cycle, at most --draft-length on one path.",
    ),
]
