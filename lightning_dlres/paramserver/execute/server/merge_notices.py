"""Notices of merged keys, over a connection of their own.

A worker sends pushes only a little ahead of the others, and values tell it how far they are. Over a
slow link a value waits behind those before it, and pushes would wait with it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence

import msgspec

from lightning_dlres.core.errors import PeerError
from lightning_dlres.core.wire.message import Message
from lightning_dlres.core.wire.server import Server
from lightning_dlres.paramserver import protocol
from lightning_dlres.paramserver.execute.server.consistency import Answer
from lightning_dlres.paramserver.execute.server.job_workers import JobWorkers


class MergeNoticeSender:
    """Sender of notices to the workers that listen; only for the server's thread.

    Args:
        server: The server's socket.
        members: Workers of the job.
    """

    def __init__(self, server: Server, members: JobWorkers) -> None:
        self._server, self._members = server, members
        # Names of the connections that listen, by worker.
        self._listeners: dict[int, str] = {}

    def listen(self, request: protocol.Request, message: Message) -> None:
        """Send notices over a connection from now on; may be repeated.

        A process that does not take part, or not yet, is ignored. This is no sign of life. A
        request under another name is refused without an answer, which would end the job of the
        worker that has this name.
        """
        name = protocol.listener_name(request.worker, request.incarnation)
        if request.worker >= len(self._members.by_index) or message.peer != name:
            self._server.refusals.note(f"{message.peer!r} sent a request of {name!r}.")
            return
        member = self._members.by_index[request.worker]
        if request.incarnation == member.incarnation and member.is_active:
            self._server.trust(message.connection)
            self._listeners[request.worker] = name

    def tell(self, answers: Iterable[tuple[int, Sequence[Answer]]]) -> None:
        """Tell workers about pushes, each of which has let the server answer several of them.

        Args:
            answers: Key of each push, and the answers.
        """
        notices: dict[str, list[protocol.MergeNotice]] = {}
        for key, of_key in answers:
            for answer in of_key if len(of_key) > 1 else ():
                name = self._listeners.get(answer.worker)
                if name is not None and answer.kind in (protocol.VALUE, protocol.MERGED):
                    notice = protocol.MergeNotice(key=key, number=answer.number)
                    notices.setdefault(name, []).append(notice)
        for name, own in notices.items():
            # A lost notice does no harm: the value itself comes, and is asked for if it is late.
            with contextlib.suppress(PeerError):
                self._server.send(
                    name, protocol.NOTICE, sequence=0, details=msgspec.msgpack.encode(own)
                )
