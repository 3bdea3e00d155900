"""Reading Hugging Face checkpoints: configuration, tokenizer, processor, and tensors one at a time."""

from .checkpoint import Checkpoint
from .fingerprint import fingerprint
from .load import open_checkpoint
from .tensors import TensorFiles

__all__ = ["Checkpoint", "TensorFiles", "fingerprint", "open_checkpoint"]
