"""Where the tiny models are: in the distribution vlmexport-tiny-models, which a robot does not need.

It is made from `models/` and holds files, no code. Nothing here imports it, nor PyTorch.
"""

from __future__ import annotations

import importlib.util
import shlex
from pathlib import Path
from typing import Any

from ...runtime.common.errors import OptionError
from ...runtime.common.optional_deps import PACKAGE, folder_of, origin

DISTRIBUTION = f"{PACKAGE}-tiny-models"
_MODULE = DISTRIBUTION.replace("-", "_")


def find_tiny_models() -> Path | None:
    """The folder that holds the tiny models and their drafts; None where they are not installed."""
    spec = importlib.util.find_spec(_MODULE)
    return Path(spec.origin).parent if spec is not None and spec.origin else None


def tiny_model(name: str) -> Path:
    """The folder of one of them. Raises OptionError, with the command that installs it, where it is not there."""
    models = find_tiny_models()
    if models is None or not (models / name).is_dir():
        raise OptionError(
            f"model {name!r} is a part of {DISTRIBUTION}, which is not installed: {install_command()}"
        )
    return models / name


def install_command() -> str:
    """The pip command that adds the tiny models to this installation."""
    return command_for(origin())


def command_for(origin: dict[str, Any]) -> str:
    """As `install_command`, for what `direct_url.json` holds ({}: nothing)."""
    url = str(origin.get("url") or "")
    if "vcs_info" in origin:
        source = f"{DISTRIBUTION} @ {origin['vcs_info'].get('vcs', 'git')}+{url}#subdirectory=models"
        return f"pip install {shlex.quote(source)}"
    if not url:
        return f"pip install {DISTRIBUTION}"
    place = folder_of(url)
    if place is None or not (place / "models").is_dir():
        return f"pip install ./models in a checkout of {PACKAGE}"
    editable = ["-e"] if (origin.get("dir_info") or {}).get("editable") else []
    return shlex.join(["pip", "install", *editable, str(place / "models")])
