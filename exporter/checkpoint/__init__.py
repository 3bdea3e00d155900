"""Reading Hugging Face checkpoints: configuration, tokenizer, processor, and tensors one at a time."""

from .fingerprint import fingerprint
from .load import Checkpoint, open_checkpoint
from .tensors import TensorFiles

__all__ = ["Checkpoint", "TensorFiles", "fingerprint", "open_checkpoint"]
