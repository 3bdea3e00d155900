"""Records to train on and to evaluate with: scenes, image folders, COCO captions, JSONL."""

from .load import load_records
from .records import ImageRef, Record, RecordSet

__all__ = ["ImageRef", "Record", "RecordSet", "load_records"]
