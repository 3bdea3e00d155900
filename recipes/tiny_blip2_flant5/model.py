"""Architecture of ``tiny-blip2-flant5``: the classes of the real family at 4 million parameters."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from transformers import (
    Blip2Config,
    Blip2ForConditionalGeneration,
    Blip2Processor,
    Blip2QFormerConfig,
    Blip2VisionConfig,
    BlipImageProcessorPil,
    PreTrainedTokenizerBase,
    T5Config,
)

from ..common.folder import half_in
from .tokenizer import IMAGE_TOKEN

SIDE = 96  # pixels
PATCH = 12
QUERIES = 8
WIDTH = 128
DECODER_LAYERS = 12
FROZEN = ("vision_model.", "qformer.", "query_tokens")
"""Names of the vision side begin with one of these; the language model is trained with it frozen."""
MEAN = (0.48145466, 0.4578275, 0.40821073)
STD = (0.26862954, 0.26130258, 0.27577711)


def build_config(tokenizer: PreTrainedTokenizerBase) -> Blip2Config:
    """The model's configuration for a tokenizer."""
    vision = Blip2VisionConfig(
        hidden_size=WIDTH,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        image_size=SIDE,
        patch_size=PATCH,
        initializer_range=0.02,
    )
    qformer = Blip2QFormerConfig(
        vocab_size=len(tokenizer),
        hidden_size=WIDTH,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=256,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        cross_attention_frequency=1,
        encoder_hidden_size=WIDTH,
        max_position_embeddings=64,
    )
    text = T5Config(
        vocab_size=len(tokenizer),
        d_model=WIDTH,
        d_kv=32,
        d_ff=256,
        num_layers=2,
        num_decoder_layers=DECODER_LAYERS,
        num_heads=4,
        relative_attention_num_buckets=32,
        relative_attention_max_distance=128,
        dropout_rate=0.0,
        feed_forward_proj="gated-gelu",
        tie_word_embeddings=False,  # pyright: ignore[reportCallIssue]
        decoder_layers=DECODER_LAYERS,  # generate() sizes its cache by this, else by num_layers  # pyright: ignore[reportCallIssue]
        decoder_start_token_id=0,  # pyright: ignore[reportCallIssue]
        pad_token_id=0,
        eos_token_id=1,
    )
    return Blip2Config(
        vision_config=vision,
        qformer_config=qformer,
        text_config=text,
        num_query_tokens=QUERIES,
        image_text_hidden_size=32,
        image_token_index=tokenizer.convert_tokens_to_ids(IMAGE_TOKEN),  # pyright: ignore[reportArgumentType]
    )


def build_model(tokenizer: PreTrainedTokenizerBase, seed: int = 0) -> Blip2ForConditionalGeneration:
    """A freshly initialised model, fp32, the same for the same seed."""
    torch.manual_seed(seed)
    model = Blip2ForConditionalGeneration(build_config(tokenizer))
    with torch.no_grad():
        torch.nn.init.normal_(model.query_tokens, std=1.0)
        torch.nn.init.normal_(model.vision_model.embeddings.position_embedding, std=0.1)
        torch.nn.init.normal_(model.vision_model.embeddings.class_embedding, std=0.1)
        torch.nn.init.normal_(model.language_projection.weight, std=WIDTH**-0.5)
        # transformers 5 ties the head of every new T5; FlanT5 has its own, which loading keeps.
        head = torch.empty_like(model.language_model.lm_head.weight).normal_(std=0.5 * WIDTH**-0.5)
        model.language_model.lm_head.weight = torch.nn.Parameter(head)
    return model


def build_processor(tokenizer: PreTrainedTokenizerBase) -> Blip2Processor:
    """The model's processor: bicubic resize to the input size, CLIP's mean and deviation."""
    images = BlipImageProcessorPil(
        size={"height": SIDE, "width": SIDE}, image_mean=list(MEAN), image_std=list(STD)
    )
    return Blip2Processor(images, tokenizer, num_query_tokens=QUERIES)


def save_bundle(
    model: Blip2ForConditionalGeneration,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    max_new_tokens: int = 96,
) -> None:
    """Writes the Hugging Face folder with fp16 weights; every file is replaced atomically.

    `max_new_tokens`: what ``generation_config.json`` allows an answer.
    """
    with half_in(
        folder, model, decoder_start_token_id=0, eos_token_id=1, pad_token_id=0, max_new_tokens=max_new_tokens
    ) as scratch:
        build_processor(tokenizer).save_pretrained(scratch)
        config = json.loads((scratch / "config.json").read_text())
        config["text_config"]["tie_word_embeddings"] = (
            False  # as FlanT5's own file says; the class would write true
        )
        (scratch / "config.json").write_text(json.dumps(config, indent=2) + "\n")
