"""What `--adapter` may be, as far as that shows without PyTorch."""

from __future__ import annotations

from pathlib import Path

from ..runtime.errors import OptionError
from ..runtime.extras import need_extra
from .aliases import HUB_ID

NONE = "none"
"""Leaves an adapter out that lies beside a model's weights."""

CONFIG = "adapter_config.json"


def check_adapter(source: str | None) -> None:
    """OptionError for a name that is neither a folder nor a hub id, and where peft is missing; nothing is opened."""
    if source is None or source == NONE:
        return
    folder = Path(source)
    if not folder.is_dir():
        if folder.exists():
            raise OptionError(f"--adapter {source} is a file; give the folder that holds {CONFIG}")
        if source.startswith(".") or not HUB_ID.fullmatch(source):
            raise OptionError(f"--adapter {source!r:.200}: there is no such folder, and it is no hub id")
    need_extra("adapter", "`--adapter`")
