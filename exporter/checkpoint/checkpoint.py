"""A model on disk: its configuration, tensors, tokenizer and processors, each read when it is asked for."""

from __future__ import annotations

import functools
import importlib.util
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import transformers
from transformers import PreTrainedConfig
from transformers.pytorch_utils import Conv1D

from ...runtime.common.errors import ExportError
from ...runtime.common.foreign_errors import raise_if_foreign
from ..common.aliases import Alias
from ..common.one_line import first_line
from .adapter import Adapter
from .hub import download
from .integer_tensors import IntegerTensors, shown_tensors
from .layouts.layout import Layout
from .merging import Merger
from .names import StoredNames, hollow_names
from .origin import QUANTIZED, Origin
from .quantized import check_weights
from .tensors import TensorFiles

_VOCABULARIES = ("spiece.model", "tokenizer.model", "vocab.json", "vocab.txt")


@dataclass
class Checkpoint:
    """A model on disk. `source` is what the user typed; `alias` is set when that was an alias."""

    source: str
    folder: Path
    config: PreTrainedConfig
    tensors: TensorFiles
    alias: Alias | None = None
    hub_id: str | None = None
    max_pixels: int | None = None
    """Of a picture, where that is below the image processor's own."""
    merger: Merger | None = None
    """Merges an adapter into `tensors`."""
    layout: Layout | None = None
    """How a quantized checkpoint stores its matrices; `config` does not tell it any more."""

    def fetch(self) -> bool:
        """Downloads the weights of a hub model that was opened without them; says whether there was need to.

        What was derived of `tensors` before must be derived again: only now can they be read.
        """
        if self.hub_id is None or self.tensors.readable:
            return False
        files = TensorFiles(download(self.hub_id, self.folder.name), named_weights(self.config))
        self.tensors = shown_tensors(files, self.layout)
        self.__dict__.pop("names", None)
        self.merge_adapter()
        return True

    @property
    def adapter(self) -> Adapter | None:
        """What is merged into the weights."""
        return None if self.merger is None else self.merger.adapter

    def merge_adapter(self) -> None:
        """Lays the adapter over `tensors`, which are those of the files until then."""
        if self.merger is not None:
            self.tensors = self.merger.over(self.tensors, self.names)
            self.__dict__.pop("names", None)

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
        """Names of parameters in `model_class` → names of tensors on disk, as transformers maps them.

        Raises UnsupportedModelError where a tensor is no weight.
        """
        model = hollow_names(self.model_class, self.config)
        names = StoredNames(self.tensors, model)
        if isinstance(self.tensors, IntegerTensors):
            linears = (path for path, module in model.named_modules() if isinstance(module, Conv1D))
            self.tensors.transpose([disk for path in linears if (disk := names.held(f"{path}.weight"))])
        check_weights(self.tensors, names)
        return names

    def stored(self, name: str) -> str:
        """The tensor behind a parameter of `model_class`, or behind the table it is tied to; ExportError if none."""
        return self.names.stored(name)

    @property
    def notices(self) -> list[str]:
        """Lines for the user: about the adapter, and about what the folder holds and neither we nor transformers read."""
        lines = list(self.tensors.notices)
        if self.adapter is not None:
            names = (self.source, self.hub_id or "", self.folder.resolve().name)
            lines += self.adapter.notices(names, self.folder)
        if self.tensors.unread:
            read = ", ".join(sorted({file.name for file in self.tensors.shards})[:3])
            lines.append(
                f"weights are read from {read}, as transformers reads them; not from {', '.join(self.tensors.unread)}."
            )
        unread = [disk for _, disk in self.names.unread]
        if unread:
            some = ", ".join(unread[:3]) + (", …" if len(unread) > 3 else "")
            what = (
                "1 tensor of the checkpoint belongs"
                if len(unread) == 1
                else f"{len(unread)} tensors of the checkpoint belong"
            )
            lines.append(
                f"{what} to no parameter of {self.architecture} and {'is' if len(unread) == 1 else 'are'} not read, as in transformers: {some}."
            )
        return lines

    @functools.cached_property
    def trained_from(self) -> Origin | None:
        """The model that this one was trained further from, where it says so."""
        return Origin.read(self.folder)

    @functools.cached_property
    def quantized_from(self) -> Origin | None:
        """The float model whose weights became this one's integers, where it says so."""
        return Origin.read(self.folder, QUANTIZED)

    @property
    def default_prompt(self) -> str | None:
        """The prompt of requests without one: the alias's, or that of the model it was quantized or trained from."""
        if self.alias is not None:
            return self.alias.default_prompt
        origin = self.quantized_from or self.trained_from
        return None if origin is None else origin.default_prompt

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
            raise_if_foreign(error)
            raise ExportError(f"no tokenizer can be read from {self.folder}: {first_line(error)}") from error
        if not getattr(tokenizer, "is_fast", False):
            raise ExportError(
                f"the tokenizer of {self.folder} ({type(tokenizer).__name__}) has no tokenizer.json form"
            )
        if getattr(tokenizer, "split_special_tokens", False):
            raise ExportError(
                f"{self.folder / 'tokenizer_config.json'}: split_special_tokens=true reads special tokens as text, which "
                "tokenizer.json cannot say; set it to false"
            )
        return tokenizer

    def _check_tokenizer_files(self) -> None:
        """ExportError where transformers would make an empty tokenizer, or name a wrong remedy."""
        if (self.folder / "tokenizer.json").is_file():
            return
        vocabulary = next((n for n in _VOCABULARIES if (self.folder / n).is_file()), None)
        if vocabulary is None:
            raise ExportError(
                f"{self.folder} has no tokenizer (tokenizer.json, or {', '.join(_VOCABULARIES)}); save the model's "
                "there with tokenizer.save_pretrained"
            )
        if vocabulary.endswith(".model") and importlib.util.find_spec("sentencepiece") is None:
            raise ExportError(
                f"{self.folder} has {vocabulary} but no tokenizer.json; converting it needs sentencepiece: "
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
            raise_if_foreign(error)
            unknown = self._unknown_image_processor()
            raise ExportError(
                unknown or f"no processor can be read from {self.folder}: {first_line(error)}"
            ) from error

    def _unknown_image_processor(self) -> str | None:
        """The line that refuses a class that transformers does not know, or knows no more; None for any other."""
        from transformers.models.auto.image_processing_auto import get_image_processor_class_from_name

        name = self.image_settings.get("image_processor_type")
        if not isinstance(name, str) or get_image_processor_class_from_name(name) is not None:
            return None
        return (
            f"{self.folder}: transformers {transformers.__version__} has no image_processor_type {name!r:.80}; take "
            "preprocessor_config.json from the checkpoint's current release"
        )

    @functools.cached_property
    def processor_template(self) -> Any:
        """The chat template that transformers gives to the model's processor: Jinja source, several by name, or None.

        It is read without the processor, which may need packages that are not here. ExportError for a damaged file.
        """
        from transformers.processing_utils import ProcessorMixin

        try:
            described, _ = ProcessorMixin.get_processor_dict(self.folder, local_files_only=True)
        except Exception as error:  # damaged files fail in many ways
            raise_if_foreign(error)
            raise ExportError(
                f"no chat template can be read from {self.folder}: {first_line(error)}"
            ) from error
        return described.get("chat_template")

    @functools.cached_property
    def processor_settings(self) -> dict[str, Any]:
        """`processor_config.json`, or an empty dict."""
        return self._json("processor_config.json")

    @functools.cached_property
    def image_settings(self) -> dict[str, Any]:
        """The image processor's settings: its part of `processor_config.json`, else `preprocessor_config.json`.

        The order is transformers' own (`ImageProcessingMixin.get_image_processor_dict`): where a folder has both, the
        second file is a relic of an older release.
        """
        return self._settings("image_processor", "preprocessor_config.json")

    @functools.cached_property
    def video_settings(self) -> dict[str, Any]:
        """The video processor's settings: its part of `processor_config.json`, else `video_preprocessor_config.json`;
        {} without either."""
        return self._settings("video_processor", "video_preprocessor_config.json")

    def _settings(self, part: str, file: str) -> dict[str, Any]:
        settings = self.processor_settings.get(part)
        if settings is None:
            settings = self._json(file)
        if not isinstance(settings, dict):
            raise ExportError(f"{self.folder}: {part} {settings!r:.80} is not an object")
        return settings

    def _json(self, name: str) -> dict[str, Any]:
        path = self.folder / name
        if not path.is_file():
            return {}
        try:
            document = json.loads(path.read_text("utf-8"))
        except (ValueError, RecursionError) as error:
            raise_if_foreign(error)
            raise ExportError(f"{path} is not JSON: {first_line(error)}") from error
        if not isinstance(document, dict):
            raise ExportError(f"{path} holds {type(document).__name__}, not an object")
        return document


def named_weights(config: PreTrainedConfig) -> str | None:
    """The file of weights that config.json names, which transformers then reads in place of the usual ones."""
    named = getattr(config, "transformers_weights", None)
    return None if named is None else str(named)
