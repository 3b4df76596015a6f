"""What is remembered of a file that was proved: 24 bytes. Pure.

8 bytes that stand for one state of one file (`fingerprint`), little-endian, and the 16 of its checksum. Many of them
pass between programs and into the journal as one text (`pack`), in which all fingerprints come first: who goes on with
a transfer wants them alone.
"""

from __future__ import annotations

import binascii
import struct
from array import array

HASH = "xxh3-128"
"""The checksum: of a file's bytes as read, holes as zeros; of a file copied in pieces, of its pieces' checksums."""

SIZE = 24
_NUMBERS = struct.Struct("<4Q")
_PROOF = struct.Struct("<Q16s")
_64 = (1 << 64) - 1


def fingerprint(path: str, size: int, mtime_ns: int, ctime_ns: int, inode: int) -> int:
    """64 bits that stand for one state of one file; the destination is looked at as well before they count."""
    import xxhash  # for what is not ordinary: a scanner seldom needs it

    numbers = _NUMBERS.pack(size, mtime_ns & _64, ctime_ns & _64, inode)
    return xxhash.xxh3_64_intdigest(numbers + path.encode(errors="surrogateescape"))


def proof(mark: int, digest: bytes) -> bytes:
    """The proof of a file with this fingerprint and this checksum (none: it was not read back)."""
    return _PROOF.pack(mark, digest)


def pack(proofs: bytes | bytearray) -> str:
    """Proofs as one text."""
    words = array("Q", bytes(proofs))
    columns = words[::3] + words[1::3] + words[2::3]
    return binascii.b2a_base64(columns, newline=False).decode("ascii")


def marks(text: bytes) -> array[int]:
    """The fingerprints in a text of proofs. Raises ValueError.

    >>> list(marks(pack(proof(7, b"checksum")).encode()))
    [7]
    """
    if len(text) % (SIZE // 3 * 4):
        raise ValueError("not a whole number of proofs")
    length = len(text) // (SIZE // 3 * 4) * 8
    found = binascii.a2b_base64(text[: -(-length // 3) * 4])[:length]
    if len(found) != length:
        raise ValueError("not base64")
    return array("Q", found)
