"""Process of one rank of `tests.support.rank_pool`, which runs one job after another.

After each job it restores the process-wide state, because the next test must find the process as if
it had just started.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib
import logging
import operator
import os
import pickle
import queue
import random
import signal
import sys
import threading
import time
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tests.support.rank_messages import Clean, Job, Raised, Ready, Returned, Spent
from tests.support.rank_pool import RankContext

# Time in seconds in which the threads of a job have to end after it.
THREAD_SECONDS = 1.0


def main() -> None:
    """Serve the connection whose file descriptor is the argument of the program."""
    serve(Connection(int(sys.argv[1])))


def serve(connection: Connection) -> None:
    """Answer the messages of the pool, until `_receive` ends the process with the pool."""
    faulthandler.enable()
    inbox: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(connection, inbox), daemon=True).start()
    state = _ProcessState()
    _answer(connection, Ready())
    while True:
        message = pickle.loads(inbox.get())
        if isinstance(message, Job):
            _answer(connection, _run(message))
        elif isinstance(message, Clean):
            try:
                state.restore()
                _answer(connection, Ready() if state.threads_ended() else Spent())
            except Exception as error:
                _answer(connection, _raised(error))


def _run(job: Job) -> Returned | Raised:
    import numpy
    import torch

    from tests.support.rank_environment import PoolEnvironment

    try:
        os.chdir(job.tmp)
        # A seed per rank, so that code that needs a common seed fails without one.
        random.seed(job.rank)
        numpy.random.seed(job.rank)
        torch.manual_seed(job.rank)
        context = RankContext(
            rank=job.rank,
            world_size=job.world_size,
            port=job.port,
            environment=PoolEnvironment(job.world_size, job.rank, job.port),
            tmp=Path(job.tmp),
        )
        fn: Any = operator.attrgetter(job.qualname)(importlib.import_module(job.module))
        args, kwargs = pickle.loads(job.arguments)
        # Do not use Connection.send, which passes tensors as shared memory of this process.
        return Returned(pickle.dumps(fn(context, *args, **kwargs)))
    except BaseException as error:
        return _raised(error)


def _raised(error: BaseException) -> Raised:
    return Raised(type(error).__name__, str(error), "".join(traceback.format_exception(error)))


def _answer(connection: Connection, message: object) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    connection.send_bytes(pickle.dumps(message))


def _receive(connection: Connection, inbox: queue.SimpleQueue[bytes]) -> None:
    """Receive messages; kill this process when the test process has ended.

    It runs in a thread of its own, which notices the end even while a job runs or hangs.
    """
    while True:
        try:
            inbox.put(connection.recv_bytes())
        except (EOFError, OSError):
            # Kill the process group, because children of a job must not outlive it. The pool has
            # given this process a group of its own.
            os.killpg(os.getpgrp(), signal.SIGKILL)


class _ProcessState:
    """Process-wide state before the first job, which `restore` brings back after each job."""

    def __init__(self) -> None:
        import torch
        from lightning.pytorch.utilities.rank_zero import rank_zero_only

        torch.set_num_threads(1)
        self._rank_zero = rank_zero_only
        self._rank = rank_zero_only.rank
        self._environ = dict(os.environ)
        self._directory = os.getcwd()
        self._loggers = {logger: (list(logger.handlers), logger.level) for logger in _loggers()}
        self._disabled_log_level = logging.root.manager.disable
        self._streams = (sys.stdout, sys.stderr)
        self._threads = set(threading.enumerate())
        # Exclude the imported modules from the garbage collections after each job.
        gc.collect()
        gc.freeze()

    def restore(self) -> None:
        import torch

        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
        # A job may have made Lightning's loggers quiet.
        logging.disable(self._disabled_log_level)
        for logger in _loggers():
            handlers, level = self._loggers.get(logger, ([], logging.NOTSET))
            logger.setLevel(level)
            for handler in list(logger.handlers):
                if handler not in handlers:
                    logger.removeHandler(handler)
                    handler.close()
        sys.stdout, sys.stderr = self._streams
        gc.collect()
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()
        torch.set_default_dtype(torch.float32)
        torch.set_grad_enabled(True)
        torch.set_num_threads(1)
        torch.use_deterministic_algorithms(False)
        torch.__future__.set_swap_module_params_on_conversion(False)
        # Lightning never resets the rank. A later Trainer on one device would not be rank zero.
        self._rank_zero.rank = self._rank
        os.chdir(self._directory)
        for name in set(os.environ) - set(self._environ):
            del os.environ[name]
        os.environ.update(self._environ)
        # Exclude the modules that this job has imported from the next collection.
        gc.freeze()

    def threads_ended(self) -> bool:
        """Return True if all threads of the job end within `THREAD_SECONDS`."""
        deadline = time.monotonic() + THREAD_SECONDS
        # Two kinds last as long as the process: those of autograd, which are "dummy" threads, and
        # pyzmq's, which frees the memory of messages that were sent without a copy.
        left = [
            thread
            for thread in set(threading.enumerate()) - self._threads
            if not thread.name.startswith("Dummy-")
            and type(thread).__name__ != "GarbageCollectorThread"
        ]
        for thread in left:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in left)


def _loggers() -> list[logging.Logger]:
    loggers = logging.root.manager.loggerDict.values()
    return [logging.root, *(item for item in loggers if isinstance(item, logging.Logger))]
