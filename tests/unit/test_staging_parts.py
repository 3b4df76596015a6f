"""The parts of staging that can be told apart from any file system."""

from __future__ import annotations

import errno
import os
import random
import stat
from array import array
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from beeond_ctl.staging import _native, child, copier, data, flushed, portable, scan, tree, wire
from beeond_ctl.staging.journal import Journal, records
from beeond_ctl.staging.proof import fingerprint, pack, proof
from beeond_ctl.staging.scan import Proofs, read_proofs
from beeond_ctl.staging.transfer import Fold, Summary, show
from beeond_ctl.staging.wire import PIECE
from tests.unit.copying import SCAN, worker

if TYPE_CHECKING:
    from pathlib import Path


def test_a_journal_cut_at_any_byte_keeps_every_whole_record_and_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    journal = Journal(path)
    assert list(journal.read()) == []
    written = [("kind", f"text {number}") for number in range(5)]
    ends = [0]
    for record in written:
        journal.append(record)
        ends.append(journal.length)
    journal.close()
    whole = path.read_bytes()
    for cut in range(len(whole) + 1):
        path.write_bytes(whole[:cut])
        again = Journal(path)
        kept = sum(1 for end in ends if 0 < end <= cut)
        expected = [(kind, text.encode()) for kind, text in written[:kept]]
        assert list(again.read()) == expected
        again.append(("kind", "after"))
        again.close()
        assert list(records(os.open(path, os.O_RDONLY))) == [*expected, ("kind", b"after")]


@pytest.mark.parametrize("kind", ["link", "link to nothing", "directory", "fifo", "socket"])
def test_a_journal_that_is_no_file_is_to_be_removed(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "journal"
    if kind == "link":
        (tmp_path / "other").touch()
    if kind.startswith("link"):
        path.symlink_to("other")
    elif kind == "directory":
        path.mkdir()
    elif kind == "fifo":
        os.mkfifo(path)
    else:
        os.mknod(path, stat.S_IFSOCK | 0o600)
    with pytest.raises(OSError, match=r"is no file; remove it.*journal"):
        Journal(path)


def test_a_journal_with_a_damaged_byte_keeps_nothing_behind_it(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    journal = Journal(path)
    assert list(journal.read()) == []
    journal.append(("a", "1"), ("b", "2"), ("c", "3"))
    journal.close()
    damaged = bytearray(path.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    path.write_bytes(damaged)
    assert list(records(os.open(path, os.O_RDONLY))) == [("a", b"1")]


@pytest.mark.parametrize(
    "text", ['[Infinity,"t",0,"00"]', '[1,"t",-Infinity,"00"]', "[1,2]", "{}", "[]", "1", "\udcff"]
)
def test_what_is_no_piece_is_passed_over(text: str) -> None:
    given = [text.encode(errors="surrogateescape"), b'[1,"t",0,"00"]']
    assert read_proofs(iter(("piece", each) for each in given), array("Q")).pieces[1]["t"] == {0: "00"}


@given(st.binary(min_size=1, max_size=60).filter(lambda name: b"\0" not in name and b"/" not in name))
def test_any_name_passes_the_wire_and_stays_one_printable_line(name: bytes) -> None:
    text = name.decode(errors="surrogateescape")
    line = wire.dumps([text])
    assert line.isascii()
    assert "\n" not in line
    assert "\t" not in line
    assert wire.loads(line)[0].encode(errors="surrogateescape") == name
    assert show(text).isprintable()


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000, "nul"])
def test_what_is_no_json_is_a_protocol_error(text: str) -> None:
    with pytest.raises(wire.ProtocolError):
        wire.loads(text)


def test_proofs_hold_for_one_state_of_one_file_only() -> None:
    others = [fingerprint("dir/name", 10, 20, 30, inode) for inode in range(41, 48)]
    text = pack(
        b"".join(proof(mark, b"x" * 16) for mark in (fingerprint("dir/name", 10, 20, 30, 40), *others))
    ).encode()
    not_proofs = (b"no proof", text[:-4], "ü".encode(), "ü".encode() * 32, b"!" * 32)
    proofs = read_proofs(iter(("proof", each) for each in (text, *not_proofs)), array("Q"))
    for inode in range(40, 48):
        assert proofs.has(fingerprint("dir/name", 10, 20, 30, inode))
    for other in (("dir/other", 10, 20, 30, 40), ("dir/name", 11, 20, 30, 40), ("dir/name", 10, 20, 31, 40)):
        assert not proofs.has(fingerprint(*other))
    assert not Proofs(array("Q"), {}).has(1)


@pytest.mark.parametrize("seed", range(10))
def test_a_sparse_range_is_copied_with_its_holes_and_the_checksum_of_its_bytes(
    tmp_path: Path, seed: int
) -> None:
    rng = random.Random(seed)
    size = rng.randrange(1, 8 << 20)
    path = tmp_path / "source"
    with open(path, "wb") as file:
        file.truncate(size)
        for _ in range(3):
            file.seek(rng.randrange(size))
            file.write(rng.randbytes(rng.randrange(1, 100_000)))
    size = path.stat().st_size
    source = os.open(path, os.O_RDONLY)
    target = os.open(tmp_path / "target", os.O_RDWR | os.O_CREAT)
    os.ftruncate(target, size)
    middle = rng.randrange(size)
    for start, end in ((0, middle), (middle, size)):
        digest = data.copy_range(source, target, start, end, sparse=True)
        assert digest == xxhash.xxh3_128_digest(path.read_bytes()[start:end])
        assert data.hash_range(target, start, end, sparse=True) == digest
    assert (tmp_path / "target").read_bytes() == path.read_bytes()
    assert os.fstat(target).st_blocks <= path.stat().st_blocks + 16
    assert data.hash_range(target, 0, size + 1, sparse=False) is None


def test_a_summary_says_one_line_for_each_cause_with_examples() -> None:
    names = [f"file\n{number}" for number in range(9)]
    summary = Summary(
        b"/a", b"/b", failures={("denied", "source"): Fold().add(9, names), ("quota", "destination"): Fold(1)}
    )
    lines = summary.problems()
    assert len(lines) == 2
    assert all(line.isprintable() for line in lines)
    assert lines[0].startswith("9 entries (e.g. 'file\\n0', ")
    assert lines[0].endswith("not copied: permission denied at the source")
    assert lines[1] == "1 entry not copied: quota exceeded at the destination"


def test_a_summary_gives_the_reasons_where_nobody_knows_the_names() -> None:
    why = ["the process that copied them died: Transport endpoint is not connected"] * 2 + [
        "nobody\naccounted for them"
    ]
    summary = Summary(b"/a", b"/b", failures={("lost", "source"): Fold().add(7, why)})
    assert summary.problems() == [f"7 entries not copied: {why[0]}; nobody\\naccounted for them"]


# --- the native part and what does without it ------------------------------------------------------------


@pytest.mark.parametrize("nameless", [0, _native.NAMELESS])
def test_one_proof_stands_for_the_same_state_whoever_made_it(tmp_path: Path, nameless: int) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    target.mkdir()
    names = ["plain", "caf\udce9", "\n", "x" * 255]
    for number, name in enumerate(names):
        (source / name).write_bytes(os.urandom(number * 1000))
        os.utime(source / name, ns=(5, number - 2))  # before 1970, too
    fds = [os.open(each, os.O_RDONLY) for each in (source, target)]
    everything = _native.WRITE | _native.PLACE | _native.VERIFY | nameless
    proofs, size, left, different, _ = _native.copy(
        fds[0], fds[1], names, b"a/b/", ".temp.", 0, -1, everything, b"", 0
    )
    assert (size, left, different) == (6000, [], [])
    expected = b""
    for name in names:
        info = (source / name).stat()
        state = (info.st_size, info.st_mtime_ns, info.st_ctime_ns, info.st_ino)
        digest = xxhash.xxh3_128_digest((target / name).read_bytes())
        expected += proof(fingerprint(f"a/b/{name}", *state), digest)
    assert proofs == expected
    for each in fds:
        os.close(each)


@pytest.mark.parametrize("nameless", [0, _native.NAMELESS])
def test_the_native_part_leaves_what_is_not_ordinary_as_it_found_it(tmp_path: Path, nameless: int) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    target.mkdir()
    for name in ("ordinary", "attributes", "newer", "blocked"):
        (source / name).write_text(name)
    os.setxattr(source / "attributes", "user.note", b"x")
    (source / "link").symlink_to("ordinary")
    os.mkfifo(source / "fifo")
    with open(source / "sparse", "wb") as file:
        file.truncate(100_000)
    (source / "large").write_bytes(bytes(data.SMALL + 1))
    (target / "newer").write_text("newer")
    os.utime(source / "newer", (1, 1))
    (target / "blocked").mkdir()
    names = ["ordinary", "attributes", "link", "fifo", "sparse", "large", "missing", "newer", "blocked"]
    fds = [os.open(each, os.O_RDONLY) for each in (source, target)]
    _, _, left, different, _ = _native.copy(
        fds[0], fds[1], names, b"", ".temp.", 0, -1, _native.WRITE | _native.PLACE | nameless, b"", 0
    )
    assert [names[number] for number in left] == names[1:]
    assert different == []
    assert sorted(path.name for path in target.iterdir()) == ["blocked", "newer", "ordinary"]
    assert (target / "newer").read_text() == "newer"
    for each in fds:
        os.close(each)


@pytest.mark.parametrize("nameless", [0, _native.NAMELESS])
def test_files_that_wait_for_their_sync_have_no_name_until_they_are_brought_back(
    tmp_path: Path, nameless: int
) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    target.mkdir()
    (source / "file").write_text("x")
    fds = [os.open(each, os.O_RDONLY) for each in (source, target)]
    names, flags = ["missing", "file"], _native.VERIFY | nameless
    _, _, _, _, written = _native.copy(
        fds[0], fds[1], names, b"", ".temp.", 7, -1, flags | _native.WRITE, b"", 0
    )
    assert [path.name for path in target.iterdir()] == [".temp.8"]
    (target / ".temp.8").write_text("y")
    os.utime(target / ".temp.8", ns=(0, (source / "file").stat().st_mtime_ns))
    _, _, left, different, _ = _native.copy(
        fds[0], fds[1], names, b"", ".temp.", 7, -1, flags | _native.PLACE, written, 0
    )
    assert (left, different) == ([0], [1])
    assert list(target.iterdir()) == []
    with pytest.raises(ValueError, match="not the files"):
        _native.copy(fds[0], fds[1], ["file"], b"", ".temp.", 7, -1, flags | _native.PLACE, written, 0)
    for each in fds:
        os.close(each)


def test_only_what_is_there_as_it_was_proved_is_kept(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    for path in (source, target):
        (path / "dir").mkdir(parents=True)
        for name in ("same", "unproved", "other-time", "other-size", "linked"):
            (path / name).write_text("1")
            os.utime(path / name, ns=(1, 10**18))
    (source / "absent").write_text("1")
    (target / "other-size").write_text("12")
    os.utime(target / "other-time", ns=(1, 10**18 + 1))
    os.link(source / "linked", source / "linked-too")
    proved = array("Q")
    for name in ("same", "other-time", "other-size", "absent", "linked"):
        info = (source / name).stat()
        proved.append(
            fingerprint(f"below/{name}", info.st_size, info.st_mtime_ns, info.st_ctime_ns, info.st_ino)
        )
    names = b"".join(os.fsencode(name) + b"\0" for name in sorted(os.listdir(source)))
    fds = [os.open(each, os.O_RDONLY) for each in (source, target)]

    def ask(*, update: bool) -> tuple[int, list[str], list[int], list[str]]:
        return _native.examine(fds[0], fds[1], names, b"below/", _native.marks(proved), update)

    others = ["dir", "linked", "linked-too"]
    assert ask(update=False) == (1, ["absent", "other-size", "other-time", "unproved"], [1, 1, 1, 1], others)
    assert ask(update=True) == (2, ["absent", "other-size", "other-time"], [1, 1, 1], others)
    files, sizes, left, marks, there = _native.look(fds[0], fds[1], names, b"below/")
    assert (files, sizes, left) == (
        ["absent", "other-size", "other-time", "same", "unproved"],
        [1] * 5,
        others,
    )
    assert there == [0, 0, 0, 2, 2]
    infos = [(source / name).stat() for name in files]
    assert marks == [
        fingerprint(f"below/{name}", 1, info.st_mtime_ns, info.st_ctime_ns, info.st_ino)
        for name, info in zip(files, infos, strict=True)
    ]
    (target / "same").chmod(0o611)
    assert _native.look(fds[0], fds[1], names, b"below/")[4] == [0, 0, 0, 1, 2]
    assert _native.look(fds[0], -1, names, b"below/") == (files, sizes, left, marks, [0] * 5)
    with (source / "same").open("r+b") as file:
        file.truncate(2 * PIECE)
    assert "same" in _native.look(fds[0], fds[1], names, b"below/")[0]
    with (source / "same").open("r+b") as file:
        file.truncate(2 * PIECE + 1)
    assert "same" in _native.look(fds[0], fds[1], names, b"below/")[2]
    fds[1], target_fd = -1, fds[1]
    assert ask(update=True)[0] == 0
    for each in (fds[0], target_fd):
        os.close(each)


@pytest.mark.parametrize("engine", [_native, portable], ids=["native", "portable"])
def test_a_directory_is_read_in_parts_to_its_end(tmp_path: Path, engine: Any) -> None:
    for number in range(25):
        (tmp_path / f"file{number}").touch()
        (tmp_path / f"dir{number}").mkdir()
    fd = os.open(tmp_path, os.O_RDONLY)
    for _ in range(2):  # from the start each time
        listing, names, dirs, last = engine.opendir(fd), b"", list[str](), False
        while not last:
            some, below, last = engine.readdir(listing, 10)
            names, dirs = names + some, dirs + below
        assert sorted(names.split(b"\0")[:-1]) == sorted(b"file%d" % number for number in range(25))
        assert sorted(dirs) == sorted(f"dir{number}" for number in range(25))
    os.close(fd)


@pytest.mark.parametrize("engine", [_native, portable], ids=["native", "portable"])
@given(known=st.lists(st.integers(0, 2**64 - 1), max_size=50), asked=st.integers(0, 2**64 - 1))
def test_a_set_of_fingerprints_has_what_was_put_in(engine: Any, known: list[int], asked: int) -> None:
    marks = engine.marks(array("Q", known))
    assert all(engine.has(marks, mark) for mark in known)
    assert engine.has(marks, asked) == (
        asked in known or (asked < 2 and engine is _native and {0, 1} & {*known} != set())
    )


@pytest.mark.parametrize(("above", "made"), [(0o755, 0o755), (0o777, 0o755), (0o750, 0o750), (0o700, 0o700)])
def test_a_directory_made_on_the_way_lets_nobody_do_more_than_the_one_it_is_in(
    tmp_path: Path, above: int, made: int
) -> None:
    (tmp_path / "above").mkdir()
    (tmp_path / "above").chmod(0o2000 | above)
    child.make_parents(str(tmp_path / "above" / "a" / "b"))
    for path in (tmp_path / "above" / "a", tmp_path / "above" / "a" / "b"):
        assert path.stat().st_mode & 0o7777 == 0o2000 | made


@pytest.mark.parametrize(
    "code", [errno.EINVAL, errno.EBADF, errno.EOPNOTSUPP, errno.EIO, errno.ENOSPC, errno.EDQUOT]
)
def test_a_directory_that_cannot_be_synced_fails_unless_its_file_system_never_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    for name in ("source", "target"):
        (tmp_path / name / "dir").mkdir(parents=True)
    made = worker(tmp_path, durable=True)
    made.sync.how = copier._Sync.EACH
    synced = []

    def refuse(fd: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{fd}"))
        if synced[-1].endswith("dir"):
            raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "fsync", refuse)
    result = copier._Result()
    made.finish(["", "dir"], result)
    assert {os.path.basename(path) for path in synced} == {"target", "dir"}
    harmless = code in (errno.EINVAL, errno.EBADF, errno.EOPNOTSUPP)
    assert result.skipped == (2 if harmless else 1)
    assert [failure[2] for failure in result.failures] == ([] if harmless else ["dir"])


@pytest.mark.parametrize("alone", [False, True])
def test_a_name_that_is_listed_but_not_there_is_a_failure_where_nobody_can_have_removed_it(
    tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes], alone: bool
) -> None:
    (tmp_path / "there").write_text("x")
    walk = scan._Scan({**SCAN, "alone": alone}, None)
    directory = tree.Tree(str(tmp_path), make=False).root
    walk._take_in("", "", walk._look(directory, None, "", b"there\0gone\0"))
    walk.finish()
    told = capfdbinary.readouterr().out.decode().splitlines()
    assert [line.split("\t")[:3] for line in told if line.startswith("failed")] == [
        ["failed", "missing", "source"]
    ] * alone
    assert any(line.startswith("batch\t1") for line in told)


@pytest.mark.parametrize(
    ("config", "waits"),
    [
        ({}, False),
        ({"flags": ["update"]}, True),
        ({"journal": [3, 9]}, False),
        ({"journal": [3, 9], "live": True}, True),
        ({"flags": ["update"], "flushes": ""}, False),
    ],
)
def test_attributes_that_may_be_old_are_not_gone_by(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: dict[str, Any], waits: bool
) -> None:
    given = {**SCAN, "source": str(tmp_path), "flushes": str(tmp_path / "flushes"), **config}
    given["header"] = {**SCAN["header"], "live": config.get("live", False)}
    slept: list[float] = []
    monkeypatch.setattr(scan, "time", SimpleNamespace(monotonic=lambda: 7.0, sleep=slept.append))
    for remote in (False, True):
        monkeypatch.setattr(flushed, "is_remote", lambda _: remote)  # noqa: B023
        scan._flushed(given)
    assert slept == [flushed.STALE_S] * waits
