"""`vlmexport tune` on real bundles: what it writes, what a session makes of it, what it refuses."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jsonschema
import pytest
import vlmexport.runtime
from PIL import Image
from rich.console import Console
from vlmexport.calibration import calibrate as calibrate_command
from vlmexport.runtime import Bundle, Session, cli
from vlmexport.runtime.bundle.combined_drafts import combinations
from vlmexport.runtime.bundle.stored_acceptance import measured_chains, measured_trees, stored_acceptance
from vlmexport.runtime.bundle.stored_costs import StoredCosts
from vlmexport.runtime.images.synthetic import synthetic_image
from vlmexport.runtime.measure import timing
from vlmexport.runtime.measure.pass_costs import passes
from vlmexport.runtime.policy.adaptive import Adaptive
from vlmexport.runtime.policy.logistic import LogisticLength
from vlmexport.runtime.speedup.stats import Stats
from vlmexport.runtime.tuning import survey
from vlmexport.runtime.tuning.survey import TREES, budgets

if TYPE_CHECKING:
    from tests.support.tiny_bundles import TinyBundle

Capture = pytest.CaptureFixture[str]
Bundles = Callable[[str], "TinyBundle"]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "BUDGET", 0.05)
    monkeypatch.setattr(survey, "SECONDS", 0.0)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    Image.fromarray(synthetic_image(50, 70)).save(folder / "scene.png")
    rows = [{"image": "scene.png", "prompt": text} for text in ("describe", "the cup")]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder / "rows.jsonl"


@pytest.fixture
def bundle(tiny_bundle: Bundles, tmp_path: Path) -> Path:
    return shutil.copytree(tiny_bundle("t5").path, tmp_path / "bundle")


def calibrate(capsys: Capture, *words: object) -> dict[str, Any]:
    capsys.readouterr()
    arguments = ["tune", *map(str, words), "--max-new-tokens", "12", "--json"]
    assert cli.main(arguments) == 0
    report = json.loads(capsys.readouterr().out)
    path = Path(vlmexport.runtime.__file__).parent / "schemas" / "calibrate-1.json"
    jsonschema.Draft202012Validator(json.loads(path.read_text(encoding="utf-8"))).validate(report)
    return report


def refused(capsys: Capture, *words: object) -> str:
    capsys.readouterr()
    assert cli.main(["tune", *map(str, words)]) == 2
    shown = capsys.readouterr().err
    assert shown.count("\n") == 1
    return shown


def chosen_here(path: Path, name: str | None, **choice: Any) -> None:
    """Write a choice for this machine into a calibrated bundle."""
    document = json.loads((path / "manifest.json").read_text())
    document["costs"][-1]["choice"] = {"draft": name, **choice}
    document["sha256"] = None
    (path / "manifest.json").write_text(json.dumps(document))


def test_every_draft_is_observed_and_the_choice_is_written(bundle: Path, data: Path, capsys: Capture) -> None:
    before = Bundle.open(bundle).manifest
    report = calibrate(capsys, bundle, "--data", data)
    after = Bundle.open(bundle, check="sha256").manifest
    asked = [(draft.name, b.nodes, b.depth) for draft in before.drafts for b in budgets(draft, 19)]
    found = [(e.draft, e.nodes, e.depth) for e in stored_acceptance(after)]
    assert found[: len(asked)] == asked, "what was looked at beside it comes after it"
    assert {nodes for name, nodes, depth in asked if name == "medusa" and nodes > depth} == set(TREES[:2])
    for entry in stored_acceptance(after):
        seen = entry.observed
        assert entry.requests == 2 and seen.cycles > 0 and entry.data == str(data)
        assert bool(seen.ranks) != seen.is_chain
        if seen.ranks:
            assert sum(right for depth in seen.ranks for right, _ in depth) <= sum(seen.accepted)
            drafted = sum(count for (nodes, depth), count in seen.shapes.items() if nodes > depth)
            assert seen.ranks[0][0][1] == drafted, "every tree's first child was judged"
        assert sum(seen.accepted) - seen.discarded + seen.cycles == 2 * 11, "emitted after the first token"
    (costs,) = (StoredCosts.parse(entry, "costs") for entry in after.costs)
    assert costs.choice is not None and costs.choice.to_dict() == report["costs"]["choice"]
    assert costs.host > 0 and all(draft.host >= 0 for draft in costs.drafts.values())
    untouched = {"costs": [], "acceptance": [], "sha256": None}
    assert after.to_dict() | untouched == before.to_dict() | untouched
    chains = measured_chains(after)
    branching = {name for name, nodes, depth in asked if nodes > depth}
    assert set(measured_trees(after)) == {name for name in branching if sum(chains[name].accepted)}
    both = set(combinations(before.drafts))
    assert set(chains) == {name for name, *_ in asked} | both and "prompt-lookup+medusa" in both
    assert not both & set(costs.drafts), "a combination takes what its drafts take"
    with Session.load(bundle) as session:
        policy = session._controller("session", None)
        assert isinstance(policy, Adaptive) and policy._seen == chains
        picture = Image.fromarray(synthetic_image(50, 70))
        again = Stats.total(
            session.generate(
                image=picture, prompt=text, max_new_tokens=12, draft="medusa", draft_length=budget.depth
            ).stats
            for text in ("describe", "the cup")
            for budget in [
                next(b for draft in before.drafts if draft.name == "medusa" for b in budgets(draft, 19))
            ]
        )
    seen = chains["medusa"]
    assert (
        seen.accepted == again.accepted_by_depth
        and seen.evaluated == again.evaluated_by_depth[: len(seen.accepted)]
    )
    best = report["predictions"][0]
    if best["speedup"] < survey.NEAR * 1.05:
        assert report["costs"]["choice"]["draft"] is None and report["requests"]["look"] == 0
    else:
        assert best["measured"] is not None and report["requests"]["look"] == 2


def test_an_adaptor_is_no_part_of_a_drafted_token(tiny_bundle: Bundles, tmp_path: Path) -> None:
    """It runs once per picture: ViSpec's steps are timed without it."""
    path = shutil.copytree(tiny_bundle("llava").path, tmp_path / "bundle")
    with Session.load(path) as session:
        made = passes(session.bundle.manifest, session.bundle.manifest.drafts, [2], embed=False)
        report = survey.calibrate(session, [{"prompt": "the cup"}], "one", max_new_tokens=8, repeats=1)
    assert made["propose", "vispec", 1] == ["vispec"]
    assert {entry["draft"] for entry in report["acceptance"]} >= {"eagle", "vispec"}
    assert report["costs"]["drafts"]["vispec"]["propose"] > 0


def test_a_session_takes_what_was_chosen_for_its_machine(
    bundle: Path, data: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    calibrate(capsys, bundle, "--data", data)
    image = Image.fromarray(synthetic_image(50, 70))
    asked: dict[str, Any] = {"image": image, "prompt": "describe", "max_new_tokens": 12}

    def used(**options: Any) -> tuple[str | None, int, Any]:
        with Session.load(bundle) as session:
            found = session.generate(**asked, **options)
            assert found.tokens == session.generate(**asked, draft="none").tokens
            return found.stats.draft, found.stats.draft_length, dict(found.stats.shapes)

    chosen_here(bundle, "early-exit@1", draft_length=2)
    assert used()[0] == "early-exit@1"
    assert used(adaptive="off")[:2] == ("early-exit@1", 2)
    assert used(draft="medusa")[0] == "medusa", "what a request asks for comes first"
    chosen_here(bundle, "medusa", draft_length=3, draft_nodes=8)
    name, length, shapes = used(adaptive="off")
    assert (name, length) == ("medusa", 3) and max(nodes for nodes, _ in shapes) > 3
    chosen_here(bundle, None)
    assert used()[0] is None
    monkeypatch.setattr("vlmexport.runtime.engines.base.processor", lambda: "another machine")
    assert used()[0] == Bundle.open(bundle).manifest.policy.draft == "imitation@1"


def shape_of(entry: dict[str, Any]) -> tuple[str, int, int]:
    """Draft, drafted tokens and depth of a prediction or of an entry of acceptance."""
    return entry["draft"], entry["nodes"], entry["depth"]


def test_another_device_chooses_by_what_was_observed_here(
    bundle: Path, data: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "give --data" in refused(capsys, bundle)
    copy = shutil.copytree(bundle, tmp_path / "copy")
    here = calibrate(capsys, bundle, "--data", data)
    (tmp_path / "here.json").write_text(json.dumps(here))
    merged = calibrate(capsys, copy, "--merge", tmp_path / "here.json")["merged"]
    assert merged == {"costs": 1, "acceptance": len(here["acceptance"])}
    monkeypatch.setattr("vlmexport.runtime.engines.base.processor", lambda: "robot")
    there = calibrate(capsys, copy)
    assert there["data"] is None and there["acceptance"] == []
    # Which trees are offered beside the decoded ones is for the times of a machine to say.
    decoded = {shape_of(entry) for entry in here["acceptance"] if entry["nodes"] > entry["depth"]}
    assert decoded
    for report in (here, there):
        trees = {shape_of(row) for row in report["predictions"] if row["nodes"] > row["depth"]}
        assert decoded <= trees and {name for name, *_ in decoded} == {name for name, *_ in trees}
    assert cli.main(["tune", str(bundle), "--merge", str(copy)]) == 0
    both = Bundle.open(bundle).manifest
    assert [entry["machine"] for entry in both.costs][-1] == "robot" and len(both.costs) == 2
    assert len(both.acceptance) == len(here["acceptance"]), "the same observations are kept once"


def test_bench_shows_the_prediction_beside_the_measurement(bundle: Path, data: Path, capsys: Capture) -> None:
    report = calibrate(capsys, bundle, "--data", data)
    tree = next(row for row in report["predictions"] if (row["nodes"], row["depth"]) == (8, 3))

    def bench(*words: str) -> tuple[Any, Any]:
        capsys.readouterr()
        asked = [
            "bench",
            str(bundle),
            "--repeats",
            "1",
            "--max-new-tokens",
            "12",
            "--json",
            "--draft",
            "medusa",
            *words,
        ]
        assert cli.main(asked) == 0
        found = json.loads(capsys.readouterr().out)
        return found["predicted"], found["unpredicted"]

    assert bench("--draft-nodes", "8", "--draft-length", "3") == (pytest.approx(tree["speedup"]), None)
    told, why = bench("--draft-nodes", "7")
    assert why is None and told > 0, "a tree that was never decoded, by the ranks that were right"
    assert bench("--draft-nodes", "8", "--temperature", "1") == (None, "tune decodes greedily")
    assert bench("--adaptive", "confidence") == (
        None,
        "tune knows fixed lengths and its own controller's",
    )


def test_saving_pass_times_again_keeps_the_choice(bundle: Path, data: Path, capsys: Capture) -> None:
    calibrate(capsys, bundle, "--data", data)
    chosen_here(bundle, "early-exit@1", draft_length=2)
    assert (
        cli.main(["bench", str(bundle), "--save", "--repeats", "1", "--max-new-tokens", "8", "--json"]) == 0
    )
    (entry,) = Bundle.open(bundle).manifest.costs
    assert entry["choice"]["draft"] == "early-exit@1"
    capsys.readouterr()
    assert cli.main(["inspect", str(bundle)]) == 0


def test_the_reward_of_fastvlm_chooses_among_layers(bundle: Path, data: Path, capsys: Capture) -> None:
    report = calibrate(capsys, bundle, "--data", data, "--by", "reward", "--dry-run")
    assert report["costs"]["choice"]["draft"] in ("imitation@1", "early-exit@1")
    assert not Bundle.open(bundle).manifest.acceptance, "a dry run writes nothing"
    assert "is not one of" in refused(capsys, bundle, "--data", data, "--by", "chance")


def test_calibrate_prints_its_choice(bundle: Path, data: Path, capsys: Capture) -> None:
    words = ["tune", str(bundle), "--data", str(data), "--max-new-tokens", "12", "--dry-run"]
    assert cli.main(words) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "predicted here for greedy decoding, by" in shown and "Chosen: " in shown
    assert "Written" not in shown


SECOND = ("medusa", "eagle", "vispec")


def printed(columns: int, rows: dict[str, tuple[float, float | None]]) -> str:
    """What people are shown where nothing was chosen; `rows`: draft → (predicted, decoded beside plain)."""
    predictions = [
        {
            "draft": name, "nodes": 16, "depth": 4, "speedup": speedup, "measured": measured,
            "tokens_per_cycle": 2.5, "break_even": 1.9,
        }
        for name, (speedup, measured) in rows.items()
    ]  # fmt: skip
    report = {
        "model": "tiny", "plain_tokens_per_second": 100.0, "data": None, "predictions": predictions, "least": 1.05,
        "costs": {"choice": {"draft": None}}, "uncertain": None, "machine": {"cores": 2, "load": 0.0, "cpu": "x"},
    }  # fmt: skip
    out = io.StringIO()
    calibrate_command.show(report, Console(file=out, width=columns))
    return out.getvalue()


@pytest.mark.parametrize("columns", [60, 80, 200])
def test_rows_of_the_table_are_told_apart_at_every_width(columns: int) -> None:
    rows = {"prompt-lookup": (1.2, None), **{f"prompt-lookup+{name}": (1.1, None) for name in SECOND}}
    shown = printed(columns, rows)
    starts = [line.split()[0] for line in shown.splitlines() if " × " in line and line[:2] in ("pl", "pr")]
    assert starts == ["prompt-lookup", "pl+medusa", "pl+eagle", "pl+vispec"]
    assert "pl+: prompt-lookup+" in shown and "pl+" not in printed(columns, {"medusa": (0.9, None)})


@pytest.mark.parametrize(
    ("rows", "why"),
    [
        (
            {"medusa": (1.31, 0.97), "prompt-lookup+eagle": (1.26, 0.99), "eagle": (1.2, None)},
            "prompt-lookup+eagle was predicted 1.26 ×, but decoded beside plain: 0.99 ×; 1.05 × is needed",
        ),
        ({"medusa": (0.97, None), "eagle": (0.9, None)}, "medusa was predicted 0.97 ×; 1.05 × is needed"),
        ({}, "nothing is predicted, 1.05 × is needed"),
    ],
)
def test_plain_decoding_is_chosen_with_a_reason(
    rows: dict[str, tuple[float, float | None]], why: str
) -> None:
    assert f"Chosen: plain decoding; {why}\n" in printed(200, rows)


def test_merging_refuses_another_model_and_what_is_no_report(
    bundle: Path, tiny_bundle: Bundles, data: Path, tmp_path: Path, capsys: Capture
) -> None:
    assert "another model" in refused(capsys, bundle, "--merge", tiny_bundle("llama").path)
    (tmp_path / "list.json").write_text("[]")
    assert "holds no report" in refused(capsys, bundle, "--merge", tmp_path / "list.json")
    assert "give one of them" in refused(capsys, bundle, "--merge", tmp_path / "list.json", "--data", data)
    assert "nowhere.json: does not exist" in refused(capsys, bundle, "--merge", tmp_path / "nowhere.json")
    (tmp_path / "words.json").write_text("no report")
    said = refused(capsys, bundle, "--merge", tmp_path / "words.json")
    assert "words.json: no report of `vlmexport tune --json`, and no bundle (Expecting value" in said


def test_the_length_by_position_of_fastvlm_is_a_policy(tiny_bundle: Bundles) -> None:
    with Session.load(tiny_bundle("llama").path) as session:
        found = session.generate(
            prompt="the cup",
            max_new_tokens=48,
            draft="early-exit@1",
            policy=LogisticLength.of(48, 15),
            ignore_eos=True,
        )
        plain = session.generate(prompt="the cup", max_new_tokens=48, draft="none", ignore_eos=True)
    depths = {depth for _, depth in found.stats.shapes}
    assert found.tokens == plain.tokens and {9, 10} <= depths <= set(range(11)), (
        "5 + floor(10 σ(0.01 (t − 24)))"
    )
