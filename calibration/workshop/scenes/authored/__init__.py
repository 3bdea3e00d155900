"""The second form of the texts: the same scenes, told in words that 24 hidden authors draw.

The first form (`scenes.grammar`, `scenes.parse`, `scenes.questions`) decides every word by the scene. It stays as long
as a shipped model was trained on it.
"""

from .asking import Asked, answer_value, ask
from .authors import AUTHORS
from .caption import Told, tell
from .floor import Floor, measure_floor
from .plan import PlanCheck
from .reading import check_told_plan, read_caption, score_told

__all__ = [
    "AUTHORS",
    "Asked",
    "Floor",
    "PlanCheck",
    "Told",
    "answer_value",
    "ask",
    "check_told_plan",
    "measure_floor",
    "read_caption",
    "score_told",
    "tell",
]
