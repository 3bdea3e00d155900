"""What `--adapter` may be, as far as that shows without PyTorch."""

from __future__ import annotations

from ...runtime.bundle.manifest import ModelInfo
from ...runtime.common.errors import OptionError
from ...runtime.common.optional_deps import need_extra
from ...runtime.common.paths import exists, is_folder
from .aliases import is_hub_id

NONE = "none"
"""Leaves an adapter out that lies beside a model's weights."""

CONFIG = "adapter_config.json"


def check_merged(model: ModelInfo, wanted: str | None) -> None:
    """OptionError for a bundle with an adapter in its weights that is to be compared with the model without."""
    if model.adapter is not None and wanted in (None, NONE):
        raise OptionError(
            f"the bundle was built with the adapter {model.adapter.name}; add --adapter with its folder"
        )


def check_adapter(source: str | None) -> None:
    """OptionError for a name that is neither a folder nor a hub id, and where peft is missing; nothing is opened."""
    if source is None or source == NONE:
        return
    if not is_folder(source):
        if exists(source):
            raise OptionError(f"--adapter {source} is a file; give the folder that holds {CONFIG}")
        if not is_hub_id(source):
            raise OptionError(f"--adapter {source!r:.200}: there is no such folder, and it is no hub id")
    need_extra("adapter", "`--adapter`")
