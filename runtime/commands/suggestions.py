"""What people type who know other tools, and what they will find here."""

from __future__ import annotations

import re
from typing import Any

from ..images.endings import is_picture

_HELP = "`vlmexport --help` lists the commands, `vlmexport COMMAND --help` the options of one"
_STREAM = (
    "`vlmexport run` writes the text while it is produced, without an option (in Python: `Session.stream`)"
)
_QUANTIZE = (
    "`vlmexport build --weights int8|int4` rounds a model's matrices; `vlmexport quantize --model MODEL --data DATA -o DIR` "
    "chooses their integers by data"
)
_RUN = "`vlmexport run BUNDLE --image FILE`"
_IMAGE = "`--image FILE`, once for each picture"

WORDS = {
    "server": "`vlmexport serve BUNDLE`", "stream": _STREAM, "quantise": _QUANTIZE, "quant": _QUANTIZE,
    "chat": "`vlmexport run BUNDLE --chat`", "help": _HELP, "version": "`vlmexport --version`",
    "export": "`vlmexport build --model MODEL -o BUNDLE`; `vlmexport export-draft` writes a draft for other engines",
    "convert": "`vlmexport build --model MODEL -o BUNDLE`",
    "generate": f"{_RUN}; `vlmexport generate-data` writes a model's answers to train drafts on",
    "infer": _RUN, "benchmark": "`vlmexport bench BUNDLE`", "list": "`vlmexport models`", "info": "`vlmexport inspect BUNDLE`",
}  # fmt: skip
"""A command or an option that does not exist, without dashes → what to do."""

OF_PICTURES = {"images": _IMAGE, "img": _IMAGE, "i": _IMAGE}
"""The same of an option where the command has `--image`."""


def suggestion(error: Exception) -> str | None:
    """One line for an error of use (of click, by its attributes) whose word is in `WORDS`, or is a picture without its
    option; None for others, which have suggestions of their own."""
    message = str(getattr(error, "message", ""))
    wrong = _wrong(error, message)
    command = getattr(getattr(error, "ctx", None), "command", None)
    sees = any("--image" in option.opts for option in getattr(command, "params", ()))
    if wrong is not None:
        words = WORDS | OF_PICTURES if sees and wrong.startswith("-") else WORDS
        known = words.get(wrong.lstrip("-").lower())
        return None if known is None else f"{wrong}: {known}"
    extra = re.fullmatch(r"Got unexpected extra arguments?(?:\(s\))? \((.*)\)", message)
    if extra is None or not sees:
        return None
    words = extra[1].split()
    if not all(map(is_picture, words)):
        return None
    return f"{extra[1]}: a picture is given by its option: {' '.join(f'--image {word}' for word in words)}"


def _wrong(error: Any, message: str) -> str | None:
    """The option or command that does not exist."""
    option = getattr(error, "option_name", None)
    if option is not None and message.lower().startswith("no such option"):
        return str(option)
    command = re.fullmatch(r"No such command '(.*?)'\..*", message)
    return None if command is None else command[1]
