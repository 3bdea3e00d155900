"""Logits of every kind of pass of the runtime's decoder beside those of transformers' plain forward passes."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from vlmexport.runtime.bundle.folder import Bundle
from vlmexport.runtime.decoder.decoder import Decoder
from vlmexport.runtime.decoder.token_tree import TokenTree
from vlmexport.runtime.engines.onnxruntime import OnnxRuntimeCpu
from vlmexport.runtime.families.base import Prepared
from vlmexport.runtime.session.picture_cache import PictureCache, embeds_of

STEPS, WIDE = 3, 6
PARENTS = (-1, 0, 0, 2, 1, 3, 5)
"""A tree of seven nodes, whose branches end at depths 2 and 4."""
LEAVES = ((0, 1, 4), (0, 2, 3, 5, 6))


class PassLogits:
    """A bundle's decoder and the model that it was built from."""

    def __init__(self, path: Path, model: Any) -> None:
        self.bundle, self.model = Bundle.open(path), model
        manifest = self.bundle.manifest
        self.decoder = Decoder(OnnxRuntimeCpu(path, manifest), manifest, self.bundle.tensor)
        self.ordinary = [
            i for i in range(3, manifest.text.vocab_size) if i not in set(manifest.text.eos_token_ids)
        ]

    def differences(
        self, prepared: Prepared, inputs: Mapping[str, Any], draw: random.Random
    ) -> dict[str, float]:
        """The largest |difference| by kind of pass, over the largest |logit| where that is above 1: prefill, one token at
        a time, many in one pass, a tree. `inputs`: the model's, of the prompt alone; what follows it is drawn."""
        decoder = self.decoder
        marks = set(
            prepared.token_ids[[] if prepared.image_positions is None else prepared.image_positions].tolist()
        )
        tokens = draw.sample([i for i in self.ordinary if i not in marks], STEPS + WIDE + len(PARENTS))
        path, nodes = tokens[: STEPS + WIDE], tokens[STEPS + WIDE :]
        want = self._forward(inputs, path)

        decoder.reset(0)
        embeds = [embeds_of(PictureCache(0).encoded_view(decoder, view)) for view in prepared.views]
        images = np.concatenate(embeds) if embeds else None
        rows = decoder.embed(prepared.token_ids, images, prepared.image_positions)
        prefilled = decoder.prefill(rows, decoder.add(), prepared.positions, blocks=prepared.blocks)
        first = prefilled.logits(0)[None].copy()
        found = {"prefill": _far(first, want[:1])}
        steps = [self._full(TokenTree.chain([token])) for token in path[:STEPS]]
        found["one token"] = _far(np.concatenate(steps), want[1 : 1 + STEPS])
        found["wide"] = _far(self._full(TokenTree.chain(path[STEPS:])), want[1 + STEPS :])
        if not self.decoder.exact_trees:
            return found
        tree = self._full(TokenTree(nodes, list(PARENTS)))
        behind = [self._forward(inputs, [*path, *(nodes[n] for n in leaf)])[-len(leaf) :] for leaf in LEAVES]
        pairs = [_far(tree[list(leaf)], each) for leaf, each in zip(LEAVES, behind, strict=True)]
        return found | {"tree": max(pairs)}

    def _full(self, tree: TokenTree) -> np.ndarray:
        """One pass over all segments, of which all is kept; logits [nodes, V]."""
        self.decoder.begin_cycle(len(tree))
        self.decoder.full(tree)
        rows = self.decoder.head_of([tree])
        found = np.stack([rows.logits(node) for node in range(len(tree))])
        if tree.is_chain:
            self.decoder.accept(tree, list(range(1, len(tree))), 0)
        return found

    @torch.no_grad()
    def _forward(self, inputs: Mapping[str, Any], tokens: Sequence[int]) -> np.ndarray:
        """Logits [1 + tokens, V] behind the prompt: one plain pass, without a cache."""
        count = inputs["input_ids"].shape[1]
        behind = {"input_ids": torch.tensor([list(tokens)])}
        behind["attention_mask"] = torch.ones_like(behind["input_ids"])
        behind["mm_token_type_ids"] = behind["token_type_ids"] = torch.zeros_like(behind["input_ids"])
        if self.model.config.model_type == "paligemma":  # what is generated is causal
            behind["token_type_ids"] = torch.ones_like(behind["input_ids"])
        longer = {n: torch.cat([v, behind[n]], 1) if n in behind else v for n, v in inputs.items()}
        return self.model(**longer, use_cache=False).logits[0, count - 1 :].numpy()


def _far(got: np.ndarray, want: np.ndarray) -> float:
    assert got.shape == want.shape and np.isfinite(got).all()
    return float(np.abs(got - want).max() / max(1.0, np.abs(want).max()))
