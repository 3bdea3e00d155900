"""`python -m vlmexport` is the command `vlmexport`."""

import sys

from .runtime.cli import main

if __name__ == "__main__":
    sys.exit(main())
