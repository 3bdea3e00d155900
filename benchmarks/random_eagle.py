"""An EAGLE layer of random numbers for a model: for figures that do not depend on what a layer drafts.

python benchmarks/random_eagle.py MODEL FOLDER
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from vlmexport.exporter.checkpoint import fingerprint, open_checkpoint
from vlmexport.exporter.drafts.eagle import EagleDraft
from vlmexport.exporter.drafts.eagle_network import EagleConfig, EagleNetwork
from vlmexport.exporter.families.registry import family_for


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="an alias, a folder or a hub id")
    parser.add_argument("folder", type=Path, help="where `build --draft` will find it")
    arguments = parser.parse_args()
    source = open_checkpoint(arguments.model)
    family = family_for(source)
    vocabulary, width = family.language.head.shape
    shape = family.decoder
    torch.manual_seed(0)
    config = EagleConfig(
        width, vocabulary, shape.num_heads, shape.num_kv_heads, shape.head_dim, 4 * width, head="shared"
    )
    target = {"name": arguments.model, "fingerprint": fingerprint(source), "num_layers": shape.num_layers}
    EagleDraft(network=EagleNetwork(config).eval(), target=target).save(arguments.folder)


if __name__ == "__main__":
    main()
