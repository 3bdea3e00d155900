"""Typical acceptance: what it accepts, by exact enumeration; that only its name leads to it, and that it is marked."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import numpy as np
import pytest
from vlmexport.runtime.common.errors import OptionError
from vlmexport.runtime.decoder.token_tree import TokenTree
from vlmexport.runtime.sampling.sampler import Sampling
from vlmexport.runtime.sampling.typical import Typical, verify_typical
from vlmexport.runtime.sampling.verify import verify_draws
from vlmexport.runtime.session.session import Session

VOCABULARY = 3
TREES = [
    TokenTree.chain([0, 1, 2]),
    TokenTree([0, 0, 1, 2], [-1, 0, 0, 0]),
    TokenTree([0, 1, 2, 0, 1, 2, 0], [-1, 0, 0, 1, 1, 2, 5]),
    TokenTree([0, 2, 1, 1, 0], [-1, 0, 1, 0, 3]),
]
LAWS = [np.array([a, b, 8 - a - b]) / 8 for a in range(9) for b in range(9 - a)]
"""Every distribution over three tokens in steps of an eighth."""


def by_hand(p: np.ndarray, token: int, epsilon: float, delta: float) -> bool:
    entropy = -sum(x * math.log(x) for x in p.tolist() if x)
    return p[token] > min(epsilon, delta * math.exp(-entropy))


@pytest.mark.parametrize("tree", range(len(TREES)))
@pytest.mark.parametrize("criterion", [Typical(), Typical(0.3, 0.5), Typical(1.0, 0.9), Typical(0.0, 0.3)])
def test_the_longest_accepted_path_and_the_likeliest_of_several(tree: int, criterion: Typical) -> None:
    """Against all paths of the tree, over laws by prefix that take every distribution of the grid in turn."""
    given = TREES[tree]
    lengths = set()
    for start, step in itertools.product(range(len(LAWS)), (1, 7, 16)):

        def law(path, start: int = start, step: int = step) -> np.ndarray:
            return LAWS[
                (start + step * sum((VOCABULARY + token) ** (at + 1) for at, token in enumerate(path)))
                % len(LAWS)
            ]

        found = []
        for node in range(len(given)):
            path, up = [], node
            while up > 0:
                path.insert(0, up)
                up = given.parents[up]
            tokens = [given.tokens[each] for each in path]
            shares = [law(tokens[:at])[token] for at, token in enumerate(tokens)]
            if all(
                by_hand(law(tokens[:at]), token, criterion.epsilon, criterion.delta)
                for at, token in enumerate(tokens)
            ):
                found.append((len(path), sum(map(math.log, shares)), path))
        asked: list[tuple[int, tuple[int, ...]]] = []

        def choose(node: int, path, law=law, asked: list = asked) -> int:
            asked.append((node, tuple(path)))
            return int(law(path).argmax())

        verdict = verify_typical(given, lambda node, path, law=law: law(path), choose, criterion)
        most = max(length for length, _, _ in found)
        best = max(score for length, score, _ in found if length == most)
        assert len(verdict.path) == most
        assert [path for length, score, path in found if length == most and score >= best - 1e-12].count(
            verdict.path
        ) == 1
        last = verdict.path[-1] if verdict.path else 0
        assert asked == [(last, tuple(given.tokens[node] for node in verdict.path))]
        assert verdict.token == law(asked[0][1]).argmax(), "the last token is the target's own"
        assert len(verdict.path) <= verdict.evaluated <= given.depth
        lengths.add(most)
    assert len(lengths) > 1 or tree == 1, (
        "the grid reaches every outcome; a single level always accepts one here"
    )


def test_typical_acceptance_law_for_certain_and_uncertain_targets() -> None:
    tree = TREES[1]
    for token in range(VOCABULARY):
        point = np.eye(VOCABULARY)[token]
        choose = lambda node, path, token=token: token  # noqa: E731
        assert verify_typical(tree, lambda node, path, p=point: p, choose, Typical()) == verify_draws(
            tree, lambda node, depth, token=token: token
        )
    # A third each: the draft's token is always accepted, where the target emits it in one case of three.
    even = np.full(VOCABULARY, 1 / 3)
    chain = TokenTree.chain([0, 1])
    verdicts = [
        verify_typical(chain, lambda node, path: even, lambda n, p, y=y: y, Typical()) for y in range(3)
    ]
    assert [verdict.path for verdict in verdicts] == [[1]] * 3


@pytest.mark.parametrize("numbers", [(-0.1, 0.3), (0.09, 1.5), (float("nan"), 0.3), ("a", 0.3)])
def test_numbers_outside_0_to_1_are_refused(numbers: tuple) -> None:
    with pytest.raises(OptionError, match="typical_"):
        Typical(*numbers)


ASKED = {"max_new_tokens": 40, "temperature": 0.9, "seed": 5}


def test_lossy_requests_are_explicit_and_marked(tiny_bundle: Callable) -> None:
    with Session.load(tiny_bundle("llama").path, max_batch=3) as session:
        ids = [11, 70, 100, 41, 5]
        for draft in (
            {"draft": "medusa"},
            {"draft": "medusa", "draft_nodes": 9},
            {"draft": "early-exit", "draft_length": 3},
        ):
            plain = session.generate_tokens(ids, draft="none", **ASKED)
            kept = session.generate_tokens(ids, **draft, **ASKED)
            lossy = session.generate_tokens(ids, **draft, **ASKED, lossy=Typical(epsilon=0.0))
            assert (plain.tokens, plain.lossy, kept.lossy) == (kept.tokens, None, None)
            assert lossy.lossy == lossy.to_dict()["lossy"] == "typical"
            assert kept.to_dict()["lossy"] is None
            # With ε = 0 whatever has a probability is accepted.
            assert lossy.stats.accepted > kept.stats.accepted and lossy.tokens != plain.tokens
            lossy.stats.check()
        # At temperature 0 it is greedy decoding, and without a draft there is nothing to accept.
        greedy = session.generate_tokens(ids, max_new_tokens=40, draft="none")
        same = session.generate_tokens(ids, max_new_tokens=40, draft="medusa", lossy="typical")
        assert (same.tokens, same.lossy) == (greedy.tokens, None)
        undrafted = session.generate_tokens(ids, **ASKED, draft="none", lossy="typical")
        assert (undrafted.tokens, undrafted.lossy) == (plain.tokens, None)


def test_a_lossy_request_leaves_the_others_of_its_batch_alone(tiny_bundle: Callable) -> None:
    with Session.load(tiny_bundle("llama").path, max_batch=3) as session:
        options = {**ASKED, "draft": "medusa", "draft_length": 3}
        asked = [{"prompt": "red cup " * (1 + n), **options, "seed": n} for n in range(5)]
        wanted = [session.generate(**one) for one in asked]
        for place in (0, 3):
            asked[place] = {**asked[place], "lossy": Typical(epsilon=0.0)}
            wanted[place] = session.generate(**asked[place])
        together = session.generate_batch(asked)
        assert [result.tokens for result in together] == [result.tokens for result in wanted]
        assert [result.lossy for result in together] == ["typical", None, None, "typical", None]


def test_stream_is_marked_lossy_before_its_first_piece(tiny_bundle: Callable) -> None:
    with Session.load(tiny_bundle("llama").path) as session:
        for options, lossy in (
            ({"lossy": "typical"}, "typical"),
            ({}, None),
            ({"lossy": "typical", "temperature": 0}, None),
        ):
            stream = session.stream(prompt="the cup", **{**ASKED, "draft": "medusa", **options})
            assert stream.lossy == lossy
            list(stream)
            assert stream.result.lossy == lossy


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lossy": "nearly"}, "lossy: 'nearly' is not one of typical"),
        ({"lossy": True}, "lossy: True is not one of typical"),
        ({"lossy": "typical:0.09,2"}, r"typical_delta: 2\.0 is not a number"),
        ({"lossy": "typical:0.09"}, "lossy: 'typical:0.09' is not one of typical, typical:EPSILON,DELTA"),
        ({"lossy": "typical:a,b"}, "has no two numbers; write typical:0.09,0.3"),
        ({"min_p": 1.5}, "min_p: 1.5 is not a number"),
        ({"repetition_penalty": 0}, "repetition_penalty: 0 is not a number"),
    ],
)
def test_invalid_typical_options_are_refused(tiny_bundle: Callable, options: dict, message: str) -> None:
    with (
        Session.load(tiny_bundle("llama").path) as session,
        pytest.raises(OptionError, match=message),
    ):
        session.generate(prompt="the cup", **options)


def test_min_p_and_a_penalty_of_the_request_come_before_acceptance(tiny_bundle: Callable) -> None:
    """With them, too, a draft changes nothing; and both do something."""
    with Session.load(tiny_bundle("llama").path) as session:
        ids = [11, 70, 100, 41, 5]
        streams = set()
        for options in (
            {},
            {"min_p": 0.3},
            {"repetition_penalty": 1.8},
            {"min_p": 0.2, "repetition_penalty": 1.4, "top_k": 9},
        ):
            asked = {**ASKED, "temperature": 1.3, **options}
            plain = session.generate_tokens(ids, draft="none", **asked).tokens
            for draft in ({"draft": "medusa", "draft_nodes": 9}, {"draft": "early-exit", "draft_length": 4}):
                assert session.generate_tokens(ids, **draft, **asked).tokens == plain, (options, draft)
            streams.add(tuple(plain))
        assert len(streams) == 4
        # A penalty of 1 switches nothing on, one at temperature 0 changes greedy decoding for every draft alike.
        greedy = [
            session.generate_tokens(ids, max_new_tokens=40, repetition_penalty=p).tokens for p in (1.0, 1.8)
        ]
        assert greedy[0] == session.generate_tokens(ids, max_new_tokens=40).tokens != greedy[1]
    assert Sampling(1.0, min_p=0.5).probabilities(np.log(np.array([0.5, 0.3, 0.2]))).round(3).tolist() == [
        0.625,
        0.375,
        0,
    ]
