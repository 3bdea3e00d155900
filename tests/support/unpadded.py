"""A planted error: one kind of pass is as wide as its nodes, whatever it should be padded to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from vlmexport.runtime.decoder.decoder import Decoder


def unpadded(name: str, option: str, off: int | None) -> Callable[[pytest.MonkeyPatch], None]:
    """Plants it in the method `name` of the decoder: `option` of its passes, which pads them, is `off` while it runs."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        real = getattr(Decoder, name)

        def wrong(self: Any, *args: Any) -> Any:
            passes = self.passes
            width = getattr(passes, option)
            setattr(passes, option, off)
            try:
                return real(self, *args)
            finally:
                setattr(passes, option, width)

        patch.setattr(Decoder, name, wrong)

    return plant
