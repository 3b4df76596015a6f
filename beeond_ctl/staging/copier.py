"""The copier: does what the coordinator hands out, as the user, and says what it has proved. A program of its own.

Reads lines of fields (see `wire`) from standard input and answers each but the first kind with one line of JSON:

    setup SETUP                            the transfer (see `scan`); before anything else, and when it changes
    look   TAG DIRS PAYLOAD                which of these names are ordinary files, and their sizes, for the scanner
    copy   TAG DIRS PAYLOAD                entries of a batch: temporary name, data, metadata, sync, read back, rename
    last   TAG DIRS PAYLOAD                the same of entries that found no room before; now this is a failure
    apart  TAG DIRS PAYLOAD                the same of names that cannot be links to a file that is there
    make   TAG PAYLOAD                     a new temporary name for a big file, which all share; says the PAYLOAD for
                                           what follows
    piece  TAG PAYLOAD INDEX               bytes INDEX*PIECE... of a big file, into that name
    place  TAG PAYLOAD CHECKSUM            metadata and final name of a big file whose pieces are all there; CHECKSUM is
                                           that of theirs
    drop   TAG PAYLOAD                     remove the temporary name of a big file
    link   TAG DIRS PAYLOAD                further names of files that are there
    delete TAG DIRS SEEN                   remove what the source directories no longer have; SEEN as the scanner says
    clean  TAG DIRS                        remove temporary names of this transfer
    gone   TAG DIRS                        the same in directories that the source may have no more
    finish TAG DIRS                        metadata of directories, and sync them
    unmark TAG                             remove the name that tells the destination from other directories

TAG makes temporary names unique among all copiers of a transfer and all attempts at one batch. An answer counts every
entry once: copied, skipped, failed, grown (become big since it was scanned, to be handed out anew in pieces), or
crowded (no room for it while others are copied: DIRS and PAYLOAD of another try), apart (to be copied, as no link can
be made: the same of batches), or left (there was too much to delete in one go: DIRS and SEEN of the next). What it
proves is opaque to the parent: a text of proofs (see `proof`), or for a piece `[FINGERPRINT, TEMPORARY_NAME, INDEX,
CHECKSUM]`.

When one file is ready for its name depends on where it goes (`_Sync`): where a file can be synced only by itself, each
is synced; on a local file system a batch is written, synced at once, and then read back and renamed.

Ordinary small files are done by `engine`, many in one go. What it leaves, it leaves as if it had not been here, and the
long way is taken (`_write`, `_place`): there every step that can fail has its message.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import sys
import threading
import time
from collections import deque

from beeond_ctl import libc
from beeond_ctl.staging import child, data, wire
from beeond_ctl.staging.causes import NO_ROOM, StagingError, cause_of, text_of
from beeond_ctl.staging.engine import engine, native
from beeond_ctl.staging.metadata import copy_metadata, learn_gid, same_time
from beeond_ctl.staging.proof import fingerprint, pack, proof
from beeond_ctl.staging.quiet import EARLY_NS, MEMORY, PATIENCE_S, awaited_ns, filesystem, is_quiet, limit_ns
from beeond_ctl.staging.sight import is_own, own_place, unmark
from beeond_ctl.staging.tree import Dir, Tree
from beeond_ctl.staging.wire import EXAMPLES, PIECE

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from typing import Any

    from beeond_ctl.staging.surplus import Doomed, Walk

_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_LIST = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_MAKE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_NO_LINK = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV)
_TRIES = 3
_LOCAL = {"ext2", "ext3", "ext4", "xfs", "btrfs", "f2fs", "overlay"}
_MAX_THREADS = 32
_LEVELS = 128
"""How many directories are opened at a time only to be looked into: 1024 open files are enough for that."""
_TURN_S = 6.0
"""How long one work removes what is surplus: less than it takes until others do the work of a node that has fallen
silent (`spread.SILENCE_S`). What was stopped meanwhile must not go on once they have."""
_PROBE = 16
_PROBE_S, _WAITS, _SATURATED = 0.02, 3, 0.8
_APART = 8 << 20
"""Bytes that fill a batch of files that cannot be links."""
_LOOKS = 16
"""Names that one thread looks at at once."""
_FIRST, _FEW, _MANY = 2, 2, 64
"""Entries that one thread takes on at once: until it is known whether calls wait; where they do, and others of the same
directory wait for its lock; where they do not."""


class _Sync:
    """How data gets durable where it goes."""

    NONE, WHOLE, EACH = range(3)

    def __init__(self, fd: int, *, durable: bool, mounted_below: bool = False) -> None:
        """`fd` is a directory there; `mounted_below`: not the destination itself, which `whole` is for."""
        kind = filesystem(fd)
        self.drop_cache = kind not in MEMORY
        self.how = _Sync.WHOLE if kind in _LOCAL and not mounted_below else _Sync.EACH
        if not durable or kind in MEMORY:
            self.how = _Sync.NONE
        self.flags: int = engine.DROP_CACHE if self.drop_cache else 0
        self.flags |= engine.SYNC_EACH if self.how == _Sync.EACH else 0
        # Elsewhere close(2) may be the first to say that data is lost, when the file has its name already.
        self.flags |= engine.NAMELESS if self.how == _Sync.NONE and kind in {*MEMORY, *_LOCAL} else 0
        # Network file systems refuse that.
        self.flags |= engine.NO_REPLACE if kind in {*MEMORY, *_LOCAL} else 0
        self.fd = fd

    def whole(self) -> None:
        """Everything on the file system (syncfs(2), which reports errors since Linux 5.8). Raises OSError."""
        libc.call("syncfs", self.fd)


class _FailedError(Exception):
    """One entry was not copied; says which side it was."""

    def __init__(self, side: str, error: OSError | StagingError) -> None:
        super().__init__(str(error))
        self.side = side
        self.error = error


class _Result:
    """What an answer says."""

    def __init__(self, *, splits: bool = False, waits: bool = False) -> None:
        """`splits`: files that have grown big since they were scanned are not copied, but described in `grown`;
        `waits`: nor do entries fail for which there is no room."""
        self.splits = splits
        self.waits = waits
        self.copied = self.skipped = self.bytes = 0
        self.failures: list[list[str]] = []
        """Cause, side, name and text of each. Only the first of a kind have the latter two, and so it is with `notes`:
        no more are shown, and paths may be long."""
        self._said: dict[tuple[str, str], int] = {}
        self.notes: dict[str, list[str]] = {}
        self.proofs = bytearray()
        self.extra: dict[str, Any] = {}
        self.grown: list[list[Any]] = []
        self.crowded: dict[str, tuple[list[str], list[str]]] = {}
        """Files and links for which there was no room, by directory."""

    def miss(self, failure: _FailedError, path: str, name: str, *, is_link: bool) -> None:
        """`name` in the directory `path` was not copied."""
        if self.waits and failure.side == "destination" and cause_of(failure.error) in NO_ROOM:
            self.crowded.setdefault(path, ([], []))[is_link].append(name)
        else:
            self.fail(failure.side, failure.error, _join(path, name))

    def fail(self, side: str, error: OSError | StagingError, path: str) -> None:
        cause = cause_of(error)
        said = self._said[cause, side] = self._said.get((cause, side), 0) + 1
        named = [wire.shown(path), text_of(error)] if said <= EXAMPLES else ["", ""]
        self.failures.append([cause, side, *named])

    def note(self, kind: str, path: str) -> None:
        names = self.notes.setdefault(kind, [])
        names.append(wire.shown(path) if len(names) < EXAMPLES else "")

    def line(self, tag: str) -> str:
        return wire.dumps(
            {
                "tag": tag,
                "copied": self.copied,
                "skipped": self.skipped,
                "bytes": self.bytes,
                "failures": self.failures,
                "notes": self.notes,
                "proofs": pack(self.proofs),
                "grown": self.grown,
                **({"crowded": self._crowded()} if self.crowded else {}),
                **self.extra,
            }
        )

    def _crowded(self) -> list[Any]:
        """How many entries found no room, and DIRS and PAYLOAD of another try."""
        groups = [[index, *names] for index, names in enumerate(self.crowded.values())]
        count = sum(len(files) + len(links) for files, links in self.crowded.values())
        return [count, wire.dumps(list(self.crowded)), wire.dumps(groups)]


class _Written:
    """A file or link to copy, and then a temporary file that waits for its sync."""

    __slots__ = (
        "digest", "grown", "info", "is_link", "name", "path", "quiet", "source", "sparse", "target", "temp",
    )  # fmt: skip

    def __init__(self, name: str, path: str, source: Dir, target: Dir, temp: str, *, is_link: bool) -> None:
        self.name, self.path, self.source, self.target, self.temp = name, path, source, target, temp
        self.is_link = is_link
        self.info: os.stat_result
        self.digest = b""
        self.grown = self.sparse = False
        self.quiet = True


class _Group:
    """Files and links of one directory, in the order of their numbers."""

    def __init__(self, path: str, files: list[str], links: list[str], first: int) -> None:
        self.path, self.files, self.links, self.first = path, files, links, first
        self.at = 0

    def take(self, count: int) -> _Part:
        """The next `count` files, or else links; none where the directory is all there is."""
        is_link = self.at >= len(self.files)
        names, at = (self.links, self.at - len(self.files)) if is_link else (self.files, self.at)
        part = _Part(self.path, names[at : at + count], self.first + self.at, is_link=is_link)
        self.at += len(part.names)
        return part

    def is_done(self) -> bool:
        return self.at == len(self.files) + len(self.links)


class _Apart:
    """Names of which no link can be made, in batches to copy."""

    def __init__(self) -> None:
        self._batches: list[list[Any]] = []
        self._dirs: dict[str, list[Any]] = {}
        self._count = self._bytes = 0

    def add(self, path: str, name: str, info: os.stat_result) -> None:
        """Take in one."""
        group = self._dirs.setdefault(path, [len(self._dirs), [], []])
        group[2 if stat.S_ISLNK(info.st_mode) else 1].append(name)
        self._count += 1
        self._bytes += info.st_size
        if self._bytes >= _APART:
            self._end()

    def _end(self) -> None:
        if self._dirs:
            dirs, groups = wire.dumps(list(self._dirs)), wire.dumps(list(self._dirs.values()))
            self._batches.append([self._count, self._bytes, dirs, groups])
        self._dirs, self._count, self._bytes = {}, 0, 0

    def batches(self) -> list[list[Any]]:
        """Of each: entries, bytes, DIRS and PAYLOAD."""
        self._end()
        return self._batches


class _Part:
    """Entries of one directory that one thread takes on at once, and what became of them."""

    __slots__ = ("first", "is_link", "names", "path", "written")

    def __init__(self, path: str, names: list[str], first: int, *, is_link: bool) -> None:
        self.path, self.names, self.first, self.is_link = path, names, first, is_link
        self.written = b""


class _Turn:
    """What one work removes, and for how long."""

    def __init__(self) -> None:
        self.removed: list[str] = []
        """The surplus entries, without what was in them."""
        self._until_s: float | None = None

    def remove(self, doomed: Doomed) -> bool:
        """Remove it, if there is time; whether there was. Raises OSError."""
        now_s = time.clock_gettime(time.CLOCK_BOOTTIME)  # which goes on while the machine sleeps
        if self._until_s is None:  # listings before do not count: something is removed in each turn
            self._until_s = now_s + _TURN_S
        if now_s > self._until_s:
            return False
        with contextlib.suppress(FileNotFoundError):
            (os.rmdir if doomed.is_dir else os.unlink)(doomed.name, dir_fd=doomed.directory)
        if doomed.is_top:
            self.removed.append(doomed.path)
        return True


class Copier:
    """One copier and the transfer it works for."""

    def __init__(self, setup: dict[str, Any]) -> None:
        """Open both roots. Raises OSError, StagingError when they are not what the scanner saw."""
        begun, used = time.monotonic(), child.used_s()
        self.setup = setup
        self.token: str = setup["token"]
        flags = setup["flags"]
        self.resumed: bool = setup["run"] > 1
        self.private: bool = setup["private"]  # nobody else uses the destination before all is proved
        self.update, self.read_back = "update" in flags, "metadata-only" not in flags
        self.source = Tree(setup["source"], make=False)
        self.target = Tree(setup["destination"], make=False, fresh=setup["fresh"] and not self.resumed)
        self.there = (
            Tree(setup["destination"], make=False) if setup["again"] else None
        )  # to look, and make nothing
        self._recognize()
        self.target.begin_to_make()  # not before: it may be another directory
        self.source_root_device = os.fstat(self.source.root.fd).st_dev
        self.same_device = self.source_root_device == os.fstat(self.target.root.fd).st_dev
        self.sync = _Sync(self.target.root.fd, durable=setup["durable"])
        self.syncs = {self.target.root.device: self.sync}
        # Where nothing was before, nobody looks, and half a file never stays: a name less, and no rename.
        self.direct = engine.DIRECT if setup["direct"] and self.sync.how == _Sync.NONE else 0
        self.clock: str = setup["clock"]  # where the time is to be had; '' where nobody writes to the source
        self.quiet_ns = 0
        self.patient_until_s = time.monotonic() + PATIENCE_S
        self.threads = 1
        self.quick = False  # calls are known not to wait
        self._wanted_s = self._seen_s = 0.0  # see `_by_threads`
        self._adapt(begun, used)
        if self.threads > 1:  # that was too little to tell how many
            self.threads = _MAX_THREADS
        self.rename = dict([setup["single"]]) if setup["single"] else {}

    def _recognize(self) -> None:
        """See that both roots are what the scanner has under these names. Raises OSError, StagingError."""
        trees = {"source": self.source, "destination": self.target}
        for (side, tree), inode, where in zip(
            trees.items(), self.setup["inodes"], self.setup["places"], strict=True
        ):
            if os.fstat(tree.root.fd).st_ino != inode:
                raise StagingError("other", f"this node sees another directory as the {side}")
            if where is not None and own_place(tree.root.fd) != where:
                raise StagingError("other", f"the {side} is on a file system of the first node's own")
        if self.setup["marker"]:
            # Where what all nodes share is not mounted, this node may have a directory of its own.
            if self.setup["places"][0] is None and is_own(self.source.root.fd):
                raise StagingError("other", "this node sees another directory as the source")
            try:
                os.stat(self.setup["marker"], dir_fd=self.target.root.fd, follow_symlinks=False)
            except FileNotFoundError:
                raise StagingError("other", "this node sees another directory as the destination") from None

    # --- looks --------------------------------------------------------------------------------------------

    def look(self, dirs: list[str], payload: list[Any], result: _Result) -> None:
        """Say which names are ordinary files. What becomes of all others, errors too, is for the scanner to say."""
        looked: list[tuple[list[Any], ...]] = [([], [], [], [], []) for _ in payload]
        opened: dict[str, tuple[int, int]] = {}
        lock = threading.Lock()

        def enter(path: str) -> None:
            with contextlib.suppress(OSError, StagingError):
                source, target = self.source.open(path).fd, -1
                if self.there is not None:
                    with contextlib.suppress(OSError, StagingError):
                        target = self.there.open(path).fd
                opened[path] = source, target

        def parts() -> Iterator[tuple[int, str, list[str]]]:
            for place, (index, names) in enumerate(payload):
                for at in range(0, len(names), _LOOKS):
                    yield place, dirs[index], names[at : at + _LOOKS]

        def act(part: tuple[int, str, list[str]]) -> None:
            place, path, names = part
            found: tuple[list[Any], ...] = [], [], names, [], []
            if path in opened:
                each = b"".join(os.fsencode(name) + b"\0" for name in names)
                found = engine.look(*opened[path], each, os.fsencode(f"{path}/" if path else ""))
            with lock:
                for whole, part_ in zip(looked[place], found, strict=True):
                    whole.extend(part_)

        self._spread(iter(dirs), enter, 1)
        self._spread(parts(), act, _LOOKS)
        if self.there is not None:
            self.there.trim(0)  # what is put in its place meanwhile is to be seen the next time
        result.extra["looked"] = wire.dumps(looked)

    # --- batches ------------------------------------------------------------------------------------------

    def copy(self, tag: str, dirs: list[str], payload: list[Any], result: _Result) -> None:
        """Copy the entries of a batch."""
        temp = f"{child.PREFIX}{self.token}.{tag}."
        if self.clock:
            self.quiet_ns = self._limit_ns()
        groups, number = [], 0
        for index, files, links in payload:
            groups.append(_Group(dirs[index], files, links, number))
            number += len(files) + len(links)
        items = self._copy_ordinary(temp, dirs, groups, result)
        if self.sync.how == _Sync.WHOLE:
            written = self._each(lambda item: self._write(item, result), items, result)
            if written:
                try:
                    self.sync.whole()
                except OSError as error:
                    for item in written:
                        self._unlink(item)
                        failure = _FailedError("destination", error)
                        result.miss(failure, item.path, item.name, is_link=item.is_link)
                    written = []
            self._each(lambda item: self._place(item, result), written, result)
        else:
            self._each(lambda item: self._write(item, result) and self._place(item, result), items, result)

    def _sync_of(self, target: Dir) -> _Sync:
        """How data gets durable in this directory: something else may be mounted below the destination."""
        if target.device not in self.syncs:
            self.syncs[target.device] = _Sync(target.fd, durable=self.setup["durable"], mounted_below=True)
        return self.syncs[target.device]

    def _copy_ordinary(
        self, temp: str, dirs: list[str], groups: list[_Group], result: _Result
    ) -> list[_Written]:
        """Make the directories and copy files by `engine`; returns what it left.

        Directories take turns: the kernel makes one name at a time in each.
        """
        flags = engine.VERIFY if self.read_back else 0
        flags |= engine.LIVE if self.clock else 0
        left: list[_Written] = []
        waiting: list[_Part] = []
        both, lock = self._opener(dirs), threading.Lock()

        def parts() -> Iterator[_Part]:
            rest, done = deque(groups), 0
            while rest:
                group = rest.popleft()
                yield group.take(
                    _FEW if self.threads > 1 else _MANY if self.quick or done >= _PROBE else _FIRST
                )
                done += _FIRST
                if not group.is_done():
                    rest.append(group)

        def act(part: _Part, what: int) -> None:
            opened = both(part.path)
            if isinstance(opened, _FailedError):
                with lock:
                    self._fail_part(part, opened, result)
                return
            source, target = opened
            if part.is_link or not native or target.default_acl or self.rename:
                left.extend(
                    _Written(name, part.path, source, target, f"{temp}{number}", is_link=part.is_link)
                    for number, name in enumerate(part.names, part.first)
                )
                return
            proofs, size, others, different, written = engine.copy(
                source.fd,
                target.fd,
                part.names,
                os.fsencode(f"{part.path}/" if part.path else ""),
                temp,
                part.first,
                -1 if target.gid is None else target.gid,
                flags
                | what
                | self.direct
                | self._sync_of(target).flags
                | (engine.MADE if target.made else 0)
                | (engine.PRIVATE if self.private else 0),
                part.written,
                self.quiet_ns,
            )
            if not what & engine.PLACE:
                part.written = written
                waiting.append(part)
                return
            with lock:
                result.proofs += proofs
                result.bytes += size
                result.copied += len(part.names) - len(others) - len(different)
            for number in others:
                name, temp_name = part.names[number], f"{temp}{part.first + number}"
                left.append(_Written(name, part.path, source, target, temp_name, is_link=False))
            for number in different:
                result.fail("destination", StagingError("mismatch"), _join(part.path, part.names[number]))

        if self.sync.how != _Sync.WHOLE:
            self._spread(parts(), lambda part: act(part, engine.WRITE | engine.PLACE), _FIRST)
            return left
        self._spread(parts(), lambda part: act(part, engine.WRITE), _FIRST)
        if not waiting:
            return left
        try:
            self.sync.whole()
        except OSError:  # whose data that was is not known: all are written again, and then it is reported
            for part in waiting:
                part.written = b""
                for number in range(len(part.names)):
                    with contextlib.suppress(OSError, StagingError):
                        os.unlink(f"{temp}{part.first + number}", dir_fd=self.target.open(part.path).fd)
        self._spread(iter(waiting.copy()), lambda part: act(part, engine.PLACE), _FIRST)
        return left

    @staticmethod
    def _fail_part(part: _Part, failure: _FailedError, result: _Result) -> None:
        for name in part.names:
            result.miss(failure, part.path, name, is_link=part.is_link)
        if not part.names:
            result.fail(failure.side, failure.error, part.path or ".")
            result.extra["uncounted"] = result.extra.get("uncounted", 0) + 1

    def _opener(self, dirs: list[str]) -> Callable[[str], tuple[Dir, Dir] | _FailedError]:
        """What opens both directories of one of `dirs`, the destination's made if need be, or says why not.

        Whoever asks first does it.
        """
        opened: dict[str, tuple[Dir, Dir] | _FailedError] = {}
        locks = {path: threading.Lock() for path in dirs}

        def both(path: str) -> tuple[Dir, Dir] | _FailedError:
            with locks[path]:
                if path not in opened:
                    opened[path] = self._open_both(path, new=True)
            return opened[path]

        return both

    def _open_both(self, path: str, *, new: bool = False) -> tuple[Dir, Dir] | _FailedError:
        side = "destination"
        try:
            target = self.target.open(path, new=new)
            side = "source"
            return self.source.open(path), target
        except (OSError, StagingError) as error:
            return _FailedError(side, error)

    def _open_all(self, dirs: list[str]) -> dict[str, tuple[Dir, Dir] | _FailedError]:
        """Both directories of each of `dirs`, or why not."""
        opened: dict[str, tuple[Dir, Dir] | _FailedError] = {}

        def act(path: str) -> None:
            opened[path] = self._open_both(path)

        self._spread(iter(dirs), act, 1)
        return opened

    @staticmethod
    def _opens(tree: Tree, path: str) -> bool:
        try:
            tree.open(path)
        except (OSError, StagingError):
            return False
        return True

    def _adapt(self, begun: float, used: tuple[float, float]) -> None:
        """As many threads as calls have to be in flight to keep one processor busy; one where calls do not wait.

        `begun` and `used` are from `time.monotonic` and `child.used_s`. How long a thread has to wait for a processor
        on a busy machine says nothing about calls.
        """
        ran_s, wanted_s = (now - before for now, before in zip(child.used_s(), used, strict=True))
        calls_s = (time.monotonic() - begun - wanted_s) / max(ran_s, 0.0005)
        self.threads = 1 if calls_s < _WAITS else min(_MAX_THREADS, 1 + int(calls_s))

    def _each(
        self, act: Callable[[_Written], bool], items: list[_Written], result: _Result
    ) -> list[_Written]:
        """Run `act` for every item, with failures noted and tidied; returns those for which it said True."""
        done: list[_Written] = []

        def one(item: _Written) -> None:
            try:
                if act(item):
                    done.append(item)
            except _FailedError as failure:
                self._unlink(item)
                result.miss(failure, item.path, item.name, is_link=item.is_link)

        self._spread(iter(items), one, 1)
        return done

    def _spread(self, tasks: Iterator[Any], act: Callable[[Any], None], weight: int) -> None:
        """Run `act` for every task, of `weight` entries or more each, by as many threads as are worth it."""
        begun, used, count, known = time.monotonic(), child.used_s(), 0, False
        while self.threads == 1 and (task := next(tasks, None)) is not None:
            act(task)
            count += weight
            if not known and (count >= _PROBE or time.monotonic() - begun > _PROBE_S):
                known = True
                self._adapt(begun, used)
                self.quick = self.threads == 1
        if self.threads > 1:
            self._by_threads(tasks, act)

    def _by_threads(self, tasks: Iterator[Any], act: Callable[[Any], None]) -> None:
        """Run `act` for every task. Raises what it raises."""
        lock = threading.Lock()
        wanted_s: list[float] = []
        errors: list[BaseException] = []

        def following() -> object:
            with lock:
                return next(tasks, None)

        def work(task: object) -> None:
            before_s = child.wanted_s()
            try:
                while task is not None and not errors:
                    act(task)
                    task = following()
            except BaseException as error:  # noqa: BLE001 (raised again below)
                errors.append(error)
            wanted_s.append(child.wanted_s() - before_s)

        begun = time.monotonic()
        threads: list[threading.Thread] = []
        while len(threads) < self.threads and (task := following()) is not None:
            thread = threading.Thread(target=work, args=(task,))
            if not child.starts(thread):
                work(task)
                break
            threads.append(thread)
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        # A quick batch says little by itself, so that several are counted together.
        self._wanted_s += sum(wanted_s)
        self._seen_s += time.monotonic() - begun
        if self._seen_s < _PROBE_S:
            return
        share, self._wanted_s, self._seen_s = self._wanted_s / self._seen_s, 0.0, 0.0
        # Too many, and they wait for one another, as one at a time may use the interpreter.
        if share > _SATURATED:
            self.threads //= 2
        elif share < _SATURATED / 2:
            self.threads = min(_MAX_THREADS, 2 * self.threads)

    def _unlink(self, item: _Written) -> None:
        with contextlib.suppress(OSError):
            os.unlink(item.temp, dir_fd=item.target.fd)

    # --- one entry ----------------------------------------------------------------------------------------

    def _write(self, item: _Written, result: _Result) -> bool:
        """Write the temporary file. False when there is nothing to do. Raises _FailedError."""
        if item.is_link:
            self._symlink(item, result)
            return False
        for _ in range(_TRIES):
            if self._write_once(item, result):
                return not item.grown
            self._unlink(item)
        raise _FailedError("source", StagingError("changed"))

    def _write_once(self, item: _Written, result: _Result) -> bool:
        """One attempt; False when the source changed meanwhile."""
        side = "source"
        source = target = -1
        try:
            source = _open_source(item.source.fd, item.name)
            item.info = info = os.fstat(source)
            if not stat.S_ISREG(info.st_mode):
                raise StagingError("changed", "no longer a file")  # noqa: TRY301
            if result.splits and info.st_size > 2 * PIECE:
                item.grown = True
                result.grown.append(self._big_one(item.path, item.name, info))
                return True
            item.quiet = self._is_quiet(
                info
            )  # it may wait, so what is stored meanwhile has to be written out after it
            self._settle(source)
            side = "destination"
            try:
                target = os.open(item.temp, _MAKE, 0o600, dir_fd=item.target.fd)
            except FileExistsError:
                os.unlink(item.temp, dir_fd=item.target.fd)  # an earlier attempt's, nobody else has this name
                target = os.open(item.temp, _MAKE, 0o600, dir_fd=item.target.fd)
            size = info.st_size
            try:
                if size <= data.SMALL and info.st_blocks * 512 >= size:
                    item.digest = data.copy_small(source, target, size)
                else:
                    item.sparse = info.st_blocks * 512 < size
                    self._copy_large(source, target, item)
            except StagingError:
                if not _same(info, os.fstat(source)):
                    return False
                raise
            for note in copy_metadata(
                source, target, info, learn_gid(item.target, target), inherits_acl=item.target.default_acl
            ):
                result.note(note, _join(item.path, item.name))
            if not item.quiet:
                os.utime(target, ns=(info.st_atime_ns, info.st_mtime_ns - EARLY_NS))
            side = "source"
            if not _same(info, os.fstat(source)):
                return False
            side = "destination"
            if self._sync_of(item.target).how == _Sync.EACH:
                os.fsync(target)
        except data.SourceError as error:
            raise _FailedError("source", error.error) from None
        except (OSError, StagingError) as error:
            raise _FailedError(side, error) from None
        finally:
            if target >= 0:
                side = "destination"
                try:
                    os.close(target)
                except OSError as error:  # NFS and FUSE may report a full disk only here
                    raise _FailedError(side, error) from None
                finally:
                    os.close(source)
            elif source >= 0:
                os.close(source)
        return True

    def _is_quiet(self, info: os.stat_result) -> bool:
        """Whether the file can be proved; one that was written just before we began is waited for."""
        if not self.clock:
            return True
        latest_ns = max(info.st_mtime_ns, info.st_ctime_ns)
        self.quiet_ns = awaited_ns(latest_ns, self.quiet_ns, self._limit_ns, self.patient_until_s)
        return is_quiet(info.st_mtime_ns, info.st_ctime_ns, self.quiet_ns)

    def _limit_ns(self) -> int:
        return limit_ns(self.clock, self.source.root.fd)

    def _settle(self, source: int) -> None:
        """Have later stores through a mapping change the file's times, as only those into clean pages do. Raises
        OSError."""
        if self.clock:
            os.fdatasync(source)

    def _copy_large(self, source: int, target: int, item: _Written) -> None:
        size = item.info.st_size
        if item.sparse:
            os.ftruncate(target, size)
        if self.same_device and data.reflink(source, target):
            item.digest = (
                data.hash_range(source, 0, size, sparse=item.sparse) or b"" if self.read_back else b""
            )
        elif self.read_back:
            item.digest = data.copy_range(source, target, 0, size, sparse=item.sparse)
        else:
            data.clone_range(source, target, 0, size, sparse=item.sparse)

    def _place(self, item: _Written, result: _Result) -> bool:
        """Prove the temporary file and give it its name. Raises _FailedError."""
        info, directory = item.info, item.target.fd
        try:
            if self.read_back:
                self._prove(item)
            else:
                _compare(item, os.stat(item.temp, dir_fd=directory, follow_symlinks=False))
            name = self.rename.get(item.name, item.name)
            self._give_name(item.target, item.temp, name, info.st_mtime_ns, item.path, result)
        except (OSError, StagingError) as error:
            raise _FailedError("destination", error) from None
        result.copied += 1
        result.bytes += info.st_size
        path = _join(item.path, item.name)
        if not item.quiet:
            result.note("early", path)
        else:
            mark = fingerprint(path, info.st_size, info.st_mtime_ns, info.st_ctime_ns, info.st_ino)
            result.proofs += proof(mark, item.digest if self.read_back else b"")
        return True

    def _prove(self, item: _Written) -> None:
        """Read back what was written and compare. Raises OSError, StagingError."""
        info = item.info
        fd = _open_written(item.target.fd, item.temp)
        try:
            if self._sync_of(item.target).drop_cache:
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            there = os.fstat(fd)
            if info.st_size <= data.SMALL and not item.sparse:
                digest = data.hash_small(fd, info.st_size)
            else:
                digest = data.hash_range(fd, 0, info.st_size, sparse=item.sparse)
        finally:
            os.close(fd)
        if digest != item.digest:
            raise StagingError("mismatch")
        _compare(item, there)

    def _give_name(
        self, directory: Dir, temp: str, name: str, mtime_ns: int, path: str, result: _Result
    ) -> None:
        """Give what waits in the directory `path` under the name `temp` its own, where a newer file is kept. Raises
        OSError, StagingError."""
        fd = directory.fd
        if not (directory.made and self.private):
            # Where nothing was before, others may have put something by now: most likely not.
            fresh = directory.made and self._sync_of(directory).flags & engine.NO_REPLACE
            if fresh and engine.put_new(fd, os.fsencode(temp), os.fsencode(name)):
                return
            self._keep_newer(directory, name, mtime_ns, _join(path, name), result)
        os.rename(temp, name, src_dir_fd=fd, dst_dir_fd=fd)

    def _keep_newer(self, directory: Dir, name: str, mtime_ns: int, path: str, result: _Result) -> None:
        """Keep a file at the destination that is newer than what is about to replace it, under another name. Raises
        OSError, and StagingError where a device, FIFO or socket would be replaced."""
        fd = directory.fd
        try:
            there = os.stat(name, dir_fd=fd, follow_symlinks=False)
        except FileNotFoundError:
            return
        if not (stat.S_ISREG(there.st_mode) or stat.S_ISLNK(there.st_mode)):
            raise StagingError("in-the-way")
        if stat.S_ISLNK(there.st_mode) or there.st_mtime_ns <= mtime_ns:
            return
        number = 0
        while True:
            kept = self._kept_name(fd, name, number)
            try:
                os.link(name, kept, src_dir_fd=fd, dst_dir_fd=fd, follow_symlinks=False)
                break
            except FileExistsError:
                info = os.stat(kept, dir_fd=fd, follow_symlinks=False)
                if (info.st_dev, info.st_ino) == (there.st_dev, there.st_ino):
                    break  # by a copier that died before it could replace the file
                number += 1
            except OSError as error:
                if error.errno not in _NO_LINK:
                    raise
                if _is_there(fd, kept):
                    number += 1
                    continue
                os.rename(name, kept, src_dir_fd=fd, dst_dir_fd=fd)
                break
        result.note("newer", path)

    def _kept_name(self, fd: int, name: str, number: int) -> str:
        """The name under which a newer file is kept, shortened to what the directory `fd` takes."""
        end = f".newer-{self.token}.{self.setup['run']}" + (f".{number}" if number else "")
        limit = os.fpathconf(fd, "PC_NAME_MAX")
        most = (limit if limit > len(end) else 255) - len(end)  # a file system may say nothing of it
        while len(os.fsencode(name)) > most:
            name = name[:-1]
        return name + end

    def _symlink(self, item: _Written, result: _Result) -> None:
        """Copy a symbolic link: its text, and its times. Raises _FailedError."""
        side, name, directory = "source", item.name, item.target.fd
        try:
            info = os.stat(name, dir_fd=item.source.fd, follow_symlinks=False)
            text = os.readlink(name, dir_fd=item.source.fd)  # which sets its access time
            side = "destination"
            try:
                os.symlink(text, item.temp, dir_fd=directory)
            except FileExistsError:
                os.unlink(item.temp, dir_fd=directory)
                os.symlink(text, item.temp, dir_fd=directory)
            if os.readlink(item.temp, dir_fd=directory) != text:  # the same here
                raise StagingError("mismatch")  # noqa: TRY301
            with contextlib.suppress(PermissionError):
                if os.geteuid() == 0:
                    os.chown(item.temp, info.st_uid, info.st_gid, dir_fd=directory, follow_symlinks=False)
                else:
                    os.chown(item.temp, -1, info.st_gid, dir_fd=directory, follow_symlinks=False)
            with contextlib.suppress(NotImplementedError):
                os.utime(
                    item.temp,
                    ns=(info.st_atime_ns, info.st_mtime_ns),
                    dir_fd=directory,
                    follow_symlinks=False,
                )
            self._give_name(item.target, item.temp, name, info.st_mtime_ns, item.path, result)
        except (OSError, StagingError) as error:
            raise _FailedError(side, error) from None
        result.copied += 1

    # --- big files ----------------------------------------------------------------------------------------

    def make(self, payload: dict[str, Any], result: _Result) -> None:
        """Make the temporary name of a big file, under a name that was not there and will not be again.

        Nothing else makes one. A file under a name that pieces were proved of is therefore the one that has them,
        whatever was given up, removed or begun anew in between, and whoever comes late.
        """
        temp = f"{child.PREFIX}{self.token}.p{os.urandom(8).hex()}"
        try:
            directory = self.target.open(payload["dir"])
            fd = os.open(temp, _MAKE, 0o600, dir_fd=directory.fd)
            try:
                os.ftruncate(fd, payload["entry"][1])
                inode = os.fstat(fd).st_ino
            except OSError:
                os.unlink(temp, dir_fd=directory.fd)
                raise
            finally:
                os.close(fd)
        except (OSError, StagingError) as error:
            result.fail("destination", error, _join(payload["dir"], payload["entry"][0]))
            return
        result.extra["made"] = wire.dumps({**payload, "temp": temp, "inode": inode})

    def piece(self, payload: dict[str, Any], index: int, result: _Result) -> None:
        """Copy and prove one piece of a big file."""
        path, entry, temp = payload["dir"], payload["entry"], payload["temp"]
        start = index * PIECE
        end = min(start + PIECE, entry[1])
        side = "source"
        source = target = -1
        try:
            side = "destination"
            target_dir = self.target.open(path)
            side = "source"
            source = _open_source(self.source.open(path).fd, entry[0])
            info = os.fstat(source)
            if not _as_scanned(info, entry):
                self._again(payload, info, result)
                return
            self._settle(source)
            sparse = info.st_blocks * 512 < info.st_size
            side = "destination"
            sync = self._sync_of(target_dir)
            target = self._shared_temp(temp, target_dir)
            digest: bytes | None = b""
            try:
                if self.read_back:
                    digest = data.copy_range(source, target, start, end, sparse=sparse)
                else:
                    data.clone_range(source, target, start, end, sparse=sparse)
            except StagingError:  # it has become shorter
                side = "source"
                info = os.fstat(source)
                if _as_scanned(info, entry):
                    raise
                self._again(payload, info, result)
                return
            if sync.how != _Sync.NONE:
                os.fdatasync(target)
            if self.read_back:
                if sync.drop_cache:
                    os.posix_fadvise(target, start, end - start, os.POSIX_FADV_DONTNEED)
                if data.hash_range(target, start, end, sparse=sparse) != digest:
                    raise StagingError("mismatch")  # noqa: TRY301
            side = "source"
            info = os.fstat(source)
            if not _as_scanned(info, entry):
                self._again(payload, info, result)
                return
            result.bytes += end - start
            if payload["quiet"]:
                mark = fingerprint(_join(path, entry[0]), *entry[1:])
                result.extra["piece"] = wire.dumps([mark, temp, index, digest.hex() if digest else ""])
            result.extra["digest"] = digest.hex() if digest else ""
        except data.SourceError as error:
            result.fail("source", error.error, _join(path, entry[0]))
        except (OSError, StagingError) as error:
            result.fail(side, error, _join(path, entry[0]))
        finally:
            for fd in (source, target):
                if fd >= 0:
                    os.close(fd)

    @staticmethod
    def _shared_temp(temp: str, directory: Dir) -> int:
        fd = os.open(temp, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=directory.fd)
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode) or info.st_uid != os.geteuid() or info.st_nlink != 1:
            os.close(fd)
            raise StagingError("in-the-way")
        return fd

    def _again(self, payload: dict[str, Any], info: os.stat_result, result: _Result) -> None:
        """The source is not what was scanned: say what it is now, for another attempt from the start."""
        entry = payload["entry"]
        if not stat.S_ISREG(info.st_mode):
            result.fail("source", StagingError("changed"), _join(payload["dir"], entry[0]))
            return
        result.extra["again"] = self._big_one(payload["dir"], entry[0], info)

    def _big_one(self, path: str, name: str, info: os.stat_result) -> list[Any]:
        """A file that is to be copied in pieces: their number, its size, and what `make` is to be given."""
        quiet = not self.clock or is_quiet(
            info.st_mtime_ns, info.st_ctime_ns, limit_ns(self.clock, self.source.root.fd)
        )
        entry = [name, info.st_size, info.st_mtime_ns, info.st_ctime_ns, info.st_ino]
        payload = {
            "dir": path,
            "entry": entry,
            "temp": "",
            "inode": 0,
            "atime": info.st_atime_ns,
            "quiet": quiet,
        }
        return [max(1, -(-info.st_size // PIECE)), info.st_size, wire.dumps(payload)]

    def place(self, payload: dict[str, Any], joined: str, result: _Result) -> None:
        """Give a big file, whose pieces are all proved, its metadata and its name; `joined` is their checksum."""
        path, entry, temp, quiet = payload["dir"], payload["entry"], payload["temp"], payload["quiet"]
        kept_ns = _kept_ns(entry[2], quiet)
        name = self.rename.get(entry[0], entry[0])
        source = target = -1
        side = "source"
        try:
            source = _open_source(self.source.open(path).fd, entry[0])
            info = os.fstat(source)
            if not _as_scanned(info, entry):
                self._again(payload, info, result)
                return
            side = "destination"
            directory = self.target.open(path)
            try:
                target = os.open(temp, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory.fd)
            except FileNotFoundError:
                there = os.stat(name, dir_fd=directory.fd, follow_symlinks=False)
                if (
                    there.st_ino != payload["inode"]
                    or there.st_size != entry[1]
                    or not same_time(kept_ns, there.st_mtime_ns)
                ):
                    raise
                # it is this very file: a node that was given up meanwhile has placed it
            else:
                if os.fstat(target).st_size != entry[1]:
                    raise StagingError("mismatch")
                for note in copy_metadata(source, target, info, None, inherits_acl=directory.default_acl):
                    result.note(note, _join(path, entry[0]))
                os.utime(target, ns=(payload["atime"], kept_ns))  # of before its pieces were read
                if self._sync_of(directory).how != _Sync.NONE:
                    os.fsync(target)
                if not same_time(kept_ns, os.fstat(target).st_mtime_ns):
                    raise StagingError("mismatch")
                self._give_name(directory, temp, name, info.st_mtime_ns, path, result)
        except (OSError, StagingError) as error:
            result.fail(side, error, _join(path, entry[0]))
            return
        finally:
            for fd in (source, target):
                if fd >= 0:
                    os.close(fd)
        result.copied = 1
        if not quiet:
            result.note("early", _join(path, entry[0]))
            return
        mark = fingerprint(_join(path, entry[0]), *entry[1:])
        result.proofs += proof(mark, bytes.fromhex(joined) if self.read_back else b"")

    def drop(self, payload: dict[str, Any]) -> None:
        """Remove the temporary name of a big file that was given up."""
        with contextlib.suppress(OSError, StagingError):
            os.unlink(payload["temp"], dir_fd=self.target.open(payload["dir"]).fd)

    # --- after the files ----------------------------------------------------------------------------------

    def link(self, tag: str, dirs: list[str], payload: list[Any], result: _Result) -> None:
        """Give files that are there their further names."""
        number, refused = 0, _Apart()
        for index, entries, _ in payload:
            path = dirs[index]
            for name, (first_path, entry) in entries:
                number += 1
                temp = f"{child.PREFIX}{self.token}.{tag}.{number}"
                try:
                    first_dir, directory = self.target.open(first_path).fd, self.target.open(path)
                    self._link(first_dir, entry, directory, path, name, temp, result)
                    # Whichever of its names comes first in the next run: the file is proved. Not while others
                    # write to it: what was copied under its first name may be older than this entry.
                    if not self.clock:
                        result.proofs += proof(fingerprint(_join(path, name), *entry[1:]), b"")
                except _LinkRefusedError:
                    self._refuse(path, name, refused, result)
                except (OSError, StagingError) as error:
                    result.fail("destination", error, _join(path, name))
        result.extra["apart"] = refused.batches()

    def _refuse(self, path: str, name: str, refused: _Apart, result: _Result) -> None:
        """Have a name that cannot be a link copied: by whoever is idle, as it may be large."""
        try:
            info = os.stat(name, dir_fd=self.source.open(path).fd, follow_symlinks=False)
        except (OSError, StagingError) as error:
            result.fail("source", error, _join(path, name))
        else:
            result.note("links", _join(path, name))
            refused.add(path, name, info)

    def _link(
        self,
        first_dir: int,
        entry: list[Any],
        directory: Dir,
        path: str,
        name: str,
        temp: str,
        result: _Result,
    ) -> None:
        first, size, mtime, _, _ = entry
        try:
            there = os.stat(first, dir_fd=first_dir, follow_symlinks=False)
        except FileNotFoundError:
            raise StagingError("first-link") from None
        if stat.S_ISLNK(there.st_mode):  # as when it was copied: not every file system keeps its times
            is_it = self._is_text_of(path, name, first_dir, first)
        else:
            is_it = there.st_size == size and same_time(mtime, there.st_mtime_ns)
            if self.clock and not is_it:
                is_it = there.st_size == size and same_time(_kept_ns(mtime, quiet=False), there.st_mtime_ns)
        if not is_it:
            raise StagingError("first-link")
        with contextlib.suppress(FileNotFoundError):
            info = os.stat(name, dir_fd=directory.fd, follow_symlinks=False)
            if (info.st_dev, info.st_ino) == (there.st_dev, there.st_ino):
                result.skipped += 1
                return
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temp, dir_fd=directory.fd)
        try:
            os.link(first, temp, src_dir_fd=first_dir, dst_dir_fd=directory.fd, follow_symlinks=False)
        except OSError as error:
            if error.errno in _NO_LINK:
                raise _LinkRefusedError from None
            raise
        try:
            self._give_name(directory, temp, name, mtime, path, result)
        except (OSError, StagingError):
            os.unlink(temp, dir_fd=directory.fd)
            raise
        result.copied += 1

    def _is_text_of(self, path: str, name: str, directory: int, copy: str) -> bool:
        """Whether the link `copy` in `directory` has the text of the one that the source has under `name` in `path`."""
        try:
            text = os.readlink(name, dir_fd=self.source.open(path).fd)
            return os.readlink(copy, dir_fd=directory) == text
        except (OSError, StagingError):
            return False

    def delete(self, dirs: list[str], seen: list[list[Any]], result: _Result) -> None:
        """Remove from the destination what its source directory has no entry for; `seen` says how each was scanned.

        As much as can be removed in `_TURN_S`: what is left over is told, and handed out again.
        """
        from beeond_ctl.staging.surplus import Walk  # with `re`, and seldom needed

        for tree in self._trees():
            tree.trim(0)  # what bears these names now
        walk = Walk(os.fstat(self.source.root.fd), (self.token, *self.setup["tokens"]))
        turn = _Turn()
        for number, (path, as_scanned) in enumerate(zip(dirs, seen, strict=True)):
            walk.at = path
            try:
                if not self._delete_in(path, as_scanned, walk, turn):
                    left = dirs[number:], seen[number:]
                    result.extra["left"] = [len(left[0]), *map(wire.dumps, left)]
                    break
                result.skipped += 1
            except (OSError, StagingError) as error:
                result.fail("deletion", error, walk.at or ".")
            except _FailedError as failure:
                result.fail(failure.side, failure.error, walk.at or ".")
        names = [wire.shown(name) for name in sorted(turn.removed)[:EXAMPLES]]
        result.extra["deleted"] = [len(turn.removed), names]

    def _delete_in(self, path: str, as_scanned: list[Any], walk: Walk, turn: _Turn) -> bool:
        """Remove what is surplus in one directory; whether that is all. Raises OSError, StagingError, _FailedError."""
        from beeond_ctl.staging.surplus import is_spared

        wanted, is_as_scanned = self._wanted(path, as_scanned)
        directory = self.target.open(path)
        for _ in range(_TRIES):
            lacking = {name for name, is_copied in wanted.items() if is_copied}
            surplus = []
            with os.scandir(directory.fd) as entries:
                for entry in entries:
                    lacking.discard(entry.name)
                    if entry.name not in wanted and not is_spared(_join(path, entry.name)):
                        surplus.append(entry)
            if not surplus:
                return True
            if not is_as_scanned:
                raise _FailedError("source", StagingError("changed"))
            parts = path.split("/") if path else []
            if any(walk.is_source(self.target.open("/".join(parts[:at])).fd) for at in range(len(parts) + 1)):
                raise StagingError("is-source")
            if lacking:  # what is there may be it, under a name that is not the same to us
                name = min(lacking)
                walk.at = _join(path, name)
                if _is_there(directory.fd, name):
                    raise StagingError("spelling")
                raise _FailedError("source", StagingError("changed"))  # it is new there
            try:
                with contextlib.closing(walk.doomed(directory.fd, path, surplus)) as doomed:
                    return all(turn.remove(each) for each in doomed)
            except OSError as error:
                if error.errno != errno.ENOTEMPTY:  # a listing may leave something out while it gets shorter
                    raise
        raise StagingError("changed")

    def _wanted(self, path: str, as_scanned: list[Any]) -> tuple[dict[str, bool], bool]:
        """The names in a directory of the source, and whether they are copied; whether that can be all of them. Raises
        _FailedError.

        A listing that is shorter than the truth would cost the copies: the directory has to be the one that was
        scanned, before and after, and to have no fewer names.
        """
        above, _, name = path.rpartition("/")
        try:
            above_fd = self.source.open(above).fd if path else None
            at = name if path else self.setup["source"]
            fd = os.open(at, _LIST | (os.O_NOFOLLOW if path else 0), dir_fd=above_fd)
            try:
                before = os.fstat(fd)
                wanted = {}
                with os.scandir(fd) as entries:
                    for entry in entries:
                        is_copied = entry.is_file(follow_symlinks=False) or entry.is_symlink()
                        is_copied = is_copied or entry.is_dir(follow_symlinks=False)
                        wanted[entry.name] = is_copied and _join(path, entry.name) != self.setup["hidden"]
            finally:
                os.close(fd)
            after = os.stat(at, dir_fd=above_fd, follow_symlinks=not path)
        except (OSError, StagingError) as error:
            raise _FailedError("source", error) from None
        inode, is_mounted, count = as_scanned
        found = {(info.st_ino, info.st_dev != self.source_root_device) for info in (before, after)}
        return wanted, found == {(inode, is_mounted)} and len(wanted) >= count

    def clean(self, dirs: list[str], result: _Result) -> None:
        """Remove what runs of this transfer that were killed have left."""

        def act(path: str) -> None:
            try:
                if path in ("", ".") or self._opens(self.source, path):  # else it must not be made for that
                    self._clean_in(self.target.open(path).fd)
                result.skipped += 1
            except (OSError, StagingError) as error:
                result.fail("destination", error, path or ".")

        self._in_turns(dirs, act, self.source, self.target)

    def gone(self, dirs: list[str]) -> None:
        """The same in directories that the source may have no more. What cannot be looked into stays as it is."""
        there = Tree(self.setup["destination"], make=False)

        def act(path: str) -> None:
            if not self._opens(self.source, path):
                with contextlib.suppress(OSError, StagingError):
                    self._clean_in(there.open(path).fd)

        # `..` would lead elsewhere: a flush's journal may say anything
        known = [path for path in dirs if {"", ".", ".."}.isdisjoint(path.split("/"))]
        self._in_turns(known, act, self.source, there)
        there.close()

    def _in_turns(self, dirs: list[str], act: Callable[[str], None], *trees: Tree) -> None:
        """Run `act`, which opens directories of `trees`, for each of `dirs`, not too many of them at a time."""
        some: list[str] = []
        levels = 0
        for path in dirs:
            some.append(path)
            levels += path.count("/") + 1
            if levels >= _LEVELS:
                self._spread(iter(some), act, 1)
                for tree in trees:
                    tree.trim(_LEVELS)
                some, levels = [], 0
        self._spread(iter(some), act, 1)

    def _clean_in(self, directory: int) -> None:
        prefix = tuple(f"{child.PREFIX}{token}." for token in (self.token, *self.setup["tokens"]))
        for name in os.listdir(directory):
            if name.startswith(prefix) and name != self.setup["marker"]:
                with contextlib.suppress(FileNotFoundError):  # the root is handed out twice
                    os.unlink(name, dir_fd=directory)

    def finish(self, dirs: list[str], result: _Result) -> None:
        """Give directories the metadata of their sources, children first, and sync them."""
        opened = self._open_all(dirs)  # before any of them gets a mode that lets nobody pass

        def act(path: str) -> None:
            both = opened[path]
            try:
                if isinstance(both, _FailedError):
                    raise both
                source, target = both
                may_fold = (
                    self.setup["folds"] or target.device != self.target.root.device
                )  # tried at the root alone
                if may_fold and not self.setup["single"] and (name := _clash(source, target)):
                    result.fail("destination", StagingError("same-name"), _join(path, name))
                    return
                if (path or self.setup["root_made"]) and not self.setup["single"]:
                    self._finish_one(source.fd, target, path, result)
                if self._sync_of(target).how == _Sync.EACH:
                    child.sync_directory(target.fd)
                result.skipped += 1
            except (OSError, StagingError) as error:
                result.fail("destination", error, path or ".")
            except _FailedError as failure:
                result.fail(failure.side, failure.error, path or ".")

        self._spread(iter(reversed(dirs)), act, 1)
        if self.sync.how == _Sync.WHOLE:
            try:
                self.sync.whole()
            except OSError as error:
                result.extra["uncounted"] = 1
                result.fail("destination", error, ".")

    @staticmethod
    def _finish_one(source: int, target: Dir, path: str, result: _Result) -> None:
        info = os.fstat(source)
        try:
            strip = not target.made and os.geteuid() in (0, os.fstat(target.fd).st_uid)
            notes = copy_metadata(source, target.fd, info, None, inherits_acl=target.default_acl, strip=strip)
        except PermissionError:
            if target.made or os.fstat(target.fd).st_uid == os.geteuid():
                raise
            notes = [
                "foreign"
            ]  # another user's directory that we may write to: its metadata is not ours to set
        for note in notes:
            result.note(note, path or ".")

    def unmark(self, result: _Result) -> None:
        """Remove the name by which other nodes know the destination, whose own metadata have been set before, and give
        a destination that was there the mode that it had."""
        root, marker, mode = self.target.root, self.setup["marker"], self.setup.get("root_mode")
        try:
            if marker:
                self.target.unlock()
                unmark(root.fd, marker)
                if self.setup["root_made"] and not self.setup["single"]:
                    self._finish_one(self.source.root.fd, root, "", _Result())
            if mode is not None:
                os.fchmod(root.fd, mode)
            if self._sync_of(root).how != _Sync.NONE:
                child.sync_directory(root.fd)
        except (OSError, StagingError) as error:
            result.fail("destination", error, marker or ".")

    def trim(self) -> None:
        """Close what is not in use any more."""
        for tree in self._trees():
            tree.trim()

    def close(self) -> None:
        """Close everything."""
        for tree in self._trees():
            tree.close()

    def _trees(self) -> list[Tree]:
        return [self.source, self.target, *([self.there] if self.there else [])]


class _LinkRefusedError(Exception):
    """The file system makes no (more) hard links to this file."""


def _is_there(directory: int, name: str) -> bool:
    try:
        os.stat(name, dir_fd=directory, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True


def _join(path: str, name: str) -> str:
    return f"{path}/{name}" if path else name


def _clash(source: Dir, target: Dir) -> str:
    """A name of the source that has become one with another, where names that differ may be the same. Raises OSError.

    Each has an entry of its own, spelled as it is, or one that was there before and is spelled otherwise.
    """
    there, names = set(os.listdir(target.fd)), set(os.listdir(source.fd))

    def identity(name: str) -> tuple[int, int]:
        info = os.stat(name, dir_fd=target.fd, follow_symlinks=False)
        return info.st_dev, info.st_ino

    others = {identity(name) for name in there - names} if names - there else set()
    for name in sorted(names - there):
        try:
            mine = identity(name)
        except FileNotFoundError:
            continue  # neither file, directory nor link, or new
        if mine not in others:
            return name
        others.remove(mine)
    return ""


def _compare(item: _Written, there: os.stat_result) -> None:
    """Size and time of what was written with what was read. Raises StagingError."""
    info = item.info
    if there.st_size != info.st_size or not same_time(
        _kept_ns(info.st_mtime_ns, item.quiet), there.st_mtime_ns
    ):
        raise StagingError("mismatch")


def _kept_ns(mtime_ns: int, quiet: bool) -> int:  # noqa: FBT001
    """The time that a copy gets."""
    return mtime_ns if quiet else mtime_ns - EARLY_NS


def _same(one: os.stat_result, other: os.stat_result) -> bool:
    return (
        one.st_mtime_ns == other.st_mtime_ns
        and one.st_size == other.st_size
        and one.st_ctime_ns == other.st_ctime_ns
    )


def _as_scanned(info: os.stat_result, entry: list[Any]) -> bool:
    return (
        stat.S_ISREG(info.st_mode)
        and [info.st_size, info.st_mtime_ns, info.st_ctime_ns, info.st_ino] == entry[1:]
    )


def _open_source(directory: int, name: str) -> int:
    """Open a file to be copied: at once, whatever is under that name; one with a lease once that is given back."""
    try:
        return os.open(name, _READ, dir_fd=directory)
    except BlockingIOError:
        fd = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise StagingError("changed", "no longer a file")
        return os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        os.close(fd)


def _open_written(directory: int, name: str) -> int:
    """Open what was written for reading, which is not to set its access time."""
    try:
        return os.open(name, _READ | os.O_NOATIME, dir_fd=directory)
    except PermissionError as error:
        if error.errno == errno.EPERM:  # it belongs to another user, as where root is mapped to one
            return os.open(name, _READ, dir_fd=directory)
    return _open_unreadable(directory, name)


def _open_unreadable(directory: int, name: str) -> int:
    """Open a file of ours for reading whose mode keeps its owner, but not others, from that."""
    fd = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory)
    try:
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode) or info.st_uid != os.geteuid() or info.st_mode & stat.S_IRUSR:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        mode = stat.S_IMODE(info.st_mode)
        os.chmod(f"/proc/self/fd/{fd}", mode | stat.S_IRUSR)
        try:
            return os.open(name, _READ | os.O_NOATIME, dir_fd=directory)
        finally:
            os.chmod(f"/proc/self/fd/{fd}", mode)
    finally:
        os.close(fd)


def _answer(copier: Copier, fields: list[str]) -> str:
    kind, tag = fields[0], fields[1]
    result = _Result(splits=kind in {"copy", "apart"}, waits=kind == "copy")
    if kind == "look":
        copier.look(wire.loads(fields[2]), wire.loads(fields[3]), result)
    elif kind in {"copy", "last", "apart"}:
        copier.copy(tag, wire.loads(fields[2]), wire.loads(fields[3]), result)
    elif kind == "make":
        copier.make(wire.loads(fields[2]), result)
    elif kind == "piece":
        copier.piece(wire.loads(fields[2]), int(fields[3]), result)
    elif kind == "place":
        copier.place(wire.loads(fields[2]), fields[3], result)
    elif kind == "drop":
        copier.drop(wire.loads(fields[2]))
    elif kind == "link":
        copier.link(tag, wire.loads(fields[2]), wire.loads(fields[3]), result)
    elif kind == "delete":
        copier.delete(wire.loads(fields[2]), wire.loads(fields[3]), result)
    elif kind == "clean":
        copier.clean(wire.loads(fields[2]), result)
    elif kind == "gone":
        copier.gone(wire.loads(fields[2]))
    elif kind == "finish":
        copier.finish(wire.loads(fields[2]), result)
    elif kind == "unmark":
        copier.unmark(result)
    else:
        raise wire.ProtocolError(f"unknown work {kind!r}")
    copier.trim()
    return result.line(tag)


def _serve(lines: Iterable[list[str]]) -> None:
    copier: Copier | None = None
    unusable = "no transfer was set up"
    for fields in lines:
        if fields[0] == "setup":
            if copier:
                copier.close()
            try:
                copier = Copier(wire.loads(fields[1]))
            except (OSError, StagingError) as error:
                copier, unusable = None, text_of(error)
            continue
        answer = _answer(copier, fields) if copier else wire.dumps({"tag": fields[1], "unusable": unusable})
        wire.send(sys.stdout.buffer, answer)


def main() -> None:
    """The program (see `spawn`)."""
    os.umask(0)  # everything here is made with the mode that it is to have, or for its owner alone
    sys.dont_write_bytecode = True  # but for this
    child.run(lambda: _serve(wire.lines(sys.stdin.buffer)))
