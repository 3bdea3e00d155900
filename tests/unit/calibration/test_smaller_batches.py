"""Fewer records at once where a GPU's memory runs out: the same answers and figures, and one line."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from vlmexport.calibration.data import RecordSet
from vlmexport.calibration.evaluation import draft_measures, ranking, skipped
from vlmexport.calibration.evaluation.acceptance import Acceptance
from vlmexport.calibration.evaluation.run import evaluate_drafts
from vlmexport.calibration.generation.answers import GenerationOptions
from vlmexport.calibration.generation.torch_answers import TorchAnswers
from vlmexport.calibration.targets.batches import Batches
from vlmexport.calibration.targets.target import Target
from vlmexport.calibration.targets.teacher_forcing import Rows
from vlmexport.exporter.drafts.layer_skip import DraftAndVerify
from vlmexport.exporter.families.common.layer_skip import Sublayers
from vlmexport.runtime.common.errors import CapacityError

from tests.support.training_targets import make_records, make_target

NEW = 8


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return make_target("llama", tmp_path_factory.mktemp("batches") / "model")


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> RecordSet:
    return make_records(tmp_path_factory.mktemp("data"), "llama", 11)


def holding(most: int, work: Callable[..., Any]) -> Callable[..., Any]:
    """`work` on a GPU that holds `most` items: with more it fails at its end, when all else that it does is done."""

    def limited(*args: Any, **kwargs: Any) -> Any:
        found = work(*args, **kwargs)
        if len(args[0]) > most:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.\nMore")
        return found

    return limited


def rounded(found: Mapping[str, Acceptance]) -> dict[str, Acceptance]:
    """Sums of other parts are rounded otherwise."""
    return {name: replace(one, overlap=round(one.overlap, 5)) for name, one in found.items()}


def test_a_part_that_does_not_fit_is_halved_for_good_and_said_once():
    sizes: list[int] = []
    lines: list[str] = []

    def add(some: Sequence[int]) -> list[int]:
        sizes.append(len(some))
        return [one + 1 for one in some]

    batches = Batches(8, lines.append)
    found = [each for _, part in batches.over(range(10), holding(3, add)) for each in part]
    assert found == list(range(1, 11)) and sizes == [8, 4, 2, 2, 2, 2, 2] and batches.size == 2
    assert lines == ["memory ran out with 8 records at once: now 2; --batch-size 2 begins with as many"]
    assert [place.stop for place, _ in batches.over(range(3), add)] == [2, 3] and len(lines) == 1
    with pytest.raises(
        CapacityError, match=r"no memory for one of the records alone \(CUDA out of memory.*--device cpu"
    ):
        list(Batches(8).over(range(10), holding(0, add)))


def test_answers_are_those_of_smaller_batches(
    target: Target, records: RecordSet, monkeypatch: pytest.MonkeyPatch
):
    limits, lines = GenerationOptions(NEW), []
    wanted = list(TorchAnswers(target, 2).answer(list(records), limits))
    monkeypatch.setattr(target, "generate", holding(3, target.generate))
    assert list(TorchAnswers(target, report=lines.append).answer(list(records), limits)) == wanted
    assert lines == ["memory ran out with 128 records at once: now 3; --batch-size 3 begins with as many"]


def test_figures_are_those_of_smaller_batches(
    target: Target, records: RecordSet, monkeypatch: pytest.MonkeyPatch
):
    """Nothing is counted twice, whichever of several drafts it was that found no memory."""
    skipping = DraftAndVerify(skip=Sublayers((1,), (3,)))
    monkeypatch.setattr(draft_measures, "open_draft", lambda path: skipping)
    names, lines = ["early-exit@2", "early-exit@4", "skipping"], []
    wanted = rounded(evaluate_drafts(target, records, names, 3, NEW))
    monkeypatch.setattr(target, "generate", holding(6, target.generate))
    add, step = draft_measures.MeasuredSelfDraft.add, skipped._Drafting.step

    def counted(self: Any, trunk: torch.Tensor, own: torch.Tensor, rows: Rows) -> None:
        holding(20 if self.layer == 4 else 999, lambda rows: add(self, trunk, own, rows))(rows)

    def drafted(self: Any, ids: torch.Tensor) -> torch.Tensor:
        return holding(2 if self._step else 999, lambda ids: step(self, ids))(ids)

    monkeypatch.setattr(draft_measures.MeasuredSelfDraft, "add", counted)
    monkeypatch.setattr(skipped._Drafting, "step", drafted)
    assert rounded(evaluate_drafts(target, records, names, 3, NEW, report=lines.append)) == wanted
    assert [line[:43] for line in lines if "ran out" in line] == [
        "memory ran out with 64 records at once: now"
    ] * 2


def test_ranks_are_those_of_smaller_batches(
    target: Target, records: RecordSet, monkeypatch: pytest.MonkeyPatch
):
    texts = ("a cup", "the red cup", "table", "a", "on the table")
    wanted = ranking.log_probabilities(target, records[0], texts)
    decode, sizes = ranking._Prefix.log_probabilities, []

    def limited(self: Any, answers: Sequence[tuple[int, ...]]) -> list[float]:
        sizes.append(len(answers))
        return holding(2, lambda some: decode(self, some))(answers)

    monkeypatch.setattr(ranking._Prefix, "log_probabilities", limited)
    # Sums of up to 90 in float32, whose neighbours are 7.6e-6 apart: how they are rounded depends on the processor.
    assert ranking.log_probabilities(target, records[0], texts) == pytest.approx(wanted, rel=5e-7, abs=1e-5)
    assert sizes == [5, 3, 2, 2, 1]
