"""Graphs that hold no part of the model, against what the host computes with numpy on inputs of their own."""

from __future__ import annotations

import numpy as np

from ...runtime.bundle.folder import Bundle
from ...runtime.bundle.manifest import GenerationInfo, GraphInfo, Limits
from ...runtime.decoder.device.logits_processors import of_cycle, of_request
from ...runtime.decoder.masks import relations
from ...runtime.decoder.token_tree import TokenTree
from ...runtime.graphs.text_layout import NOTHING, TextLayout
from ...runtime.graphs.values import caches_by_name, vocabulary
from ...runtime.sampling.logits_processors import Processors
from .host_masks import masks_of, slot_inputs_of
from .runner import GraphRunner
from .tally import Tally


def _commit(bundle: Bundle, runner: GraphRunner, graph: GraphInfo, tally: Tally) -> None:
    decoder = bundle.manifest.decoder
    random = np.random.default_rng(5)
    caches = {
        f"{name}.{i}": random.standard_normal((2, heads, 12, size), np.float32)
        for name, own in caches_by_name(decoder, range(decoder.num_layers)).items()
        for i, (heads, size) in own.items()
    }
    source, write = np.array([[4, 6, 9], [3, 7, 8]], np.int64), np.array([4, 2], np.int64)
    outputs = runner.run(graph.file, {"source_rows": source, "write_indices": write, **caches})
    for name in caches:
        expected = caches[name].copy()
        for batch_index in range(2):
            expected[batch_index, :, write[batch_index] : write[batch_index] + 3] = caches[name][batch_index][
                :, source[batch_index]
            ]
        tally.add("caches", outputs[f"updated_{name}"], expected)


def _mask(bundle: Bundle, runner: GraphRunner, graph: GraphInfo, tally: Tally) -> None:
    """A tree and a shorter chain behind other lengths, then the tree's last nodes alone, against the masks that the host
    makes."""
    slots, masks = 24, masks_of(bundle, 24)
    inputs = slot_inputs_of(bundle, slots)
    trees, starts = [TokenTree([0, 1, 2, 3, 4], [-1, 0, 0, 2, 3]), TokenTree.chain([0, 1, 2])], [7, 16]
    expected = {name: one.empty(batch=2, width=5, cache=slots) for name, one in inputs.items()}
    for name, one in inputs.items():
        for batch_index, (tree, start) in enumerate(zip(trees, starts, strict=True)):
            one.written.tree(expected[name], batch_index, start, tree)
    depths, ancestors = (np.stack(each) for each in zip(*(relations(t, 5) for t in trees), strict=True))
    first = np.array([7, 12])
    feeds = {"start": np.array(starts), "slots": np.arange(slots), "first_positions": first}
    feeds |= {"slot_depths": depths, "distance_bias": next(iter(masks.values())).distance_bias}
    for nodes in (slice(0, 5), slice(3, 5)):
        feeds |= {"depths": depths[:, nodes], "ancestors": ancestors[:, nodes]}
        outputs = runner.run(graph.file, {value.name: feeds[value.name] for value in graph.inputs})
        for name, whole in expected.items():
            own = whole[:, nodes] if whole.ndim == 3 else whole[:, :, nodes]
            tally.add(name, outputs[name].astype(np.float32), own.astype(np.float32))
        if "positions" in outputs:
            places = np.broadcast_to(first[:, None] + depths[:, nodes], outputs["positions"].shape)
            tally.add("positions", outputs["positions"].astype(np.float32), places.astype(np.float32))


def _process(bundle: Bundle, runner: GraphRunner, graph: GraphInfo, tally: Tally) -> None:
    """A tree behind a history of few different tokens, some of which are new to the device, against what the host does to
    logits."""
    manifest = bundle.manifest
    words, limits = vocabulary(manifest), manifest.limits
    random = np.random.default_rng(7)
    few = random.permutation(words)[:4].tolist()
    history = [few[i] for i in (0, 1, 2, 3, 1, 2, 0, 0, 1)]
    tree = TokenTree([few[i] for i in (1, 2, 3, 1, 2)], [-1, 0, 0, 2, 3])
    info = GenerationInfo(repetition_penalty=1.3, suppress_tokens=[1, words - 1], min_length=len(history) + 2)
    if graph.role == "repeats":
        info.no_repeat_ngram_size, info.bad_words_ids = 2, [[few[1], few[3], few[1], few[3]], few[:3]]
    host = Processors(info, few[3:], history)
    raw = random.standard_normal((len(tree), words), np.float32)
    raw[:, few] += 1.0
    unknown = min(3, limits.max_width)  # no more is told in a cycle
    feeds = device_feeds(host, tree, limits, words, unknown) | {"raw_logits": raw}
    said = feeds["said"].copy()
    outputs = runner.run(graph.file, {value.name: feeds[value.name] for value in graph.inputs})
    paths = [[tree.tokens[j] for j in np.flatnonzero(row)[1:]] for row in tree.ancestors]
    expected = np.stack([host.apply(row, path) for row, path in zip(raw, paths, strict=True)])
    hidden = np.float32(-1e9)  # the host bans with an infinity, whose differences are no numbers
    tally.add("logits", np.maximum(outputs["logits"], hidden), np.maximum(expected, hidden))
    end = int(feeds["end"][0])
    said[end + 1 - len(history) : end + 1] = history
    tally.add("said", outputs["said_now"].astype(np.float32), said.astype(np.float32))


def device_feeds(
    host: Processors, tree: TokenTree, limits: Limits, vocabulary: int, unknown: int
) -> dict[str, np.ndarray]:
    """What the graphs `penalties` and `repeats` read beside logits, of a device that knows all but the `unknown` last tokens of
    the history."""
    changes, layout = host.on_device, TextLayout.of(limits)
    assert changes is not None
    feeds = of_request(changes, layout, vocabulary) | of_cycle(changes, layout, vocabulary, limits.max_width)
    end, (depths, ancestors) = feeds["end"].item(), relations(tree, len(tree))
    feeds["said"][end + 1 - unknown : end + 1] = NOTHING
    nodes = {
        "tokens": np.array(tree.tokens),
        "token_depths": depths,
        "depths": depths,
        "ancestors": ancestors,
    }
    return feeds | nodes


WITHOUT_MODEL = {"commit": _commit, "mask": _mask, "penalties": _process, "repeats": _process}
"""Graphs that are compared with numpy, on inputs of their own."""
