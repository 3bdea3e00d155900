"""Imitation drafts in trainings that change their target: what learns when, and what the changed target is afterwards."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from vlmexport.calibration.features.features import LiveFeatures
from vlmexport.calibration.objectives import losses, objective_for
from vlmexport.calibration.objectives.imitation_joint import JointImitationObjective
from vlmexport.calibration.objectives.imitation_options import ImitationOptions
from vlmexport.calibration.objectives.training_options import LoopOptions
from vlmexport.calibration.targets.target import load_target
from vlmexport.calibration.training.run import Schedule, train_draft
from vlmexport.exporter.checkpoint import fingerprint, open_checkpoint
from vlmexport.exporter.drafts.imitation.imitation import ImitationDraft
from vlmexport.exporter.pipeline import BuildRequest, build_bundle
from vlmexport.runtime import cli
from vlmexport.runtime.bundle.folder import Bundle
from vlmexport.runtime.common.errors import ExportError, OptionError
from vlmexport.runtime.session.session import Session

from tests.support.changing_targets import NEW, Place, learned, make_place, trainer, weights
from tests.support.training_targets import own_answers

LAYER = 2
STAGES = {"fine_tune": 2, "joint": True, "joint_steps": 2}


@pytest.fixture(scope="module", params=["llama", pytest.param("blip2-t5", marks=pytest.mark.slow)])
def place(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Place:
    return make_place(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Place:
    return make_place("blip2-t5", tmp_path_factory.mktemp("one"))


def options(**values: Any) -> ImitationOptions:
    return ImitationOptions(LAYER, **{"cosine": 1.0, **values})


def moved(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> set[str]:
    return {name for name, value in after.items() if not torch.equal(value, before[name])}


def test_the_target_learns_alone_then_both_then_the_network_alone(place: Place, tmp_path: Path) -> None:
    target = place.target()
    run = trainer(
        place, tmp_path, options(**STAGES), LoopOptions(steps=7, batch_size=6, lr=1e-2, warmup=0), target,
        eval_every=1, save_every=1, log_every=1,
    )  # fmt: skip
    inside = {n for n, yes in learned(target).items() if yes and not n.endswith("k_proj.bias")}

    def step() -> tuple[set[str], set[str]]:
        base = weights(target)
        network = {n: p.detach().clone() for n, p in run.objective.network.named_parameters()}
        run.train(stop_after=1)
        return moved(base, weights(target)), moved(network, dict(run.objective.network.named_parameters()))

    for at in range(7):
        base, network = step()
        assert base == (inside if at < 4 else set()), at
        assert bool(network) == (at >= 2), at
        # The first step of a network whose last layer is zero moves that one only.
        assert at < 3 or len(network) == len(list(run.objective.network.parameters())), at
    log = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    rates = [(entry["base_lr"], entry["lr"]) for entry in log if entry["kind"] == "train"]
    assert [rate[0] > 0 for rate in rates] == [True] * 4 + [False] * 3
    assert [rate[1] > 0 for rate in rates] == [False] * 2 + [True] * 5
    assert rates[0][0] == 2.5e-4 and rates[2][1] == 1e-2
    bases = [entry["base"] for entry in log if entry["kind"] == "validation"]
    assert len(set(bases[3:])) == 1 < len(set(bases[:4]))
    assert ImitationDraft.load(tmp_path / "best").evaluation["step"] > 4


def test_the_loss_is_the_targets_own_and_the_drafts(one: Place) -> None:
    """The target's over every token, the draft's from the second on; gradients reach the target by what the network reads and
    uses alone."""
    target = one.target()
    source = LiveFeatures(target, one.records, LAYER, first=True)
    own = options(joint=True, joint_steps=3, draft_weight=0.5)
    torch.manual_seed(1)
    objective = objective_for(replace(own, residual=False), target)
    assert isinstance(objective, JointImitationObjective)
    trunk, last = (target.layers[i].layer[0].SelfAttention.q.weight for i in (0, -1))

    def gradients(part: str) -> list[torch.Tensor]:
        rows = source.rows(range(4))
        if part == "loss":
            value, parts = objective.loss(rows, target)
            torch.testing.assert_close(parts["loss"], parts["base"] + 0.5 * parts["draft"])
        elif part == "base":
            value = F.cross_entropy(target.head(rows.residuals[:, -1]), rows.tokens)
        else:
            later = rows.positions > 0
            assert 0 < int(later.sum()) == len(rows) - 4
            drafted = objective.network(rows.trunk[later])
            frozen, tokens = rows.residuals[later].detach(), rows.tokens[later]
            logits = target.head(drafted)
            value = losses.cross_entropy(logits, tokens) + losses.cosine_distance(drafted, frozen.mean(1))
            value = value + losses.forward_kl(logits, target.head(frozen[:, -1]).detach())
        found = torch.autograd.grad(value, [trunk, last, target.lm_head.weight], allow_unused=True)
        return [
            torch.zeros_like(p) if g is None else g
            for p, g in zip((trunk, last, target.lm_head.weight), found, strict=True)
        ]

    base, draft = gradients("base"), gradients("draft")
    assert draft[0].abs().max() > 0 and not draft[1].any() and draft[2].abs().max() > 0
    for found, a, b in zip(gradients("loss"), base, draft, strict=True):
        torch.testing.assert_close(found, a + 0.5 * b, rtol=1e-4, atol=1e-6)


RESUMED = options(**STAGES, fusion="concat"), LoopOptions(steps=7, batch_size=5, lr=5e-3, warmup=1)
OFTEN = {"eval_every": 2, "save_every": 1}


@pytest.fixture(scope="module")
def whole(one: Place, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, ImitationDraft]:
    """A run that nothing killed."""
    folder = tmp_path_factory.mktemp("runs") / "whole"
    draft = trainer(one, folder, *RESUMED, **OFTEN).train()
    assert isinstance(draft, ImitationDraft)
    return folder, draft


@pytest.mark.parametrize("stop", [1, 3, 5], ids=["target alone", "both", "network alone"])
def test_a_killed_run_ends_with_the_same_bits(
    one: Place, whole: tuple[Path, ImitationDraft], tmp_path: Path, stop: int
) -> None:
    folders, draft = (whole[0], tmp_path), whole[1]
    trainer(one, tmp_path, *RESUMED, **OFTEN).train(stop_after=stop)
    again = trainer(one, tmp_path, *RESUMED, **OFTEN).train()
    a, b = (torch.load(folder / "state.pt", weights_only=True) for folder in folders)
    assert a["objective"].keys() == b["objective"].keys() and a["best"] == b["best"]
    for name, value in a["objective"].items():
        assert torch.equal(value, b["objective"][name]), name
    for x, y in zip(a["optimizer"]["state"].values(), b["optimizer"]["state"].values(), strict=True):
        assert torch.equal(x["exp_avg"], y["exp_avg"]) and torch.equal(x["exp_avg_sq"], y["exp_avg_sq"])
    for which in ("best", "last"):
        for file in ("model/model.safetensors", "draft.safetensors"):
            assert len({(folder / which / file).read_bytes() for folder in folders}) == 1, (which, file)
    assert (draft.fingerprint, draft.target) == (again.fingerprint, again.target)


def test_fine_tuning_first_lowers_the_targets_loss_and_needs_no_joint_steps(
    one: Place, tmp_path: Path
) -> None:
    target = one.target()
    own = options(fine_tune=20)
    run = trainer(one, tmp_path, own, LoopOptions(steps=24, batch_size=12, warmup=2), target, eval_every=4)
    draft = run.train()
    log = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    bases = [entry["base"] for entry in log if entry["kind"] == "validation"]
    assert bases[4] < bases[0] and bases[5] == bases[4]
    assert draft.trained_from == {"name": "model", "fingerprint": fingerprint(open_checkpoint(one.folder))}
    for step, score in ((19, -math.inf), (20, 0.5)):
        run.objective.begin(step)
        assert run.objective.score({"agreement": 0.5, "overlap": 0.0}) == score


def test_its_bundle_is_lossless_says_that_it_changed_and_fits_no_other_target(
    place: Place, tmp_path: Path
) -> None:
    target = place.target()
    records = own_answers(target, place.records, NEW)
    loop = LoopOptions(steps=30, lr=4e-3, batch_size=6, warmup=2)
    out = tmp_path / "run"
    train_draft(target, records, options(joint=True), loop, out, records, schedule=Schedule(eval_every=10))
    folder = out / "best" / "model"
    draft, old, new = ImitationDraft.load(out), open_checkpoint(place.folder), open_checkpoint(folder)
    assert fingerprint(new) == draft.target["fingerprint"] != fingerprint(old)
    assert draft.target["name"] == "model, changed by FastVLM's training"
    with pytest.raises(ExportError, match=r"changed its target.*give --model the folder 'model'"):
        build_bundle(BuildRequest(model=str(place.folder), output=tmp_path / "no", drafts=[str(out)]))
    build_bundle(
        BuildRequest(
            model=str(folder), output=tmp_path / "b", drafts=[str(out)], draft_layer=LAYER, max_length=64
        )
    )
    origin = Bundle.open(tmp_path / "b").manifest.model.trained_from
    assert origin is not None and origin.fingerprint == fingerprint(old)
    wanted = load_target(folder).generate(records[:4], NEW)
    accepted = 0
    with Session.load(tmp_path / "b") as session:
        for record, tokens in zip(records[:4], wanted, strict=True):
            image = None if record.image is None else record.image.load()
            asked = {"image": image, "prompt": record.prompt, "max_new_tokens": NEW}
            found = session.generate(**asked, draft=f"imitation@{LAYER}", draft_length=3)
            assert found.tokens == session.generate(**asked, draft="none").tokens == list(tokens)
            accepted += found.stats.accepted
    assert accepted > 0


def test_the_command_trains_in_stages(one: Place, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = [
        "train", "--model", str(one.folder), "--draft", "imitation", "--draft-layer", str(LAYER), "--joint", "--fine-tune",
        "1", "--joint-steps", "1", "--data", str(one.folder.parent / "data.jsonl"), "--steps", "3", "--batch-size", "4",
        "--threads", "1", "-o", str(tmp_path / "out"), "--json",
    ]  # fmt: skip
    assert cli.main(command) == 0
    printed = capsys.readouterr()
    report = json.loads(printed.out)
    model = tmp_path / "out" / "best" / "model"
    assert report["model"] == {"folder": str(model), "fingerprint": fingerprint(open_checkpoint(model))}
    assert "the target changes: " in printed.err and " of the network; " in printed.err


def test_options_that_do_not_fit_are_named(one: Place, tmp_path: Path) -> None:
    for name, value in (("joint_steps", 2), ("draft_weight", 0.1)):
        with pytest.raises(OptionError, match=f"--{name.replace('_', '-')} applies to --joint only"):
            options(**{name: value})
    with pytest.raises(OptionError, match="--base-lr is for a target that learns"):
        options(base_lr=1e-4)
    for name, value in (("joint_steps", 0), ("draft_weight", 0.0), ("fine_tune", -1), ("base_lr", 0.0)):
        with pytest.raises(OptionError, match=f"--{name.replace('_', '-')} must be"):
            options(joint=True, **{name: value})
    loop = LoopOptions(steps=10, lr=4e-3)
    for values in ({"fine_tune": 10}, {"joint": True, "joint_steps": 10}, {"joint": True, "fine_tune": 9}):
        with pytest.raises(OptionError, match="leave none of 10 --steps to the network alone"):
            options(**values).completed(loop)
    usual = options(joint=True, fine_tune=2).completed(loop)
    assert (usual.joint_steps, usual.base_lr, usual.draft_weight) == (4, 2.5e-4, 1.0)
    assert options(fine_tune=2).completed(loop).joint_steps is None
    assert options().completed(loop) == options()
    target = one.target()
    with pytest.raises(OptionError, match="--cache-features keeps rows of a target that stays as it is"):
        train_draft(
            target, one.records, options(fine_tune=1), loop, tmp_path / "run", cache=tmp_path / "rows"
        )
