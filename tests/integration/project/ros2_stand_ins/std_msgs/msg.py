from dataclasses import dataclass


@dataclass
class String:
    data: str
