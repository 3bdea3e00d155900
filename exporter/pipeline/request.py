"""What `vlmexport build` is asked for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

from ...runtime.common.errors import OptionError
from ...runtime.common.options import Custom, File, Integer, Switch, Text, Texts, declared_options
from ..common.precisions import precision_name
from ..common.sizes import parse_layers, parse_size
from ..drafts import KINDS
from ..families.common.layer_skip import Sublayers
from ..quantization.choice import parse_weights

TEXT, ROUND = 512, 64
"""Positions of text that a bundle holds unasked, and what its length is rounded up to."""

Progress = Callable[..., None]
"""`progress(stage, done, total)`; stages are graphs, checks, parity, plans (counts), weights and checksums (bytes). Of plans
the fourth argument is the graph whose plan is next, "" behind the last."""

BACKENDS = "tensorrt-rtx|tensorrt"
"""Metavar of what plans are built with."""

ADAPTER = Text(
    group="Input", metavar="DIR|HUB_ID|none",
    help="Adapter of peft (LoRA, …) to merge into the model's weights. `none` ignores one that lies beside them.",
)  # fmt: skip
PLAN_TARGET = Text(
    group="Engine", metavar="SM",
    help="GPU of the plans: sm75 sm80 sm86 sm89 sm120 sm121, or native. Default: native for tensorrt, else sm86.",
)  # fmt: skip
PLAN_PRECISION = Text(
    group="Engine", metavar="auto|fp16|bf16|fp32", help="Precision of the plans."
)  # fmt: skip
LOWERING = Text(
    group="Engine", metavar="auto|native|portable",
    help="Lowering of the plans: portable where TensorRT has no cache update (before 10.15).",
)  # fmt: skip
"""Options that `verify` or `compile` have, too; `build` shows most of them with `--help-all` only."""


def default_target(backend: str | None) -> str:
    """What plans are built for where no target is named."""
    return "native" if backend == "tensorrt" else "sm86"


@dataclass(frozen=True, kw_only=True)
class Count(Integer):
    """An integer whose error is that of `BuildRequest.check`."""

    def _check(self, name: str, value: Any) -> int:
        if not self.low <= value <= (self.high or value):
            raise OptionError(f"{name} {value} is out of range {self.low}..{self.high}")
        return value


def _layers(name: str, value: Any) -> list[int]:
    return parse_layers(value, name) if isinstance(value, str) else value


def _skipped_layers(sublayer: str) -> Custom:
    return Custom(
        checked=_layers, group="Speculation", expert=True, metavar="N,N,…",
        help=f"For --draft draft-and-verify: the layers, from 0, whose {sublayer} the draft leaves out.",
    )  # fmt: skip


def _size(name: str, value: Any) -> int:
    return parse_size(value, name) if isinstance(value, str) else value


@dataclass(kw_only=True)
class BuildRequest:
    """What to build: the one declaration, of which `vlmexport build` makes its flags. Lengths are in tokens. `max_length`
    None is `TEXT` and room for a picture, as far as the model's positions go. `draft_precision` is as
    `drafts.selection.set_precisions` takes it."""

    model: Annotated[
        str, Text(group="Input", metavar="ALIAS|DIR|HUB_ID", help="What to export. See `vlmexport models`.")
    ]
    output: Annotated[
        Path, File(flag="-o --output", group="Output", metavar="DIR", help="Folder of the bundle.")
    ]
    adapter: Annotated[str | None, replace(ADAPTER, expert=True)] = None
    drafts: Annotated[
        list[str],
        Texts(
            flag="--draft", group="Speculation", metavar="KIND|PATH",
            help=f"{', '.join(KINDS)}, none, or a draft's folder. The first is the default. Repeat for several.",
        ),
    ] = field(default_factory=list)  # fmt: skip
    draft_layer: Annotated[
        int | None,
        Integer(
            group="Speculation", metavar="N",
            help="Cut the decoder after N layers. Drafts start there.",
        ),
    ] = None  # fmt: skip
    skip_attention: Annotated[list[int] | None, _skipped_layers("attention")] = None
    skip_mlp: Annotated[list[int] | None, _skipped_layers("MLP")] = None
    draft_precision: Annotated[
        list[str],
        Texts(
            group="Speculation", expert=True, metavar="[NAME=]int8|int4",
            help="Store the matrices of drafts as integers: cheaper drafts, the same tokens. With a name: of that draft alone. "
            "Repeat for several.",
        ),
    ] = field(default_factory=list)  # fmt: skip
    max_length: Annotated[
        int | None,
        Count(
            low=2, high=1 << 20, metavar="N",
            help="Longest sequence in tokens, prompt included. Default: 512, and room for a picture in the prompt.",
        ),
    ] = None  # fmt: skip
    max_batch: Annotated[
        int, Count(low=1, high=1024, metavar="N", help="Most sequences that a session may decode together.")
    ] = 16
    max_width: Annotated[
        int,
        Count(
            low=2,
            high=1024,
            expert=True,
            metavar="N",
            help="Most new positions in one pass: drafted tokens and one more.",
        ),
    ] = 16
    verify_width: Annotated[
        int | None,
        Count(
            low=2, high=1024, group="Engine", expert=True, metavar="W",
            help="Fixed width of every forward pass, for kernels that round differently at different widths. Default: passes "
            "are as wide as they need to be.",
        ),
    ] = None  # fmt: skip
    max_source: Annotated[int, Count(low=1, high=1 << 20, flag=None)] = 512
    max_pixels: Annotated[
        int | None,
        Count(
            low=1, high=1 << 32, group="Input", expert=True, metavar="N",
            help="Shrink larger pictures and frames to so many pixels, or cut them into fewer tiles, for models whose pictures "
            "differ in tokens (qwen2.5-vl: one for every 784).",
        ),
    ] = None  # fmt: skip
    precision: Annotated[
        str,
        Text(
            group="Engine", metavar="fp32|fp16|bf16",
            help="Type of weights, caches and arithmetic. A CPU computes in float32 all the same.",
        ),
    ] = "float32"  # fmt: skip
    weights: Annotated[
        str | None,
        Text(
            group="Engine", metavar="int8|int4[,PART=KIND…]",
            help="Store the matrices of the language model as integers: int4, or int4,head=int8,down_proj=int8. The quantized "
            "model is the target then: drafts are exact against it.",
        ),
    ] = None  # fmt: skip
    weights_block: Annotated[
        int,
        Count(
            low=32, high=128, group="Engine", expert=True, metavar="32|64|128",
            help="Inputs that share a scale with --weights.",
        ),
    ] = 32  # fmt: skip
    link_weights: Annotated[
        bool,
        Switch(
            group="Output", expert=True,
            help="Keep the model's tensors in its own safetensors files, as hard links in the bundle: no second copy on the "
            "disk. For tensors that are stored in --precision.",
        ),
    ] = False  # fmt: skip
    default_prompt: Annotated[
        str | None, Text(group="Input", metavar="TEXT", help="Prompt of requests that give none.")
    ] = None
    force: Annotated[bool, Switch(group="Output", help="Replace an existing bundle.")] = False
    parity: Annotated[bool, Switch(flag=None)] = True
    parity_memory: Annotated[
        int | None,
        Custom(
            checked=_size, group="Engine", expert=True, metavar="SIZE",
            help="Compare layer by layer when the parameters take more memory than this. Default: when they would not fit.",
        ),
    ] = None  # fmt: skip
    backend: Annotated[
        str | None, Text(group="Engine", metavar=BACKENDS, help="Also build TensorRT plans.")
    ] = None
    target: Annotated[str | None, PLAN_TARGET] = None
    plan_precision: Annotated[str, replace(PLAN_PRECISION, expert=True)] = "auto"
    lowering: Annotated[str, replace(LOWERING, expert=True)] = "auto"

    def __post_init__(self) -> None:
        self.output = Path(self.output)
        self.drafts, self.draft_precision = list(self.drafts), list(self.draft_precision)

    @property
    def plan_target(self) -> str:
        """What plans are built for."""
        return self.target or default_target(self.backend)

    @property
    def skip(self) -> Sublayers | None:
        """What a draft is to leave out of the target. OptionError for what names no layers."""
        if self.skip_attention is None and self.skip_mlp is None:
            return None
        return Sublayers.of(self.skip_attention or [], self.skip_mlp or [])

    @property
    def length(self) -> int:
        """`max_length`, which `prepare` fills in."""
        assert self.max_length is not None, "of a prepared request"
        return self.max_length

    def check(self) -> None:
        """Gives `precision` its full name; OptionError for a value that no model could be built with."""
        self.precision = precision_name(self.precision)
        for name, option in declared_options(BuildRequest).items():
            if isinstance(option, Count):
                option.check(f"--{name.replace('_', '-')}", getattr(self, name))
        if self.weights is not None:
            self.weights = str(parse_weights(self.weights))
            if self.link_weights:
                raise OptionError(
                    "--link-weights keeps the checkpoint's floats, --weights stores integers; leave one of them out"
                )
        if self.weights_block & (self.weights_block - 1):
            raise OptionError(f"--weights-block {self.weights_block} is no power of two; give 32, 64 or 128")
        if self.skip_attention is not None or self.skip_mlp is not None:
            Sublayers.of(self.skip_attention or [], self.skip_mlp or [])  # refuses what names no layers
        if self.verify_width is not None and self.verify_width > self.max_width:
            raise OptionError(
                f"--verify-width {self.verify_width} is above --max-width {self.max_width}; no pass is wider than that"
            )
