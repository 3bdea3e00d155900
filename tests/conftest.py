"""Fixtures that all rooms share."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tiny_bundles import TinyBundle


@pytest.fixture(scope="session")
def tiny_bundle(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], TinyBundle]:
    """`tiny_bundle(name)`: a bundle of `tiny_bundles.BUNDLES`, built once per session at its first use."""
    import tiny_bundles  # torch is imported only by tests that ask

    built: dict[str, TinyBundle] = {}

    def get(name: str) -> TinyBundle:
        if name not in built:
            built[name] = tiny_bundles.build(name, tmp_path_factory.mktemp(f"bundle-{name}"))
        return built[name]

    return get
