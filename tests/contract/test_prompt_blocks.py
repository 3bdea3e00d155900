"""Blocks of a prompt that see themselves in both directions, and windows: prefill in passes against one plain pass of
transformers over masks that are written here by their definition."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from vlmexport.runtime.decoder import prompt_chunks
from vlmexport.runtime.decoder.token_tree import TokenTree

from tests.support import window_mutants as windows
from tests.support.engines.torch_reference import HIDDEN
from tests.support.rig import Rig, close

Blocks = tuple[tuple[int, int], ...]

BLOCKS: Blocks = ((2, 7), (30, 44), (44, 60))
"""Shorter than the window of 8, longer, and across the end of a pass of 32; two lie side by side."""
LONG: Blocks = ((3, 9), (20, 66))
"""The second is longer than a pass over text."""
LENGTH = 75
MOST = 32
TEXT = 12


def allowed(blocks: Blocks, window: int | None) -> np.ndarray:
    """bool [n, n]: window AND (causal OR same block)."""
    count = LENGTH + TEXT
    query, key = np.arange(count)[:, None], np.arange(count)
    seen = key <= query
    for first, end in blocks:
        inside = [(each >= first) & (each < end) for each in (query, key)]
        seen = seen | (inside[0] & inside[1])
    return seen if window is None else seen & (key > query - window)


def expected(rig: Rig, ids: Sequence[int], blocks: Blocks) -> np.ndarray:
    """Logits [TEXT + 1, V] behind the prompt and each token of the text."""
    masks: dict[str, Any] = {}
    for kind, window in (("full_attention", None), ("sliding_attention", 8)):
        seen = torch.from_numpy(allowed(blocks, window))[None, None]
        masks[kind] = torch.zeros(seen.shape).masked_fill(~seen, HIDDEN)
    with torch.inference_mode():
        logits = rig.oracle.model(input_ids=torch.tensor([ids]), attention_mask=masks, use_cache=False).logits
    return logits[0, LENGTH - 1 :].numpy()


def decoded(rig: Rig, ids: Sequence[int], blocks: Blocks, cached: int) -> np.ndarray:
    """The same by the decoder, the prompt behind `cached` positions that it has; the text once as a chain and once step
    by step."""
    rows = rig.decoder.embed(np.array(ids[:LENGTH], np.int64))
    if cached:
        rig.decoder.prefill(rows[:cached], blocks=[b for b in blocks if b[1] <= cached])
    found = [rig.decoder.prefill(rows[cached:], blocks=blocks).logits(0)[None].copy()]
    text = ids[LENGTH:]
    for part in (text[:5], *([token] for token in text[5:8]), text[8:]):
        found.append(rig.chain(part))
        rig.accept(TokenTree.chain(list(part)), range(1, len(part)))
    return np.concatenate(found)


def check(rigs: Callable, engine: str, patch: pytest.MonkeyPatch, blocks: Blocks = BLOCKS) -> None:
    patch.setattr(prompt_chunks, "PREFILL_WIDTH", MOST)
    rig = rigs("qwen2", engine)
    longest = max(end - first for first, end in blocks)
    if longest > MOST:
        patch.setattr(rig.manifest.decoder, "max_block", longest)
        rig.fresh()
    ids = np.random.default_rng(8).integers(3, rig.manifest.text.vocab_size - 4, LENGTH + TEXT).tolist()
    want = expected(rig, ids, blocks)
    causal = rig.oracle.model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, LENGTH - 1 :]
    assert np.abs(want - causal.detach().numpy()).max() > 1, "the blocks make no difference"
    for cached in (0, blocks[-1][0], blocks[-1][1]):
        close(decoded(rig, ids, blocks, cached), want, f"behind {cached} cached positions")
        rig.decoder.reset()


@pytest.mark.parametrize("blocks", [BLOCKS, LONG], ids=["short", "long"])
@pytest.mark.parametrize("engine", ["onnxruntime", "device", "tensorrt-portable"])
def test_prefill_equals_one_pass_over_the_blocks(
    rigs: Callable, engine: str, blocks: Blocks, monkeypatch: pytest.MonkeyPatch
) -> None:
    check(rigs, engine, monkeypatch, blocks)


@pytest.mark.parametrize(
    "plant", [windows.causal_blocks, windows.borders_within_blocks, windows.blocks_beyond_windows]
)
def test_seeded_errors_are_caught(
    rigs: Callable, plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        check(rigs, "onnxruntime", monkeypatch)
