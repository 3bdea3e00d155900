"""The rule of losslessness as `verify` applies it: same tokens, near-ties listed and counted."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from transformers import AutoModelForCausalLM
from vlmexport.exporter.checkpoint import open_checkpoint
from vlmexport.exporter.families.common.reference import collate
from vlmexport.exporter.families.registry import family_for
from vlmexport.exporter.parity import losslessness
from vlmexport.exporter.parity.losslessness import NearTie, check_losslessness, failures, plain_margin
from vlmexport.runtime.bundle.folder import Bundle
from vlmexport.runtime.session.session import Session

PROMPT = "a small robot puts the red cube"


@pytest.mark.parametrize("penalty", [1.0, 1.7])
@pytest.mark.parametrize("token", [0, 3, 9])
def test_the_margin_is_that_of_plain_decoding(tiny_bundle: Callable, token: int, penalty: float) -> None:
    folder, source = tiny_bundle("llama")
    bundle = Bundle.open(folder)
    bundle.manifest.generation.repetition_penalty = penalty
    family = family_for(open_checkpoint(str(source)))
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    with Session.load(bundle) as session:
        inputs = collate(family, [family.reference_prompt(None, PROMPT)], left=True)
        output = model.generate(
            **inputs,
            do_sample=False,
            max_new_tokens=token + 1,
            repetition_penalty=penalty,
            output_scores=True,
            return_dict_in_generate=True,
        )
        best = torch.topk(output.scores[token][0].float(), 2).values
        assert plain_margin(session, (None, PROMPT), token) == pytest.approx(
            float(best[0] - best[1]), abs=1e-4
        )
        longest = session.generate(prompt=PROMPT, max_new_tokens=8, speculative=False)
        if longest.finish_reason == "eos":
            assert plain_margin(session, (None, PROMPT), len(longest.tokens)) == float("inf")


@pytest.fixture
def diverging(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Speculative output differs at token 2; plain decoding's margin there is what the test says."""

    def make(margin: float) -> None:
        original = Session.generate

        def generate(self: Session, *args: object, **options: object) -> object:
            result = original(self, *args, **options)  # type: ignore[arg-type]
            if "draft" in options:
                result.tokens[2] += 1
            return result

        monkeypatch.setattr(Session, "generate", generate)
        monkeypatch.setattr(losslessness, "plain_margin", lambda session, request, token: margin)

    return make


def test_equal_tokens_pass(tiny_bundle: Callable) -> None:
    rows = check_losslessness(Bundle.open(tiny_bundle("llama")[0]), 2, 8)
    assert [row.draft for row in rows] == ["early-exit@1", "prompt-lookup", "always-wrong (early-exit@1)"]
    assert failures(rows) == [] and all(row.different == 0 and not row.near_ties for row in rows)


def test_a_divergence_is_a_failure(tiny_bundle: Callable, diverging: Callable) -> None:
    diverging(2e-4)
    rows = check_losslessness(Bundle.open(tiny_bundle("llama")[0]), 1, 8)
    assert rows[0].first_difference == (0, 2) and rows[0].to_dict()["first_difference"] == [0, 2]
    assert "with draft early-exit@1, 1 of 1 requests differ" in failures(rows)[0]


def test_a_near_tie_is_listed_and_one_is_tolerated(tiny_bundle: Callable, diverging: Callable) -> None:
    diverging(5e-5)
    rows = check_losslessness(Bundle.open(tiny_bundle("llama")[0]), 1, 8)
    assert [row.near_ties for row in rows] == [[NearTie(0, 2, 5e-5)]] * 3
    assert rows[0].different == 0 and "request 0 leaves plain decoding at token 2" in rows[0].notes()[0]
    assert failures(rows[:1]) == []
    assert "3 near-ties in 24 tokens; at most 1" in failures(rows)[0]
    rows[0].tokens = 30_000
    assert failures(rows) == []
