"""Facts that a target's captions of scenes get right."""

from __future__ import annotations

from dataclasses import replace

from ..data.reading.records import RecordSet
from ..data.scenes import sample_scene, score_told, total_accuracy
from ..evaluation.run import answered
from ..generation.torch_answers import TorchAnswers
from ..targets.target import Target
from .layerwise import Report

LONGEST = 160
"""Tokens of a caption."""


def facts_of(target: Target, records: RecordSet, report: Report = lambda line: None) -> float | None:
    """The share of right facts (object, colour, relation) in the target's own greedy captions of the records' pictures; None for
    records that are not captions of scenes."""
    scenes = [
        record.image.scene
        for record in records
        if record.image is not None and record.image.scene is not None and record.image.shown == "picture"
    ]
    if records.task != "captions" or len(scenes) < len(records):
        return None
    asked = replace(records, records=[replace(record, tokens=None) for record in records])
    answers = TorchAnswers(target)
    texts = [answers.text(record.tokens or ()) for record in answered(target, asked, LONGEST, report)]
    told = zip(texts, scenes, strict=True)
    return total_accuracy(score_told(text, sample_scene(*scene)) for text, scene in told)
