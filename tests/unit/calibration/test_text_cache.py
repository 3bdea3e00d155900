"""Whole texts kept in files are those of the target, whatever was killed or added."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor
from vlmexport.calibration.data import RecordSet
from vlmexport.calibration.features import text_cache
from vlmexport.calibration.features.features import build_cache
from vlmexport.calibration.features.text_cache import CachedTexts, build_text_cache
from vlmexport.calibration.objectives import options_of
from vlmexport.calibration.objectives.training_options import LoopOptions
from vlmexport.calibration.targets.target import Target
from vlmexport.calibration.targets.teacher_forcing import Texts
from vlmexport.calibration.training.run import FeatureCache, train_draft
from vlmexport.runtime.common import locks
from vlmexport.runtime.common.errors import OptionError

from tests.support.training_targets import make_records, make_target, with_answers

TAPS = (1, 3)


@pytest.fixture(scope="module")
def told(target: Target, records: RecordSet) -> RecordSet:
    """Answers of different lengths, one of a single token among them."""
    answers = [tuple(range(5, 6 + 3 * (i % 4))) for i in range(len(records))]
    return with_answers(records, answers)


def assert_same(found: Texts, live: Texts) -> None:
    assert torch.equal(found.tokens, live.tokens) and torch.equal(found.learned, live.learned)
    assert list(found.lengths) == list(live.lengths)
    for mine, theirs in ((found.hidden, live.hidden), (found.embedded, live.embedded)):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)
    assert (found.positions is None) == (live.positions is None)
    assert found.positions is None or torch.equal(found.positions, live.positions)
    assert sorted(found.taps) == sorted(live.taps)
    for tap, rows in live.taps.items():
        torch.testing.assert_close(found.taps[tap], rows, rtol=1e-4, atol=1e-4)
    for mine, theirs in zip(found.pictures, live.pictures, strict=True):
        assert [place for place, _ in mine] == [place for place, _ in theirs]
        for (_, a), (_, b) in zip(mine, theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_cached_texts_are_live_texts(target: Target, told: RecordSet, tmp_path: Path) -> None:
    folder = build_text_cache(target, told, TAPS, tmp_path, "float32", batch_size=3)
    cached = CachedTexts(folder, target, TAPS)
    assert len(cached) == len(told)
    for indices in ([0], [4, 1, 1], list(range(len(told)))):
        live = target.texts([told[i] for i in indices], TAPS)
        assert_same(cached.rows(indices), live)
    assert {False, True} == {bool(row.any()) for row in cached.rows(range(len(told))).learned}


@pytest.mark.parametrize(("build", "passes"), [(build_cache, "rows"), (build_text_cache, "texts")])
def test_concurrent_caches_are_built_once(
    build: Callable[..., Path],
    passes: str,
    target: Target,
    told: RecordSet,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("fcntl", reason="there are no such locks here")
    run, calls, begun, waited = getattr(target, passes), [], threading.Event(), threading.Event()

    def slow(*arguments: Any) -> Any:
        calls.append(arguments)
        begun.set()
        assert waited.wait(60)
        return run(*arguments)

    monkeypatch.setattr(target, passes, slow)
    monkeypatch.setattr(locks, "PATIENCE", 0.01)
    monkeypatch.setattr(locks.log, "warning", lambda *_: waited.set())
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(build, target, told, TAPS, tmp_path, "float32", len(told))
        assert begun.wait(60)
        second = pool.submit(build, target, told, TAPS, tmp_path, "float32", len(told))
        assert first.result() == second.result()
    assert len(calls) == 1


@pytest.mark.parametrize("build", [build_cache, build_text_cache])
def test_a_cache_is_made_where_there_are_no_locks(
    build: Callable[..., Path],
    target: Target,
    told: RecordSet,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Not a function of this module, whose exception would be the program's own.
    refuse = Mock(side_effect=OSError(errno.ENOLCK, os.strerror(errno.ENOLCK)))
    monkeypatch.setattr(pytest.importorskip("fcntl"), "flock", refuse)
    assert (build(target, told, TAPS, tmp_path, "float32") / "cache.json").exists()


def test_a_finished_cache_may_be_read_only(target: Target, told: RecordSet, tmp_path: Path) -> None:
    folder = build_text_cache(target, told, TAPS, tmp_path, "float32")
    (folder / "lock").unlink()
    assert build_text_cache(target, told, TAPS, tmp_path, "float32") == folder
    assert not (folder / "lock").exists()


@pytest.mark.parametrize("kind", ["llava", "qwen2.5-vl", "llama"])
def test_pictures_are_kept(kind: str, tmp_path: Path) -> None:
    target = make_target(kind, tmp_path / "model")
    seen = list(make_records(tmp_path, kind if target.family.vision is None else "blip2-t5"))[:4]
    told = with_answers(seen, [(5, 6, 7 + i) for i in range(len(seen))])
    folder = build_text_cache(target, told, (), tmp_path / "cache", "float32", batch_size=2)
    live = target.texts([told[i] for i in (3, 0)])
    assert any(live.pictures) == (target.family.vision is not None)
    assert_same(CachedTexts(folder, target).rows([3, 0]), live)


def test_a_killed_build_goes_on_and_taps_are_added(
    target: Target, told: RecordSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = build_text_cache(target, told, TAPS, tmp_path / "whole", "float32", batch_size=1)
    monkeypatch.setattr(text_cache, "SAVED_EVERY", 2)
    calls: list[int] = []
    real: Callable[..., Texts] = target.texts

    def run(several: object, taps: object) -> Texts:
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return real(several, taps)  # type: ignore[arg-type]

    monkeypatch.setattr(target, "texts", run)
    with pytest.raises(KeyboardInterrupt):
        build_text_cache(target, told, (1,), tmp_path / "killed", "float32", batch_size=1)
    killed = build_text_cache(target, told, (1,), tmp_path / "killed", "float32", batch_size=1)
    assert len(calls) == 4 + len(told) - 2, "it goes on behind what was saved"
    assert killed.name == whole.name
    build_text_cache(target, told, TAPS, tmp_path / "killed", "float32", batch_size=1)
    assert len(calls) == 4 + 2 * len(told) - 2, "a further layer is one more pass"
    build_text_cache(target, told, (3,), tmp_path / "killed", "float32", batch_size=1)
    assert len(calls) == 4 + 2 * len(told) - 2, "what is complete is kept"
    files = sorted(path.name for path in whole.iterdir())
    assert files == sorted(path.name for path in killed.iterdir())
    for name in files:
        assert (whole / name).read_bytes() == (killed / name).read_bytes(), name


def test_rows_beyond_float16_are_refused(target: Target, told: RecordSet, tmp_path: Path) -> None:
    real: Callable[..., Texts] = target.texts

    def grown(several: object, taps: object) -> Texts:
        found = real(several, taps)  # type: ignore[arg-type]
        return replace(found, hidden=found.hidden * 1e9)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(target, "texts", grown)
        with pytest.raises(OptionError, match="beyond float16; use --cache-dtype float32"):
            build_text_cache(target, told, (), tmp_path)
    with pytest.raises(OptionError, match="--cache-dtype 'int8'"):
        build_text_cache(target, told, (), tmp_path, "int8")


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_a_draft_of_cached_texts_is_that_of_live_ones(
    kind: str, target: Target, told: RecordSet, tmp_path: Path
) -> None:
    """To the rounding of another batch's padding; the target is not run in a step."""
    options = options_of(kind).of({"own_steps": 1})
    loop = LoopOptions(steps=3, batch_size=4, warmup=1, lr=1e-3)

    def weights(name: str, cache: Path | None) -> dict[str, Tensor]:
        draft = train_draft(
            target, told, options, loop, tmp_path / name, told, FeatureCache(cache, "float32")
        )
        return dict(draft.network.state_dict())  # type: ignore[attr-defined]

    live, cached = weights("live", None), weights("cached", tmp_path / "cache")
    for name, value in live.items():
        torch.testing.assert_close(cached[name], value, rtol=1e-2, atol=1e-4)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(target, "texts", None)
        again = weights("again", tmp_path / "cache")
    assert all(torch.equal(again[name], value) for name, value in cached.items())
