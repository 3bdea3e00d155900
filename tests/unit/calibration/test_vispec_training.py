"""A ViSpec layer in training: what it sees of pictures, the losses of both stages, and what a trained one drafts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from vlmexport.calibration.data import RecordSet, load_records
from vlmexport.calibration.evaluation.run import evaluate_drafts
from vlmexport.calibration.features.full_sequences import unrolled_over_pictures
from vlmexport.calibration.features.vispec_masks import sight_of
from vlmexport.calibration.objectives import objective_for
from vlmexport.calibration.objectives.eagle_options import EagleOptions
from vlmexport.calibration.objectives.training_options import LoopOptions
from vlmexport.calibration.objectives.vispec_options import VispecOptions
from vlmexport.calibration.targets.target import Target
from vlmexport.calibration.targets.teacher_forcing import Texts
from vlmexport.calibration.training.run import train_draft
from vlmexport.exporter.drafts.eagle.eagle_network import EagleConfig
from vlmexport.exporter.drafts.eagle.vispec import VispecDraft
from vlmexport.exporter.drafts.eagle.vispec_network import VispecConfig, VispecNetwork
from vlmexport.exporter.pipeline import BuildRequest, build_bundle
from vlmexport.runtime.common.errors import OptionError
from vlmexport.runtime.session.session import Session

from tests.support.every_kind import counted_by_the_runtime, learns_and_resumes
from tests.support.training_targets import entering, make_jsonl, make_records, make_target, own_answers

NEW = 14


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return make_target("llava", tmp_path_factory.mktemp("llava") / "model")


@pytest.fixture(scope="module")
def told(seeing: Target, tmp_path_factory: pytest.TempPathFactory) -> RecordSet:
    """The target's own answers."""
    return own_answers(seeing, make_records(tmp_path_factory.mktemp("records"), "llava"), NEW)


def small(queries: int = 3, seed: int = 0) -> VispecNetwork:
    network = VispecNetwork(VispecConfig(EagleConfig(8, 11, 2, 1, 4, 12), 2, queries)).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for value in network.parameters():
            value.copy_(torch.randn(value.shape, generator=generator) / 3)
    return network


@pytest.mark.parametrize("kind", ["llava", "llava-next", "qwen2.5-vl", "internvl", "lfm2-vl", "blip2-opt"])
def test_pictures_are_what_enters_the_decoder(kind: str, tmp_path: Path) -> None:
    target = make_target(kind, tmp_path / "model")
    records = list(make_records(tmp_path, kind))[:3]
    with entering(target) as entered:
        texts = target.texts(records)
    for b, record in enumerate(records):
        ids = target.prompt(record).input_ids
        (picture,) = texts.pictures[b]
        start, rows = picture
        assert rows.shape[:2] == (1, ids.count(target.family.image_token_id)) and rows.shape[1] > 1
        torch.testing.assert_close(rows[0], entered[0][b, start : start + rows.shape[1]])
    assert len({rows.sum().item() for ((_, rows),) in texts.pictures}) == 3, "each has its own"


def test_what_a_layer_sees_of_pictures() -> None:
    """Pairs of a picture's rows are hidden but for the last ones, where its tokens stand; text behind knows its feature,
    text before the first none; a picture of fewer pairs than tokens keeps the last of them."""
    network = small(queries=4)
    generator = torch.Generator().manual_seed(2)
    hidden = torch.randn(2, 12, 8, generator=generator)
    rows = [torch.randn(count, 8, generator=generator) for count in (5, 3, 2)]
    pictures = [[(2, rows[0][None]), (9, rows[1][None])], [(0, rows[2][None])]]
    places = torch.zeros(2, 12, dtype=torch.long)
    sight = sight_of(network, Texts(hidden, hidden, places, places.bool(), pictures))
    made = [network.imadpt(each) for each in rows]
    hide = [not shown for shown in sight.visible[0]]
    assert [place for place in range(12) if hide[place]] == [
        1,
        2,
    ]  # pairs 1..5 are the first's, 8..10 the second's
    assert torch.nonzero(sight.compressed[0])[:, 0].tolist() == [3, 4, 5, 8, 9, 10]
    torch.testing.assert_close(sight.visual[0, 3:6], made[0][:3])
    torch.testing.assert_close(sight.visual[0, 6:8], made[0][3].expand(2, 8))
    torch.testing.assert_close(sight.visual[0, 8:11], made[1][:3])
    torch.testing.assert_close(sight.visual[0, 11], made[1][3])
    assert not sight.visual[0, 0].any()
    assert sight.visible[1].all() and torch.nonzero(sight.compressed[1])[:, 0].tolist() == [0]
    torch.testing.assert_close(sight.visual[1, 0], made[2][2])
    later = sight.beside(1)
    assert not later["compressed"].any() and not later["visual"][0, 2:5].any()
    torch.testing.assert_close(later["visual"][0, 5], made[0][3])


@torch.no_grad()
def test_hidden_pairs_are_left_out() -> None:
    """Against the sequence without them, at the same positions: what the runtime computes."""
    network, generator = small(), torch.Generator().manual_seed(3)
    hidden, embedded = torch.randn(2, 1, 10, 8, generator=generator)
    rows = torch.randn(5, 8, generator=generator)
    places = torch.zeros(1, 10, dtype=torch.long)
    texts = Texts(hidden, embedded, places, places.bool(), [[(2, rows[None])]])
    (found,) = unrolled_over_pictures(network, texts, hidden, 1)
    kept = torch.tensor([0, 4, 5, 6, 7, 8, 9])
    visual = torch.cat([torch.zeros(1, 8), network.imadpt(rows)[[0, 1, 2, 2, 2, 2]]])
    compressed = torch.tensor([[False, True, True, False, False, False, False]])
    mask = torch.ones(7, 7, dtype=torch.bool).tril()[None, None]
    wanted, _ = network(
        embedded[:, kept], hidden[:, kept], kept[None], mask, visual=visual[None], compressed=compressed
    )
    torch.testing.assert_close(found[:, kept], wanted, rtol=1e-4, atol=1e-5)
    (blind,) = unrolled_over_pictures(network, replace(texts, pictures=[[]]), hidden, 1)
    assert not torch.allclose(found[:, kept], blind[:, kept], atol=1e-3)


@torch.no_grad()
@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("loss", ["published", "described"])
def test_the_losses(seeing: Target, told: RecordSet, stage: int, loss: str) -> None:
    """Computed a second time from the rows that the network gives, reading by reading."""
    objective = objective_for(VispecOptions(stage=stage, loss=loss, multi_token_steps=2), seeing)
    network: Any = objective.network
    generator = torch.Generator().manual_seed(4)
    for value in network.parameters():
        value.add_(torch.randn(value.shape, generator=generator), alpha=0.05)
    texts = seeing.texts(list(told)[:3])
    objective.eval()
    total, parts = objective.loss(texts, seeing)  # type: ignore[arg-type]
    features, wanted, readings = seeing.features(texts.hidden), 0.0, []
    given, learned = features, texts.learned
    there = features.roll(-1, 1)[learned]
    p = seeing.lm_head(there).softmax(-1)
    for _ in range(3):
        (rows,) = unrolled_over_pictures(network, texts, given, 1)
        log_q = seeing.lm_head(rows[learned]).log_softmax(-1)
        cross = -(p * log_q).sum(-1).mean()
        order, left = torch.zeros(()), log_q.double()
        for token in p.topk(10).indices.T:  # draw without replacement
            order = order - (left.gather(1, token[:, None]) - left.logsumexp(-1, keepdim=True)).mean()
            left = left.scatter(1, token[:, None], -torch.inf)
        distance = torch.nn.functional.smooth_l1_loss(rows[learned], there)
        apart = (p - log_q.exp()).abs().sum(-1).mean()
        readings.append(
            {
                (1, "published"): distance + 0.1 * (cross + 0.1 * order),
                (1, "described"): distance + 0.1 * cross,
                (2, "published"): 10 * apart + 0.1 * order,
                (2, "described"): cross,
            }[stage, loss].item()
        )
        given = torch.cat([features[:, :1], rows[:, :-1]], 1)
    wanted = sum(readings) / 3
    assert total.item() == pytest.approx(wanted, rel=1e-4)
    assert len(set(readings)) == 3 and {"hit1", "hit2", "hit3", "loss"} <= set(parts)


def test_vispec_training_learns_and_resumes_exactly(seeing: Target, told: RecordSet, tmp_path: Path) -> None:
    learns_and_resumes(seeing, told, tmp_path, "vispec")


def test_stages_follow_each_other(seeing: Target, told: RecordSet, tmp_path: Path) -> None:
    """Stage 1 on text alone, or an EAGLE layer, is what stage 2 begins with; another shape is named."""
    text = load_records(str(make_jsonl(tmp_path / "text.jsonl", 6, images=False)))
    loop = LoopOptions(steps=2, batch_size=3, lr=1e-3, warmup=0)
    one = train_draft(seeing, text, VispecOptions(stage=1), loop, tmp_path / "one", text)
    layer = train_draft(seeing, told, EagleOptions(), loop, tmp_path / "eagle", told)
    for before in (one, layer):
        options = VispecOptions(start_from=str(tmp_path / ("one" if before is one else "eagle")))
        begun: Any = objective_for(options, seeing).network
        fresh: Any = objective_for(VispecOptions(), seeing).network
        known: Any = before.network if before is one else None  # type: ignore[attr-defined]
        assert not torch.equal(begun.layer.fc.weight, fresh.layer.fc.weight)
        if known is not None:
            assert all(
                torch.equal(a, b)
                for a, b in zip(begun.state_dict().values(), known.state_dict().values(), strict=True)
            )
    two = VispecOptions(start_from=str(tmp_path / "one"), compressed_tokens=3)
    with pytest.raises(OptionError, match=r"--start-from .*queries=2.* is another shape than .*queries=4"):
        objective_for(two, seeing)
    with pytest.raises(OptionError, match=r"--start-from: .*nowhere.* is not a draft folder"):
        objective_for(VispecOptions(start_from=str(tmp_path / "nowhere")), seeing)


def test_a_layer_without_the_global_feature_never_learns_it(
    seeing: Target, told: RecordSet, tmp_path: Path
) -> None:
    loop = LoopOptions(steps=3, batch_size=4, lr=1e-2, warmup=0)
    options = VispecOptions(global_feature=False)
    found: Any = train_draft(seeing, told, options, loop, tmp_path / "without", told)
    other: Any = train_draft(seeing, told, VispecOptions(), loop, tmp_path / "with", told)
    mixing, width = found.network.img_fc.weight, seeing.hidden_size
    assert not mixing[:, width:].any() and other.network.img_fc.weight[:, width:].any()
    assert not torch.equal(mixing[:, :width], torch.eye(width)), "the rest learns"
    fresh: Any = objective_for(options, seeing).network
    assert not torch.equal(found.network.imadpt.k_proj.weight, fresh.imadpt.k_proj.weight)


def test_options_of_vispec_that_do_not_fit_are_named() -> None:
    for options, message in (
        ({"stage": 3}, "--stage 3 is neither 1 nor 2"), ({"loss": "other"}, "unknown --loss 'other'"),
        ({"compressed_tokens": 0}, "--compressed-tokens must be at least 1"),
        ({"multi_token_steps": -1}, "--multi-token-steps must be at least 0"), ({"head": "x"}, "unknown --head 'x'"),
    ):  # fmt: skip
        with pytest.raises(OptionError, match=message):
            VispecOptions(**options)
    assert (VispecOptions(stage=1).readings, VispecOptions().readings) == (1, 2)


def test_a_trained_vispec_layer_drafts_as_eval_says(seeing: Target, told: RecordSet, tmp_path: Path) -> None:
    """Parity compares both graphs with PyTorch; what was learned is accepted, as often as `eval` counts; trees have more
    right than chains."""
    kind = VispecOptions(head="trimmed", head_vocabulary=40, compressed_tokens=2)
    loop = LoopOptions(steps=40, lr=3e-3, batch_size=8, warmup=2)
    train_draft(seeing, told, kind, loop, tmp_path / "draft", told)
    draft, length = VispecDraft.load(tmp_path / "draft" / "best"), 3
    folder = str(tmp_path / "draft")
    found = evaluate_drafts(seeing, told, [folder], draft_length=length, max_new_tokens=NEW)[folder]
    report = build_bundle(
        BuildRequest(
            model=str(seeing.checkpoint.folder), output=tmp_path / "b", drafts=[folder], max_length=128
        )
    )
    assert {"vispec", "adaptor"} <= {row["graph"] for row in report.parity}
    assert report.cuts == [0, seeing.num_layers]
    with Session.load(tmp_path / "b") as session:
        info = session.bundle.manifest.draft("vispec")
        assert info is not None and info.to_dict()["queries"] == 3 and info.fingerprint == draft.fingerprint
        assert session.bundle.manifest.policy.draft == "vispec"
        assert all(record.image is not None for record in told)
        counted = counted_by_the_runtime(session, told, "vispec", length, NEW)
    assert counted["chain"] == [found.cycles, found.evaluated, found.accepted]
    assert 0 < counted["chain"][2] <= counted["tree"][2]
