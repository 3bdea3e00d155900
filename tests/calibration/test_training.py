"""Training: it lowers the loss, resumes exactly, and leaves the target alone."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from training_targets import make_records, make_target
from vlmexport.calibration.data import RecordSet
from vlmexport.calibration.targets.target import Target
from vlmexport.calibration.training import losses
from vlmexport.calibration.training.config import PRESETS, TrainConfig, with_preset
from vlmexport.calibration.training.features import CachedFeatures, LiveFeatures, build_cache
from vlmexport.calibration.training.objectives.imitation import Objective
from vlmexport.calibration.training.run import train_imitation
from vlmexport.calibration.training.trainer import Trainer, batch_indices, learning_rate
from vlmexport.exporter.drafts.imitation import ImitationDraft, ImitationNetwork
from vlmexport.runtime.errors import ExportError, InputError, OptionError

LAYER = 2


def trainer(target: Target, records: RecordSet, out: Path, config: TrainConfig, **options) -> Trainer:
    source = LiveFeatures(target, records, config.layer)
    identity = {"name": target.name, "fingerprint": target.fingerprint, "num_layers": target.num_layers}
    return Trainer(
        config, target.head, target.hidden_size, identity, source, source, "data", out,
        report=lambda line: None, **options,
    )  # fmt: skip


def digest(model: torch.nn.Module) -> str:
    sha = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        sha.update(
            name.encode() + tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        )
    return sha.hexdigest()


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


def test_training_lowers_the_loss_and_not_one_bit_of_the_target_changes(
    target: Target, records: RecordSet, tmp_path: Path
):
    before = digest(target.model)
    answers = target.generate(list(records), 8)
    records = RecordSet("told", [replace(r, tokens=a) for r, a in zip(records, answers, strict=True)])
    config = TrainConfig(LAYER, steps=60, batch_size=6, lr=3e-3, warmup=5, cosine=1.0)
    run = trainer(target, records, tmp_path, config, eval_every=20, save_every=20)
    rows = LiveFeatures(target, records, LAYER).rows(range(len(records)))
    first, _ = run.objective(run.network(rows.trunk), rows)
    draft = run.train()
    last, parts = run.objective(draft.network(rows.trunk), rows)
    assert last < 0.5 * first
    assert parts["agreement"] > 0.6
    assert digest(target.model) == before
    draft.check_target(target.name, target.fingerprint, target.num_layers, target.hidden_size)
    assert draft.provenance["options"]["steps"] == 60


def test_the_first_step_and_what_it_reports(target: Target, records: RecordSet, tmp_path: Path):
    """AdamW moves what has a gradient by the rate, whatever its size; what has none yet (all before the last
    linear, which is zero) only decays, if it is a matrix."""
    config = TrainConfig(LAYER, steps=1, batch_size=5, lr=3e-2, warmup=2, clip=1e-3, weight_decay=0.5)
    run = trainer(target, records, tmp_path, config)
    before = {name: value.clone() for name, value in run.network.state_dict().items()}
    network = run.train().network
    after = network.state_dict()
    torch.testing.assert_close(after["linear.0.weight"], before["linear.0.weight"] * (1 - 0.01 * 0.5))
    assert torch.equal(after["norm.weight"], before["norm.weight"])
    assert after["linear.1.weight"].abs().median().item() == pytest.approx(0.01, rel=1e-2)
    moments = torch.load(tmp_path / "state.pt", weights_only=True)["optimizer"]["state"].values()
    norm = sum(float(one["exp_avg"].square().sum()) for one in moments) ** 0.5
    assert norm == pytest.approx(0.1 * config.clip, rel=1e-2)  # of the clipped gradient
    # 12 records in batches of 5: the reported means are means over rows, not over batches.
    rows = run.source.rows(range(len(records)))
    _, parts = run.objective(network(rows.trunk), rows)
    reported = json.loads((tmp_path / "log.jsonl").read_text().splitlines()[-1])
    assert reported["kind"] == "validation"
    for name in ("loss", "overlap", "agreement"):
        assert reported[name] == pytest.approx(parts[name].item(), rel=1e-3), name


@pytest.mark.parametrize("fusion", ["average", "concat-stopped"])
def test_a_killed_run_ends_with_the_same_weights(
    target: Target, records: RecordSet, tmp_path: Path, fusion: str
):
    config = TrainConfig(LAYER, steps=11, batch_size=5, lr=3e-3, warmup=3, cosine=1.0, fusion=fusion)
    options = {"eval_every": 4, "save_every": 3}
    trainer(target, records, tmp_path / "whole", config, **options).train()
    trainer(target, records, tmp_path / "killed", config, **options).train(
        stop_after=5
    )  # state of step 3 on disk
    torch.manual_seed(999)
    trainer(target, records, tmp_path / "killed", config, **options).train(stop_after=5)
    trainer(target, records, tmp_path / "killed", config, **options).train()
    for which in ("last", "best"):
        whole, killed = (ImitationDraft.load(tmp_path / run / which) for run in ("whole", "killed"))
        assert digest(whole.network) == digest(killed.network)
    states = [torch.load(tmp_path / run / "state.pt", weights_only=True) for run in ("whole", "killed")]
    assert states[0]["best"] == states[1]["best"]
    for a, b in zip(*(s["optimizer"]["state"].values() for s in states), strict=True):
        assert torch.equal(a["exp_avg"], b["exp_avg"])
    if fusion == "concat-stopped":
        assert torch.equal(states[0]["objective"]["projection"], states[1]["objective"]["projection"])


def test_a_resumed_run_keeps_a_better_network_from_before(target: Target, records: RecordSet, tmp_path: Path):
    config, options = TrainConfig(LAYER, steps=6, batch_size=5), {"eval_every": 2, "save_every": 2}
    trainer(target, records, tmp_path, config, **options).train(stop_after=2)
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    torch.save(state | {"best": 2.0}, tmp_path / "state.pt")  # no later network can be better
    before = digest(ImitationDraft.load(tmp_path / "best").network)
    trainer(target, records, tmp_path, config, **options).train()
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


def test_a_run_with_other_options_is_not_continued(target: Target, records: RecordSet, tmp_path: Path):
    config = TrainConfig(LAYER, steps=2, batch_size=4)
    trainer(target, records, tmp_path, config).train()
    with pytest.raises(OptionError, match=r"lr = 0\.001.*0\.5.*--restart"):
        trainer(target, records, tmp_path, replace(config, lr=0.5)).train()
    trainer(target, records, tmp_path, replace(config, lr=0.5)).train(restart=True)


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
    assert set(PRESETS) == set(expected)
    for preset, names in expected.items():
        config = TrainConfig(**with_preset({"layer": LAYER}, preset))  # type: ignore[arg-type]
        _, parts = Objective(config, target.hidden_size, target.num_layers, target.head)(rows.trunk, rows)
        assert set(parts) - {"loss", "overlap", "agreement"} == names
    with pytest.raises(OptionError, match="theirs"):
        with_preset({}, "theirs")


@pytest.mark.parametrize("fusion", ["last", "average"])
def test_the_objective_is_the_weighted_sum_of_its_losses(target: Target, records: RecordSet, fusion: str):
    rows = LiveFeatures(target, records, LAYER).rows([0, 1])
    config = TrainConfig(LAYER, ce=0.5, kd=2.0, cosine=3.0, fusion=fusion)
    total, parts = Objective(config, target.hidden_size, target.num_layers, target.head)(rows.trunk, rows)
    mine, last = target.head(rows.trunk), rows.residuals[:, -1]
    wanted = {
        "ce": losses.cross_entropy(mine, rows.tokens),
        "kd": losses.distillation(mine, target.head(last), config.kd_distance),
        "cosine": losses.cosine_distance(rows.trunk, last if fusion == "last" else rows.residuals.mean(1)),
        "agreement": losses.agreement(mine, target.head(last)).float().mean(),
    }
    for name, value in wanted.items():
        torch.testing.assert_close(parts[name], value)
    torch.testing.assert_close(total, 0.5 * wanted["ce"] + 2.0 * wanted["kd"] + 3.0 * wanted["cosine"])


def test_the_cosine_cannot_move_its_target(target: Target, records: RecordSet):
    """With a stopped projection its gradient comes from its own cross entropy alone."""
    rows = LiveFeatures(target, records, LAYER).rows([0, 1])
    config = TrainConfig(LAYER, ce=0.0, kd=0.0, cosine=5.0, fusion="concat-stopped")
    objective = Objective(config, target.hidden_size, target.num_layers, target.head)
    drafted = rows.trunk.clone().requires_grad_()
    objective(drafted, rows)[0].backward()
    assert objective.projection is not None and objective.projection.grad is not None
    found = objective.projection.grad.clone()
    objective.zero_grad()
    fused = rows.residuals.flatten(1) @ objective.projection.T
    torch.nn.functional.cross_entropy(target.head(fused), rows.tokens).backward()
    torch.testing.assert_close(found, objective.projection.grad)
    frozen = Objective(
        replace(config, fusion="concat-frozen"), target.hidden_size, target.num_layers, target.head
    )
    assert frozen.projection is not None and not frozen.projection.requires_grad


def test_every_record_is_used_once_per_epoch_and_the_rate_warms_up_and_falls():
    config = TrainConfig(1, steps=100, batch_size=4, warmup=10, lr=1.0)
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
    draft = train_imitation(target, data, TrainConfig(LAYER, steps=2, batch_size=4), tmp_path / "run")
    with pytest.raises(ExportError, match=f"trained for '{target.name}'.*not for 'other-model'"):
        draft.check_target(other.name, other.fingerprint, other.num_layers, other.hidden_size)


def test_bad_options_are_named(target: Target, records: RecordSet, tmp_path: Path):
    with pytest.raises(OptionError, match=r"--draft-layer 5 is outside 1\.\.4"):
        train_imitation(target, records, TrainConfig(5), tmp_path)
    for options, match in (
        ({"ce": 0.0, "kd": 0.0}, "every loss weight is 0"),
        ({"fusion": "sum"}, "sum"),
        ({"kd_distance": "js"}, "js"),
        ({"lr": 0.0}, "--lr"),
        ({"steps": 0}, "--steps"),
    ):
        with pytest.raises(OptionError, match=match):
            TrainConfig(1, **options)  # type: ignore[arg-type]


def test_a_damaged_draft_folder_is_refused(tmp_path: Path):
    with pytest.raises(ExportError, match=r"draft\.json"):
        ImitationDraft.load(tmp_path)
    network = ImitationNetwork(8, 1, "silu", "rms_norm", residual=False)
    ImitationDraft(network, 1, {"name": "x", "fingerprint": "sha256:1"}).save(tmp_path, torch.float16)
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
        train_imitation(target, mute, TrainConfig(LAYER, steps=2), tmp_path / "run", validation=records)
    assert not (tmp_path / "run").exists()
