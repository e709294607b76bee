"""`python -m lightning_dlres`: the command `dlres`, for torchrun or without the script on PATH."""

from __future__ import annotations

import sys

from lightning_dlres.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
