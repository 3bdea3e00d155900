"""Where the tiny models are: in the distribution vlmexport-tiny-models, which a robot does not need.

It is made from `models/` and holds files, no code. Nothing here imports it, nor PyTorch.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

from ...runtime.common.errors import OptionError
from ...runtime.common.optional_deps import PACKAGE, origin, pip_command

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
    return pip_command(origin(), DISTRIBUTION, subfolder="models")
