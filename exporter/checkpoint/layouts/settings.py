"""The values of a `quantization_config`, each checked when it is read: strangers wrote them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ....runtime.common.errors import UnsupportedModelError

REMEDY = "give the original in float32, float16 or bfloat16"


class Settings:
    """One object of a `quantization_config`. `where`: the file or folder that an error names first."""

    def __init__(self, values: Mapping[str, Any], where: str, method: Any = "") -> None:
        self._values, self._where = values, where
        self.method = method

    def refuse(self, why: str) -> UnsupportedModelError:
        """The error that names the method, the bits where they are told, why, and the remedy."""
        bits = self._values.get("bits", self._values.get("w_bit", self._values.get("num_bits")))
        told = f", {bits} bits" if type(bits) is int else ""
        return UnsupportedModelError(
            f"{self._where}: quantized by {self.method!r:.80}{told}: {why}; {REMEDY}"
        )

    def whole(self, name: str, default: int | None = None) -> int | None:
        """A whole number; `default` where there is none."""
        value = self._values.get(name)
        if value is None:
            return default
        if type(value) is not int:
            raise self.refuse(f"{name}={value!r:.80} is no whole number")
        return value

    def flag(self, name: str, default: bool) -> bool:
        """True or false; `default` where it is neither told."""
        value = self._values.get(name)
        if value is None:
            return default
        if type(value) is not bool:
            raise self.refuse(f"{name}={value!r:.80} is neither true nor false")
        return value

    def text(self, name: str, default: str = "") -> str:
        """A string in lower case; `default` where there is none."""
        value = self._values.get(name)
        if value is None:
            return default
        if not isinstance(value, str):
            raise self.refuse(f"{name}={value!r:.80} is no text")
        return value.lower()

    def part(self, name: str) -> Settings | None:
        """An object in it; None where there is none, or an empty one."""
        value = self._values.get(name)
        if not value:
            return None
        if not isinstance(value, dict):
            raise self.refuse(f"{name}={value!r:.80} is no object")
        return Settings(value, self._where, self.method)

    def parts(self, name: str) -> list[Settings]:
        """The objects in an object, as `dynamic` and `config_groups` hold them; values that are no objects are left out."""
        inner = self.part(name)
        if inner is None:
            return []
        return [
            Settings(value, self._where, self.method)
            for value in inner._values.values()
            if isinstance(value, dict)
        ]

    def told(self, name: str) -> bool:
        """Whether there is something under that name: not null, false, 0 or empty."""
        return bool(self._values.get(name))

    def sizes(self, name: str) -> tuple[int, int] | None:
        """A pair of positive whole numbers; None where there is none."""
        value = self._values.get(name)
        if value is None:
            return None
        if not (
            isinstance(value, list | tuple)
            and len(value) == 2
            and all(type(v) is int and v > 0 for v in value)
        ):
            raise self.refuse(f"{name}={value!r:.80} is no pair of sizes")
        return value[0], value[1]
