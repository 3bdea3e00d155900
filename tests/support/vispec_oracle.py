"""What a ViSpec layer proposes, written a second time: all pairs in their places, those of pictures hidden, and path by
path a past of its own."""

from __future__ import annotations

from collections.abc import Sequence as Items
from typing import Any

import torch

from tests.support.eagle_oracle import Growing, Path
from tests.support.oracle import Oracle, Request
from tests.support.rig import Rig

Frames = tuple[int, Items[torch.Tensor]]
"""A picture: the position of its first row, and the rows [n, E] of each of its frames as they enter the decoder."""


@torch.inference_mode()
def seen_by(oracle: Oracle, inputs: dict[str, torch.Tensor]) -> tuple[Any, Any]:
    """What the target's LM head reads at every position, and what enters its decoder there, [n, E] each."""
    heads: list[Any] = []
    entering: list[Any] = []
    hooks = [
        oracle.text.lm_head.register_forward_pre_hook(lambda _module, given: heads.append(given[0])),
        oracle.stack.register_forward_pre_hook(
            lambda _module, _given, named: entering.append(named["inputs_embeds"]), with_kwargs=True
        ),
    ]
    try:
        oracle.model(**inputs, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return heads[0][0].clone(), entering[0][0].clone()


def behind(rig: Rig, network: Any, request: Request, tokens: Items[int]) -> VispecOracle:
    """The layer behind `tokens` of a request, whose picture comes first."""
    features, entering = seen_by(rig.oracle, rig.oracle.inputs(request, tuple(tokens[:-1])))
    count = rig.image_rows(request)
    pictures = [(0, [entering[:count]])] if count else []
    ids = [*rig.first_ids(request), *tokens]
    text = rig.oracle.text
    return VispecOracle(network, text.get_input_embeddings(), text.lm_head.weight, features, ids, pictures)


class VispecOracle(Growing):
    """The layer `network` behind the pairs of a text, whose last token is pending.

    Shares nothing with the runtime's way, which closes the gaps that pictures leave in the cache: here every pair has a
    row, and mask and positions say the rest.
    """

    @torch.inference_mode()
    def __init__(
        self, network: Any, embed: Any, table: Any, features: Any, ids: Items[int], pictures: Items[Frames]
    ) -> None:
        """`features` [n, E] of the target, `ids` of all its n positions and the pending token behind them."""
        super().__init__(network.layer, embed, table)
        self.whole = network
        count, width = features.shape
        assert len(ids) == count + 1
        visual = torch.zeros(1, count, width)
        compressed = torch.zeros(1, count, dtype=torch.bool)
        visible = torch.ones(count, dtype=torch.bool)
        for start, frames in pictures:
            made = [network.imadpt(rows) for rows in frames]
            at = start
            for rows, own in zip(frames, made, strict=True):
                first, last = max(at - 1, 0), at + len(rows) - 1
                at += len(rows)
                visible[first:last] = False
                for back, token in enumerate(reversed(own[:-1]), 1):
                    if last - back >= first:
                        visible[last - back] = compressed[0, last - back] = True
                        visual[0, last - back] = token
            visual[0, at - 1 :] = torch.stack([own[-1] for own in made]).mean(0)
        self.glob = visual[:, -1:]
        self.hidden = [int(place) for place in torch.nonzero(~visible)]
        mask = torch.ones(count, count, dtype=torch.bool).tril() & (
            visible | torch.eye(count, dtype=torch.bool)
        )
        places = torch.arange(count)[None]
        entering = embed(torch.tensor([list(ids[1:])]))
        rows, past = network(
            entering, features[None], places, mask[None, None], visual=visual, compressed=compressed
        )
        self.known = {(): (rows[:, -1:], past)}

    def step(self, path: Path) -> tuple[Any, Any]:
        """See `Growing`."""
        feature, past = self.known[path[:-1]]
        count = past[0].shape[2]
        mask = torch.ones(1, 1, 1, count + 1, dtype=torch.bool)
        mask[..., self.hidden] = False
        embedded = self.embed(torch.tensor([path[-1:]]))
        return self.whole(embedded, feature, torch.tensor([[count]]), mask, past, visual=self.glob)
