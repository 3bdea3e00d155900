"""Decoder graphs against PyTorch: prefill, single steps, trees, ragged batches, commit; every node of a tree must
equal an ordinary forward pass over its own path."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from vlmexport.exporter.checkpoint import open_checkpoint
from vlmexport.exporter.parity.reference import load_reference

from tests.support.graph_runner import GraphRunner, close

Bundles = Callable[..., tuple[Path, Path]]
LAYERS = {
    "llama": {"num_hidden_layers": 3},
    "llama-tied": {"num_hidden_layers": 3},
    "t5": {"num_decoder_layers": 3},
    "blip2-opt": {"num_hidden_layers": 3, "vision_layers": 1},
    "vit-gpt2": {"n_layer": 3, "vision_layers": 1, "scale_attn_by_inverse_layer_idx": True},
}
NAMES = list(LAYERS)
ROWS = np.random.default_rng(7).normal(size=(128, 96)).astype(np.float32)
"""Source rows by number, for a decoder that attends to rows of another modality."""


class Reference:
    """Logits of the eager model for whole sequences, in float32."""

    def __init__(self, name: str, folder: Path) -> None:
        whole = load_reference(open_checkpoint(folder), streamed=False)
        paths = {"blip2-opt": "language_model", "vit-gpt2": "decoder"}
        self.model = whole.get_submodule(paths.get(name, ""))
        self.kind = name

    @torch.no_grad()
    def logits(self, tokens: list[int], source: list[int]) -> np.ndarray:
        """[len(tokens), V]."""
        ids = torch.tensor([tokens])
        if self.kind == "t5":
            return self.model(input_ids=torch.tensor([source]), decoder_input_ids=ids).logits[0].numpy()
        if self.kind == "vit-gpt2":
            rows = torch.from_numpy(ROWS[source])[None]
            return self.model(input_ids=ids, encoder_hidden_states=rows).logits[0].numpy()
        return self.model(input_ids=ids).logits[0].numpy()


def start(bundle: Path, sources: list[list[int]], size: int = 48) -> GraphRunner:
    """A runner with its encoder pass done (T5) or its source rows given, padded to the longest source."""
    runner = GraphRunner(bundle, len(sources), size)
    if runner.decoder.cross_attention:
        longest = max(map(len, sources))
        ids = np.array([s + [0] * (longest - len(s)) for s in sources])
        lengths = np.array([len(s) for s in sources])
        if runner.bundle.manifest.encoder is None:
            runner.cross_over(ROWS[ids], lengths)
        else:
            runner.encode(runner.embed(ids), lengths)
    return runner


def chain(runner: GraphRunner, tokens: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """One causal pass of `tokens` [batch, width] behind `lengths` [batch] cached ones; logits [batch, width, V]."""
    batch, width = tokens.shape
    slots = np.arange(runner.size)
    query = lengths[:, None] + np.arange(width)
    visible = slots[None, None, :] <= query[:, :, None]
    hidden = runner.forward(runner.embed(tokens), lengths, query, np.repeat(slots[None], batch, 0), visible)[
        -1
    ]
    return runner.head(hidden, np.arange(batch * width)).reshape(batch, width, -1)


@pytest.fixture(
    params=[NAMES[0], *(pytest.param(name, marks=pytest.mark.slow) for name in NAMES[1:])]
)  # the contract suite has every family
def pair(request: pytest.FixtureRequest, tiny_bundle: Bundles) -> tuple[Path, Reference]:
    bundle, source = tiny_bundle(request.param, 1, **LAYERS[request.param])
    return bundle, Reference(request.param, source)


def test_prefill_then_single_steps(pair: tuple[Path, Reference]) -> None:
    bundle, reference = pair
    source, tokens = [5, 9, 3, 40, 7], [0, 8, 30, 22, 17, 50, 61, 4, 19]
    runner = start(bundle, [source])
    expected = reference.logits(tokens, source)
    assert expected.std() > 1
    close(chain(runner, np.array([tokens[:6]]), np.array([0]))[0], expected[:6])
    for i in range(6, len(tokens)):
        close(chain(runner, np.array([tokens[i : i + 1]]), np.array([i]))[0], expected[i : i + 1])


@pytest.mark.parametrize("size", [16, 33])
def test_any_cache_size(pair: tuple[Path, Reference], size: int) -> None:
    bundle, reference = pair
    tokens = [0, 8, 30, 22, 17, 50, 61, 4, 19, 33, 21, 12, 11, 60, 70, 2]
    runner = start(bundle, [[5, 9]], size)
    close(chain(runner, np.array([tokens]), np.array([0]))[0], reference.logits(tokens, [5, 9]))


def test_ragged_batch_of_three(pair: tuple[Path, Reference]) -> None:
    bundle, reference = pair
    sources = [[5, 9, 3], [44, 12], [7, 7, 21, 30, 6]]
    tokens = [[0, 8, 30, 22, 17], [0, 61], [0, 4, 19, 33]]
    runner = start(bundle, sources)
    padded = np.array([t + [1] * (5 - len(t)) for t in tokens])
    first = chain(runner, padded, np.zeros(3, np.int64))
    more = np.array([[9, 10], [11, 12], [13, 14]])
    second = chain(runner, more, np.array([len(t) for t in tokens]))
    for row, (t, s) in enumerate(zip(tokens, sources, strict=True)):
        expected = reference.logits(t + more[row].tolist(), s)
        close(first[row, : len(t)], expected[: len(t)])
        close(second[row], expected[len(t) :])


def test_tree_and_commit(pair: tuple[Path, Reference]) -> None:
    bundle, reference = pair
    source, prompt = [5, 9, 3, 40], [0, 8, 30, 22]
    #        0: root       1, 2: children of 0   3: child of 2   4: child of 1   5: child of 3
    tokens, parents = [17, 50, 61, 4, 19, 33], [-1, 0, 0, 2, 1, 3]
    runner = start(bundle, [source])
    chain(runner, np.array([prompt]), np.array([0]))
    base, width = len(prompt), len(tokens)
    paths: list[list[int]] = []
    for node, parent in enumerate(parents):
        paths.append([*(paths[parent] if parent >= 0 else []), node])
    depth = np.array([len(p) - 1 for p in paths])
    visible = np.zeros((1, width, runner.size), bool)
    visible[0, :, :base] = True
    key = np.arange(runner.size)[None].copy()
    for node, path in enumerate(paths):
        visible[0, node, [base + n for n in path]] = True
        key[0, base + node] = base + depth[node]
    hidden = runner.forward(
        runner.embed(np.array([tokens])), np.array([base]), base + depth[None], key, visible
    )[-1]
    logits = runner.head(hidden, np.arange(width))
    for node, path in enumerate(paths):
        close(logits[node], reference.logits(prompt + [tokens[n] for n in path], source)[-1])
    # keep the path 0, 2, 3, 5 and go on: the cache must be as if only that path had ever been there
    kept = [0, 2, 3, 5]
    out = runner.run(
        "commit",
        feeds={
            "source_rows": np.array([[base + n for n in kept]]),
            "write_indices": np.array([base]),
            **runner.caches,
        },
    )
    runner.caches = {name.removeprefix("updated_"): value for name, value in out.items()}
    told = prompt + [tokens[n] for n in kept]
    close(
        chain(runner, np.array([[12, 60]]), np.array([len(told)]))[0],
        reference.logits([*told, 12, 60], source)[-2:],
    )


def test_head_selects_rows_first(pair: tuple[Path, Reference]) -> None:
    bundle, _ = pair
    runner = start(bundle, [[5, 9], [6, 2]])
    rng = np.random.default_rng(0)
    hidden = rng.normal(size=(2, 5, runner.decoder.hidden_size)).astype(np.float32)
    every = runner.head(hidden, np.arange(10))
    np.testing.assert_allclose(
        runner.head(hidden, np.array([7, 0, 7])), every[[7, 0, 7]], rtol=1e-5, atol=1e-5
    )


def test_t5_without_its_bias_is_another_model(tiny_bundle: Bundles) -> None:
    """The bias reaches every segment through the mask: leaving it out changes the logits of each cut."""
    bundle, source = tiny_bundle("t5", 1, **LAYERS["t5"])
    reference = Reference("t5", source)
    tokens = [0, 8, 30, 22, 17, 50]
    expected = reference.logits(tokens, [5, 9])
    runner = start(bundle, [[5, 9]])
    runner._bias = lambda stack, query, key, bidirectional: np.zeros(  # type: ignore[method-assign]
        (1, runner.decoder.num_heads, query.shape[1], key.shape[1]), np.float32
    )
    wrong = chain(runner, np.array([tokens]), np.array([0]))[0]
    assert np.abs(wrong - expected).max() > 0.1
