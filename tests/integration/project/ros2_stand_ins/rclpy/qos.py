from dataclasses import dataclass
from enum import Enum


class ReliabilityPolicy(Enum):
    BEST_EFFORT = 2


@dataclass
class QoSProfile:
    depth: int
    reliability: ReliabilityPolicy
