"""Finds a model: an alias, a local folder, or a Hugging Face hub id."""

from __future__ import annotations

import functools
import importlib.util
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import transformers
from transformers import AutoConfig, PreTrainedConfig

from ...runtime.errors import ExportError, OptionError, UnsupportedModelError
from .aliases import Alias, find_alias, unknown_model
from .names import StoredNames, hollow_names
from .tensors import TensorFiles

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_VOCABULARIES = ("spiece.model", "tokenizer.model", "vocab.json", "vocab.txt")
_PATTERNS = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]


@dataclass
class Checkpoint:
    """A model on disk. `source` is what the user typed; `alias` is set when that was an alias."""

    source: str
    folder: Path
    config: PreTrainedConfig
    tensors: TensorFiles
    alias: Alias | None = None

    @property
    def architecture(self) -> str:
        """Class name in transformers, for example `LlamaForCausalLM`."""
        names = self.config.architectures or []
        return str(names[0]) if names else type(self.config).__name__.removesuffix("Config")

    @property
    def model_class(self) -> Any:
        """The transformers class that `architecture` names. Raises ExportError where there is none."""
        kind = getattr(transformers, self.architecture, None)
        if kind is None:
            raise ExportError(f"transformers {transformers.__version__} has no {self.architecture}")
        return kind

    @functools.cached_property
    def names(self) -> StoredNames:
        """Names of parameters in `model_class` → names of tensors on disk, as transformers maps them."""
        return StoredNames(self.tensors, hollow_names(self.model_class, self.config))

    def stored(self, name: str) -> str:
        """The tensor behind a parameter of `model_class`, or behind the table it is tied to; ExportError if none."""
        return self.names.stored(name)

    @functools.cached_property
    def generation_config(self) -> dict[str, Any]:
        """`generation_config.json`, or an empty dict."""
        return self._json("generation_config.json")

    @functools.cached_property
    def tokenizer(self) -> Any:
        """The transformers tokenizer. ExportError when the folder has none that converts to tokenizer.json."""
        from transformers import AutoTokenizer

        self._check_tokenizer_files()
        try:
            tokenizer = AutoTokenizer.from_pretrained(
                self.folder, local_files_only=True, trust_remote_code=False
            )
        except Exception as error:  # damaged files fail in many ways
            raise ExportError(f"no tokenizer can be read from {self.folder}: {_line(error)}") from error
        if not getattr(tokenizer, "is_fast", False):
            raise ExportError(
                f"the tokenizer of {self.folder} ({type(tokenizer).__name__}) has no tokenizer.json form"
            )
        return tokenizer

    def _check_tokenizer_files(self) -> None:
        """ExportError where transformers would make an empty tokenizer, or name a wrong remedy."""
        if (self.folder / "tokenizer.json").is_file():
            return
        found = next((n for n in _VOCABULARIES if (self.folder / n).is_file()), None)
        if found is None:
            raise ExportError(
                f"{self.folder} has no tokenizer (tokenizer.json, or {', '.join(_VOCABULARIES)}); save the model's "
                "there with tokenizer.save_pretrained"
            )
        if found.endswith(".model") and importlib.util.find_spec("sentencepiece") is None:
            raise ExportError(
                f"{self.folder} has {found} but no tokenizer.json; converting it needs sentencepiece: "
                "pip install sentencepiece"
            )

    @functools.cached_property
    def processor(self) -> Any:
        """The model's own processor, its image part on Pillow, as the runtime's. ExportError when there is none."""
        return self._own(transformers.AutoProcessor)

    @functools.cached_property
    def image_processor(self) -> Any:
        """The model's own image processor, on Pillow, as the runtime's. ExportError when there is none."""
        return self._own(transformers.AutoImageProcessor)

    def _own(self, kind: Any) -> Any:
        try:
            return kind.from_pretrained(
                self.folder, local_files_only=True, trust_remote_code=False, backend="pil"
            )
        except Exception as error:  # damaged files fail in many ways
            raise ExportError(f"no processor can be read from {self.folder}: {_line(error)}") from error

    @functools.cached_property
    def image_settings(self) -> dict[str, Any]:
        """The image processor's settings: its part of `processor_config.json`, else `preprocessor_config.json`.

        The order is transformers' own (`ImageProcessingMixin.get_image_processor_dict`): where a folder has both, the
        second file is a relic of an older release.
        """
        settings = self._json("processor_config.json").get("image_processor")
        if settings is None:
            settings = self._json("preprocessor_config.json")
        if not isinstance(settings, dict):
            raise ExportError(f"{self.folder}: image_processor {settings!r:.80} is not an object")
        return settings

    def _json(self, name: str) -> dict[str, Any]:
        path = self.folder / name
        if not path.is_file():
            return {}
        try:
            found = json.loads(path.read_text("utf-8"))
        except (ValueError, RecursionError) as error:
            raise ExportError(f"{path} is not JSON: {_line(error)}") from error
        if not isinstance(found, dict):
            raise ExportError(f"{path} holds {type(found).__name__}, not an object")
        return found


def open_checkpoint(model: str | Path) -> Checkpoint:
    """Opens an alias, a folder or a hub id (downloaded into the hub's cache).

    Raises OptionError for a name that is none of them, ExportError when it cannot be fetched or read, and
    UnsupportedModelError when transformers does not know the model type or it needs code of its own.
    """
    source = str(model)
    alias = find_alias(source)
    if alias is not None:
        folder = alias.folder if alias.folder is not None else _download(alias.hub_id)
    elif Path(source).is_dir():
        folder = Path(source)
    elif Path(source).exists():
        raise OptionError(
            f"--model {source} is a file; give the folder that holds config.json and the weights"
        )
    elif _HUB_ID.fullmatch(source) and not source.startswith("."):
        folder = _download(source)
    else:
        raise unknown_model(source)
    if not (folder / "config.json").is_file():
        raise ExportError(f"{folder} has no config.json; give a Hugging Face model folder")
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (ValueError, KeyError, OSError, TypeError) as error:
        raise UnsupportedModelError(
            f"the configuration in {folder} is not understood: {_line(error)}"
        ) from error
    except Exception as error:  # strict configuration classes raise their own validation errors
        raise UnsupportedModelError(f"the configuration in {folder} is invalid: {_line(error)}") from error
    _size_decoder_cache(config)
    return Checkpoint(source, folder, config, TensorFiles(folder), alias)


def _size_decoder_cache(config: PreTrainedConfig) -> None:
    """Lets `generate` work for a T5 whose decoder is deeper than its encoder.

    transformers sizes the cache by `num_layers`, the encoder's count, unless there is a `decoder_layers`.
    """
    for part in (config, getattr(config, "text_config", None)):
        depth = getattr(part, "num_decoder_layers", None)
        if part is not None and depth is not None and not hasattr(part, "decoder_layers"):
            part.decoder_layers = depth


def _download(hub_id: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        folder = Path(snapshot_download(hub_id, allow_patterns=_PATTERNS, ignore_patterns=["*/*"]))
        if not any(folder.glob("*.safetensors")):
            folder = Path(
                snapshot_download(hub_id, allow_patterns=[*_PATTERNS, "*.bin"], ignore_patterns=["*/*"])
            )
        return folder
    except Exception as error:
        raise ExportError(
            f"{hub_id} is neither a local folder nor reachable on the Hugging Face hub ({type(error).__name__}: "
            f"{_line(error)}); download it elsewhere and give its folder"
        ) from error


def _line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return text[0] if text else type(error).__name__
