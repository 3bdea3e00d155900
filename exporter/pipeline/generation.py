"""What a checkpoint's generation configuration asks of decoding: the manifest's `generation`.

Read as transformers reads it: `generation_config.json`, or where there is none the fields that older versions kept in
`config.json` (the outer ones first, then those of the text model). BLIP-2's `generate` hands on to its language model's,
whose configuration comes from `text_config` alone; generation parameters are taken out of that one, so that such a model
decodes without any, whatever its `generation_config.json` says. The fields that transformers itself drops are then named
as ignored, too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from transformers import GenerationConfig

from ...runtime.common.errors import ExportError
from ...runtime.common.foreign_errors import raise_if_foreign
from ..checkpoint.checkpoint import Checkpoint

HANDED_ON = (
    "Blip2ForConditionalGeneration",
    "InstructBlipForConditionalGeneration",
    "InstructBlipVideoForConditionalGeneration",
)
"""Architectures whose `generate` calls that of `language_model`, which never sees `generation_config.json`."""

DEFAULTS = {
    "do_sample": False, "num_beams": 1, "num_beam_groups": 1, "num_return_sequences": 1, "early_stopping": False,
    "temperature": 1.0, "top_k": 50, "top_p": 1.0, "typical_p": 1.0, "epsilon_cutoff": 0.0, "eta_cutoff": 0.0,
    "diversity_penalty": 0.0, "length_penalty": 1.0, "repetition_penalty": 1.0, "encoder_repetition_penalty": 1.0,
    "no_repeat_ngram_size": 0, "encoder_no_repeat_ngram_size": 0, "min_length": 0, "min_new_tokens": 0,
    "guidance_scale": 1.0, "penalty_alpha": 0.0, "renormalize_logits": False, "remove_invalid_values": False,
    "token_healing": False,
}  # fmt: skip
"""Values that mean the same as none. The default of every other field is none."""

WITHOUT_EFFECT = {
    # Special tokens, which are in the manifest's `text`; lengths, which belong to a request.
    "bos_token_id", "decoder_start_token_id", "eos_token_id", "pad_token_id", "max_length", "max_new_tokens",
    # How transformers computes, not what.
    "cache_config", "cache_implementation", "compile_config", "continuous_batching_config", "disable_compile",
    "low_memory", "max_cache_len", "prefill_chunk_size", "use_cache",
    # What it returns beside the tokens.
    "output_attentions", "output_hidden_states", "output_logits", "output_scores", "return_dict_in_generate",
    # Its own lossless speculation.
    "assistant_confidence_threshold", "assistant_early_exit", "assistant_lookbehind", "is_assistant",
    "max_matching_ngram_size", "num_assistant_tokens", "num_assistant_tokens_schedule", "prompt_lookup_num_tokens",
    "speculation_type", "target_lookbehind", "use_mtp",
    "transformers_version",
}  # fmt: skip
"""Fields that change no token of a request which says how many it wants."""


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 1e-3 <= value <= 1e3:
        raise ValueError("a number in 0.001..1000")
    return float(value)


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value <= 1 << 20:
        raise ValueError("a whole number in 0..1048576")
    return value


def _tokens(value: Any) -> list[int]:
    """Token ids; negative ones, which mean "none" in some configurations, match no token and are left out."""
    if not isinstance(value, list | tuple) or any(type(token) is not int for token in value):
        raise ValueError("a list of token ids")
    return [token for token in value if token >= 0]


def _words(value: Any) -> list[list[int]]:
    if not isinstance(value, list | tuple) or not all(word and _tokens(word) == list(word) for word in value):
        raise ValueError("a list of lists of token ids")
    return [list(word) for word in value]


HONOURED: dict[str, Callable[[Any], Any]] = {
    "repetition_penalty": _number,
    "no_repeat_ngram_size": _count,
    "min_length": _count,
    "min_new_tokens": _count,
    "suppress_tokens": _tokens,
    "begin_suppress_tokens": _tokens,
    "bad_words_ids": _words,
}
"""Field → its check. The runtime does these (`runtime/sampling/logits_processors.py`)."""


def generation_config(checkpoint: Checkpoint) -> GenerationConfig:
    """The configuration that `generate` of the loaded model follows. ExportError where transformers refuses it."""
    if checkpoint.architecture in HANDED_ON:
        return GenerationConfig.from_model_config(checkpoint.config.text_config)
    return _stored(checkpoint)


def describe_generation(checkpoint: Checkpoint) -> dict[str, Any]:
    """The manifest's `generation`: values of the `HONOURED` fields that are set, and `ignored`, the names of the others.

    Raises ExportError for a value that has the wrong type or range.
    """
    effective = _set(generation_config(checkpoint))
    values: dict[str, Any] = {}
    for name, check in HONOURED.items():
        if name in effective:
            try:
                value = check(effective[name])
            except (TypeError, ValueError) as error:
                raise ExportError(
                    f"{checkpoint.folder}: {name} {effective[name]!r:.80} is not {error}; correct generation_config.json"
                ) from error
            if value:
                values[name] = value
    if "min_new_tokens" in effective:
        values.pop("min_length", None)  # transformers then replaces it
    stored = _set(_stored(checkpoint))
    ignored = {name for name in stored if name not in HONOURED or name not in effective}
    return {**values, "ignored": sorted(ignored | (effective.keys() - HONOURED.keys()))}


def generation_notices(generation: Mapping[str, Any]) -> list[str]:
    """What to tell the user about `describe_generation`'s result: one line, or none."""
    if not generation["ignored"]:
        return []
    names = ", ".join(generation["ignored"])
    return [f"Not taken over from the model's generation configuration: {names}"]


def _stored(checkpoint: Checkpoint) -> GenerationConfig:
    """As transformers reads it from the checkpoint's files."""
    has_file = (checkpoint.folder / "generation_config.json").is_file()
    source = "generation_config.json" if has_file else "config.json"
    _ = checkpoint.generation_config  # one line for a file that is not JSON, or no object
    try:
        return GenerationConfig.from_pretrained(
            checkpoint.folder, source, local_files_only=True, _from_model_config=not has_file
        )
    except (ValueError, TypeError, OSError) as error:
        raise_if_foreign(error)
        line = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ExportError(f"{checkpoint.folder / source}: transformers refuses it: {line}") from error


def _set(config: GenerationConfig) -> dict[str, Any]:
    """The fields that ask for something, by name. `min_new_tokens: 0` does: it switches `min_length` off."""
    return {
        name: value
        for name, value in config.to_dict().items()
        if not name.startswith("_")
        and name not in WITHOUT_EFFECT
        and value is not None
        and (value != DEFAULTS.get(name) or name == "min_new_tokens")
        and value not in ([], {}, ())
    }
