"""Options that `run` and `bench` share, and how they become one request."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..common.validation import TYPICAL_DELTA, TYPICAL_EPSILON

if TYPE_CHECKING:
    from PIL.Image import Image

    from ..bundle.manifest import Manifest


log = logging.getLogger(__name__)


def draft_options(
    manifest: Manifest, draft: str | None, draft_length: int | None, draft_nodes: int | None = None
) -> dict[str, Any]:
    """Keyword arguments of `Session.generate` for `--draft`, `--draft-length` and `--draft-nodes`, checked before a
    model is loaded.

    Raises `OptionError` naming what the bundle has.
    """
    from ..common.errors import OptionError

    chosen = manifest.choose_draft(draft)
    options: dict[str, Any] = {}
    for name, value in (("draft_length", draft_length), ("draft_nodes", draft_nodes)):
        if value is None:
            continue
        if not 1 <= value < manifest.widest_tree:
            limit = "max_width" if manifest.verify_width is None else "verify_width"
            raise OptionError(
                f"--{name.replace('_', '-')} {value}: this bundle allows 1 to {manifest.widest_tree - 1} "
                f"({limit} less the pending token)"
            )
        options[name] = value
    if draft is not None:
        options["draft"] = "none" if chosen is None else chosen.name
    return options


def check_plain(draft: str | None, of_drafts: Mapping[str, Any]) -> None:
    """Refuse what `--draft none` makes idle on a command line: options by their flags, None where they are not given.
    Raises `OptionError`."""
    from ..common.errors import OptionError

    idle = [f"{flag} {value}" for flag, value in of_drafts.items() if value is not None]
    if draft == "none" and idle:
        raise OptionError(f"--draft none drafts nothing: leave {' and '.join(idle)} out, or name a draft")


def check_lossy(lossy: str | None, temperature: float, epsilon: float, delta: float) -> None:
    """Refuse `--lossy` on a command line without a temperature, and its numbers without it, where they would do nothing.
    Raises `OptionError`."""
    from ..common.errors import OptionError

    numbers = (("epsilon", epsilon, TYPICAL_EPSILON), ("delta", delta, TYPICAL_DELTA))
    idle = [f"--typical-{name} {value:g}" for name, value, default in numbers if value != default]
    if lossy is None and idle:
        raise OptionError(f"{idle[0]} is of --lossy typical: give it, too, or leave this out")
    if lossy is not None and temperature == 0:
        raise OptionError(
            f"--lossy {lossy}: at temperature 0 it is greedy decoding; give a --temperature above 0, or leave it out"
        )


def tell_idle(temperature: float, of_sampling: Mapping[str, Any]) -> None:
    """Say in one line which options do nothing at temperature 0: options by their flags, None where they are not given."""
    idle = [f"{flag} {value}" for flag, value in of_sampling.items() if value is not None]
    if temperature == 0 and idle:
        log.warning(
            "%s: without effect, at temperature 0 the likeliest token is taken; give a --temperature above 0",
            ", ".join(idle),
        )


def read_prompt(prompt: str | None, raw: bool) -> str | None:
    """The `--prompt` text; `-` reads standard input (`from_pipe`)."""
    from ..families import RawPrompt
    from ..text.prompt import LONGEST, as_text, from_pipe

    if prompt is None:
        return None
    text = from_pipe(sys.stdin.buffer.read(4 * LONGEST + 1)) if prompt == "-" else as_text(prompt)
    return RawPrompt(text) if raw else text


def read_picture(image: Path) -> Image:
    """The `--image` file; `-` reads standard input. What libtiff writes to stderr beside our error is not shown.

    Raises `ImageError`.
    """
    from ..images.load import load_image
    from ..images.quiet import quiet_stderr

    with quiet_stderr():
        if str(image) == "-":
            return load_image(sys.stdin.buffer, name="standard input")
        return load_image(image, name="--image")


def read_media(images: list[Path], videos: list[Path], fps: float | None = None) -> list[Any]:
    """Pictures, read, and videos of `fps` frames a second, not read yet. Raises `ImageError`, `OptionError`."""
    from ..common.errors import OptionError

    found: list[Any] = [read_picture(path) for path in images]
    if videos:
        from ..images.video import Video

        found += [Video(path, fps) for path in videos]
    elif fps is not None:
        raise OptionError(f"--video-fps {fps:g} is of no video; give --video, or leave it out")
    return found
