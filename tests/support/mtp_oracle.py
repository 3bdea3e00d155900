"""The head for multi-token prediction once more, in plain tensors: no module, no cache, one head of attention after the other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

Tensors = dict[str, torch.Tensor]


def _norm(rows: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return rows * torch.rsqrt(rows.pow(2).mean(-1, keepdim=True) + eps) * (1 + weight)


def _turned(rows: torch.Tensor, positions: torch.Tensor, config: Any) -> torch.Tensor:
    """Rows [n, D] of a head at positions [3, n]: the first quarter of it turns, angle i with axis i % 3 as far as that goes."""
    rope = config.rope_parameters
    turning = int(config.head_dim * rope["partial_rotary_factor"])
    half, sections = turning // 2, rope["mrope_section"]
    out = rows.clone()
    for i in range(half):
        axis = i % 3 if i % 3 and i < 3 * sections[i % 3] else 0
        angle = positions[axis].double() * rope["rope_theta"] ** (-2 * i / turning)
        cos, sin = angle.cos().to(rows.dtype), angle.sin().to(rows.dtype)
        out[:, i] = rows[:, i] * cos - rows[:, i + half] * sin
        out[:, i + half] = rows[:, i + half] * cos + rows[:, i] * sin
    return out


def features_behind(
    tensors: Tensors, config: Any, embedded: torch.Tensor, features: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    """Features [n, E] that the head gives for pairs of an embedding and a feature [n, E], at positions int64 [3, n]."""
    eps, size = config.rms_norm_eps, config.head_dim
    layer = {name.removeprefix("mtp.layers.0."): value for name, value in tensors.items()}
    joined = torch.cat(
        [
            _norm(embedded, tensors["mtp.pre_fc_norm_embedding.weight"], eps),
            _norm(features, tensors["mtp.pre_fc_norm_hidden.weight"], eps),
        ],
        -1,
    )
    rows = joined @ tensors["mtp.fc.weight"].T
    normed = _norm(rows, layer["input_layernorm.weight"], eps)
    asked = (normed @ layer["self_attn.q_proj.weight"].T).view(len(rows), -1, 2, size)
    keys = (normed @ layer["self_attn.k_proj.weight"].T).view(len(rows), -1, size)
    values = (normed @ layer["self_attn.v_proj.weight"].T).view(len(rows), -1, size)
    later = torch.ones(len(rows), len(rows)).triu(1).bool()
    heads = []
    for head in range(asked.shape[1]):
        shared = head * keys.shape[1] // asked.shape[1]
        query = _turned(_norm(asked[:, head, 0], layer["self_attn.q_norm.weight"], eps), positions, config)
        key = _turned(_norm(keys[:, shared], layer["self_attn.k_norm.weight"], eps), positions, config)
        scores = (query @ key.T / size**0.5).masked_fill(later, -torch.inf)
        heads.append(scores.softmax(-1) @ values[:, shared] * asked[:, head, 1].sigmoid())
    rows = rows + torch.cat(heads, -1) @ layer["self_attn.o_proj.weight"].T
    normed = _norm(rows, layer["post_attention_layernorm.weight"], eps)
    gate = normed @ layer["mlp.gate_proj.weight"].T
    inner = gate * gate.sigmoid() * (normed @ layer["mlp.up_proj.weight"].T)
    rows = rows + inner @ layer["mlp.down_proj.weight"].T
    return _norm(rows, tensors["mtp.norm.weight"], eps)


def drafted(
    tensors: Tensors, model: Any, tokens: Sequence[int], count: int, **vision: torch.Tensor
) -> list[int]:
    """The `count` tokens that the head drafts behind `tokens`, the last of which no pass of the target has seen; `vision`
    are the model's arguments for pictures in them."""
    config, body = model.config.text_config, model.model
    ids = torch.tensor([list(tokens)])
    marks = (ids == model.config.image_token_id).long()
    with torch.inference_mode():
        given = {"mm_token_type_ids": marks[:, :-1], **vision} if vision else {}
        known = body(input_ids=ids[:, :-1], use_cache=False, **given).last_hidden_state[0]
        if vision:
            positions = body.get_rope_index(
                ids, mm_token_type_ids=marks, image_grid_thw=vision["image_grid_thw"]
            )[0][:, 0]
        else:
            positions = torch.arange(len(tokens)).expand(3, -1)
        table = body.language_model.embed_tokens.weight
        embedded, features, places = table[ids[0, 1:]], known, positions[:, : len(known)]
        found: list[int] = []
        while len(found) < count:
            new = features_behind(tensors, config, embedded, features, places)[-1:]
            found.append(int((new @ model.lm_head.weight.T).argmax()))
            embedded = torch.cat([embedded, table[found[-1:]]])
            features = torch.cat([features, new])
            places = torch.cat([places, places[:, -1:] + 1], 1)
        return found
