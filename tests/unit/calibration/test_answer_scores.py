"""Scores of answers: against figures by hand, and what is said where a program is missing."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import jsonschema
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner
from vlmexport import calibration
from vlmexport.calibration import cli
from vlmexport.calibration.data import ImageRef, Record, RecordSet
from vlmexport.calibration.evaluation.quality import Told, captions, names, open_task, yes_no
from vlmexport.calibration.evaluation.quality.vqa import accuracy
from vlmexport.calibration.evaluation.quality.words import normalised
from vlmexport.calibration.evaluation.ranking import log_probabilities, rank_choices, right_rank
from vlmexport.calibration.evaluation.run import evaluate
from vlmexport.calibration.evaluation.speed import bound
from vlmexport.calibration.targets.batches import Batches
from vlmexport.calibration.targets.target import Target
from vlmexport.runtime.common.errors import OptionError

from tests.support.training_targets import KINDS, logits_after, make_target


def java(*words: object) -> str:
    """What it prints; nothing where there is none."""
    if shutil.which("java") is None:
        return ""
    return subprocess.run(["java", *map(str, words)], capture_output=True, text=True, timeout=120).stdout


def told(text: str, *references: str, key: str = "k", rank: int | None = None) -> Told:
    return Told(Record(key, "?", references=references), text, rank)


# --- VQA ---


@pytest.mark.parametrize(
    ("said", "compared"),
    [
        ("Two cups.", "2 cups"), ("the  Cat!", "cat"), ("dont", "don't"), ("a\nb", "b"), ("3.5", "3.5"),
        ("1,000", "1000"), ("red/blue", "red blue"), ("red, blue", "red blue"), ("no.", "no"), ("None", "0"),
        ("couldnt've", "couldn't've"), ("couldntve", "couldntve"), ("hedve", "hedve"), ("Twas", "'twas"),
        ("'ows'at", "'ow's'at"), ("ow's'at", "'ow's'at"), ("y'alldve", "y'alldve"), ("y'alld've", "y'all'd've"), ("t-shirt", "t shirt"), ("it's", "it's"), ("its", "its"),
    ],
)  # fmt: skip
def test_answers_are_compared_as_the_official_evaluation_does(said: str, compared: str):
    assert normalised(said) == compared


def test_vqa_accuracy_by_hand():
    """k of ten say it: each of these leaves k − 1 others, each of the rest leaves k."""
    for k, wanted in ((0, 0.0), (1, 0.3), (2, 0.6), (3, 0.9), (4, 1.0), (10, 1.0)):
        people = ["cup"] * k + [f"other {n}" for n in range(10 - k)]
        assert accuracy("A cup.", people) == pytest.approx(wanted), k
    found = open_task("vqa").score([told("a cup", *["cup"] * 10), told("x", *["cup"] * 10), told("y")])
    assert (found.count, found.total, found.values["VQA accuracy"]) == (2, 3, 50.0)
    assert "1 question(s)" in open_task("vqa").score([told("a", "a", "b")]).notes[0]
    assert "no record has answers" in open_task("vqa").score([told("a")]).left_out["VQA accuracy"]


def test_peoples_answers_are_normalised_as_the_official_evaluation_does():
    """By their punctuation, and not where all are equal."""
    assert accuracy("t shirt", ["t-shirt"] * 9 + ["shirt"]) == 1.0
    assert accuracy("t shirt", ["t-shirt"] * 10) == 0.0
    assert accuracy("two", ["2"] * 10) == 1.0
    assert accuracy("two", ["two"] * 9 + ["2"]) == pytest.approx(0.3)
    assert accuracy("the cup", ["the cup"] * 9 + ["cup"]) == pytest.approx(0.3)


def test_exact_and_yes_no_by_hand():
    assert open_task("exact").score([told("The cup", "cup"), told("x", "y")]).values == {"exact": 50.0}
    asked = [
        told("Yes, it is.", "Yes", key="colour/1/1"), told("no", "No", key="colour/1/2"),
        told("yes", "Yes", key="colour/2/1"), told("yes", "No", key="colour/2/2"),
        told("maybe", "No", key="count/1/1"),
    ]  # fmt: skip
    scored = open_task("yes-no").score(asked)
    assert scored.notes == ("perception is the sum of 1 of its 10 categories",)
    assert scored.values == {
        "perception": 0.0,
        "total": 125.0,
        "accuracy": 60.0,
        "accuracy+": pytest.approx(100 / 3),
        "colour": 125.0,
        "count": 0.0,
    }


@pytest.mark.parametrize(
    ("answer", "taken"),
    [
        ("Yes", "yes"), ("No, it is not.", "no"), ("YES!", "yes"), (" yes", "yes"), ("(No)", "no"), ("Not at all", "no"),
        ("Nobody", "no"), ("Oh yes", "other"), ("The answer is no", "other"), ("", "other"), ("**Yes**", "other"),
    ],
)  # fmt: skip
def test_mme_reads_the_first_four_characters(answer: str, taken: str):
    assert yes_no.verdict(answer) == taken


def test_mme_totals_equal_published_tables():
    """Every question right: 2000 and 800."""
    asked = [
        told("yes", "Yes", key=f"{category}/1/{n}")
        for group in yes_no.GROUPS.values()
        for category in group
        for n in (1, 2)
    ]
    found = open_task("yes-no").score(asked)
    assert (found.values["perception"], found.values["cognition"]) == (2000.0, 800.0)
    assert found.notes == () and found.values["total"] == 2800.0


# --- ranking ---


def test_mrr_and_recall_by_hand():
    found = open_task("choices").score([told("", rank=r) for r in (1, 2, 8, 20)] + [told("")])
    assert found.values == {
        "MRR": pytest.approx((1 + 1 / 2 + 1 / 8 + 1 / 20) / 4),
        "R@1": 25.0, "R@5": 50.0, "R@10": 75.0, "mean rank": 7.75,
    }  # fmt: skip
    assert (found.count, found.total) == (4, 5)
    assert [right_rank([0.5, 0.7, 0.5], n) for n in range(3)] == [2, 1, 3]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return make_target("llava", tmp_path_factory.mktemp("quality") / "model")


def asked_about(folder: Path, **values: object) -> Record:
    Image.new("RGB", (8, 6), (200, 20, 30)).save(folder / "a.png")
    return Record("k", "a red cup", ImageRef(file=str(folder / "a.png")), **values)  # type: ignore[arg-type]


def test_every_choice_reads_the_rows_of_convolutions(tmp_path: Path):
    """Of one token, which transformers convolves by another way, and of several."""
    target, texts = make_target("lfm2-vl", tmp_path / "model"), ("a cup is on the table", "", "the red")
    record = asked_about(
        tmp_path, history=(("user", "is it red?"), ("assistant", "the table")), choices=texts
    )
    found = log_probabilities(target, record, texts)
    for text, value in zip(texts, found, strict=True):
        ids = [*target.tokenizer(text, add_special_tokens=False)["input_ids"], target.eos_token_ids[0]]
        by_token = [logits_after(target, record, ids[:n]).log_softmax(-1)[ids[n]] for n in range(len(ids))]
        assert value == pytest.approx(float(torch.stack(by_token).sum()), abs=1e-3)


def test_choices_are_ranked_by_the_models_own_probabilities(target: Target, tmp_path: Path):
    texts = ("a cup is on the table", "cup", "the red", "a")
    record = asked_about(
        tmp_path, history=(("user", "is it red?"), ("assistant", "the table")), choices=texts
    )
    found = log_probabilities(target, record, texts)
    for text, value in zip(texts, found, strict=True):
        ids = [*target.tokenizer(text, add_special_tokens=False)["input_ids"], target.eos_token_ids[0]]
        by_token = [logits_after(target, record, ids[:n]).log_softmax(-1)[ids[n]] for n in range(len(ids))]
        assert value == pytest.approx(float(torch.stack(by_token).sum()), abs=1e-3)
    best = max(range(4), key=found.__getitem__)
    records = [asked_about(tmp_path, choices=texts, choice=n, history=record.history) for n in range(4)]
    assert sorted(rank_choices(target, [*records, asked_about(tmp_path)], lambda line: None)[:4]) == [
        1,
        2,
        3,
        4,
    ]  # type: ignore[type-var]
    assert rank_choices(target, [records[best], asked_about(tmp_path)]) == [1, None]


def teacher_forced(target: Target, record: Record, texts: Sequence[str]) -> list[float]:
    """Σ log p of each text, each with the whole prompt and a picture of its own."""
    told = [replace(record, answer=text, tokens=None) for text in texts]
    with torch.no_grad():
        rows, _ = target.rows(told, [target.num_layers], first=True)
        said = target.head(rows.residuals[:, -1]).log_softmax(-1).gather(1, rows.tokens[:, None])[:, 0]
    return torch.zeros(len(told)).index_add_(0, rows.records, said).tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_choices_read_one_picture_and_one_prompt(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """And get what each of them would get alone. A record of text follows one with a picture: what the model keeps of
    that one's positions must not be read."""
    target = make_target(kind, tmp_path / "model")
    records = [asked_about(tmp_path), replace(asked_about(tmp_path), prompt="the red cup is on a table")]
    if target.family.vision is None:
        records = [replace(record, image=None) for record in records]
    elif not target.family.needs_picture:
        records.append(replace(records[1], image=None))
    texts = ("a cup is on the table", "cup", "", "the red", "a", "red red red")
    loads, towers, load = [], [], ImageRef.load
    monkeypatch.setattr(ImageRef, "load", lambda ref: loads.append(1) or load(ref))
    if (tower := target.family.parts(target.model).vision_output) is not None:
        tower.register_forward_hook(lambda *_: towers.append(1))
    for record in records:
        teacher_forced(target, record, texts[:1])
    once = (len(loads), len(towers))
    wanted = [teacher_forced(target, record, texts) for record in records]
    loads.clear(), towers.clear()
    for record, expected in zip(records, wanted, strict=True):
        assert log_probabilities(target, record, texts, Batches(4)) == pytest.approx(expected, abs=1e-3)
    assert (len(loads), len(towers)) == once and once[0] == sum(one.image is not None for one in records)


# --- captions ---

CAPTIONS = [
    told("A red cup on a table.", "a red cup on the table", "there is a red cup"),
    told("a blue bowl", "a blue bowl", "one bowl, blue"),
    told("", "nothing to see", "an empty table"),
]


def test_captions_without_java(monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("pycocoevalcap")
    monkeypatch.setattr(shutil, "which", lambda name: None)
    found = captions.score(CAPTIONS)
    assert set(found.values) == {"BLEU-1", "BLEU-2", "BLEU-3", "BLEU-4", "ROUGE-L", "CIDEr"}
    assert found.left_out == {"METEOR": "needs Java", "SPICE": "needs Java"} and found.notes == (
        captions.PLAIN,
    )
    # Of 9 words 8 are in a reference (one "a" too many); the closest references have 12 words: e^(1 − 12/9).
    assert found.values["BLEU-1"] == pytest.approx(8 / 9 * math.exp(1 - 12 / 9), rel=1e-4)
    perfect = captions.score([told(one.record.references[0], *one.record.references) for one in CAPTIONS])
    assert perfect.values["BLEU-4"] == pytest.approx(1.0, abs=1e-3) and perfect.values["ROUGE-L"] == 1.0
    assert perfect.values["CIDEr"] > found.values["CIDEr"] > 0
    assert captions.plain_words({0: ["Don't — stop, now!"]}) == {0: ["don't stop now"]}


def test_a_package_folder_that_cannot_be_written_to_costs_the_tokenizer_only(monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("pycocoevalcap")
    monkeypatch.setattr(shutil, "which", lambda name: "/bin/java" if name == "java" else None)

    def refused(texts: object) -> None:
        raise PermissionError(13, "Permission denied", "tokenizer/tmp1")

    monkeypatch.setattr(captions, "_treebank", refused)
    found = captions.score(CAPTIONS)
    assert "BLEU-1" in found.values and any("Permission denied" in note for note in found.notes)


FAILING_JAVA = """#!/bin/sh
echo 'Unable to locate a Java Runtime.' >&2
exit 1
"""
SCORE = """
import gc, json
from vlmexport.calibration.data import Record
from vlmexport.calibration.evaluation.quality import Told, captions
told = [Told(Record("k", "?", references=("a red cup", "one cup")), "A red cup."), Told(Record("l", "?", references=("a bowl",)), "a cup")]
found = captions.score(told)
gc.collect()
print(json.dumps(found.to_dict()))
"""


def test_failing_java_is_reported_without_delay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """As the stub of a Mac without Java: there, and never right. METEOR's lock would keep the process for ever."""
    pytest.importorskip("pycocoevalcap")
    (tmp_path / "java").write_text(FAILING_JAVA)
    (tmp_path / "java").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    done = subprocess.run([sys.executable, "-c", SCORE], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "Exception ignored" not in done.stderr, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["notes"] == [
        f"{captions.PLAIN_RULE}: the Penn Treebank tokenizer failed (it gave 1 of 2 texts; does `java -version` work?)"
    ]
    # "a red cup" and "a cup" have four of five words right.
    assert found["values"]["BLEU-1"] == pytest.approx(4 / 5, rel=1e-4) and "METEOR" in found["left_out"]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("java") is None, reason="needs Java")
def test_captions_with_java():
    pytest.importorskip("pycocoevalcap")
    found = captions.score(CAPTIONS)
    assert 0 < found.values["METEOR"] < 1 and found.notes == ()
    assert "SPICE" in found.values or "stanford-corenlp-3.6.0.jar" in found.left_out["SPICE"]


PROBE = """
import edu.anu.spice.LmdbTupleDB;
import java.util.*;

class Probe {
    public static void main(String[] folder) {
        LmdbTupleDB kept = new LmdbTupleDB(folder[0]);
        ArrayList<ArrayList<String>> tuples = new ArrayList<>(List.of(new ArrayList<>(List.of("cup", "red"))));
        kept.putTransaction(new HashMap<>(Map.of("a red cup", tuples)));
        System.out.println(kept.getTransaction(List.of("a red cup")));
    }
}
"""


@pytest.mark.slow
@pytest.mark.skipif(
    "jdk.compiler" not in java("--list-modules"), reason="needs a Java that runs source files"
)
def test_spices_cache_opens_what_later_javas_close(tmp_path: Path):
    """Java 16 and later refuse it without the options (InaccessibleObjectException)."""
    pytest.importorskip("pycocoevalcap")
    spice = captions._package() / "spice"
    (tmp_path / "Probe.java").write_text(PROBE)
    (tmp_path / "cache").mkdir()
    with captions.opened_java():
        done = java(
            "-cp", f"{spice}/spice-1.0.jar:{spice}/lib/*", tmp_path / "Probe.java", tmp_path / "cache"
        )
    assert done.strip() == "{a red cup=[[cup, red]]}"


def test_spice_alone_is_run_with_opened_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """And with what the user's variable asks for; afterwards that is as it was."""
    pytest.importorskip("pycocoevalcap")
    seen: dict[str, str] = {}
    (tmp_path / "spice" / captions._SPICE_JAR).parent.mkdir(parents=True)
    (tmp_path / "spice" / captions._SPICE_JAR).touch()
    monkeypatch.setattr(captions, "_package", lambda: tmp_path)
    monkeypatch.setattr(shutil, "which", lambda name: "/bin/java")
    monkeypatch.setattr(captions, "_treebank", captions.plain_words)
    monkeypatch.setenv("JDK_JAVA_OPTIONS", "-Dmine=1")

    def scored(module: str, *rest: object) -> float:
        seen[module] = os.environ["JDK_JAVA_OPTIONS"]
        return 0.5

    monkeypatch.setattr(captions, "_scorer", scored)
    assert captions.score(CAPTIONS).values["SPICE"] == 0.5
    assert seen.pop("spice.spice").startswith("-Dmine=1 --add-opens=java.base/java.lang=ALL-UNNAMED ")
    assert set(seen.values()) == {"-Dmine=1"} and os.environ["JDK_JAVA_OPTIONS"] == "-Dmine=1"


def test_a_program_that_fails_leaves_its_figure_out(monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("pycocoevalcap")
    monkeypatch.setattr(shutil, "which", lambda name: "/bin/java" if name == "java" else None)
    monkeypatch.setattr(captions, "_treebank", captions.plain_words)
    kept = captions._scorer

    def failing(module: str, *rest):
        if module.startswith("meteor"):
            raise BrokenPipeError(32, "Broken pipe")
        return kept(module, *rest)

    monkeypatch.setattr(captions, "_scorer", failing)
    found = captions.score(CAPTIONS)
    assert "Broken pipe" in found.left_out["METEOR"] and "CIDEr" in found.values


def test_the_extra_of_captions_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "pycocoevalcap", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(OptionError, match=r"\[captions\] \(pycocoevalcap is missing\)"):
        captions.score(CAPTIONS)


# --- the command ---


def test_score_bound_by_hand():
    assert bound(3.0, 4.0, 0.25) == 1.5 and bound(2.5, 5.0, 0.0) == 2.5


def call(*words: object) -> str:
    import typer

    app = typer.Typer()
    cli.register(app)
    result = CliRunner().invoke(app, [str(word) for word in words], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    print(result.stderr, file=sys.stderr)
    return result.stdout


def test_eval_judges_measures_and_draws(target: Target, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    rows = [{"q": f"a cup {n}", "i": "a.png", "a": "red", "c": ["red", "the cup"], "w": 0} for n in "xyz"]
    asked_about(tmp_path)
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    data = f"fields:{tmp_path / 'rows.json'},prompt=q,image=i,answer=a,choices=c,choice=w"
    words = ["eval", "--model", target.checkpoint.folder, "--data", data, "--max-new-tokens", 6]
    drafts = ["--draft", "early-exit@2", "--draft", "early-exit@4"]
    more = ["--plot", tmp_path / "p.png", "--answers", tmp_path / "answers.jsonl"]
    found = json.loads(call(*words, *drafts, "--task", "choices", *more, "--json"))
    schema = json.loads((Path(calibration.__file__).parent / "schemas" / "eval-1.json").read_text("utf-8"))
    jsonschema.Draft202012Validator.check_schema(schema)
    assert [e.message for e in jsonschema.Draft202012Validator(schema).iter_errors(found)] == []
    assert found["score"]["count"] == 3 and found["score"]["values"]["R@5"] == 100.0
    for name, layer in (("early-exit@2", 2), ("early-exit@4", 4)):
        one = found["drafts"][name]
        drafted = one["proposed"] / one["cycles"]
        assert (
            one["bound"] == pytest.approx(one["tau"] / (1 + layer / 5 * drafted)) and one["speedup"] is None
        )
        (ranks,) = one["by_rank"]
        assert (
            len(ranks) == 8
            and ranks == sorted(ranks)
            and ranks[0] == pytest.approx(one["agreement"], abs=1e-4)
        )
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
    lines = [json.loads(line) for line in (tmp_path / "answers.jsonl").read_text().splitlines()]
    assert [line["references"] for line in lines] == [["red"]] * 3 and all("answer" in line for line in lines)
    capsys.readouterr()
    shown = call(*words, *drafts[:2], "--task", "exact", "--batch-size", 2)
    assert "measured 2/3 answers" in capsys.readouterr().err
    assert "early-exit@2" in shown and "exact, 3 of 3 answers" in shown and "speed-up" in shown
    with pytest.raises(OptionError, match="nothing to measure"):
        call(*words)
    with pytest.raises(OptionError, match="--task 'taste' is none of auto, none, captions"):
        call(*words, "--task", "taste")
    with pytest.raises(OptionError, match=r"--plot p.png draws what drafts do.*give --draft"):
        call(*words, "--task", "exact", "--plot", "p.png")
    with pytest.raises(OptionError, match=r"answers are written where they are judged"):
        call(*words, *drafts, "--answers", tmp_path / "x")


def test_the_target_answers_once_for_drafts_and_score(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    calls, generate = [], target.generate
    monkeypatch.setattr(target, "generate", lambda *a, **k: calls.append(1) or generate(*a, **k))
    records = RecordSet("r", [asked_about(tmp_path, references=("red",))], task="exact")
    found = evaluate(target, records, ["early-exit@2"], 3, 6, "exact")
    assert len(calls) == 1 and found.score is not None and found.score.count == 1
    assert set(found.texts) == {"k"} and found.drafts["early-exit@2"].cycles > 0
    ranked = RecordSet("r", [asked_about(tmp_path, choices=("red", "a cup"), choice=0)])
    found = evaluate(target, ranked, [], 3, 6, "choices", texts=False)
    assert len(calls) == 1 and found.texts == {} and found.score is not None and found.score.count == 1
    assert set(evaluate(target, ranked, [], 3, 6, "choices").texts) == {"k"} and len(calls) == 2
    with pytest.raises(OptionError, match="leave --given-text out"):
        evaluate(target, records, [], 3, None, "exact")


def test_speedups_come_from_a_bundles_pass_times(target: Target, tmp_path: Path):
    """Twice as slow a draft, half the gain; a bundle without times is refused."""
    from vlmexport.calibration.evaluation.speed import Machine
    from vlmexport.runtime.bundle.stored_costs import StoredCosts
    from vlmexport.runtime.speedup.cost_model import CostTable, Curve, DraftCosts
    from vlmexport.runtime.speedup.stats import Stats

    plain = Curve({1: 1.0, 4: 1.0})
    table = CostTable(plain, {"early-exit@2": DraftCosts(plain.scaled(0.5), trunk=0.5)})
    entry = StoredCosts.of(table, "here", 1, "today", 64).to_json()

    class Opened:
        path = tmp_path
        manifest = SimpleNamespace(costs=[entry])

    cycles = Stats()
    cycles.count(3, 2, 3)
    machine = Machine(Opened())  # type: ignore[arg-type]
    # Three tokens in 3 trunks of 0.5 for drafts, one more for the last, and a tail of 0.5.
    assert machine.speedup("early-exit@2", 3, cycles) == pytest.approx(3 / 2.5)
    assert machine.name == "here" and machine.speedup("imitation@2", 3, cycles) is None
    Opened.manifest.costs = []
    with pytest.raises(OptionError, match=r"holds no pass times.*vlmexport tune"):
        Machine(Opened())  # type: ignore[arg-type]


def test_every_task_is_in_the_help_and_the_docs():
    root = Path(__file__).resolve().parents[3]
    docs = (root / "docs" / "how-to" / "measure-a-draft.md").read_text("utf-8")
    shown = " ".join(call("eval", "--help").split())
    assert names() == ["captions", "choices", "exact", "vqa", "yes-no"]
    for name in names():
        assert f"`{name}`" in docs and name in shown
