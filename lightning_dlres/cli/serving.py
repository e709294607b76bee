"""Parts of the commands that serve other hosts: options, key files and stop signals."""

from __future__ import annotations

import argparse
import signal
import threading
from pathlib import Path

from lightning_dlres.core.wire.keys import create_keys


def add_serving_options(parser: argparse.ArgumentParser, port: int, name: str, peers: str) -> None:
    """Add the options of an address and of keys.

    Args:
        parser: Parser of the command.
        port: Default port of server 0.
        name: Name of a server in the help, such as "node".
        peers: Name of the processes that connect to it, such as "clients".
    """
    parser.add_argument(
        "--bind", default="127.0.0.1", help="numeric address to listen on (127.0.0.1); 0.0.0.0: all"
    )
    parser.add_argument(
        "--port",
        type=int,
        default=port,
        help=f"port of {name} 0 ({port}); {name} m has port + m",
    )
    parser.add_argument(
        "--key",
        type=Path,
        help="secret key file (NAME.key_secret): encrypt, and admit only the keys of --allow",
    )
    parser.add_argument(
        "--allow", type=Path, nargs="+", default=[], help=f"files of {peers}' public keys"
    )
    parser.add_argument(
        "--insecure",
        action="store_true",
        help="without keys, serve every host that can reach the --bind address",
    )


def stop_event() -> threading.Event:
    """Return an event that the next ^C or SIGTERM sets; one more signal ends the process at once.

    A thread that waits for a disk without an answer would hold up an orderly end.
    """
    stopped, signals = threading.Event(), (signal.SIGINT, signal.SIGTERM)

    def stop(*_: object) -> None:
        stopped.set()
        for stop_signal in signals:
            signal.signal(stop_signal, signal.SIG_DFL)

    for stop_signal in signals:
        signal.signal(stop_signal, stop)
    return stopped


def add_key_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of a command that writes keys, and make it run `write_keys`."""
    parser.add_argument("name", help="name of the host or job")
    parser.add_argument("--directory", type=Path, default=Path(), help="directory to write to (.)")
    parser.set_defaults(run=write_keys)


def write_keys(settings: argparse.Namespace) -> int:
    """Write a pair of keys, and return the exit status."""
    public, secret = create_keys(settings.directory, settings.name)
    print(f"Wrote {secret} (keep it on this host) and {public} (copy it to the other side).")
    return 0
