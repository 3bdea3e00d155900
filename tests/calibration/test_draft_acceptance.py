"""Acceptance figures against a plain speculative loop that knows nothing of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from vlmexport.calibration.data import RecordSet
from vlmexport.calibration.evaluation.acceptance import greedy_cycles, measure
from vlmexport.calibration.evaluation.plot import plot_by_position
from vlmexport.calibration.evaluation.run import evaluate_drafts
from vlmexport.calibration.targets.target import Target
from vlmexport.calibration.training.config import TrainConfig
from vlmexport.calibration.training.features import LiveFeatures
from vlmexport.calibration.training.run import train_imitation
from vlmexport.exporter.drafts.imitation import ImitationDraft
from vlmexport.runtime.errors import OptionError

LAYER, NEW = 3, 14


@pytest.fixture(scope="module")
def told(target: Target, records: RecordSet) -> RecordSet:
    """The target's own answers."""
    answers = target.generate(list(records), NEW)
    return RecordSet("told", [replace(r, tokens=a) for r, a in zip(records, answers, strict=True)])


@pytest.fixture(scope="module")
def draft(target: Target, told: RecordSet, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A half-trained draft: right sometimes."""
    folder = tmp_path_factory.mktemp("draft")
    train_imitation(target, told, TrainConfig(LAYER, steps=25, lr=3e-3, batch_size=8, warmup=2), folder, told)
    return folder / "best"


def next_token(target: Target, record, text: list[int], network: nn.Module | None) -> int:
    """Greedy next token by a whole pass over `text`; from the draft's layer when a network is given."""
    kept = {}
    layer = target.num_layers if network is None else LAYER
    hook = target.layers[layer - 1].register_forward_hook(
        lambda m, i, o: kept.update(rows=o[0] if isinstance(o, tuple) else o)
    )
    inputs, _ = target._generation_inputs([record])
    with torch.no_grad():
        if "pixel_values" in inputs:
            start = target.model.config.text_config.decoder_start_token_id
            target.model(**inputs, decoder_input_ids=torch.tensor([[start, *text]]))
        else:
            target.model(torch.tensor([inputs["input_ids"][0].tolist() + text]))
        hook.remove()
        rows = kept["rows"][:, -1]
        return int(target.head(rows if network is None else network(rows)).argmax())


def speculate(target: Target, record, network: nn.Module, count: int, d: int) -> dict[str, int]:
    """Draft d tokens, keep those that the target would say, add its own next one; until `count` tokens."""
    text = [next_token(target, record, [], None)]
    found = dict.fromkeys(("cycles", "evaluated", "accepted", "proposed"), 0)
    while len(text) < count:
        found["cycles"] += 1
        drafted = list(text)
        depth = min(d, count - len(text))
        for _ in range(depth):
            drafted.append(next_token(target, record, drafted, network))
        found["proposed"] += depth
        for token in drafted[len(text) :]:
            own = next_token(target, record, text, None)
            found["evaluated"] += 1
            text.append(own)
            if own != token:
                break
            found["accepted"] += 1
        else:
            if len(text) < count:
                text.append(next_token(target, record, text, None))
    assert tuple(text) == record.tokens
    return found


@pytest.mark.parametrize("d", [1, 3])
def test_measure_equals_a_speculative_loop(target: Target, told: RecordSet, draft: Path, d: int):
    network = ImitationDraft.load(draft).network
    some = RecordSet("some", told[:3])
    result = measure(LiveFeatures(target, some, LAYER), network, target.head, d, batch_size=2)
    loops = [speculate(target, r, network, len(r.tokens or ()), d) for r in some]
    for name in ("cycles", "evaluated", "accepted", "proposed"):
        assert getattr(result, name) == sum(loop[name] for loop in loops), name
    assert result.tokens == sum(len(r.tokens or ()) - 1 for r in some)
    assert 0 < result.accepted < result.evaluated  # right sometimes, wrong sometimes


def test_cycles_by_hand():
    one = greedy_cycles([True, True, False, True, True, True, True], 2)
    # (T T) + bonus token in place of F; (T T) + bonus token
    assert (one.cycles, one.evaluated, one.accepted, one.proposed) == (3, [3, 2], [3, 2], 5)
    wrong = greedy_cycles([False] * 4, 3)
    assert (wrong.cycles, wrong.evaluated, wrong.accepted) == (4, [4, 0, 0], [0, 0, 0])
    assert greedy_cycles([], 3).cycles == 0


def test_figures_agree_with_each_other(target: Target, told: RecordSet, draft: Path, tmp_path: Path):
    results = evaluate_drafts(target, told, [f"early-exit@{LAYER}", str(draft)], draft_length=4)
    exit_, trained = results.values()
    assert trained.overlap > exit_.overlap
    for r in results.values():
        assert r.accepted <= r.evaluated <= r.proposed
        assert sum(n for _, _, n in r.by_depth) == r.evaluated
        assert sum(n for _, _, n in r.by_position) == r.tokens
        assert sum(share * n for _, share, n in r.by_position) / r.tokens == pytest.approx(
            r.agreement, abs=1e-4
        )
        assert 1 <= r.tau <= 5
    repeated = RecordSet("many", [replace(r, key=f"{r.key}-{i}") for i in range(3) for r in told])
    plot_by_position(evaluate_drafts(target, repeated, [str(draft)], 4), tmp_path / "figure.png")
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")


def test_the_target_itself_is_always_accepted(target: Target, told: RecordSet):
    last = target.num_layers
    result = measure(LiveFeatures(target, told, last), nn.Identity(), target.head, 4)
    assert result.alpha == result.agreement == 1.0
    assert result.overlap == pytest.approx(1.0, abs=1e-5)


def test_unknown_drafts_are_named(target: Target, told: RecordSet):
    for name in ("early-exit", "early-exit@5", "early-exit@x"):
        with pytest.raises(OptionError, match=r"early-exit@N|--draft-layer 5"):
            evaluate_drafts(target, told, [name])
