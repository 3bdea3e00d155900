"""Training: it lowers the loss, resumes exactly, and leaves the target alone."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from vlmexport.calibration import objectives
from vlmexport.calibration.data import RecordSet
from vlmexport.calibration.data.reading.records import Record
from vlmexport.calibration.features.features import CachedFeatures, LiveFeatures, build_cache
from vlmexport.calibration.objectives import losses, objective_for, options_of
from vlmexport.calibration.objectives.imitation import ImitationObjective
from vlmexport.calibration.objectives.imitation_options import ImitationOptions
from vlmexport.calibration.objectives.medusa_options import MedusaOptions
from vlmexport.calibration.objectives.training_options import LoopOptions
from vlmexport.calibration.targets.target import Target
from vlmexport.calibration.training.run import few_validation, train_draft
from vlmexport.calibration.training.schedule import batch_indices, learning_rate
from vlmexport.calibration.training.trainer import Trainer
from vlmexport.exporter.drafts.imitation.imitation import ImitationDraft, ImitationNetwork
from vlmexport.runtime.common.errors import ExportError, InputError, OptionError

from tests.support.every_kind import learns_and_resumes
from tests.support.training_targets import KINDS, TRAINED, make_records, make_target, options, own_answers

LAYER = 2


def trainer(
    target: Target, records: RecordSet, out: Path, config: tuple[ImitationOptions, LoopOptions], **more
) -> Trainer:
    source = LiveFeatures(target, records, config[0].layer)
    return Trainer(
        partial(objective_for, config[0]), config[1], target, source, source, "data", out,
        report=lambda line: None, **more,
    )  # fmt: skip


def digest(model: torch.nn.Module) -> str:
    sha = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        sha.update(
            name.encode() + tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        )
    return sha.hexdigest()


@pytest.mark.parametrize("target", KINDS, indirect=True)
def test_rows_are_the_targets_own(target: Target, records: RecordSet):
    """The last residual through the head gives the model's logits, at the right positions."""
    record = records[1]
    answer = target.generate([record], 8)[0]
    told = [replace(records[0], tokens=target.answer(records[0])), replace(record, tokens=answer)]
    rows, trunks = target.rows(told, [LAYER, 1, 4])
    mine = rows.records == 1
    assert target.head(rows.residuals[mine, -1]).argmax(-1).tolist() == list(answer[1:])
    assert rows.tokens[mine].tolist() == list(answer[1:])
    assert rows.positions[mine].tolist() == list(range(1, len(answer)))
    assert rows.residuals.shape[1] == 4
    torch.testing.assert_close(rows.residuals[:, 2], trunks[4])
    assert not torch.equal(trunks[LAYER], trunks[4])


def test_an_answer_ends_with_its_first_end_token(target: Target, monkeypatch):
    monkeypatch.setattr(type(target), "eos_token_ids", [5, 8])
    assert target._cut([7, 8, 9, 5, 8]) == (7, 8)
    assert target._cut([7, 9]) == (7, 9)


@pytest.mark.parametrize("target", KINDS, indirect=True)
def test_training_lowers_the_loss_and_not_one_bit_of_the_target_changes(
    target: Target, records: RecordSet, tmp_path: Path
):
    before = digest(target.model)
    records = own_answers(target, records, 8)
    config = options(LAYER, steps=60, batch_size=6, lr=3e-3, warmup=5, cosine=1.0)
    run = trainer(target, records, tmp_path, config, eval_every=20, save_every=20)
    rows = LiveFeatures(target, records, LAYER).rows(range(len(records)))
    first, _ = run.objective.loss(rows, target)
    draft = run.train()
    run.objective.network.load_state_dict(draft.network.state_dict())
    last, parts = run.objective.loss(rows, target)
    assert last < 0.5 * first
    assert parts["agreement"] > 0.6
    assert digest(target.model) == before
    draft.check_target(target.name, target.fingerprint, target.num_layers, target.hidden_size)
    assert draft.provenance["options"]["steps"] == 60


def test_the_first_step_and_what_it_reports(target: Target, records: RecordSet, tmp_path: Path):
    """AdamW moves what has a gradient by the rate, whatever its size; what has none yet (all before the last
    linear, which is zero) only decays, if it is a matrix."""
    config = options(
        LAYER, steps=1, batch_size=5, lr=3e-2, warmup=2, clip=1e-3, weight_decay=0.5, residual=True
    )
    run = trainer(target, records, tmp_path, config)
    before = {name: value.clone() for name, value in run.objective.network.state_dict().items()}
    network = run.train().network
    after = network.state_dict()
    torch.testing.assert_close(after["linear.0.weight"], before["linear.0.weight"] * (1 - 0.01 * 0.5))
    assert torch.equal(after["norm.weight"], before["norm.weight"])
    assert after["linear.1.weight"].abs().median().item() == pytest.approx(0.01, rel=1e-2)
    moments = torch.load(tmp_path / "state.pt", weights_only=True)["optimizer"]["state"].values()
    norm = sum(float(one["exp_avg"].square().sum()) for one in moments) ** 0.5
    assert norm == pytest.approx(0.1 * config[1].clip, rel=1e-2)  # of the clipped gradient
    # 12 records in batches of 5: the reported means are means over rows, not over batches.
    rows = run.source.rows(range(len(records)))
    _, parts = run.objective.compare(network(rows.trunk), rows, target)
    reported = json.loads((tmp_path / "log.jsonl").read_text().splitlines()[-1])
    assert reported["kind"] == "validation"
    for name in ("loss", "overlap", "agreement"):
        assert reported[name] == pytest.approx(parts[name].item(), rel=1e-3), name


@pytest.mark.parametrize("fusion", ["average", "concat", "attention"])
def test_a_killed_run_ends_with_the_same_weights(
    target: Target, records: RecordSet, tmp_path: Path, fusion: str
):
    config = options(LAYER, steps=11, batch_size=5, lr=3e-3, warmup=3, cosine=1.0, fusion=fusion)
    often = {"eval_every": 4, "save_every": 3}
    trainer(target, records, tmp_path / "whole", config, **often).train()
    trainer(target, records, tmp_path / "killed", config, **often).train(
        stop_after=5
    )  # state of step 3 on disk
    torch.manual_seed(999)
    trainer(target, records, tmp_path / "killed", config, **often).train(stop_after=5)
    trainer(target, records, tmp_path / "killed", config, **often).train()
    for which in ("last", "best"):
        whole, killed = (ImitationDraft.load(tmp_path / run / which) for run in ("whole", "killed"))
        assert digest(whole.network) == digest(killed.network)
    states = [torch.load(tmp_path / run / "state.pt", weights_only=True) for run in ("whole", "killed")]
    assert states[0]["best"] == states[1]["best"]
    for a, b in zip(*(s["optimizer"]["state"].values() for s in states), strict=True):
        assert torch.equal(a["exp_avg"], b["exp_avg"])
    fused = [name for name in states[0]["objective"] if name.startswith("fusion.")]
    assert len(fused) == {"average": 0, "concat": 1, "attention": 2}[fusion]
    for name in fused:
        assert torch.equal(*(state["objective"][name] for state in states)), name


@pytest.mark.parametrize("kind", TRAINED)
def test_every_kind_learns_resumes_exactly_and_comes_back(
    target: Target, records: RecordSet, tmp_path: Path, kind: str
):
    """What the table of kinds must show of each: see `objectives.base.Objective`."""
    if kind == "vispec":  # tests/unit/calibration/test_vispec_training.py has targets for it
        with pytest.raises(OptionError, match=r"--draft vispec: .* give --draft eagle"):
            objective_for(options_of(kind)(**TRAINED[kind]), target)
        return
    learns_and_resumes(target, records, tmp_path, kind)


def test_a_resumed_run_keeps_a_better_network_from_before(target: Target, records: RecordSet, tmp_path: Path):
    config, often = options(LAYER, steps=6, batch_size=5), {"eval_every": 2, "save_every": 2}
    trainer(target, records, tmp_path, config, **often).train(stop_after=2)
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    torch.save(state | {"best": 2.0}, tmp_path / "state.pt")  # no later network can be better
    before = digest(ImitationDraft.load(tmp_path / "best").network)
    trainer(target, records, tmp_path, config, **often).train()
    assert digest(ImitationDraft.load(tmp_path / "best").network) == before
    assert digest(ImitationDraft.load(tmp_path / "last").network) != before


def test_rows_beyond_float16_are_refused(target: Target, records: RecordSet, tmp_path: Path, monkeypatch):
    run = target.rows

    def large(*arguments):
        rows, trunks = run(*arguments)
        return replace(rows, residuals=rows.residuals * 1e6), trunks

    monkeypatch.setattr(target, "rows", large)
    with pytest.raises(OptionError, match="beyond float16; use --cache-dtype float32"):
        build_cache(target, records, [LAYER], tmp_path)
    build_cache(target, records, [LAYER], tmp_path, "float32")


def test_a_run_begun_before_an_option_existed_had_its_default(
    target: Target, records: RecordSet, tmp_path: Path
):
    config, often = options(LAYER, steps=4, batch_size=5), {"eval_every": 2, "save_every": 2}
    trainer(target, records, tmp_path, config, **often).train(stop_after=2)
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    del state["run"]["clip_value"]
    torch.save(state, tmp_path / "state.pt")
    with pytest.raises(OptionError, match=r"clip_value = None, this one has 0\.5"):
        trainer(target, records, tmp_path, (config[0], replace(config[1], clip_value=0.5)), **often).train()
    resumed = trainer(target, records, tmp_path, config, **often)
    resumed.train()
    assert resumed.step == 4


def test_a_run_with_other_options_is_not_continued(target: Target, records: RecordSet, tmp_path: Path):
    config = options(LAYER, steps=2, batch_size=4)
    trainer(target, records, tmp_path, config).train()
    with pytest.raises(OptionError, match=r"lr = 0\.01,.*0\.5.*--restart"):
        trainer(target, records, tmp_path, (config[0], replace(config[1], lr=0.5))).train()
    trainer(target, records, tmp_path, (config[0], replace(config[1], lr=0.5))).train(restart=True)


def test_cached_rows_equal_live_rows(target: Target, records: RecordSet, tmp_path: Path, monkeypatch):
    whole = build_cache(target, records, [LAYER, 3], tmp_path / "whole", "float32", batch_size=1)
    for layer in (LAYER, 3):
        live = LiveFeatures(target, records, layer).rows([4, 1])
        cached = CachedFeatures(whole, layer).rows([4, 1])
        torch.testing.assert_close(cached.trunk, live.trunk, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(cached.residuals, live.residuals, rtol=1e-4, atol=1e-4)
        for name in ("tokens", "records", "positions"):
            assert getattr(cached, name).tolist() == getattr(live, name).tolist()

    calls, run = [], target.rows
    monkeypatch.setattr(target, "rows", lambda *a: calls.append(a) or (run(*a) if len(calls) < 11 else 1 / 0))
    with pytest.raises(ZeroDivisionError):
        build_cache(target, records, [LAYER, 3], tmp_path / "killed", "float32", batch_size=1)
    monkeypatch.setattr(target, "rows", lambda *a: calls.append(a) or run(*a))
    killed = build_cache(target, records, [LAYER, 3], tmp_path / "killed", "float32", batch_size=1)
    assert len(calls) == 11 + len(records) - 8  # progress is kept every 8 batches
    for name in (f"trunk.{LAYER}.bin", "residuals.bin"):
        assert (killed / name).read_bytes() == (whole / name).read_bytes()
    build_cache(target, records, [LAYER], tmp_path / "killed", "float32")
    assert len(calls) == 11 + len(records) - 8
    others = [build_cache(target, RecordSet("others", records[:2]), [LAYER], tmp_path / "whole", "float32")]
    monkeypatch.setattr(type(target), "fingerprint", "sha256:another")
    others.append(build_cache(target, records, [LAYER], tmp_path / "whole", "float32"))
    assert len({whole, *others}) == 3, "rows of other records, or of another target, are not these"


def test_presets_switch_the_losses(target: Target, records: RecordSet):
    rows = LiveFeatures(target, records, LAYER).rows([0, 1])
    expected = {"our": {"ce"}, "our+cs": {"ce", "cosine"}, "our+cs+kd": {"ce", "cosine", "kd"}}
    kind = options_of("imitation")
    assert set(kind.presets) == set(expected)
    for preset, names in expected.items():
        _, parts = objective_for(kind.of({"layer": LAYER, "ce": 9.0}, preset), target).loss(rows, target)
        assert set(parts) - {"loss", "overlap", "agreement", "fused"} == names
    with pytest.raises(OptionError, match="theirs"):
        kind.of({"layer": LAYER}, "theirs")
    with pytest.raises(OptionError, match="give --draft-layer"):
        kind.of({"layer": None})


@pytest.mark.parametrize("fusion", ["last", "average"])
def test_the_objective_is_the_weighted_sum_of_its_losses(target: Target, records: RecordSet, fusion: str):
    rows = LiveFeatures(target, records, LAYER).rows([0, 1])
    own = ImitationOptions(LAYER, ce=0.5, kd=2.0, cosine=3.0, fusion=fusion, residual=True)
    # A new network on a residual connection gives its input: the draft's rows are the trunk's.
    total, parts = ImitationObjective(own, target).loss(rows, target)
    mine, last = target.head(rows.trunk), rows.residuals[:, -1]
    wanted = {
        "ce": losses.cross_entropy(mine, rows.tokens),
        "kd": losses.distillation(mine, target.head(last), own.kd_distance),
        "cosine": losses.cosine_distance(rows.trunk, last if fusion == "last" else rows.residuals.mean(1)),
        "agreement": losses.agreement(mine, target.head(last)).float().mean(),
    }
    for name, value in wanted.items():
        torch.testing.assert_close(parts[name], value)
    torch.testing.assert_close(total, 0.5 * wanted["ce"] + 2.0 * wanted["kd"] + 3.0 * wanted["cosine"])


@pytest.mark.parametrize("fusion", ["concat", "attention"])
def test_the_cosine_cannot_move_its_target_unless_it_is_asked_to(
    target: Target, records: RecordSet, fusion: str
):
    """A fusion's gradient comes from its own cross entropy alone, or as published from the cosine alone."""
    rows = LiveFeatures(target, records, LAYER).rows([0, 1])

    def learned(learning: str) -> tuple[ImitationObjective, list[torch.Tensor]]:
        torch.manual_seed(3)
        own = ImitationOptions(
            LAYER, ce=0.0, kd=0.0, cosine=5.0, fusion=fusion, fusion_loss=learning, residual=False
        )
        objective = ImitationObjective(own, target)
        objective.loss(rows, target)[0].backward()
        assert objective.fusion is not None
        return objective, [p.grad.clone() for p in objective.fusion.parameters() if p.grad is not None]

    for learning in ("own", "cosine"):
        objective, found = learned(learning)
        objective.zero_grad()
        fused = objective.fusion(rows.residuals)
        if learning == "own":
            torch.nn.functional.cross_entropy(target.head(fused), rows.tokens).backward()
        else:
            drafted = objective.network(rows.trunk).detach()
            (5.0 * losses.cosine_distance(drafted, fused)).backward()
        wanted = [p.grad for p in objective.fusion.parameters()]
        assert len(found) == len(wanted) and any(g.abs().max() > 0 for g in found)
        for mine, theirs in zip(found, wanted, strict=True):
            torch.testing.assert_close(mine, theirs)


def test_a_cosine_that_moves_its_target_leaves_the_last_rows(
    target: Target, records: RecordSet, tmp_path: Path
):
    """The cosine is met better by a linear layer that follows it, whose rows then say less of what the target says."""
    said = {}
    for learning in ("own", "cosine"):
        config = options(
            LAYER, steps=60, batch_size=12, lr=1e-2, warmup=1, ce=0.0, kd=0.0, cosine=1.0, fusion="concat",
            fusion_loss=learning,
        )  # fmt: skip
        run = trainer(target, records, tmp_path / learning, config, eval_every=60)
        run.train()
        rows = run.source.rows(range(len(records)))
        objective = run.objective
        assert isinstance(objective, ImitationObjective) and objective.fusion is not None
        with torch.no_grad():
            fused = target.head(objective.fusion(rows.residuals))
            _, parts = objective.loss(rows, target)
        said[learning] = (parts["cosine"].item(), losses.cross_entropy(fused, rows.tokens).item())
    assert said["cosine"][0] < said["own"][0] and said["cosine"][1] > said["own"][1], said


def test_a_fusion_begins_as_the_average_and_is_no_part_of_the_draft(
    target: Target, records: RecordSet, tmp_path: Path
):
    rows = LiveFeatures(target, records, LAYER).rows([0, 1])
    for fusion in ("concat", "attention"):
        own = ImitationOptions(LAYER, cosine=1.0, fusion=fusion)
        objective = ImitationObjective(own, target)
        assert objective.fusion is not None
        torch.testing.assert_close(objective.fusion(rows.residuals), rows.residuals.mean(1))
        inside = {id(p) for p in objective.network.parameters()}
        rest = objective.groups()[1]["params"]
        assert {id(p) for p in rest} >= {id(p) for p in objective.fusion.parameters()}
        assert not inside & {id(p) for p in objective.fusion.parameters()}
        objective.draft({}, {}).save(tmp_path / fusion)
        assert set(ImitationDraft.load(tmp_path / fusion).network.state_dict()) == set(
            ImitationNetwork(target.hidden_size).state_dict()
        )
    frozen = ImitationObjective(replace(own, fusion="concat", fusion_loss="none"), target)
    assert frozen.fusion is not None and not any(p.requires_grad for p in frozen.fusion.parameters())
    weight = next(frozen.fusion.parameters())
    torch.testing.assert_close(weight @ weight.T, torch.eye(len(weight)))
    frozen.loss(rows, target)[0].backward()
    assert weight.grad is None


def test_the_loop_knows_no_draft_kind():
    """What a kind is called, and which options it has, stand in its own files and its registry line."""
    room = Path(objectives.__file__).parents[1]
    for name in (
        "training/trainer.py", "training/run.py", "training/state.py", "features/features.py",
        "objectives/training_options.py",
    ):  # fmt: skip
        text = (room / name).read_text("utf-8").lower()
        assert "imitation" not in text.replace("the imitation network is stateless", ""), name


def test_learning_rate_defaults_to_the_kinds(target: Target, records: RecordSet, tmp_path: Path):
    objective = objective_for(ImitationOptions(LAYER), target)
    assert objective.learning_rate(128) == objective.learning_rate(4096) == 1e-2
    usual = trainer(target, records, tmp_path, options(LAYER, steps=1))
    assert usual.run["lr"] == objective.learning_rate(target.hidden_size)
    assert trainer(target, records, tmp_path, options(LAYER, steps=1, lr=0.5)).run["lr"] == 0.5


def test_heads_of_a_narrow_target_learn_faster(target: Target):
    """1e-3 is published for a width of 4,096; a target that learns beside them keeps to it."""
    heads, joint = (
        objective_for(MedusaOptions(joint=both).completed(LoopOptions(lr=1e-3)), target)
        for both in (False, True)
    )
    assert heads.learning_rate(128) == 3e-2
    assert heads.learning_rate(1024) == pytest.approx(4e-3)
    assert heads.learning_rate(4096) == heads.learning_rate(8192) == 1e-3
    assert [joint.learning_rate(width) for width in (128, 4096)] == [3e-2, 1e-3]


def test_one_token_texts_are_harmless(
    target: Target, records: RecordSet, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    short = [replace(r, tokens=(5,)) for r in records]
    rows = LiveFeatures(target, RecordSet("short", short), LAYER).rows([0, 1])
    assert (len(rows), rows.trunk.shape, rows.residuals.shape[0]) == (0, (0, target.hidden_size), 0)
    run = trainer(target, RecordSet("short", short), tmp_path / "empty", options(LAYER, steps=2))
    before = digest(run.objective.network)
    run.train(stop_after=1)
    assert digest(run.objective.network) == before and run.step == 1
    mixed = RecordSet("mixed", [*short[:3], *list(records)[3:]])
    train_draft(target, mixed, *options(LAYER, steps=2, batch_size=4), tmp_path / "run", validation=records)
    assert "3 text(s) of one token are left out of mixed" in capsys.readouterr().err
    with pytest.raises(InputError, match="short: no text has two tokens"):
        train_draft(target, RecordSet("short", short), *options(LAYER, steps=2), tmp_path / "no")


@pytest.mark.parametrize(
    ("count", "tokens", "few"), [(20, 50, False), (19, 5000, True), (300, 49, True), (1, 3, True)]
)
def test_few_validation_records_are_reported(count: int, tokens: int, few: bool):
    chosen = RecordSet("own", [Record(str(i), "?") for i in range(count)])
    said = few_validation(chosen, tokens)
    assert (said is not None) == few
    if said:
        assert f"{count} record(s) and {tokens} judged token(s), of own" in said and "--validation" in said


def test_number_of_validation_records_is_reported(
    target: Target, records: RecordSet, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """The last 5 % of twelve records are one."""
    train_draft(target, records, *options(LAYER, steps=1, batch_size=2), tmp_path / "few")
    judged = len(target.answer(records[-1])) - 1
    assert f"is chosen by 1 record(s) and {judged} judged token(s)" in capsys.readouterr().err
    many = replace(records, records=[replace(r, key=f"{n}-{r.key}") for n in range(2) for r in records])
    train_draft(target, records, *options(LAYER, steps=1, batch_size=2), tmp_path / "many", validation=many)
    assert "is chosen by" not in capsys.readouterr().err


def test_gradients_are_cut_by_value_too(target: Target, records: RecordSet, tmp_path: Path):
    config = options(LAYER, steps=1, batch_size=12, lr=1e-2, warmup=0, clip=1e9, clip_value=1e-4)
    trainer(target, records, tmp_path, config).train()
    moments = torch.load(tmp_path / "state.pt", weights_only=True)["optimizer"]["state"].values()
    largest = max(float(one["exp_avg"].abs().max()) for one in moments)
    assert largest == pytest.approx(0.1 * 1e-4, rel=1e-3)


def test_every_record_is_used_once_per_epoch_and_the_rate_warms_up_and_falls():
    config = LoopOptions(steps=100, batch_size=4, warmup=10, lr=1.0)
    for epoch in range(2):
        used = [i for step in range(epoch * 3, epoch * 3 + 3) for i in batch_indices(step, 12, config)]
        assert sorted(used) == list(range(12))
    assert batch_indices(0, 12, config) != batch_indices(3, 12, config)
    rates = [learning_rate(step, config) for step in range(100)]
    assert rates[:10] == sorted(rates[:10]) and rates[10:] == sorted(rates[10:], reverse=True)
    assert rates[10] == 1.0 and rates[-1] < 0.001


def test_an_untrained_residual_network_is_the_early_exit():
    rows = torch.randn(3, 16)
    for linears in (1, 2):
        assert torch.equal(ImitationNetwork(16, linears)(rows), rows)
    assert not torch.equal(ImitationNetwork(16, residual=False)(rows), rows)


def test_a_draft_for_another_target_is_refused_by_name(target: Target, records: RecordSet, tmp_path: Path):
    kind = "llama" if target.checkpoint.config.model_type == "llama" else "blip2-t5"
    other = make_target(kind, tmp_path / "other-model", seed=2)
    data = make_records(tmp_path, kind)
    draft = train_draft(target, data, *options(LAYER, steps=2, batch_size=4), tmp_path / "run")
    with pytest.raises(ExportError, match=f"trained for '{target.name}'.*not for 'other-model'"):
        draft.check_target(other.name, other.fingerprint, other.num_layers, other.hidden_size)


def test_bad_options_are_named(target: Target, records: RecordSet, tmp_path: Path):
    with pytest.raises(OptionError, match=r"--draft-layer 5 is outside 1\.\.4"):
        train_draft(target, records, *options(5), tmp_path)
    for values, match in (
        ({"ce": 0.0, "kd": 0.0}, "every loss weight is 0"),
        ({"fusion": "sum"}, "sum"),
        ({"fusion_loss": "us"}, "unknown --fusion-loss 'us'"),
        ({"fusion_loss": "cosine"}, "for a --fusion with weights, concat or attention, not for average"),
        ({"fusion": "attention", "fusion_loss": "none"}, "give --fusion average"),
        ({"kd_distance": "js"}, "js"),
        ({"lr": 0.0}, "--lr"),
        ({"steps": 0}, "--steps"),
    ):
        with pytest.raises(OptionError, match=match):
            options(1, **values)  # type: ignore[arg-type]


def test_a_damaged_draft_folder_is_refused(tmp_path: Path):
    with pytest.raises(ExportError, match=r"draft\.json"):
        ImitationDraft.load(tmp_path)
    network = ImitationNetwork(8, 1, "silu", "rms_norm", residual=False)
    ImitationDraft(network=network, layer=1, target={"name": "x", "fingerprint": "sha256:1"}).save(
        tmp_path, torch.float16
    )
    loaded = ImitationDraft.load(tmp_path)
    rows = torch.randn(2, 8)
    torch.testing.assert_close(loaded.network(rows), network(rows), rtol=1e-3, atol=1e-3)
    document = (tmp_path / "draft.json").read_text()
    (tmp_path / "draft.json").write_text(document.replace('"hidden_size": 8', '"hidden_size": 9'))
    with pytest.raises(ExportError, match="cannot be read"):
        ImitationDraft.load(tmp_path)


def test_a_record_without_text_is_refused_before_training(target: Target, records: RecordSet, tmp_path: Path):
    mute = RecordSet("data", [*records, replace(records[0], key="mute", answer=None)])
    with pytest.raises(InputError, match=r"1 of 13 records.*mute.*generate-data"):
        train_draft(target, mute, *options(LAYER, steps=2), tmp_path / "run", validation=records)
    assert not (tmp_path / "run").exists()
