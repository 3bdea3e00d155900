"""Write a manifest's own checksum anew, after an edit of your own.

python -m vlmexport.runtime.bundle.checksum BUNDLE
"""

from __future__ import annotations

import sys
from pathlib import Path

from ..common.errors import VlmexportError
from .manifest_changes import reseal
from .seal import RESEAL


def main(arguments: list[str]) -> int:
    """Write the checksum of the bundles named by `arguments` anew; returns the exit status."""
    if not arguments:
        sys.stderr.write(f"usage: {RESEAL} BUNDLE ...\n")
        return 2
    try:
        for folder in arguments:
            reseal(Path(folder))
    except VlmexportError as error:
        sys.stderr.write(f"vlmexport: {error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
