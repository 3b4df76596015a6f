"""The scanner: walks the source as the user and says what there is to do. A program of its own.

Reads one line of JSON from standard input and writes lines of fields (see `wire`) to standard output:

    making  MODE                          the root of the destination is to be opened up, and has this mode (octal), or
                                          is to be made (no MODE); waits for a line `go`
    ready   SETUP                         what every copier needs to know
    missing TEXT                          there is no source; nothing follows
    refused JSON                          `[SIDE, CAUSE, TEXT]`, why it makes no sense; nothing follows
    batch   ENTRIES BYTES DIRS PAYLOAD    files and links to copy
    kept    ENTRIES                       the destination has these already: proved by an earlier run, or `update`
    have    FLAGS   DIGESTS               what an earlier run proved of the big file that follows: 0 or 1 for each
                                          of its pieces, and the checksums of all; in several lines, if many
    big     RANGES  BYTES DIRS PAYLOAD    one file to copy in pieces
    links   ENTRIES 0     DIRS PAYLOAD    names of files that have another name in an earlier batch
    dirs    ENTRIES 0     DIRS -          directories to finish, in any order
    locked  ENTRIES 0     DIRS -          directories that let nobody pass when finished: children after parents
    gone    0       0     DIRS -          directories of earlier flushes, to be cleaned if the source has them no more
    delete  ENTRIES 0     DIRS SEEN       directories, in any order, for `delete`: what they have not goes
    look    NUMBER  0     DIRS PAYLOAD    names for any node to look at; it is answered by a line `looked NUMBER LOOKED`
    listed  DIRS    FILES JSON            how much was taken from the list of the source, or why nothing was
    special 1       0     JSON            neither file, directory nor link: named, not copied
    failed  CAUSE   SIDE  JSON            an entry that cannot be read
    dirty                                 temporary names, ours or those of others in SETUP, may be at the destination
    end

PAYLOAD of a batch: `[[INDEX_IN_DIRS, [FILE...], [SYMBOLIC_LINK...]]...]`, names only; of links: `[[INDEX_IN_DIRS,
[[NAME, FIRST]...], []]...]`, FIRST: `[DIR, ENTRY]`; of a big file: `{"dir": DIR, "entry": ENTRY, "temp":
TEMPORARY_NAME, "inode": INODE_OF_IT, "atime": NS, "quiet": BOOL}` (see `quiet`), ENTRY: `[NAME, SIZE, MTIME, CTIME,
INODE]`. TEMPORARY_NAME is empty when there is no piece to go on from. PAYLOAD of a look: `[[INDEX_IN_DIRS,
[NAME...]]...]`; LOOKED has for each of these what `engine.look` says. SEEN:
`[[INODE, IS_MOUNTED_BELOW_THE_SOURCE, NAMES]...]`.
"""

from __future__ import annotations

import binascii
import errno
import os
import stat
import sys
import threading
import time
from array import array

from beeond_ctl.staging import child, wire
from beeond_ctl.staging.causes import StagingError, cause_of, text_of
from beeond_ctl.staging.engine import engine, native
from beeond_ctl.staging.metadata import is_copy
from beeond_ctl.staging.places import blocked, refusal
from beeond_ctl.staging.proof import fingerprint
from beeond_ctl.staging.proof import marks as marks_in
from beeond_ctl.staging.sight import is_own, mark, own_place, unmark
from beeond_ctl.staging.tree import Dir, Tree
from beeond_ctl.staging.wire import LOOKS_PER_NODE, MAX_TEXT, MOST_PIECES, PIECE

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from queue import SimpleQueue
    from typing import Any

    from beeond_ctl.staging.flushed import Flushed
    from beeond_ctl.staging.listing import List, Listed

    _Answer = tuple[int, "_Seen | BaseException"]
    _Part = tuple[Callable[[bytes], "_Seen"], int, bytes, SimpleQueue[_Answer]]

_SOME, _MANY, _TURN, _FEW = 16, 1024, 32, 16
"""Entries looked at in one go: until it is known whether calls wait; where they do not; where they do, at least, of one
directory; and by each thread then."""

_KEEP, _FILES = 8, 160
"""Directories that a thread keeps open on each side; and how many open files it needs at most: on the way to the next
directory there are 64 on each side."""

_TIMED = 8
"""Of so many directories one is timed: to ask how long a thread has run takes longer than to open one, if that does not
wait."""

_SLOW_S, _CERTAIN_S, _THREADS = 0.0003, 0.02, 128
"""When a call waits longer than this on average, others are worth having in flight; what calls have to have waited in
all, so that it is no accident; and how many at most: what one processor handles if each waits for some milliseconds."""

_SHARE = 512
"""Names that a copier looks at in one go: as many as its threads take at once."""
_VAIN = 4
"""For each name that came back with nothing said of it so many are looked at here before any are handed out again."""

_WALKERS = min(4, len(os.sched_getaffinity(0))) if native else 1
"""Threads that walk where calls do not wait."""

_FIRST_ENTRIES, _BATCH_ENTRIES, _BATCH_BYTES, _BATCH_DIRS = 256, 1024, 8 << 20, 128
"""What fills a batch: entries, bytes of data, directories, or else `MAX_TEXT`. The first are small, that all copiers
soon have one, and those of a small tree their share."""
_FIRST = 64

_NAME = 256
"""Characters that a name takes, at most."""

_PIECES_SAID = 1 << 16
"""Pieces that are told in one line, which has a limit."""


class _Batch:
    """Entries on their way out, grouped by directory."""

    def __init__(self, kind: str, sent: int = 0) -> None:
        self.kind = kind
        self.sent = sent
        self.entries = _FIRST_ENTRIES if sent < _FIRST else _BATCH_ENTRIES
        self.dirs: list[str] = []
        self.groups: list[list[Any]] = []
        self.count = self.bytes = self.text = 0

    def group(self, path: str) -> list[Any]:
        """The group of the directory `path`: its index, and lists to fill."""
        if not self.dirs or self.dirs[-1] != path:
            if self.text + len(path) > MAX_TEXT:
                self.send()
            self.groups.append([len(self.dirs), [], []])
            self.dirs.append(path)
            self.text += len(path)
        return self.groups[-1]

    def add(self, path: str, name: str, size: int, which: int = 1, *, first: list[Any] | None = None) -> None:
        """Put `name` into a list of its directory's group, with its `first` one if it is a further one, and send what
        is full."""
        self.group(path)[which].append([name, first] if first else name)
        self.count += 1
        self.bytes += size
        self.text += len(path) + len(name) + (len(first[0]) + _NAME if first else 0)
        self.send_full()

    def add_files(self, path: str, names: list[str], sizes: list[int]) -> None:
        """As `add` for each of them."""
        at = 0
        while at < len(names):
            fit = max(1, (MAX_TEXT - self.text) // (len(path) + _NAME))
            room = min(_FIRST_ENTRIES, self.entries - self.count, fit)
            size, count = sum(sizes[at : at + room]), room
            if self.bytes + size >= _BATCH_BYTES:
                size = count = 0
                while self.bytes + size < _BATCH_BYTES:
                    size += sizes[at + count]
                    count += 1
            part = names[at : at + count]
            self.group(path)[1] += part
            self.count += len(part)
            self.bytes += size
            self.text += len(path) * len(part) + sum(map(len, part))
            at += len(part)
            self.send_full()

    def send_full(self) -> None:
        if (
            self.count >= self.entries
            or self.bytes >= _BATCH_BYTES
            or self.text >= MAX_TEXT
            or len(self.dirs) >= _BATCH_DIRS
        ):
            self.send()

    def send(self) -> None:
        if self.dirs:
            _say(self.kind, str(self.count), str(self.bytes), wire.dumps(self.dirs), wire.dumps(self.groups))
        self.__init__(self.kind, self.sent + 1)  # type: ignore[misc]


class _Paths:
    """Directories on their way out."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.paths: list[str] = []
        self.seen: list[list[int]] = []
        self.text = 0

    def add(self, path: str, *seen: int) -> None:
        self.paths.append(path)
        self.seen.append([*seen])
        self.text += len(path)
        if len(self.paths) >= _BATCH_DIRS or self.text >= MAX_TEXT:
            self.send()

    def send(self) -> None:
        if self.paths:
            seen = wire.dumps(self.seen) if any(self.seen) else "-"
            _say(self.kind, str(len(self.paths)), "0", wire.dumps(self.paths), seen)
        self.paths, self.seen, self.text = [], [], 0


def _say(*fields: str) -> None:
    wire.send(sys.stdout.buffer, *fields)


class Proofs:
    """What earlier runs have proved: a few bytes a file, so that ten million fit anywhere."""

    def __init__(self, known: array[int], pieces: dict[int, dict[str, dict[int, str]]]) -> None:
        """Fingerprints of proved files, and of big files' pieces the checksums, by fingerprint and temporary name."""
        self.marks = engine.marks(known)
        self.pieces = pieces

    def has(self, mark: int) -> bool:
        """Whether the file with this fingerprint is proved."""
        return engine.has(self.marks, mark)


def read_proofs(records: Iterator[tuple[str, bytes]], more: array[int]) -> Proofs:
    """The proofs in a journal's records (see `copier` for what they hold), and `more`. A malformed one is no proof."""
    known = array("Q", more)
    pieces: dict[int, dict[str, dict[int, str]]] = {}
    for kind, text in records:
        try:
            if kind == "proof":
                known += marks_in(text)
            elif kind == "piece":
                mark, temp, index, digest = wire.loads(text)
                bytes.fromhex(digest)
                pieces.setdefault(int(mark), {}).setdefault(str(temp), {})[int(index)] = digest
        except (wire.ProtocolError, ValueError, TypeError, OverflowError):
            continue
    return Proofs(known, pieces)


def _flushed(config: dict[str, Any]) -> Flushed:
    """What flushes have done of this transfer."""
    from beeond_ctl.staging.flushed import STALE_S, Flushed, is_remote, known

    if not config["flushes"]:
        return Flushed(array("Q"), [])
    begun = time.monotonic()
    found = known(config["flushes"], config["header"])
    resumed = config["journal"] and config["header"]["live"]
    if (found.marks or resumed or "update" in config["flags"]) and is_remote(config["source"]):
        # What was copied, and then written on another node, must not look here as it did before.
        time.sleep(max(0.0, STALE_S - (time.monotonic() - begun)))
    if not config["alone"]:
        found.tokens.clear()  # they may still run
        found.dirs.clear()
        found.root_mode = None
    return found


class _Trees:
    """Source and destination as one thread has them open."""

    def __init__(self, source: str, destination: str) -> None:
        self.source, self.target = Tree(source, make=False), Tree(destination, make=False)

    def there(self, path: str) -> Dir | None:
        """The directory at the destination, if it can be looked into."""
        try:
            return self.target.open(path)
        except (OSError, StagingError):
            return None


class _Seen:
    """What came of looking at some names of a directory."""

    __slots__ = ("files", "kept", "rest", "sizes")

    def __init__(self, kept: int, files: list[str], sizes: list[int]) -> None:
        self.kept, self.files, self.sizes = kept, files, sizes
        self.rest: list[tuple[str, os.stat_result | OSError, bool]] = []


class _Names:
    """Some names of a directory."""

    __slots__ = ("names", "path")

    def __init__(self, path: str, names: list[str]) -> None:
        self.path, self.names = path, names


class _Pool:
    """Threads that each look at some names for whoever has more of them than one should look at alone.

    As many as there can be: an executor fails at every task where not all of its threads can be started.
    """

    def __init__(self) -> None:
        """None as yet."""
        from queue import SimpleQueue

        self.size = 0
        self._parts: SimpleQueue[_Part] = SimpleQueue()

    def grow(self) -> bool:
        """One more; whether the system allows that."""
        started = child.starts(threading.Thread(target=self._work, daemon=True))
        self.size += started
        return started

    def map(self, look: Callable[[bytes], _Seen], parts: list[bytes]) -> list[_Seen]:
        """What `look` says of each part. Raises what it raises."""
        from queue import SimpleQueue

        if not self.size:
            return [look(part) for part in parts]
        answers: SimpleQueue[_Answer] = SimpleQueue()
        for index, part in enumerate(parts):
            self._parts.put((look, index, part, answers))
        found = dict(answers.get() for _ in parts)
        seen = []
        for index in range(len(parts)):
            answer = found[index]
            if isinstance(answer, BaseException):
                raise answer
            seen.append(answer)
        return seen

    def _work(self) -> None:
        while True:
            look, index, part, answers = self._parts.get()
            try:
                answers.put((index, look(part)))
            except BaseException as error:  # noqa: BLE001 (raised by `map`)
                answers.put((index, error))


class _Scan:
    """One walk."""

    def __init__(self, config: dict[str, Any], proofs: Proofs | None) -> None:
        self.token: str = config["token"]
        self.proofs = proofs
        self.update = "update" in config["flags"]
        self.again = self.update or config["run"] > 1 or proofs is not None
        self.alone = bool(config["alone"])
        self.only = str(config["only"])
        self.hidden = os.path.relpath(config["flushes"], config["source"]) if config["flushes"] else ""
        self.first_links: dict[int | tuple[int, int], bytes] = {}
        self.link_dirs: list[str] = []
        self.device: int | None = None
        self.clock = str(config["flushes"]) if config["header"]["live"] else ""
        self.batch, self.links = _Batch("batch"), _Batch("links")
        self.dirs, self.locked = _Paths("dirs"), _Paths("locked")
        self.delete = _Paths("delete") if "delete" in config["flags"] and not self.only else None
        self.source, self.destination = str(config["source"]), str(config["destination"])
        self.rename: dict[str, str] = {}
        self.lock = threading.Condition()
        self.pending: list[str] = []
        self.busy = self.asked = self.kept = self.sent = 0
        self.waited_s = 0.0
        self.known_waits = False
        self.threads: list[threading.Thread] = []
        self.pool: _Pool | None = None
        self.visits = 0
        self.shares = LOOKS_PER_NODE * int(config["nodes"]) if native and config["nodes"] > 1 else 0
        self.share: list[_Names] = []
        self.shared: dict[int, list[_Names]] = {}
        self.left: list[_Names] = []
        self.came_back = self.not_shared = 0
        self.unopened: set[str] = set()
        self.error: BaseException | None = None
        self.begun_s = time.monotonic()
        self.list: List | None = None
        self.listed_dirs = self.listed_files = 0

    def walk(self) -> None:
        """Everything below the source, by a few threads, or by many once calls turn out to wait."""
        self._begin()
        self._walk_some()
        for thread in self.threads:
            thread.join()
        if self.error is not None:
            raise self.error
        self.finish()

    def _begin(self) -> None:
        """Put down where the walk begins; what is above of it only gets its metadata."""
        self.busy = 0
        if not self.only:
            self.pending = [""]
            return
        trees = _Trees(self.source, self.destination)
        parts = self.only.split("/")
        above, name = ["/".join(parts[:count]) for count in range(len(parts))], parts[-1]
        try:
            for path in above:
                mode = os.fstat(trees.source.open(path).fd).st_mode
                (self.dirs if mode & 0o700 == 0o700 else self.locked).add(path)
            parent = trees.source.open(above[-1])
            if stat.S_ISDIR(os.stat(name, dir_fd=parent.fd, follow_symlinks=False).st_mode):
                self.pending = [self.only]
                return
        except (OSError, StagingError) as error:
            _fail(error, "source", self.only)
        else:
            prefix = f"{above[-1]}/" if above[-1] else ""
            target = trees.there(above[-1]) if self.again else None
            for part in self._look_at(parent, target, prefix, os.fsencode(name) + b"\0"):
                with self.lock:
                    self._take_in(above[-1], prefix, part)

    def _walk_some(self) -> None:
        """Take directories, and names that came back, until none is left or to come."""
        try:
            trees = _Trees(self.source, self.destination)
        except OSError as error:
            self.error = error
            return
        while True:
            with self.lock:
                if not self.pending:
                    self._send_share()
                self.lock.wait_for(self._is_settled)
                if not (self.left or self.pending) or self.error is not None:
                    return
                left = self.left.pop() if self.left else None
                path = left.path if left else self.pending.pop()
                self.busy += 1
            try:
                if left:
                    self._visit_left(trees, left)
                else:
                    self._visit(trees, path)
            except BaseException as error:  # noqa: BLE001 (raised again by `walk`)
                self.error = error
            with self.lock:
                self.busy -= 1
                if len(self.pending) > 1 and len(self.threads) + 1 < _WALKERS:
                    self._more_threads()
                self.lock.notify_all()

    def _is_settled(self) -> bool:
        """Whether there is something to do, or nothing to come."""
        comes = self.busy or self.shared or self.share
        return bool(self.left or self.pending) or not comes or self.error is not None

    def _more_threads(self) -> bool:
        """One more that walks; whether the system allows that."""
        thread = threading.Thread(target=self._walk_some, daemon=True)
        started = child.starts(thread)
        self.threads += [thread] if started else []
        return started

    def _visit(self, trees: _Trees, path: str) -> None:
        self.visits += 1
        timed = self.pool is None and (self.list is not None or self.visits % _TIMED == 1)
        begun, wanted = (time.monotonic(), child.wanted_s()) if timed else (0.0, 0.0)
        try:
            if len(path) > MAX_TEXT:
                raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG))  # noqa: TRY301
            source = trees.source.open(path)
            info = os.fstat(source.fd)
            listed = self.list.current(path, info) if self.list is not None else None
            if timed:
                self._waited(begun, wanted, 1)
            listing = engine.opendir(source.fd) if listed is None else None
        except (OSError, StagingError) as error:
            with self.lock:
                _fail(error, "source", path or ".")
            return
        prefix = f"{path}/" if path else ""
        target = trees.there(path) if self.again else None
        with self.lock:
            if target is None:  # what is not there yet has to be made, if only as an empty directory
                self.batch.group(path)
            (self.dirs if info.st_mode & 0o700 == 0o700 else self.locked).add(path)
        last, count = False, len(listed.files) if listed is not None else 0
        while not last:
            try:
                if listing is not None:
                    names, below, last = engine.readdir(listing, self._limit())
                elif listed is not None:
                    names, below, last = listed.others, listed.below, True
            except OSError as error:
                with self.lock:
                    _fail(error, "source", path or ".")
                break
            count += names.count(0) + len(below)
            with self.lock:
                self.pending += [prefix + name for name in below if prefix + name != self.hidden]
                if below:
                    self.lock.notify_all()
                if listed is None and self._share_out(path, names):
                    continue
            seen = self._look_at(source, target, prefix, names)
            with self.lock:
                for part in seen:
                    self._take_in(path, prefix, part, walked=listed is None)
                if listed is not None:
                    self._take_in_listed(path, listed)
        with self.lock:
            if self.delete is not None:
                device = os.fstat(trees.source.root.fd).st_dev
                self.delete.add(path, info.st_ino, int(info.st_dev != device), count)
            self.batch.send_full()
        trees.source.trim(_KEEP)
        trees.target.trim(_KEEP)

    def _visit_left(self, trees: _Trees, left: _Names) -> None:
        """Look at names that another process had, and had nothing to say of."""
        prefix = f"{left.path}/" if left.path else ""
        with self.lock:
            self.came_back -= len(left.names)
        try:
            source = trees.source.open(left.path)
        except (OSError, StagingError) as error:
            with self.lock:
                # One that went: as in `_look`.
                if left.path not in self.unopened and (
                    self.alone or not isinstance(error, FileNotFoundError)
                ):
                    _fail(error, "source", left.path or ".")
                self.unopened.add(left.path)
            return
        target = trees.there(left.path) if self.again else None
        seen = self._look_at(
            source, target, prefix, b"".join(os.fsencode(name) + b"\0" for name in left.names)
        )
        with self.lock:
            for part in seen:
                self._take_in(left.path, prefix, part, walked=True)
        trees.source.trim(_KEEP)
        trees.target.trim(_KEEP)

    # --- what others look at ------------------------------------------------------------------------------

    def _share_out(self, path: str, names: bytes) -> bool:
        """Have other processes look at `names` of the directory `path`, if these have not enough to do."""
        if not names or self.pool is None or len(self.shared) + self.came_back // _SHARE >= self.shares:
            return False
        if self.not_shared > 0:
            self.not_shared -= names.count(0)
            return False
        self.share.append(_Names(path, os.fsdecode(names).split("\0")[:-1]))
        count = sum(len(part.names) for part in self.share)
        text = sum(len(part.path) for part in self.share)
        if len(self.share) >= _BATCH_DIRS or count >= _SHARE or text >= MAX_TEXT:
            self._send_share()
        return True

    def _send_share(self) -> None:
        if not self.share:
            return
        number = self.sent = self.sent + 1
        self.shared[number] = self.share
        dirs = [part.path for part in self.share]
        groups = [[index, part.names] for index, part in enumerate(self.share)]
        self.share = []
        _say("look", str(number), "0", wire.dumps(dirs), wire.dumps(groups))

    def _hear(self) -> None:
        """Take in what others say, for as long as there is a parent."""
        try:
            for kind, number, text in wire.lines(sys.stdin.buffer):
                if kind != "looked":
                    raise wire.ProtocolError("unknown kind of line")  # noqa: TRY301
                try:
                    looked = wire.loads(text)
                except wire.ProtocolError:
                    looked = None
                with self.lock:
                    self._take_in_looked(int(number), looked)
                    self.lock.notify_all()
            raise BrokenPipeError  # noqa: TRY301
        except BaseException as error:  # noqa: BLE001 (raised again by `walk`)
            with self.lock:
                self.error = self.error or error
                self.lock.notify_all()

    def _take_in_looked(self, number: int, looked: Any) -> None:  # noqa: ANN401
        parts = self.shared.pop(number)
        found = looked if isinstance(looked, list) and len(looked) == len(parts) else [None] * len(parts)
        for part, each in zip(parts, found, strict=True):
            try:
                files, sizes, others = self._answered(each, part.names)
            except (TypeError, ValueError, LookupError, OverflowError):
                files, sizes, others = [], [], part.names
            self._keep(len(part.names) - len(files) - len(others))
            self.batch.add_files(part.path, files, sizes)
            if others:
                self.left.append(_Names(part.path, others))
                self.came_back += len(others)
                self.not_shared += _VAIN * len(others)

    def _answered(self, found: Any, names: list[str]) -> tuple[list[str], list[int], list[str]]:  # noqa: ANN401
        """What is to be copied of `names`, and what to be looked at; the rest is there. Raises TypeError, ValueError,
        OverflowError where another process does not say one thing of each."""
        files, sizes, others, marks, there = found
        if sorted(files + others) != sorted(names) or not {*map(type, sizes), *map(type, there)} <= {int}:
            raise ValueError("of other names, or not numbers")
        rows = zip(files, sizes, marks, there, strict=True)
        rest = [(name, size) for name, size, mark, what in rows if not self._is_there(mark, what)]
        return [name for name, _ in rest], [size for _, size in rest], others

    def _is_there(self, mark: int, what: int) -> bool:
        """As `engine.examine` says it, from what `engine.look` says of a file."""
        return (what > 0 and self.proofs is not None and self.proofs.has(mark)) or (what > 1 and self.update)

    def _limit(self) -> int:
        """How many entries of a directory to read in one go. Where calls wait, enough for all threads, but not more:
        the batches are to be of many directories, as in each only one name can be made at a time."""
        if self.pool is not None:
            return max(_TURN, self.pool.size * _FEW // max(1, self.busy))
        return _MANY if self.known_waits else _SOME

    def _look_at(self, source: Dir, target: Dir | None, prefix: str, names: bytes) -> list[_Seen]:
        """Look at `names`, with as many calls in flight as are worth it."""
        if not names:
            return []
        if self.pool is not None:
            each = names.split(b"\0")[:-1]
            parts = [b"\0".join(each[at : at + _FEW]) + b"\0" for at in range(0, len(each), _FEW)]
            return self.pool.map(lambda part: self._look(source, target, prefix, part), parts)
        begun, wanted = time.monotonic(), child.wanted_s()
        seen = self._look(source, target, prefix, names)
        self._waited(begun, wanted, names.count(0))
        return [seen]

    def _waited(self, begun: float, wanted: float, count: int) -> None:
        """Learn from `count` calls since `begun`, when this thread had `wanted` a processor for so long."""
        waited_s = time.monotonic() - begun - (child.wanted_s() - wanted)
        with self.lock:
            self.waited_s += waited_s
            self.asked += count
            self.known_waits = self.known_waits or self.asked >= _SOME // 2
            if self.pool is None and self.waited_s > max(_CERTAIN_S, self.asked * _SLOW_S):
                self._widen()
            if self.asked >= _MANY:
                self.waited_s, self.asked = 0.0, 0

    def _look(self, source: Dir, target: Dir | None, prefix: str, names: bytes) -> _Seen:
        kept, files, sizes, others = engine.examine(
            source.fd,
            target.fd if target else -1,
            names,
            os.fsencode(prefix),
            self.proofs.marks if self.proofs else None,
            self.update,
        )
        seen = _Seen(kept, files, sizes)
        for name in others:
            try:
                info = os.stat(name, dir_fd=source.fd, follow_symlinks=False)
            except OSError as error:
                # One that went: as if we had come later, if there is anybody who could have removed it.
                if self.alone or not isinstance(error, FileNotFoundError):
                    seen.rest.append((name, error, False))
            else:
                there = target is not None and self.has(name, info, source, target, prefix)
                seen.rest.append((name, info, there))
        return seen

    def has(self, name: str, info: os.stat_result, source: Dir, target: Dir, prefix: str) -> bool:
        """Whether the destination has the entry already, and that counts."""
        kept = self.rename.get(name, name)
        try:
            if stat.S_ISLNK(info.st_mode):
                text = os.readlink(kept, dir_fd=target.fd)
                return text == os.readlink(name, dir_fd=source.fd)
            if not stat.S_ISREG(info.st_mode):
                return False
            proved = self._proved(prefix + name, info)
            if not proved and not self.update:
                return False
            there = os.stat(kept, dir_fd=target.fd, follow_symlinks=False)
            if is_copy(info, there, proved=proved):
                info, there = _as_told(name, source.fd, info), _as_told(kept, target.fd, there)
                proved = self._proved(prefix + name, info)
        except OSError:
            return False
        return (proved or self.update) and is_copy(info, there, proved=proved)

    def _proved(self, path: str, info: os.stat_result) -> bool:
        return self.proofs is not None and self.proofs.has(
            fingerprint(path, info.st_size, info.st_mtime_ns, info.st_ctime_ns, info.st_ino)
        )

    def _widen(self) -> None:
        """Calls wait: have many in flight."""
        import resource

        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        allowed = _THREADS if limit == resource.RLIM_INFINITY else limit // _FILES
        pool = _Pool()
        for count in range(max(2, min(_THREADS, allowed))):  # as many of both kinds, if these are all
            if not (pool.grow() and (count < len(self.threads) or self._more_threads())):
                break
        if self.shares and not child.starts(threading.Thread(target=self._hear, daemon=True)):
            self.shares = 0
        self.pool = pool

    def _take_in_listed(self, path: str, listed: Listed) -> None:
        self.listed_dirs += 1
        self.listed_files += len(listed.files)
        self.batch.add_files(path, listed.files, listed.sizes)

    def _take_in(self, path: str, prefix: str, seen: _Seen, *, walked: bool = False) -> None:
        self._keep(seen.kept)
        self.batch.add_files(path, seen.files, seen.sizes)
        for name, info, there in seen.rest:
            if isinstance(info, OSError):
                _fail(info, "source", prefix + name)
            else:
                self.entry(path, prefix, name, info, there=there, walked=walked)

    def _keep(self, count: int) -> None:
        """So many more are there already; said now and then, as nothing else may be to be seen of a large directory."""
        self.kept += count
        if self.kept >= _MANY:
            self._say_kept()

    def _say_kept(self) -> None:
        if self.kept:
            _say("kept", str(self.kept))
        self.kept = 0

    def finish(self) -> None:
        """Send what is left."""
        self.batch.send()
        self.links.send()
        self._say_kept()
        self.dirs.send()
        self.locked.send()
        if self.delete is not None:
            self.delete.send()

    def entry(
        self, path: str, prefix: str, name: str, info: os.stat_result, *, there: bool, walked: bool = False
    ) -> None:
        """Take in one entry that is no directory; `there`: the destination has it; `walked`: the list has it not."""
        mode, size = info.st_mode, info.st_size
        if stat.S_ISDIR(mode):  # the file system does not tell kinds in its listings
            if prefix + name != self.hidden:
                self.pending.append(prefix + name)
                self.lock.notify_all()
            return
        regular = stat.S_ISREG(mode)
        if not regular and not stat.S_ISLNK(mode):
            _say("special", "1", "0", wire.dumps(prefix + name))
            return
        if info.st_nlink > 1:
            first = self._first_link(path, name, info, walked=walked)
            if first != (path, name):
                self.links.add(path, name, 0, first=[first[0], _entry(first[1], info)])
                return
        if there:
            self._keep(1)
        elif not regular:
            self.batch.add(path, name, 0, 2)
        elif size > 2 * PIECE:
            self.big(path, prefix, _entry(name, info), info.st_atime_ns)
        else:
            self.batch.add(path, name, size)

    def _first_link(self, path: str, name: str, info: os.stat_result, *, walked: bool) -> tuple[str, str]:
        """Directory and name that this file was seen under first. Kept small: there may be millions of these."""
        path, name = (walked and self._listed_name(info)) or (path, name)
        if not self.link_dirs or self.link_dirs[-1] != path:
            self.link_dirs.append(path)
        if self.device is None:
            self.device = info.st_dev
        key = info.st_ino if info.st_dev == self.device else (info.st_dev, info.st_ino)
        itself = b"%x/%s" % (len(self.link_dirs) - 1, os.fsencode(name))
        number, _, first = self.first_links.setdefault(key, itself).partition(b"/")
        return self.link_dirs[int(number, 16)], os.fsdecode(first)

    def _listed_name(self, info: os.stat_result) -> tuple[str, str] | None:
        """Directory and name of a file that was listed when it had one name, and is handed out under that."""
        found = self.list.named(info.st_ino) if self.list is not None else None
        if self.list is None or found is None:
            return None
        tree = Tree(self.source, make=False)
        try:
            above = tree.open(found[0])
            there = os.stat(found[1], dir_fd=above.fd, follow_symlinks=False)
            if (there.st_dev, there.st_ino) != (info.st_dev, info.st_ino):
                return None
            return found if self.list.current(found[0], os.fstat(above.fd)) is not None else None
        except (OSError, StagingError):
            return None
        finally:
            tree.close()

    def big(self, path: str, prefix: str, entry: list[Any], atime_ns: int) -> None:
        """Hand out a big file piece by piece, but for the pieces that an earlier run proved."""
        name, size, mtime, ctime, inode = entry
        count = -(-size // PIECE)
        if count > MOST_PIECES:
            _fail(OSError(errno.EFBIG, os.strerror(errno.EFBIG)), "source", os.path.join(path, name))
            return
        mark = fingerprint(prefix + name, size, mtime, ctime, inode)
        temp, there = "", 0
        have: dict[int, str] = {}
        for other, pieces in self.proofs.pieces.get(mark, {}).items() if self.proofs else ():
            if len(pieces) > len(have) and (found := self._has_pieces(path, other, size)):
                temp, there, have = other, found, pieces
        payload = {
            "dir": path,
            "entry": entry,
            "temp": temp,
            "inode": there,
            "atime": atime_ns,
            "quiet": self._is_quiet(mtime, ctime),
        }
        for at in range(0, count if have else 0, _PIECES_SAID):
            some = range(at, min(at + _PIECES_SAID, count))
            digests = b"".join(bytes.fromhex(have.get(index, "")).ljust(16, b"\0")[:16] for index in some)
            flags = "".join("1" if index in have else "0" for index in some)
            _say("have", flags, binascii.b2a_base64(digests, newline=False).decode("ascii"))
        _say("big", str(count), str(size), wire.dumps([path]), wire.dumps(payload))

    def _is_quiet(self, mtime_ns: int, ctime_ns: int) -> bool:
        """Whether a big file with these times can be proved."""
        if not self.clock:
            return True
        from beeond_ctl.staging.quiet import PATIENCE_S, awaited_ns, is_quiet, limit_ns

        source = os.open(self.source, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            until_ns, latest_ns = limit_ns(self.clock, source), max(mtime_ns, ctime_ns)
            until_ns = awaited_ns(
                latest_ns, until_ns, lambda: limit_ns(self.clock, source), self.begun_s + PATIENCE_S
            )
            return is_quiet(mtime_ns, ctime_ns, until_ns)
        finally:
            os.close(source)

    def _has_pieces(self, path: str, temp: str, size: int) -> int:
        """The inode of the file that pieces were proved of, if it is there: its name was made once (see `copier`)."""
        if not temp.startswith(f"{child.PREFIX}{self.token}.p") or "/" in temp:
            return 0
        try:
            info = os.lstat(os.path.join(self.destination, path, temp))
        except (OSError, ValueError):
            return 0
        return info.st_ino if stat.S_ISREG(info.st_mode) and info.st_size == size else 0


def _as_told(name: str, directory: int, known: os.stat_result) -> os.stat_result:
    """The status of a file as its server has it, where there is one: to open it asks, whatever this node remembers.

    Of one that we may not read, or that is not at hand (on tape), it is what is `known`. Raises OSError.
    """
    if not stat.S_ISREG(known.st_mode):
        return known
    try:
        fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=directory)
    except (PermissionError, BlockingIOError):
        return known
    try:
        return os.fstat(fd)
    finally:
        os.close(fd)


def _use_list(scan: _Scan, path: str) -> str:
    """Have `scan` use the list `path`, which is for a walk that compares nothing; why not, if it cannot be used."""
    from beeond_ctl.staging.listing import ListError, take

    try:
        found = take(path, scan.source)
    except (OSError, ListError) as error:
        return str(error)
    if scan.again:
        return "the destination is compared"
    scan.list = found
    return ""


def _refused(config: dict[str, Any], source: str, destination: str, name: str = "") -> bool:
    """Whether the transfer makes no sense (see `places`), which is then told. Raises OSError."""
    text = refusal(
        source,
        destination,
        name=name,
        delete="delete" in config["flags"],
        outside=config["outside"],
        others=config["others"],
    )
    if text:
        _refuse("destination", text)
    return bool(text)


def _refuse(side: str, why: OSError | StagingError | str) -> None:
    told = ("other", why) if isinstance(why, str) else (cause_of(why), text_of(why))
    _say("refused", wire.dumps([side, *told]))


def _folds(token: str, fd: int) -> bool:
    """Whether names that differ may be the same in the directory `fd`: in case, in how an accent is written, by a last
    dot. Not so where no name can be made.
    """
    stem = f"{child.PREFIX}{token}.f{os.urandom(8).hex()}"
    try:
        mark(fd, f"{stem}A\u00e9")
    except OSError:
        return False
    try:
        return any(_is_there(f"{stem}{end}", fd) for end in ("a\u00e9", "Ae\u0301", "A\u00e9."))
    finally:
        try:
            unmark(fd, f"{stem}A\u00e9")
        except OSError:
            _say("dirty")


def _is_there(name: str, directory: int) -> bool:
    try:
        os.stat(name, dir_fd=directory, follow_symlinks=False)
    except OSError:  # or such a name cannot be
        return False
    return True


def _make(destination: str) -> bool:
    """Make `destination`; whether it was missing. That is on record before, as its mode is then ours to set."""
    if os.path.isdir(destination):
        return False
    missing = not os.path.isdir(os.path.realpath(destination))  # `missing/..` leads to what was there
    if missing:
        _on_record("")
    child.make_parents(destination)
    return missing


def _is_empty(directory: str) -> bool:
    """Whether it is seen that nothing is there. It may be closed as yet."""
    try:
        with os.scandir(directory) as names:
            return next(names, None) is None
    except PermissionError:
        return False


def _root_mode(on_record: int | None, flushes: int | None, target: os.stat_result) -> int | None:
    """The mode that a destination of ours is to have again, if it has to be opened up; that is on record before.

    It counts what earlier runs, or `flushes`, have opened up, if nobody has given it another mode since.
    """
    mode = stat.S_IMODE(target.st_mode)
    for had in (on_record, flushes):
        if had is not None and mode == had | 0o700:
            break
    else:
        if target.st_uid != os.geteuid() or mode & 0o700 == 0o700:
            return None
        had = mode
    if had != on_record:
        _on_record(f"{had:o}")
    return had


def _on_record(mode: str) -> None:
    _say("making", mode)
    if sys.stdin.buffer.readline(wire.MAX_LINE) != b"go\n":
        raise BrokenPipeError  # nobody is there to put it on record


def _marked(token: str, fd: int) -> str:
    """A name that was made in the directory `fd`, by which other nodes know whether they see the same, if it can be
    made."""
    name = f"{child.PREFIX}{token}.m{os.urandom(8).hex()}"
    try:
        mark(fd, name)
    except OSError:
        return ""
    return name


def _sights(config: dict[str, Any], source: int, destination: int) -> dict[str, Any]:
    """What copiers have to see, so that none of another node takes a directory of its own for the same: a name at the
    destination; at the source, where nothing may be written, the kernel and the device if it may be each node's own.
    Raises OSError."""
    if config["nodes"] == 1:
        return {"marker": "", "places": [None, None]}
    places = [own_place(source) if is_own(source) else None, own_place(destination)]
    marker = _marked(config["token"], destination)
    return {"marker": marker, "places": [places[0], None if marker else places[1]]}


def _look_at_root(
    config: dict[str, Any], source: int, destination: str, *, single: bool, mode: int | None
) -> dict[str, Any] | None:
    """What copiers have to know of the destination; None where it is refused, which is then told.

    `mode` is what the root had, if it has to be opened up. Raises OSError where it cannot have that again.
    """
    try:
        root = Tree(destination, make=True)
    except OSError as error:
        _refuse("destination", error)
        return None
    fd = root.root.fd
    try:
        folds = not single and _folds(config["token"], fd)
        if folds and "delete" in config["flags"]:
            text = (
                "takes names for one that differ in case or the like, so that delete cannot tell them apart"
            )
            raise StagingError("other", f"{text}; take the flag away")  # noqa: TRY301
        return {"folds": folds, **_sights(config, source, fd)}
    except (OSError, StagingError) as error:
        if mode is not None:
            os.fchmod(fd, mode)  # no `unmark` will
        _refuse("destination", error)
        return None
    finally:
        root.close()


def _entry(name: str, info: os.stat_result) -> list[Any]:
    return [name, info.st_size, info.st_mtime_ns, info.st_ctime_ns, info.st_ino]


def _fail(error: OSError | StagingError, side: str, path: str) -> None:
    _say("failed", cause_of(error), side, wire.dumps([path, text_of(error)]))


def _main() -> None:
    config = wire.loads(sys.stdin.buffer.readline(wire.MAX_LINE))
    source, destination, flags = config["source"], config["destination"], config["flags"]
    try:
        info = os.stat(source)
    except (FileNotFoundError, NotADirectoryError):
        if why := blocked(source):
            _refuse("source", why)
        else:
            _say("missing", wire.dumps("no such file or directory"))
        return
    except OSError as error:
        _refuse("source", error)
        return
    proofs = None
    flushed = _flushed(config)
    if flushed.marks:
        proofs = Proofs(flushed.marks, {})
    if config["journal"]:
        from beeond_ctl.staging.journal import records

        fd, length = config["journal"]
        proofs = read_proofs(records(fd, length), flushed.marks)
        os.close(fd)
    single: list[str] | None = None
    scan = _Scan(config, proofs)
    try:
        side = "destination"
        if stat.S_ISREG(info.st_mode):
            into = destination.endswith("/") or os.path.isdir(destination)
            name = os.path.basename(source.rstrip("/")) if into else os.path.basename(destination)
            destination = destination if into else os.path.dirname(destination)
            if _refused(config, source, destination, name):
                return
            made = _make(destination)
            side = "source"
            real = os.path.realpath(source)
            source = os.path.dirname(real)
            single = [os.path.basename(real), name]
        elif stat.S_ISDIR(info.st_mode):
            if _refused(config, source, destination):
                return
            if os.path.exists(destination) and not os.path.isdir(destination):
                text = "is a file, and the source a directory; move it away, or name another place"
                _refuse("destination", text)
                return
            made = _make(destination)
        else:
            _refuse("source", "neither a file nor a directory")
            return
        side = "source"
        tree = Tree(source, make=False)
        side = "destination"
        target = os.stat(destination)
        root_mode = None
        if not (made or config["root_made"] or flushed.root_made):
            root_mode = _root_mode(config["root_mode"], flushed.root_mode, target)
    except OSError as error:
        _refuse(side, error)
        return
    root = os.fstat(tree.root.fd)
    fresh = (made or config["root_made"]) and not flushed.root_made
    if config["all_or_nothing"] and not fresh:
        fresh = _is_empty(destination)
    known = _look_at_root(config, tree.root.fd, destination, single=single is not None, mode=root_mode)
    if known is None:
        return
    setup = {
        "source": source,
        "destination": destination,
        "inodes": [root.st_ino, target.st_ino],
        "single": single,
        "flags": flags,
        "token": config["token"],
        "run": config["run"],
        "durable": config["durable"],
        "root_made": made or config["root_made"] or flushed.root_made,
        "root_mode": root_mode,
        "fresh": fresh,
        "private": config["all_or_nothing"],
        "direct": config["all_or_nothing"] and fresh and config["run"] == 1,
        "tokens": flushed.tokens,
        "clock": scan.clock,
        "again": scan.again,
        "hidden": scan.hidden,
        **known,
    }
    if scan.clock:
        try:  # noqa: SIM105 (contextlib takes longer to import than the rest of this)
            os.mkdir(scan.clock, 0o700)
        except OSError:
            pass  # it is there; or there will be no clock, and nothing is proved
    _say("ready", wire.dumps(setup))
    if flushed.tokens:
        _say("dirty")
    for dirs in flushed.dirs:
        _say("gone", "0", "0", wire.dumps(dirs), "")
    unlisted = _use_list(scan, config["list"]) if config["list"] else ""
    scan.source, scan.destination = source, destination
    if single is None:
        scan.walk()
    else:
        scan.rename = dict([single])
        try:
            info = os.stat(single[0], dir_fd=tree.root.fd, follow_symlinks=False)
            if not stat.S_ISREG(info.st_mode):
                raise StagingError("changed")  # noqa: TRY301
            there = _Trees(source, destination).there("") if scan.again else None
            has = there is not None and scan.has(single[0], info, tree.root, there, "")
            with scan.lock:
                scan.entry("", "", single[0], info, there=has)
        except (OSError, StagingError) as error:
            _fail(error, "source", single[0])
        scan.dirs.add("")  # to be synced
        scan.finish()
    if config["list"]:
        _say("listed", str(scan.listed_dirs), str(scan.listed_files), wire.dumps(unlisted))
    _say("end")


def main() -> None:
    """The program (see `spawn`)."""
    child.run(_main)
