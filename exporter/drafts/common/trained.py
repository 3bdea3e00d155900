"""What trained drafts share: a network that fits one target, its identity, and its folder (see `files`)."""

from __future__ import annotations

import copy
import hashlib
import json
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch
from torch import nn

from ....runtime.common.errors import ExportError, OptionError
from ...checkpoint.plain import dtype_name, plain_problem, weight_problem
from ...graphs.dtypes import TORCH
from ...quantization.blocks import BLOCK
from .base import Draft
from .draft_tensors import DraftTensors, dequantized, matrices
from .files import (
    DESCRIPTION,
    MODEL,
    TENSORS,
    draft_folder,
    read_document,
    read_tensors,
    write_document,
    write_tensors,
)

if TYPE_CHECKING:
    from ...families.common.base import Family
    from ...graphs.weights import WeightStore
    from .verifier import Verifier

WIDEST = 1 << 17
"""Largest width of a decoder that is believed."""


D = TypeVar("D", bound="TrainedDraft")
N = TypeVar("N", bound=nn.Module)


@dataclass(kw_only=True)
class TrainedDraft(Draft):
    """A trained network with the identity of the one target it fits.

    `network.config` is a dataclass of the network's options, which raises OptionError for ones that do not fit. A
    subclass names its `kind`, whether it `has_layer`, and makes a network from options.
    """

    network: Any
    layer: int | None = None
    target: dict[str, Any]
    """name, fingerprint, num_layers; `trained_from` (name, fingerprint) where it changed while the draft was trained"""
    provenance: dict[str, Any] = field(default_factory=dict)
    evaluation: dict[str, Any] = field(default_factory=dict)
    precision: str | None = None

    has_layer: ClassVar[bool]

    @classmethod
    @abstractmethod
    def untrained(cls, options: Mapping[str, Any]) -> nn.Module:
        """A network of these options. OptionError or TypeError for ones that do not fit."""

    @property
    def fingerprint(self) -> str:
        """`sha256:` of the network: its options, names, shapes and values (float32)."""
        digest = hashlib.sha256(json.dumps(described(self.network.config), sort_keys=True).encode())
        for name, value in sorted(self.network.state_dict().items()):
            digest.update(f"{name}{tuple(value.shape)}".encode())
            value = value.detach().cpu()
            value = value.float() if value.is_floating_point() else value
            digest.update(value.contiguous().numpy().tobytes())
        return f"sha256:{digest.hexdigest()}"

    @property
    def notices(self) -> list[str]:
        """How somebody else's checkpoint was read, where it says something else."""
        lines = self.provenance.get("notices")
        return [str(line) for line in lines] if isinstance(lines, list) else []

    @property
    def trained_from(self) -> Mapping[str, Any] | None:
        """The model that the target was before it changed with this draft; None where it did not."""
        origin = self.target.get("trained_from")
        return origin if isinstance(origin, dict) else None

    def save(self, folder: Path, dtype: torch.dtype = torch.float32) -> None:
        """Writes the draft folder; each file is replaced atomically, the description last."""
        folder.mkdir(parents=True, exist_ok=True)
        write_tensors(folder, self.network.state_dict(), dtype)
        document = {
            "kind": self.kind,
            "layer": self.layer,
            "network": described(self.network.config),
            "target": self.target,
            "provenance": self.provenance,
            "evaluation": self.evaluation,
        }
        write_document(folder, document)

    @classmethod
    def load(cls: type[D], folder: Path) -> D:
        """Reads a draft folder, or the best draft of a training run's folder; weights in float32.

        Raises:
            ExportError: a file is missing, unreadable, of another format, or its tensors do not fit.
        """
        folder = draft_folder(folder)
        document = read_document(folder)
        if document["kind"] != cls.kind or (document["layer"] is not None) != cls.has_layer:
            actual = f"{document['kind']!r:.80} at layer {document['layer']}"
            expected = f"{cls.kind!r} at a layer" if cls.has_layer else f"{cls.kind!r} without a layer"
            raise ExportError(f"{folder} holds a draft of kind {actual}, not {expected}")
        try:
            with torch.device("meta"):  # nothing is allocated before the file is known to hold it
                network = cls.untrained(document["network"])
        except (OptionError, TypeError) as error:
            raise ExportError(f"{folder / 'draft.json'}: {error}") from error
        shapes = {name: tuple(value.shape) for name, value in network.state_dict().items()}
        return cls(
            network=with_tensors(network, read_tensors(folder, shapes), folder / TENSORS),
            layer=document["layer"],
            target=document["target"],
            provenance=document.get("provenance") or {},
            evaluation=document.get("evaluation") or {},
        )

    def check_target(self, name: str, fingerprint: str, num_layers: int, hidden_size: int) -> None:
        """Raises ExportError, naming both targets, unless the draft was trained for this one; one of a published
        checkpoint, which does not know its target's weights, must fit its width only."""
        origin = self.trained_from
        if origin is not None and origin.get("fingerprint") == fingerprint:
            raise ExportError(
                f"this draft changed its target while it was trained: it fits {_short(self.target.get('fingerprint'))}, no "
                f"longer {name!r} ({_short(fingerprint)}), where that came from; give --model the folder {MODEL!r} beside "
                f"the draft's {DESCRIPTION}"
            )
        check_identity(self, self.target, name, fingerprint)
        if self.target.get("fingerprint", "") is None:
            _check_name(self.target.get("name"), name)
        outside = self.layer is not None and not 0 < self.layer < num_layers
        if outside or self.network.config.hidden_size != hidden_size:
            place = "" if self.layer is None else f"layer {self.layer}, "
            raise ExportError(
                f"this draft ({place}width {self.network.config.hidden_size}) does not fit "
                f"{name!r} ({num_layers} layers, width {hidden_size})"
            )

    def check_family(self, family: Family) -> None:
        """Raises ExportError where a published checkpoint names the classes of its target, and this is none of them."""
        classes = self.target.get("architectures")
        architecture = family.checkpoint.architecture
        if isinstance(classes, list) and classes and architecture not in classes:
            raise ExportError(
                f"this draft was made for {', '.join(map(str, classes))!s:.80}, {family.checkpoint.source!r} is a {architecture}"
            )

    def checkpoint(self, form: str, verifier: Verifier) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        """(`config.json`, tensors) of the draft in the format `form` of `early_checks.FORMS`, for that target. ExportError where
        the format has no place for it."""
        from .. import kinds_written_as

        raise ExportError(
            f"the format {form!r} has no place for a draft of kind {self.kind!r}, only for {kinds_written_as(form)}"
        )

    def export_notices(self, form: str, family: Family) -> list[str]:
        """Lines for the user where those who read a checkpoint in this format compute otherwise than the draft was trained."""
        return []

    def entry(self, weights_dtype: str) -> dict[str, Any]:
        return super().entry(weights_dtype) | {"weights_dtype": self.precision or weights_dtype}

    def with_precision(self: D, precision: str | None) -> D:
        if precision is not None and not matrices(self.network.state_dict()):
            raise OptionError(
                f"--draft-precision {precision}: {self.name} has no matrix whose rows are whole blocks of {BLOCK} numbers; "
                "leave it out"
            )
        return replace(self, precision=precision)

    def stored_in(self, store: WeightStore, name: str) -> DraftTensors:
        """The draft's tensors under the name `name`, which `store` reads from now on: in its precision, where it has one."""
        tensors = DraftTensors(name, self.network.state_dict(), self.precision)
        store.add_reader(tensors)
        return tensors

    def stored_as(self: D, dtype: str) -> D:
        from ...parity.reference import rounded

        network, kind = copy.deepcopy(self.network), TORCH[dtype]
        whole = {} if self.precision is None else dequantized(network.state_dict(), self.precision, kind)
        rounded(network, kind).load_state_dict(whole, strict=False)
        return replace(self, network=network)


def with_tensors(network: N, tensors: Mapping[str, torch.Tensor], path: Path) -> N:
    """`network`, made on the device "meta", with these tensors of `path`, which have its names and shapes, for inference:
    weights in float32, a trimmed vocabulary's ids as int64. ExportError naming the first that is neither."""
    state = {}
    for name, parameter in network.state_dict().items():
        tensor = tensors[name]
        if parameter.is_floating_point():
            problem = weight_problem(tensor)
            state[name] = tensor if problem else tensor.float()
        else:
            problem = _ids_problem(tensor, network.config)
            state[name] = tensor if problem else tensor.long()
        if problem:
            raise ExportError(
                f"{path}: {name} {problem}; save the draft again, weights in float32, float16 or bfloat16"
            )
    network.load_state_dict(state, assign=True)
    return network.eval()


def _ids_problem(ids: torch.Tensor, config: Any) -> str | None:
    """Why these are not ids of different tokens of the target; None where they are."""
    if problem := plain_problem(ids):
        return problem
    if ids.is_floating_point() or ids.dtype == torch.bool:
        return f"is {dtype_name(ids)}, not whole numbers"
    words = getattr(config, "layer", config).vocab_size
    if not 0 <= int(ids.min()) <= int(ids.max()) < words or len(ids.unique()) != len(ids):
        return f"does not name different tokens of {words}"
    return None


def check_number(what: str, value: object, least: float, most: float) -> None:
    """OptionError unless `value` is a number in that range."""
    if type(value) not in (int, float) or not least <= value <= most:  # type: ignore[operator]
        raise OptionError(f"{what} {value!r:.40} is not a number in {least:g}..{most:g}")


def described(config: Any) -> dict[str, Any]:
    """Options of a network as a folder and a fingerprint have them. Fields that came later, which a `config` names in `added`,
    are left out where they have their default: drafts from before stay what they were."""
    added = set(getattr(config, "added", ()))
    defaults = {one.name: one.default for one in fields(config) if one.name in added}
    values = {one.name: getattr(config, one.name) for one in fields(config)}
    return {
        name: described(value) if is_dataclass(value) else value
        for name, value in values.items()
        if name not in added or value != defaults[name]
    }


def check_identity(draft: Draft, target: Mapping[str, Any], name: str, fingerprint: str) -> None:
    """ExportError unless `target`, of a draft's folder, has this fingerprint, or knows none."""
    from .. import draft_kind

    if target.get("fingerprint", "") not in (fingerprint, None):
        kind = draft_kind(draft.kind)
        raise ExportError(
            f"this draft was trained for {target.get('name')!r:.80} ({_short(target.get('fingerprint'))}), "
            f"not for {name!r} ({_short(fingerprint)}); get one with: {kind.train_command(name, draft.layer)}"
        )


def check_width(what: str, width: object) -> None:
    """OptionError unless `width` can be that of a decoder."""
    if type(width) is not int or not 1 <= width <= WIDEST:
        raise OptionError(f"{what} needs a hidden size in 1..{WIDEST}, not {width!r:.40}")


def _check_name(verifier: object, name: str) -> None:
    """ExportError where a checkpoint was made for the hub's model `verifier`, and the model `name` is another of the hub's;
    a local folder may be either."""
    from ...checkpoint.load import hub_id_of

    made_for = hub_id_of(verifier) if isinstance(verifier, str) else None
    hub_id = hub_id_of(name)
    if made_for is not None and hub_id is not None and made_for.lower() != hub_id.lower():
        raise ExportError(
            f"this draft was made for {made_for:.80}, not for {hub_id}; if both are the same weights, give a local folder of them"
        )


def _short(fingerprint: object) -> str:
    return str(fingerprint)[:19]
