"""Robot tabletop scenes: pictures with captions, questions and facts, told in words that 24 hidden authors draw."""

from .asking import DESCRIBE, Asked, answer_value, ask
from .authors import AUTHORS
from .caption import Told, tell
from .floor import Floor, measure_floor
from .plan import PlanCheck
from .reading import check_told_plan, read_caption, score_told
from .render import render
from .scene import HELDOUT, TRAIN, VALIDATION, Relation, Scene, SceneObject, mirror, sample_scene, split_of
from .score import CaptionScore, ParsedCaption, ParsedObject, total_accuracy

__all__ = [
    "AUTHORS",
    "DESCRIBE",
    "HELDOUT",
    "TRAIN",
    "VALIDATION",
    "Asked",
    "CaptionScore",
    "Floor",
    "ParsedCaption",
    "ParsedObject",
    "PlanCheck",
    "Relation",
    "Scene",
    "SceneObject",
    "Told",
    "answer_value",
    "ask",
    "check_told_plan",
    "measure_floor",
    "mirror",
    "read_caption",
    "render",
    "sample_scene",
    "score_told",
    "split_of",
    "tell",
    "total_accuracy",
]
