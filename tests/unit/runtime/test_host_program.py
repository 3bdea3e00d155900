"""What the program around a session decides is its own: numpy's errors, warnings, policies, copies."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from vlmexport.runtime import Session
from vlmexport.runtime.common.errors import OptionError
from vlmexport.runtime.images.synthetic import synthetic_image
from vlmexport.runtime.policy.base import FixedLength
from vlmexport.runtime.speedup.budget import Budget


@pytest.fixture(scope="module")
def session(tiny_bundle: Callable[[str], Any]) -> Iterator[Session]:
    with Session.load(tiny_bundle("vit-gpt2").path) as opened:
        yield opened


ASKED: dict[str, Any] = {
    "image": synthetic_image(32, 32),
    "max_new_tokens": 10,
    "ignore_eos": True,
    "seed": 3,
}
TEMPERATURES = (0.0, 1e-320, 1e-300, 1e-5, 0.8, 1e300)
WAYS: tuple[dict[str, Any], ...] = (
    {"draft": "none"},
    {"draft": "medusa", "draft_sampling": "match", "repetition_penalty": 0.001},
    {"draft": "medusa", "draft_sampling": "drawn", "adaptive": "request", "top_p": 5e-324},
    {"draft": "imitation@1", "draft_sampling": "auto", "adaptive": "confidence", "min_p": 1e-300},
    {"draft": "eagle", "lossy": "typical:0.09,1e-320", "adaptive": "request"},
)


@pytest.mark.parametrize("way", range(len(WAYS)))
def test_numpy_error_state_of_the_host_program_is_kept(session: Session, way: int) -> None:
    for temperature in TEMPERATURES:
        asked = ASKED | {name: value for name, value in WAYS[way].items() if temperature or name != "lossy"}
        with np.errstate(all="ignore"):
            right = session.generate(**asked, temperature=temperature)
        with np.errstate(all="raise"):
            assert session.generate(**asked, temperature=temperature).tokens == right.tokens
        with np.errstate(all="warn"), warnings.catch_warnings():
            warnings.simplefilter("error")
            assert session.generate(**asked, temperature=temperature).tokens == right.tokens


def test_the_smallest_temperature_is_greedy(session: Session) -> None:
    greedy = session.generate(**ASKED, draft="none").tokens
    for temperature in (5e-324, 1e-320, 1e-300):
        assert session.generate(**ASKED, draft="none", temperature=temperature).tokens == greedy


class Given(FixedLength):
    """Allots what it is told to."""

    def __init__(self, found: Any):
        super().__init__(3)
        self.found = found

    def allot(self, sequences: Any) -> Any:
        return self.found


@pytest.mark.parametrize(
    "found", [None, 3, [], [3], "ab", [None], [Budget(1, 1)] * 2, {Budget(1, 1)}, 1.5, np.zeros(1)]
)
def test_policy_results_are_validated(session: Session, found: Any) -> None:
    with pytest.raises(
        OptionError, match=r"policy: allot of Given gave .* for 1 sequences, not a list of one Budget"
    ) as caught:
        session.generate(**ASKED, draft="medusa", policy=Given(found))
    assert "\n" not in str(caught.value)
    assert session.generate(**ASKED, draft="medusa", policy=Given([Budget(2, 2)])).stats.proposed


def test_invalid_policy_is_refused(session: Session) -> None:
    class Half:
        def allot(self, sequences: Any) -> list[Budget]:
            return [Budget(1, 1)] * len(sequences)

    with pytest.raises(
        OptionError, match="is not a DraftPolicy: it has no keep_drafting, observe, needs_confidence"
    ):
        session.generate(**ASKED, draft="medusa", policy=Half())


@pytest.mark.parametrize("take", [copy.copy, copy.deepcopy, pickle.dumps])
def test_copying_a_session_is_refused(session: Session, take: Callable[[Any], Any]) -> None:
    with pytest.raises(TypeError, match=r"cannot be copied, pickled .* load it there with Session\.load"):
        take(session)
