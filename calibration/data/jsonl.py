"""JSONL: one record a line."""

from __future__ import annotations

from pathlib import Path

from .entries import gather
from .lines import checked_text, json_lines
from .records import ImageRef, Problems, Record, image_problem


def load_jsonl(path: Path, prompt: str, problems: Problems) -> list[Record]:
    """Objects with `prompt`, `image` (a path relative to the file) and `answer`; all optional but one of them."""
    lines = ((f"{path}:{number}", (number, value)) for number, value in json_lines(path, problems))
    return gather(lines, lambda _, line: [_record(line[1], path, line[0], prompt)], problems)


def _record(value: object, path: Path, number: int, prompt: str) -> Record:
    if not isinstance(value, dict):
        raise ValueError(f"a JSON object is expected, not {type(value).__name__}")
    for name in ("prompt", "image", "answer"):
        if value.get(name) is not None and not isinstance(value[name], str):
            raise ValueError(f"field {name!r} is {value[name]!r:.80}, not a string")
        checked_text(name, value.get(name) or "")
    if not any(value.get(name) for name in ("prompt", "image")):
        raise ValueError("the record has neither 'prompt' nor 'image'")
    image = None
    if value.get("image"):
        file = path.parent / value["image"]
        wrong = image_problem(file)
        if wrong:
            raise ValueError(wrong)
        image = ImageRef(file=str(file))
    text = value.get("prompt")
    return Record(f"line-{number}", prompt if text is None else text, image, value.get("answer"))
