"""What keeps libraries quiet while a command runs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


@contextlib.contextmanager
def quiet_torch() -> Iterator[None]:
    """Keeps notes and progress bars of PyTorch and transformers off the terminal."""
    import logging
    import os
    import warnings

    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TQDM_DISABLE", "1")
    for name in ("torch.onnx", "torch.export", "onnxscript", "onnx_ir", "transformers"):
        logging.getLogger(name).setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
