"""What a transfer would do, found out by looking at both sides and changing neither. Runs as the user.

Looks as the scanner and the copiers would: links are not followed below either root, names may be any bytes. What
happens between this and the transfer is not foreseen.
"""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from beeond_ctl.staging import child as program
from beeond_ctl.staging import wire
from beeond_ctl.staging.causes import CAUSES, StagingError, cause_of
from beeond_ctl.staging.job import Job
from beeond_ctl.staging.metadata import is_copy
from beeond_ctl.staging.places import blocked, refusal
from beeond_ctl.staging.spawn import end, last_words, spawn
from beeond_ctl.staging.surplus import Walk
from beeond_ctl.staging.transfer import Fold, show, show_path
from beeond_ctl.staging.tree import Tree
from beeond_ctl.staging.writable import why_not

if TYPE_CHECKING:
    from collections.abc import Callable, Collection
    from pathlib import Path

    from beeond_ctl.staging.job import Identity
    from beeond_ctl.staging.tree import Dir

NAMES: Final = 1000
"""Names that are kept of what would be deleted."""

_DIRECTORIES_OPEN: Final = 64
_TOLD: Final = 100
_GRACE_S: Final = 5.0


@dataclass(slots=True)
class Preview:
    """What would be done. `complete`: everything was looked at, and not only as much as time allowed.

    `unwritable` says why nothing can be put at the destination. `unread` are directories of it that cannot be looked
    into: what would be deleted there is not known.
    """

    missing: bool = False
    refused: str = ""
    unwritable: str = ""
    copy: int = 0
    copy_bytes: int = 0
    skip: int = 0
    special: int = 0
    delete: int = 0
    delete_top: int = 0
    """Of these those that are not in others that are deleted."""
    delete_names: list[str] = field(default_factory=list)
    unread: Fold = field(default_factory=Fold)
    problems: dict[str, Fold] = field(default_factory=dict)
    complete: bool = True


def look(
    job: Job, known: Callable[[str, os.stat_result], bool] | None = None,
    *, within_s: float = 1e9, dead: Collection[str] = (),
) -> Preview:  # fmt: skip
    """Look at what `job` would do, for `within_s` seconds at most.

    `known` says whether a file of this path and status is proved to have been copied as it is now. `dead` are tokens of
    earlier runs, whose temporary names go with what they are in (see `tokens_of`).
    """
    found = Preview()
    source = os.fsdecode(job.source)
    destination = os.fsdecode(job.destination)
    rename: tuple[str, str] | None = None
    try:
        info = os.stat(source)
        if stat.S_ISREG(info.st_mode):
            into = destination.endswith("/") or os.path.isdir(destination)
            real = os.path.realpath(source)
            name = os.path.basename(source.rstrip("/")) if into else os.path.basename(destination)
            rename = (os.path.basename(real), name)
            source, destination = os.path.dirname(real), destination if into else os.path.dirname(destination)
        elif not stat.S_ISDIR(info.st_mode):
            found.refused = f"{source}: neither a file nor a directory"
            return found
        tree = Tree(source, make=False)
    except (FileNotFoundError, NotADirectoryError):
        why = blocked(source)
        found.missing, found.refused = not why, f"{show_path(job.source)}: {why}" if why else ""
        return found
    except OSError as error:
        found.refused = f"{source}: {CAUSES[cause_of(error)]}"
        return found
    target: Tree | None = None
    try:
        of = os.fsdecode(job.source) if rename else source
        found.refused = _refused(job, of, destination, rename[1] if rename else "")
        if found.refused:
            return found
        target = Tree(destination, make=False)
    except FileNotFoundError:
        pass  # it would be made
    except PermissionError as error:
        if not _is_ours(destination):
            found.refused = f"{destination}: {CAUSES[cause_of(error)]}"
            return found
        if "delete" in job.flags and rename is None:  # it would be opened up
            found.unread = found.unread.add(1, ["."])
    except OSError as error:
        found.refused = f"{destination}: {CAUSES[cause_of(error)]}"
        return found
    hidden = os.path.basename(os.fsdecode(job.flushes)) if job.flushes else ""
    if not job.flushes or os.path.dirname(os.fsdecode(job.flushes)) != os.path.normpath(source):
        hidden = ""
    if "delete" in job.flags and job.alone:
        dead = {*dead, *_dead_flushes(job)}
    _Look(found, job, tree, target, known, hidden, dead, time.monotonic() + within_s).walk(rename)
    if (found.copy or found.delete) and not _is_opened_up(destination):
        found.unwritable = why_not(os.fsencode(destination))
    return found


def _is_opened_up(destination: str) -> bool:
    """Whether `destination` is there and our own, so that it is opened up if it is closed."""
    try:
        return _is_ours(destination) and not os.statvfs(destination).f_flag & os.ST_RDONLY
    except OSError:
        return False


def _dead_flushes(job: Job) -> list[str]:
    """Tokens of flushes that did not end in order."""
    from beeond_ctl.staging import flushed
    from beeond_ctl.staging.begin import header_of

    return flushed.known(os.fsdecode(job.flushes), header_of(job)).tokens if job.flushes else []


def tokens_of(journals: Path) -> set[str]:
    """The tokens of the transfers whose journals are in the directory `journals`, if there is one."""
    from beeond_ctl.staging.begin import header_in
    from beeond_ctl.staging.journal import records

    found: set[str] = set()
    for path in journals.glob("*.journal"):
        with suppress(OSError, ValueError, wire.ProtocolError):
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                headers = [header_in(text) for kind, text in records(fd) if kind == "header"]
            finally:
                os.close(fd)
            found.update(header["token"] for header in headers[-1:])  # the last one counts
    return found


def _is_ours(directory: str) -> bool:
    try:
        return os.stat(directory).st_uid == os.geteuid()
    except OSError:
        return False


def _refused(job: Job, source: str, destination: str, name: str) -> str:
    """Why the transfer would be refused, as its summary says it. Raises OSError."""
    text = refusal(
        source, destination, name=name, delete="delete" in job.flags, outside=os.fsdecode(job.outside),
        others=map(os.fsdecode, job.others),
    )  # fmt: skip
    return f"{show_path(job.destination)}: {text}" if text else ""


class _Look:
    """One look."""

    def __init__(
        self, found: Preview, job: Job, tree: Tree, target: Tree | None,
        known: Callable[[str, os.stat_result], bool] | None, hidden: str, dead: Collection[str], deadline_s: float,
    ) -> None:  # fmt: skip
        self.found, self.tree, self.target, self.known = found, tree, target, known
        self.only, self.hidden, self.deadline_s = os.fsdecode(job.only), hidden, deadline_s
        self.update, self.delete = "update" in job.flags, "delete" in job.flags
        self.dead = dead
        self.seen: set[tuple[int, int]] = set()

    def walk(self, rename: tuple[str, str] | None) -> None:
        if rename is not None:
            self._entry(self.tree.root, self._there(""), "", *rename)
            return
        start = self.only
        if start:
            above, _, name = start.rpartition("/")
            try:
                parent = self.tree.open(above)
                is_dir = stat.S_ISDIR(os.stat(name, dir_fd=parent.fd, follow_symlinks=False).st_mode)
            except (OSError, StagingError) as error:
                self._problem(error, start)
                return
            if not is_dir:
                self._entry(parent, self._there(above), above, name, name)
                return
        pending = [start]
        while pending:
            if time.monotonic() > self.deadline_s:
                self.found.complete = False
                return
            path = pending.pop()
            try:
                pending += self._directory(path)
            except (OSError, StagingError) as error:
                self._problem(error, path or ".")
            self.tree.trim(_DIRECTORIES_OPEN)
            if self.target is not None:
                self.target.trim(_DIRECTORIES_OPEN)

    def _there(self, path: str) -> Dir | None:
        try:
            return self.target.open(path) if self.target is not None else None
        except (OSError, StagingError):
            return None

    def _directory(self, path: str) -> list[str]:
        source, target = self.tree.open(path), self._there(path)
        below, names = [], set()
        with os.scandir(source.fd) as entries:
            for entry in entries:
                names.add(entry.name)
                if not path and entry.name == self.hidden:
                    continue
                if entry.is_dir(follow_symlinks=False):
                    below.append(f"{path}/{entry.name}" if path else entry.name)
                else:
                    self._entry(source, target, path, entry.name, entry.name)
        if self.delete and self.target is not None and not self.only:
            self._surplus(self.target, path, names)
        return below

    def _entry(self, source: Dir, target: Dir | None, path: str, name: str, placed: str) -> None:
        found, full = self.found, f"{path}/{name}" if path else name
        try:
            info = os.stat(name, dir_fd=source.fd, follow_symlinks=False)
        except FileNotFoundError:
            return
        except OSError as error:
            self._problem(error, full)
            return
        if not (stat.S_ISREG(info.st_mode) or stat.S_ISLNK(info.st_mode)):
            found.special += 1
            return
        if target is not None and self._kept(source, target, full, name, placed, info):
            found.skip += 1
            return
        found.copy += 1
        if stat.S_ISREG(info.st_mode) and (info.st_nlink == 1 or (info.st_dev, info.st_ino) not in self.seen):
            found.copy_bytes += info.st_size
            if info.st_nlink > 1:
                self.seen.add((info.st_dev, info.st_ino))

    def _kept(
        self, source: Dir, target: Dir, full: str, name: str, placed: str, info: os.stat_result
    ) -> bool:
        proved = self.known is not None and stat.S_ISREG(info.st_mode) and self.known(full, info)
        if not (proved or self.update):
            return False
        try:
            there = os.stat(placed, dir_fd=target.fd, follow_symlinks=False)
            if stat.S_ISLNK(info.st_mode):
                text = os.readlink(name, dir_fd=source.fd)
                return stat.S_ISLNK(there.st_mode) and os.readlink(placed, dir_fd=target.fd) == text
        except OSError:
            return False
        return is_copy(info, there, proved=proved)

    def _surplus(self, target: Tree, path: str, wanted: set[str]) -> None:
        """Find what would be deleted in one directory."""
        try:
            directory = target.open(path).fd
            with os.scandir(directory) as entries:
                surplus = [entry for entry in entries if entry.name not in wanted]
        except (FileNotFoundError, StagingError):
            return  # it would be made, or nothing be deleted
        except OSError as error:
            self._unread(error, path)
            return
        if not surplus:
            return
        for doomed in Walk(os.fstat(self.tree.root.fd), self.dead, self._unread).doomed(
            directory, path, surplus
        ):
            if time.monotonic() > self.deadline_s:
                self.found.complete = False
                return
            self.found.delete += 1
            self.found.delete_top += doomed.is_top
            if len(self.found.delete_names) < NAMES:
                self.found.delete_names.append(doomed.path)

    def _unread(self, _: OSError | StagingError, path: str) -> None:
        self.found.unread = self.found.unread.add(1, [path or "."])

    def _problem(self, error: OSError | StagingError, path: str) -> None:
        text = CAUSES[cause_of(error)]
        self.found.problems[text] = self.found.problems.get(text, Fold()).add(1, [path])


def look_as(job: Job, user: Identity, *, within_s: float) -> dict[str, Any]:
    """What `job` would delete, looked up by a process of `user`: `count`, some `names`, how many directories cannot be
    looked into (`unread`), `complete`; or why it would be `refused`. Raises OSError."""
    child = spawn("preview", user)
    order = {
        "source": job.source.hex(), "destination": job.destination.hex(), "flags": list(job.flags),
        "flushes": job.flushes.hex(), "outside": job.outside.hex(), "others": [path.hex() for path in job.others],
        "alone": job.alone, "within_s": within_s,
    }  # fmt: skip
    try:
        said, _ = child.communicate(wire.dumps(order).encode("ascii") + b"\n", timeout=within_s + _GRACE_S)
        found = wire.loads(said)
        count, names, complete = int(found["count"]), list(found["names"]), bool(found["complete"])
        refused = {"refused": str(found["refused"])[:400]} if found["refused"] else {}
        return {
            "count": count, "names": [str(name)[:400] for name in names[:_TOLD]],
            "unread": int(found["unread"]), "complete": complete, **refused,
        }  # fmt: skip
    except subprocess.TimeoutExpired:
        raise TimeoutError(f"no answer within {within_s:.0f} s") from None
    except (wire.ProtocolError, ValueError, KeyError, TypeError):
        raise OSError(f"no answer: {last_words(child) or 'no reason given'}") from None
    finally:
        end(child)


def _main() -> None:
    order = wire.loads(sys.stdin.buffer.readline(wire.MAX_LINE))
    source, destination, flushes, outside = (
        bytes.fromhex(order[key]) for key in ("source", "destination", "flushes", "outside")
    )
    job = Job(
        source, destination, tuple(order["flags"]),
        flushes=flushes, alone=bool(order["alone"]), outside=outside, others=tuple(map(bytes.fromhex, order["others"])),
    )  # fmt: skip
    found = look(job, within_s=float(order["within_s"]))
    names = [show(name) for name in found.delete_names[:_TOLD]]
    answer = {
        "count": found.delete, "names": names, "unread": found.unread.count, "complete": found.complete,
        "refused": found.refused,
    }  # fmt: skip
    sys.stdout.write(wire.dumps(answer))


def proofs_of(job: Job) -> Callable[[str, os.stat_result], bool]:
    """What flushes have proved of `job`, for `look`."""
    from beeond_ctl.staging import flushed
    from beeond_ctl.staging.begin import header_of
    from beeond_ctl.staging.proof import fingerprint

    if not job.flushes:
        return lambda _path, _info: False
    proved = set(flushed.known(os.fsdecode(job.flushes), header_of(job)).marks)

    def is_known(path: str, info: os.stat_result) -> bool:
        return fingerprint(path, info.st_size, info.st_mtime_ns, info.st_ctime_ns, info.st_ino) in proved

    return is_known


def main() -> None:
    """The program (see `spawn`)."""
    program.run(_main)
