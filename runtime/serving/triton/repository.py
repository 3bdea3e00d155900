"""Write a model repository of Triton's that serves a bundle."""

from __future__ import annotations

import re
from pathlib import Path

from ...bundle.folder import Bundle
from ...common.atomic_files import is_scratch, write_file
from ...common.errors import OptionError
from ...common.paths import look_at
from ...common.validation import integer
from ...engines import DEVICES
from .config import Parameters, config_text

CONFIG, VERSION, MODEL = "config.pbtxt", "1", "model.py"
"""Names of a model's files; a version is a folder."""

MODEL_TEXT = '''"""A bundle of vlmexport. config.pbtxt says which, and how it is loaded."""

import triton_python_backend_utils
from vlmexport.runtime.serving.triton.model import TritonModel


class TritonPythonModel(TritonModel):
    def __init__(self):
        super().__init__(triton_python_backend_utils)
'''


def write_repository(
    bundle: Path,
    folder: Path,
    name: str | None = None,
    *,
    device: str = "cpu",
    max_batch: int | None = None,
    max_waiting: int = 64,
    threads: int | None = None,
    instances: int = 1,
) -> Path:
    """Write the model `name`, by default called as the bundle's folder, into the model repository `folder`, which is made
    if need be; return the model's folder. `device` and `threads`: as `Session.load` has them. `max_batch` requests are
    decoded together, by default as many as the bundle allows, and `max_waiting` more wait. Triton starts `instances`
    processes, each with a session of its own.

    Raises `BundleError`, `OptionError` also where the repository has a model of that name, and `OSError`.
    """
    opened = Bundle.open(bundle)
    if max_batch is not None:
        max_batch = integer("max_batch (of this bundle)", max_batch, 1, opened.manifest.limits.max_batch)
    if device not in DEVICES:
        raise OptionError(f"unknown device {device!r:.80}; choose one of: {', '.join(DEVICES)}")
    if threads is not None:
        threads = integer("threads", threads, 1)
        if device != "cpu":
            raise OptionError(
                f"threads: {threads} asked for, but device {device!r} computes on a GPU; leave it out"
            )
    parameters = Parameters(
        str(opened.path), device, max_batch, integer("max_waiting", max_waiting, 0), threads
    )
    name = _checked_name(opened.path.resolve().name if name is None else name)
    config = config_text(name, parameters, integer("instances", instances, 1))
    model = _repository(folder, opened) / name
    if model.exists() and not _is_leftover(model):
        raise OptionError(
            f"{model}: the repository has a model of that name; remove it, or give another name or folder"
        )
    (model / VERSION).mkdir(parents=True, exist_ok=True)
    write_file(model / VERSION / MODEL, MODEL_TEXT)
    write_file(model / CONFIG, config)  # last: a model without one is what a kill left
    return model


def _checked_name(name: str) -> str:
    """Names stand in addresses of requests."""
    if not re.fullmatch(r"\w[\w.-]*", name, re.ASCII):
        raise OptionError(
            f"name: {name!r:.80} is no name of a model; give one of letters, digits, '_', '-' and '.'"
        )
    return name


def _repository(folder: Path, bundle: Bundle) -> Path:
    path, kind = look_at(folder, OptionError, "the model repository")
    if kind not in ("folder", "nothing"):
        raise OptionError(f"{path}: is not a folder; name a folder for the model repository")
    if path.resolve().is_relative_to(bundle.path.resolve()):
        raise OptionError(
            f"{path}: lies in the bundle, which may hold nothing else; name another folder for the model repository"
        )
    return path


def _is_leftover(model: Path) -> bool:
    """Whether a folder holds nothing but what a killed `write_repository` left."""
    if not model.is_dir() or model.is_symlink():
        return False
    version = model / VERSION
    rest = [path for path in model.iterdir() if path != version and not is_scratch(path.name, CONFIG)]
    files = list(version.iterdir()) if version.is_dir() else []
    rest += [path for path in files if path.name != MODEL and not is_scratch(path.name, MODEL)]
    written = version / MODEL
    return not rest and (not written.exists() or written.read_text("utf-8", "replace") == MODEL_TEXT)
