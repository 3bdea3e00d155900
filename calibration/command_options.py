"""The options of `train`, `search`, `eval` and `quantize` beside those of the draft kinds, and what `generate-data` shares."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from ..runtime.commands.options import thread_count
from ..runtime.common.options import Choice, File, Integer, Number, Switch, Text, Texts
from .common import help_texts
from .objectives import KINDS
from .search import KINDS as SEARCHED

if TYPE_CHECKING:
    from .data.reading.records import RecordSet

AnswerLimit = Annotated[
    int, Integer(low=2, metavar="N", help="Limit of every answer; cut answers are counted.")
]
Model = Annotated[
    str, Text(group="Input", metavar="ALIAS|DIR|HUB_ID", help="The target: alias, folder or hub id.")
]
Data = Annotated[
    list[str], Texts(group="Input", metavar="DATA", help=f"{help_texts.DATA}. Repeat for several.")
]
Inside = Annotated[Path | None, File(group="Input", expert=True, metavar="FOLDER", help=help_texts.INSIDE)]
"""Options of several commands."""


@dataclass(frozen=True, kw_only=True)
class DataOptions:
    """The target, and what it reads."""

    model: Model
    data: Data
    limit: Annotated[
        int | None, Integer(group="Input", metavar="N", help="Use the first N records, also of --validation.")
    ] = None
    prompt: Annotated[str, Text(group="Input", expert=True, metavar="TEXT", help=help_texts.PROMPT)] = ""
    strict: Annotated[
        bool, Switch(group="Input", expert=True, help="Fail at the first bad record in place of skipping it.")
    ] = False
    inside: Inside = None

    def records(self, names: list[str] | None = None) -> RecordSet:
        """What `--data`, or other `names`, holds. Raises `InputError`, `OptionError`."""
        from .data import load_records

        return load_records(names or self.data, self.strict, self.prompt, self.limit, self.inside)


@dataclass(frozen=True, kw_only=True)
class ValidationData(DataOptions):
    """With data that the result is chosen by or measured on."""

    validation: Annotated[
        list[str],
        Texts(
            group="Input", metavar="DATA",
            help="Data to choose or measure the result by. Default: the last part of --data. Repeat for several.",
        ),
    ] = field(default_factory=list)  # fmt: skip

    def held_out(self) -> RecordSet | None:
        """What `--validation` holds; None without it."""
        return self.records(self.validation) if self.validation else None


@dataclass(frozen=True, kw_only=True)
class MachineOptions:
    """What computes."""

    device: Annotated[
        str, Text(group="Engine", metavar="auto|cpu|cuda[:N]", help="What PyTorch computes on.")
    ] = "auto"
    threads: Annotated[int | None, thread_count("torch's choice; one for small models in `eval`")] = None


@dataclass(frozen=True, kw_only=True)
class OutputFolder:
    """Where the result goes."""

    out: Annotated[Path, File(flag="-o --out", group="Output", metavar="DIR", help="Folder for the result.")]


@dataclass(frozen=True, kw_only=True)
class TrainRun(OutputFolder):
    """What is trained, and how the run is kept."""

    draft: Annotated[str, Text(group="Training", metavar="KIND", help=f"Draft kind: {', '.join(KINDS)}.")] = (
        next(iter(KINDS))
    )
    preset: Annotated[
        str | None,
        Text(
            group="Training", expert=True, metavar="NAME",
            help="Loss weights of a paper. FastVLM's table 1: our, our+cs, our+cs+kd.",
        ),
    ] = None  # fmt: skip
    search: Annotated[
        int | None,
        Integer(
            low=1, group="Training", expert=True, metavar="N",
            help="Train N imitation networks of other shapes, and say which are best in agreement and FLOPs. Shape options that "
            "are given stay fixed.",
        ),
    ] = None  # fmt: skip
    cache_features: Annotated[
        Path | None,
        File(
            group="Output",
            metavar="DIR",
            help="Keep the target's hidden states here. Epochs then cost little.",
        ),
    ] = None
    cache_dtype: Annotated[
        str,
        Text(
            group="Output",
            expert=True,
            metavar="float16|float32",
            help="Type of what --cache-features keeps.",
        ),
    ] = "float16"
    eval_every: Annotated[
        int, Integer(low=1, group="Training", expert=True, metavar="N", help="Steps between validations.")
    ] = 250
    save_every: Annotated[
        int, Integer(low=1, group="Output", expert=True, metavar="N", help="Steps between saved states.")
    ] = 100
    restart: Annotated[bool, Switch(group="Output", help="Do not continue the run in --out.")] = False


@dataclass(frozen=True, kw_only=True)
class SearchSettings(OutputFolder):
    """How many candidates are looked at, and how they draft."""

    draft: Annotated[str, Text(metavar="KIND", help=f"Draft kind: {', '.join(SEARCHED)}.")] = next(
        iter(SEARCHED)
    )
    trials: Annotated[int, Integer(low=1, metavar="N", help="Candidates to look at.")] = 200
    seed: Annotated[int, Integer(metavar="N", help="Seed of the candidates that are drawn.")] = 0
    draft_length: Annotated[
        int, Integer(low=1, group="Speculation", metavar="N", help="Most drafted tokens of a cycle.")
    ] = 8
    confidence_threshold: Annotated[
        float,
        Number(
            group="Speculation", metavar="P",
            help="Threshold of a request's first cycle. It then follows what was accepted.",
        ),
    ] = 0.8  # fmt: skip
    max_new_tokens: AnswerLimit = 96


@dataclass(frozen=True, kw_only=True)
class EvalSettings:
    """What is measured, and what is written."""

    draft: Annotated[
        list[str],
        Texts(
            group="Speculation", metavar="DIR|KIND@N", help="A draft's folder, or KIND@N. Repeat for several."
        ),
    ] = field(default_factory=list)
    draft_length: Annotated[
        int, Integer(low=1, group="Speculation", metavar="N", help="Tokens drafted per cycle.")
    ] = 5
    task: Annotated[
        str,
        Text(
            metavar="TASK",
            help="Judge the answers too: captions, vqa, choices, exact, yes-no. auto: what fits the data. none.",
        ),
    ] = "none"  # fmt: skip
    bundle: Annotated[
        Path | None,
        File(
            group="Engine", metavar="DIR", help="Predict speed-ups by the pass times that this bundle holds."
        ),
    ] = None
    given_text: Annotated[
        bool,
        Switch(group="Input", expert=True, help="Use the data's texts in place of the target's own answers."),
    ] = False
    max_new_tokens: AnswerLimit = 96
    batch_size: Annotated[
        int,
        Integer(
            low=1, group="Engine", expert=True, metavar="N",
            help="Records, or choices of one, that go through the target together. Halved when a GPU's memory runs out.",
        ),
    ] = 64  # fmt: skip
    plot: Annotated[
        Path | None,
        File(
            group="Output", metavar="FILE", help="Plot acceptance by position, depth and rank into this file."
        ),
    ] = None
    answers: Annotated[
        Path | None,
        File(
            group="Output", metavar="FILE", help="Write the judged answers into this file, a JSON line each."
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class QuantizeSettings(OutputFolder):
    """Which matrices become integers, and how they are chosen."""

    weights: Annotated[
        str,
        Text(
            group="Output", metavar="KIND[,PART=KIND…]",
            help="int4, int8 or float; of parts by the name of a module: int4,head=int8,down_proj=int8.",
        ),
    ] = "int4"  # fmt: skip
    max_loss: Annotated[
        float | None,
        Number(
            group="Output", metavar="KL",
            help="Most KL divergence to the float model per token of held-out text. The groups of matrices that matter most keep 8 "
            "bits until it is met.",
        ),
    ] = None  # fmt: skip
    samples: Annotated[
        int, Integer(low=1, group="Input", metavar="N", help="Records of --data to calibrate on, at most.")
    ] = 128
    max_tokens: Annotated[
        int, Integer(low=1, group="Input", metavar="N", help="Longest text of a record. The rest is cut off.")
    ] = 512
    method: Annotated[
        str,
        Choice(
            group="Output", expert=True, metavar="gptq|rounding", choices=("gptq", "rounding"),
            help="gptq: integers that make up for each other's errors. rounding: the nearest.",
        ),
    ] = "gptq"  # fmt: skip
