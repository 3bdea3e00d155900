"""What the target drafts without some of its sublayers, in transformers: its own caches, and hooks that take away."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Collection
from collections.abc import Sequence as Items
from typing import Any

import torch

from tests.support.oracle import Oracle, Request

ATTENTION = ("self_attn", "attn", "crossattention", "SelfAttention", "EncDecAttention", "conv")
MLP = ("mlp", "fc2", "DenseReluDense", "feed_forward")
"""What transformers calls sublayers in decoder layers of all families; a convolution stands in the place of attention."""


def without(layers: Items[Any], attention: Collection[int], mlp: Collection[int]) -> contextlib.ExitStack:
    """While it is open, what these sublayers give is zero, and the rows pass as they are."""

    def nothing(_module: Any, _given: Any, output: Any) -> Any:
        return (output[0] * 0, *output[1:]) if isinstance(output, tuple) else output * 0

    stack = contextlib.ExitStack()
    for names, left_out in ((ATTENTION, attention), (MLP, mlp)):
        for layer in left_out:
            found = [
                child for path, child in layers[layer].named_modules() if path.rpartition(".")[2] in names
            ]
            assert found, f"layer {layer} has none of {names}"
            for child in found:
                stack.callback(child.register_forward_hook(nothing).remove)
    return stack


@torch.inference_mode()
def drafted(oracle: Oracle, skip: Any, request: Request, tokens: Items[int], count: int) -> list[int]:
    """`count` tokens behind `tokens`, of which all but the last are in the target's cache; each drafted one looks at that
    cache, and at what the draft itself made of the tokens since."""
    out = oracle.model(**oracle.inputs(request, tuple(tokens[:-1])), use_cache=True)
    cache = (getattr(out, "language_model_outputs", None) or out).past_key_values
    cache = copy.deepcopy(cache)
    found = [tokens[-1]]
    with without(oracle.layers, skip.attention, skip.mlp):
        for _ in range(count):
            logits = oracle.text(**_next(oracle, found[-1]), past_key_values=cache, use_cache=True).logits
            found.append(int(logits[0, -1].argmax()))
    return found[1:]


def _next(oracle: Oracle, token: int) -> dict[str, Any]:
    """Arguments of the language model's forward for one token behind a cache."""
    ids = torch.tensor([[token]])
    if not oracle.encoder_decoder:
        return {"input_ids": ids}
    states = torch.zeros(1, 1, oracle.text.config.hidden_size)  # the cache has what attention reads of them
    if oracle.reads_text:
        return {"decoder_input_ids": ids, "encoder_outputs": (states,)}
    return {"input_ids": ids, "encoder_hidden_states": states}
