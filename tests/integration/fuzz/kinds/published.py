"""Published folders with files missing, doubled, older or contradictory: built, and compared with transformers on the same
folder. What is built must answer as transformers does, without the build's own parity check."""

from __future__ import annotations

import random
import tempfile
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

from tests.integration.fuzz.cases import Case
from tests.integration.fuzz.layout_changes import change_folder
from tests.integration.fuzz.mutate import linked_copy

from .base import call
from .traces import warm

NAMES = (
    "HuggingFaceTB--SmolLM2-135M-Instruct", "meta-llama--Llama-2-7b-chat-hf", "Qwen--Qwen2.5-0.5B-Instruct", "google--flan-t5-base",
    "llava-hf--llava-1.5-7b-hf", "Qwen--Qwen2.5-VL-3B-Instruct", "Salesforce--blip2-opt-2.7b", "nlpconnect--vit-gpt2-image-captioning",
)  # fmt: skip
"""Tied and untied, one container and both, one file and shards, old and new processor files."""

TRACING = 180.0
"""Seconds that a case may take: one whose layers are others is traced."""
CHOICES_BEFORE_TRACING = 3
"""How often a folder is chosen before its layers are traced here, for all later cases."""
TOKENS = 3


class Seeds:
    """Whole folders, with random weights."""

    def __init__(self, folder: Path):
        from tests.support import kept_traces
        from tests.support.published import folders, layouts

        warm()
        kept_traces.install()
        self._chosen: Counter[str] = Counter()
        self._folders = {name: folder / name for name in NAMES}
        for name, path in self._folders.items():
            if not path.is_dir():
                folders.write(layouts.read(name), path)

    def make(self, rng: random.Random, folder: Path) -> Case:
        import transformers

        name = rng.choice(NAMES)
        self._chosen[name] += 1
        if self._chosen[name] == CHOICES_BEFORE_TRACING:
            with tempfile.TemporaryDirectory() as place:
                build(self._folders[name], Path(place) / "bundle")
        model = linked_copy(self._folders[name], folder / "model")
        change_folder(model, rng)

        def serve() -> None:
            # Warnings are no part of a refusal; the commands leave them out, too.
            transformers.logging.set_verbosity_error()
            warnings.simplefilter("ignore")
            build(model, folder / "bundle")
            print(compared(model, folder / "bundle"))

        return Case(call(serve), check=differs, limit=TRACING)


def build(model: Path, output: Path) -> None:
    """A bundle of the folder. VlmexportError where it is refused."""
    from vlmexport.exporter.pipeline import BuildRequest, build_bundle

    build_bundle(BuildRequest(model=str(model), output=output, parity=False, precision="float32"))


def compared(model: Path, bundle: Path) -> str:
    """What a bundle's first tokens are, compared with those of transformers from the folder that it was built from."""
    import torch
    from transformers import GenerationConfig
    from vlmexport.runtime import Session

    from tests.integration.published.test_published import requests
    from tests.support.own_generation import difference
    from tests.support.published.answers import Transformers

    torch.manual_seed(0)
    try:
        own = Transformers(model)
    except Exception as error:
        return f"transformers does not load it: {type(error).__name__}"
    with Session.load(bundle) as session:
        for name in session.bundle.manifest.generation.ignored:  # named to whoever builds and inspects
            setattr(own.model.generation_config, name, getattr(GenerationConfig(), name, None))
        equal = 0
        for asked in requests(own):
            try:
                given = own.inputs(asked)
            except Exception:  # transformers refuses the request: its processor is another release's, say
                continue
            images: Any = list(asked.pictures) or None
            found = session.generate(
                images=images, prompt=asked.prompt or None, max_new_tokens=TOKENS, draft="none"
            )
            if (place := difference(own.model, given, found.tokens, TOKENS)) is not None:
                return f"DIFFERS for {asked.prompt!r}: {place}"
            equal += 1
    return f"equal: {equal} requests"


def differs(status: int, output: str) -> str | None:
    """What is wrong with an answer."""
    said = output.strip().splitlines()[-1:] or [""]
    return said[0][:300] if said[0].startswith("DIFFERS") else None


def prepare(folder: Path) -> Seeds:
    """Whole published folders."""
    return Seeds(folder)
