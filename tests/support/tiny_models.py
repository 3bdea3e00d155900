"""Tiny random checkpoints in the Hugging Face layout, made in a second and the same for the same seed.

The weights are scaled so that greedy output is varied (logit standard deviation of at least 3, at least 20 distinct
tokens in 48): a decoder that repeats one token would hide most errors of caches, masks and positions. Token ids that
end a sequence have a zero row in the head, so that a test decides where a sequence ends. In the Llama checkpoints id 0
is an ordinary token that is often chosen, as in GPT-2 and Qwen.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import (
    AddedToken,
    Blip2Config,
    Blip2ForConditionalGeneration,
    Blip2Processor,
    Blip2QFormerConfig,
    Blip2VisionConfig,
    BlipImageProcessorPil,
    CLIPImageProcessorPil,
    CLIPVisionConfig,
    Gemma3ForCausalLM,
    Gemma3ForConditionalGeneration,
    GenerationConfig,
    GPT2Config,
    GPT2LMHeadModel,
    Idefics3ForConditionalGeneration,
    InternVLForConditionalGeneration,
    Lfm2ForCausalLM,
    Lfm2VlForConditionalGeneration,
    LlamaConfig,
    LlamaForCausalLM,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaNextConfig,
    LlavaNextForConditionalGeneration,
    LlavaNextImageProcessorPil,
    LlavaNextProcessor,
    LlavaProcessor,
    OPTConfig,
    OPTForCausalLM,
    PaliGemmaForConditionalGeneration,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2VLForConditionalGeneration,
    Qwen3_5ForConditionalGeneration,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3VLForConditionalGeneration,
    SmolVLMForConditionalGeneration,
    T5Config,
    T5ForConditionalGeneration,
    T5Tokenizer,
    VisionEncoderDecoderConfig,
    VisionEncoderDecoderModel,
    ViTConfig,
    ViTImageProcessorPil,
)
from transformers.pytorch_utils import Conv1D

from tests.support import tiny_internvl, tiny_qwen3_5, tiny_qwen_vl, tiny_smolvlm

WORDS = (  # noqa: SIM905
    "a an the red green blue yellow cup bowl box ball robot arm table left right of on under behind and is are two three "
    "four small large what where how many describe scene picture please there stands lies next to it you see in this"
).split()
IMAGE_TOKEN = "<image>"
LOGIT_STD = 4.0
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

LLAVA_TEMPLATE = (
    "{% for message in messages %}{{ message['role'].upper() + ': ' }}{% if message['content'] is string %}"
    "{{ message['content'] }}{% else %}"
    "{% for part in message['content'] | selectattr('type', 'equalto', 'image') %}{{ '<image>\n' }}{% endfor %}"
    "{% for part in message['content'] | selectattr('type', 'equalto', 'text') %}{{ part['text'] }}{% endfor %}"
    "{% endif %}{{ ' ' if message['role'] == 'user' else '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)
"""After that of the published LLaVA-1.5: pictures first, whatever their place in the message."""

# --- weights ---


def _normal(weight: torch.Tensor, std: float, generator: torch.Generator) -> None:
    with torch.no_grad():
        weight.normal_(std=std, generator=generator)


def _scale_linears(root: torch.nn.Module, gains: dict[str, float], generator: torch.Generator) -> None:
    """Draws each Linear below `root` with std gain / sqrt(fan in); the gain by the end of its name, else 1."""
    for name, module in root.named_modules():
        if isinstance(module, torch.nn.Linear | Conv1D):
            fan_in = module.in_features if isinstance(module, torch.nn.Linear) else module.nx
            gain = next((gains[end] for end in gains if f".{name}".endswith(f".{end}")), 1.0)
            _normal(module.weight, gain / math.sqrt(fan_in), generator)
            if module.bias is not None:
                _normal(module.bias, 0.1, generator)


def _head(rows: int, width: int, silent: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Head rows [rows, width] whose logits have `LOGIT_STD` after a unit norm; `silent` ids always get logit 0."""
    weight = torch.empty(rows, width)
    _normal(weight, LOGIT_STD / math.sqrt(width), generator)
    weight[list(silent)] = 0.0
    return weight


def _fill_t5(model: T5ForConditionalGeneration, silent: tuple[int, ...], generator: torch.Generator) -> None:
    config = model.config
    # T5 does not divide scores by sqrt(head size): q and k share that factor.
    sharp = 1.6 * config.d_kv**-0.25
    gains = {"q": sharp, "k": sharp, "v": 1.5, "o": 2.0, "wo": 2.5, "lm_head": 0.0}
    _scale_linears(model, gains, generator)
    _normal(model.shared.weight, 0.5, generator)
    stacks: tuple[Any, Any] = (model.encoder, model.decoder)
    for block in stacks[1].block:  # self-attention must outweigh the text, which is the same at every step
        _normal(
            block.layer[0].SelfAttention.o.weight,
            4.0 * block.layer[0].SelfAttention.inner_dim ** -0.5,
            generator,
        )
        _normal(
            block.layer[1].EncDecAttention.o.weight,
            1.0 * block.layer[0].SelfAttention.inner_dim ** -0.5,
            generator,
        )
    for stack in stacks:
        bias = stack.block[0].layer[0].SelfAttention.relative_attention_bias
        _normal(bias.weight, 2.0, generator)
        for norm in stack.modules():
            if type(norm).__name__ == "T5LayerNorm":
                norm.weight.data.normal_(1.0, 0.1, generator=generator)
    head = _head(config.vocab_size, config.d_model, silent, generator)
    model.lm_head.weight = torch.nn.Parameter(head)  # transformers ties the head of every new T5


def fill_llama(
    model: LlamaForCausalLM
    | Qwen2ForCausalLM
    | Qwen3ForCausalLM
    | LlavaForConditionalGeneration
    | LlavaNextForConditionalGeneration
    | Qwen2_5_VLForConditionalGeneration
    | Qwen2VLForConditionalGeneration
    | Qwen3VLForConditionalGeneration,
    silent: tuple[int, ...],
    generator: torch.Generator,
) -> None:
    """A Llama or what is built like one, or the language model of a LLaVA, 1.5 or 1.6, or a Qwen2.5-VL."""
    config = model.config.get_text_config()
    body: Any = next(
        (
            getattr(model.model, name)
            for name in ("language_model", "text_model")
            if hasattr(model.model, name)
        ),
        model.model,
    )
    _scale_linears(
        body, {"q_proj": 1.6, "k_proj": 1.6, "v_proj": 1.5, "o_proj": 2.0, "down_proj": 3.0}, generator
    )
    for norm in body.modules():
        if type(norm).__name__ in (
            "LlamaRMSNorm",
            "Qwen2RMSNorm",
            "Qwen2_5_VLRMSNorm",
            "Qwen3RMSNorm",
            "Qwen2VLRMSNorm",
            "Qwen3VLTextRMSNorm",
        ):
            norm.weight.data.normal_(1.0, 0.1, generator=generator)
        elif type(norm).__name__ == "Qwen3_5RMSNorm":
            norm.weight.data.normal_(0.0, 0.1, generator=generator)  # centered at 0
    head = _head(config.vocab_size, config.hidden_size, silent, generator)
    head[0] *= 1.8  # chosen often: padding with id 0 must then show
    if model.lm_head.weight is body.embed_tokens.weight:
        with torch.no_grad():
            body.embed_tokens.weight.copy_(head)
        # The row of the current token scores itself: without a final norm that turns signs it would repeat for ever.
        signs = torch.randint(0, 2, (config.hidden_size,), generator=generator) * 2.0 - 1.0
        body.norm.weight.data.mul_(signs)
    else:
        _normal(body.embed_tokens.weight, 0.7, generator)
        with torch.no_grad():
            model.lm_head.weight.copy_(head)


def _fill_norms(root: torch.nn.Module, generator: torch.Generator) -> None:
    """Layer norms near one, with a bias that shows when it is left out."""
    for module in root.modules():
        if isinstance(module, torch.nn.LayerNorm) and module.elementwise_affine:
            module.weight.data.normal_(1.0, 0.1, generator=generator)
            module.bias.data.normal_(0.0, 0.1, generator=generator)


def _fill_head(
    model: Any, norm: torch.nn.LayerNorm, silent: tuple[int, ...], generator: torch.Generator
) -> None:
    """Embedding table and head, one table or two. A tied one would repeat the current token for ever; see `fill_llama`."""
    table = model.get_input_embeddings().weight
    rows, width = table.shape
    head = _head(rows, width, silent, generator)
    with torch.no_grad():
        model.lm_head.weight.copy_(head)
    if table is model.lm_head.weight:
        signs = torch.randint(0, 2, (width,), generator=generator) * 2.0 - 1.0
        norm.weight.data.mul_(signs)
    else:
        _normal(table, 0.7, generator)


def _fill_opt(model: OPTForCausalLM, silent: tuple[int, ...], generator: torch.Generator) -> None:
    decoder = model.model.decoder
    gains = {"q_proj": 1.6, "k_proj": 1.6, "v_proj": 1.5, "out_proj": 2.0, "fc2": 3.0}
    _scale_linears(decoder, gains, generator)
    _fill_norms(decoder, generator)
    _normal(decoder.embed_positions.weight, 0.3, generator)
    assert decoder.final_layer_norm is not None
    _fill_head(model, decoder.final_layer_norm, silent, generator)


def _fill_gpt2(model: GPT2LMHeadModel, silent: tuple[int, ...], generator: torch.Generator) -> None:
    decoder = model.transformer
    gains = {"attn.c_attn": 1.6, "attn.c_proj": 3.0, "crossattention.c_proj": 1.0, "mlp.c_proj": 3.0}
    _scale_linears(decoder, gains, generator)
    _fill_norms(decoder, generator)
    _normal(decoder.wpe.weight, 0.3, generator)
    _fill_head(model, decoder.ln_f, silent, generator)


def _fill_vision(model: Blip2ForConditionalGeneration, generator: torch.Generator) -> None:
    config: Any = model.config
    for part in (model.vision_model, model.qformer):
        _scale_linears(part, {}, generator)
    _normal(model.language_projection.weight, config.qformer_config.hidden_size**-0.5, generator)
    _normal(model.query_tokens, 1.0, generator)
    _normal(model.vision_model.embeddings.position_embedding, 0.3, generator)
    _normal(model.vision_model.embeddings.class_embedding, 0.3, generator)
    patches = model.vision_model.embeddings.patch_embedding
    _normal(patches.weight, patches.weight[0].numel() ** -0.5, generator)


def _fill_biases(language: torch.nn.Module, generator: torch.Generator) -> None:
    """Biases of queries, keys and values that show when they are left out."""
    for name, value in language.named_parameters():
        if name.endswith("proj.bias"):
            _normal(value, 0.5, generator)


def _fill_llava(model: Any, silent: tuple[int, ...], generator: torch.Generator) -> None:
    """A LLaVA, 1.5 or 1.6: tower, projector, the row behind every line, language model."""
    tower = model.model.vision_tower
    _scale_linears(tower, {}, generator)
    _scale_linears(model.model.multi_modal_projector, {"linear_1": 1.0, "linear_2": 1.0}, generator)
    _fill_norms(tower, generator)
    _normal(tower.embeddings.class_embedding, 0.3, generator)
    _normal(tower.embeddings.position_embedding.weight, 0.3, generator)
    patches = tower.embeddings.patch_embedding
    _normal(patches.weight, patches.weight[0].numel() ** -0.5, generator)
    if hasattr(model.model, "image_newline"):
        _normal(model.model.image_newline, 1.0, generator)
    fill_llama(model, silent, generator)


def fill_qwen_tower(tower: Any, generator: torch.Generator) -> None:
    _scale_linears(tower, {"qkv": 1.6}, generator)
    patches = tower.patch_embed.proj
    _normal(patches.weight, patches.weight[0].numel() ** -0.5, generator)
    for name, value in tower.named_parameters():
        if ("norm" in name or "ln_q" in name) and name.endswith("weight"):
            value.data.normal_(1.0, 0.1, generator=generator)
    if hasattr(tower, "pos_embed"):
        _normal(patches.bias, 0.1, generator)
        _normal(tower.pos_embed.weight, 0.5, generator)


def _fill_qwen_vl(model: Any, silent: tuple[int, ...], generator: torch.Generator) -> None:
    fill_qwen_tower(model.model.visual, generator)
    _fill_qwen2(model, silent, generator)


def _fill_qwen3_vl(model: Any, silent: tuple[int, ...], generator: torch.Generator) -> None:
    fill_qwen_tower(model.model.visual, generator)
    _fill_qwen3(model, silent, generator)


def _fill_qwen2(model: Any, silent: tuple[int, ...], generator: torch.Generator) -> None:
    fill_llama(model, silent, generator)
    _fill_biases(getattr(model.model, "language_model", model), generator)


def _fill_qwen3(model: Any, silent: tuple[int, ...], generator: torch.Generator) -> None:
    """The norms of queries and keys undo the gains of their projections, so that their weights must make attention sharp."""
    fill_llama(model, silent, generator)
    body = getattr(model.model, "language_model", model.model)
    for layer in body.layers:
        for norm in (layer.self_attn.q_norm, layer.self_attn.k_norm):
            norm.weight.data.mul_(1.6)


def _fill_vit_gpt2(model: Any, silent: tuple[int, ...], generator: torch.Generator) -> None:
    _scale_linears(model.encoder, {}, generator)
    _fill_norms(model.encoder, generator)
    embeddings = model.encoder.embeddings
    _normal(embeddings.position_embeddings, 0.3, generator)
    _normal(embeddings.cls_token, 0.3, generator)
    patches = embeddings.patch_embeddings.projection
    _normal(patches.weight, patches.weight[0].numel() ** -0.5, generator)
    if hasattr(model, "enc_to_dec_proj"):
        _scale_linears(model, {"enc_to_dec_proj": 1.0}, generator)
    _fill_gpt2(model.decoder, silent, generator)


def _fill_blip2(model: Any, silent: tuple[int, ...], generator: torch.Generator) -> None:
    _fill_vision(model, generator)
    fill(model.language_model, silent, generator)


SMOLVLM = (Idefics3ForConditionalGeneration, SmolVLMForConditionalGeneration)
QWEN_VL = (
    Qwen2VLForConditionalGeneration,
    Qwen2_5_VLForConditionalGeneration,
    Qwen3_5ForConditionalGeneration,
    Qwen3VLForConditionalGeneration,
)


def _fill_paligemma(model: Any, silent: tuple[int, ...], generator: torch.Generator) -> None:
    _paligemma().fill_paligemma(model, silent, generator)


def _fill_gemma3(model: Any, silent: tuple[int, ...], generator: torch.Generator) -> None:
    _gemma().fill_gemma3(model, silent, generator)


FILLS: dict[Any, Callable[[Any, tuple[int, ...], torch.Generator], None]] = {
    T5ForConditionalGeneration: _fill_t5,
    OPTForCausalLM: _fill_opt,
    LlamaForCausalLM: fill_llama,
    Qwen2ForCausalLM: _fill_qwen2,
    Qwen3ForCausalLM: _fill_qwen3,
    LlavaForConditionalGeneration: _fill_llava,
    LlavaNextForConditionalGeneration: _fill_llava,
    Qwen2_5_VLForConditionalGeneration: _fill_qwen_vl,
    Qwen2VLForConditionalGeneration: _fill_qwen_vl,
    Qwen3VLForConditionalGeneration: _fill_qwen3_vl,
    Qwen3_5ForConditionalGeneration: lambda *given: tiny_qwen3_5.fill(*given),
    InternVLForConditionalGeneration: lambda *given: tiny_internvl.fill(*given),
    Idefics3ForConditionalGeneration: lambda *drawn: tiny_smolvlm.fill(*drawn),
    SmolVLMForConditionalGeneration: lambda *drawn: tiny_smolvlm.fill(*drawn),
    VisionEncoderDecoderModel: _fill_vit_gpt2,
    Blip2ForConditionalGeneration: _fill_blip2,
    Lfm2ForCausalLM: lambda *drawn: _lfm2().fill(*drawn),
    Lfm2VlForConditionalGeneration: lambda *drawn: _lfm2().fill(*drawn),
    Gemma3ForCausalLM: _fill_gemma3,
    Gemma3ForConditionalGeneration: _fill_gemma3,
    PaliGemmaForConditionalGeneration: _fill_paligemma,
}
"""Class of a model → what draws its weights."""


def fill(model: PreTrainedModel, silent: tuple[int, ...], generator: torch.Generator) -> None:
    """Draws the weights of a model of `FILLS`, whose greedy output then varies; `silent` tokens always get logit 0."""
    FILLS[type(model)](model, silent, generator)


def _paligemma() -> Any:
    """The module of the PaliGemmas, which imports this one."""
    return import_module("tests.support.tiny_paligemma")


def _gemma() -> Any:
    """The module of the Gemmas, which imports this one."""
    return import_module("tests.support.tiny_gemma")


def _lfm2() -> Any:
    """The same of the LFM2."""
    return import_module("tests.support.tiny_lfm2")


# --- tokenizers ---


def t5_tokenizer() -> T5Tokenizer:
    """Unigram: pad 0, end 1, unknown 2, words, characters, then `<image>`."""
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0)]
    pieces += [("▁" + word, -5.0) for word in WORDS]
    singles = ["▁", *map(chr, range(33, 127)), *("▁" + chr(c) for c in range(97, 123))]
    singles += [a + b for a in "bcdfghklmnprstvz" for b in "aeiou"]
    known = {piece for piece, _ in pieces}
    pieces += [(piece, -20.0) for piece in singles if piece not in known]
    tokenizer = T5Tokenizer(vocab=pieces, extra_ids=0, model_max_length=512)
    tokenizer.add_tokens([AddedToken(IMAGE_TOKEN, normalized=False, special=True)], special_tokens=True)
    return tokenizer


def llama_tokenizer(further: Sequence[tuple[str, str]] = ()) -> PreTrainedTokenizerFast:
    """Byte-level BPE: id 0 is `!`, the last two ids are `<|im_start|>` and `<|im_end|>` (the end of a sequence). `further`
    are merges beside those of all."""
    vocabulary = {char: index for index, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    merges = [
        ("Ġ", "t"),
        ("h", "e"),
        ("Ġt", "he"),
        ("r", "e"),
        ("re", "d"),
        ("Ġ", "a"),
        ("i", "n"),
        ("o", "n"),
        *further,
    ]
    for pair in merges:
        vocabulary["".join(pair)] = len(vocabulary)
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="<|im_end|>", bos_token="<|im_start|>"
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def _byte_level(special: list[str]) -> Tokenizer:
    vocabulary = {char: index for index, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    merges = [("Ġ", "t"), ("h", "e"), ("Ġt", "he"), ("Ġ", "a"), ("i", "n"), ("o", "n")]
    for pair in merges:
        vocabulary["".join(pair)] = len(vocabulary)
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(special)
    return core


def opt_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE that starts every text with `</s>`; a line's end ends a text, as in BLIP-2's OPT."""
    core = _byte_level(["</s>", "<pad>", IMAGE_TOKEN])
    start = core.token_to_id("</s>")
    core.post_processor = processors.TemplateProcessing(single="</s> $A", special_tokens=[("</s>", start)])
    return PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token="</s>", eos_token="</s>", pad_token="<pad>"
    )


def gpt2_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE; `<|endoftext|>` starts, ends and pads, as in GPT-2."""
    end = "<|endoftext|>"
    return PreTrainedTokenizerFast(
        tokenizer_object=_byte_level([end]), bos_token=end, eos_token=end, pad_token=end
    )


def token_id(tokenizer: PreTrainedTokenizerFast, token: str) -> int:
    """The id of a token that the tokenizer has."""
    (found,) = token_ids(tokenizer.convert_tokens_to_ids(token))
    return found


def token_ids(*values: object) -> tuple[int, ...]:
    """Ids of a configuration or a tokenizer, where each is one token."""
    found = tuple(value for value in values if isinstance(value, int))
    assert len(found) == len(values), f"not all of {values} are ids"
    return found


# --- models ---


def t5_config(vocab_size: int, **changes: Any) -> T5Config:
    """A T5 1.1 configuration: gated GELU, untied head, relative bias; 2 + 2 layers unless changed."""
    options: dict[str, Any] = {
        "vocab_size": vocab_size, "d_model": 96, "d_kv": 64, "d_ff": 128, "num_heads": 3, "num_layers": 2,
        "num_decoder_layers": 2, "relative_attention_num_buckets": 16, "relative_attention_max_distance": 40,
        "feed_forward_proj": "gated-gelu", "dropout_rate": 0.0, "tie_word_embeddings": False,
        "decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1,
    } | changes  # fmt: skip
    options["decoder_layers"] = options["num_decoder_layers"]  # generate() sizes its cache by this name
    return T5Config(**options)


def t5(seed: int = 5, **changes: Any) -> tuple[T5ForConditionalGeneration, T5Tokenizer]:
    """A text-only T5 and its tokenizer."""
    tokenizer = t5_tokenizer()
    model = T5ForConditionalGeneration(t5_config(len(tokenizer), **changes)).eval()
    fill(model, (0, 1), torch.Generator().manual_seed(seed))
    return model, tokenizer


def llama_config(tokenizer: PreTrainedTokenizerFast, *, tied: bool = False, **changes: Any) -> LlamaConfig:
    """Grouped-query attention (6 query heads on 2), rotary positions; 2 layers unless changed."""
    end = token_id(tokenizer, "<|im_end|>")
    options: dict[str, Any] = {
        "vocab_size": len(tokenizer), "hidden_size": 96, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 512,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0}, "tie_word_embeddings": tied,
        "bos_token_id": end - 1, "eos_token_id": end, "pad_token_id": None,
    } | changes  # fmt: skip
    return LlamaConfig(**options)


def llama(
    seed: int = 6, *, tied: bool = False, **changes: Any
) -> tuple[LlamaForCausalLM, PreTrainedTokenizerFast]:
    """A Llama with grouped-query attention (6 query heads on 2), rotary positions; 2 layers unless changed."""
    tokenizer = llama_tokenizer()
    config = llama_config(tokenizer, tied=tied, **changes)
    model = LlamaForCausalLM(config).eval()
    fill(model, token_ids(config.bos_token_id, config.eos_token_id), torch.Generator().manual_seed(seed))
    return model, tokenizer


def qwen2(seed: int = 20, **changes: Any) -> tuple[Qwen2ForCausalLM, PreTrainedTokenizerFast]:
    """A Qwen2 with grouped-query attention and biases that show when they are left out; tied, as the small ones are."""
    return _qwen(Qwen2ForCausalLM, Qwen2Config, seed, {}, changes)


def qwen3(seed: int = 20, **changes: Any) -> tuple[Qwen3ForCausalLM, PreTrainedTokenizerFast]:
    """A Qwen3 whose heads are not as wide together as its hidden states; tied, as the small ones are."""
    return _qwen(Qwen3ForCausalLM, Qwen3Config, seed, {"head_dim": 64}, changes)


def _qwen(
    kind: Any, config_kind: Any, seed: int, own: dict[str, Any], changes: dict[str, Any]
) -> tuple[Any, PreTrainedTokenizerFast]:
    tokenizer = llama_tokenizer()
    # transformers' Qwen2 tokenizer has this token, asked or not.
    tokenizer.add_special_tokens({"pad_token": "<|endoftext|>"})
    end = token_id(tokenizer, "<|im_end|>")
    options: dict[str, Any] = {
        "vocab_size": len(tokenizer), "hidden_size": 96, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 3, "num_key_value_heads": 1, "max_position_embeddings": 512,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0}, "tie_word_embeddings": True,
        "bos_token_id": None, "eos_token_id": end, "pad_token_id": end + 1,
    } | own | changes  # fmt: skip
    model = kind(config_kind(**options)).eval()
    fill(model, (end - 1, end, end + 1), torch.Generator().manual_seed(seed))
    return model, tokenizer


def llava(seed: int = 19, **options: Any) -> tuple[LlavaForConditionalGeneration, PreTrainedTokenizerFast]:
    """A LLaVA-1.5 of CLIP and Llama (2 layers unless changed)."""
    return _llava(LlavaForConditionalGeneration, LlavaConfig, seed, {}, **options)


LLAVA_CANVASES = ((1, 2), (2, 1), (2, 2), (3, 1), (1, 3))
"""Rows and columns of tiles that the published LLaVA-1.6 knows, in its order."""


def llava_next(
    seed: int = 23, *, image_side: int = 32, canvases: Any = LLAVA_CANVASES, **options: Any
) -> tuple[LlavaNextForConditionalGeneration, PreTrainedTokenizerFast]:
    """A LLaVA-1.6 (LLaVA-NeXT) of CLIP and Llama (2 layers unless changed); a tile has 2 × 2 rows unless changed."""
    pinpoints = [[down * image_side, across * image_side] for down, across in canvases]
    kind, own = LlavaNextForConditionalGeneration, {"image_grid_pinpoints": pinpoints}
    return _llava(kind, LlavaNextConfig, seed, own, image_side=image_side, **options)


def _llava(
    kind: Any, config_kind: Any, seed: int, own: dict[str, Any], *, image_side: int = 32, patch_size: int = 16,
    vision_layers: int = 3, vision_width: int = 64, strategy: str = "default", feature_layer: int = -2,
    activation: str = "gelu", tied: bool = False, **text_changes: Any,
) -> tuple[Any, PreTrainedTokenizerFast]:  # fmt: skip
    core = llama_tokenizer()
    core.add_tokens([AddedToken(IMAGE_TOKEN, normalized=False, special=True)], special_tokens=True)
    core.chat_template = None  # it is the processor's
    text = llama_config(core, tied=tied, **text_changes)
    vision = CLIPVisionConfig(
        hidden_size=vision_width, intermediate_size=2 * vision_width, num_hidden_layers=vision_layers,
        num_attention_heads=2, image_size=image_side, patch_size=patch_size, projection_dim=32,
    )  # fmt: skip
    config = config_kind(
        vision_config=vision, text_config=text, image_token_index=len(core) - 1,
        vision_feature_layer=feature_layer, vision_feature_select_strategy=strategy,
        projector_hidden_act=activation, tie_word_embeddings=tied, **own,
    )  # fmt: skip
    model = kind(config).eval()
    silent = token_ids(text.bos_token_id, text.eos_token_id, len(core) - 1)
    fill(model, silent, torch.Generator().manual_seed(seed))
    return model, core


def opt_config(tokenizer: PreTrainedTokenizerFast, *, tied: bool = True, **changes: Any) -> OPTConfig:
    """An OPT as in BLIP-2: pre-norm, biases, tied; 2 layers unless changed."""
    options: dict[str, Any] = {
        "vocab_size": len(tokenizer), "hidden_size": 96, "word_embed_proj_dim": 96, "ffn_dim": 128,
        "num_hidden_layers": 2, "num_attention_heads": 3, "max_position_embeddings": 512, "dropout": 0.0,
        "activation_function": "relu", "tie_word_embeddings": tied,
        "bos_token_id": tokenizer.bos_token_id, "pad_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.convert_tokens_to_ids("Ċ"),
    } | changes  # fmt: skip
    return OPTConfig(**options)


def _blip2(
    text: Any, tokenizer: Any, image_side: int, queries: int, vision_layers: int, qformer_layers: int,
    vision_width: int, qformer_width: int,
) -> Blip2ForConditionalGeneration:  # fmt: skip
    config = Blip2Config(
        vision_config=Blip2VisionConfig(
            hidden_size=vision_width, intermediate_size=2 * vision_width, num_hidden_layers=vision_layers,
            num_attention_heads=2, image_size=image_side, patch_size=8,
        ),
        qformer_config=Blip2QFormerConfig(
            vocab_size=len(tokenizer), hidden_size=qformer_width, num_hidden_layers=qformer_layers,
            num_attention_heads=2, intermediate_size=2 * qformer_width, hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0, cross_attention_frequency=2, encoder_hidden_size=vision_width,
            max_position_embeddings=64,
        ),
        text_config=text,
        num_query_tokens=queries, image_text_hidden_size=32,
        image_token_index=tokenizer.convert_tokens_to_ids(IMAGE_TOKEN),
    )  # fmt: skip
    return Blip2ForConditionalGeneration(config).eval()


def blip2_t5(
    seed: int = 7, *, image_side: int = 32, queries: int = 4, vision_layers: int = 2, qformer_layers: int = 2,
    vision_width: int = 64, qformer_width: int = 48, **text_changes: Any,
) -> tuple[Blip2ForConditionalGeneration, T5Tokenizer]:  # fmt: skip
    """A BLIP-2 whose language model is a T5 (2 + 2 layers unless changed)."""
    tokenizer = t5_tokenizer()
    model = _blip2(
        t5_config(len(tokenizer), **text_changes), tokenizer, image_side, queries, vision_layers, qformer_layers,
        vision_width, qformer_width,
    )  # fmt: skip
    fill(model, (0, 1), torch.Generator().manual_seed(seed))
    return model, tokenizer


def blip2_opt(
    seed: int = 15, *, image_side: int = 32, queries: int = 4, vision_layers: int = 2, qformer_layers: int = 2,
    vision_width: int = 64, qformer_width: int = 48, **text_changes: Any,
) -> tuple[Blip2ForConditionalGeneration, PreTrainedTokenizerFast]:  # fmt: skip
    """A BLIP-2 whose language model is an OPT (2 layers, tied, unless changed)."""
    tokenizer = opt_tokenizer()
    text = opt_config(tokenizer, **text_changes)
    model = _blip2(
        text, tokenizer, image_side, queries, vision_layers, qformer_layers, vision_width, qformer_width
    )
    silent = token_ids(
        text.eos_token_id, text.bos_token_id, text.pad_token_id, model.config.image_token_index
    )
    fill(model, silent, torch.Generator().manual_seed(seed))
    return model, tokenizer


def vit_gpt2(
    seed: int = 17, *, image_side: int = 32, vision_layers: int = 2, vision_width: int = 64, tied: bool = True,
    **text_changes: Any,
) -> tuple[VisionEncoderDecoderModel, PreTrainedTokenizerFast]:  # fmt: skip
    """A captioner of ViT and GPT-2 (2 + 2 layers unless changed); widths differ unless `vision_width` is 96."""
    tokenizer = gpt2_tokenizer()
    end = tokenizer.eos_token_id
    options: dict[str, Any] = {
        "vocab_size": len(tokenizer), "n_embd": 96, "n_layer": 2, "n_head": 3, "n_positions": 512,
        "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": end, "eos_token_id": end,
        "tie_word_embeddings": tied,
    } | text_changes  # fmt: skip
    vision = ViTConfig(
        hidden_size=vision_width, intermediate_size=2 * vision_width, num_hidden_layers=vision_layers,
        num_attention_heads=2, image_size=image_side, patch_size=8,
    )  # fmt: skip
    config = VisionEncoderDecoderConfig.from_encoder_decoder_configs(
        vision, GPT2Config(**options), decoder_start_token_id=end, eos_token_id=end, pad_token_id=end
    )
    model = VisionEncoderDecoderModel(config).eval()
    fill(model, token_ids(end), torch.Generator().manual_seed(seed))
    return model, tokenizer


# --- folders ---


def save(
    model: PreTrainedModel, tokenizer: Any, folder: Path | str, *, dtype: torch.dtype = torch.float32,
    max_shard_size: str | int = "5GB", image_side: int | None = None,
) -> Path:  # fmt: skip
    """Writes the checkpoint as `save_pretrained` does, tokenizer and (BLIP-2) processor included."""
    folder = Path(folder)
    copied: Any = copy.deepcopy(model)
    model = copied.to(dtype)
    generation: dict[str, Any] = {"max_new_tokens": 48}
    config = model.config
    text = getattr(config, "text_config", config)
    for name in ("decoder_start_token_id", "bos_token_id", "eos_token_id", "pad_token_id"):
        value = getattr(text, name, None)
        if value is not None:
            generation[name] = value
    model.generation_config = GenerationConfig(**generation)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    if isinstance(model, Blip2ForConditionalGeneration):
        side = image_side or config.vision_config.image_size
        images = BlipImageProcessorPil(
            size={"height": side, "width": side},
            image_mean=[0.48145466, 0.4578275, 0.40821073],
            image_std=[0.26862954, 0.26130258, 0.27577711],
        )
        Blip2Processor(images, tokenizer, num_query_tokens=config.num_query_tokens).save_pretrained(folder)
    elif isinstance(model, LlavaForConditionalGeneration | LlavaNextForConditionalGeneration):
        side, vision = config.vision_config.image_size, config.vision_config
        sizes = {"size": {"shortest_edge": side}, "crop_size": {"height": side, "width": side}}
        if isinstance(model, LlavaForConditionalGeneration):
            kind, images = LlavaProcessor, CLIPImageProcessorPil(**sizes)
        else:
            canvases = config.image_grid_pinpoints
            kind = LlavaNextProcessor
            images = LlavaNextImageProcessorPil(image_grid_pinpoints=canvases, **sizes)
        kind(
            images, tokenizer, patch_size=vision.patch_size, num_additional_image_tokens=1,
            vision_feature_select_strategy=config.vision_feature_select_strategy, chat_template=LLAVA_TEMPLATE,
        ).save_pretrained(folder)  # fmt: skip
    elif isinstance(model, InternVLForConditionalGeneration):
        tiny_internvl.save_processors(model, folder)
        tokenizer.save_pretrained(folder)
        tiny_internvl.name_marks(folder)
    elif isinstance(model, QWEN_VL):
        tiny_qwen_vl.save_processors(model, folder)
        tokenizer.save_pretrained(folder)
    elif isinstance(model, SMOLVLM):
        tiny_smolvlm.save_processor(model, tokenizer, folder)
    elif isinstance(model, VisionEncoderDecoderModel):
        side = config.encoder.image_size
        ViTImageProcessorPil(
            size={"height": side, "width": side}, image_mean=[0.5] * 3, image_std=[0.5] * 3
        ).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    elif isinstance(model, Lfm2VlForConditionalGeneration):
        _lfm2().save_processor(model, tokenizer, folder)
    elif isinstance(model, Gemma3ForConditionalGeneration):
        _gemma().save_processor(model, tokenizer, folder)
    elif isinstance(model, PaliGemmaForConditionalGeneration):
        _paligemma().save_processor(model, tokenizer, folder)
    else:
        tokenizer.save_pretrained(folder)
    _untie_t5(folder)
    return folder


def _untie_t5(folder: Path) -> None:
    """T5Config always writes `tie_word_embeddings: true`; checkpoints of T5 1.1 and FlanT5 say false."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    part = config.get("text_config", config)
    if part.get("model_type") == "t5":
        part["tie_word_embeddings"] = False
        path.write_text(json.dumps(config, indent=2) + "\n")


BUILDERS = {
    "t5": t5,
    "blip2-t5": blip2_t5,
    "blip2-opt": blip2_opt,
    "vit-gpt2": vit_gpt2,
    "gemma3": lambda **options: _gemma().gemma3(**options),
    "gemma3-text": lambda **options: _gemma().gemma3_text(**options),
    "lfm2": lambda **options: _lfm2().lfm2(**options),
    "lfm2-vl": lambda **options: _lfm2().lfm2_vl(**options),
    "llava": llava,
    "paligemma": lambda **options: _paligemma().paligemma(**{"language": "gemma", **options}),
    "paligemma2": lambda **options: _paligemma().paligemma(**options),
    "llava-next": llava_next,
    "qwen2": qwen2,
    "qwen3": qwen3,
    "internvl": lambda **options: tiny_internvl.internvl(**options),
    "qwen2-vl": lambda **options: tiny_qwen_vl.qwen2_vl(**options),
    "qwen2.5-vl": lambda **options: tiny_qwen_vl.qwen2_5_vl(**options),
    "qwen3-vl": lambda **options: tiny_qwen_vl.qwen3_vl(**options),
    "qwen3.5": lambda **options: tiny_qwen3_5.qwen3_5(**options),
    "smolvlm": lambda **options: tiny_smolvlm.smolvlm(**options),
    "idefics3": lambda **options: tiny_smolvlm.smolvlm(kind="idefics3", **options),
    "llama": llama,
    "llama-tied": lambda **options: llama(tied=True, **options),
}
"""Name of a tiny checkpoint → builder of (model, tokenizer)."""


def checkpoint(name: str, folder: Path | str, *, dtype: torch.dtype = torch.float32,
               max_shard_size: str | int = "5GB", **options: Any) -> Path:  # fmt: skip
    """Builds the checkpoint `name` of `BUILDERS` and saves it in `folder`."""
    model, tokenizer = BUILDERS[name](**options)
    return save(model, tokenizer, folder, dtype=dtype, max_shard_size=max_shard_size)
