"""What is for later in a transfer, in a file without a name: it may be more than fits in memory."""

from __future__ import annotations

import os


class Spool:
    """Pairs of texts, each found again by where it is. Not safe for threads: its owner has a lock."""

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        """An empty one in `directory`, gone when it is closed (tempfile makes such files, too: its import takes longer
        than all else before a scanner starts). Raises OSError."""
        path = os.path.join(directory, f".spool-{os.urandom(8).hex()}")
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        os.unlink(path)
        self._file = os.fdopen(fd, "w+b")

    def put(self, first: str, second: str) -> tuple[int, int]:
        """Keep two lines of ASCII, the first without a tab; where they are. Raises OSError."""
        data = f"{first}\t{second}".encode("ascii")
        at = self._file.seek(0, 2)
        self._file.write(data)
        return at, len(data)

    def get(self, at: int, length: int) -> tuple[str, str]:
        """What is there. Raises OSError."""
        self._file.seek(at)
        first, _, second = self._file.read(length).decode("ascii").partition("\t")
        return first, second

    def close(self) -> None:
        """Forget all of it. Raises OSError for what is buffered for a full device."""
        self._file.close()
