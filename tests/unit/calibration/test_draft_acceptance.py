"""Acceptance figures against a plain speculative loop that knows nothing of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from vlmexport.calibration.data import RecordSet
from vlmexport.calibration.evaluation import plot
from vlmexport.calibration.evaluation.acceptance import Acceptance, greedy_cycles, measure
from vlmexport.calibration.evaluation.plot import plot_by_position
from vlmexport.calibration.evaluation.run import evaluate_drafts
from vlmexport.calibration.features.features import LiveFeatures
from vlmexport.calibration.targets.target import Target
from vlmexport.calibration.targets.teacher_forcing import hidden_states_kept
from vlmexport.calibration.training.run import train_draft
from vlmexport.exporter.drafts.imitation.imitation import ImitationDraft
from vlmexport.runtime.common.errors import OptionError

from tests.support.training_targets import logits_after, options, own_answers

LAYER, NEW = 3, 14


@pytest.fixture(scope="module")
def told(target: Target, records: RecordSet) -> RecordSet:
    """The target's own answers."""
    return own_answers(target, records, NEW)


@pytest.fixture(scope="module")
def draft(target: Target, told: RecordSet, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A half-trained draft: right sometimes."""
    folder = tmp_path_factory.mktemp("draft")
    train_draft(target, told, *options(LAYER, steps=14, lr=3e-3, batch_size=8, warmup=2), folder, told)
    return folder / "best"


def next_token(target: Target, record, text: list[int], network: nn.Module | None) -> int:
    """Greedy next token by a whole pass over `text`; from the draft's layer when a network is given."""
    layer = target.num_layers if network is None else LAYER
    with (
        torch.no_grad(),
        hidden_states_kept(target.layers, target.final_norm, [layer], nn.Identity()) as kept,
    ):
        logits_after(target, record, text)
        rows = kept[layer][:, -1]
        return int(target.head(rows if network is None else network(rows)).argmax())


def speculate(target: Target, record, network: nn.Module, limit: int, d: int) -> dict[str, int]:
    """Draft d tokens, keep those that the target would say, add its own next one; until the end or `limit` tokens.

    As the runtime does: the last pass gives a token itself, so at most `limit` − 1 are drafted, and a draft ends with
    an end token.
    """
    text = [next_token(target, record, [], None)]
    found = dict.fromkeys(("cycles", "evaluated", "accepted"), 0)
    while len(text) < limit and text[-1] not in target.eos_token_ids:
        found["cycles"] += 1
        drafted = list(text)
        for _ in range(min(d, limit - len(text) - 1)):
            drafted.append(next_token(target, record, drafted, network))
            if drafted[-1] in target.eos_token_ids:
                break
        for token in drafted[len(text) :]:
            own = next_token(target, record, text, None)
            found["evaluated"] += 1
            text.append(own)
            if own != token:
                break
            found["accepted"] += 1
        else:
            text.append(next_token(target, record, text, None))
    ends = [i for i, token in enumerate(text) if token in target.eos_token_ids]
    assert tuple(text[: ends[0] + 1] if ends else text) == record.tokens
    return found


@pytest.mark.parametrize("d", [1, 3])
def test_measure_equals_a_speculative_loop(target: Target, told: RecordSet, draft: Path, d: int):
    network = ImitationDraft.load(draft).network
    some = RecordSet("some", told[:3])
    result = measure(LiveFeatures(target, some, LAYER), network, target, d, batch_size=2)
    loops = [speculate(target, r, network, NEW, d) for r in some]
    for name in ("cycles", "evaluated", "accepted"):
        assert getattr(result, name) == sum(loop[name] for loop in loops), name
    assert result.tau == (result.accepted + result.cycles) / result.cycles
    assert result.tokens == sum(len(r.tokens or ()) - 1 for r in some)
    assert 0 < result.accepted < result.evaluated  # right sometimes, wrong sometimes


def test_cycles_by_hand():
    """Counted as the runtime counts, its own identities hold."""
    one = greedy_cycles([True, True, False, True, True, True, True], 2)
    # (T T) + bonus token in place of F; (T T) + bonus token; (T), after which the text has ended: the bonus is discarded
    assert (one.cycles, one.evaluated, one.accepted, one.proposed, one.discarded) == (3, 5, 5, 5, 1)
    assert (one.evaluated_by_depth, one.accepted_by_depth) == ([3, 2], [3, 2])
    wrong = greedy_cycles([False] * 4, 3)
    assert (wrong.cycles, wrong.evaluated_by_depth, wrong.accepted, wrong.tau) == (4, [4], 0, 1.0)
    assert greedy_cycles([], 3).cycles == 0
    perfect = greedy_cycles([True] * 7, 5)
    assert (perfect.cycles, perfect.accepted, perfect.discarded, perfect.tau) == (2, 6, 1, 4.0)
    cut = greedy_cycles(
        [True] * 7, 5, ended=False
    )  # one token is left after the first cycle: nothing to draft
    assert (cut.cycles, cut.accepted, cut.proposed, cut.tau) == (2, 5, 5, 3.5)
    for stats in (one, wrong, perfect, cut):
        stats.check()


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


def acceptance(answers: int, heads: int = 1, longer: int = 3) -> Acceptance:
    """Of a draft that `answers` answers judged at the first place of everything, and `longer` at the second."""
    points = [(1, 0.5, answers), (2, 0.25, longer)]
    return Acceptance(4, 8, 6, 3, 4, 7, 0.5, 0.4, points, points, [[0.5, 0.6, 0.7]] * heads)


@pytest.mark.parametrize(
    ("panel", "few"),
    [
        (0, "no position that 20 answers reach\n(at most 16 do): give more records"),
        (1, "no depth where 20 proposals were judged\n(at most 16 were): give more records"),
        (2, "no head that proposed 20 tokens\n(at most 19): give more records"),
    ],
)
def test_a_plot_draws_what_enough_answers_judged_in_every_panel(panel: int, few: str):
    pytest.importorskip("matplotlib")
    axes = plot.drawn({"some": acceptance(16)}).axes[panel]
    assert not axes.lines and [text.get_text() for text in axes.texts] == [few]
    axes = plot.drawn({"some": acceptance(plot.LEAST)}).axes[panel]
    (line,) = axes.lines
    assert not axes.texts and len(line.get_xdata()) == (3 if panel == 2 else 1), "three answers draw no point"


def test_a_draft_has_one_colour_in_all_panels_and_its_later_heads_are_paler():
    pytest.importorskip("matplotlib")
    found = {"few": acceptance(1), "heads": acceptance(40, heads=3, longer=20), "one": acceptance(40)}
    position, depth, rank = plot.drawn(found).axes
    for axes in (position, depth):
        assert [line.get_color() for line in axes.lines] == ["C1", "C2"], (
            "the place in the list, drawn or not"
        )
    assert [line.get_color() for line in rank.lines] == ["C1", "C1", "C2"], "the third head proposed nothing"
    assert rank.lines[0].get_alpha() > rank.lines[1].get_alpha() and "paler" in rank.get_title()
    assert "draft is right" in position.get_ylabel()


def test_the_legend_of_a_plot_lies_beside_its_panels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    figure_of = pytest.importorskip("matplotlib.figure")
    kept: list[Any] = []
    monkeypatch.setattr(
        figure_of.Figure, "savefig", lambda self, out, **_: kept.append(self) or out.write(b"x")
    )
    found = {f"a-draft-with-a-name-of-some-length-{n}": acceptance(40 * n) for n in range(6)}
    plot.plot_all(found, tmp_path / "p.png")
    (figure,) = kept
    renderer = figure.canvas.get_renderer()
    figure.draw(renderer)
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.texts] == [f"{name} (alpha 0.500)" for name in found]
    assert not any(
        legend.get_window_extent(renderer).overlaps(axes.get_tightbbox(renderer)) for axes in figure.axes
    )


def test_target_as_draft_is_always_accepted(target: Target, told: RecordSet):
    last = target.num_layers
    result = measure(LiveFeatures(target, told, last), nn.Identity(), target, 4)
    assert result.alpha == result.agreement == 1.0
    assert result.overlap == pytest.approx(1.0, abs=1e-5)


def test_the_target_runs_once_for_all_drafts(
    target: Target, records: RecordSet, draft: Path, monkeypatch: pytest.MonkeyPatch
):
    calls, rows, lines = [], target.rows, []
    monkeypatch.setattr(target, "rows", lambda *a: calls.append(a) or rows(*a))
    names = [str(draft), "early-exit@1", f"early-exit@{LAYER}"]
    together = evaluate_drafts(target, records, names, 3, NEW, report=lines.append)
    assert len(calls) == 1
    assert lines[0].startswith(f"answering {len(records)} records, {NEW} tokens at most, on cpu")
    assert lines[1] == f"answered {len(records)}/{len(records)} records"
    assert f"answers were cut at --max-new-tokens {NEW}" in lines[2] and "measured" in lines[-1]
    assert together == {n: evaluate_drafts(target, records, [n], 3, NEW)[n] for n in names}


def test_unknown_drafts_are_named(target: Target, told: RecordSet):
    for name in ("early-exit", "early-exit@5", "early-exit@x"):
        with pytest.raises(OptionError, match=r"early-exit@N|--draft early-exit@5 is outside 1"):
            evaluate_drafts(target, told, [name])
    with pytest.raises(OptionError, match=r"prompt-lookup drafts from the text alone.*vlmexport bench"):
        evaluate_drafts(target, told, ["prompt-lookup"])
