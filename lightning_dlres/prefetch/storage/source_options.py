"""Configuration of a source of samples, and parsers of the arguments that it is made from.

The process that keeps the cache gets the configuration as JSON.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from lightning_dlres.core.errors import ConfigError, got_expected

Extensions = str | Sequence[str] | None
StorageOptions = Mapping[str, Any] | str | Path | None

# Minimum length, in characters, of a text that is hidden in messages. Shorter texts are hardly
# secrets, and hiding them would garble the messages.
_MIN_SECRET_LENGTH = 4


class SourceConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Source of samples: a storage backend, its addresses and its options.

    Attributes:
        storage: Name of a registered storage backend, or "direct" for local files without a cache.
        opener: Import path of the function that opens the backend, "module:function"; "" for
            "direct". Security: it is imported, so never take a configuration from a socket.
        addresses: Addresses of storage nodes, in order; or one folder, store, listing or URL.
        nodes: Number of storage nodes, N.
        replicas: Number of nodes that have each sample.
        read_threads: Number of fetches that one node, or one reader of files, serves at once.
        timeout: Seconds after which a fetch fails and is not tried again.
        public_key, secret_key: This side's CURVE keys; b"" without CURVE.
        server_key: Public CURVE key of the storage nodes; b"" without CURVE.
        follow_links: True to follow symbolic links that lead out of a local folder.
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
        # Logs and tracebacks must not show keys and passwords.
        return f"SourceConfig(storage={self.storage!r}, addresses={self.addresses!r}, ...)"


def parse_extensions(extensions: Extensions) -> tuple[str, ...]:
    """Return endings of file names in lower case; () if all files are samples.

    Raises:
        ConfigError: If an ending does not begin with a dot.
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
    """Return arguments of a file system as JSON; b"" for None.

    Args:
        options: A mapping, or the path of a JSON file that has one.

    Raises:
        ConfigError: If they are not such a mapping. The message shows no values: they may be
            secrets.
    """
    if options is None:
        return b""
    mapping = _load_json(Path(options)) if isinstance(options, (str, Path)) else options
    if not isinstance(mapping, Mapping):
        raise ConfigError(_bad_options(f"a {type(mapping).__name__}"))
    for name, value in mapping.items():
        if not isinstance(name, str):
            raise ConfigError(_bad_options(f"a key of type {type(name).__name__}"))
        try:
            json.dumps(value, allow_nan=False)
        except (TypeError, ValueError):
            raise ConfigError(_bad_options(f"a {type(value).__name__} as {name!r}")) from None
    return json.dumps(dict(mapping), sort_keys=True).encode()


def load_storage_options(encoded: bytes) -> dict[str, Any]:
    """Return the arguments that `parse_storage_options` has encoded."""
    options: dict[str, Any] = json.loads(encoded) if encoded else {}
    return options


def hide_secrets(text: str, options: Any) -> str:
    """Return the text with each value of the options replaced by "***": it may be a secret."""
    # Longest first, so that no part of a secret is left over.
    for secret in sorted(_secret_texts(options), key=len, reverse=True):
        text = text.replace(secret, "***")
    return text


def _secret_texts(value: Any) -> set[str]:
    if isinstance(value, dict):
        return set().union(*map(_secret_texts, value.values()))
    if isinstance(value, list):
        return set().union(*map(_secret_texts, value))
    return {value} if isinstance(value, str) and len(value) >= _MIN_SECRET_LENGTH else set()


def _load_json(path: Path) -> Any:
    try:
        return json.loads(path.expanduser().read_bytes())
    except OSError as error:
        raise ConfigError(_bad_options(f"{path}: {error.strerror}")) from error
    except ValueError:
        # `from None`: the parser's message may quote the file, and so a secret.
        raise ConfigError(_bad_options(f"{path}, which is not JSON")) from None


def _bad_options(got: str) -> str:
    return (
        "storage_options must be a mapping of names to JSON values, or the path of a JSON file "
        f"with one, got {got}. Use storage_options={{'anon': True}}."
    )
