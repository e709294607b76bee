"""`python -m lightning_dlres` is `dlres`: for torchrun, and where the script is not on the path."""

from __future__ import annotations

import sys

from lightning_dlres.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
