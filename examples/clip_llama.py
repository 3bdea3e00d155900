"""Put CLIP, one linear layer and a LLaMA together (FastVLM, appendix A.1) as a folder that `vlmexport build` takes.

python examples/clip_llama.py --clip clip-vit-large-patch14-336 --llama llama-2-7b --projector projector.safetensors -o clip-llama
vlmexport build --model clip-llama --draft-layer 16 --default-prompt "Describe the image" --max-length 1024 -o bundle

No class of transformers has one linear layer between the two. The folder holds a LlavaForConditionalGeneration whose
projector is (linear, identity): `linear_1` is your layer, `projector_hidden_act` is "linear", `linear_2` the identity. Its
pictures are those of LLaVA: the states of CLIP's patches after `--feature-layer`, in front of the prompt. A chat template
of the LLaMA is left out, for it has no place for pictures; put one that has into the processor's folder.

The projector's file holds `weight` [E of LLaMA, E of CLIP] and perhaps `bias` [E of LLaMA]. Both models are held in
memory in the type they are stored in.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import (
    AddedToken,
    AutoConfig,
    AutoTokenizer,
    CLIPImageProcessorPil,
    CLIPVisionModel,
    LlamaForCausalLM,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
)

IMAGE = "<image>"


def assembled(clip: Path, llama: Path, projector: Path, feature_layer: int) -> tuple[Any, Any]:
    """(model, processor) of the parts. Raises ValueError for parts that do not fit each other."""
    tower = CLIPVisionModel.from_pretrained(clip, dtype="auto")
    language = LlamaForCausalLM.from_pretrained(llama, dtype="auto")
    layer = load_file(projector)
    width, seen = language.config.hidden_size, tower.config.hidden_size
    if "weight" not in layer or tuple(layer["weight"].shape) != (width, seen):
        found = {name: tuple(value.shape) for name, value in layer.items()}
        raise ValueError(
            f"{projector} holds {found}; 'weight' of shape {(width, seen)} is needed: (E of LLaMA, E of CLIP)"
        )
    tokenizer = AutoTokenizer.from_pretrained(llama)
    tokenizer.chat_template = None  # one for text alone has no place for pictures
    tokenizer.add_tokens([AddedToken(IMAGE, normalized=False, special=True)], special_tokens=True)
    if len(tokenizer) > language.config.vocab_size:
        language.resize_token_embeddings(len(tokenizer))
    config = LlavaConfig(
        vision_config=tower.config,
        text_config=language.config,
        image_token_index=tokenizer.convert_tokens_to_ids(IMAGE),
        projector_hidden_act="linear",
        vision_feature_layer=feature_layer,
        vision_feature_select_strategy="default",
        tie_word_embeddings=language.config.tie_word_embeddings,
    )
    with torch.device("meta"):
        model = LlavaForConditionalGeneration(config)
    dtype = language.dtype
    parts = {
        "model.language_model.": language.model.state_dict(),
        "lm_head.": language.lm_head.state_dict(),
        "model.vision_tower.": tower.state_dict(),
        "model.multi_modal_projector.": {
            "linear_1.weight": layer["weight"],
            "linear_1.bias": layer.get("bias", torch.zeros(width)),
            "linear_2.weight": torch.eye(width),
            "linear_2.bias": torch.zeros(width),
        },
    }
    wanted = model.state_dict()
    state = {}
    for prefix, tensors in parts.items():
        for name, value in tensors.items():
            full = prefix + name if prefix + name in wanted else prefix + name.removeprefix("vision_model.")
            state[full] = value.to(dtype).contiguous()
    model.load_state_dict({name: state[name] for name in wanted}, assign=True)
    model.generation_config = language.generation_config
    images = CLIPImageProcessorPil.from_pretrained(clip)
    processor = LlavaProcessor(
        images,
        tokenizer,
        patch_size=tower.config.patch_size,
        num_additional_image_tokens=1,
        vision_feature_select_strategy="default",
    )
    return model, processor


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clip", type=Path, required=True, help="folder of a CLIP (its vision tower)")
    parser.add_argument("--llama", type=Path, required=True, help="folder of a LlamaForCausalLM")
    parser.add_argument("--projector", type=Path, required=True, help="safetensors file of the linear layer")
    parser.add_argument("--feature-layer", type=int, default=-2, help="state of CLIP that is projected")
    parser.add_argument("-o", "--output", type=Path, required=True)
    options = parser.parse_args()
    for folder in (options.clip, options.llama):
        AutoConfig.from_pretrained(folder)  # says at once what is no model
    model, processor = assembled(options.clip, options.llama, options.projector, options.feature_layer)
    model.save_pretrained(options.output, max_shard_size="2GB")
    processor.save_pretrained(options.output)


if __name__ == "__main__":
    try:
        main()
    except (OSError, ValueError) as error:  # one line that names the cause
        sys.exit(str(error).splitlines()[0])
