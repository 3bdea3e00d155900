"""One way through a build. The manifest is one typed object, `runtime.bundle.manifest.Manifest`; every step completes
it, and it is checked as a whole and written once, at the end:

    request    what is asked for, and the report                         (no manifest yet)
    prepare    model, drafts, and everything that is cheap to refuse     limits, text, image, decoder, drafts, policy
               (`checks`: sample requests, shapes, disk space)
    identify   the weights are fetched and read                          model.fingerprint
    export     graphs that refer to weights                              graphs, tensors, weights, model.parameters
    build      the way itself: weights, graphs and tokenizer are written, then compared, then compiled  parity, plans
    output     (a package beside) the folder that replaces another only when it is complete  files

`dry_run` goes as far as `export`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .request import BuildRequest

if TYPE_CHECKING:
    from .build import build_bundle
    from .report import BuildReport

__all__ = ["BuildReport", "BuildRequest", "build_bundle"]


def __getattr__(name: str) -> Any:
    """`build_bundle` needs PyTorch, a report pydantic; a request needs neither."""
    if name == "build_bundle":
        from .build import build_bundle

        return build_bundle
    if name == "BuildReport":
        from .report import BuildReport

        return BuildReport
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
