"""`vlmexport run --chat`: turns from standard input, answers on standard output."""

from __future__ import annotations

import logging
import shlex
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ..common.errors import InputError, OptionError, PromptError

if TYPE_CHECKING:
    from ..session.session import Session

log = logging.getLogger(__name__)

HELP = "/image FILE and /video FILE|DIR show it with your next words, /help says this, /quit or the end of input ends"


def converse(
    session: Session, prompt: str | None, media: list[Any], generate_kwargs: dict[str, Any], fps: float | None
) -> None:
    """Answers turn after turn; the first is `prompt` where there is one, and shows `media`. What cannot be answered is
    said on stderr, and the conversation goes on.

    Raises `PromptError` for a bundle that holds no conversation.
    """
    from .run_report import summary

    chat = session.chat()
    chat.check()
    log.info(HELP)
    for words in _turns(prompt):
        if words.startswith("/"):
            command, *names = _split(words)
            if command in ("/quit", "/exit"):
                return
            if command in ("/image", "/video") and names:
                media += _shown(command, names, fps)
            else:
                print(f"{command}: {HELP}" if command != "/help" else HELP, file=sys.stderr)
            continue
        try:
            result = chat.say(words, media, on_text=_write, **generate_kwargs)
        except InputError as error:
            print(f"error: {error}", file=sys.stderr)
            media = []
            continue
        _write("\n")
        log.info(summary(result))
        media = []


def _turns(prompt: str | None) -> Iterator[str]:
    """What the user says, without empty lines."""
    if prompt is not None:
        yield prompt
    asks = sys.stdin.isatty() and sys.stderr.isatty()
    while True:
        if asks:
            print("> ", end="", file=sys.stderr, flush=True)
        try:
            line = sys.stdin.readline()
        except UnicodeDecodeError as error:
            raise PromptError(f"standard input is not {error.encoding}: UTF-16? give UTF-8") from error
        if not line:
            return
        if words := line.removeprefix("\ufeff").strip():  # a byte order mark, as some shells write
            yield words


def _split(words: str) -> list[str]:
    try:
        return shlex.split(words)
    except ValueError:  # a quote that is not closed
        return words.split()


def _shown(command: str, names: list[str], fps: float | None) -> list[Any]:
    from pathlib import Path

    from .requests import read_media

    try:
        return read_media(
            [Path(name) for name in names if command == "/image"],
            [Path(name) for name in names if command == "/video"],
            fps if command == "/video" else None,
        )
    except (InputError, OptionError) as error:
        print(f"error: {error}", file=sys.stderr)
        return []


def _write(piece: str) -> None:
    sys.stdout.write(piece)
    sys.stdout.flush()
