from dataclasses import dataclass


@dataclass
class Image:
    encoding: str
    height: int
    width: int
    step: int
    data: bytes
