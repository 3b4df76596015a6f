"""What is remembered of a file that was proved: 24 bytes. Pure.

8 bytes that stand for one state of one file (`fingerprint`), little-endian, and the 16 of its checksum. Records of them
pass between programs and into the journal as one text (`pack`).
"""

from __future__ import annotations

import binascii
import struct
from array import array

import xxhash

HASH = "xxh3-128"
"""The checksum: of a file's bytes as read, holes as zeros; of a file copied in pieces, of its pieces' checksums."""

SIZE = 24
_NUMBERS = struct.Struct("<4Q")
_PROOF = struct.Struct("<Q16s")
_64 = (1 << 64) - 1


def fingerprint(path: str, size: int, mtime_ns: int, ctime_ns: int, inode: int) -> int:
    """64 bits that stand for one state of one file; the destination is looked at as well before they count."""
    numbers = _NUMBERS.pack(size, mtime_ns & _64, ctime_ns & _64, inode)
    return xxhash.xxh3_64_intdigest(numbers + path.encode(errors="surrogateescape"))


def proof(mark: int, digest: bytes) -> bytes:
    """The proof of a file with this fingerprint and this checksum (none: it was not read back)."""
    return _PROOF.pack(mark, digest)


def pack(proofs: bytes | bytearray) -> str:
    """Proofs as one text."""
    return binascii.b2a_base64(proofs, newline=False).decode("ascii")


def marks(text: str) -> array[int]:
    """The fingerprints in a text of proofs. Raises ValueError.

    >>> list(marks(pack(proof(7, b"checksum"))))
    [7]
    """
    proofs = binascii.a2b_base64(text)
    if len(proofs) % SIZE:
        raise ValueError("not a whole number of proofs")
    words = array("Q", proofs)
    return words[:: SIZE // 8]
