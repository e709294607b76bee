"""LitData and MosaicML streaming, as benchmarks.prefetch measures them.

Both load shards of samples, here from the storage nodes that all contenders use. The interpreter of
the peers' environment runs this program.

    prefetch_peers.py write DIRECTORY SOURCE COPIES --sizes BYTES ...   shards in both formats
    prefetch_peers.py read PEER --endpoints ADDRESSES                   one line of JSON
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.machinery
import json
import os
import shutil
import sys
import tempfile
import time
import types
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]

# An empty package, whose modules can be imported alone. The storage client needs few of them, and
# the peers' environment lacks the dependencies of the others.
_package = types.ModuleType("lightning_dlres")
_package.__path__ = [str(ROOT / "lightning_dlres")]
sys.modules["lightning_dlres"] = _package
sys.path.insert(0, str(ROOT))

from benchmarks.support.unbatched_client import UnbatchedClient  # noqa: E402

LITDATA, MOSAIC = "litdata", "mosaic"
# File that lists the shards, in both formats.
INDEX = "index.json"


def without_torchvision() -> None:
    """Replace torchvision with an empty module if its import fails.

    Its wheels load only with the CUDA build of torch. The peers import it, but nothing here uses
    it.
    """
    try:
        import torchvision  # noqa: F401
    except Exception:
        for name in [name for name in sys.modules if name.startswith("torchvision")]:
            del sys.modules[name]
        for name in ("", ".datasets", ".transforms", ".transforms.functional", ".io"):
            stub = types.ModuleType(f"torchvision{name}")
            stub.__spec__ = importlib.machinery.ModuleSpec(stub.__name__, None)
            stub.__getattr__ = _anything  # type: ignore[method-assign]
            stub.__path__ = []
            sys.modules[f"torchvision{name}"] = stub


def _anything(name: str) -> type:
    if name.startswith("__"):
        raise AttributeError(name)
    return object


class Shards:
    """Client that fetches shards, and their index, by name from storage nodes.

    It sends one request per file.

    Args:
        endpoints: Addresses of the storage nodes, separated by commas.
        first: File that gets the time of the first request for a shard, of all workers.
    """

    def __init__(self, endpoints: str, first: Path) -> None:
        self._client, self._first = UnbatchedClient(endpoints), first

    def fetch(self, name: str) -> bytes:
        """Return the bytes of a shard, or of the index."""
        number = self._client.number(name)
        # The main process fetches the index before it starts the workers, which does not count.
        if name != INDEX:
            self._start_clock()
        return self._client.fetch(number)

    def _start_clock(self) -> None:
        """Write the time, unless a worker has already done so."""
        with contextlib.suppress(FileExistsError), self._first.open("x") as file:
            file.write(repr(time.monotonic()))


def write(options: argparse.Namespace) -> None:
    """Write every sample into shards of both formats, in each size of `options.sizes`."""
    without_torchvision()
    from litdata.streaming.writer import BinaryWriter
    from streaming import MDSWriter

    files = sorted(path for path in Path(options.source).rglob("*") if path.is_file())
    for size in options.sizes:
        lit = BinaryWriter(str(Path(options.directory, LITDATA, str(size))), chunk_bytes=size)
        mds = MDSWriter(
            out=str(Path(options.directory, MOSAIC, str(size))),
            columns={"data": "bytes"},
            size_limit=size,
        )
        number = 0
        for _ in range(options.copies):
            for path in files:
                data = path.read_bytes()
                lit[number] = {"data": data}
                mds.write({"data": data})
                number += 1
        lit.done()
        lit.merge()
        mds.finish()


def read(options: argparse.Namespace) -> dict[str, float]:
    """Read an epoch in shuffled order; return its samples, bytes and seconds.

    The peer's cache is empty at the start. The seconds are from the first request for a shard to
    the last batch.
    """
    without_torchvision()
    cache = tempfile.mkdtemp(prefix="dlres-bench-")
    first = Path(f"{cache}.first")
    try:
        make = _litdata if options.peer == LITDATA else _mosaic
        samples, total = 0, 0
        for batch in make(options, cache, first):
            samples, total = samples + len(batch), total + sum(len(item["data"]) for item in batch)
        seconds = time.monotonic() - float(first.read_text())
        return {"samples": samples, "bytes": total, "seconds": seconds}
    finally:
        first.unlink(missing_ok=True)
        shutil.rmtree(cache, ignore_errors=True)


def _litdata(options: argparse.Namespace, cache: str, first: Path) -> Any:
    import litdata
    from litdata.streaming.downloader import Downloader, register_downloader

    shards = Shards(options.endpoints, first)

    class Nodes(Downloader):
        def download_file(self, remote_filepath: str, local_filepath: str) -> None:
            data = shards.fetch(remote_filepath.partition("://")[2])
            unfinished = f"{local_filepath}.{os.getpid()}.part"
            Path(unfinished).write_bytes(data)
            os.replace(unfinished, local_filepath)

    register_downloader("dlres://", Nodes)
    dataset = litdata.StreamingDataset(
        input_dir=litdata.streaming.resolver.Dir(path=cache, url="dlres://"),
        shuffle=True,
        drop_last=False,
        max_pre_download=options.ahead,
        max_cache_size="100GB",
    )
    return litdata.StreamingDataLoader(
        dataset, batch_size=options.batch, num_workers=options.workers, collate_fn=_copied
    )


def _copied(items: list[Any]) -> list[Any]:
    """Copy the samples: LitData's are views, which its workers cannot send to the main process."""
    return [{"data": bytes(item["data"])} for item in items]


def _mosaic(options: argparse.Namespace, cache: str, first: Path) -> Any:
    from streaming import StreamingDataset
    from streaming.base.storage import download
    from torch.utils.data import DataLoader

    shards = Shards(options.endpoints, first)

    class Nodes(download.CloudDownloader):
        @staticmethod
        def _client_identifier() -> str:
            return "dlres"

        def clean_up(self) -> None:
            pass

        def _download_file_impl(self, remote: str, local: str, timeout: float) -> None:
            data = shards.fetch(remote.partition("://")[2].lstrip("/"))
            unfinished = f"{local}.{os.getpid()}.part"
            Path(unfinished).write_bytes(data)
            os.replace(unfinished, local)

        def _validate_remote_path(self, remote: str) -> None:
            pass

    download.DOWNLOADER_MAPPINGS["dlres"] = Nodes
    dataset = StreamingDataset(
        remote="dlres://",
        local=cache,
        shuffle=True,
        batch_size=options.batch,
        predownload=options.ahead,
        num_canonical_nodes=1,
    )
    return DataLoader(
        dataset, batch_size=options.batch, num_workers=options.workers, collate_fn=list
    )


def main() -> None:
    """Write shards or read them."""
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    writing = commands.add_parser("write")
    writing.add_argument("directory")
    writing.add_argument("source")
    writing.add_argument("copies", type=int)
    writing.add_argument("--sizes", type=int, nargs="+", required=True)
    reading = commands.add_parser("read")
    reading.add_argument("peer", choices=(LITDATA, MOSAIC))
    reading.add_argument("--endpoints", required=True)
    reading.add_argument("--batch", type=int, default=64)
    reading.add_argument("--workers", type=int, default=2)
    reading.add_argument(
        "--ahead", type=int, default=4, help="per worker: shards, or samples for Mosaic"
    )
    options = parser.parse_args()
    if options.command == "write":
        write(options)
    else:
        print(json.dumps(read(options)), flush=True)


if __name__ == "__main__":
    main()
