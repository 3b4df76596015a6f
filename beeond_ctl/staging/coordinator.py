"""Who does what in a transfer, and what came of it.

Starts the scanner, hands its batches to whichever node asks, takes the results, keeps the journal and adds up
the summary. Memory is bounded: the scanner has to wait while enough is queued, and what is for later goes to
disk. Payloads, proofs and lists of directories pass through unread: they are the user's, and this may be
root.
"""

from __future__ import annotations

import binascii
import os
import re
import threading
import time
from collections import Counter, deque
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice

import xxhash

from beeond_ctl.errors import visible
from beeond_ctl.staging import wire
from beeond_ctl.staging.causes import CAUSES, NO_ROOM
from beeond_ctl.staging.spawn import REAP_S, end, last_words, start
from beeond_ctl.staging.transfer import Fold, Progress, Summary, show_path
from beeond_ctl.staging.wire import EXAMPLES, MOST_PIECES, PIECE

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from typing import Any, Final

    from beeond_ctl.staging.begin import Begun
    from beeond_ctl.staging.job import Job
    from beeond_ctl.staging.journal import Journal

_QUEUE: Final = 256
_QUEUE_PER_NODE: Final = 32
_AHEAD: Final = 64
"""Batches among which one is looked for whose directory nobody else copies in."""
_DEATHS: Final = 2
_TRIES: Final = 3
_VAIN: Final = 8
"""After so many works in a row that found no room a second time, the destination is full."""
_MOST_LOOKED: Final = 64 << 20
"""Bytes that are kept for a scanner that does not listen."""
_SYNC_EVERY_S: Final = 5.0
_PHASES: Final = (
    *("copy", "crowded", "link", "clean", "gone", "finish", "locked"),
    *("delete", "finish again", "locked again", "unmark", "end"),  # what is deleted changes its directory
)
_HEX: Final = re.compile(r"([0-9a-f]{32})?")
_DIGEST: Final = 16
"""Bytes of a piece's checksum."""
_BITS: Final = bytes.maketrans(b"01", b"\0\1")


@dataclass(slots=True, eq=False)
class _Big:
    """A file that is copied in pieces. `payload` is empty until its temporary name is made."""

    described: str
    """What another attempt begins with."""
    payload: str
    dirs: str
    size: int
    left_bytes: int
    """What was to be copied of it when this attempt began: not the pieces that were there."""
    done: bytearray
    """Of each piece, 1 if it is there."""
    digests: bytearray
    """One behind the other."""
    tries: int
    left: int
    copied: int = 0
    """Bytes."""
    next: int = 0
    """The first piece that was not handed out yet."""
    running: int = 0
    failed: bool = False
    crowded: bool = False
    """There was no room for it, while others were copied."""
    again: tuple[int, int, str] | None = None
    open_elsewhere: bool = False
    """A node that was given up has it open: it is begun again under another name."""

    def over(self) -> bool:
        """Whether nothing more is to be done for it in this attempt."""
        return bool(self.failed or self.crowded or self.again or self.open_elsewhere)


@dataclass(slots=True, eq=False)
class _Work:
    """Something a copier can do at once."""

    number: int
    kind: str
    fields: tuple[str, ...]
    entries: int
    dirs: str = ""
    attempt: int = 0
    deaths: int = 0
    big: _Big | None = None
    index: int = 0
    node: str = ""


@dataclass(slots=True, eq=False)
class _Tally:
    copied: int = 0
    verified: int = 0
    skipped: int = 0
    failed: int = 0
    bytes: int = 0
    entries_total: int = 0
    bytes_total: int = 0
    failures: dict[tuple[str, str], Fold] = field(default_factory=dict)
    notes: dict[str, Fold] = field(default_factory=dict)
    special: Fold = field(default_factory=Fold)
    deleted: Fold = field(default_factory=Fold)
    by_node: dict[str, int] = field(default_factory=dict)


class Coordinator:
    """One transfer. Methods may be called by any thread and do not block."""

    def __init__(self, job: Job, begun: Begun, nodes: Sequence[str]) -> None:
        """Go on with what has `begun` for `job`, on as many `nodes` as were said then."""
        self.job = job
        self._lock = threading.Condition()
        self._nodes = set(nodes)
        self._marked = len(self._nodes) > 1
        """Whether the destination has a name in it by which nodes know it."""
        self._apart: dict[str, list[str]] = {}
        """Nodes that cannot copy, by reason."""
        self._last_left = ""
        """The node that left last, and why."""
        self._have = (bytearray(), bytearray())
        """Of the file in pieces that the scanner says next, what was proved before: as `done` and `digests`."""
        self._queue: deque[_Work] = deque()
        self._bigs = 0
        """Files in pieces that are neither in place nor failed."""
        self._later: dict[str, list[tuple[int, int, int]]] = {
            "links": [], "dirs": [], "locked": [], "delete": [],
            "crowded": [],  # entries for which there was no room, and then files in pieces
            "alone": [],
            "gone": begun.gone,  # where runs that did not end in order have written, as the source may have it no more
        }  # fmt: skip
        self._upcoming: Iterator[_Work] = iter(())
        self._looked: deque[tuple[str, str]] | None = None
        """What the scanner is to be told, once it has asked for anything."""
        self._looks = self._looked_bytes = 0
        self._most_looks = wire.LOOKS_PER_NODE * len(self._nodes)
        self._outstanding: dict[int, _Work] = {}
        self._copying: Counter[str] = Counter()
        """How many batches of the same directories are outstanding."""
        self._number = 0
        self._salt = os.urandom(4).hex()  # where locks do not reach, another process may be in the same run
        self._phase = 0
        self._setup = ""
        self._scanned = self._scan_ok = False
        self._missing = self._making = False
        self._vain = self._vain_bigs = 0
        """How many works in a row have found no room although all else was done."""
        self._refused = self._cancelled = ""
        self._tally = _Tally()
        self._begun_s = self._moved_s = time.monotonic()
        self._ended_s: float | None = None
        self._synced_s = 0.0
        self._run, self._clean, self._root_mode = begun.run, begun.unclean, begun.root_mode
        self._on_record = begun.on_record
        self._deletes = False
        self.listed: dict[str, int | str] = {}  # how much of the source was taken from its list
        self._journal: Journal | None = begun.journal
        self._spool, self._scanner = begun.spool, begun.scanner
        try:
            start(reader := threading.Thread(target=self._read_scanner, daemon=True, name="scanner"))
        except BaseException:
            begun.undo()
            raise
        self._reader = reader

    # --- the scanner --------------------------------------------------------------------------------------

    def _read_scanner(self) -> None:
        scanner, problem = self._scanner, ""
        try:
            if scanner.stdout is None:
                raise wire.ProtocolError("no pipes")  # noqa: TRY301
            for fields in wire.lines(scanner.stdout):
                self._heard(fields)
                if self._cancelled:
                    break
        except Exception as error:  # noqa: BLE001 (it is the user's process: whatever it says, it alone fails)
            problem = f"{type(error).__name__}: {error}"
        with self._lock:
            if not (self._scan_ok or self._cancelled or self._missing or self._refused):
                words = last_words(scanner) or problem or "no reason given"
                self._failed(
                    "lost",
                    "source",
                    [f"the rest of the source is not known, as its scanner ended early: {words}"],
                    1,
                )
                self._clean = True  # it may have left a name that nobody has been told of
            self._scanned = True
            self._moved_s = time.monotonic()
            self._lock.notify_all()
        end(scanner)

    def _heard(self, fields: list[str]) -> None:
        kind = fields[0]
        with self._lock:
            self._moved_s = time.monotonic()
            if kind == "making":
                if self._setup or self._making:
                    raise wire.ProtocolError("its root can be made once")
                self._making = True
                self._synced_s = 0.0  # this one is synced
                if fields[1]:
                    self._root_mode = int(fields[1], 8) & 0o7777
                    self._record(("mode", f"{self._root_mode:o}"))
                else:
                    self._record(("root", ""))
            elif kind == "ready":
                self._setup = fields[1]
            elif kind == "missing":
                self._missing = True
            elif kind == "refused":
                side, cause, text = (str(item) for item in wire.loads(fields[1]))
                path = self.job.source if side == "source" else self.job.destination
                text = text if cause == "other" else CAUSES.get(cause, text)
                self._refused = f"{show_path(path)}: {visible(text)}"
            elif kind == "batch":
                self._add(_Work(0, "copy", (fields[3], fields[4]), int(fields[1]), fields[3]), int(fields[2]))
            elif kind == "kept":
                self._tally.entries_total += _count(int(fields[1]))
                self._tally.skipped += int(fields[1])
            elif kind == "have":
                self._add_have(fields[1], fields[2])
            elif kind == "big":
                self._tally.entries_total += 1
                have, self._have = self._have, (bytearray(), bytearray())
                self._add_big(int(fields[1]), int(fields[2]), fields[3], fields[4], have=have)
            elif kind in ("links", "dirs", "locked", "delete", "gone"):
                self._tally.entries_total += int(fields[1]) if kind == "links" else 0
                self._put_aside(kind, int(fields[1]), fields[3], fields[4])
            elif kind == "look":
                self._add_look(int(fields[1]), fields[3], fields[4])
            elif kind == "listed":
                directories, files = (_count(int(field)) for field in fields[1:3])
                self.listed = {"directories": directories, "files": files}
                if fields[3] != '""':
                    self.listed["unused"] = _name(wire.loads(fields[3]))
            elif kind == "special":
                self._tally.special = self._tally.special.add(1, [_name(wire.loads(fields[3]))])
            elif kind == "failed":
                name, text = (str(item) for item in wire.loads(fields[3]))
                self._failed(fields[1], fields[2], [f"{name}: {text}" if fields[1] == "other" else name], 1)
            elif kind == "dirty":
                self._clean = True
            elif kind == "end":
                self._scan_ok = True
            else:
                raise wire.ProtocolError("unknown kind of line")
            if kind != "kept":  # which is nothing to do
                self._lock.notify_all()
            limit = max(_QUEUE, _QUEUE_PER_NODE * len(self._nodes))
            self._lock.wait_for(lambda: len(self._queue) < limit or bool(self._cancelled))
        if kind == "making" and self._scanner.stdin is not None:
            wire.send(self._scanner.stdin, "go")  # who does not listen holds nobody else up

    def _add_look(self, number: int, dirs: str, payload: str) -> None:
        """Put names that the scanner wants to be looked at in front: as long as there is room behind, it can go on."""
        self._looks += 1
        if not self._setup or self._looks > self._most_looks or not 0 <= number < 1 << 62:
            raise wire.ProtocolError("more is to be looked at than was agreed")
        if self._looked is None:
            self._looked = deque()
            start(
                threading.Thread(target=self._tell_scanner, args=(self._looked,), daemon=True, name="looked")
            )
        self._number += 1
        self._queue.appendleft(_Work(self._number, "look", (dirs, payload), 0, index=number))

    def _tell_scanner(self, looked: deque[tuple[str, str]]) -> None:
        """Pass on what was looked at. It is the user's process, for which nobody else may have to wait."""
        while True:
            with self._lock:
                self._lock.wait_for(lambda: bool(looked or self._scanned or self._cancelled))
                if not looked or self._cancelled:
                    return
                number, text = looked.popleft()
                self._looks -= 1
                self._looked_bytes -= len(text)
            with suppress(OSError, ValueError):  # it has ended, or is being ended
                if self._scanner.stdin is not None:
                    wire.send(self._scanner.stdin, "looked", number, text)

    def _add(self, work: _Work, size: int = 0) -> None:
        self._number += 1
        work.number = self._number
        self._tally.bytes_total += size
        if work.kind == "copy":
            self._tally.entries_total += work.entries
        self._queue.append(work)

    def _add_have(self, flags: str, text: str) -> None:
        """Take in some more pieces of the file that is said next: which are there, and the checksums of all."""
        done, digests = self._have
        some = flags.encode("ascii").translate(_BITS)
        done += some
        digests += binascii.a2b_base64(text)
        if len(done) > MOST_PIECES or len(digests) != _DIGEST * len(done) or some.strip(b"\0\1"):
            raise wire.ProtocolError("pieces are out of bounds")

    def _add_big(
        self,
        count: int,
        size: int,
        dirs: str,
        payload: str,
        *,
        have: tuple[bytearray, bytearray] | None = None,
        tries: int = 1,
        again: bool = False,
    ) -> None:
        """Have a file copied in pieces, but for those that are there (`have`); `again`: one that is counted already."""
        description = wire.loads(payload)
        done, digests = have or (bytearray(), bytearray())
        temp = _text(description["temp"])
        if not 0 < count <= MOST_PIECES or len(done) not in (0, count) or (done and not temp):
            raise wire.ProtocolError("a big file is out of bounds")
        described = wire.dumps({**description, "temp": ""})
        there = done.count(1) * PIECE - (count * PIECE - size if done and done[-1] else 0)
        done, digests = done or bytearray(count), digests or bytearray(_DIGEST * count)
        big = _Big(
            described,
            payload if temp else "",
            dirs,
            size,
            size - there,
            done,
            digests,
            tries,
            left=done.count(0),
        )
        self._tally.bytes_total += big.left_bytes
        self._bigs += not again
        if big.payload:
            self._add_pieces(big)
        else:
            self._add(_Work(0, "make", (described,), 0, dirs, big=big))

    def _add_pieces(self, big: _Big) -> None:
        if big.left:
            self._add_piece(big)
        else:
            self._place(big)

    def _add_piece(self, big: _Big) -> None:
        """Put the next piece in front. One is there at a time: a file with holes may have millions."""
        at = big.done.find(0, big.next)
        if at >= 0:
            big.next = at
            fields = (big.payload, str(big.next))
            self._number += 1
            self._queue.appendleft(_Work(self._number, "piece", fields, 0, big.dirs, big=big, index=big.next))
            big.next += 1

    def _place(self, big: _Big) -> None:
        joined = xxhash.xxh3_128_hexdigest(big.digests)
        self._add(_Work(0, "place", (big.payload, joined), 1, big.dirs, big=big))

    def _put_aside(self, kind: str, count: int, dirs: str, payload: str) -> None:
        self._later[kind].append((*self._spool.put(dirs, payload), count))

    def _set_aside(
        self, kind: str, only: Sequence[tuple[int, int, int]] | None = None
    ) -> Iterator[tuple[str, str, int]]:
        """What was put aside, or `only` some of it. What cannot be read again has failed."""
        for where in self._later[kind].copy() if only is None else only:
            try:
                dirs, payload = self._spool.get(*where[:2])
            except OSError as error:
                count = 1 if kind == "alone" else max(1, where[2])
                told = f"what was put aside beside the journal ({error.strerror})"
                self._failed("io-error", "destination", [told], count)
                continue
            yield dirs, payload, where[2]

    # --- handing out --------------------------------------------------------------------------------------

    def take(self, node: str) -> dict[str, Any]:
        """What `node` is to do next: `{"work": …}`, `{"wait": seconds}` or `{"done": summary}`."""
        with self._lock:
            if self._finished():
                return {"done": {"proved": self._proved()}}
            if node not in self._nodes:  # whoever goes on to the next meeting would be alone there
                return {"wait": 1.0}
            work = None if self._cancelled else self._next()
            if work is None:
                if self._finished():
                    self._lock.notify_all()
                    return {"done": {"proved": self._proved()}}
                return {"wait": min(1.0, 0.01 * len(self._nodes))}
            work.node = node
            self._outstanding[work.number] = work
            if work.kind == "copy":
                self._copying[work.dirs] += 1
            if work.big:
                work.big.running += 1
            if work.dirs and (mark := xxhash.xxh3_128_digest(work.dirs.encode())) not in self._on_record:
                self._on_record.add(mark)
                self._record(("dirs", work.dirs))  # before a temporary name may be there
            self._lock.notify_all()
            return {
                "work": {
                    "id": work.number,
                    "attempt": work.attempt,
                    "tag": f"{self._run}.{self._salt}.{work.number}.{work.attempt}",
                    "kind": work.kind,
                    "fields": list(work.fields),
                    "setup": self._setup,
                }
            }

    def _next(self) -> _Work | None:
        while True:
            if _PHASES[self._phase] == "crowded" and self._outstanding:
                return None  # one at a time: what others hold in vain is what there may be no room for
            while self._queue:
                work = self._pick()
                if work.kind == "piece" and work.big:
                    if work.big.over():
                        continue
                    if not work.attempt:
                        self._add_piece(work.big)
                return work
            if not _PHASES[self._phase].startswith("locked") or not self._outstanding:
                upcoming = next(self._upcoming, None)
                if upcoming is not None:
                    self._number += 1
                    upcoming.number = self._number
                    return upcoming
            if self._outstanding or not self._scanned or _PHASES[self._phase] == "end":
                return None
            if _PHASES[self._phase] == "crowded" and self._later["alone"]:
                for dirs, payload, count in self._set_aside("alone", [self._later["alone"].pop()]):
                    self._add_big(count, 0, dirs, payload, tries=2, again=True)
                continue
            self._phase += 1
            self._upcoming = self._works(_PHASES[self._phase])
            if _PHASES[self._phase] == "end":
                self._complete()

    def _pick(self) -> _Work:
        """The next in the queue, but for batches of directories that others copy in, if there are any else.

        A file system makes one name at a time in a directory, whichever node asks.
        """
        for at, work in enumerate(islice(self._queue, _AHEAD)):
            if work.kind != "copy" or not self._copying[work.dirs]:
                del self._queue[at]
                return work
        return self._queue.popleft()

    def _give_back(self, work: _Work) -> None:
        """`work` is not outstanding any more."""
        del self._outstanding[work.number]
        if work.kind == "copy":
            self._copying[work.dirs] -= 1
            if not self._copying[work.dirs]:
                del self._copying[work.dirs]

    def _works(self, phase: str) -> Iterator[_Work]:
        if phase == "crowded":
            for dirs, payload, count in self._set_aside("crowded"):
                if self._vain >= _VAIN:
                    self._failed("no-space", "destination", [], count)
                else:
                    yield _Work(0, "last", (dirs, payload), count)
            self._later["alone"].sort(key=lambda where: -where[2])  # taken from its end: the smallest first
        elif phase == "link":
            for dirs, payload, count in self._set_aside("links"):
                yield _Work(0, "link", (dirs, payload), count, dirs)
        elif phase == "clean" and self._clean and self._setup:
            yield _Work(0, "clean", (wire.dumps([""]),), 1)
            yield from self._directories("clean", "dirs", "locked")
        elif phase == "gone" and self._clean and self._setup:
            yield from self._directories("gone", "gone")
        elif phase == "delete" and "delete" in self.job.flags and self._scan_ok and not self._tally.failed:
            self._deletes = True
            for dirs, seen, count in self._set_aside("delete"):
                yield _Work(0, "delete", (dirs, seen), count)
        elif phase == "finish" or (phase == "finish again" and self._deletes):
            yield from self._directories("finish", "dirs")
        elif phase == "locked" or (phase == "locked again" and self._deletes):
            yield from reversed(list(self._directories("finish", "locked")))
        elif phase == "unmark" and (self._marked or self._root_mode is not None) and self._setup:
            yield _Work(0, "unmark", (), 0)

    def _directories(self, kind: str, *which: str) -> Iterator[_Work]:
        for name in which:
            for dirs, _, count in self._set_aside(name):
                yield _Work(0, kind, (dirs,), count)

    # --- taking in ----------------------------------------------------------------------------------------

    def report(self, node: str, result: dict[str, Any]) -> None:
        """Take in what `node` says of a work that it took. What is not expected from it is ignored."""
        with self._lock:
            number = result.get("id")
            work = self._outstanding.get(number) if isinstance(number, int) else None
            if work is None or work.node != node or work.attempt != result.get("attempt"):
                return
            self._moved_s = time.monotonic()
            if "unusable" in result:
                self._retry(work, opened=False)
                self._set_apart(node, str(result["unusable"])[:200])
            elif "died" in result:
                self._died(work, str(result["died"])[:200])
            else:
                try:
                    answer = _Answer(result)
                except (LookupError, TypeError, ValueError) as error:
                    self._died(work, f"{type(error).__name__}: {error}")
                else:
                    self._accept(work, answer)
            self._end_without_nodes()
            self._lock.notify_all()

    def _accept(self, work: _Work, answer: _Answer) -> None:
        self._give_back(work)
        tally = self._tally
        failures = answer.failures
        if work.big:  # it is one entry, however many of its pieces fail
            known = work.big.failed or work.big.crowded or self._is_crowded(work.big, answer)
            failures = [] if known else failures[:1]
        self._clean = self._clean or (work.kind == "unmark" and bool(failures))
        for cause, side, name, text in failures:
            self._failed(cause, side, [f"{name}: {text}" if cause == "other" else name], 1)
        for kind, names in answer.notes.items() if not _PHASES[self._phase].endswith("again") else ():
            tally.notes[kind] = tally.notes.get(kind, Fold()).add(len(names), names[:EXAMPLES])
        counted = answer.copied + answer.skipped + len(answer.failures) - answer.uncounted
        counted += len(answer.grown) if work.kind in ("copy", "apart") else 0
        for count, size, dirs, payload in answer.apart if work.kind == "link" else ():
            counted += count
            self._add(_Work(0, "apart", (dirs, payload), count, dirs), size)
        if work.kind == "copy" and answer.crowded:
            counted += answer.crowded[0]
            self._try_later("crowded", answer.crowded[0], *answer.crowded)
        if work.kind == "delete" and answer.left:
            count, dirs, seen = answer.left
            counted += count
            self._add(_Work(0, "delete", (dirs, seen), count))
        if work.kind == "last":
            in_vain = work.entries == len(answer.failures) and answer.found_no_room()
            self._vain = self._vain + 1 if in_vain else 0
        kinds = ("copy", "last", "apart", "link", "delete", "clean", "finish")
        if work.kind in kinds and counted != work.entries:
            self._failed("lost", "source", ["nobody accounted for them"], abs(work.entries - counted))
        tally.bytes += answer.bytes
        tally.by_node[work.node] = tally.by_node.get(work.node, 0) + answer.bytes
        if work.kind in ("copy", "last", "apart", "link", "place"):
            tally.copied += answer.copied
            tally.skipped += answer.skipped
            tally.verified += answer.copied if "metadata-only" not in self.job.flags else 0
        if work.kind == "delete":
            tally.deleted = tally.deleted.add(answer.deleted[0], answer.deleted[1])
        if work.kind == "look":
            self._hand_in_look(work, answer.looked)
        records_: list[tuple[str, str]] = []
        # A further name of a file proves something only if all first names were proved, too.
        if answer.proofs and not (work.kind == "link" and (tally.failed or "update" in self.job.flags)):
            records_.append(("proof", answer.proofs))
        if work.big is not None:
            records_ += self._accept_big(work, work.big, answer)
        for count, size, payload in answer.grown if work.kind in ("copy", "apart") else ():
            self._add_big(count, size, wire.dumps([str(wire.loads(payload)["dir"])]), payload)
        self._record(*records_)

    def _hand_in_look(self, work: _Work, looked: str) -> None:
        """Have the scanner told; what is too much to be kept until it listens, or null, it looks at itself."""
        if self._looked is not None:
            text = looked if self._looked_bytes + len(looked) < _MOST_LOOKED else "null"
            self._looked_bytes += len(text)
            self._looked.append((str(work.index), text))

    def _accept_big(self, work: _Work, big: _Big, answer: _Answer) -> list[tuple[str, str]]:
        big.running -= 1
        big.copied += answer.bytes
        journaled = []
        if answer.failures:
            big.failed = big.failed or not big.crowded
            if _PHASES[self._phase] == "crowded" and answer.found_no_room():
                self._vain_bigs += 1
                if self._vain_bigs > 1:
                    self._give_up_larger()
        elif answer.again:
            big.again = answer.again
        elif work.kind == "make":
            big.payload = answer.made
            self._add_pieces(big)
        elif work.kind == "piece":
            at = _DIGEST * work.index
            big.digests[at : at + _DIGEST] = bytes.fromhex(answer.digest).ljust(_DIGEST, b"\0")
            big.done[work.index] = 1
            big.left -= 1
            journaled += [("piece", answer.piece)] if answer.piece else []
            if not big.left and not big.over():
                self._place(big)
        if work.kind == "place" and not big.over():
            self._bigs -= 1
            self._vain_bigs = 0
            if answer.copied != 1:
                self._failed("lost", "source", [f"nobody accounted for {_entry(big.payload)}"], 1)
        self._end_big(big)
        return journaled

    def _is_crowded(self, big: _Big, answer: _Answer) -> bool:
        """Whether a failure of one of its pieces only means that it is to be tried again when all else is done."""
        big.crowded = _PHASES[self._phase] == "copy" and answer.found_no_room()
        return big.crowded

    def _try_later(self, kind: str, entries: int, count: int, dirs: str, payload: str) -> None:
        try:
            self._put_aside(kind, count, dirs, payload)
        except OSError as error:  # no room for the journal either
            self._failed(
                "no-space", "destination", [f"what was to be tried again ({error.strerror})"], entries
            )

    def _give_up_larger(self) -> None:
        """After files in pieces that had no room though all else is done: those that are left have no fewer pieces."""
        for _, payload, _ in self._set_aside("alone"):
            self._bigs -= 1
            self._failed("no-space", "destination", [_entry(payload)], 1)
        self._later["alone"].clear()

    def _end_big(self, big: _Big) -> None:
        """Conclude a file that failed, or changed, when none of its pieces is under way any more."""
        if big.running or not big.over():
            return
        if big.payload:
            self._add(_Work(0, "drop", (big.payload,), 0))
        self._tally.bytes -= big.copied  # which are nowhere any more
        if big.crowded and not big.failed:
            self._try_later("alone", 1, len(big.done), big.dirs, big.described)
            return
        if big.again and not big.failed and big.tries < _TRIES:
            self._tally.bytes_total -= big.left_bytes
            count, size, payload = big.again
            self._add_big(count, size, big.dirs, payload, tries=big.tries + 1, again=True)
            return
        if big.open_elsewhere and not (big.again or big.failed):
            self._tally.bytes_total -= big.left_bytes
            self._add_big(len(big.done), big.size, big.dirs, big.described, tries=big.tries, again=True)
            return
        self._bigs -= 1
        if big.again and not big.failed:
            self._failed("changed", "source", [_entry(big.again[2])], 1)

    def _died(self, work: _Work, words: str) -> None:
        work.deaths += 1
        if work.deaths < _DEATHS:
            self._retry(work)
            return
        self._give_back(work)
        if work.kind == "look":
            self._hand_in_look(work, "null")
            return
        if work.kind == "gone":  # nothing that is copied hangs on it
            return
        self._clean = True
        if work.big:
            work.big.running -= 1
            work.big.failed = True
            self._end_big(work.big)
        why = f"the process that copied them died: {words}" if words else "the process that copied them died"
        self._failed("lost", "source", [why], max(1, work.entries))

    def _retry(self, work: _Work, *, opened: bool = True, may_come_late: bool = False) -> None:
        """Let another copier try; what the one before has `opened` may have temporary names, removed at the end.

        `may_come_late`: the one before may still do it, whenever that is, to what it has open.
        """
        self._give_back(work)
        self._clean = self._clean or (opened and work.kind != "look")
        if work.big:
            work.big.running -= 1
            work.big.open_elsewhere |= may_come_late and work.kind == "piece"
            if work.big.over():  # the others' answers have settled it
                self._end_big(work.big)
                return
        work.attempt += 1
        self._queue.appendleft(work)

    def _set_apart(self, node: str, why: str) -> None:
        """Hand out nothing more to `node`, one of whose copiers cannot work. The others answer for what they have."""
        if node in self._nodes:
            self._nodes.remove(node)
            self._apart.setdefault(why, []).append(node)
            self._last_left = f"{node}: {why}"

    def _end_without_nodes(self) -> None:
        """Be finished when no node takes anything any more, and none has anything left to report."""
        if not (self._nodes or self._outstanding or self._finished()):
            self._cancelled = f"no node is left to copy ({self._last_left})"

    def node_lost(self, node: str) -> None:
        """`node` will not report any more: others do what it had taken."""
        with self._lock:
            if self._finished():
                return
            if node in self._nodes:
                self._nodes.remove(node)
                self._last_left = f"{node}: lost"
            for work in [work for work in self._outstanding.values() if work.node == node]:
                self._retry(work, may_come_late=True)
            self._end_without_nodes()
            self._lock.notify_all()

    def cancel(self, reason: str) -> None:
        """Hand out nothing more and be finished. What is under way may still be reported until `close`."""
        with self._lock:
            if not self._cancelled and not self._finished():
                self._cancelled = reason
                self._scanner.kill()
                self._lock.notify_all()

    def _failed(self, cause: str, side: str, names: list[str], count: int) -> None:
        if cause not in CAUSES:
            cause = "other"
        side = side if side in ("source", "destination", "deletion") else "source"
        tally = self._tally
        tally.failed += count
        tally.failures[cause, side] = tally.failures.get((cause, side), Fold()).add(
            count, [_name(n) for n in names]
        )

    def _record(self, *items: tuple[str, str]) -> None:
        if self._journal is None or not items:
            return
        try:
            self._journal.append(*items)
            now = time.monotonic()
            if self.job.durable and now - self._synced_s > _SYNC_EVERY_S:
                self._synced_s = now
                self._journal.sync()
        except OSError as error:
            self._end_journal(error)

    def _end_journal(self, error: OSError | None = None) -> None:
        """Close the journal: while it is open, its device cannot be wiped. One that fails ends nothing else."""
        if self._journal is None:
            return
        try:
            if self.job.durable and error is None:
                self._journal.sync()
        except OSError as second:
            error = second
        with suppress(OSError):
            self._journal.close()
        self._journal = None
        if error is not None:
            self._tally.notes["journal"] = Fold(1, (str(error),))

    # --- ending -------------------------------------------------------------------------------------------

    def _complete(self) -> None:
        self._clean = self._clean and bool(self._tally.failed)
        self._ended_s = time.monotonic()
        if self._proved():
            self._record(("done", ""))

    def _finished(self) -> bool:
        if self._missing or self._refused:
            return True
        if self._cancelled:
            return True  # whatever is under way may hang
        return _PHASES[self._phase] == "end"

    def _proved(self) -> bool:
        return (
            _PHASES[self._phase] == "end"
            and self._scan_ok
            and not self._outstanding
            and not self._cancelled
            and not self._tally.failed
            and not self._bigs
        )

    def finished(self) -> bool:
        """Whether nothing is left to do."""
        with self._lock:
            return self._finished()

    def wait(self, timeout_s: float) -> None:
        """Wait until something changes, `timeout_s` at most."""
        with self._lock:
            self._lock.wait(timeout_s)

    def progress(self) -> Progress:
        """How far it is."""
        with self._lock:
            tally, now = self._tally, time.monotonic()
            return Progress(
                scanned=self._scanned,
                entries_done=tally.copied + tally.skipped + tally.failed,
                entries_total=tally.entries_total,
                bytes_done=tally.bytes,
                bytes_total=tally.bytes_total,
                failed=tally.failed,
                seconds=now - self._begun_s,
                idle_s=now - self._moved_s,
                bytes_by_node=dict(tally.by_node),
            )

    def summary(self) -> Summary:
        """What has come of it by now."""
        with self._lock:
            tally = self._tally
            return Summary(
                source=self.job.source,
                destination=self.job.destination,
                proved=self._proved(),
                missing=self._missing,
                refused=self._refused,
                cancelled=self._cancelled,
                copied=tally.copied,
                verified=tally.verified,
                skipped=tally.skipped,
                failed=tally.failed,
                bytes=tally.bytes,
                seconds=(self._ended_s or time.monotonic()) - self._begun_s,
                failures=dict(tally.failures),
                notes=dict(tally.notes),
                special=tally.special,
                deleted=tally.deleted,
                apart={why: tuple(nodes) for why, nodes in self._apart.items()},
            )

    def close(self, *, wait_s: float = REAP_S) -> None:
        """End the scanner and close the journal. The summary stays.

        The scanner is waited for, for `wait_s` at most: whoever unmounts next finds busy what it has open.
        """
        with self._lock:
            if not self._finished():
                self._cancelled = self._cancelled or "closed"
                self._lock.notify_all()
            if self._scanner.poll() is None:
                self._scanner.kill()
            if not self._clean and not self._outstanding and not self._cancelled:
                self._record(("closed", ""))
            self._end_journal()
            with suppress(OSError):  # what is buffered for a full device
                self._spool.close()
        self._reader.join(wait_s)


class _Answer:
    """A copier's answer, every field checked: it comes from a process of the user's."""

    def __init__(self, data: dict[str, Any]) -> None:
        """Raises LookupError, TypeError, ValueError."""
        self.copied, self.skipped, self.bytes = (_count(data[key]) for key in ("copied", "skipped", "bytes"))
        self.uncounted = _count(data.get("uncounted", 0))
        self.failures = [
            [_text(item) for item in failure] for failure in _list(data["failures"], wire.MAX_FAILURES)
        ]
        if any(len(failure) != 4 for failure in self.failures):
            raise ValueError("a failure has four parts")
        if not isinstance(data["notes"], dict) or len(data["notes"]) > 100:
            raise TypeError("notes")
        self.notes = {
            _text(kind): [_name(name) for name in _list(names, wire.MAX_FAILURES)]
            for kind, names in data["notes"].items()
        }
        self.proofs = _line(data["proofs"])
        self.digest = _line(data.get("digest", ""))
        if not _HEX.fullmatch(self.digest):
            raise ValueError("digest")
        self.piece = _line(data.get("piece", ""))
        self.made = _line(data.get("made", ""))
        self.looked = _line(data.get("looked", "null"))
        self.again: tuple[int, int, str] | None = None
        if "again" in data:
            self.again = _big_one(data["again"])
        self.crowded, self.left = _rest(data.get("crowded")), _rest(data.get("left"))
        self.grown = [_big_one(each) for each in _list(data.get("grown", []), wire.MAX_FAILURES)]
        self.apart = [
            (_count(count), _count(size), _line(dirs), _line(payload))
            for count, size, dirs, payload in _list(data.get("apart", []), wire.MAX_FAILURES)
        ]
        """Names of which no link could be made: how many, bytes, DIRS and PAYLOAD."""
        deleted, names = data.get("deleted", (0, []))
        self.deleted = (_count(deleted), [_name(name) for name in _list(names, 100)])

    def found_no_room(self) -> bool:
        """Whether all that failed did so for want of room."""
        return bool(self.failures) and all(
            cause in NO_ROOM and side == "destination" for cause, side, _, _ in self.failures
        )


def _count(value: object) -> int:
    if not isinstance(value, int) or not 0 <= value < 1 << 62:
        raise ValueError("not a count")
    return value


def _list(value: object, limit: int) -> list[Any]:
    if not isinstance(value, list) or len(value) > limit:
        raise ValueError("not a list, or too long")
    return value


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError("not a text")
    return value


def _rest(value: object) -> tuple[int, str, str] | None:
    """What is to be done again: how many entries, and the fields of another work."""
    if value is None:
        return None
    count, dirs, payload = _list(value, 3)
    return _count(count), _line(dirs), _line(payload)


def _big_one(value: object) -> tuple[int, int, str]:
    """Pieces, size and description of a file that is to be copied in pieces."""
    count, size, payload = _list(value, 3)
    try:
        description = wire.loads(_line(payload))
    except wire.ProtocolError as error:
        raise ValueError(str(error)) from None
    if not 0 < _count(count) <= MOST_PIECES or description["temp"] != "":
        raise ValueError("a big file is out of bounds")
    _text(description["dir"])
    _text(description["entry"][0])
    return count, _count(size), payload


def _entry(payload: str) -> str:
    """The name of a big file, as its description has it."""
    try:
        return _name(wire.loads(payload)["entry"][0])
    except (LookupError, TypeError, wire.ProtocolError):
        return "?"


def _line(value: object) -> str:
    text = _text(value)
    if not text.isascii() or "\n" in text or "\t" in text or len(text) > wire.MAX_LINE:
        raise ValueError("not a line")
    return text


def _name(value: object) -> str:
    """A name for an example: not longer than a message can be."""
    return wire.shown(_text(value))
