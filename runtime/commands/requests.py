"""Options that `run` and `bench` share, and how they become one request."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..common.errors import OptionError
from ..common.options import declared_options
from ..session.options import GenerateOptions
from .option_flags import flag_texts

if TYPE_CHECKING:
    from PIL.Image import Image

    from ..bundle.manifest import Manifest


log = logging.getLogger(__name__)


def check_draft(manifest: Manifest, options: dict[str, Any]) -> None:
    """Compare what `options` ask of drafts with a bundle, before a model is loaded; the draft is then named in full.

    Raises `OptionError` naming what the bundle has.
    """
    draft = manifest.choose_draft(options.get("draft"))
    for name in ("draft_length", "draft_nodes"):
        value = options.get(name)
        if value is not None and not 1 <= value < manifest.widest_tree:
            limit = "max_width" if manifest.verify_width is None else "verify_width"
            raise OptionError(
                f"--{name.replace('_', '-')} {value}: this bundle allows 1 to {manifest.widest_tree - 1} "
                f"({limit} less the pending token)"
            )
    if "draft" in options:
        options["draft"] = "none" if draft is None else draft.name


def check_combinations(options: Mapping[str, Any]) -> None:
    """Refuse flags that another one makes idle, or say in one line that they are. Raises `OptionError`."""
    declared = declared_options(GenerateOptions)
    of_drafts = ("draft_length", "draft_nodes", "adaptive", "confidence_threshold")
    idle = flag_texts(GenerateOptions, {name: options[name] for name in of_drafts if name in options})
    if options.get("draft") == "none" and idle:
        raise OptionError(f"--draft none drafts nothing: leave {' and '.join(idle)} out, or name a draft")
    if options.get("temperature", 0) != 0:
        return
    if "lossy" in options:
        raise OptionError(
            f"--lossy {options['lossy']}: at temperature 0 it is greedy decoding; give a --temperature above 0, or leave it "
            "out"
        )
    sampling = {
        name: value
        for name, value in options.items()
        if declared[name].group == "Sampling" and name != "temperature"
    }
    if sampling:
        log.warning(
            "%s: without effect, at temperature 0 the likeliest token is taken; give a --temperature above 0",
            ", ".join(flag_texts(GenerateOptions, sampling)),
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
    media: list[Any] = [read_picture(path) for path in images]
    if videos:
        from ..images.video import Video

        media += [Video(path, fps) for path in videos]
    elif fps is not None:
        raise OptionError(f"--video-fps {fps:g} is of no video; give --video, or leave it out")
    return media
