"""Command `dlres store`: serve samples to other hosts; pack, list and verify them."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from lightning_dlres.cli.serving import (
    add_key_options,
    add_serving_options,
    stop_event,
)
from lightning_dlres.core.checks import require_both
from lightning_dlres.core.errors import ConfigError, DlresError, StorageError, got_expected
from lightning_dlres.core.host.lightweight_process import lightweight_command
from lightning_dlres.core.tables import render
from lightning_dlres.core.units import format_bytes
from lightning_dlres.core.wire.keys import load_keys, load_public_key
from lightning_dlres.prefetch.storage.listings import is_url, open_reader
from lightning_dlres.prefetch.storage.readers import Reader
from lightning_dlres.prefetch.storage.source_options import (
    load_storage_options,
    parse_extensions,
    parse_storage_options,
)
from lightning_dlres.prefetch.storage.writer import find_damage, put

# Default port of node 0.
_PORT = 5570


def store(options: Sequence[str]) -> int:
    """Run a subcommand and return its exit status.

    Args:
        options: Arguments of the command line after `dlres store`.

    Raises:
        ConfigError: If an argument has a bad value.
    """
    settings = _parser().parse_args(options)
    if settings.command == "serve":
        # Replace this process by one without torch and Lightning, because their memory counts when
        # a host runs many nodes.
        sys.stdout.flush()
        command = lightweight_command("lightning_dlres.cli.store:serve_main", *options)
        os.execv(command[0], command)
    try:
        run: Callable[[argparse.Namespace], int] = settings.run
        status = run(settings)
        sys.stdout.flush()
        return status
    except StorageError as error:
        print(f"dlres: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:
        # The program that reads the output has closed the pipe, as `head` does. Redirect stdout:
        # otherwise the interpreter fails when it flushes stdout at exit.
        with open(os.devnull, "w") as devnull:
            os.dup2(devnull.fileno(), sys.stdout.fileno())
        return 1


def serve_main() -> int:
    """Run `dlres store serve` with the arguments of this process; return the exit status."""
    try:
        return _serve(_parser().parse_args(sys.argv[1:]))
    except DlresError as error:
        print(f"dlres: {error}", file=sys.stderr)
        return 2


def _serve(settings: argparse.Namespace) -> int:
    if settings.nodes < 1:
        raise ConfigError(got_expected("--nodes", settings.nodes, "at least 1", "--nodes 4"))
    require_both("--key", settings.key is not None, "--allow", bool(settings.allow))
    # Imported here because only this command needs sockets.
    from lightning_dlres.core.wire.server import public_address
    from lightning_dlres.prefetch.storage.nodes.server import StoreNode

    indices = range(settings.nodes) if settings.node is None else [settings.node]
    reader = _open(settings)
    stopped = stop_event()
    with contextlib.ExitStack() as stack:
        nodes = [
            stack.enter_context(
                StoreNode(
                    reader,
                    node=node,
                    nodes=settings.nodes,
                    bind=settings.bind,
                    port=settings.port + node if settings.port else 0,
                    curve=load_keys(settings.key) if settings.key else None,
                    allowed=[load_public_key(path) for path in settings.allow],
                    insecure=settings.insecure,
                    read_threads=settings.read_threads,
                    emulate_delay=settings.emulate_delay,
                )
            )
            for node in indices
        ]
        table = reader.table
        addresses = ",".join(public_address(node.address) for node in nodes)
        served = "all" if len(nodes) > 1 else f"node {indices[0]}"
        print(
            f"Serving {len(table)} samples ({format_bytes(table.total_bytes)}) of "
            f"{settings.source} as {served} of {settings.nodes} nodes: {addresses}",
            flush=True,
        )
        stopped.wait()
        sent = sum(node.sent_bytes for node in nodes)
        num_requests = sum(node.requests for node in nodes)
        print(f"Answered {num_requests} requests and sent {format_bytes(sent)}.")
    return 0


def _open(settings: argparse.Namespace) -> Reader:
    """Return a reader of the source, and print its note to stderr."""
    reader = open_reader(settings.source, **_source_arguments(settings))
    if reader.note:
        _print_note(reader.note)
    return reader


def _source_arguments(settings: argparse.Namespace) -> dict[str, Any]:
    encoded = parse_storage_options(settings.storage_options)
    if encoded and not is_url(settings.source):
        raise ConfigError(
            "--storage-options must come with a URL as the source, got "
            f"{settings.source!r}. Leave the option out, or pass a URL."
        )
    return {
        "follow_links": settings.follow_links,
        "extensions": parse_extensions(settings.extensions),
        "storage_options": load_storage_options(encoded),
    }


def _print_note(note: str) -> None:
    print(f"dlres: {note}", file=sys.stderr)


def _put(settings: argparse.Namespace) -> int:
    with _progress("packing") as report_progress:
        table = put(
            settings.source,
            settings.directory,
            packs=settings.packs,
            overwrite=settings.overwrite,
            progress=report_progress,
            on_note=_print_note,
            **_source_arguments(settings),
        )
    print(
        f"Put {len(table)} samples ({format_bytes(table.total_bytes)}) into {settings.directory}. "
        f"Serve them: dlres store serve {settings.directory}"
    )
    return 0


def _ls(settings: argparse.Namespace) -> int:
    table = _open(settings).table
    count = len(table) if settings.limit == 0 else min(settings.limit, len(table))
    checksums = table.checksums
    rows = [
        (
            n,
            table.key(n),
            int(table.sizes[n]),
            f"{int(checksums[n]):08x}" if checksums is not None else "-",
        )
        for n in range(count)
    ]
    print(render(str(settings.source), ("sample_id", "key", "bytes", "CRC-32"), rows))
    count_prefix = f"the first {count} of " if count < len(table) else ""
    print(
        f"{count_prefix}{len(table)} samples, {format_bytes(table.total_bytes)}, "
        f"digest {table.digest}"
    )
    return 0


def _verify(settings: argparse.Namespace) -> int:
    num_damaged, reader = 0, _open(settings)
    with _progress("reading") as report_progress:
        for line in find_damage(reader, report_progress):
            num_damaged += 1
            print(line, file=sys.stderr)
    table = reader.table
    num_intact = len(table) - num_damaged
    print(f"{num_intact} of {len(table)} samples are intact.")
    if table.checksums is None:
        print("The source has no checksums; only sizes were compared.")
    return 1 if num_damaged else 0


@contextlib.contextmanager
def _progress(title: str) -> Iterator[Callable[[int, int], None] | None]:
    """Context manager that shows a progress bar and yields a function that updates it.

    The function takes the numbers of samples done and of all samples. If stderr is no terminal, the
    context manager yields None and shows nothing.
    """
    console = Console(stderr=True)
    if not console.is_terminal:
        yield None
        return
    columns = (TextColumn(title), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(title)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="dlres store",
        description="Serve, pack, list and verify samples for the prefetch cache.",
    )
    commands = parser.add_subparsers(dest="command", required=True)
    source_help = "a folder, a store, a listing (.txt or .tsv) or a URL"

    serve = commands.add_parser(
        "serve",
        help="answer requests for samples until ^C",
        description="Answer requests for samples until ^C. All nodes must serve the same data set. "
        "A store has a checksum for every sample. For other sources, clients compare only keys, "
        "sizes and the beginnings of 16 samples, as each node read them when it started.",
    )
    serve.add_argument("source", help=source_help)
    serve.add_argument("--nodes", type=int, default=1, help="number of storage nodes (1)")
    serve.add_argument("--node", type=int, help="index of the node to run (default: all)")
    add_serving_options(serve, _PORT, "node", "clients")
    serve.add_argument(
        "--read-threads", type=int, default=4, help="requests read at once by each node (4)"
    )
    serve.add_argument(
        "--emulate-delay", default="0s", help="delay of each request (0s); for benchmarks"
    )
    serve.set_defaults(run=_serve)

    pack = commands.add_parser("put", help="pack samples into a store, with checksums")
    pack.add_argument("source", help=source_help)
    pack.add_argument("directory", type=Path, help="directory of the store")
    pack.add_argument("--packs", type=int, default=1, help="number of pack files (1)")
    pack.add_argument("--overwrite", action="store_true", help="replace a store in this directory")
    pack.set_defaults(run=_put)

    listing = commands.add_parser("ls", help="list samples")
    listing.add_argument("source", help=source_help)
    listing.add_argument("--limit", type=int, default=20, help="number of samples (20); 0: all")
    listing.set_defaults(run=_ls)

    verify = commands.add_parser("verify", help="read every sample and compare its checksum")
    verify.add_argument("source", help=source_help)
    verify.set_defaults(run=_verify)

    for command in (serve, pack, listing, verify):
        command.add_argument(
            "--follow-links", action="store_true", help="follow links out of a local folder"
        )
        command.add_argument(
            "--extensions", nargs="+", metavar=".EXT", help="use only files with these endings"
        )
        command.add_argument(
            "--storage-options",
            metavar="FILE",
            help="JSON file with arguments of the file system behind a URL, such as keys",
        )

    keys = commands.add_parser("keys", help="write a pair of CURVE keys")
    add_key_options(keys)
    return parser
