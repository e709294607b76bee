"""A channel has one sending end, whose last message is the goodbye."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any, cast

import torch.distributed as dist
from torch import Tensor

from lightning_dlres.core.comm.channel_ends import ChannelLink, ChannelSender
from lightning_dlres.core.comm.mailbox import Channel, Mailbox, SendingEnd
from lightning_dlres.core.trace import Tracer
from lightning_dlres.core.wire import payload
from tests.support.waiting import no_failure


class RecordingGroup:
    """Process group whose sends are complete at once. It records their sizes in bytes."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def send(self, tensors: list[Tensor], rank: int, tag: int) -> RecordingGroup:
        self.sizes += [tensor.numel() for tensor in tensors]
        return self

    def wait(self, timeout: timedelta) -> None:
        """Return: the send is complete. The timeout must not be that of the group."""
        assert timedelta(days=300) < timeout


class InterruptedMailbox(Mailbox):
    """Mailbox in which another thread connects on a channel while its sending end is being made."""

    other: threading.Thread | None = None

    def _new_sending_end(self, destination: int, channel: Channel) -> SendingEnd:
        if self.other is None:
            self.other = threading.Thread(target=self.connect, args=(destination, channel))
            self.other.start()
            # It must wait until this thread has made the end.
            self.other.join(0.2)
            assert self.other.is_alive()
        return super()._new_sending_end(destination, channel)


def test_threads_that_begin_together_share_one_end() -> None:
    group = RecordingGroup()
    mailbox = InterruptedMailbox(
        cast(dist.ProcessGroup, group),
        0,
        ["rank 0", "rank 1"],
        timeout=20.0,
        check=no_failure,
        tracer=Tracer(),
    )
    mailbox.connect(1, Channel.SYNC_PLAN)
    assert mailbox.other is not None
    mailbox.other.join()
    mailbox.close(orderly=True)
    # One end says one goodbye.
    assert len(group.sizes) == 1


def test_nothing_is_sent_after_the_goodbye() -> None:
    group: Any = RecordingGroup()
    sender = ChannelSender(
        ChannelLink(
            group=group,
            rank=1,
            name="rank 1",
            channel="SYNC_REPORT",
            tag=1,
            buffer_bytes=payload.FIRST_FRAME_BYTES,
            tracer=Tracer(),
        )
    )
    sender.put(("report",), *payload.encode([1], ("report",)))
    sender.finish()
    sender.put(("report",), *payload.encode([2], ("report",)))
    sender.thread.join()
    # The second report was dropped. The goodbye has no content.
    report, goodbye = group.sizes
    assert report > goodbye
