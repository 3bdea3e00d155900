"""A target's own answers: greedy, sharded, resumable, bound to their target."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from vlmexport.calibration.data import RecordSet, load_records
from vlmexport.calibration.data.generated import shard_name
from vlmexport.calibration.data.reading.records import Record
from vlmexport.calibration.generation import engine
from vlmexport.calibration.generation.answers import Answers, GenerationOptions
from vlmexport.calibration.generation.bundle_answers import BundleAnswers
from vlmexport.calibration.generation.engine import open_answers
from vlmexport.calibration.generation.generate import LOCK, generate_data
from vlmexport.calibration.generation.target_bundle import target_bundle
from vlmexport.calibration.generation.torch_answers import Draws, TorchAnswers
from vlmexport.calibration.targets.target import Target, load_target
from vlmexport.calibration.training.run import train_draft
from vlmexport.exporter.checkpoint import open_checkpoint
from vlmexport.exporter.families.common.reference import collate
from vlmexport.exporter.parity.generation import NEAR_TIE
from vlmexport.exporter.parity.reference import load_reference
from vlmexport.runtime.common.errors import ExportError, InputError, OptionError
from vlmexport.runtime.common.locks import only_one

from tests.support.training_targets import KINDS, logits_after, make_jsonl, make_records, make_target, options

TURNS = (("user", "is it red?"), ("assistant", "a cup"))
"""What was said before a record."""


def quiet(line: str) -> None:
    """No progress lines in tests."""


def answer_data(
    target: Target, records: RecordSet, out: Path, limit: int, batch_size: int | None = None, **more
) -> int:
    answers = TorchAnswers(target, batch_size)
    return generate_data(answers, records, out, GenerationOptions(limit), **more).written


def all_answers(answers: Answers, records: list[Record], options: GenerationOptions) -> list:
    """What `answers` says to every record, in their order."""
    found = dict(answers.answer(records, options))
    return [found[i] for i in range(len(records))]


@pytest.mark.parametrize("target", KINDS, indirect=True)
def test_answers_are_greedy_and_independent_of_the_batch(target: Target, records: RecordSet):
    """Each token is the argmax of a pass over the text before it; padding in a batch changes nothing."""
    some = list(records)[:3]
    for record, answer in zip(some, target.generate(some, 9), strict=True):
        assert target.generate([record], 9) == [answer]
        text: list[int] = []
        for _ in range(len(answer)):
            text.append(int(logits_after(target, record, text).argmax()))
        assert tuple(text) == answer


def test_an_interrupted_generation_is_continued(
    target: Target, records: RecordSet, tmp_path: Path, monkeypatch
):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert answer_data(target, records, whole, 6, shard_size=5, batch_size=5, report=quiet) == 3
    calls, generate = [], target.generate
    monkeypatch.setattr(
        target, "generate", lambda *a: calls.append(a) or (generate(*a) if len(calls) < 2 else 1 / 0)
    )
    with pytest.raises(ZeroDivisionError):
        answer_data(target, records, killed, 6, shard_size=5, batch_size=5, report=quiet)
    with pytest.raises(OptionError, match=r"misses shard-00001\.jsonl.*generate-data"):
        load_records(str(killed))
    monkeypatch.setattr(target, "generate", generate)
    assert answer_data(target, records, killed, 6, shard_size=5, batch_size=5, report=quiet) == 2
    for number in range(3):
        assert (killed / shard_name(number)).read_bytes() == (whole / shard_name(number)).read_bytes()
    assert answer_data(target, records, killed, 6, shard_size=5, batch_size=5, report=quiet) == 0
    found = load_records(str(killed))
    assert [(r.key, r.prompt, r.image) for r in found] == [(r.key, r.prompt, r.image) for r in records]
    assert [r.tokens for r in found] == target.generate(list(records), 6)
    with pytest.raises(OptionError, match="max_new_tokens = 6, not 7"):
        answer_data(target, records, killed, 7, shard_size=5, report=quiet)


def test_a_damaged_shard_line_is_a_bad_record(target: Target, records: RecordSet, tmp_path: Path):
    answer_data(target, records, tmp_path, 4, shard_size=20, report=quiet)
    path = tmp_path / shard_name(0)
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[0], '{"key": "x"}', *lines[2:]]))
    found = load_records(str(tmp_path))
    assert len(found) == len(records) - 1 and f"{path}:2" in found.problems[0]


def test_generations_of_another_target_are_refused(target: Target, records: RecordSet, tmp_path: Path):
    answer_data(target, records, tmp_path / "data", 4, report=quiet)
    kind = "llama" if target.checkpoint.config.model_type == "llama" else "blip2-t5"
    other = make_target(kind, tmp_path / "other", seed=9)
    data = load_records(str(tmp_path / "data"))
    with pytest.raises(OptionError, match=f"generated by '{target.name}'.*the target is 'other'"):
        train_draft(other, data, *options(2, steps=1), tmp_path / "run")


def test_concurrent_generations_in_one_folder_are_refused(target: Target, records: RecordSet, tmp_path: Path):
    out = tmp_path / "data"
    out.mkdir()
    with (
        only_one(out / LOCK),
        pytest.raises(OptionError, match=f"another process writes to {out}: wait for it"),
    ):
        answer_data(target, records, out, 4, report=quiet)
    assert not any(out.glob("*.json*"))
    answer_data(target, records, out, 4, report=quiet)
    assert not (out / LOCK).exists() and (out / "generated.json").exists()


def test_an_unreadable_image_is_skipped_or_fatal(tmp_path: Path, capsys, monkeypatch):
    target = make_target("blip2-t5", tmp_path / "model")
    make_jsonl(tmp_path / "data.jsonl", 4, images=True)
    monkeypatch.chdir(tmp_path)
    records = load_records("data.jsonl")
    assert not Path(str(records[2].image.file)).is_absolute()
    file = tmp_path / str(records[2].image.file)
    file.write_bytes(file.read_bytes()[:200])  # the header is still fine
    answer_data(target, records, tmp_path / "out", 3, report=quiet)
    answered = load_records(str(tmp_path / "out"))
    assert [r.key for r in answered] == ["line-1", "line-2", "line-4"]
    assert answered[0].image.file == str(tmp_path / "picture-0.png"), "found from any folder"
    assert "picture-2.png" in capsys.readouterr().err
    with pytest.raises(InputError, match=r"picture-2\.png"):
        answer_data(target, records, tmp_path / "strict", 3, strict=True, report=quiet)


def test_a_decoder_deeper_than_its_encoder_generates(tmp_path: Path):
    """transformers alone sizes the cache of such a T5 by the encoder, and fails at the first token."""
    folder = tmp_path / "model"
    make_target("blip2-t5", folder)  # 2 encoder and 5 decoder layers
    config = json.loads((folder / "config.json").read_text())
    del config["text_config"]["decoder_layers"]
    (folder / "config.json").write_text(json.dumps(config))
    target = load_target(folder)
    records = load_records("scenes:train:1")
    (answer,) = target.generate(list(records), 4)
    assert len(answer) == 4
    reference = load_reference(open_checkpoint(folder), streamed=False)
    output = reference.generate(
        **collate(target.family, [target.prompt(r) for r in records]), max_new_tokens=4, do_sample=False
    )
    assert output[0, 1:].tolist() == list(answer)


def test_a_run_that_failed_before_its_first_shard_does_not_claim_the_folder(
    target: Target, records: RecordSet, tmp_path: Path, monkeypatch
):
    with monkeypatch.context() as patch:
        patch.setattr(target, "generate", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            answer_data(target, records, tmp_path / "out", 3, report=quiet)
    assert answer_data(target, records, tmp_path / "out", 2, report=quiet) == 1


def test_cut_answers_are_counted(target: Target, records: RecordSet, tmp_path: Path):
    lines: list[str] = []
    answer_data(target, records, tmp_path, 3, report=lines.append)
    ends = set(target.eos_token_ids)
    cut = sum(r.tokens[-1] not in ends for r in load_records(str(tmp_path)))
    assert cut and lines[-1] == f"{cut} of {len(records)} answers were cut at --max-new-tokens 3"


def test_short_answers_are_left_out_and_counted(
    target: Target, records: RecordSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    length = {record.key: 1 + n % 4 for n, record in enumerate(records)}
    monkeypatch.setattr(target, "generate", lambda asked, *more: [(5,) * length[r.key] for r in asked])
    answers, said, limits = TorchAnswers(target, 3), [], GenerationOptions(4, min_answer=3)
    found = generate_data(answers, records, tmp_path, limits, 4, report=said.append)
    kept = [r.key for r in records if length[r.key] >= 3]
    assert [r.key for r in load_records(str(tmp_path))] == kept
    assert (found.answers, found.short) == (len(kept), len(records) - len(kept))
    assert found.tokens == found.answers * 3 + sum(length[key] == 4 for key in kept)
    assert f"{found.short} answers of fewer than 3 tokens were left out" in said
    with pytest.raises(OptionError, match=r"min_answer = 3, not None"):
        generate_data(answers, records, tmp_path, GenerationOptions(4), 4, report=quiet)
    with pytest.raises(OptionError, match=r"--min-answer 10 is not in 0\.\.9"):
        GenerationOptions(9, min_answer=10)


def test_answers_that_are_all_too_short_are_a_mistake(
    target: Target, records: RecordSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(target, "generate", lambda asked, *more: [(5, 6)] * len(asked))
    with pytest.raises(
        InputError, match=r"none of the first \d+ answer\(s\) has 3 tokens.*longest has 2.*--prompt-suffix"
    ):
        generate_data(
            TorchAnswers(target), records, tmp_path, GenerationOptions(3, min_answer=3), report=quiet
        )
    assert not list(tmp_path.glob("shard-*"))


def test_a_suffix_is_part_of_every_prompt(records: RecordSet):
    asked = records.asked_with("at length.")
    assert [r.prompt for r in asked] == [f"{r.prompt} at length.".strip() for r in records]
    assert [r.key for r in asked] == [r.key for r in records] and asked.identity() != records.identity()
    assert records.asked_with("") is records


def check_draws(answers: Answers, records: RecordSet, out: Path) -> None:
    """Drawn answers are a function of (seed, record, number), and are stored so."""
    drawn = GenerationOptions(8, temperature=1.0, samples=3, seed=4)
    some = list(records)[:4]
    together = all_answers(answers, some, drawn)
    assert [all_answers(answers, [r], drawn)[0] for r in some] == together, "not of the batch"
    flat = [a for one in together for a in one]
    assert len(flat) == 12 and len(set(flat)) >= 10, "draws differ by record and by number"
    assert all_answers(answers, some, GenerationOptions(8, 1.0, 3, seed=5)) != together
    assert generate_data(answers, records, out, drawn, report=quiet).written == 1
    found = load_records(str(out))
    assert [r.key for r in found[:4]] == ["line-1", "line-1#1", "line-1#2", "line-2"]
    assert [r.tokens for r in found[:12]] == flat
    with pytest.raises(OptionError, match=r"sampling = .*'seed': 4.*, not None"):
        generate_data(answers, records, out, GenerationOptions(8), report=quiet)


def test_drawn_answers_depend_on_the_record_alone(target: Target, records: RecordSet, tmp_path: Path):
    check_draws(TorchAnswers(target), records, tmp_path)


def test_several_samples_need_a_temperature():
    for bad in ({"temperature": -1.0}, {"temperature": float("nan")}, {"samples": 2}, {"samples": 0}):
        with pytest.raises(OptionError, match=r"--temperature|--samples"):
            GenerationOptions(8, **bad)


def test_draws_have_the_distribution_of_the_softmax():
    logits, rows, temperature = torch.tensor([2.0, 0.0, 1.0, -1.0]), 20_000, 0.7
    draws = Draws(range(rows), temperature)
    picked = draws(torch.zeros(rows, 1, dtype=torch.long), logits.expand(rows, -1)).argmax(-1)
    share = np.bincount(picked.numpy(), minlength=4) / rows
    np.testing.assert_allclose(share, (logits / temperature).softmax(-1).numpy(), atol=0.012)


# --- the runtime ---


@pytest.fixture(scope="module")
def bundled(target: Target) -> BundleAnswers:
    """The target by the runtime, exported with the parity checks left to their own tests."""
    bundle = target_bundle(str(target.checkpoint.folder), 96, quiet, parity=False)
    return BundleAnswers(bundle, target.name, batch_size=3, threads=2)


def near_tie(target: Target, record: Record, ours: tuple[int, ...], theirs: tuple[int, ...]) -> bool:
    """Whether two greedy answers part where the two best logits are all but equal."""
    place = next(i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b)
    best = logits_after(target, record, list(ours[:place])).topk(2).values
    return float(best[0] - best[1]) < NEAR_TIE


EVERY_RUN = ("t5", "vit-gpt2", "qwen2.5-vl")


@pytest.mark.parametrize(
    "target",
    [pytest.param(kind, marks=() if kind in EVERY_RUN else pytest.mark.slow) for kind in KINDS],
    indirect=True,
    scope="module",
)
def test_the_runtime_answers_like_pytorch(target: Target, tmp_path: Path):
    """Every family that can be a target; more records than are decoded together, so that some wait. Every third has
    earlier turns."""
    made = make_records(tmp_path, "llama" if target.family.vision is None else "blip2-t5", 9)
    records = [replace(r, history=TURNS) if n % 3 == 1 else r for n, r in enumerate(made)]
    bundle = target_bundle(str(target.checkpoint.folder), 24, quiet, parity=False)
    answers = BundleAnswers(bundle, target.name, batch_size=2, threads=1)
    limits = GenerationOptions(24)
    expected = all_answers(TorchAnswers(target), list(records), limits)
    for record, ours, theirs in zip(
        records, all_answers(answers, list(records), limits), expected, strict=True
    ):
        assert ours == theirs or near_tie(target, record, ours[0], theirs[0])
    assert (answers.name, answers.fingerprint) == (target.name, target.fingerprint)
    assert all(answers.is_cut(a) == TorchAnswers(target).is_cut(a) for (a,) in expected)
    assert [answers.text(a) for (a,) in expected] == [TorchAnswers(target).text(a) for (a,) in expected]
    answers.close()


def test_answers_keep_the_turns_before_them(target: Target, records: RecordSet, tmp_path: Path):
    """What a draft then learns from is the conversation, and not its last question."""
    asked = RecordSet("asked", [replace(records[0], history=TURNS), records[1]])
    answer_data(target, asked, tmp_path / "data", 6, report=quiet)
    found = load_records(str(tmp_path / "data"))
    assert [r.history for r in found] == [TURNS, ()]
    assert (
        target.prompt(found[0]).input_ids
        == target.prompt(asked[0]).input_ids
        != target.prompt(records[0]).input_ids
    )
    path = tmp_path / "data" / shard_name(0)
    path.write_text(path.read_text().replace('["assistant", "a cup"]', '["assistant"]'))
    damaged = load_records(str(tmp_path / "data"))
    assert (
        len(damaged) == 1
        and damaged.problems[0].startswith(f"{path}:1: ")
        and "history" in damaged.problems[0]
    )


def test_the_runtime_draws_by_record_too(bundled: BundleAnswers, records: RecordSet, tmp_path: Path):
    check_draws(bundled, records, tmp_path)


def test_an_interrupted_generation_of_the_runtime_is_continued(
    bundled: BundleAnswers, records: RecordSet, tmp_path: Path
):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    limits = GenerationOptions(6)
    assert generate_data(bundled, records, whole, limits, shard_size=5, report=quiet).written == 3

    def stop(line: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):  # after the first shard, while later records are decoded
        generate_data(bundled, records, killed, limits, shard_size=5, report=stop)
    assert len(list(killed.glob("shard-*.jsonl"))) == 1
    assert generate_data(bundled, records, killed, limits, shard_size=5, report=quiet).written == 2
    for number in range(3):
        assert (killed / shard_name(number)).read_bytes() == (whole / shard_name(number)).read_bytes()
    with pytest.raises(OptionError, match=r"engine = 'runtime', not 'torch'"):
        fake = TorchAnswers.__new__(TorchAnswers)
        fake.name, fake.target = bundled.name, bundled  # type: ignore[assignment]
        generate_data(fake, records, killed, limits, shard_size=5, report=quiet)


def test_the_runtime_skips_what_cannot_be_answered(tmp_path: Path, capsys):
    target = make_target("blip2-t5", tmp_path / "model")
    bundle = target_bundle(str(tmp_path / "model"), 3, quiet, parity=False)
    answers = BundleAnswers(bundle, target.name, batch_size=2, threads=2)
    records = load_records(str(make_jsonl(tmp_path / "data.jsonl", 5, images=True)))
    file = Path(str(records[2].image.file))
    file.write_bytes(file.read_bytes()[:200])
    lines = (tmp_path / "data.jsonl").read_text().splitlines()
    long = {**json.loads(lines[3]), "prompt": "a cat " * 2000}
    (tmp_path / "data.jsonl").write_text("\n".join([*lines[:3], json.dumps(long), lines[4]]))
    records = load_records(str(tmp_path / "data.jsonl"))
    said: list[str] = []
    generate_data(answers, records, tmp_path / "out", GenerationOptions(3), report=said.append)
    assert [r.key for r in load_records(str(tmp_path / "out"))] == ["line-1", "line-2", "line-5"]
    problems = capsys.readouterr().err
    assert "record line-3" in problems and "picture-2.png" in problems and "record line-4" in problems
    assert "2 record(s) were skipped" in said
    with pytest.raises(InputError, match=r"line-[34]"):
        generate_data(answers, records, tmp_path / "strict", GenerationOptions(3), strict=True, report=quiet)
    for name in ("picture-0.png", "picture-1.png", "picture-4.png"):
        (tmp_path / name).write_bytes(file.read_bytes())
    with pytest.raises(InputError, match=r"none of the first 5 record\(s\)"):
        generate_data(answers, records, tmp_path / "none", GenerationOptions(3), report=quiet)
    assert not list((tmp_path / "none").glob("shard-*"))


def test_a_bundle_is_exported_once_per_model_limits_and_code(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("VLMEXPORT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(
        engine, "use_global_pool", lambda threads: None
    )  # other tests have begun the process's pool
    target = make_target("llama", tmp_path / "model")
    said: list[str] = []
    folder = str(tmp_path / "model")
    first = target_bundle(folder, 8, said.append, parity=False)
    assert len(said) == 1 and said[0] == f"exporting {target.name} once to {first.path}"
    assert target_bundle(folder, 8, said.append, parity=False).path == first.path and len(said) == 1
    (first.path / "head.onnx").unlink()
    assert target_bundle(folder, 8, said.append, parity=False).path == first.path, "damaged: exported again"
    path = tmp_path / "model" / "generation_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "repetition_penalty": 1.5}))
    other = target_bundle(folder, 8, said.append, parity=False)
    assert other.path != first.path and other.manifest.generation.repetition_penalty == 1.5
    assert open_answers(folder, "auto", "cpu", first.path, 8, 2, 1, quiet).engine == "runtime"
    with pytest.raises(OptionError, match=r"--batch-size 1000 is above 256"):
        open_answers(folder, "runtime", "cpu", first.path, 8, 1000, 1, quiet)
    stranger = make_target("llama", tmp_path / "stranger", seed=5)
    with pytest.raises(OptionError, match=r"is a bundle of .*, not of "):
        open_answers(str(stranger.checkpoint.folder), "auto", "cpu", first.path, 8, None, 1, quiet)
    for name, device, bundle, wrong in (
        ("runtim", "cpu", None, "--engine 'runtim' is not one of auto, runtime, torch"),
        ("torch", "cpu", first.path, "reads no bundle"),
        ("runtime", "cuda", None, "not on --device cuda"),
    ):
        with pytest.raises(OptionError, match=wrong):
            open_answers(folder, name, device, bundle, 8, None, 1, quiet)


def test_threads_are_set_before_a_bundle_is_exported(monkeypatch: pytest.MonkeyPatch):
    """The checks of an export begin the process's pool, whose size is fixed from then on."""
    done: list[object] = []

    def export(*_: object) -> None:
        done.append("export")
        raise ExportError("far enough")

    monkeypatch.setattr(engine, "use_global_pool", done.append)
    monkeypatch.setattr(engine, "target_bundle", export)
    for threads in (3, None):
        with pytest.raises(ExportError, match="far enough"):
            engine.open_answers("model", "runtime", "cpu", None, 8, None, threads, quiet)
    assert done == [3, "export", "export"]


@pytest.mark.parametrize("target", ["llama", "blip2-opt"], indirect=True, scope="module")
def test_generation_config_is_applied(target: Target, tmp_path: Path):
    """By the model's own `generate` of one request, by `Target.generate` of a batch, and by the runtime alike."""
    folder = tmp_path / "model"
    shutil.copytree(target.checkpoint.folder, folder)
    path = folder / "generation_config.json"
    path.write_text(
        json.dumps({**json.loads(path.read_text()), "repetition_penalty": 1.7, "min_new_tokens": 5})
    )
    asking = load_target(folder)
    records = list(make_records(tmp_path, "llama" if target.family.vision is None else "blip2-t5", 6))
    answers = asking.generate(records, 12)
    honoured = (
        asking.checkpoint.architecture == "LlamaForCausalLM"
    )  # BLIP-2 hands on, and never sees the file
    assert (answers != target.generate(records, 12)) == honoured
    for record, answer in zip(records, answers, strict=True):
        inputs = collate(asking.family, [asking.prompt(record)])
        own = asking.model.generate(**inputs, max_new_tokens=12, do_sample=False)[0].tolist()
        assert own[-len(answer) :] == list(answer)
    bundle = target_bundle(str(folder), 12, quiet, parity=False)
    runtime = all_answers(BundleAnswers(bundle, batch_size=2, threads=1), records, GenerationOptions(12))
    assert runtime == [[a] for a in answers]
