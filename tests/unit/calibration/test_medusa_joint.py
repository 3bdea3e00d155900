"""Medusa-2: what the target learns, what stays, and what the changed target is afterwards."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path

import jsonschema
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from vlmexport.calibration import cli as training_cli
from vlmexport.calibration.features.features import LiveFeatures
from vlmexport.calibration.objectives import objective_for
from vlmexport.calibration.objectives.medusa import ahead, measure_hits
from vlmexport.calibration.objectives.medusa_joint import JointMedusaObjective
from vlmexport.calibration.objectives.medusa_options import MedusaOptions
from vlmexport.calibration.objectives.training_options import LoopOptions
from vlmexport.calibration.targets.target import Target, load_target
from vlmexport.calibration.training.run import Schedule, train_draft
from vlmexport.exporter.checkpoint import changed, fingerprint, open_checkpoint
from vlmexport.exporter.checkpoint.origin import Origin
from vlmexport.exporter.drafts.medusa.medusa import MedusaDraft
from vlmexport.exporter.pipeline import BuildRequest, build_bundle
from vlmexport.runtime import cli
from vlmexport.runtime.bundle.folder import Bundle
from vlmexport.runtime.common.errors import ExportError, OptionError
from vlmexport.runtime.measure.inspection import facts
from vlmexport.runtime.session.session import Session

from tests.support import tiny_models
from tests.support.changing_targets import NEW, Place, learned, make_place, trainer, weights
from tests.support.training_targets import KINDS, logits_after, make_target, own_answers

ALL = (*KINDS, "llama-tied")
HEADS = 2


@pytest.fixture(scope="module", params=ALL)
def place(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Place:
    return make_place(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Place:
    """Of an encoder-decoder with pictures."""
    return make_place("blip2-t5", tmp_path_factory.mktemp("one"))


def test_the_loss_is_the_targets_own_and_the_heads_apart(place: Place) -> None:
    """Against loops over records, tokens and heads, whose base is the model's own logits of every token."""
    target = place.target()
    own = MedusaOptions(heads=HEADS, decay=0.7, joint=True, head_weight=0.3)
    objective = objective_for(own, target)
    for parameter in objective.network.parameters():  # untrained heads are all alike
        torch.nn.init.normal_(parameter, std=0.1, generator=torch.Generator().manual_seed(parameter.numel()))
    records = place.records[:3]
    rows = LiveFeatures(target, place.records, target.num_layers, first=True).rows(range(3))
    total, parts = objective.loss(rows, target)

    base: list[torch.Tensor] = []
    far: list[list[torch.Tensor]] = [[] for _ in range(HEADS)]
    hits: list[list[bool]] = [[] for _ in range(HEADS)]
    for record in records:
        text = list(target.answer(record))
        for at, token in enumerate(text):
            kept = {}
            hook = target.lm_head.register_forward_pre_hook(lambda m, x, kept=kept: kept.update(rows=x[0]))
            base.append(F.cross_entropy(logits_after(target, record, text[:at])[None], torch.tensor([token])))
            hook.remove()
            with torch.no_grad():
                found = objective.network(kept["rows"][0, -1], target.lm_head.weight)
            for k in range(HEADS):
                if at + 1 + k < len(text):
                    wanted = text[at + 1 + k]
                    far[k].append(F.cross_entropy(found[k][None], torch.tensor([wanted])))
                    hits[k].append(int(found[k].argmax()) == wanted)
    means = [torch.stack(values).mean() for values in far]
    close = partial(torch.testing.assert_close, rtol=1e-3, atol=1e-4)
    close(parts["base"], torch.stack(base).mean())
    for k in range(HEADS):
        close(parts[f"head{k + 1}"], means[k])
        close(parts[f"hit{k + 1}"], torch.tensor(hits[k]).float().mean())
    close(parts["heads"], 0.7 * means[0] + 0.49 * means[1])
    close(total, parts["base"] + 0.3 * parts["heads"])
    assert len(rows) == sum(len(target.answer(r)) for r in records) and not parts["heads"].requires_grad


def test_both_losses_reach_the_target(one: Place) -> None:
    target = one.target()
    options = MedusaOptions(heads=HEADS, joint=True, head_weight=0.5)
    objective = objective_for(options, target)
    source = LiveFeatures(target, one.records, target.num_layers, first=True)
    weight = target.layers[0].layer[0].SelfAttention.q.weight

    def gradient(part: str) -> torch.Tensor:
        rows = source.rows(range(4))
        read = target.features(rows.residuals[:, -1])
        if part == "loss":
            value = objective.loss(rows, target)[0]
        elif part == "base":
            value = F.cross_entropy(target.lm_head(read), rows.tokens)
        else:
            logits, labels = objective.network(read, target.lm_head.weight), ahead(rows, HEADS)
            both = [F.cross_entropy(logits[:, k], labels[:, k], ignore_index=-100) for k in range(HEADS)]
            value = 0.8 * both[0] + 0.64 * both[1]
        return torch.autograd.grad(value, weight)[0]

    base, heads = gradient("base"), gradient("heads")
    assert min(base.abs().max(), heads.abs().max()) > 0
    torch.testing.assert_close(gradient("loss"), base + 0.5 * heads, rtol=1e-4, atol=1e-6)


def test_only_the_decoder_learns_after_the_heads_were_warmed_up(place: Place, tmp_path: Path) -> None:
    target = place.target()
    before = weights(target)
    own = MedusaOptions(heads=HEADS, joint=True, warm_up_heads=3)
    loop = LoopOptions(steps=6, batch_size=6, lr=1e-2, warmup=1)
    run = trainer(place, tmp_path, own, loop, target, eval_every=9, save_every=3)
    heads = {name: value.clone() for name, value in run.objective.network.state_dict().items()}
    run.train(stop_after=3)
    for name, value in target.model.named_parameters():
        assert torch.equal(value, before[name]), f"{name} moved while the heads learned alone"
    assert all(not torch.equal(v, heads[n]) for n, v in run.objective.network.state_dict().items())
    moments = torch.load(tmp_path / "state.pt", weights_only=True)["optimizer"]["state"]
    assert len(moments) == len(heads), "nothing is remembered of what did not learn"
    run.train(stop_after=2)
    inside = learned(target)
    assert any(inside.values()) and (all(inside.values()) == (place.kind == "llama-tied"))
    for name, value in target.model.named_parameters():
        unused = name.endswith("k_proj.bias")  # adds the same to every score of a row
        if not unused:
            assert torch.equal(value, before[name]) != inside[name], name
    if place.kind == "llama-tied":
        assert target.model.lm_head.weight is target.model.model.embed_tokens.weight


def test_a_table_that_an_encoder_reads_stays_where_the_head_is_tied_to_it(tmp_path: Path) -> None:
    model, tokenizer = tiny_models.t5(**KINDS["t5"])
    model.lm_head.weight = model.shared.weight
    folder = tiny_models.save(model, tokenizer, tmp_path / "model")
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "tie_word_embeddings": True}))
    target = load_target(folder)
    assert target.lm_head.weight is target.model.shared.weight
    ids = {id(p) for p in target.changing().parameters}
    assert id(target.model.shared.weight) not in ids
    assert ids == {id(p) for m in (target.layers, target.final_norm) for p in m.parameters()}


def test_heads_and_target_have_rates_of_their_own(one: Place, tmp_path: Path) -> None:
    """The first step of AdamW moves a number by its rate, whatever the gradient, which is cut for each of the two alone;
    the target's weights do not decay. The rates of later steps are logged."""
    target = one.target()
    before = weights(target)
    own = MedusaOptions(heads=HEADS, joint=True, base_lr=1e-4, warm_up_heads=0)
    loop = LoopOptions(steps=1, batch_size=6, lr=1e-2, warmup=0, clip=0.1, weight_decay=0.5)
    run = trainer(one, tmp_path / "a", own, loop, target)
    heads = {name: value.clone() for name, value in run.objective.network.named_parameters()}
    run.train()
    inside = learned(target)
    moved = torch.cat([
        (v - before[n]).abs().flatten() for n, v in target.model.named_parameters() if inside[n]
    ])  # fmt: skip
    assert moved.median().item() == pytest.approx(1e-4, rel=1e-2)
    assert moved.max().item() < 1.01e-4  # what decays as well may move further
    for name, value in run.objective.network.named_parameters():
        if name.endswith("linear.weight"):  # zero before, so nothing decays
            assert (value - heads[name]).abs().median().item() == pytest.approx(1e-2, rel=1e-2)

    moments = torch.load(tmp_path / "a" / "state.pt", weights_only=True)["optimizer"]["state"]
    for ids in (range(len(heads)), range(len(heads), len(moments))):
        norm = sum(float(moments[i]["exp_avg"].square().sum()) for i in ids) ** 0.5
        assert norm == pytest.approx(0.1 * 0.1, rel=1e-2)

    own = MedusaOptions(heads=HEADS, joint=True, warm_up_heads=2)
    loop = LoopOptions(steps=6, batch_size=6, lr=4e-3, warmup=1)
    trainer(one, tmp_path / "b", own, loop, log_every=1).train()
    log = [json.loads(line) for line in (tmp_path / "b" / "log.jsonl").read_text().splitlines()]
    found = [line["base_lr"] for line in log if line["kind"] == "train"]
    assert found[:4] == [0.0, 0.0, 1.25e-4, 2.5e-4] and found[3] > found[4] > found[5] > 0
    assert {"base", "heads", "head1", "head2", "hit1", "hit2", "expected", "loss", "lr"} <= set(log[0])


@pytest.mark.parametrize("stop", [1, 4], ids=["while the heads learn alone", "while both learn"])
def test_a_killed_run_ends_with_the_same_bits(one: Place, tmp_path: Path, stop: int) -> None:
    own = MedusaOptions(heads=HEADS, joint=True, warm_up_heads=2)
    loop, often = LoopOptions(steps=7, batch_size=5, lr=5e-3, warmup=1), {"eval_every": 2, "save_every": 1}
    whole = trainer(one, tmp_path / "whole", own, loop, **often)
    draft = whole.train()
    trainer(one, tmp_path / "killed", own, loop, **often).train(stop_after=stop)
    resumed = trainer(one, tmp_path / "killed", own, loop, **often)
    again = resumed.train()
    a, b = (torch.load(tmp_path / run / "state.pt", weights_only=True) for run in ("whole", "killed"))
    for name, value in a["objective"].items():
        assert torch.equal(value, b["objective"][name]), name
    for x, y in zip(a["optimizer"]["state"].values(), b["optimizer"]["state"].values(), strict=True):
        assert torch.equal(x["exp_avg"], y["exp_avg"]) and torch.equal(x["exp_avg_sq"], y["exp_avg_sq"])
    for which in ("best", "last"):
        for file in ("model/model.safetensors", "draft.safetensors"):
            one_of, other = ((tmp_path / run / which / file).read_bytes() for run in ("whole", "killed"))
            assert one_of == other, (which, file)
    assert (draft.fingerprint, draft.target) == (again.fingerprint, again.target)
    assert len(a["optimizer"]["state"]) == len(list(whole.objective.parameters()))


def test_a_finished_run_has_the_best_target_not_the_last(one: Place, tmp_path: Path) -> None:
    """A rate that spoils what the target says by itself: the best is an early one, and the hits are counted on it."""
    target = one.target()
    place = replace(one, records=own_answers(target, one.records, NEW))
    own = MedusaOptions(heads=HEADS, joint=True, warm_up_heads=1, base_lr=0.3)
    loop = LoopOptions(steps=5, batch_size=6, lr=1e-3, warmup=0, clip=1e9)
    run = trainer(place, tmp_path, own, loop, target, eval_every=1)
    draft = run.train()
    assert draft.evaluation["step"] < 5
    forgetful, modest = {"loss": 2.0, "expected": 3.0}, {"loss": 1.0, "expected": 1.5}
    assert run.objective.score(forgetful) < run.objective.score(modest)
    saved, last = (load_target(tmp_path / which / "model") for which in ("best", "last"))
    for (name, mine), theirs in zip(target.model.named_parameters(), saved.model.parameters(), strict=True):
        assert torch.equal(mine, theirs), name
    assert saved.fingerprint == draft.target["fingerprint"] != last.fingerprint
    source = LiveFeatures(saved, place.records, saved.num_layers, first=True)
    assert draft.evaluation["hits"] == measure_hits(draft.network, source, saved)
    assert MedusaDraft.load(tmp_path / "last").target["fingerprint"] == last.fingerprint


@pytest.fixture(
    scope="module",
    params=[
        "llama-tied",
        "blip2-t5",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("blip2-opt", "vit-gpt2")),
    ],
)
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Place, Path]:
    """A place, and a training on its own answers that changed its target."""
    place = make_place(request.param, tmp_path_factory.mktemp(request.param))
    target = place.target()
    own = MedusaOptions(heads=HEADS, joint=True, warm_up_heads=10)
    loop = LoopOptions(steps=40, lr=4e-3, batch_size=6, warmup=2)
    folder = place.folder.parent / "run"
    records = own_answers(target, place.records, NEW)
    train_draft(target, records, own, loop, folder, records, schedule=Schedule(eval_every=20))
    return place, folder


def test_the_changed_model_is_a_model_like_the_one_before(run: tuple[Place, Path]) -> None:
    place, out = run
    draft, folder = MedusaDraft.load(out), out / "best" / "model"
    old, new = open_checkpoint(place.folder), open_checkpoint(folder)
    assert fingerprint(new) == draft.target["fingerprint"] != fingerprint(old)
    assert draft.trained_from == {"name": "model", "fingerprint": fingerprint(old)}
    assert new.trained_from == Origin("model", fingerprint(old))
    assert list(old.tensors) == list(new.tensors)
    same = {p.name for p in place.folder.iterdir()} | {"trained_from.json"}
    assert {p.name for p in folder.iterdir()} == same
    before, after = load_target(place.folder), load_target(folder)
    inside = learned(before)
    for (name, a), b in zip(before.model.named_parameters(), after.model.parameters(), strict=True):
        assert torch.equal(a, b) or inside[name], name
    plain = load_target(folder).checkpoint.model_class.from_pretrained(folder)  # as anybody would
    for a, b in zip(plain.parameters(), after.model.parameters(), strict=True):
        assert torch.equal(a, b)
    first, best = json.loads((out / "log.jsonl").read_text().splitlines()[0]), draft.evaluation["validation"]
    assert best["base"] < 1.5 * first["base"] and best["hit1"] > 0.3


def test_its_bundle_is_lossless_and_says_that_it_changed(
    run: tuple[Place, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place, out = run
    folder = out / "best" / "model"
    build_bundle(BuildRequest(model=str(folder), output=tmp_path / "b", drafts=[str(out)], max_length=64))
    bundle = Bundle.open(tmp_path / "b")
    origin = bundle.manifest.model.trained_from
    assert origin is not None and origin.fingerprint == fingerprint(open_checkpoint(place.folder))
    schema = json.loads((Path(cli.__file__).parent / "schemas" / "inspect-1.json").read_text())
    jsonschema.validate(facts(bundle) | {"checked": {"sizes": 9, "sha256": None}}, schema)
    assert cli.main(["inspect", str(tmp_path / "b")]) == 0
    assert "Trained from" in capsys.readouterr().out
    target = load_target(folder)
    wanted = target.generate(place.records[:4], NEW)
    accepted = 0
    with Session.load(tmp_path / "b") as session:
        for record, tokens in zip(place.records[:4], wanted, strict=True):
            image = None if record.image is None else record.image.load()
            asked = {"image": image, "prompt": record.prompt, "max_new_tokens": NEW}
            found = session.generate(**asked, draft="medusa", draft_length=HEADS)
            assert found.tokens == session.generate(**asked, draft="none").tokens == list(tokens)
            accepted += found.stats.accepted
    assert accepted > 0


def test_heads_fit_the_changed_target_only(run: tuple[Place, Path], tmp_path: Path) -> None:
    place, out = run
    request = BuildRequest(model=str(place.folder), output=tmp_path / "b", drafts=[str(out)], max_length=64)
    with pytest.raises(ExportError, match=r"changed its target.*no longer.*give --model the folder 'model'"):
        build_bundle(request)
    assert not (tmp_path / "b").exists()
    name = place.kind.removesuffix("-tied")
    other = make_target(name, tmp_path / "third", seed=9)
    draft = MedusaDraft.load(out)
    with pytest.raises(ExportError, match=r"trained for 'model, changed by Medusa-2'.*not for 'third'"):
        draft.check_target(other.name, other.fingerprint, other.num_layers, other.hidden_size)


def test_model_files_and_dtypes_are_kept(tmp_path: Path, monkeypatch) -> None:
    """What did not learn keeps its bits and its type; a large model is written in parts."""
    model, tokenizer = tiny_models.llama(**KINDS["llama"])
    folder = tiny_models.save(
        model, tokenizer, tmp_path / "model", dtype=torch.float16, max_shard_size="100KB"
    )
    target = load_target(folder)
    decoder = target.changing()
    with torch.no_grad():
        for parameter in decoder.parameters:
            parameter.mul_(1.0001)
    decoder.origin = replace(decoder.origin, default_prompt="what is there?")
    monkeypatch.setattr(changed, "SHARD_BYTES", 200_000)
    decoder.save(tmp_path / "new")
    assert len(list((tmp_path / "new").glob("model-*.safetensors"))) > 2
    old, new = open_checkpoint(folder), open_checkpoint(tmp_path / "new")
    assert decoder.fingerprint == fingerprint(new) and new.default_prompt == "what is there?"
    assert new.tensors.dtype("model.embed_tokens.weight") == "float16"
    assert new.tensors.dtype("model.norm.weight") == new.tensors.dtype("lm_head.weight") == "float32"
    assert torch.equal(*(c.tensors.read("model.embed_tokens.weight").view(torch.int16) for c in (old, new)))
    again = load_target(tmp_path / "new")
    assert all(
        torch.equal(a, b) for a, b in zip(decoder.parameters, again.changing().parameters, strict=True)
    )
    assert any(
        not torch.equal(a, b) for a, b in zip(target.layers.parameters(), load_target(folder).layers.parameters(), strict=True)
    )  # fmt: skip


def test_the_recipe_of_the_original_is_not_that_of_the_changed_model(one: Place, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(one.folder, tmp_path / "model"))
    (folder / "recipe.json").write_text('{"curve": []}')
    load_target(folder).changing().save(tmp_path / "new")
    assert {p.name for p in (tmp_path / "new").iterdir()} == {p.name for p in one.folder.iterdir()} | {
        "trained_from.json"
    }


def test_a_tied_table_that_is_stored_twice_changes_twice(tmp_path: Path) -> None:
    folder = tiny_models.checkpoint("llama-tied", tmp_path / "model", **KINDS["llama"])
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    target = load_target(folder)
    tied = target.lm_head.weight is target.model.model.embed_tokens.weight
    decoder = target.changing()
    with torch.no_grad():
        target.lm_head.weight.add_(0.5)
    decoder.save(tmp_path / "new")
    found = load_file(tmp_path / "new" / "model.safetensors")
    assert torch.equal(found["lm_head.weight"], target.lm_head.weight)
    assert torch.equal(found["model.embed_tokens.weight"], target.model.model.embed_tokens.weight)
    assert tied == torch.equal(found["lm_head.weight"], found["model.embed_tokens.weight"])
    again = load_target(tmp_path / "new")
    assert torch.equal(again.lm_head.weight, target.lm_head.weight)


def test_the_command_trains_both_and_says_where_they_are(
    one: Place, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, rows = [], Target.rows
    monkeypatch.setattr(
        Target, "rows", lambda self, r, n, first=False: asked.append(first) or rows(self, r, n, first)
    )
    data = one.folder.parent / "data.jsonl"
    command = [
        "train", "--model", str(one.folder), "--draft", "medusa", "--joint", "--heads", "2", "--data", str(data), "--steps",
        "4", "--batch-size", "4", "--warm-up-heads", "1", "--threads", "1", "-o", str(tmp_path / "out"),
    ]  # fmt: skip
    assert cli.main([*command, "--json"]) == 0
    printed = capsys.readouterr()
    report = json.loads(printed.out)
    schema = Path(training_cli.__file__).parent / "schemas" / "train-1.json"
    jsonschema.validate(report, json.loads(schema.read_text()))
    model = tmp_path / "out" / "best" / "model"
    assert report["model"] == {"folder": str(model), "fingerprint": fingerprint(open_checkpoint(model))}
    assert report["target"]["fingerprint"] == fingerprint(open_checkpoint(one.folder))
    assert "the target changes: " in printed.err and {"base", "heads"} <= set(report["best"]["validation"])
    assert cli.main(command) == 0
    assert capsys.readouterr().out.endswith(f"its target, which changed: {model}\n")
    assert asked and all(asked), "the first token of an answer is learned, too"
    evaluate = ["eval", "--data", str(data), "--draft", str(tmp_path / "out"), "--max-new-tokens", "8"]
    assert cli.main([*evaluate, "--model", str(model)]) == 0
    assert cli.main([*evaluate, "--model", str(one.folder)]) == 2
    assert "give --model the folder 'model'" in capsys.readouterr().err


def test_options_that_do_not_fit_are_named(one: Place, tmp_path: Path) -> None:
    for name, value in (("base_lr", 1e-4), ("head_weight", 0.1), ("warm_up_heads", 3)):
        with pytest.raises(OptionError, match=f"--{name.replace('_', '-')} applies to --joint only"):
            MedusaOptions(**{name: value})
    for name, value in (("base_lr", 0.0), ("head_weight", 0.0), ("warm_up_heads", -1)):
        with pytest.raises(OptionError, match=f"--{name.replace('_', '-')} must be"):
            MedusaOptions(joint=True, **{name: value})
    loop = LoopOptions(steps=10, lr=4e-3)
    with pytest.raises(OptionError, match="--warm-up-heads 10 leaves none of 10 --steps to the target"):
        MedusaOptions(joint=True, warm_up_heads=10).completed(loop)
    usual = MedusaOptions(joint=True).completed(loop)
    assert (usual.base_lr, usual.head_weight, usual.warm_up_heads) == (2.5e-4, 0.2, 2)
    slow = MedusaOptions(joint=True).completed(replace(loop, lr=4e-4))
    assert slow.base_lr == 1e-4
    assert MedusaOptions().completed(loop) == MedusaOptions()
    target, own = one.target(), MedusaOptions(joint=True)
    assert isinstance(objective_for(own, target), JointMedusaObjective)
    with pytest.raises(OptionError, match="--cache-features keeps rows of a target that stays as it is"):
        train_draft(target, one.records, own, loop, tmp_path / "run", cache=tmp_path / "rows")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON"), ("[]", "does not name a model"), ('{"name": "x"}', "does not name a model"),
        ('{"name": 7, "fingerprint": "y"}', "7 is not a text"), (json.dumps({"name": "x" * 201}), "is not a text of at most"),
        ("[" * 100_000, "is not JSON"),
    ],
)  # fmt: skip
def test_invalid_origin_of_a_folder_is_refused(one: Place, tmp_path: Path, text: str, message: str) -> None:
    folder = Path(shutil.copytree(one.folder, tmp_path / "model"))
    (folder / "trained_from.json").write_text(text)
    with pytest.raises(ExportError, match=message) as caught:
        build_bundle(BuildRequest(model=str(folder), output=tmp_path / "b", drafts=["none"]))
    assert "\n" not in str(caught.value) and "trained_from.json" in str(caught.value)
