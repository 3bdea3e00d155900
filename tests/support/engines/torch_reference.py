"""Eager PyTorch behind the engine interface: transformers' own layers, and index assignment for the cache.

Shares no code with the exporter or with ONNX Runtime: what a graph computes is written here a second time, in terms of
the checkpoint's own modules.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from transformers import EncoderDecoderCache
from transformers.models.qwen3_5 import modeling_qwen3_5
from vlmexport.runtime.bundle.float32_view import as_float32
from vlmexport.runtime.drafts.layer_skip_options import skipped_by
from vlmexport.runtime.engines.base import Buffer, Engine, View

from tests.support.skipped_oracle import without

from . import memory

Tensors = dict[str, torch.Tensor]
HIDDEN = float(torch.finfo(torch.float32).min)


class _Rows:
    """Self-attention cache over bound memory: new rows are assigned, then all rows are shown to the layer."""

    def __init__(self, io: Tensors) -> None:
        self.io = io

    def update(self, keys: torch.Tensor, values: torch.Tensor, layer: int, *_: Any, **__: Any) -> tuple:
        for kind, new in (("key", keys), ("value", values)):
            store = self.io[f"{kind}_cache.{layer}"]
            for sequence, start in enumerate(self.io["write_indices"].tolist()):
                store[sequence, :, start : start + new.shape[2]] = new[sequence]
        return self.io[f"key_cache.{layer}"], self.io[f"value_cache.{layer}"]

    def get_seq_length(self, *_: Any) -> int:
        return 0


class _Always(dict):
    def get(self, *_: Any) -> bool:  # type: ignore[override]
        return True


class _Cross:
    def __init__(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        self.keys, self.values = keys, values


class _Crosses:
    def __init__(self, io: Tensors) -> None:
        layers = [int(name.rsplit(".", 1)[1]) for name in io if name.startswith("cross_key.")]
        self.layers = {i: _Cross(io[f"cross_key.{i}"], io[f"cross_value.{i}"]) for i in layers}


class _Both(EncoderDecoderCache):
    """What a T5 block needs to see to take its cross-attention from `cross_key.i` and `cross_value.i`."""

    def __init__(self, io: Tensors) -> None:  # no super().__init__: it wants transformers' own caches
        self.self_attention_cache = _Rows(io)  # type: ignore[assignment]
        self.cross_attention_cache = _Crosses(io)  # type: ignore[assignment]
        self.is_updated = _Always()

    def get_seq_length(self, *_: Any) -> int:
        return 0


def _additive(mask: torch.Tensor) -> torch.Tensor:
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros(mask.shape).masked_fill(~mask, HIDDEN)


class _Model:
    """What every family shares: embed, head, commit, drafts."""

    def __init__(self, model: Any, networks: Mapping[str, torch.nn.Module], left_out: Any = None) -> None:
        """`left_out`: sublayers that the graph `skipped` has not."""
        self.model, self.networks, self.left_out = model.eval(), dict(networks), left_out

    def head(self, io: Tensors) -> Tensors:
        raise NotImplementedError

    def graph(self, name: str, layers: tuple[int, int] | None) -> Callable[[Tensors], Tensors]:
        if name in ("medusa", "eagle", "eagle3", "fusion", "vispec", "adaptor", "skipped"):
            return getattr(self, name)
        if name in self.networks:
            network: Any = self.networks[name]
            if network.attention is not None:
                return lambda io: self.attending(io, network)
            return lambda io: {"hidden_out": network(io["hidden"])}
        if layers is not None:
            return lambda io: self.segment(io, *layers)
        return getattr(self, name)

    def normed(self, io: Tensors) -> torch.Tensor:
        """What the LM head reads of the rows that `io` names, [rows, E]."""
        rows: list[torch.Tensor] = []
        hook = self.lm_head.register_forward_pre_hook(lambda _module, given: rows.append(given[0]))
        self.head(io)
        hook.remove()
        return rows[0]

    def medusa(self, io: Tensors) -> Tensors:
        network = self.networks["medusa"]
        return self.ranked(network, network(self.normed(io), self.lm_head.weight))

    def eagle(self, io: Tensors) -> Tensors:
        network: Any = self.networks["eagle"]
        return self._layer(io, network, network.joined(*self._pairs(io)))

    def eagle3(self, io: Tensors) -> Tensors:
        network: Any = self.networks["eagle3"]
        return self._layer(io, network, network.joined(*self._pairs(io)))

    def attending(self, io: Tensors, network: Any) -> Tensors:
        """An imitation network with attention."""
        cos, sin = (half.repeat(1, 1, 2) for half in network.attention.angles(io["positions"]))
        rows = network.attention(io["hidden"], _additive(io["attn_mask"]), (cos, sin), _Rows(io))
        return {"hidden_out": network.mapped(rows)}

    def skipped(self, io: Tensors) -> Tensors:
        """All layers, with what some sublayers give set to zero; caches and masks that the graph has not are made up."""
        assert self.left_out is not None
        rows = next(value for name, value in io.items() if name.startswith("key_cache."))
        kinds = {"key_cache": rows, "value_cache": rows}
        if "cross_mask" in io:
            source = next(value for name, value in io.items() if name.startswith("cross_key."))
            kinds |= {"cross_key": source, "cross_value": source}
        unused = {
            f"{kind}.{i}": torch.zeros_like(v) for kind, v in kinds.items() for i in range(len(self.layers))
        }
        mask = next(io[name] for name in ("attn_mask", "sliding_mask") if name in io)
        unused |= dict.fromkeys(("attn_mask", "sliding_mask"), mask)
        with without(self.layers, self.left_out.attention, self.left_out.mlp):
            return self.segment({**unused, **io}, 0, len(self.layers))

    def fusion(self, io: Tensors) -> Tensors:
        network: Any = self.networks["eagle3"]
        return {"hidden_out": network.fused(io["low"], io["middle"], io["high"])}

    def vispec(self, io: Tensors) -> Tensors:
        network: Any = self.networks["vispec"]
        visual = io["visual"][io["visual_index"]]
        return self._layer(io, network.layer, network.entering(*self._pairs(io), visual, io["compressed"]))

    def _pairs(self, io: Tensors) -> tuple[torch.Tensor, torch.Tensor]:
        """Embeddings and features that a draft's layer goes on from."""
        shape, rows = io["feature_index"].shape, io["hidden"][io["feature_index"]]
        if "drafted" in io and not io["drafted"].item():
            rows = self.normed({"hidden": rows, "row_index": torch.arange(shape.numel())}).view_as(rows)
        tokens = {"token_ids": io["next_ids"], "embedding_table": io["embedding_table"]}
        return self.embed(tokens)["hidden"], rows

    def adaptor(self, io: Tensors) -> Tensors:
        network: Any = self.networks["vispec"]
        return {"visual_rows": network.imadpt(io["image_rows"])}

    def _layer(self, io: Tensors, network: Any, entering: torch.Tensor) -> Tensors:
        features = network.layers[0](
            entering,
            attention_mask=_additive(io["attn_mask"]),
            position_embeddings=tuple(half.repeat(1, 1, 2) for half in network.angles(io["positions"])),
            past_key_values=_Rows(io),
        )
        asked = features.flatten(0, 1)[io["row_index"]]
        found = self.ranked(network, network.logits(asked, self.lm_head.weight))
        return {"hidden_out": features, **found}

    @staticmethod
    def ranked(network: Any, logits: torch.Tensor) -> Tensors:
        values, ids = logits.log_softmax(-1).topk(10)
        d2t = getattr(network, "d2t", None)
        return {"token_ids": ids if d2t is None else d2t[ids], "log_probabilities": values}

    @property
    def lm_head(self) -> torch.nn.Module:
        return self.model.lm_head

    def embed(self, io: Tensors) -> Tensors:
        table = io["embedding_table"]
        if table.dtype == torch.uint16:  # numpy has no bfloat16: its bits
            table = table.view(torch.bfloat16)
        return {"hidden": table[io["token_ids"]].float()}

    def commit(self, io: Tensors) -> Tensors:
        for name, cache in io.items():
            if "_cache." not in name:
                continue
            for sequence, start in enumerate(io["write_indices"].tolist()):
                rows = cache[sequence][:, io["source_rows"][sequence]].clone()
                cache[sequence, :, start : start + rows.shape[1]] = rows
        return {}

    @property
    def layers(self) -> Any:
        """Of the decoder."""
        raise NotImplementedError

    def segment(self, io: Tensors, first: int, last: int) -> Tensors:
        raise NotImplementedError


class LlamaModel(_Model):
    """Graphs of a `llama` bundle; `self.body` is the LlamaModel."""

    @property
    def body(self) -> Any:
        return self.model.model

    @property
    def layers(self) -> Any:
        return self.body.layers

    def segment(self, io: Tensors, first: int, last: int) -> Tensors:
        hidden, cache = io["hidden"], _Rows(io)
        angles = self.body.rotary_emb(hidden, io["positions"])
        for layer in self.body.layers[first:last]:
            sliding = getattr(layer.self_attn, "sliding_window", None) is not None
            mask = _additive(io["sliding_mask" if sliding else "attn_mask"])
            hidden = layer(hidden, attention_mask=mask, position_embeddings=angles, past_key_values=cache)
        return {"hidden_out": hidden}

    def head(self, io: Tensors) -> Tensors:
        rows = io["hidden"].reshape(-1, io["hidden"].shape[-1])[io["row_index"]]
        return {"logits": self.model.lm_head(self.body.norm(rows))}


class T5Model(_Model):
    """The text half of a T5 bundle; `self.text` is the T5ForConditionalGeneration."""

    @property
    def text(self) -> Any:
        return self.model

    @property
    def layers(self) -> Any:
        return self.text.decoder.block

    def encoder(self, io: Tensors) -> Tensors:
        hidden = io["encoder_rows"]
        for block in self.text.encoder.block:
            hidden = block(hidden, attention_mask=None, position_bias=io["encoder_mask"])[0]
        return {"encoder_states": self.text.encoder.final_layer_norm(hidden)}

    def cross_kv(self, io: Tensors) -> Tensors:
        states, out = io["encoder_states"], {}
        for i, block in enumerate(self.text.decoder.block):
            attention = block.layer[1].EncDecAttention
            for kind, linear in (("key", attention.k), ("value", attention.v)):
                rows = linear(states).view(*states.shape[:2], attention.n_heads, attention.key_value_proj_dim)
                out[f"cross_{kind}.{i}"] = rows.transpose(1, 2)
        return out

    def segment(self, io: Tensors, first: int, last: int) -> Tensors:
        hidden, cache = io["hidden"], _Both(io)
        cross = _additive(io["cross_mask"])
        for block in self.text.decoder.block[first:last]:
            hidden = block(
                hidden, attention_mask=None, position_bias=io["attn_mask"], encoder_hidden_states=hidden,
                encoder_attention_mask=cross, past_key_values=cache,
            )[0]  # fmt: skip
        return {"hidden_out": hidden}

    def head(self, io: Tensors) -> Tensors:
        rows = io["hidden"].reshape(-1, io["hidden"].shape[-1])[io["row_index"]]
        rows = self.text.decoder.final_layer_norm(rows)
        if self.text.config.scale_decoder_outputs:
            rows = rows * self.text.model_dim**-0.5
        return {"logits": self.text.lm_head(rows)}


class _Blip2Vision:
    """The vision graph of a `blip2` bundle, whatever language model follows."""

    model: Any

    @property
    def text(self) -> Any:
        return self.model.language_model

    @property
    def lm_head(self) -> torch.nn.Module:
        return self.text.lm_head

    def vision(self, io: Tensors) -> Tensors:
        states = self.model.vision_model(io["pixel_values"]).last_hidden_state
        queries = self.model.query_tokens.expand(states.shape[0], -1, -1)
        rows = self.model.qformer(query_embeds=queries, encoder_hidden_states=states).last_hidden_state
        return {"image_rows": self.model.language_projection(rows)}


class Blip2T5Model(_Blip2Vision, T5Model):
    """Graphs of a `blip2` bundle with T5."""


class Blip2OptModel(_Blip2Vision, _Model):
    """Graphs of a `blip2` bundle with OPT."""

    @property
    def layers(self) -> Any:
        return self.text.model.decoder.layers

    def segment(self, io: Tensors, first: int, last: int) -> Tensors:
        decoder, hidden, cache = self.text.model.decoder, io["hidden"], _Rows(io)
        if first == 0:
            hidden = hidden + decoder.embed_positions(None, position_ids=io["positions"])
        for layer in decoder.layers[first:last]:
            hidden = layer(hidden, attention_mask=_additive(io["attn_mask"]), past_key_values=cache)
        return {"hidden_out": hidden}

    def head(self, io: Tensors) -> Tensors:
        rows = io["hidden"].reshape(-1, io["hidden"].shape[-1])[io["row_index"]]
        return {"logits": self.text.lm_head(self.text.model.decoder.final_layer_norm(rows))}


class ViTGPT2Model(_Model):
    """Graphs of a `vit-gpt2` bundle."""

    @property
    def layers(self) -> Any:
        return self.model.decoder.transformer.h

    @property
    def lm_head(self) -> torch.nn.Module:
        return self.model.decoder.lm_head

    def vision(self, io: Tensors) -> Tensors:
        rows = self.model.encoder(io["pixel_values"]).last_hidden_state
        projection = getattr(self.model, "enc_to_dec_proj", None)
        return {"image_rows": rows if projection is None else projection(rows)}

    def cross_kv(self, io: Tensors) -> Tensors:
        states, out = io["encoder_states"], {}
        for i, block in enumerate(self.model.decoder.transformer.h):
            attention = block.crossattention
            for kind, rows in zip(("key", "value"), attention.c_attn(states).chunk(2, -1), strict=True):
                heads = rows.view(*states.shape[:2], attention.num_heads, attention.head_dim)
                out[f"cross_{kind}.{i}"] = heads.transpose(1, 2)
        return out

    def segment(self, io: Tensors, first: int, last: int) -> Tensors:
        decoder, hidden, cache = self.model.decoder.transformer, io["hidden"], _Both(io)
        if first == 0:
            hidden = hidden + decoder.wpe(io["positions"])
        for block in decoder.h[first:last]:
            hidden = block(
                hidden, past_key_values=cache, attention_mask=_additive(io["attn_mask"]),
                encoder_hidden_states=hidden, encoder_attention_mask=_additive(io["cross_mask"]),
            )  # fmt: skip
        return {"hidden_out": hidden}

    def head(self, io: Tensors) -> Tensors:
        rows = io["hidden"].reshape(-1, io["hidden"].shape[-1])[io["row_index"]]
        return {"logits": self.model.decoder.lm_head(self.model.decoder.transformer.ln_f(rows))}


class LlavaModel(LlamaModel):
    """Graphs of a `llava` bundle."""

    @property
    def body(self) -> Any:
        return self.model.model.language_model

    def vision(self, io: Tensors) -> Tensors:
        rows = self.model.get_image_features(io["pixel_values"]).pooler_output
        return {"image_rows": torch.stack(list(rows))}


class LlavaNextModel(LlavaModel):
    """Graphs of a `llava-next` bundle."""

    def vision(self, io: Tensors) -> Tensors:
        body = self.model.model
        states = body.vision_tower(io["pixel_values"], output_hidden_states=True).hidden_states
        rows = body.multi_modal_projector(states[self.model.config.vision_feature_layer][:, 1:])
        every = torch.cat([rows.flatten(0, 1), body.image_newline[None]])
        return {"image_rows": every[io["row_index"]]}


class InternVLModel(LlavaModel):
    """Graphs of an `internvl` bundle."""

    def vision(self, io: Tensors) -> Tensors:
        return {"image_rows": self.model.get_image_features(io["pixel_values"]).pooler_output}


class QwenVLModel(LlavaModel):
    """Graphs of a `qwen2.5-vl` bundle."""

    def vision(self, io: Tensors) -> Tensors:
        down, across = (io["patch_positions"].amax((0, 1)) + 1).tolist()
        pixels = io["pixel_values"][io["unit_order"]].flatten(0, 1)
        rows = self.model.get_image_features(pixels, torch.tensor([[1, down, across]])).pooler_output
        return {"image_rows": rows[0]}


class WholeQwenVLModel(LlavaModel):
    """Graphs of a `qwen2-vl` bundle."""

    def vision(self, io: Tensors) -> Tensors:
        down, across = (io["patch_positions"].amax((0, 1)) + 1).tolist()
        pixels = io["pixel_values"].flatten(0, 1)
        rows = self.model.get_image_features(pixels, torch.tensor([[1, down, across]])).pooler_output
        return {"image_rows": rows[0]}


class Qwen3VLModel(LlavaModel):
    """Graphs of a `qwen3-vl` bundle."""

    def vision(self, io: Tensors) -> Tensors:
        down, across = (io["patch_positions"].amax((0, 1)) + 1).tolist()
        pixels = io["pixel_values"].flatten(0, 1)
        seen = self.model.get_image_features(pixels, torch.tensor([[1, down, across]]))
        rows = [seen.pooler_output[0], *(each[0] for each in seen.deepstack_features)]
        return {"image_rows": torch.cat(rows, -1)}

    def segment(self, io: Tensors, first: int, last: int) -> Tensors:
        hidden = io["hidden"]
        for i in range(first, last):
            hidden = super().segment({**io, "hidden": hidden}, i, i + 1)["hidden_out"]
            hidden = hidden + io.get(f"deepstack.{i}", 0)
        return {"hidden_out": hidden}


class Qwen35Model(LlavaModel):
    """Graphs of a `qwen3.5` bundle."""

    def vision(self, io: Tensors) -> Tensors:
        down, across = (io["patch_positions"].amax((0, 1)) + 1).tolist()
        pixels = io["pixel_values"].flatten(0, 1)
        seen = self.model.get_image_features(pixels, torch.tensor([[1, down, across]]))
        return {"image_rows": seen.pooler_output[0]}

    def segment(self, io: Tensors, first: int, last: int) -> Tensors:
        hidden = io["hidden"]
        angles = self.body.rotary_emb(hidden, io["positions"]) if "positions" in io else None
        for i in range(first, last):
            layer = self.body.layers[i]
            if f"recurrent_state.{i}" in io:
                hidden = hidden + recurrent(layer.linear_attn, layer.input_layernorm(hidden), io, i)
                hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
                continue
            hidden = layer(
                hidden, attention_mask=_additive(io["attn_mask"]), position_embeddings=angles,
                past_key_values=_Rows(io),
            )  # fmt: skip
        return {"hidden_out": hidden}


def recurrent(net: Any, hidden: torch.Tensor, io: Tensors, layer: int) -> torch.Tensor:
    """A `Qwen3_5GatedDeltaNet` on rows [B, W, E], each sequence for itself and row by row: pending rows again, then its own. States
    are written where they lie."""
    outputs, before = [], net.conv_kernel_size - 1
    projected = torch.cat([net.in_proj_qkv(hidden), net.in_proj_b(hidden), net.in_proj_a(hidden)], -1)
    for one, (pending, folded) in enumerate(zip(io["pending"].tolist(), io["folded"].tolist(), strict=True)):
        recent, state = io[f"recent_rows.{layer}"][one], io[f"recurrent_state.{layer}"][one]
        rows = torch.cat([recent[: before + pending], projected[one]])
        heads = net.num_v_heads
        mixed, b, a = rows.split([net.conv_dim, heads, heads], -1)
        mixed = modeling_qwen3_5.causal_conv1d_fn(
            mixed.T[None], net.conv1d.weight.squeeze(1), None, activation=net.activation
        )[0].T
        parts = mixed[before:].split([net.key_dim, net.key_dim, net.value_dim], -1)
        sizes = (net.head_k_dim, net.head_k_dim, net.head_v_dim)
        q, k, v = (part.reshape(1, len(part), -1, size) for part, size in zip(parts, sizes, strict=True))
        g = -net.A_log.exp() * torch.nn.functional.softplus(a[before:] + net.dt_bias)
        given, beta = (q, k, v, g[None]), b[before:].sigmoid()[None]

        def step(ends: slice, begin: torch.Tensor, given: Any = given, beta: Any = beta) -> Any:
            q, k, v, g = (each[:, ends] for each in given)
            return modeling_qwen3_5.torch_recurrent_gated_delta_rule(
                q, k, v, g, beta[:, ends], initial_state=begin, output_final_state=True,
                use_qk_l2norm_in_kernel=True,
            )  # fmt: skip

        kept, middle = step(slice(0, folded), state[None].clone())
        rest, _ = step(slice(folded, None), middle)
        outputs.append(torch.cat([kept, rest], 1)[0, pending:])
        state.copy_(middle[0])
        moved = rows[folded : folded + len(recent)]
        recent[: len(moved)] = moved
    gate = net.in_proj_z(hidden).reshape(-1, net.head_v_dim)
    normed = net.norm(torch.stack(outputs).reshape(-1, net.head_v_dim), gate)
    return net.out_proj(normed.reshape(*hidden.shape[:2], -1))


class Gemma3TextModel(LlamaModel):
    """Graphs of a `llama` bundle with Gemma 3."""

    def embed(self, io: Tensors) -> Tensors:
        return {"hidden": super().embed(io)["hidden"] * self.body.config.hidden_size**0.5}

    def segment(self, io: Tensors, first: int, last: int) -> Tensors:
        hidden, cache = io["hidden"], _Rows(io)
        masks = {"full_attention": "attn_mask", "sliding_attention": "sliding_mask"}
        for layer in self.body.layers[first:last]:
            kind = layer.self_attn.layer_type
            hidden = layer(
                hidden, attention_mask=_additive(io[masks[kind]]), past_key_values=cache,
                position_embeddings=self.body.rotary_emb(hidden, io["positions"], kind),
            )  # fmt: skip
        return {"hidden_out": hidden}


class Gemma3Model(Gemma3TextModel):
    """Graphs of a `gemma3` bundle."""

    @property
    def body(self) -> Any:
        return self.model.model.language_model

    def vision(self, io: Tensors) -> Tensors:
        return {"image_rows": self.model.get_image_features(io["pixel_values"]).pooler_output}


class _Window:
    """What a convolution of transformers reads of one token: the row that it has made, which is kept in its slot, behind
    those of the tokens before."""

    def __init__(self, rows: torch.Tensor, slot: int, before: list[int]) -> None:
        self.rows, self.slot, self.before = rows, slot, before

    def get_conv_state(self, *_: Any, **__: Any) -> None:
        return None

    def is_recording_past(self, *_: Any) -> bool:
        return True

    def update_conv_state(self, own: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        self.rows[self.slot] = own[0, :, 0]
        zero = torch.zeros_like(own[0, :, 0])
        columns = [self.rows[slot] if slot >= 0 else zero for slot in self.before]
        return torch.stack([*columns, own[0, :, 0]], -1)[None]


class Lfm2TextModel(LlamaModel):
    """Graphs of a `llama` bundle with LFM2: convolutions run token by token, parents before their children."""

    def segment(self, io: Tensors, first: int, last: int) -> Tensors:
        hidden, cache = io["hidden"], _Rows(io)
        for number, layer in enumerate(self.body.layers[first:last], first):
            if layer.is_attention_layer:
                angles = self.body.rotary_emb(hidden, io["positions"])
                mask = _additive(io["attn_mask"])
                hidden = layer(hidden, attention_mask=mask, position_embeddings=angles, past_key_values=cache)
            else:
                hidden = self._convolved(io, layer, io[f"conv_cache.{number}"], hidden)
        return {"hidden_out": hidden}

    @staticmethod
    def _convolved(io: Tensors, layer: Any, rows: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        made = torch.empty_like(hidden)
        for sequence, start in enumerate(io["write_indices"].tolist()):
            for place in range(hidden.shape[1]):
                before = io["conv_slots"][sequence, place].tolist()
                window = _Window(rows[sequence, 0], start + place, before)
                one = hidden[sequence : sequence + 1, place : place + 1]
                made[sequence, place] = layer(one, past_key_values=window)[0, 0]
        return made

    def skipped(self, io: Tensors) -> Tensors:
        batch, width, size = io["hidden"].shape
        rows = next(value for name, value in io.items() if name.startswith("key_cache."))
        unused = {
            f"conv_cache.{i}": torch.zeros(batch, 1, rows.shape[2], size) for i in range(len(self.layers))
        }
        nothing = torch.full((batch, width, self.body.config.conv_L_cache - 1), -1)
        return super().skipped({**unused, "conv_slots": nothing, **io})

    def head(self, io: Tensors) -> Tensors:
        rows = io["hidden"].reshape(-1, io["hidden"].shape[-1])[io["row_index"]]
        return {"logits": self.model.lm_head(self.body.embedding_norm(rows))}


class Lfm2VLModel(Lfm2TextModel):
    """Graphs of an `lfm2-vl` bundle."""

    @property
    def body(self) -> Any:
        return self.model.model.language_model

    def vision(self, io: Tensors) -> Tensors:
        """The units are put back into reading order, and their size is what the table's weights repeat by."""
        units, patches, values = io["pixel_values"].shape
        merge = math.isqrt(patches)
        across = _repeating(io["table_rows"]) * merge
        down = units * patches // across
        shape = (down // merge, across // merge, merge, merge, values)
        pixels = io["pixel_values"].reshape(shape).transpose(1, 2).reshape(1, down * across, values)
        mask = torch.ones(1, down * across, dtype=torch.int32)
        seen = self.model.get_image_features(pixels, torch.tensor([[down, across]]), mask)
        return {"image_rows": seen.pooler_output[0]}


def _repeating(table_rows: torch.Tensor) -> int:
    """Units in the first row: those whose patches take the same rows of a table."""
    alike = (table_rows == table_rows[:1]).flatten(1).all(1)
    return int(alike.long().cumprod(0).sum())


class SmolVLMModel(LlavaModel):
    """Graphs of a `smolvlm` bundle."""

    @property
    def body(self) -> Any:
        return self.model.model.text_model

    def vision(self, io: Tensors) -> Tensors:
        return {
            "image_rows": torch.stack(
                self.model.get_image_features(io["pixel_values"][:, None]).pooler_output
            )
        }


class PaliGemmaModel(Gemma3Model):
    """Graphs of a `paligemma` bundle."""

    def segment(self, io: Tensors, first: int, last: int) -> Tensors:
        return LlamaModel.segment(self, io, first, last)

    def head(self, io: Tensors) -> Tensors:
        logits = super().head(io)["logits"]
        cap = getattr(self.body.config, "final_logit_softcapping", None)
        return {"logits": logits if cap is None else (logits / cap).tanh() * cap}


FAMILIES: dict[tuple[str, str], type[_Model]] = {
    ("paligemma", "gemma"): PaliGemmaModel,
    ("paligemma", "gemma2"): PaliGemmaModel,
    ("llama", "llama"): LlamaModel,
    ("llama", "qwen2"): LlamaModel,
    ("llama", "qwen3"): LlamaModel,
    ("llama", "gemma3_text"): Gemma3TextModel,
    ("llama", "lfm2"): Lfm2TextModel,
    ("lfm2-vl", "lfm2"): Lfm2VLModel,
    ("gemma3", "gemma3_text"): Gemma3Model,
    **{("internvl", language): InternVLModel for language in ("llama", "qwen2", "qwen3")},
    ("llava", "llama"): LlavaModel,
    ("llava-next", "llama"): LlavaNextModel,
    ("qwen2-vl", "qwen2_vl_text"): WholeQwenVLModel,
    ("qwen2.5-vl", "qwen2_5_vl_text"): QwenVLModel,
    ("qwen3-vl", "qwen3_vl_text"): Qwen3VLModel,
    ("qwen3.5", "qwen3_5_text"): Qwen35Model,
    ("smolvlm", "llama"): SmolVLMModel,
    ("blip2", "t5"): Blip2T5Model,
    ("blip2", "opt"): Blip2OptModel,
    ("t5", "t5"): T5Model,
    ("vit-gpt2", "gpt2"): ViTGPT2Model,
}
"""Family and decoder in a manifest → their graphs in PyTorch. A new family is one line here."""


class _Call:
    def __init__(
        self, compute: Callable[[Tensors], Tensors], inputs: Mapping[str, View], outputs: Mapping[str, View]
    ):
        self._compute = compute
        self._inputs = {name: torch.from_numpy(memory.array(view)) for name, view in inputs.items()}
        self._outputs = {name: memory.array(view) for name, view in outputs.items()}

    def run(self) -> None:
        with torch.inference_mode():
            results = self._compute(self._inputs)
        for name, target in self._outputs.items():
            if name.startswith("updated_"):  # was written in place
                continue
            value = results[name]
            assert tuple(value.shape) == target.shape, (
                f"{name}: computed {tuple(value.shape)}, bound {target.shape}"
            )
            np.copyto(target, value.numpy())


class TorchReference(Engine):
    """See the module. `manifest` tells names and layers of the graphs, `model` is the checkpoint in transformers."""

    name = "torch-reference"

    def __init__(
        self, manifest: Any, model: Any, networks: Mapping[str, torch.nn.Module] | None = None
    ) -> None:
        super().__init__(as_float32(manifest).graphs)
        left_out = skipped_by(manifest)
        kind = FAMILIES[manifest.model.family, manifest.model.decoder]
        self._model = kind(model, networks or {}, left_out)

    def allocate(self, name: str, nbytes: int, zeroed: bool = False) -> Buffer:
        return memory.allocate(name, nbytes, zeroed)

    def _bind(self, graph: str, inputs: Mapping[str, View], outputs: Mapping[str, View]) -> _Call:
        layers = self.graphs[graph].layers
        return _Call(self._model.graph(graph, (layers[0], layers[1]) if layers else None), inputs, outputs)

    def write(self, view: View, array: np.ndarray) -> None:
        memory.array(view)[...] = array

    def read(self, view: View) -> np.ndarray:
        return memory.array(view).copy()
