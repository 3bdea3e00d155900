"""Shapes of an imitation network: which a search may try, which to try next, and which of those tried are best.

optuna's tree-structured Parzen estimator proposes shapes; what it proposes is a function of the seed, the number of the trial
and the trials before it alone.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from ...exporter.drafts.imitation.imitation_network import ACTIVATIONS, NORMS
from ..objectives.imitation_options import ImitationOptions
from ..objectives.training_options import flag_of

if TYPE_CHECKING:
    import optuna

ASKED = 20
"""Times that the estimator is asked for a shape that was not tried, before one is drawn of those that are left."""

SPACE: dict[str, tuple[Any, ...]] = {
    "num_linear": (1, 2),
    "norm": NORMS,
    "residual": (True, False),
    "activation": tuple(ACTIVATIONS),
    "attention_heads": (0, 4),
}
"""Option of the network → what is tried. One linear layer has no activation behind it; how many heads share the width of an
attention costs nothing, so that one number stands for all."""


@dataclass(frozen=True)
class Trial:
    """A shape, options of `ImitationConfig`, with the agreement that a short training reached on validation data, and its
    FLOPs per row."""

    shape: Mapping[str, Any]
    agreement: float
    flops: int


def front(trials: Sequence[Trial]) -> list[Trial]:
    """The trials that no other one beats, as good in both objectives and better in one; cheapest first."""
    kept = [
        t
        for t in trials
        if not any(
            o.agreement >= t.agreement
            and o.flops <= t.flops
            and (o.agreement, o.flops) != (t.agreement, t.flops)
            for o in trials
        )
    ]
    return sorted(kept, key=lambda t: (t.flops, -t.agreement))


def searched(shape: Mapping[str, Any], fixed: Mapping[str, Any]) -> list[str]:
    """Names of `SPACE` that a trial chooses, where it chose `shape` so far."""
    linear = shape.get("num_linear")
    return [name for name in SPACE if name not in fixed and not (name == "activation" and linear == 1)]


def shapes(fixed: Mapping[str, Any]) -> list[dict[str, Any]]:
    """All that have the options `fixed`."""
    choices: list[dict[str, Any]] = []
    for values in itertools.product(*SPACE.values()):
        shape = {**dict(zip(SPACE, values, strict=True)), **fixed}
        if "activation" not in searched(shape, fixed):
            shape["activation"] = fixed.get("activation", "none")
        if shape not in choices:
            choices.append(shape)
    return choices


def propose(trials: Sequence[Trial], fixed: Mapping[str, Any], seed: int) -> dict[str, Any] | None:
    """The shape to try after `trials`, with the options `fixed`: one that was not tried; None where all were."""
    import optuna

    tried = [trial.shape for trial in trials]
    left = [shape for shape in shapes(fixed) if shape not in tried]
    if not left:
        return None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(
        directions=["maximize", "minimize"],
        sampler=optuna.samplers.TPESampler(seed=_mixed(seed, len(trials))),
    )
    for past in trials:
        names = searched(past.shape, fixed)
        study.add_trial(
            optuna.trial.create_trial(
                params={name: past.shape[name] for name in names},
                distributions={
                    name: optuna.distributions.CategoricalDistribution(SPACE[name]) for name in names
                },
                values=[past.agreement, float(past.flops)],
            )
        )
    for _ in range(ASKED):
        shape = _suggested(study.ask(), fixed)
        if shape not in tried:
            return shape
    return random.Random(_mixed(seed, len(trials))).choice(left)


def _suggested(trial: optuna.Trial, fixed: Mapping[str, Any]) -> dict[str, Any]:
    shape: dict[str, Any] = {"activation": "none", **fixed}
    for name in SPACE:  # in this order: whether there is an activation follows from the number of layers
        if name in searched(shape, fixed):
            shape[name] = trial.suggest_categorical(name, SPACE[name])
    return {name: shape[name] for name in SPACE}


def _mixed(seed: int, number: int) -> int:
    """A seed of each trial's own, far from those of its neighbours."""
    return (seed * 1_000_003 + number * 7919) % 2**32


def folder_name(shape: Mapping[str, Any]) -> str:
    """Of a trial. Searches from before there was an attention have folders of the same names for shapes without."""
    named = {name: value for name, value in shape.items() if name != "attention_heads" or value}
    return "-".join(str(value).lower() for value in named.values())


def told(shape: Mapping[str, Any]) -> str:
    """The flags of `vlmexport train` that give a network this shape."""
    metadata = {one.name: one.metadata for one in fields(ImitationOptions)}
    words = []
    for name, value in shape.items():
        flag = flag_of(name, metadata[name])
        words.append(f"{flag} {value}" if type(value) is not bool else flag if value else f"--no-{flag[2:]}")
    return " ".join(words)
