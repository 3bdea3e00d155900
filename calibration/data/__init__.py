"""Records to train on and to evaluate with: scenes, folders of pictures, published data sets, JSONL."""

from .load import load_records
from .reading.records import ImageRef, Record, RecordSet

__all__ = ["ImageRef", "Record", "RecordSet", "load_records"]
