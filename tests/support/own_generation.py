"""Whether a bundle decodes what the model's own `generate` does, with what its generation_config asks for."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from vlmexport.exporter.checkpoint import open_checkpoint
from vlmexport.exporter.parity.generation import NEAR_TIE, first_difference
from vlmexport.exporter.pipeline.generation import describe_generation, generation_config
from vlmexport.runtime.bundle.seal import manifest_text


def asking(checkpoint: Path, bundle: Path, folder: Path, **settings: Any) -> tuple[Path, Path]:
    """Copies of a checkpoint and its bundle below `folder` that ask for `settings`, as a build would write them."""
    source, target = folder / "checkpoint", folder / "bundle"
    shutil.copytree(checkpoint, source)
    shutil.copytree(bundle, target)
    path = source / "generation_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **settings}))
    opened = open_checkpoint(source)
    manifest = json.loads((target / "manifest.json").read_text())
    manifest["generation"] = describe_generation(opened)
    ends = generation_config(opened).eos_token_id
    manifest["text"]["eos_token_ids"] = ends if isinstance(ends, list) else [ends]
    (target / "manifest.json").write_text(manifest_text(manifest))
    return source, target


def difference(
    model: Any, inputs: Mapping[str, torch.Tensor], found: Sequence[int], max_new_tokens: int
) -> tuple[int, list[int], list[int]] | None:
    """Greedy tokens `found` for `inputs` against `model.generate`: the first place where they differ and both outputs.

    None where they are equal, or part at a near-tie (the two best processed scores closer than `NEAR_TIE`).
    """
    with torch.no_grad():
        output = model.generate(
            **inputs, do_sample=False, num_beams=1, max_new_tokens=max_new_tokens, pad_token_id=0,
            output_scores=True, return_dict_in_generate=True,
        )  # fmt: skip
    expected = output.sequences[0, -len(output.scores) :].tolist()
    place = first_difference(list(found), expected)
    if place is None:
        return None
    if place < min(len(found), len(expected)):
        best = torch.topk(output.scores[place][0].float(), 2).values
        if float(best[0] - best[1]) < NEAR_TIE:
            return None
    return place, list(found), expected
