"""CURVE keys and their files, in the format of ZeroMQ's own tools.

NAME.key holds the public key. NAME.key_secret holds both keys.
"""

from __future__ import annotations

import os
from contextlib import ExitStack
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
    """A CURVE key pair; `repr` omits the secret key, to keep it out of logs.

    Attributes:
        public: Public key, 40 bytes of Z85 text.
        secret: Secret key, 40 bytes of Z85 text.

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
                "with `dlres store keys` or `dlres ps keygen`."
            )

    @classmethod
    def generate(cls) -> CurveKeys:
        """Return a new pair."""
        return cls(*zmq.curve_keypair())


def check_key(name: str, key: bytes) -> None:
    """Raise unless a value is a key.

    Raises:
        ConfigError: If its length or characters are not those of a key. The error does not show
            the value, which may be secret.
    """
    if len(key) != _KEY_BYTES or not _LETTERS.issuperset(key):
        raise ConfigError(
            f"{name} must be {_KEY_BYTES} bytes of Z85 text, got {len(key)} bytes that are not. "
            "Write a pair with `dlres store keys` or `dlres ps keygen`."
        )


def create_keys(directory: Path, name: str) -> tuple[Path, Path]:
    """Write a new pair and return the paths of the public and of the secret file.

    Only the user can read and write the secret file, from its creation on. If a write fails, no
    file is left.

    Raises:
        ConfigError: If the name cannot be part of a path, one of the files exists, or the
            directory cannot be written to.
    """
    path_part("name", name)
    public, secret = directory / f"{name}.key", directory / f"{name}.key_secret"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with ExitStack() as incomplete:
            # Create both files first: pyzmq gives new files the umask's mode, but keeps the mode of
            # existing ones. It also overwrites files of another pair. Exclusive creation prevents
            # that, and gives the name to only one of several processes.
            for path, mode in ((secret, 0o600), (public, 0o666)):
                _create(path, mode, name)
                incomplete.callback(path.unlink, missing_ok=True)
            zmq.auth.create_certificates(directory, name)
            incomplete.pop_all()
    except OSError as error:
        raise ConfigError(
            f"directory must be writable, got {directory}: {error.strerror}. Use another directory."
        ) from error
    return public, secret


def _create(path: Path, mode: int, name: str) -> None:
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode))
    except FileExistsError:
        raise ConfigError(
            f"name must be new, got {name!r}: {path} exists. Use another name."
        ) from None


def load_keys(path: Path) -> CurveKeys:
    """Return the pair of a secret key file.

    Raises:
        ConfigError: If the file does not hold a pair.
    """
    public, secret = _load(path)
    if secret is None:
        raise ConfigError(f"{path} must hold a secret key, got a public key. Use NAME.key_secret.")
    try:
        return CurveKeys(public, secret)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def load_public_key(path: Path) -> bytes:
    """Return the public key of a public or secret key file.

    Raises:
        ConfigError: If the file holds no public key.
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
            f"{path} must be a file of keys, got: {error}. Write a pair with `dlres store "
            "keys` or `dlres ps keygen`."
        ) from error
    return public, secret


def use_keys(client: zmq.Socket[bytes], curve: CurveKeys, server_key: bytes) -> None:
    """Encrypt the traffic of a client's socket; the socket must not have connected yet.

    Args:
        client: Socket of the client.
        curve: Keys of the client.
        server_key: Public key of the server.
    """
    client.setsockopt(zmq.CURVE_SERVERKEY, server_key)
    client.setsockopt(zmq.CURVE_PUBLICKEY, curve.public)
    client.setsockopt(zmq.CURVE_SECRETKEY, curve.secret)
