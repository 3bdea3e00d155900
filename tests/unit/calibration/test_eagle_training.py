"""An EAGLE layer in training: what it learns from, what it reaches, and the figures of it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from vlmexport.calibration.data import RecordSet
from vlmexport.calibration.evaluation.acceptance import chain_cycles
from vlmexport.calibration.evaluation.run import evaluate_drafts
from vlmexport.calibration.features.full_sequences import unrolled
from vlmexport.calibration.features.vispec_masks import shifted
from vlmexport.calibration.objectives import objective_for, options_of
from vlmexport.calibration.objectives.eagle_options import EagleOptions
from vlmexport.calibration.objectives.training_options import LoopOptions
from vlmexport.calibration.targets.target import Target, load_target
from vlmexport.calibration.training.run import token_counts, train_draft
from vlmexport.exporter.drafts.eagle.eagle import EagleDraft
from vlmexport.exporter.drafts.eagle.eagle_network import EagleConfig, EagleNetwork
from vlmexport.exporter.pipeline import BuildRequest, build_bundle
from vlmexport.runtime.common.errors import OptionError
from vlmexport.runtime.session.session import Session

from tests.support import tiny_models
from tests.support.every_kind import counted_by_the_runtime
from tests.support.training_targets import logits_after, own_answers

NEW = 14


@pytest.fixture(scope="module")
def told(target: Target, records: RecordSet) -> RecordSet:
    """The target's own answers."""
    return own_answers(target, records, NEW)


@pytest.fixture(
    scope="module",
    params=["trimmed", *(pytest.param(head, marks=pytest.mark.slow) for head in ("own", "shared"))],
)
def run(
    request: pytest.FixtureRequest, target: Target, told: RecordSet, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A layer that is right sometimes."""
    folder = tmp_path_factory.mktemp(request.param)
    kind = EagleOptions(head=request.param, head_vocabulary=40, token_weight=1.0, own_steps=2)
    loop = LoopOptions(steps=60, lr=3e-3, batch_size=8, warmup=2)
    train_draft(target, told, kind, loop, folder, told)
    return folder


def small_layer(seed: int = 0) -> EagleNetwork:
    network = EagleNetwork(EagleConfig(8, 11, 2, 1, 4, 12)).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for value in network.parameters():
            value.copy_(torch.randn(value.shape, generator=generator) / 3)
    return network


def test_texts_pair_every_row_with_the_token_behind_it(target: Target, told: RecordSet) -> None:
    """The row of a place says, through norm and head, the token behind it; what is learned is an answer's second token
    and all that follow."""
    texts = target.texts(list(told)[:3])
    for b, record in enumerate(list(told)[:3]):
        answer = list(record.tokens or ())
        (places,) = torch.nonzero(texts.learned[b], as_tuple=True)
        assert len(places) == len(answer) - 1
        first = int(places[0])
        assert texts.tokens[b, first : first + len(answer)].tolist() == answer
        said = target.head(texts.hidden[b, first : first + len(answer)])
        assert said.argmax(-1).tolist() == answer, "a greedy answer is what its rows say"
        torch.testing.assert_close(said[1], logits_after(target, record, answer[:1]), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(texts.embedded[b, first], target.embed(texts.tokens[b, first]))
        assert not texts.hidden[b, first + len(answer) :].any(), "padding"
    assert len(texts) == int(texts.learned.sum())


@torch.no_grad()
def test_unrolling_equals_drafting_from_every_position() -> None:
    """Against drafting from each place by itself, with the target's features before it and own ones behind."""
    layer, steps, count = small_layer(), 3, 7
    generator = torch.Generator().manual_seed(1)
    embedded, features = torch.randn(2, 2, count, 8, generator=generator)
    found = list(unrolled(layer, embedded, features, steps))
    for place in range(count - steps + 1):
        own = features[:, : place + 1]
        for step in range(steps):
            seen = place + 1 + step
            mask = torch.ones(seen, seen, dtype=torch.bool).tril()[None, None]
            rows, _ = layer(embedded[:, :seen], own, torch.arange(seen)[None], mask)
            own = torch.cat([own, rows[:, -1:]], 1)
            torch.testing.assert_close(found[step][:, place], rows[:, -1], rtol=1e-4, atol=1e-5)
    assert shifted(torch.tensor([[1, 2, 3]]), 2).tolist() == [[3, 0, 0]]


def test_untrained_layer_repeats_its_feature() -> None:
    network = EagleNetwork(EagleConfig(8, 11, 2, 1, 4, 12))
    rows = torch.randn(1, 3, 8)
    mask = torch.ones(3, 3, dtype=torch.bool).tril()[None, None]
    found, _ = network(torch.randn(1, 3, 8), rows, torch.arange(3)[None], mask)
    torch.testing.assert_close(found, rows)


def test_the_loss_is_the_published_one(target: Target, told: RecordSet) -> None:
    """Smooth L1 of the next feature plus 0.1 times the cross entropy with what it says; noise in training only."""
    objective = objective_for(EagleOptions(), target)
    texts = target.texts(list(told)[:4])
    objective.eval()
    total, parts = objective.loss(texts, target)  # type: ignore[arg-type]
    again, _ = objective.loss(texts, target)  # type: ignore[arg-type]
    assert total.item() == again.item()
    features = target.features(texts.hidden)
    here, there = features[:, :-1][texts.learned[:, :-1]], features[:, 1:][texts.learned[:, :-1]]
    distance = torch.nn.functional.smooth_l1_loss(here, there)  # untrained: the feature itself
    p, q = target.lm_head(there).softmax(-1), target.lm_head(here).log_softmax(-1)
    wanted = distance - 0.1 * (p * q).sum(-1).mean()
    assert total.item() == pytest.approx(wanted.item(), rel=1e-5)
    assert parts["hit1"].item() == pytest.approx((p.argmax(-1) == q.argmax(-1)).float().mean().item())
    objective.train()
    noisy, _ = objective.loss(texts, target)  # type: ignore[arg-type]
    assert noisy.item() != total.item()


def test_chains_are_replayed_as_the_runtime_counts_them() -> None:
    right = [[True, True, False], [False, True, True], [True, True, True], [True, False, False]]
    stats = chain_cycles(right, 2)
    assert (stats.cycles, stats.proposed, stats.accepted, stats.discarded) == (2, 3, 3, 1)
    cut = chain_cycles(right, 2, ended=False)
    assert (cut.cycles, cut.proposed, cut.accepted, cut.discarded) == (2, 2, 2, 0)


def test_options_that_do_not_fit_are_named() -> None:
    for options, message in (
        ({"head": "other"}, "unknown --head 'other'"), ({"own_steps": -1}, "--own-steps must be at least 0"),
        ({"feature_weight": 0.0, "token_weight": 0.0}, "every loss weight is 0"),
    ):  # fmt: skip
        with pytest.raises(OptionError, match=message):
            EagleOptions(**options)


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_a_layer_turns_rows_as_its_target_does(kind: str, tmp_path: Path) -> None:
    """The published trainings copy the target's base; a target without one gets the usual."""
    rotary = {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}}
    llama = load_target(tiny_models.checkpoint("llama", tmp_path / "llama", **rotary))
    opt = load_target(tiny_models.checkpoint("blip2-opt", tmp_path / "opt"))
    own = options_of(kind)
    bases = [
        objective_for(own(**given), target).network.config.rope_theta
        for target, given in ((llama, {}), (llama, {"rotary_base": 3e4}), (opt, {}))
    ]
    assert bases == [500000.0, 3e4, 10000.0]


def test_impossible_layer_options_are_refused(target: Target, told: RecordSet, tmp_path: Path) -> None:
    loop = LoopOptions(steps=1)
    with pytest.raises(OptionError, match="--attention-heads 7 does not divide"):
        train_draft(target, told, EagleOptions(attention_heads=7), loop, tmp_path / "b")


def test_a_trained_layer_is_built_and_drafts_as_eval_says(
    target: Target, told: RecordSet, run: Path, tmp_path: Path
) -> None:
    """Parity compares the graph with PyTorch; what was learned is accepted, as often as `eval` counts; trees have more
    right than chains."""
    draft = EagleDraft.load(run)
    if draft.network.config.trimmed is not None:
        assert (token_counts(map(target.answer, told), target.vocabulary)[draft.network.d2t] > 0).all()
    length = 3
    found = evaluate_drafts(target, told, [str(run)], draft_length=length, max_new_tokens=NEW)[str(run)]
    report = build_bundle(
        BuildRequest(
            model=str(target.checkpoint.folder), output=tmp_path / "b", drafts=[str(run)], max_length=96
        )
    )
    assert "eagle" in {row["graph"] for row in report.parity} and report.cuts == [0, target.num_layers]
    with Session.load(tmp_path / "b") as session:
        info = session.bundle.manifest.draft("eagle")
        assert (
            info is not None and info.options.own_cache is not None and info.fingerprint == draft.fingerprint
        )
        assert session.bundle.manifest.policy.draft == "eagle"
        counted = counted_by_the_runtime(session, told, "eagle", length, NEW, reuse_prompt=True)
    assert counted["chain"] == [found.cycles, found.evaluated, found.accepted]
    assert 0 < counted["chain"][2] <= counted["tree"][2]
