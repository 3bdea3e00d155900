"""Rows that no sequence holds are garbage: whoever looks at a rejected row, or at one of an earlier request, is caught."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from vlmexport.runtime.decoder.decoder import Decoder
from vlmexport.runtime.decoder.kv_cache import KVArena

from tests.support.engines.emulated import Asked
from tests.support.engines.recording_device import RecordingDevice


def spoil_scratch(decoder: Decoder, device: RecordingDevice | Asked) -> None:
    """From now on the device overwrites what `decoder` has given up, as soon as it has."""
    arenas = [decoder.arena]
    if decoder.encoder is not None:
        arenas.append(decoder.encoder.arena)

    def spoil(arena: KVArena, row: int, lengths: Sequence[int]) -> None:
        if lengths:
            for layer in range(len(arena.layers)):
                for view in arena.views(layer, row, len(lengths)).values():
                    device.spoil(view, list(lengths))

    def rejected(arena: KVArena) -> None:
        spoil(arena, 0, arena.lengths[: arena.batch])

    def everything(*_: Any) -> None:
        for arena in arenas:
            spoil(arena, 0, [0] * arena.max_batch)

    def last_place(*_: Any) -> None:
        for arena in arenas:
            spoil(arena, arena.batch + arena.staged, [0])

    def of_one(tree: Any, path: Any, row: int = 0) -> None:
        spoil(decoder.arena, row, [decoder.arena.lengths[row]])

    _after(decoder, "accept", of_one)
    _after(decoder, "accept_all", lambda *_: rejected(decoder.arena))
    _after(decoder, "reset", everything)
    _after(decoder, "remove", last_place)
    _after(decoder.arena, "_grow", lambda *_: rejected(decoder.arena))


def _after(owner: Any, name: str, then: Callable[..., None]) -> None:
    """Calls `then` with the same arguments after each call of the method, which tests may have replaced meanwhile."""

    def both(*args: Any) -> Any:
        result = getattr(type(owner), name)(owner, *args)
        then(*args)
        return result

    setattr(owner, name, both)
