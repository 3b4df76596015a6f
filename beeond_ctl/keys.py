"""The site secret, and the keys derived from it: nothing secret is ever sent to a node or stored per job.

Every node holds the same root-only file; what a job needs (the rendezvous, BeeGFS's `connAuthFile`, the
password of a GlusterFS volume) is derived from it and a purpose. Knows nothing of what the keys are used for.

The file holds one secret, as any bytes, or several in a form of its own: the current one, which new instances get,
and those that are accepted besides, while the secret is being rotated (docs/lifecycle.md, "The site secret").
"""

from __future__ import annotations

import hashlib
import hmac
import os
import stat
from dataclasses import dataclass
from typing import TYPE_CHECKING

from beeond_ctl.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

MIN_SECRET_BYTES = 32
_MAX_SECRET_BYTES = 64 * 1024
_HEADER = b"beeond-ctl secrets 1\n"
_SALT = b"beeond-ctl key derivation 1"
_HASH_BYTES = hashlib.sha256().digest_size


@dataclass(frozen=True, slots=True)
class Secrets:
    """What a node's secret file holds."""

    current: bytes
    accepted: tuple[bytes, ...] = ()

    def find(self, name: str) -> bytes | None:
        """The secret of that name (`name_of`)."""
        return next((secret for secret in (self.current, *self.accepted) if name_of(secret) == name), None)


def name_of(secret: bytes) -> str:
    """What a secret is called where it may not be shown: derived from it, and telling nothing of it."""
    return derive(secret, "name", 6).hex()


def derive(secret: bytes, purpose: str, length: int = 32) -> bytes:
    """`length` bytes for `purpose`, by HKDF with SHA-256 (RFC 5869).

    A purpose names everything that must not share a key: job id, restart count, phase and use. Two different
    purposes give independent keys, and none of them leads back to `secret`.

    Raises ValueError when `length` is not in 1…8160, the most HKDF can give.
    """
    if not 1 <= length <= 255 * _HASH_BYTES:
        raise ValueError(f"cannot derive {length} bytes")
    pseudorandom = hmac.digest(_SALT, secret, "sha256")
    info = purpose.encode("utf-8", "surrogateescape")
    output = block = b""
    counter = 0
    while len(output) < length:
        counter += 1
        block = hmac.digest(pseudorandom, block + info + bytes([counter]), "sha256")
        output += block
    return output[:length]


def read_secrets(path: Path) -> Secrets:
    """The site's secrets in `path`.

    Raises ConfigError when the file is missing, a symbolic link, not a regular file, not owned by root or the
    effective user, open to group or others, not well-formed, or holds a secret shorter than 32 bytes.
    """
    return parse_secrets(_read(path), str(path))


def read_secret(path: Path) -> bytes:
    """The site secret that new instances get, exactly as stored. Raises as `read_secrets`."""
    return read_secrets(path).current


def parse_secrets(data: bytes, source: str) -> Secrets:
    """The secrets in `data`, which came from `source`. Raises ConfigError."""
    if not data.startswith(_HEADER):
        return Secrets(_long_enough(data, source))
    found: dict[str, list[bytes]] = {"current": [], "accepted": []}
    try:
        for line in data.removeprefix(_HEADER).decode("ascii").splitlines():
            kind, digits = line.split(" ")
            found[kind].append(_long_enough(bytes.fromhex(digits), source))
        (current,) = found["current"]
    except (ValueError, KeyError):
        raise ConfigError(
            f"{source} holds no secrets in a form that is known; copy the file from another compute node"
        ) from None
    return Secrets(current, tuple(found["accepted"]))


def format_secrets(secrets: Secrets) -> bytes:
    """The content of a file that holds `secrets`: text, whatever bytes they are."""
    lines = [f"current {secrets.current.hex()}", *(f"accepted {secret.hex()}" for secret in secrets.accepted)]
    return _HEADER + "".join(f"{line}\n" for line in lines).encode()


def _long_enough(secret: bytes, source: str) -> bytes:
    if len(secret) < MIN_SECRET_BYTES:
        raise ConfigError(
            f"the site secret {source} has {len(secret)} bytes, at least {MIN_SECRET_BYTES} are needed;"
            f" make it with: head -c 64 /dev/urandom"
        )
    return secret


def _read(path: Path) -> bytes:
    try:
        # O_NONBLOCK: a FIFO in its place must not hang the Prolog
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        hint = "make it by `beeond-ctl secret add`, or bring it from another node"
        if path.is_symlink():
            hint = "it must be a file, not a symbolic link"
        raise ConfigError(f"cannot read the site secret {path}: {error.strerror}; {hint}") from error
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise ConfigError(f"the site secret {path} is not a regular file")
        if status.st_uid not in (0, os.geteuid()):
            raise ConfigError(f"the site secret {path} belongs to uid {status.st_uid}; chown it to root")
        if status.st_mode & 0o077:
            mode = stat.S_IMODE(status.st_mode)
            raise ConfigError(f"the site secret {path} is open to others (mode {mode:04o}); chmod it to 0400")
        secret = os.read(descriptor, _MAX_SECRET_BYTES + 1)
    finally:
        os.close(descriptor)
    if len(secret) > _MAX_SECRET_BYTES:
        raise ConfigError(f"the site secret {path} is larger than {_MAX_SECRET_BYTES} bytes: the right file?")
    return secret
