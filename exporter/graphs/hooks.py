"""Hooks that make transformers' own layers trace to the ONNX operators we want; no model is re-implemented.

Four custom torch operators stand for one ONNX operator each (opset 24). They run eagerly too, so a hooked module
computes the same values in PyTorch as its graph does.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from onnxscript.onnx_opset import opset24 as op
from transformers.activations import NewGELUActivation
from transformers.modeling_utils import AttentionInterface
from transformers.pytorch_utils import Conv1D

from ...runtime.common.errors import UnsupportedModelError

ATTENTION = "vlmexport"
"""Name of our attention: a configuration with `_attn_implementation` of this name is built for export."""
OPSET = 24


@torch.library.custom_op("vlmexport::kv_update", mutates_args=())
def kv_update(cache: torch.Tensor, update: torch.Tensor, write_indices: torch.Tensor) -> torch.Tensor:
    """Writes `update` [B, H, q, D] into `cache` [B, H, S, D] at slot `write_indices` [B] (ONNX TensorScatter, linear)."""
    result = cache.clone()
    batch_indices = torch.arange(cache.shape[0], device=cache.device)[:, None]
    result[batch_indices, :, write_indices[:, None] + torch.arange(update.shape[2], device=cache.device)] = (
        update.transpose(1, 2)
    )
    return result


@kv_update.register_fake
def _(cache: torch.Tensor, update: torch.Tensor, write_indices: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(cache)


@torch.library.custom_op("vlmexport::attention", mutates_args=())
def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    softcap: float = 0.0,
) -> torch.Tensor:
    """Scaled dot-product attention over [B, heads, T, D]; fewer key/value heads are shared by groups of queries. Scores s become
    softcap · tanh(s / softcap), before the mask; 0: they stay as they are."""
    groups = query.shape[1] // key.shape[1]
    if softcap:
        return _capped_attention(query, key, value, mask, scale, softcap)
    return torch.nn.functional.scaled_dot_product_attention(
        query,
        key.repeat_interleave(groups, 1),
        value.repeat_interleave(groups, 1),
        attn_mask=mask,
        scale=scale,
    ).clone(memory_format=torch.contiguous_format)


def _capped_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    softcap: float,
) -> torch.Tensor:
    """As transformers' Gemma 2 computes it."""
    groups = query.shape[1] // key.shape[1]
    scores = query @ key.repeat_interleave(groups, 1).transpose(2, 3) * scale
    scores = torch.tanh(scores / softcap) * softcap
    if mask is not None:
        hidden = torch.finfo(scores.dtype).min
        scores = scores.masked_fill(~mask, hidden) if mask.dtype == torch.bool else scores + mask
    weights = scores.float().softmax(-1).to(query.dtype)
    return (weights @ value.repeat_interleave(groups, 1)).contiguous()


@attention.register_fake
def _(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    softcap: float = 0.0,
) -> torch.Tensor:
    return torch.empty_like(query, memory_format=torch.contiguous_format)


@torch.library.custom_op("vlmexport::rms_norm", mutates_args=())
def rms_norm(hidden: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """Root-mean-square normalisation over the last dimension, statistics in float32 (arXiv 1910.07467)."""
    wide = hidden.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
    return weight * normed.to(hidden.dtype)


@rms_norm.register_fake
def _(hidden: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    return torch.empty_like(hidden)


@torch.library.custom_op("vlmexport::rotary", mutates_args=())
def rotary(states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotates the two halves of the last dimension of `states` [B, H, q, D] by angles `cos`, `sin` [B, q, D/2]."""
    first, second = states.chunk(2, -1)
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


@rotary.register_fake
def _(states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(states)


def _onnx_kv_update(cache: Any, update: Any, write_indices: Any) -> Any:
    return op.TensorScatter(cache, update, write_indices, axis=2, mode="linear")


def _onnx_attention(query: Any, key: Any, value: Any, mask: Any, scale: float, softcap: float = 0.0) -> Any:
    outputs: Any = (
        op.Attention(query, key, value, mask, scale=scale, softcap=softcap)
        if softcap
        else op.Attention(query, key, value, mask, scale=scale)
    )
    return outputs[0]


def _onnx_rms_norm(hidden: Any, weight: Any, epsilon: float) -> Any:
    return op.RMSNormalization(hidden, weight, axis=-1, epsilon=epsilon)


def _onnx_rotary(states: Any, cos: Any, sin: Any) -> Any:
    return op.RotaryEmbedding(states, cos, sin)


def translation_table() -> dict[Any, Any]:
    """What `torch.onnx.export(custom_translation_table=...)` needs for the operators above."""
    ops = torch.ops.vlmexport
    return {
        ops.kv_update.default: _onnx_kv_update,
        ops.attention.default: _onnx_attention,
        ops.rms_norm.default: _onnx_rms_norm,
        ops.rotary.default: _onnx_rotary,
    }


HARMLESS = ("use_cache", "output_attentions", "position_ids", "cache_position", "is_causal", "position_bias")
"""Keywords of attention that change nothing here: the mask alone says what is visible, and it carries T5's bias."""


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Attention as transformers calls it: [B, heads, T, D] in, [B, T, heads, D] out, and no weights. `softcap` bounds
    scores (Gemma 2, arXiv 2408.00118).

    Raises UnsupportedModelError for an option that would change the result (s_aux, sliding_window, cu_seq_lens_q, …): leaving
    it out would export another model; and for a softcap that is not positive.
    """
    odd = sorted(name for name, given in options.items() if given is not None and name not in HARMLESS)
    if odd:
        raise UnsupportedModelError(
            f"{type(module).__name__} passes {', '.join(odd)} to attention, which is not supported"
        )
    if softcap is not None and softcap <= 0:
        raise UnsupportedModelError(f"{type(module).__name__}: a softcap of {softcap} is not positive")
    scale = 1.0 / math.sqrt(query.shape[-1]) if scaling is None else float(scaling)
    cap = () if softcap is None else (float(softcap),)
    return attention(query, key, value, attention_mask, scale, *cap).transpose(1, 2), None


def attend_within(window: int | None) -> Callable[..., Any]:
    """`attend` for a model of which some layers see a window: their mask says so (`sliding_mask`). Raises
    UnsupportedModelError for a layer that names another one."""

    def attend_in_window(
        *given: Any, sliding_window: int | None = None, **options: Any
    ) -> tuple[torch.Tensor, None]:
        if sliding_window not in (None, window):
            raise UnsupportedModelError(
                f"{type(given[0]).__name__} sees a window of {sliding_window}, the others one of {window}"
            )
        return attend(*given, **options)

    return attend_in_window


def _rms_forward(self: torch.nn.Module, hidden_states: torch.Tensor) -> torch.Tensor:
    return rms_norm(hidden_states, self.weight, float(self.variance_epsilon))  # type: ignore[arg-type]


def centered_rms_forward(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Forward of RMS norms whose weight is what their scale differs from 1 by (Gemma, Qwen3.5)."""
    return rms_norm(x, 1.0 + self.weight, float(self.eps))


def _gelu_forward(self: torch.nn.Module, input: torch.Tensor) -> torch.Tensor:
    # The same tanh formula as NewGELUActivation, which spells it out in eight operators.
    return torch.nn.functional.gelu(input, approximate="tanh")


def _linear_forward(self: Any, x: torch.Tensor) -> torch.Tensor:
    return x @ self.weight + self.bias  # Conv1D's addmm wants two dimensions, which costs shape arithmetic


def _apply_rotary(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, unsqueeze_dim: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    return rotary(q, cos, sin), rotary(k, cos, sin)


def rotary_angles(module: torch.nn.Module, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(cos, sin) [B, q, D/2] of a rotary module, as the hooked `apply_rotary_pos_emb` takes them.

    transformers writes every angle twice, once for each half of a head; `RotaryEmbedding` wants it once.
    """
    cos, sin = module(torch.zeros(1), positions)
    half = cos.shape[-1] // 2
    return cos[..., :half], sin[..., :half]


@contextlib.contextmanager
def attention_named(attention: Callable[..., Any] = attend) -> Iterator[None]:
    """Lets configurations name `ATTENTION`; what the name stood for before comes back on exit."""
    known = AttentionInterface._global_mapping
    before = known.get(ATTENTION)
    AttentionInterface.register(ATTENTION, attention)
    try:
        yield
    finally:
        if before is None:
            known.pop(ATTENTION, None)
        else:
            known[ATTENTION] = before


@contextlib.contextmanager
def export_hooks(
    *,
    rms_norms: tuple[type, ...] = (),
    rotary_modules: tuple[Any, ...] = (),
    attention: Callable[..., Any] = attend,
) -> Iterator[None]:
    """Registers `attention` (a family may bring its own), and replaces the named RMS-norm classes' `forward` and the
    named modelling modules' `apply_rotary_pos_emb` (which then takes `rotary_angles`); all is restored on exit."""
    with attention_named(attention), contextlib.ExitStack() as stack:
        stack.enter_context(replaced(NewGELUActivation, "forward", _gelu_forward))
        stack.enter_context(replaced(Conv1D, "forward", _linear_forward))
        for norm in rms_norms:
            stack.enter_context(replaced(norm, "forward", _rms_forward))
        for module in rotary_modules:
            stack.enter_context(replaced(module, "apply_rotary_pos_emb", _apply_rotary))
        yield


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Another `owner.name` for a while."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)
