"""Published configurations at the size of a test: widths, depths and pictures small, ids those of the small tokenizer.

Everything else stays as published: names and places of fields, what is left to the defaults of transformers (but sizes,
which are then given), types, spellings. Checkpoints of one family get one size, so that what is traced of one serves all.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping
from typing import Any

from transformers import AutoConfig

from tests.support.quantized_checkpoints import GROUP

LLAMA = {"hidden_size": 96, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 3}
QWEN3_5 = LLAMA | {
    "num_hidden_layers": 4, "num_key_value_heads": 1, "linear_num_key_heads": 2, "linear_num_value_heads": 2,
    "linear_key_head_dim": 16, "linear_value_head_dim": 24,
}  # fmt: skip
LANGUAGES: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "qwen2_vl", "qwen2_vl_text"), LLAMA),
    **dict.fromkeys(("qwen3_vl", "qwen3_vl_text", "internvl_chat"), LLAMA),
    **dict.fromkeys(("qwen2_5_vl", "qwen2_5_vl_text", "llava_llama", "llava_mistral", "llava"), LLAMA),
    **dict.fromkeys(("qwen3_5", "qwen3_5_text"), QWEN3_5),
    "opt": {
        "hidden_size": 96, "word_embed_proj_dim": 96, "ffn_dim": 128, "num_hidden_layers": 2, "num_attention_heads": 3,
    },
    # The sixth layer sees everything.
    "gemma3_text": LLAMA | {"num_hidden_layers": 6, "num_key_value_heads": 1, "head_dim": 32},
    **dict.fromkeys(("gemma", "gemma2"), LLAMA | {"num_key_value_heads": 1, "head_dim": 32}),
    # The third layer attends.
    "lfm2": LLAMA | {"block_ff_dim": 192, "block_multiple_of": 16, "num_hidden_layers": 3, "num_key_value_heads": 1},
    "gpt2": {"n_embd": 96, "n_layer": 2, "n_head": 3},
    "t5": {"d_model": 96, "d_kv": 64, "d_ff": 128, "num_heads": 3, "num_layers": 2, "num_decoder_layers": 2},
}  # fmt: skip
TOWERS: dict[str, dict[str, Any]] = {
    "clip_vision_model": {
        "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 2, "image_size": 56,
        "patch_size": 14, "projection_dim": 32,
    },
    "siglip_vision_model": {
        "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 3, "image_size": 56,
        "patch_size": 14,
    },
    "siglip2_vision_model": {
        "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 3,
    },
    # ViT and GPT-2 are equally wide, or there would be a projection between them.
    "vit": {
        "hidden_size": 96, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 3, "image_size": 32,
        "patch_size": 16,
    },
    "internvl_vision": {
        "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2,
        "image_size": [56, 56], "patch_size": [14, 14],
    },
    "blip_2_vision_model": {
        "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 28,
        "patch_size": 14,
    },
    "blip_2_qformer": {
        "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2,
        "encoder_hidden_size": 64,
    },
    "qwen2_5_vl": {
        "depth": 3, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 96, "window_size": 56,
        "fullatt_block_indexes": [1],
    },
    # Its 12 patches along a side divide by every published scale factor.
    "smolvlm_vision": {
        "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 48,
        "patch_size": 4,
    },
    "qwen2_vl": {"depth": 2, "embed_dim": 32, "hidden_size": 96, "num_heads": 2},
    "qwen3_vl": {
        "depth": 3, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 96,
        "deepstack_visual_indexes": [0, 1], "num_position_embeddings": 25,
    },
}  # fmt: skip
TOWERS["qwen3_5"] = {**TOWERS["qwen3_vl"], "deepstack_visual_indexes": []}
TOWERS["intern_vit_6b"] = TOWERS["internvl_vision"]
TOWERS |= dict.fromkeys(("idefics3", "idefics3_vision"), TOWERS["smolvlm_vision"])
TOWERS |= {f"{kind}_vision": TOWERS[kind] for kind in ("qwen2_5_vl", "qwen2_vl", "qwen3_vl", "qwen3_5")}
TILES = {"tile_size": 64, "max_tiles": 4, "min_image_tokens": 2, "max_image_tokens": 6}
"""Settings of a processor of pictures of any size that are cut into tiles where they are large."""
NOT_TEXT = ("vision_config", "qformer_config", "encoder")
"""Parts whose ids, if they name any, are of no vocabulary of text."""
_IDS = re.compile(r"(_token_(id|index|ids)|suppress_tokens)$")


def published(config: dict[str, Any]) -> Any:
    """The configuration as transformers understands it, with its defaults; None where it knows no such model."""
    if config.get("model_type") not in transformers_types():
        return None
    return AutoConfig.for_model(**copy.deepcopy(config))


def transformers_types() -> Mapping[str, Any]:
    """Model types that transformers knows."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    return CONFIG_MAPPING_NAMES


def scaled(config: dict[str, Any], size: int, small_size: int, ids: Callable[[int], int]) -> dict[str, Any]:
    """`config.json`, small.

    `size` and `small_size` are the tokens of the tokenizer, as published and here; rows of the embedding beyond them, or
    fewer, stay so. `ids` is `small_ids`.
    """
    whole = published(config)
    found = renumbered(copy.deepcopy(config), ids)
    text = found.get("text_config") or found.get("decoder") or found
    large = None if whole is None else whole.get_text_config(decoder=True)
    kind = text["model_type"] if "model_type" in text else found["model_type"]
    _resize(text, LANGUAGES[kind])
    heads = getattr(large, "num_attention_heads", None) or config.get("num_attention_heads")
    groups = getattr(large, "num_key_value_heads", None) or config.get("num_key_value_heads")
    if LANGUAGES[kind] is LLAMA:
        text["num_key_value_heads"] = 3 if groups in (None, heads) else 1
    if text.get("head_dim") is not None:
        text["head_dim"] = 32
    if "layer_types" in text:
        text["layer_types"] = text["layer_types"][: text.get("num_hidden_layers", 2)]
    for place in ("rope_scaling", "rope_parameters"):
        if "mrope_section" in (text.get(place) or {}):
            text[place]["mrope_section"] = [4, 6, 6]
    rows = getattr(large, "vocab_size", None) or config.get("vocab_size", size)
    beyond = rows - size
    small_rows = small_size + beyond if beyond <= 0 else -(-(small_size + 1) // 32) * 32
    text["vocab_size"] = small_rows
    if found.get("vocab_size") is not None:
        found["vocab_size"] = small_rows
    for place in NOT_TEXT:
        if place in found and found[place] is not None:
            default = getattr(getattr(whole, place, None), "model_type", None)
            _resize(found[place], TOWERS[found[place].get("model_type", default)])
    if "group_size" in (found.get("quantization_config") or {}):
        found["quantization_config"]["group_size"] = GROUP
    if "projection_dim" in found:  # what a tower's rows become
        found["projection_dim"] = text["hidden_size"]
        found |= {"hidden_size": text["hidden_size"]} if "hidden_size" in found else {}
    if "num_query_tokens" in found:
        found["num_query_tokens"] = 4
    if "mm_tokens_per_image" in found:
        found["mm_tokens_per_image"] = 4
    if "image_seq_length" in found:
        found["image_seq_length"] = 4 if "downsample_ratio" in found else 16  # of a tile, or of a picture
    if isinstance(found.get("image_grid_pinpoints"), list):
        found["image_grid_pinpoints"] = _pictures(found["image_grid_pinpoints"], *sides(config))
    return found


def _resize(part: dict[str, Any], sizes: dict[str, Any]) -> None:
    part.update(copy.deepcopy(sizes))


def sides(config: dict[str, Any]) -> tuple[int, int]:
    """The side of the pictures that the tower takes, as published and here; (0, 0) where it takes pictures of any size."""
    part = config.get("vision_config") or config.get("encoder")
    if part is None:
        return 0, 0
    whole = published(config)
    known = getattr(whole, "vision_config", None) or getattr(whole, "encoder", None)
    large = part.get("image_size") or getattr(known, "image_size", None)
    small = TOWERS[getattr(known, "model_type", part.get("model_type"))].get("image_size")
    return (0, 0) if large is None or small is None else (_side(large), _side(small))


def _side(size: int | list[int]) -> int:
    """Of a square that is given by one number or by two."""
    return size if isinstance(size, int) else size[0]


def scaled_processor(settings: dict[str, Any], large: int, small: int) -> dict[str, Any]:
    """A processor's settings with pictures of the `small` side where they had the `large` one (`sides`)."""
    found = copy.deepcopy(settings)
    for name, value in settings.items():
        if isinstance(value, dict) and name.endswith("processor"):
            found[name] = scaled_processor(value, large, small)
        elif name in ("size", "crop_size", "max_image_size", "image_grid_pinpoints"):
            found[name] = _pictures(value, large, small)
        elif name in TILES:
            found[name] = TILES[name]
        elif name in ("num_query_tokens", "image_seq_length") and value is not None:
            found[name] = 4
    return found


def patches_of(config: dict[str, Any]) -> int:
    """Patches of a picture at the size of a test, of a tower of one size."""
    tower = TOWERS[config["vision_config"]["model_type"]]
    return (tower["image_size"] // tower["patch_size"]) ** 2


def tile_rows(config: dict[str, Any]) -> int:
    """Rows of a tile at the size of a test, of a model that puts patches together."""
    tower = TOWERS[config["vision_config"]["model_type"]]
    return (tower["image_size"] // tower["patch_size"] // config["scale_factor"]) ** 2


def _pictures(value: Any, large: int, small: int) -> Any:
    """Whole multiples of `large` become those of `small`."""
    if isinstance(value, dict):
        return {name: _pictures(each, large, small) for name, each in value.items()}
    if isinstance(value, list):
        return [_pictures(each, large, small) for each in value]
    return value // large * small if large and isinstance(value, int) and value % large == 0 else value


def renumbered(value: dict[str, Any], ids: Callable[[int], int]) -> dict[str, Any]:
    """A configuration whose token ids, wherever they stand, are those of the small tokenizer."""
    for name, each in value.items():
        if _IDS.search(name):
            value[name] = _each(each, ids)
        elif isinstance(each, dict) and name not in NOT_TEXT:
            renumbered(each, ids)
    return value


def _each(value: Any, ids: Callable[[int], int]) -> Any:
    if isinstance(value, list):
        return [_each(each, ids) for each in value]
    return ids(value) if isinstance(value, int) and value >= 0 else value


def small_ids(tokens: dict[str, int], core: Any, size: int) -> Callable[[int], int]:
    """A published id → that of the same token in the small tokenizer `core`; one beyond the `size` tokens of the published one
    stays as it is. KeyError for one that the layout does not name."""
    by_id = {number: core.token_to_id(content) for content, number in tokens.items()}
    return lambda number: number if number >= size else by_id[number]
