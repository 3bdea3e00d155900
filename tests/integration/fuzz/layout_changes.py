"""What happens to published folders on their way to a user: files missing, doubled, older, contradictory.

Each change is a function of a folder and a `random.Random`. Files may be links to those of a whole folder: what changes is
written anew.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

Change = Callable[[Path, random.Random], None]

TEMPLATE = (
    "{{% for message in messages %}}{{{{ '{mark}' }}}}{{% if message['content'] is string %}}{{{{ message['content'] }}}}"
    "{{% else %}}{{% for part in message['content'] %}}{{% if part['type'] == 'image' %}}{image}{{% else %}}"
    "{{{{ part['text'] }}}}{{% endif %}}{{% endfor %}}{{% endif %}}{{% endfor %}}"
)
"""Another chat template, by the mark before each turn."""


def write(path: Path, data: bytes | str) -> None:
    """A file with this content, whatever was there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    path.write_bytes(data.encode() if isinstance(data, str) else data)


def read(path: Path) -> dict[str, Any]:
    """A JSON object; {} where there is none."""
    return json.loads(path.read_text("utf-8-sig")) if path.is_file() else {}


def edited(name: str, change: Callable[[dict[str, Any], random.Random], None]) -> Change:
    """A change of one JSON file, which is made where it is missing."""

    def edit(folder: Path, rng: random.Random) -> None:
        document = read(folder / name)
        change(document, rng)
        write(folder / name, json.dumps(document, indent=1))

    return edit


def _parts(config: dict[str, Any]) -> list[dict[str, Any]]:
    """The configuration and those of its parts."""
    return [
        config,
        *(value for name, value in config.items() if name.endswith("_config") and isinstance(value, dict)),
    ]


def _text(config: dict[str, Any]) -> dict[str, Any]:
    return config.get("text_config") or config.get("decoder") or config


# --- files ---


def remove_a_file(folder: Path, rng: random.Random) -> None:
    """Any of them."""
    rng.choice(sorted(path for path in folder.rglob("*") if path.is_file())).unlink()


def mark_a_file(folder: Path, rng: random.Random) -> None:
    """A byte order mark, as editors of some systems write it."""
    path = rng.choice(sorted(folder.glob("*.json")))
    write(path, b"\xef\xbb\xbf" + path.read_bytes())


def add_what_nobody_reads(folder: Path, rng: random.Random) -> None:
    """Folders and files that releases hold beside the model."""
    name = rng.choice(
        (
            "original/params.json",
            "training_args.bin",
            "runs/events.out",
            ".cache/x",
            "README.md",
            "onnx/model.onnx",
        )
    )
    write(folder / name, b"\x80\x02}.")


# --- weights ---


def _tensors(folder: Path) -> dict[str, Any]:
    """All tensors of the folder's safetensors files, else of the pickled ones."""
    import torch
    from safetensors.torch import load_file

    found: dict[str, Any] = {}
    for path in sorted(folder.glob("*.safetensors")):
        found |= load_file(path)
    if not found:
        for path in sorted(folder.glob("pytorch_model*.bin")):
            found |= torch.load(path, weights_only=True)
    return found


def _other(tensors: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    """Weights of another training."""
    import torch

    generator = torch.Generator().manual_seed(rng.randrange(1 << 30))
    return {
        name: (value.float() + torch.randn(value.shape, generator=generator)).to(value.dtype)
        if value.is_floating_point()
        else value
        for name, value in tensors.items()
    }


def _store(tensors: dict[str, Any], path: Path) -> None:
    import torch
    from safetensors.torch import save_file

    path.unlink(missing_ok=True)
    if path.suffix == ".safetensors":
        save_file(
            {name: value.contiguous().clone() for name, value in tensors.items()}, path, {"format": "pt"}
        )
    else:
        torch.save(tensors, path)


def _store_shards(tensors: dict[str, Any], folder: Path, stem: str, end: str, count: int = 2) -> None:
    placed: dict[str, str] = {}
    for number in range(count):
        name = f"{stem}-{number + 1:05}-of-{count:05}.{end}"
        part = {key: value for place, (key, value) in enumerate(tensors.items()) if place % count == number}
        _store(part, folder / name)
        placed |= dict.fromkeys(part, name)
    write(folder / f"{stem}.{end}.index.json", json.dumps({"metadata": {}, "weight_map": placed}))


FORMS: tuple[tuple[str, str], ...] = (("model", "safetensors"), ("pytorch_model", "bin"))


def add_stale_weights(folder: Path, rng: random.Random) -> None:
    """Weights of another training, in another container or as shards beside a single file, or the other way round."""
    other = _other(_tensors(folder), rng)
    stem, end = rng.choice(FORMS)
    if rng.random() < 0.5:
        _store(other, folder / f"{stem}.{end}")
    else:
        _store_shards(other, folder, stem, end)


def add_a_variant(folder: Path, rng: random.Random) -> None:
    """Weights of another training under a name of their own."""
    name = rng.choice(
        (
            "model.fp16.safetensors",
            "consolidated.safetensors",
            "pytorch_model.fp16.bin",
            "adapter.safetensors",
        )
    )
    _store(_other(_tensors(folder), rng), folder / name)


def name_weights_in_the_configuration(folder: Path, rng: random.Random) -> None:
    """`transformers_weights` names the file that transformers then reads."""
    _store(_other(_tensors(folder), rng), folder / "other.safetensors")
    edited("config.json", lambda config, rng: config.update(transformers_weights="other.safetensors"))(
        folder, rng
    )


def change_the_index(folder: Path, rng: random.Random) -> None:
    """An index that misses a tensor, names a shard that is not there, or puts a tensor into the wrong one."""
    indices = sorted(folder.glob("*.index.json"))
    if not indices:
        return
    path = rng.choice(indices)
    document = read(path)
    table = document["weight_map"]
    name = rng.choice(sorted(table))
    kind = rng.randrange(4)
    if kind == 0:
        del table[name]
    elif kind == 1:
        table[name] = "model-00009-of-00009.safetensors"
    elif kind == 2:
        table[name] = rng.choice(sorted(set(table.values())))
    else:
        document["metadata"] = {"total_size": -1}
    write(path, json.dumps(document))


def change_a_tensor(folder: Path, rng: random.Random) -> None:
    """One tensor is missing, of another type or shape, or there twice under another name."""
    import torch

    paths = sorted(folder.glob("*.safetensors"))
    if not paths:
        return
    from safetensors.torch import load_file

    path = rng.choice(paths)
    tensors = load_file(path)
    if not tensors:
        return
    name = rng.choice(sorted(tensors))
    value = tensors[name]
    kind = rng.randrange(6)
    if kind == 0:
        del tensors[name]
    elif kind == 1:
        tensors[name] = value.to(
            rng.choice((torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.float8_e4m3fn))
        )
    elif kind == 2:
        tensors[name] = value[..., :-1].contiguous()
    elif kind == 3:
        tensors[f"{name}_scale"] = torch.ones(1)
    elif kind == 4:
        tensors[f"module.{name}"] = value.float() + 1
    else:
        tensors[f"{name.removesuffix('weight')}bias"] = torch.ones(value.shape[0])
    _store(tensors, path)


def rename_the_tensors(folder: Path, rng: random.Random) -> None:
    """Names as other classes of the same model save them: without the prefix, below one more, of a wrapper."""
    tensors = _tensors(folder)
    for path in [*folder.glob("*.safetensors"), *folder.glob("*.bin"), *folder.glob("*.index.json")]:
        path.unlink()
    kind = rng.randrange(4)
    rename: Callable[[str], str] = (
        lambda name: name.removeprefix("model."),
        lambda name: f"model.{name}",
        lambda name: f"module.{name}",
        lambda name: f"base_model.model.{name}",
    )[kind]
    _store({rename(name): value for name, value in tensors.items()}, folder / "model.safetensors")


def store_the_head(folder: Path, rng: random.Random) -> None:
    """A head beside a tied table, equal to it or not; or none where there was one."""
    tensors = _tensors(folder)
    table = next(
        (name for name in tensors if name.endswith(("embed_tokens.weight", "shared.weight", "wte.weight"))),
        None,
    )
    heads = [name for name in tensors if name.endswith("lm_head.weight")]
    for path in [*folder.glob("*.safetensors"), *folder.glob("*.bin"), *folder.glob("*.index.json")]:
        path.unlink()
    if heads:
        del tensors[heads[0]]
    elif table is not None:
        head = {"lm_head.weight": tensors[table].clone()}
        tensors |= head if rng.random() < 0.5 else _other(head, rng)
    _store(tensors, folder / "model.safetensors")


# --- configuration ---


def tie_at_two_places(config: dict[str, Any], rng: random.Random) -> None:
    """The flag at the top and in the text's part: true, false or missing."""
    for part in (config, _text(config)):
        part.pop("tie_word_embeddings", None)
        if (flag := rng.choice((True, False, None))) is not None:
            part["tie_word_embeddings"] = flag


COUNTS = (
    "num_hidden_layers", "num_layers", "num_decoder_layers", "num_attention_heads", "num_key_value_heads", "num_heads", "head_dim", "d_kv",
    "hidden_size", "d_model", "intermediate_size", "vocab_size", "max_position_embeddings", "relative_attention_num_buckets",
    "rms_norm_eps", "layer_norm_epsilon", "rope_theta", "image_seq_length", "num_query_tokens", "vision_feature_layer",
)  # fmt: skip


def miscount(config: dict[str, Any], rng: random.Random) -> None:
    """A number of the configuration is another, or missing."""
    found = [
        (part, name) for part in _parts(config) for name in COUNTS if isinstance(part.get(name), int | float)
    ]
    if not found:
        return
    part, name = rng.choice(found)
    value = part[name]
    part[name] = rng.choice(
        (
            value + 1,
            value - 1,
            value * 2,
            value // 2 if isinstance(value, int) else value / 2,
            str(value),
            None,
        )
    )
    if rng.random() < 0.3:
        del part[name]


def quantize(config: dict[str, Any], rng: random.Random) -> None:
    """The configuration says that numbers are packed."""
    method = rng.choice(("awq", "gptq", "bitsandbytes", "fp8", "compressed-tensors", "hqq", "made-up"))
    rng.choice(_parts(config))[rng.choice(("quantization_config", "compression_config"))] = {
        "quant_method": method,
        "bits": 4,
    }


def spell_otherwise(config: dict[str, Any], rng: random.Random) -> None:
    """Fields as older and newer releases of transformers spell them."""
    part = rng.choice(_parts(config))
    kind = rng.randrange(6)
    if kind == 0:
        part["dtype"] = part.pop("torch_dtype", "float32")
    elif kind == 1:
        part["torch_dtype"] = rng.choice(("float16", "bfloat16", "float32", "auto"))
    elif kind == 2 and "rope_theta" in part:
        part["rope_parameters"] = {"rope_type": "default", "rope_theta": part.pop("rope_theta")}
    elif kind == 3:
        part["rope_scaling"] = rng.choice(
            ({"type": "linear", "factor": 2.0}, {"rope_type": "dynamic", "factor": 2.0}, {"type": "default"})
        )
    elif kind == 4:
        part.pop("transformers_version", None)
        part.pop("model_type", None) if rng.random() < 0.3 else part.pop("architectures", None)
    else:
        part["num_key_value_heads"] = None


def set_an_end(config: dict[str, Any], rng: random.Random) -> None:
    """Ids of ends and beginnings: others, several, none, beyond the vocabulary."""
    name = rng.choice(("eos_token_id", "bos_token_id", "pad_token_id", "decoder_start_token_id"))
    config[name] = rng.choice((None, 0, 1, 2, 5, -1, 300, 10**6, [1, 2], [], "2"))


def ask_of_generation(config: dict[str, Any], rng: random.Random) -> None:
    """What a generation configuration may ask for."""
    config.update(
        rng.choice(
            (
                {"repetition_penalty": 1.3}, {"no_repeat_ngram_size": 2}, {"suppress_tokens": [3, 4]}, {"forced_bos_token_id": 5},
                {"bad_words_ids": [[7]]}, {"min_new_tokens": 2}, {"num_beams": 4}, {"temperature": 0.1}, {"do_sample": True, "top_k": 1},
                {"max_length": 5}, {"max_new_tokens": 1}, {"begin_suppress_tokens": [9]}, {"encoder_repetition_penalty": 2.0},
                {"guidance_scale": 2.0}, {"stop_strings": ["a"]}, {"unheard_of": 1}, {"sequence_bias": [[[5], 9.0]]},
            )
        )
    )  # fmt: skip


# --- tokenizer and templates ---


def drop_from_the_tokenizer(config: dict[str, Any], rng: random.Random) -> None:
    """A field of the tokenizer's configuration is gone, or says something else."""
    if not config:
        return
    name = rng.choice(sorted(config))
    kind = rng.randrange(4)
    if kind == 0 and name.endswith("_token"):
        config[name] = rng.choice(("<odd>", None, {"content": "<odd>", "__type": "AddedToken"}))
    elif kind == 1:
        config["tokenizer_class"] = rng.choice(
            (
                "PreTrainedTokenizerFast",
                "LlamaTokenizerFast",
                "GPT2Tokenizer",
                "Qwen2TokenizerFast",
                "T5Tokenizer",
                "NoSuchTokenizer",
            )
        )
    elif kind == 2:
        config[rng.choice(("add_bos_token", "add_eos_token", "add_prefix_space", "split_special_tokens"))] = (
            rng.random() < 0.5
        )
    else:
        del config[name]


def add_a_template(folder: Path, rng: random.Random) -> None:
    """A second chat template: in another file, by a name, or of another text."""
    tokenizer = folder / "tokenizer.json"
    image = "<image>" if tokenizer.is_file() and b"<image>" in tokenizer.read_bytes() else ""
    other = TEMPLATE.format(mark=rng.choice("abcd"), image=image)
    kind = rng.randrange(5)
    if kind == 0:
        write(folder / "chat_template.jinja", other)
    elif kind == 1:
        write(folder / "chat_template.json", json.dumps({"chat_template": other}))
    elif kind == 2:
        named = [{"name": "default", "template": other}, {"name": "tool_use", "template": "{{ tools }}"}]
        edited("tokenizer_config.json", lambda config, rng: config.update(chat_template=named))(folder, rng)
    elif kind == 3:
        write(folder / "additional_chat_templates" / "tool_use.jinja", other)
    else:
        edited("processor_config.json", lambda config, rng: config.update(chat_template=other))(folder, rng)


def change_the_map(config: dict[str, Any], rng: random.Random) -> None:
    """special_tokens_map.json of an older release, or another one."""
    config[rng.choice(("eos_token", "bos_token", "pad_token", "unk_token", "additional_special_tokens"))] = (
        rng.choice(
            (
                "</s>",
                "<|im_end|>",
                "<|endoftext|>",
                {"content": "<odd>", "lstrip": False},
                None,
                ["<a>", "<b>"],
            )
        )
    )


def add_tokens(folder: Path, rng: random.Random) -> None:
    """added_tokens.json beside a tokenizer that has them, or has them not."""
    write(
        folder / "added_tokens.json",
        json.dumps({rng.choice(("<image>", "<new>", "</s>")): rng.choice((0, 300, 301))}),
    )


# --- pictures ---


def change_the_processor(folder: Path, rng: random.Random) -> None:
    """Fields of the processor's files are missing, in the other file, or of another size."""
    names = [
        name for name in ("preprocessor_config.json", "processor_config.json") if (folder / name).is_file()
    ]
    if not names:
        return
    path = folder / rng.choice(names)
    document = read(path)
    kind = rng.randrange(5)
    if kind == 0 and document:
        del document[rng.choice(sorted(document))]
    elif kind == 1:
        document.update(rng.choice(({"patch_size": 14}, {"num_additional_image_tokens": 1}, {"vision_feature_select_strategy": "default"},
                                    {"num_query_tokens": 4}, {"image_token": "<image>"}, {"num_additional_image_tokens": 0})))  # fmt: skip
    elif kind == 2:
        document["size"] = rng.choice((28, {"height": 28, "width": 28}, {"shortest_edge": 28}))
    elif kind == 3:
        write(
            folder / "processor_config.json",
            json.dumps(
                {"image_processor": read(folder / "preprocessor_config.json") | {"image_mean": [0, 0, 0]}}
            ),
        )
        return
    else:
        document[
            rng.choice(("do_resize", "do_center_crop", "do_rescale", "do_normalize", "do_convert_rgb"))
        ] = rng.random() < 0.5
    write(path, json.dumps(document))


# --- adapters ---


def add_an_adapter(folder: Path, rng: random.Random) -> None:
    """An adapter's files beside the model's own."""
    write(
        folder / "adapter_config.json",
        json.dumps(
            {"peft_type": "LORA", "r": 2, "target_modules": ["q_proj"], "base_model_name_or_path": "x"}
        ),
    )
    if rng.random() < 0.5:
        import torch

        _store(
            {"base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight": torch.ones(2, 96)},
            folder / "adapter_model.safetensors",
        )


CHANGES: tuple[Change, ...] = (
    remove_a_file, mark_a_file, add_what_nobody_reads,
    add_stale_weights, add_stale_weights, add_a_variant, name_weights_in_the_configuration, change_the_index, change_a_tensor,
    rename_the_tensors, store_the_head,
    edited("config.json", tie_at_two_places), edited("config.json", miscount), edited("config.json", miscount), edited("config.json", quantize),
    edited("config.json", spell_otherwise), edited("config.json", set_an_end), edited("generation_config.json", set_an_end),
    edited("generation_config.json", ask_of_generation), edited("tokenizer_config.json", drop_from_the_tokenizer),
    edited("special_tokens_map.json", change_the_map), add_a_template, add_a_template, add_tokens, change_the_processor, add_an_adapter,
)  # fmt: skip
"""Those that stand here twice are met more often."""


def change_folder(folder: Path, rng: random.Random) -> None:
    """One to three of them, one behind the other."""
    for _ in range(rng.choice((1, 1, 2, 3))):
        rng.choice(CHANGES)(folder, rng)
