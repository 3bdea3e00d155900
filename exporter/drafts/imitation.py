"""The imitation draft (FastVLM, arXiv 2510.22641 section 3): a small stateless network after decoder layer n.

A draft folder holds `draft.json` (format below) and `draft.safetensors` (the network's tensors, any float dtype).

    {"format": "vlmexport-draft", "schema_version": 1, "kind": "imitation", "layer": 3,
     "network": {"hidden_size": 128, "num_linear": 2, "activation": "gelu", "norm": "layer_norm", "residual": true},
     "target": {"name": "tiny-blip2-flant5", "fingerprint": "sha256:...", "num_layers": 12},
     "provenance": {...}, "evaluation": {...}}
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor, nn

from ...runtime.errors import ExportError, OptionError

FORMAT = "vlmexport-draft"
SCHEMA_VERSION = 1
ACTIVATIONS: dict[str, type[nn.Module]] = {
    "gelu": nn.GELU,
    "silu": nn.SiLU,
    "relu": nn.ReLU,
    "none": nn.Identity,
}
NORMS = ("layer_norm", "rms_norm", "none")


@dataclass(frozen=True)
class ImitationConfig:
    """Shape of an `ImitationNetwork`; see there."""

    hidden_size: int
    num_linear: int = 2
    activation: str = "gelu"
    norm: str = "layer_norm"
    residual: bool = True

    def __post_init__(self) -> None:
        if self.hidden_size < 1:
            raise OptionError(f"an imitation network needs a positive hidden size, not {self.hidden_size}")
        if self.num_linear not in (1, 2):
            raise OptionError(f"an imitation network has 1 or 2 linear layers, not {self.num_linear}")
        if self.activation not in ACTIVATIONS:
            raise OptionError(
                f"unknown activation {self.activation!r}; choose one of {', '.join(ACTIVATIONS)}"
            )
        if self.norm not in NORMS:
            raise OptionError(f"unknown norm {self.norm!r}; choose one of {', '.join(NORMS)}")


class ImitationNetwork(nn.Module):
    """Maps rows after decoder layer n to rows that enter the target's own final norm and LM head.

    `norm`, then one or two linear layers of the model's width with `activation` between them (after the only
    one there is none), plus the input itself when `residual`. With `residual` the last linear layer starts
    at zero, so that an untrained network equals an early exit.

    Args:
        hidden_size: E, width of the target's decoder.
        num_linear: 1 or 2. activation: a key of `ACTIVATIONS`. norm: one of `NORMS`, on the input.
        residual: add the input to the output.
    """

    def __init__(
        self,
        hidden_size: int,
        num_linear: int = 2,
        activation: str = "gelu",
        norm: str = "layer_norm",
        residual: bool = True,
    ) -> None:
        super().__init__()
        self.config = ImitationConfig(hidden_size, num_linear, activation, norm, residual)
        self.norm: nn.Module = {
            "layer_norm": lambda: nn.LayerNorm(hidden_size, eps=1e-5),
            "rms_norm": lambda: nn.RMSNorm(hidden_size, eps=1e-6),
            "none": nn.Identity,
        }[norm]()
        self.linear = nn.ModuleList([nn.Linear(hidden_size, hidden_size) for _ in range(num_linear)])
        self.activation = ACTIVATIONS[activation]()
        self.residual = residual
        if residual:
            last = self.linear[-1]
            nn.init.zeros_(last.weight)  # type: ignore[arg-type]
            nn.init.zeros_(last.bias)  # type: ignore[arg-type]

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., E] float to [..., E], row by row."""
        rows = self.linear[0](self.norm(hidden))
        for layer in list(self.linear)[1:]:
            rows = layer(self.activation(rows))
        return hidden + rows if self.residual else rows


@dataclass
class ImitationDraft:
    """A trained network with the identity of the one target it fits."""

    network: ImitationNetwork
    layer: int
    target: dict[str, Any]  # name, fingerprint, num_layers
    provenance: dict[str, Any] = field(default_factory=dict)
    evaluation: dict[str, Any] = field(default_factory=dict)

    kind = "imitation"

    @property
    def fingerprint(self) -> str:
        """`sha256:` of the network: its options, names, shapes and float32 values."""
        digest = hashlib.sha256(json.dumps(asdict(self.network.config), sort_keys=True).encode())
        for name, value in sorted(self.network.state_dict().items()):
            digest.update(f"{name}{tuple(value.shape)}".encode())
            digest.update(value.detach().to("cpu", torch.float32).contiguous().numpy().tobytes())
        return f"sha256:{digest.hexdigest()}"

    def save(self, folder: Path, dtype: torch.dtype = torch.float32) -> None:
        """Writes the draft folder; each file is replaced atomically, the description last."""
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {k: v.detach().to("cpu", dtype).contiguous() for k, v in self.network.state_dict().items()}
        (folder / "draft.safetensors.new").write_bytes(
            save(tensors)
        )  # save_file would make it unreadable to others
        (folder / "draft.safetensors.new").replace(folder / "draft.safetensors")
        document = {
            "format": FORMAT,
            "schema_version": SCHEMA_VERSION,
            "kind": self.kind,
            "layer": self.layer,
            "network": asdict(self.network.config),
            "target": self.target,
            "provenance": self.provenance,
            "evaluation": self.evaluation,
        }
        (folder / "draft.json.new").write_text(json.dumps(document, indent=1) + "\n", "utf-8")
        (folder / "draft.json.new").replace(folder / "draft.json")

    @classmethod
    def load(cls, folder: Path) -> ImitationDraft:
        """Reads a draft folder, or the best draft of a training run's folder; weights in float32.

        Raises:
            ExportError: a file is missing, unreadable, of another format, or its tensors do not fit.
        """
        if not (folder / "draft.json").exists() and (folder / "best" / "draft.json").exists():
            folder = folder / "best"
        document = read_draft_document(folder)
        if document["kind"] != cls.kind:
            raise ExportError(f"{folder} holds a draft of kind {document['kind']!r}, not {cls.kind!r}")
        try:
            network = ImitationNetwork(**document["network"])
            tensors = load_file(folder / "draft.safetensors")
            network.load_state_dict({k: v.float() for k, v in tensors.items()})
        except OptionError as error:
            raise ExportError(f"{folder / 'draft.json'}: {error}") from error
        except (SafetensorError, OSError, TypeError, RuntimeError) as error:
            raise ExportError(f"the draft {folder} cannot be read: {str(error).splitlines()[0]}") from error
        return cls(
            network.eval(),
            document["layer"],
            document["target"],
            document.get("provenance", {}),
            document.get("evaluation", {}),
        )

    def check_target(self, name: str, fingerprint: str, num_layers: int, hidden_size: int) -> None:
        """Raises ExportError, naming both targets, unless the draft was trained for this one."""
        if self.target.get("fingerprint") != fingerprint:
            raise ExportError(
                f"this draft was trained for {self.target.get('name')!r} ({_short(self.target.get('fingerprint'))}), "
                f"not for {name!r} ({_short(fingerprint)}); train one with: vlmexport train --model {name} "
                f"--draft imitation --draft-layer {self.layer}"
            )
        if not 0 < self.layer < num_layers or self.network.config.hidden_size != hidden_size:
            raise ExportError(
                f"this draft (layer {self.layer}, width {self.network.config.hidden_size}) does not fit "
                f"{name!r} ({num_layers} layers, width {hidden_size})"
            )


def read_draft_document(folder: Path) -> Mapping[str, Any]:
    """`draft.json` of a draft folder, checked for format and the fields every kind has; raises ExportError."""
    path = folder / "draft.json"
    try:
        document = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise ExportError(
            f"{folder} is not a draft folder: {path} cannot be read ({error.strerror})"
        ) from error
    except ValueError as error:
        raise ExportError(f"{path} is not JSON: {error}") from error
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise ExportError(f"{path} does not say format {FORMAT!r}; give a folder written by vlmexport train")
    if document.get("schema_version") != SCHEMA_VERSION:
        raise ExportError(
            f"{path} has schema version {document.get('schema_version')!r}; this version reads 1"
        )
    for name, kind in (("kind", str), ("layer", int), ("network", dict), ("target", dict)):
        if not isinstance(document.get(name), kind):
            raise ExportError(
                f"{path}: field {name!r} is {document.get(name)!r}, not of type {kind.__name__}"
            )
    return document


def _short(fingerprint: object) -> str:
    return str(fingerprint)[:19]
