"""The search for sublayers that a target can do without: exact counts, the same every time."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import jsonschema
import pytest
import torch
import typer
from typer.testing import CliRunner
from vlmexport.calibration import cli
from vlmexport.calibration import search as searches
from vlmexport.calibration.data.reading.records import RecordSet
from vlmexport.calibration.evaluation import draft_measures, run
from vlmexport.calibration.evaluation.run import answered, evaluate_drafts
from vlmexport.calibration.evaluation.skipped import Chains, chains, known, replay
from vlmexport.calibration.search.draft_and_verify import Answers, SearchOptions, best_set, search, starts
from vlmexport.calibration.targets.layer_weights import Weights
from vlmexport.calibration.targets.target import Target
from vlmexport.exporter.drafts.folders import open_draft
from vlmexport.exporter.drafts.layer_skip import DraftAndVerify
from vlmexport.exporter.families.common.layer_skip import Sublayers, disregarded
from vlmexport.exporter.pipeline import BuildRequest, build_bundle
from vlmexport.runtime.common.errors import InputError, OptionError
from vlmexport.runtime.policy.base import FixedLength
from vlmexport.runtime.policy.confidence import AdaptiveThreshold
from vlmexport.runtime.session.session import Session

from tests.support.training_targets import KINDS, make_records, make_target

SKIP = Sublayers((1, 3), (0, 3))


def own_answers(target: Target, folder: Path, kind: str, count: int = 6) -> RecordSet:
    """Records with the target's own greedy answers."""
    return answered(target, make_records(folder, kind, count), 12, lambda line: None)


def test_layers_that_keep_a_state_are_not_left_out(tmp_path: Path) -> None:
    target = make_target("qwen3.5", tmp_path / "model")
    records = make_records(tmp_path, "qwen3.5", 4)
    with pytest.raises(OptionError, match="layers with linear attention keep a state"):
        search(target, records, None, SearchOptions(), tmp_path / "draft")


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "qwen3.5"])
def test_chains_equal_the_model_without_sublayers(kind: str, tmp_path: Path) -> None:
    """The first token of a chain at the first place, where the model's own caches hold the prompt alone: what the prompt's
    rows are made of must be exact, and the pending token's be the draft's."""
    target = make_target(kind, tmp_path / "model")
    record = own_answers(target, tmp_path, kind, 1)[0]
    text = known(target, record)
    found = chains(target, text, SKIP, 4)
    assert len(found.tokens) == len(text.tokens) - 1
    assert [len(chain) for chain in found.tokens][-4:] == [4, 3, 2, 1][-len(found.tokens) :]
    # Nothing left out: every chain is the text itself.
    whole = chains(target, text, Sublayers(), 3)
    assert all(all(right) for right in whole.right)
    for place, chain in enumerate(whole.tokens):
        assert tuple(chain) == text.tokens[place + 1 : place + 4]
    assert whole.tokens != found.tokens, "what is left out changes nothing: the test would prove little"


def test_replay_equals_a_session(tmp_path: Path) -> None:
    """Counted chains and thresholds are those of a bundle that decodes the same requests."""
    target = make_target("llama", tmp_path / "model", seed=3)
    records = own_answers(target, tmp_path, "llama", 4)
    skip = Sublayers((3,), (2, 3))
    build_bundle(
        BuildRequest(
            model=str(tmp_path / "model"), output=tmp_path / "bundle", drafts=["draft-and-verify"], parity=False,
            skip_attention=[3], skip_mlp=[2, 3], max_length=64,
        )
    )  # fmt: skip
    accepted = 0
    with Session.load(tmp_path / "bundle") as session:
        for record in records:
            text = known(target, record)
            found = chains(target, text, skip, 8)
            ids = target.prompt(record).input_ids
            for policy in (
                lambda: FixedLength(3),
                lambda: AdaptiveThreshold(8, 0.02),
                lambda: FixedLength(5, 0.05),
            ):
                # Of a limited answer the last cycle is cut at the limit, in both.
                ran = session.generate_tokens(ids, max_new_tokens=len(text.tokens), policy=policy())
                assert tuple(ran.tokens) == text.tokens
                want = replay(found, policy(), target.eos_token_ids)
                got, ended = ran.stats, found.ended
                assert not ended, "a limit, so that nothing is drafted behind the end"
                assert (got.cycles, got.proposed, got.evaluated, got.accepted) == (
                    want.cycles, want.proposed, want.evaluated, want.accepted,
                )  # fmt: skip
                accepted += want.accepted
    assert accepted, "nothing was ever right: the test would prove little"


def test_replays_stop_at_end_tokens_and_doubts() -> None:
    found = Chains(
        tokens=[[5, 6, 1], [6, 9], [1]],
        confidences=[[0.9, 0.4, 0.9], [0.9, 0.9], [0.9]],
        right=[[True, True, True], [True, False], [True]],
        ended=True,
    )
    whole = replay(found, FixedLength(8), {1})
    assert (whole.cycles, whole.proposed, whole.accepted, whole.discarded) == (1, 3, 3, 1)
    doubted = replay(found, FixedLength(8, 0.5), {1})
    assert (doubted.cycles, doubted.proposed, doubted.accepted) == (1, 2, 2)
    assert doubted.tokens == 4 == 1 + doubted.accepted + doubted.cycles - doubted.discarded


def test_search_finds_harmless_sublayers() -> None:
    """A made-up objective: attention of layers 1 and 2 may go, an MLP never."""

    def worth(skip: Sublayers) -> float:
        assert len(skip.attention) < 4, "all attention was left out"
        seen.append(skip)
        return len(set(skip.attention) & {1, 2}) - 2 * len(set(skip.attention) - {1, 2}) - len(skip.mlp)

    runs = []
    for _ in range(2):
        seen: list[Sublayers] = []
        assert best_set(worth, 4, 60, 0, starts(4)) == Sublayers((1, 2), ())
        assert len(seen) == len(set(seen)), "a set was measured twice"
        assert set(seen[:5]) <= set(starts(4))
        runs.append(seen)
    assert runs[0] == runs[1], "the same seed looks at the same sets"
    with pytest.raises(OptionError, match="--trials 1 looked at no set"):
        best_set(worth, 4, 1, 0, starts(4))


def test_weights_are_counted_by_sublayer(tmp_path: Path) -> None:
    target = make_target("t5", tmp_path / "model")
    weights = Weights.of(target)
    block = target.layers[1].layer
    own = sum(p.numel() for p in block[0].SelfAttention.parameters())
    cross = block[1].EncDecAttention
    assert weights.attention[1] == own + cross.q.weight.numel() + cross.o.weight.numel()
    assert weights.mlp[1] == sum(p.numel() for p in block[2].parameters()) + sum(
        block[i].layer_norm.weight.numel() for i in (0, 1)
    )
    assert weights.share(Sublayers()) == 1.0
    everything = tuple(range(5))
    assert weights.share(Sublayers(everything, everything)) == weights.head / (
        weights.kept(Sublayers()) + weights.head
    )
    assert weights.first_layers(5) == 1.0 > weights.first_layers(2)


def test_a_search_writes_a_draft_that_builds(tmp_path: Path) -> None:
    """The command from data to a bundle, twice the same."""
    make_target("llama", tmp_path / "model")
    make_records(tmp_path, "llama", 6)
    found = []
    commands = typer.Typer()
    cli.register(commands)
    for out in ("one", "two"):
        arguments = [
            "search", "--model", str(tmp_path / "model"), "--data", str(tmp_path / "data.jsonl"), "-o", str(tmp_path / out),
            "--trials", "12", "--max-new-tokens", "8", "--json", "--device", "cpu", "--draft-length", "3",
        ]  # fmt: skip
        result = CliRunner().invoke(commands, arguments)
        assert result.exit_code == 0, result.output
        found.append(json.loads(result.stdout))
    schema = Path(cli.__file__).parent / "schemas" / "search-1.json"
    jsonschema.validate(found[0], json.loads(schema.read_text("utf-8")))
    assert found[0]["found"] == found[1]["found"] and found[0]["held_out"] == found[1]["held_out"]
    assert found[0]["draft"]["fingerprint"] == found[1]["draft"]["fingerprint"]
    draft = open_draft(tmp_path / "one")
    assert draft.entry("float32")["skipped"] == found[0]["found"]
    report = build_bundle(
        BuildRequest(
            model=str(tmp_path / "model"),
            output=tmp_path / "bundle",
            drafts=[str(tmp_path / "one")],
            parity=False,
        )
    )
    assert "draft-and-verify" in report.drafts


@pytest.mark.parametrize("kind", ["llama", "blip2-t5"])
def test_eval_measures_a_searched_draft(kind: str, tmp_path: Path) -> None:
    """Beside the others, with a bound by the share of the layers that it keeps."""
    target = make_target(kind, tmp_path / "model")
    records = own_answers(target, tmp_path, kind)
    options = SearchOptions(trials=6, draft_length=4)
    draft = search(target, records, None, options, tmp_path / "draft")
    found = evaluate_drafts(target, records, [str(tmp_path / "draft"), "early-exit@2"], 4)[
        str(tmp_path / "draft")
    ]
    answers = Answers(target, records)
    fixed = [replay(chains(target, text, draft.skip, 4), FixedLength(4), ()) for text in answers.texts]
    assert (found.cycles, found.accepted) == (
        sum(one.cycles for one in fixed),
        sum(one.accepted for one in fixed),
    )
    assert found.bound is not None and 0 <= found.overlap <= 1
    assert len(found.by_position) == max(len(text.tokens) for text in answers.texts) - 1


def test_several_sets_share_what_the_target_made_of_a_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = make_target("llama", tmp_path / "model")
    records = own_answers(target, tmp_path, "llama")
    sets = {"a": DraftAndVerify(skip=Sublayers((1,), (3,))), "b": DraftAndVerify(skip=Sublayers((2,), ()))}
    monkeypatch.setattr(draft_measures, "open_draft", lambda path: sets[path.name])
    alone = {name: evaluate_drafts(target, records, [name], 3)[name] for name in sets}
    read: list[str] = []
    monkeypatch.setattr(run, "known", lambda target, record: read.append(record.key) or known(target, record))
    assert evaluate_drafts(target, records, list(sets), 3) == alone
    assert read == [record.key for record in records]


def test_invalid_search_options_are_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="'medusa' is not searched"):
        searches.search_of("medusa")
    with pytest.raises(OptionError, match="--trials 0"):
        SearchOptions(trials=0)
    target = make_target("llama", tmp_path / "model")
    records = own_answers(target, tmp_path, "llama", 2)
    short = replace(records, records=[replace(record, tokens=record.tokens[:1]) for record in records])
    with pytest.raises(InputError, match="no answer has two tokens"):
        Answers(target, short)


def test_a_whole_model_runs_without_sublayers(tmp_path: Path) -> None:
    """What parity compares with: T5's first layer still makes the bias of all others."""
    target = make_target("t5", tmp_path / "model")
    record = own_answers(target, tmp_path, "t5", 1)[0]
    plain = target.rows([record], [1])[0].residuals[:, -1]
    with disregarded(target.family.language, target.layers, Sublayers((0,), ())):
        without = target.rows([record], [1])[0].residuals[:, -1]
    again = target.rows([record], [1])[0].residuals[:, -1]
    assert not torch.equal(plain, without) and torch.equal(plain, again)
