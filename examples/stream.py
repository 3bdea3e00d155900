"""Print a caption while it is generated.

python examples/stream.py demo/bundle demo/scene.png
"""

from __future__ import annotations

import argparse
import sys

from vlmexport.runtime import Session, VlmexportError


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("bundle")
    parser.add_argument("image")
    options = parser.parse_args()
    with Session.load(options.bundle) as session:
        for piece in session.stream(image=options.image, max_new_tokens=96):
            print(piece, end="", flush=True)
        print()


if __name__ == "__main__":
    try:
        main()
    except VlmexportError as error:  # one line that names the cause
        sys.exit(str(error))
