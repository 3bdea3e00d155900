"""Print a caption while it is generated.

python examples/stream.py demo/bundle demo/scene.png
"""

from __future__ import annotations

import sys

from vlmexport.runtime import Session

with Session.load(sys.argv[1]) as session:
    for piece in session.stream(image=sys.argv[2], max_new_tokens=96):
        print(piece, end="", flush=True)
    print()
