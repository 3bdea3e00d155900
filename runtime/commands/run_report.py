"""What `run` is asked about, and what it says of an answer."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from ..common.errors import OptionError
from ..common.options import File, Files, Number, Switch
from .options import PromptText, RawPrompt, SchemaFile

if TYPE_CHECKING:
    from ..session.session import Result
    from ..speedup.stats import Stats

LOSSY = {"similar": "a similar picture", "typical": "typical acceptance"}
"""`Result.lossy` in words."""


@dataclass(frozen=True, kw_only=True)
class RunInputs:
    """What the request is about."""

    image: Annotated[
        list[Path],
        Files(
            group="Input",
            metavar="FILE|DIR",
            help="Image file: JPEG, PNG, WebP, …; - reads standard input. A folder: one line for each of its pictures. Repeat "
            "for models that read several.",
        ),
    ] = field(default_factory=list)
    video: Annotated[
        list[Path],
        Files(
            group="Input",
            metavar="FILE|DIR",
            help="Video file (needs the extra [video]) or folder of pictures, for models that read videos. Repeat for "
            "several.",
        ),
    ] = field(default_factory=list)
    video_fps: Annotated[
        float | None,
        Number(
            group="Input",
            expert=True,
            metavar="FPS",
            help="Frames per second of --video DIR. A file knows its own.",
        ),
    ] = None
    prompt: PromptText = None
    chat: Annotated[
        bool, Switch(group="Input", help="Read turn after turn from standard input, and answer each.")
    ] = False
    memory: Annotated[
        Path | None,
        File(
            group="Speculation",
            expert=True,
            metavar="FILE",
            help="Propose how earlier answers went on, of this file and of this run, and keep the answers there.",
        ),
    ] = None
    schema: SchemaFile = None
    raw: RawPrompt = False

    def check(self, as_json: bool) -> None:
        """Refuse what standard input cannot be at once. Raises `OptionError`."""
        pipes = [self.prompt, *map(str, self.image)].count("-")
        if self.chat and (self.raw or as_json or pipes):
            raise OptionError(
                "--chat reads turns from standard input and writes answers: leave --raw, --json and - out"
            )
        if pipes > 1:
            raise OptionError(
                "--image - and --prompt -: standard input holds one of them; give the other by name"
            )


def report(
    result: Result,
    bundle: str,
    inputs: RunInputs,
    prompt: str | None,
    note: str | None = None,
) -> dict[str, Any]:
    """The JSON of one request (schema: `schemas/run-1.json`)."""
    return {
        "schema_version": 1,
        "bundle": bundle,
        "image": _names(inputs.image),
        "video": _names(inputs.video),
        "prompt": prompt,
        "note": note,
        **result.to_dict(),
    }


def _names(paths: list[Path]) -> str | list[str] | None:
    return [str(path) for path in paths] if len(paths) > 1 else str(paths[0]) if paths else None


def stats_line(stats: Stats) -> str:
    """What drafting did, in the words of `SPECULATION`."""
    judged = (
        "none of the drafted judged"
        if stats.alpha is None
        else f"{100 * stats.alpha:.0f} % of drafted accepted"
    )
    return f"{stats.tau:.1f} tokens per pass, {judged}"


def summary(result: Result) -> str:
    """One line: tokens, speed, and what speculation did."""
    stats = result.stats
    reused = (
        f", {stats.reused_tokens} of {stats.prompt_tokens} prompt tokens kept" if stats.reused_tokens else ""
    )
    if stats.reused_pictures:
        reused += (
            f", {stats.reused_pictures} {'picture' if stats.reused_pictures == 1 else 'pictures'} seen before"
        )
    rate = "" if stats.tokens_per_second is None else f", {stats.tokens_per_second:.1f} tokens/s"
    lossy = (
        ""
        if result.lossy is None
        else f"; LOSSY ({', '.join(LOSSY[way] for way in result.lossy.split(', '))})"
    )
    line = f"{len(result.tokens)} tokens{rate} ({result.finish_reason}){reused}"
    if not stats.proposed:
        return f"{line}; plain decoding{lossy}"
    length = "as many tokens a pass as pay"
    if stats.draft_length is not None:
        length = f"{stats.draft_length} tokens a pass"
    line += f"; {stats_line(stats)}; draft {stats.draft}, {length}"
    return line + lossy
