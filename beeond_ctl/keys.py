"""The site secret, and the keys derived from it: nothing secret is ever sent to a node or stored per job.

Every node holds the same root-only file; what a job needs (the rendezvous, BeeGFS's `connAuthFile`, the
password of a GlusterFS volume) is derived from it and a purpose. Knows nothing of what the keys are used for.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import stat
from typing import TYPE_CHECKING

from beeond_ctl.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

MIN_SECRET_BYTES = 32
_MAX_SECRET_BYTES = 64 * 1024
_SALT = b"beeond-ctl key derivation 1"
_HASH_BYTES = hashlib.sha256().digest_size


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


def read_secret(path: Path) -> bytes:
    """The site secret in `path`, exactly as stored.

    Raises ConfigError when the file is missing, a symbolic link, not a regular file, not owned by root or the
    effective user, open to group or others, or shorter than 32 bytes.
    """
    try:
        # O_NONBLOCK: a FIFO in its place must not hang the Prolog
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        hint = "it must be a file, not a symbolic link" if path.is_symlink() else "make it on every node"
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
    if len(secret) < MIN_SECRET_BYTES:
        raise ConfigError(
            f"the site secret {path} has {len(secret)} bytes, at least {MIN_SECRET_BYTES} are needed;"
            f" make it with: head -c 64 /dev/urandom"
        )
    if len(secret) > _MAX_SECRET_BYTES:
        raise ConfigError(f"the site secret {path} is larger than {_MAX_SECRET_BYTES} bytes: the right file?")
    return secret
