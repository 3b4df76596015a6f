"""How a copier spreads its work over threads, and what its processes pay for being started."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

import beeond_ctl
from beeond_ctl.staging import begin, child, coordinator, copier, spawn, tree, wire
from beeond_ctl.staging.causes import StagingError
from beeond_ctl.staging.job import Job
from beeond_ctl.staging.journal import Journal
from beeond_ctl.staging.local import copy_local
from beeond_ctl.staging.worker import _watch
from bench import slow_calls
from tests.unit.copying import opened_below, worker

if TYPE_CHECKING:
    from collections.abc import Callable

BEEOND_CTL = Path(sys.executable).with_name("beeond-ctl")


def mount(*arguments: str) -> None:
    subprocess.run(["mount", *arguments], check=True)


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("fresh", [True, False])
@pytest.mark.parametrize("threads", [1, 32])
def test_every_entry_of_a_batch_is_accounted_for_however_many_threads_take_it_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, threads: int, fresh: bool, native: bool
) -> None:
    monkeypatch.setattr(copier, "native", native)
    dirs: list[str] = []
    payload: list[Any] = []
    for number in range(12):
        path = f"a/{number % 3}/{number}"
        place = tmp_path / "source" / path
        place.mkdir(parents=True)
        names = [f"f{each}" for each in range(number)]
        for each in names:
            (place / each).write_bytes(os.urandom(37 * len(names)))
        (place / "link").symlink_to(f"f{number}")
        payload.append([len(dirs), names, ["link"] if number else []])
        dirs.append(path)
    if not fresh:  # in the way of a directory that has seven files and a link
        (tmp_path / "target" / "a" / "1").mkdir(parents=True)
        (tmp_path / "target" / "a" / "1" / "7").write_text("in the way")
    made = worker(tmp_path, fresh=fresh)
    made.threads, result = threads, copier._Result()
    made.copy("1", dirs, payload, result)
    lost = 0 if fresh else 8
    assert result.copied == sum(range(12)) + 11 - lost
    assert [(failure[0], failure[1]) for failure in result.failures] == [("in-the-way", "destination")] * lost
    assert len(result.proofs) == 24 * (sum(range(12)) - (0 if fresh else 7))
    for path in dirs:
        if fresh or not path.endswith("/7"):
            there, copied = (
                {
                    each.name: each.is_symlink() or each.read_bytes()
                    for each in (tmp_path / top / path).iterdir()
                }
                for top in ("source", "target")
            )
            assert there == copied or (path.endswith("/0") and not copied)


@pytest.mark.root
@pytest.mark.parametrize("inner", ["disk", "memory"])
def test_what_is_mounted_below_the_destination_is_synced_as_what_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, inner: str
) -> None:
    for name in ("source/inner", "target/inner"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "source" / "inner" / "file").write_text("x")
    mounted = tmp_path / "target" if inner == "disk" else tmp_path / "target" / "inner"
    mount("-t", "tmpfs", "none", str(mounted))
    try:
        if inner == "disk":
            (tmp_path / "disk").mkdir()
            (tmp_path / "target" / "inner").mkdir()
            mount("--bind", str(tmp_path / "disk"), str(tmp_path / "target" / "inner"))
        synced: list[int] = []
        monkeypatch.setattr(copier, "native", False)
        monkeypatch.setattr(os, "fsync", synced.append)
        made, result = worker(tmp_path, durable=True), copier._Result()
        made.copy("1", ["inner"], [[0, ["file"], []]], result)
        made.target.close()
    finally:
        subprocess.run(["umount", "--recursive", mounted], check=True)
    assert result.copied == 1
    assert made.sync.how == (copier._Sync.NONE if inner == "disk" else copier._Sync.WHOLE)
    assert len(synced) == (1 if inner == "disk" else 0)


@pytest.mark.parametrize(
    ("ran_s", "delayed_s", "threads"),
    [
        (0.9, 0.0, 1),  # calls that do not wait
        (0.1, 0.88, 1),  # nor do these, but the machine is busy
        (0.1, 0.0, 10),
        (0.1, 0.5, 5),
        (0.001, 0.5, copier._MAX_THREADS),
    ],
)
def test_waiting_for_a_processor_is_not_taken_for_waiting_for_a_file_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ran_s: float, delayed_s: float, threads: int
) -> None:
    made = worker(tmp_path)
    monkeypatch.setattr(child, "used_s", lambda: (ran_s, ran_s + delayed_s))
    monkeypatch.setattr("beeond_ctl.staging.copier.time", SimpleNamespace(monotonic=lambda: 1.0))
    made._adapt(0.0, (0.0, 0.0))
    assert made.threads in {threads - 1, threads, threads + (threads > 1)}


@pytest.mark.parametrize("busy", [True, False])
def test_threads_become_fewer_while_they_keep_a_processor_busy_and_more_while_they_do_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, busy: bool
) -> None:
    made, wanted = worker(tmp_path), iter(range(0, 10_000, 100))
    made.threads = 8
    monkeypatch.setattr(child, "used_s", lambda: (0.0, next(wanted) if busy else 0.0))
    made._by_threads(iter(range(16)), lambda _: time.sleep(0.01))
    assert made.threads == (4 if busy else 16)


def test_of_batches_too_quick_to_say_anything_several_are_counted_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, clock = worker(tmp_path), [0.0]
    made.threads = 8
    monkeypatch.setattr("beeond_ctl.staging.copier.time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(child, "used_s", lambda: (0.0, clock[0]))  # as long as it takes

    def one_ms(_: object) -> None:
        clock[0] += 0.001

    for _ in range(19):
        made._by_threads(iter([0]), one_ms)
    assert made.threads == 8
    made._by_threads(iter([0, 0]), one_ms)
    assert made.threads == 4


def missing(_: str) -> None:
    return None


def beside(path: str) -> None:
    os.mkdir(path)


def in_the_way(path: str) -> None:
    Path(path).write_text("")


@pytest.mark.parametrize("first", [missing, beside, in_the_way])
def test_a_directory_that_is_most_likely_new_is_opened_whatever_is_there(
    tmp_path: Path, first: Callable[[str], None]
) -> None:
    root = tree.Tree(str(tmp_path), make=True, fresh=True)
    first(str(tmp_path / "new"))
    if first is in_the_way:
        with pytest.raises(StagingError):
            root.open("new/below", new=True)
        assert (tmp_path / "new").is_file()
    else:
        assert (
            os.fstat(root.open("new/below", new=True).fd).st_ino == (tmp_path / "new" / "below").stat().st_ino
        )


def test_a_tree_that_makes_nothing_makes_nothing_that_is_most_likely_new(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        tree.Tree(str(tmp_path), make=False).open("new", new=True)
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize("count", range(1, 8))
def test_a_tree_closes_last_what_lies_above_what_it_has_opened_last(tmp_path: Path, count: int) -> None:
    for number in range(count + 1):
        (tmp_path / f"a/b/{number}").mkdir(parents=True)
    some = tree.Tree(str(tmp_path), make=False)
    before = len(opened_below(tmp_path))
    for number in range(count):
        some.open(f"a/b/{number}")
        some.trim(4)
    assert len(opened_below(tmp_path)) == before + 3
    (tmp_path / "a").rename(tmp_path / "elsewhere")
    after = some.open(f"a/b/{count}")
    assert os.fstat(after.fd).st_ino == (tmp_path / f"elsewhere/b/{count}").stat().st_ino
    some.close()


_LIMITED = """
import sys
from beeond_ctl.staging import spawn
from beeond_ctl.staging.job import Identity, Job
from beeond_ctl.staging.local import copy_local
area, user = sys.argv[1], Identity(64242, 64242) if sys.argv[2] else None
spawn._ENVIRONMENT = {**spawn._ENVIRONMENT, **dict(each.split("=", 1) for each in sys.argv[3:])}
job = Job(f"{area}/source".encode(), f"{area}/target".encode(), ("update",))
summary = copy_local(job, user, journal_dir=area, workers=1)
sys.exit(0 if summary.proved else "; ".join(summary.problems()))
"""


@pytest.mark.parametrize(
    ("limit", "levels", "user"),
    [
        ("--nofile=1024:1024", 7, ""),
        ("--nofile=4096:4096", 60, ""),
        pytest.param("--nproc=100:100", 7, "user", marks=pytest.mark.root),
    ],
)
def test_where_calls_wait_no_more_are_in_flight_than_the_system_allows(
    area: Path, limit: str, levels: int, user: str
) -> None:
    below = "/".join(["d"] * (levels - 1))
    for number in range(45):
        for top in ("source", "target"):
            place = area / top / f"{number}" / below
            place.mkdir(parents=True)
            for each in (place, *place.parents[: min(levels - 1, 6)]):
                (each / "file").touch()
                os.utime(each / "file", (0, 0))
    if user:
        subprocess.run(["chown", "-R", "64242:64242", area], check=True)
    slow = [f"{key}={value}" for key, value in slow_calls.environment(area, 500).items()]
    done = subprocess.run(
        ["prlimit", limit, sys.executable, "-c", _LIMITED, str(area), user, *slow],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("by", ["clean", "gone"])
def test_what_a_killed_run_left_is_removed_in_deep_directories_without_many_open_files(
    area: Path, by: str
) -> None:
    program = (
        "import json, os, sys; from pathlib import Path; from tests.unit.copying import worker\n"
        "from beeond_ctl.staging import copier\n"
        "some, result = worker(Path(sys.argv[1])), copier._Result()\n"
        "dirs = json.loads(sys.stdin.read())\n"
        "some.threads = 32\n"
        "some.gone(dirs) if sys.argv[2] == 'gone' else some.clean(dirs, result)\n"
        "sys.exit(len(result.failures))\n"
    )
    dirs = [f"{number}/" + "/".join(["d"] * 11) for number in range(128)]
    for path in dirs:
        for top in ("target", *(["source"] if by == "clean" else [])):
            (area / top / path).mkdir(parents=True)
        (area / "target" / path / ".beeond-ctl.0.left").touch()
    subprocess.run(
        ["prlimit", "--nofile=1024:1024", sys.executable, "-c", program, str(area), by],
        input=json.dumps(dirs), text=True, timeout=120, check=True,
    )  # fmt: skip
    assert not [path for path in dirs if os.listdir(area / "target" / path)]


def test_a_thread_that_ends_while_it_is_looked_at_is_no_error() -> None:
    seen = iter([True])
    thread: Any = SimpleNamespace(is_alive=lambda: next(seen, False), join=lambda _: None)
    _watch([], [thread], threading.Event(), 1.0)


def test_nothing_is_appended_to_a_journal_that_was_not_read(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="Invalid argument"):
        Journal(tmp_path / "journal").append(("kind", "text"))


def test_a_journal_that_cannot_be_written_leaves_no_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = []

    def start(*args: Any) -> subprocess.Popen[bytes]:
        started.append(spawn.spawn(*args))
        return started[-1]

    def refuse(_: Journal) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(begin, "spawn", start)
    monkeypatch.setattr(Journal, "sync", refuse)
    job = Job(bytes(tmp_path / "source"), bytes(tmp_path / "target"))
    with pytest.raises(OSError, match="No space left"):
        coordinator.Coordinator(job, begin.Begun(job, None, tmp_path, 1), ["here"])
    assert [child.poll() is not None for child in started] == [True]


def allow(monkeypatch: pytest.MonkeyPatch, name: str, count: int) -> None:
    """Let `count` threads called `name` start, and no more."""
    whole = threading.Thread.start
    started: list[threading.Thread] = []

    def start(thread: threading.Thread) -> None:
        if thread.name == name:
            if len(started) >= count:
                raise RuntimeError("can't start new thread")
            started.append(thread)
        whole(thread)

    monkeypatch.setattr(threading.Thread, "start", start)


@pytest.mark.parametrize("name", ["config", "scanner", "staging", "copier"])
def test_a_thread_that_the_system_does_not_allow_is_an_error_as_a_process_is(
    area: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    job = Job(bytes(area / "source"), bytes(area / "target"))
    (area / "source").mkdir()
    (area / "source/f").touch()
    allow(monkeypatch, name, 0)
    with pytest.raises(BlockingIOError, match="no more threads"):
        copy_local(job, journal_dir=area, workers=2)
    monkeypatch.undo()
    assert copy_local(job, journal_dir=area, workers=2).proved


def test_a_node_copies_by_as_many_copiers_as_the_system_allows(
    area: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (area / "source").mkdir()
    (area / "source/f").touch()
    allow(monkeypatch, "copier", 1)
    assert copy_local(Job(bytes(area / "source"), bytes(area / "target")), journal_dir=area, workers=3).proved


def test_a_program_that_fails_says_why_even_while_a_thread_of_it_reads() -> None:
    code = (
        "import sys, threading; from beeond_ctl.staging import child\n"
        "def main():\n"
        "    reads = threading.Thread(target=sys.stdin.buffer.readline, daemon=True)\n"
        "    reads.start()\n"
        "    raise RuntimeError('the reason')\n"
        "child.run(main)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as program:
        assert program.wait(60) == 1
        assert program.stderr is not None
        assert program.stderr.read().splitlines()[-1] == "RuntimeError: the reason"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(st.characters()),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=20,
)


@pytest.mark.parametrize("quick", [True, False])
@given(value=JSON, text=st.text('[]{}",:0123.eE-+ntrufalse\\\n \0', max_size=12))
def test_the_wire_says_and_understands_what_json_does(quick: bool, value: Any, text: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        if not quick:
            patch.setattr(wire, "_json", None)
        write, read = wire._ways()
        patch.setattr(wire, "_read", read)
        assert write(value) == json.dumps(value, separators=(",", ":"))
        assert wire.loads(write(value)) == wire.loads(write(value).encode() + b"\n") == value
        try:
            meant = json.loads(text)
        except ValueError:
            with pytest.raises(wire.ProtocolError):
                wire.loads(text)
        else:
            assert repr(wire.loads(text)) == repr(meant)


def test_a_child_that_starts_takes_no_time_for_what_it_can_do_without() -> None:
    code = "import beeond_ctl.staging.scan, beeond_ctl.staging.copier as c, sys; c.wire.loads(c.wire.dumps([1])); "
    code += (
        "sys.exit(bool({'json', 're', 'typing', 'subprocess', 'pathlib', 'dataclasses'} & {*sys.modules}))"
    )
    places = [str(Path(str(each.__file__)).parent.parent) for each in (beeond_ctl, xxhash)]
    before = f"import sys; sys.path += {places!r}; "
    subprocess.run([sys.executable, "-I", "-S", "-c", before + code], check=True, timeout=60)


def test_commands_that_need_no_configuration_do_not_wait_for_what_checks_it() -> None:
    code = (
        "import beeond_ctl.cli.commands, beeond_ctl.staging.local, sys; sys.exit('pydantic' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_output_that_cannot_be_written_is_an_error() -> None:
    with open("/dev/full", "w", encoding="ascii") as full:
        done = subprocess.run(
            [BEEOND_CTL, "--version"], stdout=full, stderr=subprocess.PIPE, text=True, check=False, timeout=60
        )
    assert done.returncode == 1
    assert "No space left on device" in done.stderr
    assert done.stderr.count("\n") == 1
