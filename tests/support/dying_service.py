"""Program whose service thread dies."""

from __future__ import annotations

import threading

from lightning_dlres.core.host.service import start_service


def main() -> None:
    """Start the service and wait forever."""
    start_service(_die, "the service")
    threading.Event().wait()


def _die() -> None:
    raise KeyError("bug")
