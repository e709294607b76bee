"""The process that imports what ranks need and then forks them; see `tests.nursery`."""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import sys
import traceback
from multiprocessing import reduction
from multiprocessing.connection import Connection

from tests.rank_process import die_with, serve

# Of a Python that was not told to import quickly, as this one was.
_USUAL_THRESHOLDS = 700, 10, 10


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--fd", type=int, required=True, help="our end of the pool's pipe")
    parser.add_argument("--parent", type=int, help="die with this process, where the OS can do so")
    options = parser.parse_args()
    if options.parent is not None:
        die_with(options.parent)
    _import()
    connection = Connection(options.fd)
    while True:
        try:
            kind, what = connection.recv()
        except (EOFError, OSError):
            return
        if kind == "fork":
            end = reduction.recv_handle(connection)
            connection.send(_fork(connection, end, what))
        else:
            pid, status = os.waitpid(what, os.WNOHANG)
            connection.send(status if pid else -1)


def _import() -> None:
    import torch

    import lightning_dlres.strategies  # noqa: F401 - and Lightning, which is the expensive part

    torch.set_num_threads(1)
    threads = len(os.listdir("/proc/self/task")) if sys.platform == "linux" else 1
    assert threads == 1, f"imports have started {threads - 1} threads, and forks have none of them"
    # Pages with what is imported by now are never written to, and so stay shared.
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_USUAL_THRESHOLDS)


def _fork(connection: Connection, end: int, log: str) -> int:
    nursery = os.getpid()
    pid = os.fork()
    if pid:
        # Both sides do it: neither knows who is first, and a group is killed at any time.
        with contextlib.suppress(PermissionError):
            os.setpgid(pid, pid)
        os.close(end)
        return pid
    try:
        os.setpgid(0, 0)
        connection.close()
        output = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.close(output)
        die_with(nursery)
        serve(Connection(end))
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


if __name__ == "__main__":
    main()
