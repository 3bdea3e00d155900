"""The draft kind `mtp`: the target's own head for multi-token prediction, read from its checkpoint's tensors `mtp.*`.

Nothing is trained. In a bundle it is the graph `mtp`, whose inputs and outputs are those of `eagle`; it drafts chains.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ....runtime.common.errors import ExportError, OptionError
from ..common.published import CONFIG, PublishedKind, filled, read_config
from .layer_draft import LayerDraft
from .mtp_network import MtpConfig, MtpNetwork
from .traced_layer import traced_with_cache

if TYPE_CHECKING:
    from ...families.common.base import Family
    from ...graphs.traced_module import Template
    from ..common.base import Draft

PREFIX = "mtp."
"""Of the head's tensors in a checkpoint."""

MODEL_TYPE = "qwen3_5"


@dataclass(kw_only=True)
class MtpDraft(LayerDraft):
    """The head of one checkpoint."""

    network: MtpNetwork

    kind = role = "mtp"

    @classmethod
    def untrained(cls, options: Mapping[str, Any]) -> MtpNetwork:
        return MtpNetwork(MtpConfig(**options))

    @property
    def drafter(self) -> Any:
        return self.network

    def traced(self) -> Template:
        from ...families.languages.qwen3_5_text import attention_hooks
        from ...graphs.traced_module import TraceInput

        def run(net: Any, embedded: Any, features: Any, positions: Any, mask: Any, kept: Any) -> Any:
            out = net.layers[0](
                net.joined(embedded, features),
                position_embeddings=net.angles(positions),
                attention_mask=mask,
                past_key_values=kept,
            )
            return net.norm(out)

        config = self.network.config
        shape = ("batch", "width", config.hidden_size)
        inputs = [TraceInput("embedded", shape), TraceInput("features", shape)]
        cache = config.num_kv_heads, config.head_dim
        attention = self.network.layers[0].self_attn
        with attention_hooks():
            return traced_with_cache(self.network, attention, cache, inputs, run, "features_out", config.axes)

    def export_notices(self, family: Family) -> list[str]:
        return []


class MtpKind(PublishedKind):
    """See the module."""

    name = MtpDraft.kind
    title = "the head for multi-token prediction in the model's own checkpoint (Qwen3.5)"
    draft_length = 3
    native = True
    draft = MtpDraft

    def of_model(self, model: str) -> Draft:
        folder = Path(model)
        if not folder.is_dir():
            raise OptionError(
                f"--draft {self.name} reads tensors {PREFIX}* of the model's files: download {model!r:.200}, and give --model its folder"
            )
        if not self.is_published(folder):
            raise OptionError(f"--draft {self.name}: {folder} has no tensors {PREFIX}*; choose another draft")
        return self.load(folder)

    def is_published(self, folder: Path) -> bool:
        path = folder / CONFIG
        if not path.is_file() or read_config(path).get("model_type") != MODEL_TYPE:
            return False
        return f"{PREFIX}fc.weight" in _tensors(folder)

    def read_published(self, folder: Path) -> tuple[Any, Mapping[str, Any]]:
        import torch
        from transformers import Qwen3_5Config

        path = folder / CONFIG
        document = read_config(path)
        text: Any = Qwen3_5Config(**document).text_config
        told = document.get("text_config") or {}
        layers = told.get("mtp_num_hidden_layers", 1)
        if layers != 1 or told.get("mtp_use_dedicated_embeddings"):
            raise ExportError(
                f"{path}: mtp_num_hidden_layers {layers!r:.40} with mtp_use_dedicated_embeddings "
                f"{told.get('mtp_use_dedicated_embeddings')!r:.40} is not supported, only one layer with the model's embeddings"
            )
        rope = text.rope_parameters
        try:
            config = MtpConfig(
                hidden_size=text.hidden_size,
                vocab_size=text.vocab_size,
                num_heads=text.num_attention_heads,
                num_kv_heads=text.num_key_value_heads,
                head_dim=text.head_dim,
                intermediate_size=text.intermediate_size,
                rotary_dim=int(text.head_dim * rope.get("partial_rotary_factor", 1.0)),
                rope_theta=rope["rope_theta"],
                norm_eps=text.rms_norm_eps,
                mrope_section=tuple(rope.get("mrope_section", (11, 11, 10))),
                qkv_bias=text.attention_bias,
            )
            with torch.device("meta"):
                network = MtpNetwork(config)
        except (OptionError, TypeError) as error:
            raise ExportError(f"{path}: {error}") from error
        files = _tensors(folder)
        tensors = {name.removeprefix(PREFIX): files.read(name) for name in files if name.startswith(PREFIX)}
        found = filled(network, tensors, path, "those of one layer")
        return found, {"architectures": document.get("architectures")}


def _tensors(folder: Path) -> Any:
    from ...checkpoint.tensors import TensorFiles

    return TensorFiles(folder)
