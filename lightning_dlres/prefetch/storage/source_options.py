"""Arguments that say which samples of a source are read, and how its file system is opened, checked
and in the form in which the process of a cache gets them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from lightning_dlres.core.errors import ConfigError, got_expected

Extensions = str | Sequence[str] | None
StorageOptions = Mapping[str, Any] | str | Path | None

# Shorter texts are hardly secrets, and occur in any sentence.
_SHORTEST_SECRET = 4


class SourceConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Description of where samples come from.

    Attributes:
        storage: Name of a registered storage backend, or "direct" for local files without a cache.
        opener: Import path of the function that opens the backend, "module:function"; "" for
            "direct". Security: it is imported, so never take a configuration from a socket.
        addresses: Addresses of storage nodes, in order; or one folder, store, listing or URL.
        nodes: Number of storage nodes, N.
        replicas: Number of nodes that have each sample.
        read_threads: Number of requests that one node, or a reader of files, reads at once.
        timeout: Seconds after which a request has failed for good.
        public_key, secret_key: This side's CURVE keys; b"" without CURVE.
        server_key: Public CURVE key of the storage nodes; b"" without CURVE.
        follow_links: True if links of a local folder are followed out of it.
        extensions: Endings of sample names in lower case; () for all files.
        storage_options: Arguments of the file system behind a URL, as JSON; b"" for none.
        classes: Folders that samples may lie in; () if samples have no labels.
    """

    storage: str
    opener: str
    addresses: tuple[str, ...]
    nodes: int = 1
    replicas: int = 1
    read_threads: int = 4
    timeout: float = 30.0
    public_key: bytes = b""
    secret_key: bytes = b""
    server_key: bytes = b""
    follow_links: bool = False
    extensions: tuple[str, ...] = ()
    storage_options: bytes = b""
    classes: tuple[str, ...] = ()

    def __repr__(self) -> str:
        # A log or a traceback must not show keys and passwords.
        return f"SourceConfig(storage={self.storage!r}, addresses={self.addresses!r}, ...)"


def parse_extensions(extensions: Extensions) -> tuple[str, ...]:
    """Return endings of file names in lower case; none: all files are samples.

    Raises:
        ConfigError: One is no text such as ".jpg".
    """
    if extensions is None:
        return ()
    endings = (extensions,) if isinstance(extensions, str) else extensions
    if (
        not isinstance(endings, Sequence)
        or not endings
        or not all(isinstance(e, str) and len(e) > 1 and e[0] == "." for e in endings)
        or any("/" in ending for ending in endings)
    ):
        rule = "endings of file names that begin with a dot"
        raise ConfigError(got_expected("extensions", extensions, rule, "extensions=['.jpg']"))
    return tuple(ending.lower() for ending in endings)


def parse_storage_options(options: StorageOptions) -> bytes:
    """Return arguments of a file system as JSON; none: b"".

    Args:
        options: A mapping, or the path of a JSON file that has one.

    Raises:
        ConfigError: They are none. The message has no value of them, because they hold secrets.
    """
    if options is None:
        return b""
    known = _load(Path(options)) if isinstance(options, (str, Path)) else options
    if not isinstance(known, Mapping):
        raise ConfigError(_refused(f"a {type(known).__name__}"))
    for name, value in known.items():
        if not isinstance(name, str):
            raise ConfigError(_refused(f"a key of type {type(name).__name__}"))
        try:
            json.dumps(value, allow_nan=False)
        except (TypeError, ValueError):
            raise ConfigError(_refused(f"a {type(value).__name__} as {name!r}")) from None
    return json.dumps(dict(known), sort_keys=True).encode()


def load_storage_options(encoded: bytes) -> dict[str, Any]:
    """Return the arguments that `parse_storage_options` has encoded."""
    options: dict[str, Any] = json.loads(encoded) if encoded else {}
    return options


def hide_secrets(text: str, options: Any) -> str:
    """Return a text without the values of arguments of a file system, which may hold secrets."""
    for secret in sorted(_texts(options), key=len, reverse=True):
        text = text.replace(secret, "***")
    return text


def _texts(value: Any) -> set[str]:
    if isinstance(value, dict):
        return set().union(*map(_texts, value.values()))
    if isinstance(value, list):
        return set().union(*map(_texts, value))
    return {value} if isinstance(value, str) and len(value) >= _SHORTEST_SECRET else set()


def _load(path: Path) -> Any:
    try:
        return json.loads(path.expanduser().read_bytes())
    except OSError as error:
        raise ConfigError(_refused(f"{path}: {error.strerror}")) from error
    except ValueError:
        # Its message may have a part of the file.
        raise ConfigError(_refused(f"{path}, which is no JSON")) from None


def _refused(got: str) -> str:
    return (
        "storage_options must be a mapping of names to JSON values, or the path of a JSON file "
        f"with one, got {got}. Use storage_options={{'anon': True}}."
    )
