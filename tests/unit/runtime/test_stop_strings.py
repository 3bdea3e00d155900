"""Stop strings: thousands of them end a text where the first of them is complete, as each by itself would."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from vlmexport.runtime.common.errors import OptionError
from vlmexport.runtime.session.request_options import RequestOptions
from vlmexport.runtime.text import stop
from vlmexport.runtime.text.stop import LONGEST, StopStrings

WORDS = st.text(st.sampled_from("ab<"), min_size=1, max_size=6)


def one_by_one(texts: list[str], pieces: list[tuple[str, bool]]) -> str:
    """What is shown before the text that is completed first; "<" begins every text that is looked for among all."""
    whole, shown = "", ""
    for piece, hidden in pieces:
        for character in piece:
            whole += character
            shown += "" if hidden else character
            ends = [len(t) for t in texts if (whole if "<" in t else shown).endswith(t)]
            if not ends:
                continue
            special = [t for t in texts if "<" in t and whole.endswith(t)]
            begins = [len(whole) - len(t) for t in special]
            seen = [at for at, h in enumerate(h for p, h in pieces for _ in p) if not h and at < len(whole)]
            begins += [seen[len(shown) - len(t)] for t in texts if "<" not in t and shown.endswith(t)]
            cut = min(begins)
            return "".join(c for at, c in enumerate(whole) if at < cut and at in seen)
    return shown


@settings(max_examples=300, deadline=None)
@example(["ab"], [("xa", False), ("b", False)], 3, 0)
@example(["aab"], [("xaa", False), ("<", True), ("b", False)], 256, 0)
@given(
    st.lists(WORDS, min_size=1, max_size=8), st.lists(st.tuples(WORDS, st.booleans()), max_size=8), st.sampled_from([0, 3, 256]),
    st.sampled_from([0, 100]),
)  # fmt: skip
def test_thousands_of_stop_strings_are_found(
    texts: list[str], pieces: list[tuple[str, bool]], short: int, few: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stop, "_SHORT", short)
        patch.setattr(stop, "_FEW", few)
        sought = StopStrings(texts, ["<"])
        given = "".join(sought.take(piece, hidden) for piece, hidden in pieces)
        stopped = sought.stopped
        given += sought.rest()
    assert given == one_by_one(texts, pieces)
    assert stopped or given == "".join(piece for piece, hidden in pieces if not hidden)


def test_stop_strings_have_a_bound() -> None:
    assert len(RequestOptions(stop=["x" * LONGEST]).stop) == 1
    with pytest.raises(
        OptionError, match=r"stop: 2 texts of 100,001 characters; all of them may have 100,000: give fewer"
    ):
        RequestOptions(stop=["x", "y" * LONGEST])
