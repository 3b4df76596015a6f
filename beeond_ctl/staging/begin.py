"""The first steps of a transfer, before what does the rest has even been read in: a scanner takes time to start."""

from __future__ import annotations

import os
import threading
from contextlib import ExitStack, suppress

import xxhash

from beeond_ctl.staging import wire
from beeond_ctl.staging.journal import Journal
from beeond_ctl.staging.proof import HASH
from beeond_ctl.staging.spawn import end, spawn, start
from beeond_ctl.staging.spool import Spool

TYPE_CHECKING = False
if TYPE_CHECKING:
    import subprocess
    from typing import Any, Final

    from beeond_ctl.staging.job import Identity, Job

_VERSION: Final = 3
_STRENGTHS: Final = ("read_back", "durable", "live")
"""What a journal's proofs are worth: as much as those of the weakest run that has written there."""


def header_of(job: Job) -> dict[str, Any]:
    """What a journal's header says of `job`."""
    return {
        "version": _VERSION,
        "source": job.source.hex(),
        "destination": job.destination.hex(),
        "flags": list(job.flags),
        "hash": HASH,
        "read_back": "metadata-only" not in job.flags,
        "durable": job.durable,
        "live": job.live,
    }


def header_in(text: bytes) -> dict[str, Any]:
    """The header that a record is. Raises ValueError, ProtocolError."""
    header = wire.loads(text)
    if not (isinstance(header, dict) and wire.is_token(header.get("token"))):
        raise ValueError("no header")
    return header


class Begun:
    """What a transfer needs, and what earlier runs have left of it. Whoever has it, has to end it."""

    def __init__(
        self, job: Job, user: Identity | None, journal_dir: str | os.PathLike[str], nodes: int
    ) -> None:
        """Open the journal of `job` in `journal_dir`, which must be ours alone, start the scanner as `user` (None: as
        we are), put this run on record, and tell the scanner what it needs to know. Raises OSError."""
        name = xxhash.xxh3_64_hexdigest(job.source + b"\0" + job.destination)
        self.run = 1
        self.token = ""
        self.unclean = False
        """Whether a run before has not ended in order, and may have left temporary names."""
        self.root_made = False
        self.root_mode: int | None = None
        """What the destination's root had before it was opened up."""
        self.gone: list[tuple[int, int, int]] = []
        """Where in `spool` the directories are in which such runs have written."""
        self.on_record: set[bytes] = set()
        """Fingerprints of the lines of directories that the journal has, before anything is written in them."""
        with ExitStack() as opened:  # if it fails nothing may hold the device that they are on
            self.journal = Journal(os.path.join(journal_dir, f"{name}.journal"))
            opened.callback(self.journal.close)
            self.spool = Spool(journal_dir)
            opened.callback(self.spool.close)
            reader = self.journal.read_fd()
            try:
                self.scanner: subprocess.Popen[bytes] = spawn("scan", user, (reader,))
                opened.callback(end, self.scanner)
            finally:
                os.close(reader)
            config = wire.dumps(self._go_on(job, reader, nodes))
            start(threading.Thread(target=self._tell, args=(config,), daemon=True, name="config"))
            self._opened = opened.pop_all()

    def undo(self) -> None:
        """End all of it."""
        self._opened.close()

    def _tell(self, config: str) -> None:
        """It is the user's process, for which nobody else may have to wait."""
        with suppress(OSError, ValueError):  # whoever reads what it says learns that it has ended
            if self.scanner.stdin is not None:
                wire.send(self.scanner.stdin, config)

    def _read_journal(self) -> dict[str, Any]:
        """The last header in the journal; what else it says is kept. Raises OSError.

        A record that no run can have written ends it, as one that is damaged does.
        """
        header: dict[str, Any] = {}
        for kind, text in self.journal.read():
            try:
                header = self._take(kind, text) or header
            except (ValueError, wire.ProtocolError):
                self.journal.cut()
                break
        return header

    def _take(self, kind: str, text: bytes) -> dict[str, Any] | None:
        """Keep what a record says; return a header. Raises ValueError and ProtocolError, and has kept nothing then."""
        if kind == "header":
            return header_in(text)
        if kind == "run":
            self.run += 1
            self.unclean = True  # until it turns out that the run has ended in order
        elif kind == "dirs":
            dirs = text.decode("ascii")
            if not dirs.isprintable():  # it is to be one line to others
                raise ValueError("more than a line")
            self.on_record.add(xxhash.xxh3_128_digest(text))
            self.gone.append((*self.spool.put(dirs, ""), 0))
        elif kind == "closed":
            self.unclean, self.root_mode = False, None
            self.gone.clear()
            self.on_record.clear()
        elif kind == "mode":
            mode = int(text, 8)
            if not 0 <= mode <= 0o7777:
                raise ValueError("no mode")
            self.root_mode = mode
        elif kind == "root":
            self.root_made = True
        return None

    def _go_on(self, job: Job, reader: int, nodes: int) -> dict[str, Any]:
        """Put this run on record; what the scanner needs to know, which has the journal open as `reader`."""
        header = self._read_journal()
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot = file.read().strip()
        self.token = header.get("token") or os.urandom(4).hex()
        stated = {**header_of(job), "token": self.token, "boot": boot}
        usable = (
            header.get("version") == _VERSION
            and header.get("hash") == HASH
            and (header.get("read_back") or not stated["read_back"])
            and header.get("source") == stated["source"]
            and header.get("destination") == stated["destination"]
            and (header.get("durable") or header.get("boot") == boot)
            and (header.get("live") or not job.live)
        )
        if not usable:
            kept = [("header", wire.dumps(stated))]
            kept += [("root", "")] if self.root_made else []
            kept += [("mode", f"{self.root_mode:o}")] if self.root_mode is not None else []
            kept += [("dirs", self.spool.get(at, length)[0]) for at, length, _ in self.gone]
            self.journal.restart()
            self.journal.append(*kept)
        elif any(header.get(key) and not stated[key] for key in _STRENGTHS):
            weaker = {key: bool(header.get(key) and stated[key]) for key in _STRENGTHS}
            self.journal.append(("header", wire.dumps({**stated, **weaker})))
        known = self.journal.length if usable else 0
        self.journal.append(("run", boot))
        if job.durable:  # otherwise it counts only until the machine is booted again
            self.journal.sync()
        return {
            "source": job.source.decode(errors="surrogateescape"),
            "destination": job.destination.decode(errors="surrogateescape"),
            "flags": list(job.flags),
            "token": self.token,
            "run": self.run,
            "durable": job.durable,
            "root_made": self.root_made,
            "root_mode": self.root_mode,
            "header": header_of(job),
            "only": job.only.decode(errors="surrogateescape"),
            "flushes": job.flushes.decode(errors="surrogateescape"),
            "alone": job.alone,
            "all_or_nothing": job.all_or_nothing,
            "list": job.listed.decode(errors="surrogateescape"),
            "outside": job.outside.decode(errors="surrogateescape"),
            "others": [path.decode(errors="surrogateescape") for path in job.others],
            "nodes": nodes,
            "journal": [reader, known] if known else None,
        }
