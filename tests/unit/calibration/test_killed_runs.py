"""What a killed training leaves, and what the next run makes of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("accelerate", reason="training needs [train]")

from vlmexport.calibration.features.cache_folder import PROGRESS, read_progress, save_progress
from vlmexport.calibration.features.features import build_cache
from vlmexport.calibration.features.text_cache import build_text_cache
from vlmexport.calibration.training.training_log import lines_until

from tests.support.training_targets import make_records, make_target


class Killed(BaseException):
    """In place of a kill."""


def line(step: int, kind: str = "train") -> bytes:
    return json.dumps({"step": step, "kind": kind, "loss": 0.5}).encode() + b"\n"


LOG = line(1) + line(2) + line(2, "validation") + line(3)


@pytest.mark.parametrize(
    ("log", "step", "kept"),
    [
        (LOG, 2, line(1) + line(2) + line(2, "validation")),
        (LOG, 3, LOG),
        (LOG, 9, LOG),
        (LOG, 0, b""),
        (b"", 5, b""),
        (LOG[:-1], 3, line(1) + line(2) + line(2, "validation")),  # the last line is cut off
        (line(1) + b"{\n" + line(2), 3, line(1)),
        (line(1) + b"[1]\n" + line(2), 3, line(1)),
    ],
)
def test_log_is_truncated_at_the_resumed_step(log: bytes, step: int, kept: bytes) -> None:
    assert lines_until(log, step) == kept


Build = Callable[..., Path]

CACHES: dict[str, tuple[Build, list[Any], list[Any]]] = {
    "rows": (build_cache, [1], [2]),
    "texts": (build_text_cache, [1], [1, 2]),
}
"""Each cache: what makes it, and two choices of layers, whose files are partly the same."""


@pytest.mark.parametrize("what", CACHES)
@pytest.mark.parametrize("passes", [3, 9, 11, 17])
def test_a_cache_that_was_begun_for_other_layers_is_right(what: str, passes: int, tmp_path: Path) -> None:
    """One run is killed behind its first note of progress; another one, with other layers, after some passes; the first goes
    on. No row is one that the other had begun anew."""
    make, first, second = CACHES[what]
    target, records = make_target("llama", tmp_path / "model"), make_records(tmp_path, "llama", 20)
    build: Any = partial(make, target, records, batch_size=1)
    expected = {path.name: path.read_bytes() for path in build(first, tmp_path / "whole").glob("*.bin")}
    run = "rows" if what == "rows" else "texts"
    honest = getattr(target, run)

    def killed_after(count: int) -> Callable[..., Any]:
        left = iter(range(count))

        def limited(*arguments: Any) -> Any:
            if next(left, None) is None:
                raise Killed
            return honest(*arguments)

        return limited

    for layers, count in ((first, 17), (second, passes)):
        setattr(target, run, killed_after(count))
        with pytest.raises(Killed):
            build(layers, tmp_path / "cache")
    setattr(target, run, honest)
    place = build(first, tmp_path / "cache")
    assert {path.name: path.read_bytes() for path in place.glob("*.bin")} == expected
    assert not [path.name for path in place.iterdir() if path.suffix == ".partial" or "progress" in path.name]


def test_progress_belongs_to_its_files(tmp_path: Path) -> None:
    for name in "abc":
        (tmp_path / f"{name}.partial").write_bytes(b"x")
    save_progress(tmp_path, ["a", "b"], 16, rows={"a": 3})
    assert read_progress(tmp_path, ["a", "b"]) == {"files": ["a", "b"], "records": 16, "rows": {"a": 3}}
    assert read_progress(tmp_path, ["b"])["records"] == 16  # a has its name already
    assert read_progress(tmp_path, ["b", "c"]) == {} and not (tmp_path / PROGRESS).exists()
    save_progress(tmp_path, ["a", "b"], 16)
    (tmp_path / "a.partial").unlink()
    assert read_progress(tmp_path, ["a"]) == {}


def test_stale_progress_after_the_end_is_removed(tmp_path: Path) -> None:
    target, records = make_target("llama", tmp_path / "model"), make_records(tmp_path, "llama", 2)
    place = build_cache(target, records, [1], tmp_path / "cache")
    save_progress(place, ["trunk.1", "residuals"], 2)
    assert build_cache(target, records, [1], tmp_path / "cache") == place and not (place / PROGRESS).exists()
    save_progress(place, ["trunk.2", "residuals"], 2)  # another process makes other files now
    assert build_cache(target, records, [1], tmp_path / "cache") == place and (place / PROGRESS).exists()
    assert np.load(place / "offsets.npy").ndim == 1
