"""An EAGLE layer of random numbers for a model: for figures that do not depend on what a layer drafts.

python -m benchmarks.random_eagle MODEL FOLDER [--head-vocabulary N]
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from vlmexport.exporter.checkpoint import fingerprint, open_checkpoint
from vlmexport.exporter.drafts.eagle.eagle import EagleDraft
from vlmexport.exporter.drafts.eagle.eagle_network import EagleConfig, EagleNetwork
from vlmexport.exporter.families.registry import family_for


def random_eagle(model: str, folder: Path, tokens: int | None = None) -> Path:
    """`folder`, with a layer of the model's width and heads that chooses from `tokens` tokens, or by the target's own head;
    one that is there stays."""
    if (folder / "draft.json").is_file():
        return folder
    checkpoint = open_checkpoint(model)
    family = family_for(checkpoint)
    shape, (vocabulary, width) = family.decoder, family.language.head.shape
    torch.manual_seed(0)
    config = EagleConfig(
        width,
        vocabulary,
        shape.num_heads,
        shape.num_kv_heads,
        shape.head_dim,
        -(-8 * width // 3 // 64) * 64,
        head="shared" if tokens is None else "trimmed",
        trimmed=tokens,
    )
    target = {"name": model, "fingerprint": fingerprint(checkpoint), "num_layers": shape.num_layers}
    EagleDraft(network=EagleNetwork(config).eval(), target=target).save(folder)
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="an alias, a folder or a hub id")
    parser.add_argument("folder", type=Path, help="where `build --draft` will find it")
    parser.add_argument("--head-vocabulary", type=int, help="tokens to choose from; default: the model's")
    arguments = parser.parse_args()
    random_eagle(arguments.model, arguments.folder, arguments.head_vocabulary)


if __name__ == "__main__":
    main()
