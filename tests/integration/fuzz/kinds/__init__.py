"""Kinds of hostile inputs: one module each, with `prepare(folder)` → `Seeds` that make cases. One line here.

`Seeds.make(rng, folder)` gives a `Case`; what that reads is written below `folder`, which is empty.
"""

from __future__ import annotations

from . import (
    bundles,
    checkpoints,
    data,
    data_files,
    drafts,
    images,
    merged_reports,
    published,
    published_drafts,
    templates,
    tokenizer_files,
    videos,
    writers,
)  # fmt: skip

KINDS = {
    "bundle": bundles.prepare,
    "signed-bundle": bundles.prepare_signed,
    "image": images.prepare,
    "checkpoint": checkpoints.prepare,
    "draft": drafts.prepare,
    "data": data.prepare,
    "layout": published.prepare,
    "merge-document": merged_reports.prepare,
    "two-writers": writers.prepare,
    "video": videos.prepare,
    "published-draft": published_drafts.prepare,
    "data-file": data_files.prepare,
    "template": templates.prepare,
    "tokenizer": tokenizer_files.prepare,
}
