"""Files of models: a folder that is replaced while others may read it, what every model puts there, and names of contents."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformers import GenerationConfig, PreTrainedModel


@contextmanager
def replace_files(folder: Path) -> Iterator[Path]:
    """Yields a folder beside `folder` to write into; its files then replace those in `folder`, each in one move."""
    scratch = folder.with_name(folder.name + ".new")
    yield scratch
    folder.mkdir(parents=True, exist_ok=True)
    for item in sorted(scratch.iterdir()):
        item.chmod(0o644)
        item.replace(folder / item.name)
    scratch.rmdir()


@contextmanager
def half_in(folder: Path, model: PreTrainedModel, **generation: Any) -> Iterator[Path]:
    """As `replace_files`, with the model's weights in fp16 and what ``generation_config.json`` is to say written already; the
    model stays as it is."""
    with replace_files(folder) as scratch:
        half = copy.deepcopy(model).half()
        half.generation_config = GenerationConfig(**generation)
        half.save_pretrained(scratch)
        yield scratch


def digest(path: Path) -> str:
    """A short name for what a file holds."""
    return hashlib.sha256(path.read_bytes()).hexdigest()[:12]
