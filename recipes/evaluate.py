"""Evaluates a model folder against what a bundled model must reach, and imitation drafts on its captions by position and by
part of the text, and writes the figures as JSON.

python -m recipes.evaluate FOLDER [--draft DRAFT …] [--json FILE]
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
from vlmexport.exporter.checkpoint import fingerprint, open_checkpoint
from vlmexport.exporter.common.aliases import ALIASES
from vlmexport.exporter.drafts.common.base import Draft
from vlmexport.exporter.drafts.folders import open_draft
from vlmexport.exporter.drafts.imitation.imitation import ImitationDraft
from vlmexport.runtime.common.cpu_count import cores
from vlmexport.runtime.common.errors import OptionError

from .common.captioner import Captioner
from .common.drafts import exits
from .common.evaluation import evaluate, report
from .models import open_captioner
from .precision import DEVICES, device_of


def shipped(folder: Path) -> list[Path]:
    """The imitation drafts that come with the model of this folder and look at each row by itself; none of a model that does
    not ship."""
    aliases = [a for a in ALIASES if a.folder is not None and a.folder.resolve() == folder.resolve()]
    return [f for alias in aliases for f in alias.draft_folders() if by_row(open_draft(f)) is not None]


def by_row(draft: Draft) -> ImitationDraft | None:
    """An imitation draft without attention; None for another."""
    return draft if isinstance(draft, ImitationDraft) and not draft.attends else None


def imitation_drafts(folders: Sequence[Path], model: Path, captioner: Captioner) -> dict[str, ImitationDraft]:
    """The drafts of these folders, by the folders' names.

    Raises:
        OptionError: another kind, a network that looks at more than a row, or two folders of one name, or of an exit's.
        ExportError: no draft, or one of another model than `model`.
    """
    drafts: dict[str, ImitationDraft] = {}
    checkpoint, width = open_checkpoint(str(model)), captioner.model.get_output_embeddings().in_features
    for folder in folders:
        opened = open_draft(folder)
        draft = by_row(opened)
        if draft is None:
            what = f"{opened.kind} with attention" if isinstance(opened, ImitationDraft) else opened.kind
            raise OptionError(
                f"--draft {folder}: {what} is not measured here; `vlmexport eval` measures every kind"
            )
        if folder.name in {*drafts, *exits(captioner)}:
            raise OptionError(f"--draft {folder}: there is a {folder.name!r} already; rename the folder")
        draft.check_target(checkpoint.source, fingerprint(checkpoint), len(captioner.layers), width)
        drafts[folder.name] = draft
    return drafts


def main() -> None:
    """Command line of the evaluation."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument(
        "--draft",
        type=Path,
        action="append",
        help="folder of an imitation draft; may repeat; default: those that come with a bundled model",
    )
    parser.add_argument("--scenes", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=cores())
    parser.add_argument(
        "--device", choices=DEVICES, default="cpu", help="cuda: for models whose recipe can run there"
    )
    parser.add_argument("--json", type=Path, help="also write the result there")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    captioner = open_captioner(options.folder, device_of(options.device))
    folders = shipped(options.folder) if options.draft is None else options.draft
    drafts = imitation_drafts(folders, options.folder, captioner)
    report(evaluate(captioner, options.folder, options.scenes, options.seed, drafts=drafts), options.json)


if __name__ == "__main__":
    main()
