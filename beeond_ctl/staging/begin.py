"""The first steps of a transfer, before what does the rest has even been read in: a scanner takes time to start."""

from __future__ import annotations

import os
from contextlib import ExitStack

import xxhash

from beeond_ctl.staging.journal import Journal
from beeond_ctl.staging.spawn import end, spawn

TYPE_CHECKING = False
if TYPE_CHECKING:
    import subprocess
    from pathlib import Path
    from typing import IO

    from beeond_ctl.staging.job import Identity, Job


class Begun:
    """What a transfer needs. Whoever has it, has to end it."""

    def __init__(self, job: Job, user: Identity | None, journal_dir: Path) -> None:
        """Open the journal of `job` in `journal_dir`, which must be ours alone, and start the scanner as `user`
        (None: as we are). Raises OSError."""
        name = xxhash.xxh3_64_hexdigest(job.source + b"\0" + job.destination)
        with ExitStack() as opened:  # if it fails nothing may hold the device that they are on
            self.journal = Journal(journal_dir / f"{name}.journal")
            opened.callback(self.journal.close)
            self.spool = opened.enter_context(_nameless(journal_dir))
            """For what comes later."""
            self.reader = self.journal.read_fd()
            """The number under which the scanner has the journal open."""
            try:
                self.scanner: subprocess.Popen[bytes] = spawn("scan", user, (self.reader,))
                opened.callback(end, self.scanner)
            finally:
                os.close(self.reader)
            self._opened = opened.pop_all()

    def undo(self) -> None:
        """End all of it."""
        self._opened.close()


def _nameless(directory: Path) -> IO[bytes]:
    """A file that is gone when it is closed (as tempfile makes them, whose import takes longer than all this)."""
    path = directory / f".spool-{os.urandom(8).hex()}"
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    os.unlink(path)
    return os.fdopen(fd, "w+b")
