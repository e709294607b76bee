"""Command `dlres ps`: serve parameters, show the state of servers, and write encryption keys."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.live import Live
from rich.text import Text

from lightning_dlres.cli.serving import (
    add_key_options,
    add_serving_options,
    stop_event,
)
from lightning_dlres.core.checks import require_both
from lightning_dlres.core.errors import ConfigError, DlresError, got_expected
from lightning_dlres.core.host.lightweight_process import lightweight_command
from lightning_dlres.core.units import format_bytes, parse_seconds
from lightning_dlres.core.wire.keys import load_keys, load_public_key

if TYPE_CHECKING:
    from lightning_dlres.paramserver.execute.status_client import ServerSample
    from lightning_dlres.paramserver.protocol import ServerStatus

# Default port of server 0.
_PORT = 5600
# Longest wait for the states of servers, in seconds.
_STATUS_SECONDS = 3.0


def parameter_server(options: Sequence[str]) -> int:
    """Run a subcommand and return its exit status.

    Args:
        options: Arguments of the command line after `dlres ps`.

    Raises:
        ConfigError: If an argument has a bad value.
    """
    settings = _parser().parse_args(options)
    if settings.command == "serve":
        # Replace this process by one that does not import Lightning, to leave memory to parameters.
        sys.stdout.flush()
        command = lightweight_command("lightning_dlres.cli.parameter_server:serve_main", *options)
        os.execv(command[0], command)
    run: Callable[[argparse.Namespace], int] = settings.run
    return run(settings)


def serve_main() -> int:
    """Run `dlres ps serve` with the arguments of this process; return the exit status."""
    try:
        return _serve(_parser().parse_args(sys.argv[1:]))
    except DlresError as error:
        print(f"dlres: {error}", file=sys.stderr)
        return 2


def _serve(settings: argparse.Namespace) -> int:
    if settings.shards < 1:
        raise ConfigError(got_expected("--shards", settings.shards, "at least 1", "--shards 2"))
    require_both("--key", settings.key is not None, "--allow", bool(settings.allow))
    if settings.snapshot is not None and not settings.port:
        # A server finds its snapshot by its port.
        raise ConfigError("--port must be given with --snapshot, got 0. Use --port 5600.")
    # Imported after the checks above: these modules import torch, which takes seconds.
    from lightning_dlres.core.wire.server import public_address
    from lightning_dlres.paramserver.execute.server.service import ParameterServer

    for name in settings.optimizer:
        _register(name)
    stopped = stop_event()
    with contextlib.ExitStack() as stack:
        servers = [
            stack.enter_context(
                ParameterServer(
                    bind=settings.bind,
                    port=settings.port + index if settings.port else 0,
                    curve=load_keys(settings.key) if settings.key else None,
                    allowed=[load_public_key(path) for path in settings.allow],
                    insecure=settings.insecure,
                    snapshot=settings.snapshot,
                    snapshot_every=settings.snapshot_every,
                )
            )
            for index in range(settings.shards)
        ]
        addresses = ",".join(public_address(server.address) for server in servers)
        kept = f"snapshots in {settings.snapshot}" if settings.snapshot else "no snapshots"
        print(f"Serving parameters on {len(servers)} servers ({kept}): {addresses}", flush=True)
        stopped.wait()
        statuses = [server.status() for server in servers]
        print(_summary(statuses), flush=True)
    return 0


def _summary(statuses: Sequence[ServerStatus]) -> str:
    workers = [worker for status in statuses for worker in status.workers]
    pushed, pulled = (
        sum(getattr(worker, name) for worker in workers)
        for name in ("pushed_bytes", "pulled_bytes")
    )
    updates = max((status.last_version for status in statuses), default=0)
    refused = sum(status.refused for status in statuses)
    return (
        f"Made {updates} updates, received {format_bytes(pushed)}, sent {format_bytes(pulled)}, "
        f"and refused {refused} messages."
    )


def _register(name: str) -> None:
    """Register the optimizer class of a text such as "module:Class".

    Raises:
        ConfigError: If it cannot be imported, or is no optimizer class.
    """
    from torch.optim import Optimizer

    from lightning_dlres.paramserver.execute.server.optimizers import register_server_optimizer

    module, _, path = name.partition(":")
    try:
        value: object = importlib.import_module(module)
        for part in path.split("."):
            value = getattr(value, part)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"--optimizer must be the module and the name of a class that can be imported, got "
            f"{name!r} ({error}). Install its package, or add its directory to PYTHONPATH."
        ) from error
    if not isinstance(value, type) or not issubclass(value, Optimizer):
        raise ConfigError(
            got_expected("--optimizer", name, "a subclass of torch.optim.Optimizer", "module:Class")
        )
    register_server_optimizer(value)


def _status(settings: argparse.Namespace) -> int:
    interval = parse_seconds(settings.interval, "--interval")
    has_keys = settings.key is not None, settings.server_key is not None
    require_both("--key", has_keys[0], "--server-key", has_keys[1])
    from lightning_dlres.paramserver.execute.status_client import StatusClient
    from lightning_dlres.paramserver.report.status_tables import status_tables

    addresses = [one for text in settings.addresses for one in text.split(",") if one]
    client = StatusClient(
        addresses,
        curve=load_keys(settings.key) if settings.key else None,
        server_key=load_public_key(settings.server_key) if settings.server_key else None,
    )
    with contextlib.closing(client):
        samples = client.ask(_STATUS_SECONDS)
        if settings.once:
            print(status_tables(samples))
            return 0 if all(sample.status is not None for sample in samples) else 1
        stopped = stop_event()
        console = Console()
        with Live(console=console, auto_refresh=False) as live:
            before: Sequence[ServerSample] = ()
            while True:
                tables = status_tables(samples, before)
                if console.is_terminal:
                    live.update(Text(tables), refresh=True)
                else:
                    print(tables, flush=True)
                if stopped.wait(interval):
                    break
                before, samples = samples, client.ask(_STATUS_SECONDS)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="dlres ps",
        description="Run parameter servers, show their state, and write encryption keys.",
    )
    commands = parser.add_subparsers(dest="command", required=True)

    serve = commands.add_parser(
        "serve",
        help="serve parameters until ^C",
        description="Serve parameters until ^C. A job of ParameterServerStrategy gives "
        "the servers their parameters and optimizers. With --snapshot, a server that was killed "
        "goes on when it is started again with the same arguments.",
    )
    serve.add_argument("--shards", type=int, default=1, help="servers in this process (1)")
    add_serving_options(serve, _PORT, "server", "workers")
    serve.add_argument("--snapshot", type=Path, metavar="DIR", help="directory of snapshots")
    serve.add_argument(
        "--snapshot-every", default="30s", metavar="TIME", help="time between snapshots (30s)"
    )
    serve.add_argument(
        "--optimizer",
        action="append",
        default=[],
        metavar="MODULE:CLASS",
        help="let workers use an optimizer class that is not torch's; may be repeated",
    )
    serve.set_defaults(run=_serve)

    status = commands.add_parser("status", help="show the state of servers and workers until ^C")
    status.add_argument(
        "addresses", nargs="+", metavar="ADDRESS", help="addresses of servers, such as host:5600"
    )
    status.add_argument("--key", type=Path, help="secret key file of this client")
    status.add_argument("--server-key", type=Path, help="public key file of the servers")
    status.add_argument("--interval", default="1s", help="time between two looks (1s)")
    status.add_argument("--once", action="store_true", help="print one table, and exit")
    status.set_defaults(run=_status)

    keys = commands.add_parser("keygen", help="write a pair of CURVE keys")
    add_key_options(keys)
    return parser
