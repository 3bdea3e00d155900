"""`vlmexport run --image DIR`: a line for every picture of a folder."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..common.errors import ImageError, OptionError, PromptError
from ..common.paths import look_at
from .requests import read_picture

if TYPE_CHECKING:
    from PIL.Image import Image

    from ..session.session import Session

log = logging.getLogger(__name__)


def the_folder(images: Sequence[Path], alone: bool) -> list[Path] | None:
    """The pictures of the folder that `--image` names; None where it names files. `alone`: no option brings others.

    Raises `OptionError` for a folder beside other pictures, `ImageError` for one without pictures.
    """
    from ..images.folder import picture_files

    folder = next((path for path in images if look_at(path, ImageError, "--image")[1] == "folder"), None)
    if folder is None:
        return None
    if len(images) > 1 or not alone:
        raise OptionError(
            f"--image {folder}: a folder is answered picture by picture; give it alone, or each picture by --image FILE"
        )
    return picture_files(folder)


def first_readable(pictures: Sequence[Path]) -> tuple[Path, Image]:
    """The first picture that can be read, and what is in it. Raises `ImageError` of the first of all where none can."""
    refused = None
    for path in pictures:
        try:
            return path, read_picture(path)
        except ImageError as error:
            refused = refused or error
    assert refused is not None
    raise refused


def answer_each(
    session: Session,
    pictures: Sequence[Path],
    prompt: str | None,
    options: Mapping[str, Any],
    bundle: str | None,
    known: tuple[Path, Image],
) -> None:
    """Write a line per picture: its name, a tab, the text in one line; with `bundle`, how the JSON calls it, one JSON object.
    One is `known`: read already.
    A picture that cannot be read, or does not fit, is told of on stderr, and the others are answered.

    Raises `ImageError` at the end where any could not be answered.
    """
    from .run_report import RunInputs, report, summary

    bad = 0
    for path in pictures:
        try:
            picture = known[1] if path == known[0] else read_picture(path)
            result = session.generate(picture, prompt, **options)
        except (ImageError, PromptError) as error:
            message = str(error)
            log.error("%s", message if str(path) in message else f"{path}: {message}")
            bad += 1
            continue
        if bundle is None:
            line = f"{path.name}\t{' '.join(result.text.split())}"
        else:
            document = report(result, bundle, RunInputs(image=[path]), prompt, session.note)
            line = json.dumps(document, ensure_ascii=False, allow_nan=False)
        sys.stdout.write(line + "\n")
        sys.stdout.flush()
        log.log(logging.DEBUG if result.lossy is None else logging.INFO, "%s: %s", path.name, summary(result))
    if bad:
        raise ImageError(f"{bad} of {len(pictures)} pictures could not be answered; the others were")
