"""The graphs that change logits on a device, against what the host does: many small texts, trees and requests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
from vlmexport.exporter.parity.numpy_graphs import device_feeds
from vlmexport.runtime.bundle.manifest import GenerationInfo
from vlmexport.runtime.decoder.token_tree import TokenTree
from vlmexport.runtime.graphs.text_layout import CONTEXT, WORDS
from vlmexport.runtime.sampling.logits_processors import Processors

from tests.support.onnx_session import onnx_session

FEW = 4
"""Different tokens of a text, so that n-grams come again."""


@pytest.fixture(scope="module")
def graphs(tiny_bundle: Callable) -> tuple[Any, dict[str, ort.InferenceSession]]:
    tiny = tiny_bundle("llama")
    return tiny.bundle.manifest, {
        name: onnx_session(tiny.path / f"{name}.onnx") for name in ("penalties", "repeats")
    }


def _request(random: np.random.Generator, few: list[int], length: int) -> tuple[GenerationInfo, list[int]]:
    """What may be asked behind a text of that length, and the tokens that end it."""
    pick = lambda chance: random.random() < chance  # noqa: E731
    info = GenerationInfo()
    if pick(0.5):
        info.repetition_penalty = float(random.choice([0.7, 1.3, 2.0]))
    if pick(0.3):
        info.suppress_tokens = [int(random.integers(400))]
    if pick(0.5):
        info.min_length = length + int(random.integers(-1, 4))
    if pick(0.6):
        info.no_repeat_ngram_size = int(random.choice([1, 2, 2, 3, 3, 4, CONTEXT, CONTEXT + 1]))
    if pick(0.6):
        info.bad_words_ids = [
            [few[i] for i in random.integers(0, FEW, random.integers(2, CONTEXT + 2))]
            for _ in range(random.integers(1, 12))
        ]
    return info, [few[0], 5]


def _tree(random: np.random.Generator, root: int, few: list[int]) -> TokenTree:
    tokens, parents = [root], [-1]
    for _ in range(random.integers(0, 8)):
        child = int(random.integers(0, len(tokens))), few[random.integers(0, FEW)]
        if child not in zip(parents, tokens, strict=True):
            parents.append(child[0])
            tokens.append(child[1])
    return TokenTree(tokens, parents)


def test_a_device_changes_logits_as_the_host_does(graphs: Any) -> None:
    manifest, sessions = graphs
    vocabulary, limits = manifest.tensors["embedding_table"].shape[0], manifest.limits
    random = np.random.default_rng(11)
    banned = dict.fromkeys(("ngram", "words", "ends"), 0)
    for _ in range(400):
        few = random.permutation(np.arange(6, vocabulary))[:FEW].tolist()
        length = int(random.integers(1, 40))
        history = [few[i] for i in random.integers(0, FEW, length)]
        if random.random() < 0.2:
            history[0] = vocabulary + 3  # a placeholder, which the vocabulary does not hold
        if length > 1:
            history[-1] = few[1]
        root = history[-1]
        if root >= vocabulary:
            continue
        info, ends = _request(random, few, length)
        host = Processors.from_info(info, ends, history)
        if host is None:
            continue
        tree = _tree(random, root, few)
        changes = host.on_device
        assert changes is not None
        unknown = int(random.integers(1, min(length, limits.max_width) + 1))
        raw = random.standard_normal((len(tree), vocabulary)).astype(np.float32)
        feeds = device_feeds(host, tree, limits, vocabulary, unknown) | {"raw_logits": raw}
        session = sessions[changes.graph]
        taken = {value.name: feeds[value.name] for value in session.get_inputs()}
        logits, said = session.run(["logits", "said_now"], taken)
        for row, mask in enumerate(tree.ancestors):
            path = [tree.tokens[node] for node in np.flatnonzero(mask)[1:]]
            expected = host.apply(raw[row], path)
            never = np.isneginf(expected)
            np.testing.assert_array_equal(
                logits[row] == np.finfo(np.float32).min, never, err_msg=f"{info} {path}"
            )
            np.testing.assert_array_equal(logits[row][~never], expected[~never])
            depth = len(history) + len(path)
            banned["ends"] += depth < info.min_length
            several = never.sum() > len(info.suppress_tokens) + 2 * (depth < info.min_length)
            banned["ngram"] += bool(info.no_repeat_ngram_size and not info.bad_words_ids and several)
            banned["words"] += bool(info.bad_words_ids and not info.no_repeat_ngram_size and several)
        last = feeds["end"].item()
        text = said[last + 1 - length : last + 1].tolist()
        assert text == [token if token < vocabulary else -1 - token for token in history]
        assert (said[last + 1 : last + 1 + limits.max_width] == -1).all(), "nothing behind the text"
    assert min(banned.values()) > 40, banned


def test_oversized_processing_runs_on_the_host() -> None:
    def on_device(**asked: Any) -> Any:
        found = Processors.from_info(GenerationInfo(**asked), (), [7, 8])
        assert found is not None
        return found.on_device

    assert on_device(no_repeat_ngram_size=CONTEXT + 1) is not None
    assert on_device(no_repeat_ngram_size=CONTEXT + 2) is None
    assert on_device(bad_words_ids=[[3] * (CONTEXT + 1)]) is not None
    assert on_device(bad_words_ids=[[3] * (CONTEXT + 2)]) is None
    words = [[n, n + 1] for n in range(WORDS // 2 + 1)]
    assert on_device(bad_words_ids=words[1:]) is not None
    assert on_device(bad_words_ids=words) is None
    assert on_device(begin_suppress_tokens=[4], repetition_penalty=1.2) is None, "at the beginning"


def test_a_word_with_a_number_that_is_no_token_never_comes() -> None:
    found = Processors.from_info(GenerationInfo(bad_words_ids=[[-1, 5], [6, -1]]), (), [7, 8])
    assert found is None
