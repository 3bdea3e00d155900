"""Fifty requests to a Qwen2, a Qwen3 and each family that reads several pictures, over changed configurations, against
transformers.

Heads, groups, biases, ties, feature layers, grids and windows change; requests have up to four pictures of odd sizes and
videos of 2 to 16 frames, in any order, and are served plainly and with drafts, untrained ones among them. Tokens are
compared, and the logits of every kind of pass. The fast tests take one configuration.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from vlmexport.exporter.checkpoint import open_checkpoint
from vlmexport.exporter.families.common.reference import collate
from vlmexport.exporter.families.registry import family_for
from vlmexport.exporter.parity.reference import load_reference
from vlmexport.runtime import Session, Video
from vlmexport.runtime.families import get_family
from vlmexport.runtime.images.synthetic import synthetic_image
from vlmexport.runtime.images.video import sampled

from tests.support.own_generation import difference
from tests.support.pass_logits import PassLogits
from tests.support.qwen_inputs import model_inputs
from tests.support.tiny_models import WORDS

EACH, TOKENS = 10, 10
TOLERANCE = 2e-5
"""Of logits, as a part of the largest: that of the contract suite (tests/support/rig.py)."""
FULL, SLIDING, CONV = "full_attention", "sliding_attention", "conv"
CONFIGURATIONS: dict[str, list[dict[str, Any]]] = {
    "gemma3": [
        {},
        {"num_attention_heads": 4, "num_key_value_heads": 2, "tied": False, "sliding_window": 16, "rows": 4},
        {
            "num_hidden_layers": 3,
            "layer_types": [FULL, SLIDING, SLIDING],
            "image_side": 48,
            "patch_size": 8,
            "rows": 9,
        },
        {
            "attention_bias": True,
            "num_attention_heads": 6,
            "head_dim": 16,
            "query_pre_attn_scalar": 32,
            "sliding_window": 5,
        },
        {
            "num_hidden_layers": 4,
            "vision_layers": 2,
            "rows": 64,
            "sliding_window": 16,
            "num_key_value_heads": 3,
        },
    ],
    "gemma3-text": [
        {"sliding_window": 16},
        {
            "num_hidden_layers": 3,
            "layer_types": [SLIDING] * 3,
            "rope_parameters": {SLIDING: {"rope_type": "default", "rope_theta": 1e4}},
        },
    ],
    "internvl": [
        {},
        {
            "language": "qwen3",
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "tied": True,
        },
        {"language": "llama", "feature_layer": -2, "max_patches": 5, "image_side": 48},
        {"vision": {"use_qk_norm": True, "norm_type": "rms_norm", "attention_bias": True}, "max_patches": 1},
        {
            "language": "qwen3",
            "downsample_ratio": 0.25,
            "vision": {"use_mean_pooling": False},
            "num_hidden_layers": 3,
        },
    ],
    "lfm2": [
        {},
        {
            "num_hidden_layers": 4,
            "layer_types": [FULL, CONV, CONV, FULL],
            "conv_L_cache": 4,
            "conv_bias": True,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "tie_word_embeddings": False,
        },
        {"num_hidden_layers": 3, "layer_types": [CONV, CONV, FULL], "conv_L_cache": 2},
    ],
    "lfm2-vl": [
        {},
        {
            "num_hidden_layers": 3,
            "layer_types": [CONV, FULL, CONV],
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "tied": False,
            "table_side": 4,
        },
        {
            "num_hidden_layers": 4,
            "layer_types": [CONV, CONV, FULL, CONV],
            "conv_L_cache": 4,
            "conv_bias": True,
            "normed": False,
            "image": {"use_thumbnail": False, "max_tiles": 6, "min_image_tokens": 1, "max_image_tokens": 9},
        },
        {
            "num_hidden_layers": 3,
            "layer_types": [FULL, CONV, CONV],
            "image": {"do_image_splitting": False, "max_image_tokens": 30},
            "table_side": 2,
        },
        {
            "vision_layers": 3,
            "vision_width": 96,
            "image": {"encoder_patch_size": 4, "downsample_factor": 3, "tile_size": 24, "max_tiles": 3},
            "table_side": 5,
        },
    ],
    "llava": [
        {},
        {"num_attention_heads": 6, "num_key_value_heads": 2, "tied": True, "feature_layer": -1},
        {"num_attention_heads": 4, "num_key_value_heads": 4, "feature_layer": 1, "strategy": "full"},
        {"attention_bias": True, "activation": "linear", "image_side": 48, "patch_size": 8},
        {"num_hidden_layers": 3, "vision_layers": 4, "feature_layer": -3, "image_side": 24, "patch_size": 8},
    ],
    "llava-next": [
        {},
        {"num_attention_heads": 6, "num_key_value_heads": 2, "tied": True, "canvases": ((1, 1), (2, 2))},
        {"image_side": 24, "patch_size": 8, "feature_layer": 1, "canvases": ((1, 3), (3, 1), (2, 2))},
        {"attention_bias": True, "activation": "linear", "canvases": ((1, 2),)},
        {"num_hidden_layers": 3, "vision_layers": 4, "feature_layer": -3, "num_key_value_heads": 1},
    ],
    "paligemma2": [
        {},
        {"num_attention_heads": 4, "num_key_value_heads": 2, "tied": False, "sliding_window": 100},
        {
            "num_hidden_layers": 3,
            "layer_types": [FULL, SLIDING, SLIDING],
            "image_side": 24,
            "patch_size": 8,
            "attn_logit_softcapping": 0.8,
            "final_logit_softcapping": None,
        },
        {
            "attention_bias": True,
            "num_attention_heads": 6,
            "head_dim": 16,
            "query_pre_attn_scalar": 32,
            "sliding_window": 5,
            "attn_logit_softcapping": None,
        },
        {"num_hidden_layers": 4, "vision_layers": 2, "image_side": 28, "num_key_value_heads": 3},
    ],
    "paligemma": [
        {},
        {"num_attention_heads": 4, "num_key_value_heads": 2, "tied": False, "attention_bias": True},
    ],
    "qwen2": [
        {},
        {"num_attention_heads": 6, "num_key_value_heads": 2, "tie_word_embeddings": False},
        {"num_attention_heads": 4, "num_key_value_heads": 4},
        {"num_hidden_layers": 3, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
        {"hidden_size": 128, "num_attention_heads": 8, "num_key_value_heads": 2, "intermediate_size": 96},
        {
            "num_hidden_layers": 3,
            "use_sliding_window": True,
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
        {
            "num_hidden_layers": 4,
            "use_sliding_window": True,
            "sliding_window": 16,
            "max_window_layers": 2,
        },
    ],
    "qwen3": [
        {},
        {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 32, "tie_word_embeddings": False},
        {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 16},
        {
            "num_hidden_layers": 3,
            "attention_bias": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        },
        {
            "hidden_size": 128,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "head_dim": 24,
            "intermediate_size": 96,
        },
    ],
    "qwen2-vl": [
        {},
        {"num_attention_heads": 6, "num_key_value_heads": 2, "tied": True, "sections": (2, 4, 2)},
        {"vision_layers": 3, "num_key_value_heads": 3, "sections": (8, 4, 4)},
        {"vision_width": 64, "mlp_ratio": 3},
        {"num_hidden_layers": 3, "vision_layers": 1, "intermediate_size": 96},
    ],
    "qwen3-vl": [
        {},
        {
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "tied": True,
            "deep": (2,),
            "sections": (8, 4, 4),
        },
        {"deep": (0, 1, 2), "num_hidden_layers": 4, "num_key_value_heads": 3, "table_side": 7},
        {"deep": (), "head_dim": 16, "sections": (4, 2, 2)},
        {
            "num_hidden_layers": 3,
            "vision_layers": 4,
            "deep": (1, 3),
            "vision_width": 64,
            "attention_bias": True,
        },
    ],
    "qwen3.5": [
        {},
        {
            "layer_types": ("linear_attention",) * 3 + ("full_attention",),
            "tied": True,
            "linear_num_key_heads": 1,
        },
        {
            "layer_types": ("full_attention", "linear_attention"),
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
        },
        {"linear_conv_kernel_dim": 6, "linear_key_head_dim": 24, "linear_value_head_dim": 8, "head_dim": 64},
        {"vision_layers": 3, "table_side": 7, "linear_num_value_heads": 2, "sections": (1, 1, 2)},
    ],
    "qwen2.5-vl": [
        {},
        {"num_attention_heads": 6, "num_key_value_heads": 2, "tied": True, "sections": (2, 4, 2)},
        {"window_size": 112, "full": (0, 2), "num_key_value_heads": 3, "sections": (8, 4, 4)},
        {"window_size": 28, "full": (), "vision_layers": 2},
        {"num_hidden_layers": 3, "vision_layers": 4, "full": (1, 3), "vision_width": 64},
    ],
    "smolvlm": [
        {},
        {"num_attention_heads": 4, "num_key_value_heads": 4, "tied": True, "longest": 32},
        {"image_side": 24, "scale_factor": 3, "longest": 72, "attention_bias": True},
        {"kind": "idefics3", "image_side": 48, "scale_factor": 3, "longest": 96, "num_key_value_heads": 3},
        {
            "num_hidden_layers": 3,
            "vision_layers": 3,
            "image_side": 28,
            "patch_size": 14,
            "scale_factor": 1,
            "longest": 41,
        },
        {"split": False, "longest": 90, "num_key_value_heads": 1, "vision_width": 48},
    ],
}
SLOW = ("gemma3-text", "lfm2", "paligemma")
"""In `make test-all` alone: other configurations have the same layers."""
CASES = [(name, number) for name, found in CONFIGURATIONS.items() for number in range(len(found))]


@pytest.mark.parametrize(
    ("name", "number"),
    [
        pytest.param(*case, marks=() if case[1] == 1 and case[0] not in SLOW else pytest.mark.slow)
        for case in CASES
    ],
    ids=lambda value: str(value),
)
def test_requests_are_answered_as_transformers_does(
    tiny_bundle: Callable[..., tuple[Path, Path]], name: str, number: int
) -> None:
    bundle, folder = tiny_bundle(name, drafts=True, **CONFIGURATIONS[name][number])
    checkpoint = open_checkpoint(folder)
    family, model = family_for(checkpoint), load_reference(checkpoint, streamed=False)
    draw, passes = random.Random(f"{name} {number}"), PassLogits(bundle, model)
    with Session.load(bundle) as session:
        for index in range(EACH):
            films = 1 if family.video_token_id is not None and index % 3 == 2 else 0
            many = 0 if family.vision is None else index % 2 if films else index % 5
            many = many or int(family.needs_picture)
            pictures = [picture(draw) for _ in range(many)]
            videos = [film(draw) for _ in range(films)]
            talks = session.bundle.manifest.text.chat_template is not None
            prompt = conversation(draw, len(pictures), films) if talks else question(draw, len(pictures))
            if family.vision is None and not isinstance(prompt, str):  # such templates take strings
                prompt = [{**turn, "content": turn["content"][0]["text"]} for turn in prompt]
            media = [*pictures, *(Video(*video) for video in videos)]
            prepared = get_family(family.name).prepare(session.bundle, media or None, prompt)
            if videos and name == "qwen2.5-vl":  # what the exporter's own reference did not make
                ids = prepared.token_ids.tolist()
                info = session.bundle.manifest.image.video  # type: ignore[union-attr]
                inputs = model_inputs(folder, info, ids, [seen(*video) for video in videos], pictures)
            else:
                inputs = collate(family, [family.reference_prompt(media or None, prompt)], left=True)
            draft = draw.choice(["none", *(each.name for each in session.bundle.manifest.drafts)])
            options = {"draft_length": draw.randint(1, 6)} if draft != "none" else {}
            found = session.generate(
                images=pictures or None, video=[Video(*video) for video in videos] or None, prompt=prompt,
                max_new_tokens=TOKENS, draft=draft, **options,
            )  # fmt: skip
            assert len(found.tokens) == TOKENS or found.finish_reason == "eos"
            assert difference(model, inputs, found.tokens, TOKENS) is None, (index, prompt, draft)
            far = passes.differences(prepared, inputs, draw)
            assert max(far.values()) <= TOLERANCE, (index, prompt, far)


def picture(draw: random.Random) -> Image.Image:
    """Of an odd size, wide or tall."""
    return Image.fromarray(scene(draw, draw.randint(29, 150), draw.randint(29, 150)))


def scene(draw: random.Random, height: int, width: int) -> np.ndarray:
    """Blocks of colour in another place, and other colours, every time."""
    turned = np.roll(synthetic_image(height, width), (draw.randrange(height), draw.randrange(width)), (0, 1))
    return turned[..., draw.sample(range(3), 3)]


def film(draw: random.Random) -> tuple[list[Image.Image], float]:
    """Frames, and how many there are a second."""
    whole = scene(draw, draw.randint(40, 90), draw.randint(40, 90))
    frames = [Image.fromarray(np.roll(whole, 5 * at, axis=1)) for at in range(draw.randint(2, 16))]
    return frames, draw.choice([1.0, 2.0, 5.0, 12.5])


def seen(frames: list[Image.Image], fps: float) -> tuple[list[Image.Image], float]:
    """The frames that the model's sampling chooses (2 a second, at least 4), and their rate."""
    chosen = sampled(len(frames), fps, 2.0, 4, 768, 2)
    return [frames[at] for at in chosen], len(chosen) / len(frames) * fps


def question(draw: random.Random, pictures: int) -> str:
    """Words, in half of all cases with the pictures anywhere among them."""
    words = draw.choices(WORDS, k=draw.randint(0, 6))
    for _ in range(pictures if draw.random() < 0.5 else 0):
        words.insert(draw.randint(0, len(words)), "<image>")
    return draw.choice(["", " ", "\n"]).join(words)


def conversation(draw: random.Random, pictures: int, films: int) -> str | list[dict[str, Any]]:
    """A question, or turns with the media anywhere among words."""

    def words() -> str:
        return " ".join(draw.choices(WORDS, k=draw.randint(1, 5)))

    if not films and draw.random() < 0.3:
        return words()
    parts: list[dict[str, Any]] = [{"type": "image"}] * pictures + [{"type": "video"}] * films
    parts += [{"type": "text", "text": words()} for _ in range(draw.randint(1, 3))]
    draw.shuffle(parts)
    if len(parts) < 3 or draw.random() < 0.5:
        return [{"role": "user", "content": parts}]
    cut = draw.randint(1, len(parts) - 1)
    answer = {"role": "assistant", "content": [{"type": "text", "text": words()}]}
    return [{"role": "user", "content": parts[:cut]}, answer, {"role": "user", "content": parts[cut:]}]
