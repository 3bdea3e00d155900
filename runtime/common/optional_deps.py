"""Extras of the package: which are here, and the command that adds one to this very installation.

The command follows where the package was installed from (PEP 610's `direct_url.json`): a checkout, a wheel, a version
control system, or, where nothing is recorded, an index. It is therefore right before and after the package is on one.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import shlex
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from .errors import OptionError

PACKAGE = "vlmexport"

_EXPORT = ("torch", "transformers", "onnx", "onnxscript", "onnx_ir", "safetensors", "pydantic")

MODULES = {
    "export": _EXPORT,
    "adapter": (*_EXPORT, "peft"),
    "train": (*_EXPORT, "accelerate"),
    "search": (*_EXPORT, "accelerate", "optuna"),
    "eval": ("matplotlib",),
    "captions": ("pycocoevalcap",),
    "data": ("datasets",),
    "video": ("av",),
    "grammar": ("llguidance",),
    "serve": ("starlette", "uvicorn", "msgspec", "prometheus_client"),
    "parquet": ("pyarrow",),
    "ray": ("ray",),
    "compile": ("onnx", "onnx_ir", "ml_dtypes"),
}
"""Extra → modules without which its commands cannot run (tensorboard, which [train] also brings, they can do without).

The first extra that lists a module is the least that installs it."""


def need_extra(extra: str, what: str) -> None:
    """OptionError, naming the extra and the command that installs it, unless its modules are here.

    `what` needs it: "`vlmexport build`", say. Nothing is imported.
    """
    missing = [name for name in MODULES[extra] if importlib.util.find_spec(name) is None]
    if missing:
        verb = "is" if len(missing) == 1 else "are"
        raise OptionError(
            f"{what} needs the extra [{extra}] ({', '.join(missing)} {verb} missing): {install_command(extra)}"
        )


def install_command(extra: str) -> str:
    """The pip command that adds `extra` to this installation."""
    return pip_command(origin(), extra=extra)


def origin() -> dict[str, Any]:
    """What `direct_url.json` holds: where this package was installed from; {}: nothing is recorded."""
    try:
        text = importlib.metadata.distribution(PACKAGE).read_text("direct_url.json")
        content = json.loads(text) if text else {}
    except (importlib.metadata.PackageNotFoundError, json.JSONDecodeError):
        return {}
    return content if isinstance(content, dict) else {}


def folder_of(url: str) -> Path | None:
    """The file or folder that a `file:` URL names; None of another."""
    parts = urlsplit(url)
    return Path(unquote(parts.path)) if parts.scheme == "file" else None


def pip_command(
    origin: dict[str, Any], package: str = PACKAGE, *, extra: str = "", subfolder: str = ""
) -> str:
    """The pip command that installs `package`, with `extra`, from where this package was installed from.

    `origin` is what `direct_url.json` holds ({}: nothing). `subfolder` of a checkout holds `package`.
    """
    extras = f"[{extra}]" if extra else ""
    url = str(origin.get("url") or "")
    if "vcs_info" in origin:
        fragment = f"#subdirectory={subfolder}" if subfolder else ""
        source = f"{package}{extras} @ {origin['vcs_info'].get('vcs', 'git')}+{url}{fragment}"
        return f"pip install {shlex.quote(source)}"
    if not url:
        return f"pip install {shlex.quote(f'{package}{extras}')}"
    place = folder_of(url)
    if place is None and not subfolder:
        return f"pip install {shlex.quote(f'{package}{extras} @ {url}')}"
    if place is None or not (place / subfolder).exists():
        relative = shlex.quote((f"./{subfolder}" if subfolder else ".") + extras)
        gone = place is not None and not place.exists()
        where = f" (that of this installation, {place}, is gone)" if gone else ""
        return f"pip install {relative} in a checkout of {PACKAGE}{where}"
    source = place / subfolder
    options = ["-c", str(source / "constraints.txt")] if (source / "constraints.txt").is_file() else []
    options += ["-e"] if (origin.get("dir_info") or {}).get("editable") else []
    return shlex.join(["pip", "install", *options, f"{source}{extras}"])
