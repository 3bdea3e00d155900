"""Medusa heads in training: what they learn from, what they reach, and the figures of it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from vlmexport.calibration.data import RecordSet
from vlmexport.calibration.evaluation.run import evaluate_drafts
from vlmexport.calibration.features.features import LiveFeatures
from vlmexport.calibration.objectives import objective_for
from vlmexport.calibration.objectives.medusa import ahead, frequent, heads_labels, measure_hits
from vlmexport.calibration.objectives.medusa_options import MedusaOptions
from vlmexport.calibration.objectives.training_options import LoopOptions
from vlmexport.calibration.targets.target import Target
from vlmexport.calibration.targets.teacher_forcing import Rows
from vlmexport.calibration.training.run import token_counts, train_draft
from vlmexport.exporter.drafts.medusa.medusa import MedusaDraft
from vlmexport.exporter.drafts.medusa.medusa_network import MedusaConfig, MedusaHeads
from vlmexport.exporter.pipeline import BuildRequest, build_bundle
from vlmexport.runtime.common.errors import OptionError
from vlmexport.runtime.session.session import Session

from tests.support.training_targets import logits_after, own_answers

HEADS, NEW = 3, 14


@pytest.fixture(scope="module")
def told(target: Target, records: RecordSet) -> RecordSet:
    """The target's own answers."""
    return own_answers(target, records, NEW)


@pytest.fixture(scope="module", params=["own", "shared", "trimmed"])
def run(
    request: pytest.FixtureRequest, target: Target, told: RecordSet, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """Heads that are right sometimes."""
    folder = tmp_path_factory.mktemp(request.param)
    kind = MedusaOptions(heads=HEADS, head=request.param, head_vocabulary=40)
    train_draft(target, told, kind, LoopOptions(steps=40, lr=1e-2, batch_size=8, warmup=2), folder, told)
    return folder


def rows_of(tokens: list[int], records: list[int]) -> Rows:
    count = len(tokens)
    return Rows(
        torch.zeros(count, 4), torch.zeros(count, 1, 4), torch.tensor(tokens), torch.tensor(records), torch.arange(count)
    )  # fmt: skip


def test_a_head_looks_ahead_within_its_own_text_only() -> None:
    batch = rows_of([5, 6, 7, 8, 9], [0, 0, 0, 1, 1])
    assert ahead(batch, 3).tolist() == [
        [6, 7, -100], [7, -100, -100], [-100] * 3, [9, -100, -100], [-100] * 3,
    ]  # fmt: skip
    assert ahead(rows_of([5], [0]), 2).tolist() == [[-100, -100]]


def test_a_trimmed_vocabulary_is_that_of_the_frequent_tokens() -> None:
    counts = torch.tensor([0, 5, 1, 5, 0, 9])
    assert frequent(counts, 3).tolist() == [1, 3, 5] and frequent(counts, 99).tolist() == [1, 2, 3, 5]
    network = MedusaHeads(MedusaConfig(4, 6, 2, 1, "trimmed", 3))
    network.start_from(torch.arange(24.0).view(6, 4), torch.tensor([1, 3, 5]))
    assert heads_labels(network, rows_of([2, 3, 2, 5], [0] * 4)).tolist() == [
        [1, -100], [-100, 2], [2, -100], [-100, -100],
    ]  # fmt: skip
    torch.testing.assert_close(network(torch.eye(4))[:, 0], torch.arange(24.0).view(6, 4)[[1, 3, 5]].T)


@pytest.mark.parametrize("head", ["own", "shared", "trimmed"])
def test_untrained_heads_say_what_the_lm_head_says(target: Target, told: RecordSet, head: str) -> None:
    kind = MedusaOptions(heads=2, head=head, head_vocabulary=30)
    objective = objective_for(kind, target, lambda: token_counts(map(target.answer, told), target.vocabulary))
    rows = LiveFeatures(target, told, target.num_layers).rows(range(4))
    features = target.features(rows.residuals[:, -1])
    found = objective.network(features, target.lm_head.weight)
    wanted = target.head(rows.residuals[:, -1])
    if head == "trimmed":
        counts = token_counts(map(target.answer, told), target.vocabulary)
        assert counts.sum() == sum(len(r.tokens or ()) for r in told)
        wanted = wanted[:, objective.network.d2t]
        assert counts[objective.network.d2t].min() > 0
    for k in range(2):
        torch.testing.assert_close(found[:, k], wanted)


def test_hits_are_those_of_trees(target: Target, told: RecordSet, run: Path) -> None:
    """`hits[k][r]`: of the rows whose tokens before were all proposed, the share that head k + 1 has at rank r."""
    draft = MedusaDraft.load(run)
    network, hits = draft.network, draft.evaluation["hits"]
    source = LiveFeatures(target, told, target.num_layers)
    assert hits == measure_hits(network, source, target)
    right, asked = [[0] * 10 for _ in range(HEADS)], [0] * HEADS
    for number in range(len(told)):
        rows = source.rows([number])
        logits = network(target.features(rows.residuals[:, -1]), target.lm_head.weight)
        best = logits.topk(10, -1).indices
        best = network.d2t[best] if network.config.trimmed is not None else best
        for at in range(len(rows)):
            for k in range(HEADS):
                if at + 1 + k >= len(rows):
                    break
                asked[k] += 1
                ranks = best[at, k].tolist()
                if int(rows.tokens[at + 1 + k]) not in ranks:
                    break
                right[k][ranks.index(int(rows.tokens[at + 1 + k]))] += 1
    assert hits == [[round(x / max(1, n), 5) for x in row] for row, n in zip(right, asked, strict=True)]
    assert hits[0][0] > 0.3, "they learned nothing"
    assert draft.tree is not None and draft.tree[0] == -1
    validation = draft.evaluation["validation"]
    assert validation["hit1"] == pytest.approx(hits[0][0], abs=0.05)


def test_eval_counts_what_chains_of_heads_reach(target: Target, told: RecordSet, run: Path) -> None:
    """Against a loop that asks the heads for the row which chose the pending token; the first cycle proposes nothing."""
    network, length = MedusaDraft.load(run).network, 2
    found = evaluate_drafts(target, told, [str(run)], draft_length=length, max_new_tokens=NEW)[str(run)]
    cycles = evaluated = accepted = 0
    for record in told:
        text, whole = 1, list(record.tokens or ())
        ended = whole[-1] in target.eos_token_ids
        while text < len(whole):
            cycles += 1
            left = len(whole) - text
            depth = min(length, left if ended else left - 1) if text > 1 else 0
            drafted: list[int] = []
            if depth:
                kept = {}
                hook = target.lm_head.register_forward_pre_hook(
                    lambda m, given, kept=kept: kept.update(rows=given[0])
                )
                with torch.no_grad():
                    logits_after(target, record, whole[: text - 1])
                    hook.remove()
                    best = network(kept["rows"][:, -1], target.lm_head.weight)[0].argmax(-1)
                best = network.d2t[best] if network.config.trimmed is not None else best
                drafted = best[:depth].tolist()
            run_of = 0
            while run_of < len(drafted) and drafted[run_of] == whole[text + run_of]:
                run_of += 1
            evaluated += min(run_of + 1, len(drafted))
            accepted += run_of
            text += run_of + 1
    assert (found.cycles, found.evaluated, found.accepted) == (cycles, evaluated, accepted)
    assert accepted > 0


def test_options_that_do_not_fit_are_named() -> None:
    for options, message in (
        ({"heads": 0}, "--heads must be at least 1"), ({"head": "other"}, "unknown --head 'other'"),
        ({"decay": 0.0}, "--head-decay must be above 0"),
    ):  # fmt: skip
        with pytest.raises(OptionError, match=message):
            MedusaOptions(**options)


def test_a_trained_draft_is_built_and_drafts(
    target: Target, told: RecordSet, run: Path, tmp_path: Path
) -> None:
    """Parity compares the graph with PyTorch; what was learned is accepted; trees have more right than chains."""
    draft = MedusaDraft.load(run)
    precision = "float16" if draft.network.config.head == "trimmed" else "float32"
    request = BuildRequest(
        model=str(target.checkpoint.folder),
        output=tmp_path / "b",
        drafts=[str(run)],
        max_length=64,
        precision=precision,
    )
    report = build_bundle(request)
    assert "medusa" in {row["graph"] for row in report.parity} and report.cuts == [0, target.num_layers]
    with Session.load(tmp_path / "b") as session:
        info = session.bundle.manifest.draft("medusa")
        assert info is not None and (entry := info.to_dict())
        assert (entry["heads"], entry["ranks"], entry["tree"]) == (HEADS, 10, draft.tree)
        assert session.bundle.manifest.policy.draft == "medusa" and info.fingerprint == draft.fingerprint
        accepted = {}
        for name, options in (("chain", {"draft_length": HEADS}), ("tree", {"draft_nodes": 12})):
            accepted[name] = 0
            for record in list(told)[:4]:
                image = None if record.image is None else record.image.load()
                asked = {"image": image, "prompt": record.prompt, "max_new_tokens": NEW}
                found = session.generate(**asked, draft="medusa", **options)
                assert found.tokens == session.generate(**asked, draft="none").tokens
                accepted[name] += found.stats.accepted
    assert 0 < accepted["chain"] <= accepted["tree"]
