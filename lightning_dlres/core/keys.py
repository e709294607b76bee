"""CURVE keys in files, as ZeroMQ's own tools write them: NAME.key has the public key, and
NAME.key_secret both."""

from __future__ import annotations

from pathlib import Path

import zmq.auth

from lightning_dlres.core.errors import ConfigError
from lightning_dlres.core.names import path_part
from lightning_dlres.core.net import CurveKeys


def create_keys(directory: Path, name: str) -> tuple[Path, Path]:
    """Write a fresh pair and return the two files, the public one first.

    Raises:
        ConfigError: the name is no part of a path, one of the files is there already, or the
            directory cannot be written to.
    """
    path_part("name", name)
    public, secret = directory / f"{name}.key", directory / f"{name}.key_secret"
    for path in (public, secret):
        if path.exists():
            raise ConfigError(f"{path} is there already; expected a new name. Try another.")
    try:
        directory.mkdir(parents=True, exist_ok=True)
        zmq.auth.create_certificates(directory, name)
        secret.chmod(0o600)
    except OSError as error:
        raise ConfigError(
            f"{directory}: {error.strerror}. Expected a directory to write to."
        ) from error
    return public, secret


def load_keys(path: Path) -> CurveKeys:
    """Return the pair of a secret file.

    Raises:
        ConfigError: it is none.
    """
    public, secret = _load(path)
    if secret is None:
        raise ConfigError(f"{path}: got a public key, expected NAME.key_secret. Pass that file.")
    return CurveKeys(public, secret)


def load_public_key(path: Path) -> bytes:
    """Return the public key of a file of either kind.

    Raises:
        ConfigError: it has none.
    """
    return _load(path)[0]


def _load(path: Path) -> tuple[bytes, bytes | None]:
    try:
        return zmq.auth.load_certificate(path)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{path}: {error}. Expected a file of keys; `dlres store keys` writes a pair."
        ) from error
