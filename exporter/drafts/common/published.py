"""Files of draft checkpoints as others publish them. Nothing in them is trusted."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from torch import Tensor, nn

from ....runtime.common.bounded_files import read_json
from ....runtime.common.errors import ExportError, OptionError
from ....runtime.common.foreign_errors import raise_if_foreign
from ...checkpoint.pickled import load_pickled
from .base import TrainedKind
from .files import DESCRIPTION, DESCRIPTION_LIMIT
from .trained import TrainedDraft, with_tensors

CONFIG = "config.json"
WEIGHTS = ("model.safetensors", "pytorch_model.bin")
"""Files of checkpoints in the layout of transformers."""
TABLE = "embed_tokens.weight"
PLAIN = ("default", "mrope")
"""Kinds of rotary positions that scale nothing."""
INTERLEAVING = "Eagle3LlamaForCausalLM"
"""The class of AngelSlim's drafts (github.com/Tencent/AngelSlim): it interleaves the axes of M-RoPE whatever `rope_scaling` says."""

C = TypeVar("C")
N = TypeVar("N", bound=nn.Module)


class PublishedKind(TrainedKind):
    """Base of kinds whose drafts are folders of `vlmexport train`, or checkpoints as their authors publish them."""

    has_layer = False
    draft: ClassVar[type[TrainedDraft]]

    def load(self, folder: Path) -> TrainedDraft:
        """A draft of either form. Raises ExportError naming what does not fit."""
        if not self.recognises(folder):
            return self.draft.load(folder)
        network, metadata = self.read_published(folder)
        target = dict(metadata)
        notices = target.pop("notices", [])
        return self.draft(
            network=network,
            target={"name": "", "fingerprint": None, **target},
            provenance={"checkpoint": folder.name, **({"notices": notices} if notices else {})},
        )

    def recognises(self, folder: Path) -> bool:
        return not (folder / DESCRIPTION).exists() and self.is_published(folder)

    @abstractmethod
    def is_published(self, folder: Path) -> bool:
        """Whether `folder`, which is none of `vlmexport train`, looks like such a checkpoint."""

    @abstractmethod
    def read_published(self, folder: Path) -> tuple[Any, Mapping[str, Any]]:
        """(the network of such a checkpoint, what it says of its target: ``name``, ``architectures``; and ``notices``,
        lines for the user)."""


def find_weights(folder: Path, names: Iterable[str]) -> Path | None:
    """The first of these files that `folder` has."""
    return next((folder / name for name in names if (folder / name).is_file()), None)


def read_config(path: Path) -> dict[str, Any]:
    """A `config.json`. Raises ExportError for anything but a JSON object."""
    document = read_json(path, DESCRIPTION_LIMIT, ExportError)
    if not isinstance(document, dict):
        raise ExportError(f"{path} is not a JSON object")
    return document


def rotary_base(path: Path, document: Mapping[str, Any]) -> float:
    """θ of the plain rotary positions that a Llama's configuration at `path` tells, under the names of any release.

    That of M-RoPE is among them (`mrope_options`). Raises ExportError for other kinds.
    """
    tables = _rotary_tables(path, document)
    for name, table in tables.items():
        kind = table.get("rope_type", table.get("type")) or "default"
        if kind not in PLAIN or any(isinstance(value, dict) for value in table.values()):
            raise ExportError(
                f"{path}: {name} {table!r:.80} is not supported in a draft, only plain rotary positions"
            )
    partial = [
        t["partial_rotary_factor"] for t in (document, *tables.values()) if t.get("partial_rotary_factor")
    ]
    for factor in partial:
        if factor != 1:
            raise ExportError(
                f"{path}: partial_rotary_factor {factor!r:.40} is not supported in a draft, only whole heads"
            )
    # The order is that of transformers: what stands with the kind is newer than the field beside it.
    bases = [t["rope_theta"] for t in (*tables.values(), document) if t.get("rope_theta") is not None]
    return bases[0] if bases else 10000.0


def mrope_options(path: Path, document: Mapping[str, Any]) -> dict[str, Any]:
    """`mrope_section` and `mrope_interleaved` of a layer whose positions, by its configuration at `path`, have three axes;
    {} where they have one.

    Qwen2.5-VL's sections lie one behind the other, Qwen3-VL's are interleaved, and AngelSlim interleaves both (`INTERLEAVING`).
    Raises ExportError for M-RoPE without its sections.
    """
    tables = list(_rotary_tables(path, document).values())
    sections = next((t["mrope_section"] for t in tables if t.get("mrope_section") is not None), None)
    if sections is None:
        if any("mrope" in (t.get("type"), t.get("rope_type")) for t in tables):
            raise ExportError(
                f"{path}: M-RoPE without mrope_section; give it as the draft was trained with it"
            )
        return {}
    interleaved = next((t["mrope_interleaved"] for t in tables if "mrope_interleaved" in t), False)
    classes = document.get("architectures")
    if isinstance(classes, list) and INTERLEAVING in classes:
        interleaved = True
    return {"mrope_section": sections, "mrope_interleaved": interleaved}


def plain_rotary_notices(folder: Path) -> list[str]:
    """A line for the user where the draft in `folder`, of a kind with one axis of positions, was trained with M-RoPE."""
    path = folder / CONFIG
    document = read_config(path)
    if not any(
        "mrope" in (t.get("type"), t.get("rope_type")) or t.get("mrope_section")
        for t in _rotary_tables(path, document).values()
    ):
        return []
    return [
        f"{folder.name} was trained with M-RoPE and drafts with plain positions: the same for text; behind pictures fewer of "
        "its tokens may be accepted."
    ]


def _rotary_tables(path: Path, document: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """`rope_parameters` and `rope_scaling`, the newer first, of those that are there."""
    tables = {name: document.get(name) for name in ("rope_parameters", "rope_scaling")}
    for name, table in tables.items():
        if not isinstance(table, dict | None):
            raise ExportError(f"{path}: {name} {table!r:.80} is not an object")
    return {name: table for name, table in tables.items() if table}


def layer_sizes(tensors: Mapping[str, Tensor], layer: str, head_dim: Any) -> dict[str, int]:
    """Sizes of a layer of attention and MLP as its tensors below `layer` tell them; what they leave open is left out."""
    out_features = {
        name: weight.shape[0]
        for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.o_proj", "mlp.gate_proj")
        if (weight := tensors.get(f"{layer}{name}.weight")) is not None and weight.dim() == 2
    }
    sizes = {"hidden_size": "self_attn.o_proj", "intermediate_size": "mlp.gate_proj"}
    known = {size: out_features[name] for size, name in sizes.items() if name in out_features}
    if type(head_dim) is int and head_dim > 0:
        for size, name in (("num_heads", "self_attn.q_proj"), ("num_kv_heads", "self_attn.k_proj")):
            if name in out_features and out_features[name] % head_dim == 0:
                known[size] = out_features[name] // head_dim
    return known


def read_names(path: Path) -> set[str]:
    """Names of the tensors of such a file, without reading them; none where it cannot be read."""
    from safetensors import safe_open

    try:
        if path.suffix == ".safetensors":
            with safe_open(path, framework="pt") as file:
                return set(file.keys())
        return set(load_pickled(path, device="meta"))
    except Exception as error:
        raise_if_foreign(error)
        return set()


def layer_shape(
    path: Path,
    document: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    layer: str,
    shape: Callable[..., C],
    **more: Any,
) -> C:
    """The shape of a Llama's layer: what the `tensors` below `layer` tell, and for the rest the configuration at `path`,
    in the defaults of a Llama; `more` are further options.

    Raises ExportError for what no layer of a draft has.
    """
    activation = document.get("hidden_act", "silu")
    if activation != "silu":
        raise ExportError(f"{path}: hidden_act {activation!r:.40} is not supported, only silu")
    heads: Any = document.get("num_attention_heads")
    width: Any = document.get("hidden_size")
    size: Any = document.get("head_dim")
    if size is None and type(heads) is int and type(width) is int and heads > 0:
        size = width // heads
    given: dict[str, Any] = {
        "hidden_size": width,
        "vocab_size": document.get("vocab_size"),
        "num_heads": heads,
        "num_kv_heads": document.get("num_key_value_heads") or heads,
        "head_dim": size,
        "intermediate_size": document.get("intermediate_size"),
        "rope_theta": rotary_base(path, document),
        "norm_eps": document.get("rms_norm_eps", 1e-6),
    }
    given |= layer_sizes(tensors, layer, size)
    try:
        return shape(**given, **more)
    except (OptionError, TypeError) as error:
        raise ExportError(f"{path}: {error}") from error


def filled(network: N, tensors: Mapping[str, Tensor], path: Path, beside: str) -> N:
    """`network`, made on the device "meta", with these tensors (`with_tensors`).

    Raises ExportError naming the first tensor of `path` that is missing, that it has `beside` what is known, that has
    another shape, or that is no weight.
    """
    wanted = network.state_dict()
    for name in sorted(wanted.keys() ^ tensors.keys()):
        what = "misses" if name in wanted else f"holds, beside {beside},"
        raise ExportError(f"{path}: {what} the tensor {name:.80}")
    for name, value in wanted.items():
        if tensors[name].shape != value.shape:
            raise ExportError(
                f"{path}: {name} has shape {list(tensors[name].shape)}, not {list(value.shape)}"
            )
    return with_tensors(network, tensors, path)


def matrix(path: Path, tensors: Mapping[str, Tensor], name: str, what: str) -> Tensor:
    """The tensor `name` of those of `path`, a matrix. Raises ExportError where there is none, so that it is not `what`."""
    tensor = tensors.get(name)
    if tensor is None or tensor.dim() != 2:
        raise ExportError(f"{path}: there is no matrix {name}, so this is no {what}")
    return tensor
