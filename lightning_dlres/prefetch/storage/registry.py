"""Registry of storage backends: each has a name and the import path of its opener.

An opener is registered as a path and not as a function. The cache runs in a process of its own,
which imports only `prefetch` and the packages below it, and imports the opener by its path.

Security: `SourceConfig.opener` is imported and called. A configuration must therefore come from a
process of this user. The cache's process gets it through its standard input from the process that
starts it; over its socket it gets only a fingerprint. Never open a configuration from a socket.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from lightning_dlres.core.errors import ConfigError, got_expected
from lightning_dlres.prefetch.storage.base import ReportProgress, Storage
from lightning_dlres.prefetch.storage.labels import check_classes
from lightning_dlres.prefetch.storage.source_options import SourceConfig

# Opens a storage from its configuration, a directory for its sockets that only this user may enter,
# and a function to report progress to (or None).
Opener = Callable[[SourceConfig, Path, ReportProgress | None], Storage]

# Value of the option `storage` with which each rank reads files itself, without a cache. It has no
# opener.
DIRECT = "direct"
# Value of the option `storage` that lets `host_config` choose the storage by the source.
AUTO = "auto"
_BUILT_IN = "lightning_dlres.prefetch.storage"


@dataclass(frozen=True, kw_only=True)
class StorageBackend:
    """Registered storage backend.

    Attributes:
        name: Value of the option `storage`.
        opener: Import path of the function that opens it, "module:function".
        reads_files: True if its source must be one folder, store, listing or URL.
    """

    name: str
    opener: str
    reads_files: bool = False


_backends = {DIRECT: StorageBackend(name=DIRECT, opener="", reads_files=True)}


def register_storage(name: str, opener: str, *, reads_files: bool = False) -> None:
    """Register a storage backend by its name, in this process.

    The path is imported when the backend is first used: by this process, which checks it, and by
    the process that keeps the cache, with this process's `sys.path`. There `lightning_dlres` has no
    public names, so the module must import submodules such as
    `lightning_dlres.prefetch.storage.base`.

    Args:
        name: Value of the option `storage` that selects the backend.
        opener: Import path of its `Opener`, such as "my_package.my_storage:open_storage".
        reads_files: True if the source must be one folder, store, listing or URL, which
            `open_source` reads; False if the opener itself checks its sources.

    Raises:
        ConfigError: If the name is taken by another backend, or the path has another form.
    """
    if not isinstance(name, str) or not name or "://" in name:
        raise ConfigError(got_expected("name", name, "a word for the backend", "'my_storage'"))
    module, colon, function = opener.partition(":") if isinstance(opener, str) else ("", "", "")
    parts = [*module.split("."), function]
    if not colon or not all(part.isidentifier() for part in parts):
        rule = "an import path 'module:function'"
        raise ConfigError(got_expected("opener", opener, rule, "'my_storage:open_storage'"))
    backend = StorageBackend(name=name, opener=opener, reads_files=reads_files)
    known = _backends.get(name, backend)
    if name == AUTO or known != backend:
        taken = f"the opener {known.opener!r}" if known.opener else "another meaning"
        raise ConfigError(
            f"name must be one that no other storage has, got {name!r}, which has {taken}. "
            "Register the backend under another name."
        )
    _backends[name] = backend


def storage_names() -> tuple[str, ...]:
    """Return the values of the option `storage`, except `AUTO`."""
    return tuple(_backends)


def storage_backend(name: str) -> StorageBackend:
    """Return a backend by its name.

    Raises:
        ConfigError: If no backend has this name.
    """
    if name not in _backends:
        names = " or ".join(map(repr, (AUTO, *_backends)))
        raise ConfigError(got_expected("storage", name, names, "storage='auto'"))
    return _backends[name]


def load_opener(name: str, opener: str) -> Opener:
    """Return the function that opens a backend; its module is imported for it.

    Args:
        name: Name of the backend, for errors.
        opener: Import path, "module:function".

    Raises:
        ConfigError: If it cannot be imported, or is no function.
    """
    module, _, function = opener.partition(":")
    try:
        loaded = getattr(import_module(module), function)
    except Exception as error:  # an outside module may raise anything
        raise ConfigError(
            f"The opener of storage {name!r} must be importable, got {opener!r}: {error!r}. Put "
            "its module into a folder of sys.path."
        ) from error
    if not callable(loaded):
        raise ConfigError(
            f"The opener of storage {name!r} must be a function, got {opener!r}, which is of type "
            f"{type(loaded).__name__}. Register the path of a function."
        )
    opened: Opener = loaded
    return opened


def open_storage(
    config: SourceConfig, directory: Path, report_progress: ReportProgress | None = None
) -> Storage:
    """Return the storage that a configuration describes.

    Args:
        config: The description. It must come from a process of this user: its opener is imported.
        directory: Folder for sockets of embedded nodes; only this user may enter it.
        report_progress: See `open_reader`.

    Raises:
        ConfigError: If the opener is missing or refuses the configuration, or if a sample lies
            outside of the folders of the classes.
        PeerTimeoutError: If a storage node does not answer.
    """
    storage = load_opener(config.storage, config.opener)(config, directory, report_progress)
    if not isinstance(storage, Storage):
        raise ConfigError(
            f"The opener of storage {config.storage!r} must return a Storage, got a "
            f"{type(storage).__name__}. Derive it from lightning_dlres.prefetch.storage.base."
        )
    try:
        check_classes(storage.table, config.classes, config.addresses[0])
    except ConfigError:
        storage.close()
        raise
    return storage


register_storage("embedded", f"{_BUILT_IN}.nodes.embedded:open_embedded", reads_files=True)
register_storage("files", f"{_BUILT_IN}.file_storage:open_files", reads_files=True)
register_storage("nodes", f"{_BUILT_IN}.nodes.node_storage:open_nodes")
