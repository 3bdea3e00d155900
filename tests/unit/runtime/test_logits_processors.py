"""The runtime's logits processors against transformers' own, in the order in which its `generate` makes them."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vlmexport.runtime.sampling.logits_processors import Processors

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

VOCABULARY = 16
ROWS = VOCABULARY + 3
"""Token ids of a prompt; the last three stand for image placeholders that the head has no row for."""


@dataclass
class Asked:
    """What a generation_config asks for, in the manifest's words."""

    repetition_penalty: float = 1.0
    no_repeat_ngram_size: int = 0
    min_length: int = 0
    min_new_tokens: int = 0
    suppress_tokens: list[int] = field(default_factory=list)
    begin_suppress_tokens: list[int] = field(default_factory=list)
    bad_words_ids: list[list[int]] = field(default_factory=list)

    def changed(self) -> dict[str, Any]:
        """The fields that are not at their defaults."""
        return {name: value for name, value in vars(self).items() if value != getattr(Asked(), name)}


class Reference(transformers.GenerationMixin):
    """Just enough of a model for transformers to make its processors."""

    def __init__(self, encoder_decoder: bool):
        self.config = SimpleNamespace(is_encoder_decoder=encoder_decoder)

    def processed(self, asked: Asked, ends: list[int], prompt: list[int], new: list[int], logits: np.ndarray):
        config = transformers.GenerationConfig(**asked.changed())
        config.update(**config._get_default_generation_params(), defaults_only=True)
        config._eos_token_tensor = torch.tensor(ends) if ends else None
        processors = self._get_logits_processor(config, len(prompt), torch.tensor([prompt]))
        ids = torch.tensor([[*prompt, *new]], dtype=torch.long)
        return processors(ids, torch.from_numpy(logits.copy())[None])[0].numpy()


tokens = st.integers(0, VOCABULARY - 1)
some = st.lists(tokens, max_size=4)
word = st.lists(tokens, min_size=1, max_size=3)
floats = st.floats(-30, 30, width=32) | st.just(0.0) | st.just(float("-inf"))
asked = st.builds(
    Asked,
    repetition_penalty=st.sampled_from([1.0, 1.05, 1.3, 0.7, 2.0]),
    no_repeat_ngram_size=st.integers(0, 4),
    min_length=st.integers(0, 12),
    min_new_tokens=st.integers(0, 6),
    suppress_tokens=some,
    begin_suppress_tokens=some,
    bad_words_ids=st.lists(word, max_size=4),
)


@settings(max_examples=400, deadline=None)
@given(
    asked=asked,
    ends=st.lists(tokens, max_size=2, unique=True),
    prompt=st.lists(st.integers(0, ROWS - 1), min_size=1, max_size=10),
    # Few different tokens, so that n-grams do repeat.
    emitted=st.lists(st.integers(0, 3), max_size=8),
    path=st.lists(st.integers(0, 3), max_size=5),
    split=st.integers(0, 8),
    logits=st.lists(floats, min_size=VOCABULARY, max_size=VOCABULARY),
    encoder_decoder=st.booleans(),
)
def test_equals_transformers(asked, ends, prompt, emitted, path, split, logits, encoder_decoder):
    if all(len(w) == 1 and w[0] in ends for w in asked.bad_words_ids):
        asked.bad_words_ids = []  # transformers raises where every bad word is the end
    rows = np.asarray(logits, np.float32)
    before = rows.copy()
    expected = Reference(encoder_decoder).processed(asked, ends, prompt, emitted + path, rows)
    processors = Processors.from_info(asked, ends, prompt)
    if processors is None:
        found = rows
    else:
        processors.extend(emitted[:split])
        processors.apply(rows, path)  # leaves nothing behind
        processors.extend(emitted[split:])
        found = processors.apply(rows, path)
        assert found is not rows
        assert processors.idle is False or np.array_equal(found, rows)
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(rows, before)


@settings(max_examples=200, deadline=None)
@given(asked=asked, prompt=st.lists(tokens, min_size=1, max_size=6), path=st.lists(tokens, max_size=5))
def test_a_path_counts_like_emitted_tokens(asked, prompt, path):
    """The logits of a tree node are changed as plain decoding changes them when it gets there."""
    rows = np.linspace(-2, 2, VOCABULARY, dtype=np.float32)
    speculative, plain = Processors(asked, [1], prompt), Processors(asked, [1], prompt)
    for length in range(len(path) + 1):
        np.testing.assert_array_equal(speculative.apply(rows, path[:length]), plain.apply(rows))
        plain.extend(path[length : length + 1])


@settings(max_examples=200, deadline=None)
@given(asked=asked, prompt=st.lists(tokens, min_size=1, max_size=6), emitted=st.lists(tokens, max_size=8),
       later=st.lists(tokens, max_size=4))  # fmt: skip
def test_idle_processors_stay_idle(asked, prompt, emitted, later):
    rows = np.linspace(-2, 2, VOCABULARY, dtype=np.float32)
    processors = Processors(asked, [1], prompt)
    processors.extend(emitted)
    if processors.idle:
        np.testing.assert_array_equal(processors.apply(rows, later), rows)


@pytest.mark.parametrize(
    ("asked", "prompt"),
    [
        (Asked(), [1, 2]),
        (Asked(min_length=2), [3, 4]),  # the prompt is as long already
        (Asked(bad_words_ids=[[1]]), [3, 4]),  # the end alone is no bad word
        (Asked(suppress_tokens=[-1]), [3, 4]),
    ],
)
def test_no_processor_without_options(asked, prompt):
    assert Processors.from_info(asked, [1], prompt) is None


def test_minimum_length_without_end_token_is_ignored():
    assert Processors.from_info(Asked(min_length=9, min_new_tokens=9), [], [3]) is None


@pytest.mark.parametrize(
    "asked",
    [
        Asked(repetition_penalty=1.05), Asked(no_repeat_ngram_size=1), Asked(min_length=3), Asked(min_new_tokens=1),
        Asked(suppress_tokens=[5]), Asked(begin_suppress_tokens=[5]), Asked(bad_words_ids=[[5, 6]]),
    ],
    ids=lambda asked: ",".join(asked.changed()),
)  # fmt: skip
def test_processor_exists_with_options(asked):
    assert Processors.from_info(asked, [1], [3, 4]) is not None


def test_begin_and_minimum_length():
    processors = Processors.from_info(Asked(begin_suppress_tokens=[5], min_new_tokens=2), [1], [3, 4])
    assert processors is not None
    rows = np.zeros(VOCABULARY, np.float32)
    banned = lambda path: np.flatnonzero(np.isinf(processors.apply(rows, path))).tolist()  # noqa: E731
    assert [banned([]), banned([7]), banned([7, 7])] == [[1, 5], [1], []]
    processors.extend([7])
    assert [banned([]), banned([7])] == [[1], []] and not processors.idle
    processors.extend([7])
    assert banned([]) == [] and processors.idle
