"""Options of a cache, as users give them, and their conversion into a `HostConfig`."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

from lightning_dlres.core.checks import (
    finite,
    flag,
    instance,
    local_path,
    require_both,
    whole_number,
)
from lightning_dlres.core.errors import ConfigError, got_expected
from lightning_dlres.core.units import parse_bytes, parse_seconds
from lightning_dlres.core.wire.keys import load_keys, load_public_key
from lightning_dlres.prefetch.cache.messages import HostConfig
from lightning_dlres.prefetch.storage.listings import is_url
from lightning_dlres.prefetch.storage.registry import (
    AUTO,
    DIRECT,
    load_opener,
    storage_backend,
    storage_names,
)
from lightning_dlres.prefetch.storage.source_options import (
    Extensions,
    SourceConfig,
    StorageOptions,
    parse_extensions,
    parse_storage_options,
)

Source = str | Path | Sequence[str]
# Beginning of the address of a storage node.
_SCHEME = "tcp://"
# Default number of embedded storage nodes.
_EMBEDDED_NODES = 4
# Longest timeout, in seconds: ZeroMQ counts milliseconds in 32 bits.
_MAX_TIMEOUT = 20 * 86400.0
# Default number of read threads of one node, and of a rank that reads local files directly. The
# second is the sum over the default number of embedded nodes.
_NODE_THREADS, _DIRECT_THREADS = 4, 16


def host_config(
    source: Source,
    *,
    storage: str = "auto",
    nodes: int | None = None,
    replicas: int = 1,
    capacity: str | int = "2GiB",
    prefetch: int = 32,
    lookahead: str | int | None = None,
    threshold: float = 0.75,
    max_inflight_requests: int = 4,
    read_threads: int | None = None,
    pinned: str | int = 0,
    pinned_directory: str | Path | None = None,
    timeout: str | float | timedelta = "30s",
    key: str | Path | None = None,
    server_key: str | Path | None = None,
    follow_links: bool = False,
    extensions: Extensions = None,
    storage_options: StorageOptions = None,
    classes: tuple[str, ...] = (),
    share: int = 1,
) -> HostConfig:
    """Return the configuration of a cache over a source.

    Args:
        source: Folder, store, listing or URL; or the addresses of storage nodes in their order, as
            a list or with commas ("tcp://10.0.0.1:5555,tcp://10.0.0.2:5555").
        storage: "direct": each rank reads local files itself, without a cache. "embedded": the
            cache's process runs storage nodes over the source. "files": it reads the source
            itself. "nodes": the source has addresses. "auto": "nodes" for addresses, "files" for a
            URL, "embedded" if nodes, replicas, pinned or lookahead=0 ask for it, else "direct".
            Or the name of a backend of `register_storage`, which checks the source itself.
        nodes: Number of storage nodes. None: as many as addresses, 4 embedded ones, or 1.
        replicas: Number of nodes that have each sample.
        capacity: Bytes of the cache of one host.
        prefetch: Maximum number of samples in one request to a storage node.
        lookahead: Bytes that may be requested ahead of need. None: half of the capacity. 0: a miss
            requests the sample and the next `prefetch` - 1 of its prefetch list.
        threshold: Used part of the capacity at which eviction starts, in (0, 1].
        max_inflight_requests: Maximum number of requests ahead of need in flight to one node.
        read_threads: Number of requests that are read at the same time by each embedded node, by
            the cache's process ("files"), or by each rank ("direct"). None: 16 for "direct", else
            4.
        pinned: Bytes for samples that stay for all epochs.
        pinned_directory: Directory on a local disk for the pinned samples. None: they are in
            memory.
        timeout: Time after which a sample that has not arrived is an error. A number is in seconds.
        key: File with this process's key pair, for nodes that use CURVE (see `dlres store keys`).
        server_key: File with the public key of the nodes.
        follow_links: True: links in a local folder are followed even if they lead out of it.
        extensions: Endings of file names such as ".jpg", in lower or upper case. Files with other
            endings are no samples. None: all files are samples.
        storage_options: Arguments of fsspec's file system behind a URL, such as keys and endpoints:
            a mapping of JSON values, or the path of a JSON file with one. No message shows them.
        classes: Folders that samples may lie in. (): any.
        share: Number that the user's capacity was divided by to get `capacity`; for error messages.

    Raises:
        ConfigError: If an argument is out of its range, or does not fit the source.
    """
    instance("storage", storage, (str,), f"one of {', '.join((AUTO, *storage_names()))}", "'auto'")
    for name, number in (
        ("nodes", nodes),
        ("replicas", replicas),
        ("prefetch", prefetch),
        ("max_inflight_requests", max_inflight_requests),
        ("read_threads", read_threads),
    ):
        if number is not None or name not in ("nodes", "read_threads"):
            whole_number(name, number, f"{name}=1")
    for name, path in (
        ("pinned_directory", pinned_directory),
        ("key", key),
        ("server_key", server_key),
    ):
        local_path(name, path, "the path of a local file or folder", f"{name}='/path'")
    finite("threshold", threshold, "threshold=0.75", above=True)
    for name, size in (("capacity", capacity), ("pinned", pinned), ("lookahead", lookahead)):
        if size is not None or name != "lookahead":
            instance(name, size, (str, int), "a number of bytes", f"{name}='2GiB'")
    flag("follow_links", follow_links)
    endings = parse_extensions(extensions)
    file_system_options = parse_storage_options(storage_options)
    addresses = _addresses(source)
    are_nodes = all(map(is_address, addresses))
    kind = storage
    ahead = None if lookahead is None else parse_bytes(lookahead, "lookahead")
    pinned_bytes = parse_bytes(pinned, "pinned")
    # Direct reads have no nodes, no replicas, no misses and no pinned tier.
    needs_cache = nodes is not None or replicas > 1 or ahead == 0 or pinned_bytes > 0
    if storage == AUTO:
        is_local = "://" not in addresses[0] or addresses[0].startswith("file://")
        local = "embedded" if needs_cache else "direct"
        kind = "nodes" if are_nodes else local if is_local else "files"
    backend = storage_backend(kind)
    if kind != DIRECT:
        # Report a missing backend here, and not from the process that keeps the cache.
        load_opener(kind, backend.opener)
    is_files = not are_nodes and len(addresses) == 1
    if (kind == "nodes" and not are_nodes) or (backend.reads_files and not is_files):
        raise ConfigError(
            got_expected(
                f"a source for storage={kind!r}",
                source,
                "addresses" if kind == "nodes" else "one folder, store, listing or URL",
                "'tcp://10.0.0.1:5555'" if kind == "nodes" else "storage='auto'",
            )
        )
    if kind == "nodes" and endings:
        raise ConfigError(
            "extensions must be None for the addresses of storage nodes, got "
            f"{extensions!r}. Select the files on the nodes: dlres store serve --extensions."
        )
    if storage_options is not None and (kind == "nodes" or not is_url(addresses[0])):
        raise ConfigError(
            f"storage_options must be None for a source that is no URL, got {addresses[0]!r}. Use "
            "a URL such as 's3://bucket/train'."
        )
    if kind == "nodes" and nodes not in (None, len(addresses)):
        raise ConfigError(
            f"nodes must be the number of addresses, {len(addresses)}, got {nodes!r}. Leave out "
            "nodes."
        )
    if kind == "direct" and needs_cache:
        raise ConfigError(
            "storage must be one with a cache if nodes, replicas, pinned or lookahead=0 is given, "
            f"got {kind!r}. Use storage='embedded'."
        )
    if read_threads is None:
        read_threads = _DIRECT_THREADS if kind == "direct" else _NODE_THREADS
    count = len(addresses) if kind == "nodes" else nodes
    if count is None:
        count = _EMBEDDED_NODES if kind == "embedded" else 1
    if not 1 <= replicas <= count:
        raise ConfigError(
            got_expected("replicas", replicas, f"1 to the number of nodes, {count}", "replicas=1")
        )
    if not 0 < threshold <= 1:
        raise ConfigError(got_expected("threshold", threshold, "in (0, 1]", "threshold=0.75"))
    require_both("key", key is not None, "server_key", server_key is not None)
    capacity_bytes = parse_bytes(capacity, "capacity")
    if capacity_bytes < 1 or (ahead or 0) > capacity_bytes:
        if not ahead:
            rule = "at least the largest sample"
            raise ConfigError(got_expected("capacity", capacity, rule, "capacity='2GiB'"))
        raise ConfigError(
            f"lookahead must be at most the capacity, {capacity}, got {lookahead}. Leave it out "
            "for half of the capacity."
        )
    if kind != "direct":
        # They go to the cache's process as JSON, which is UTF-8.
        _require_text("source", *addresses)
        _require_text("pinned_directory", str(pinned_directory or ""))
    own = load_keys(Path(key)) if key is not None else None
    return HostConfig(
        source=SourceConfig(
            storage=kind,
            opener=backend.opener,
            addresses=addresses,
            nodes=count,
            replicas=replicas,
            read_threads=read_threads,
            timeout=_positive(parse_seconds(timeout, "timeout")),
            public_key=own.public if own else b"",
            secret_key=own.secret if own else b"",
            server_key=load_public_key(Path(server_key)) if server_key is not None else b"",
            follow_links=follow_links,
            extensions=endings,
            storage_options=file_system_options,
            classes=classes,
        ),
        capacity=capacity_bytes,
        prefetch=prefetch,
        lookahead=ahead,
        threshold=threshold,
        max_inflight_requests=max_inflight_requests,
        pinned=pinned_bytes,
        share=share,
        pinned_directory=None if pinned_directory is None else str(pinned_directory),
    )


def _require_text(name: str, *paths: str) -> None:
    for path in paths:
        try:
            path.encode()
        except UnicodeEncodeError as error:
            raise ConfigError(
                f"{name} must be a path in UTF-8 if a cache reads it, got {path!r}. Rename the "
                "folder."
            ) from error


def is_address(source: str) -> bool:
    """Return true if a source is the address of a storage node, or several with commas."""
    return source.startswith(_SCHEME)


def _addresses(source: Source) -> tuple[str, ...]:
    if isinstance(source, Path):
        return (str(source.expanduser().absolute()),)
    if isinstance(source, str):
        if is_address(source):
            return tuple(part.strip() for part in source.split(","))
        if not source:
            raise ConfigError(got_expected("source", source, "a folder, store or URL", "'data'"))
        # Absolute, because the cache's process may have another working directory.
        return (source if "://" in source else str(Path(source).expanduser().absolute()),)
    parts = source if isinstance(source, (list, tuple)) else ()
    if not parts or not all(isinstance(part, str) and part for part in parts):
        raise ConfigError(
            got_expected("source", source, "a path, a URL or addresses", "'tcp://10.0.0.1:5555'")
        )
    return tuple(source)


def _positive(seconds: float) -> float:
    if not 0 < seconds <= _MAX_TIMEOUT:
        rule = "a time above 0 and up to 20 days"
        raise ConfigError(got_expected("timeout", seconds, rule, "timeout='30s'"))
    return seconds
