"""Robot tabletop scenes: pictures with captions, questions and facts, from (seed, index) alone."""

from .grammar import DESCRIBE, caption
from .parse import ParsedCaption, ParsedObject, parse_caption
from .questions import Question, questions
from .render import render
from .scene import HELDOUT, TRAIN, VALIDATION, Relation, Scene, SceneObject, mirror, sample_scene, split_of
from .score import CaptionScore, score, total_accuracy

__all__ = [
    "DESCRIBE",
    "HELDOUT",
    "TRAIN",
    "VALIDATION",
    "CaptionScore",
    "ParsedCaption",
    "ParsedObject",
    "Question",
    "Relation",
    "Scene",
    "SceneObject",
    "caption",
    "mirror",
    "parse_caption",
    "questions",
    "render",
    "sample_scene",
    "score",
    "split_of",
    "total_accuracy",
]
