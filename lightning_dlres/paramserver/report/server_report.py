"""State of the servers at the end of training."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_dlres.core.wire.keys import CurveKeys
from lightning_dlres.paramserver.execute.status_client import ServerSample, StatusClient
from lightning_dlres.paramserver.report.status_tables import status_tables

# Seconds in which a server must answer. Without an answer, the table shows the reason.
_WAIT_SECONDS = 5.0


class ServerReport:
    """Report of the servers of a run, with rates between its start and its end.

    Args:
        addresses: Address of each server.
        curve: Keys of this client; None without encryption.
        server_keys: Public key of each server; empty without encryption.

    Attributes:
        text: The report as Markdown; None before the end.
    """

    def __init__(
        self, addresses: Sequence[str], curve: CurveKeys | None, server_keys: Sequence[bytes]
    ) -> None:
        self._curve = curve
        self._servers = [
            (address, server_keys[index] if server_keys else None)
            for index, address in enumerate(addresses)
        ]
        self._before = self._samples()
        self.text: str | None = None

    def finish(self) -> None:
        """Make the report; the servers still run."""
        tables = status_tables(self._samples(), self._before)
        self.text = f"At the end of training, with rates over all of it.\n\n```\n{tables}\n```"

    def _samples(self) -> list[ServerSample]:
        samples = []
        for address, key in self._servers:
            client = StatusClient([address], self._curve, key)
            try:
                samples += client.ask(_WAIT_SECONDS)
            finally:
                client.close()
        return samples
