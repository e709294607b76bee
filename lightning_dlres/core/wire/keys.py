"""CURVE keys in files, as ZeroMQ's own tools write them: NAME.key has the public key, and
NAME.key_secret both."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import zmq
import zmq.auth
from zmq.utils.z85 import Z85CHARS

from lightning_dlres.core.errors import ConfigError
from lightning_dlres.core.names import path_part

_KEY_BYTES = 40
_LETTERS = frozenset(Z85CHARS)


@dataclass(frozen=True)
class CurveKeys:
    """A CURVE key pair, Z85 text of 40 bytes each; the secret is kept out of logs.

    Raises:
        ConfigError: If one is not a key, or they are not a pair. ZeroMQ would refuse them later,
            or silently admit no client.
    """

    public: bytes
    secret: bytes = field(repr=False)

    def __post_init__(self) -> None:
        check_key("public key", self.public)
        check_key("secret key", self.secret)
        if zmq.curve_public(self.secret) != self.public:
            raise ConfigError(
                f"public key must be that of the secret key, got {self.public!r}. Write a pair "
                "with `dlres store keys`."
            )

    @classmethod
    def generate(cls) -> CurveKeys:
        """Return a fresh pair."""
        return cls(*zmq.curve_keypair())


def check_key(name: str, key: bytes) -> None:
    """Raise where this is no key.

    Raises:
        ConfigError: its length or letters are not those of a key; it may be a secret and is not
            shown.
    """
    if len(key) != _KEY_BYTES or not _LETTERS.issuperset(key):
        raise ConfigError(
            f"{name} must be {_KEY_BYTES} bytes of Z85 text, got {len(key)} bytes that are not. "
            "Write a pair with `dlres store keys`."
        )


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
    try:
        return CurveKeys(public, secret)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def load_public_key(path: Path) -> bytes:
    """Return the public key of a file of either kind.

    Raises:
        ConfigError: it has none.
    """
    return _load(path)[0]


def _load(path: Path) -> tuple[bytes, bytes | None]:
    try:
        public, secret = zmq.auth.load_certificate(path)
        check_key("public key", public)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{path}: {error}. Expected a file of keys; `dlres store keys` writes a pair."
        ) from error
    return public, secret
