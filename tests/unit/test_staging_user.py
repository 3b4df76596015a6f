"""What is around a transfer that a user types: other machines, flushes, looking first, and the time it takes."""

from __future__ import annotations

import json
import mmap
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from beeond_ctl import estimate, flushes, step
from beeond_ctl.cli import flush, progress, stage
from beeond_ctl.cli import preview as foreseen
from beeond_ctl.errors import UsageError, UserError
from beeond_ctl.staging import local, preview, quiet, spawn, spread, tell
from beeond_ctl.staging.begin import Begun
from beeond_ctl.staging.coordinator import Coordinator
from beeond_ctl.staging.job import Job
from beeond_ctl.staging.local import copy_local
from beeond_ctl.staging.transfer import Progress
from tests.faults import trees
from tests.unit import copying
from tests.unit.root_directory import needs_root, root_directory
from tests.waiting import wait_for

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence


def same(source: Path, target: Path) -> bool:
    return trees.snapshot(bytes(source)) == trees.snapshot(bytes(target))


def contents(root: Path) -> dict[Path, bytes]:
    return {path.relative_to(root): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def make(root: Path, files: int = 400, size: int = 100) -> Path:
    for number in range(files):
        directory = root / f"d{number % 20}"
        directory.mkdir(parents=True, exist_ok=True)
        (directory / f"f{number}").write_bytes(os.urandom(size))
    return root


# --- other machines ---------------------------------------------------------------------------------------


A, B, C = (f"{name}{os.getpid()}" for name in "abc")
"""Names of machines, and not those of tests that run beside this one."""


class Machines:
    """Stands in for srun: one worker for each name, all on this machine, and a parent that waits for them."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = names
        self.tickets: list[bytes] = []
        self.pids = Path()

    def start(self, ticket: bytes) -> subprocess.Popen[bytes]:
        self.tickets.append(ticket)
        worker = '"$PYTHON" -I -X utf8 -m beeond_ctl.staging.spread <"$T"'
        script = f'for node in "$@"; do SLURMD_NODENAME=$node {worker} & done; wait'
        path = self.pids / "ticket"
        path.write_bytes(ticket)
        environment = {
            **os.environ,
            "PYTHON": sys.executable,
            "T": str(path),
            "SLURM_LAUNCH_NODE_IPADDR": "127.0.0.1",
        }
        return subprocess.Popen(
            ["sh", "-c", script, "sh", *self.names],
            env=environment,
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )


def worker_pid(node: str) -> int | None:
    for directory in Path("/proc").iterdir():
        try:
            if (
                b"beeond_ctl.staging.spread" in (directory / "cmdline").read_bytes()
                and f"SLURMD_NODENAME={node}\0".encode() in (directory / "environ").read_bytes()
            ):
                return int(directory.name)
        except (OSError, ValueError):
            continue
    return None


def run(
    area: Path, machines: Machines, others: spread.Others, watch: Callable[[Progress], None] | None = None
) -> tuple[Any, list[str], Progress]:
    news: list[str] = []
    seen: list[Progress] = []
    (area / "journal").mkdir(exist_ok=True)

    def tell_all(now: Progress) -> None:
        seen.append(now)
        if watch:
            watch(now)

    job = Job(bytes(area / "source"), bytes(area / "target"))
    summary = copy_local(
        job, journal_dir=area / "journal", others=others, news=news.append, progress=tell_all, progress_every_s=0.05,
        workers=1,
    )  # fmt: skip
    return summary, news, seen[-1]


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spread, "ALONE_S", 0.0)


def slow_down(others: spread.Others, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the machine that coordinates get no work, so that the others have to do it."""
    take = Coordinator.take

    def refuse(self: Coordinator, node: str) -> dict[str, Any]:
        return {"wait": 0.05} if node == others.here and not self.finished() else take(self, node)

    monkeypatch.setattr(Coordinator, "take", refuse)


@pytest.mark.usefixtures("eager")
def test_other_machines_do_the_work_and_are_all_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(tmp_path / "source", files=1500, size=4000)
    machines = Machines([A, B])
    machines.pids = tmp_path
    others = spread.Others("here", [A, B], machines.start, processes=1)
    slow_down(others, monkeypatch)
    take = Coordinator.take

    def share(self: Coordinator, node: str) -> dict[str, Any]:
        """Who has copied something waits until each has: one that is quick to start could do it all."""
        sizes = self.progress().bytes_by_node
        return {"wait": 0.05} if sizes.get(node) and not (sizes.get(A) and sizes.get(B)) else take(self, node)

    monkeypatch.setattr(Coordinator, "take", share)
    summary, news, last = run(tmp_path, machines, others)
    assert (summary.proved, summary.copied, news) == (True, 1500, [])
    assert {node for node, size in last.bytes_by_node.items() if size} == {A, B}
    assert same(tmp_path / "source", tmp_path / "target")
    assert worker_pid(A) is None
    assert worker_pid(B) is None


@pytest.mark.usefixtures("eager")
def test_a_machine_that_dies_is_named_and_its_work_is_done_by_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(tmp_path / "source", files=1500, size=4000)
    machines = Machines([A, B])
    machines.pids = tmp_path
    others = spread.Others("here", [A, B, C], machines.start, processes=1)
    slow_down(others, monkeypatch)
    take, report = Coordinator.take, Coordinator.report
    came, late, killed = set[str](), list[int](), list[int]()

    def hold(self: Coordinator, node: str) -> dict[str, Any]:
        """Before one is killed the other only comes, and what the one has copied some of, it does not get done."""
        came.add(node)
        if not killed and node in (A, B) and (node == B or late):
            return {"wait": 0.05}
        answer = take(self, node)
        if node == A and "work" in answer and self.progress().bytes_by_node.get(A):
            late.append(answer["work"]["id"])
        return answer

    def ignore(self: Coordinator, node: str, result: dict[str, Any]) -> None:
        if node != A or not late:
            report(self, node, result)

    def kill(_: Progress) -> None:
        if not killed and late and B in came:
            pid = worker_pid(A)
            assert pid is not None
            os.kill(pid, 9)
            killed.append(pid)
            monkeypatch.setattr(spread, "SILENCE_S", 5.0)
            monkeypatch.setattr(spread, "COME_S", 0.0)

    monkeypatch.setattr(Coordinator, "take", hold)
    monkeypatch.setattr(Coordinator, "report", ignore)
    summary, news, _ = run(tmp_path, machines, others, kill)
    assert killed
    assert (summary.proved, summary.copied) == (True, 1500)
    assert same(tmp_path / "source", tmp_path / "target")
    assert sorted(line.partition(" (")[0].partition(";")[0] for line in news) == [
        f"{A} was lost",
        f"{C} did not come",
    ]


class Looks:
    """Stands in for other machines, none of which is there; each look is counted."""

    here, nodes = "here", ()

    def __init__(self) -> None:
        self.count = 0

    def look(self, _: object) -> list[str]:
        self.count += 1
        return []

    def close(self) -> None:
        """Nothing is held."""


def test_progress_comes_as_often_as_asked_however_often_others_are_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(tmp_path / "source", files=20)
    (tmp_path / "journal").mkdir()
    looks: Any = Looks()
    take = Coordinator.take

    def hold(self: Coordinator, node: str) -> dict[str, Any]:
        return {"wait": 0.02} if looks.count < 50 else take(self, node)

    monkeypatch.setattr(Coordinator, "take", hold)
    monkeypatch.setattr(local, "_LOOK_S", 0.02)
    told: list[tuple[float, int]] = []
    job = Job(bytes(tmp_path / "source"), bytes(tmp_path / "target"))
    summary = copy_local(
        job, journal_dir=tmp_path / "journal", others=looks, workers=1, progress_every_s=0.3,
        progress=lambda now: told.append((time.monotonic(), now.entries_done)),
    )  # fmt: skip
    assert summary.proved
    assert 1 < len(told) <= (told[-1][0] - told[0][0]) / 0.3 + 2
    assert told[-1][1] == 20  # the last one comes at the end


def test_a_ticket_of_another_transfer_is_not_answered(tmp_path: Path) -> None:
    make(tmp_path / "source", files=10)
    (tmp_path / "journal").mkdir()
    job = Job(bytes(tmp_path / "source"), bytes(tmp_path / "target"))
    coordinator = Coordinator(job, Begun(job, None, tmp_path / "journal", 2), ["here", A])
    first, second = spread._Server(coordinator, [A]), spread._Server(coordinator, [A])
    try:
        good, other = json.loads(first.ticket(1, 0)), json.loads(second.ticket(1, 0))
        spread._Link(good, A, ["127.0.0.1"]).close()
        stolen = {**other, "port": good["port"], "server": good["server"], "silence_s": 0.5}
        with pytest.raises(TimeoutError):
            spread._Link(stolen, A, ["127.0.0.1"])
    finally:
        first.close()
        second.close()
        coordinator.close()


def test_what_a_worker_has_when_it_leaves_is_done_by_others(tmp_path: Path) -> None:
    make(tmp_path / "source", files=10)
    (tmp_path / "journal").mkdir()
    job = Job(bytes(tmp_path / "source"), bytes(tmp_path / "target"))
    coordinator = Coordinator(job, Begun(job, None, tmp_path / "journal", 2), ["here", A])
    server = spread._Server(coordinator, [A])
    try:
        link = spread._Link(json.loads(server.ticket(1, 0)), A, ["127.0.0.1"])
        wait_for(lambda: "work" in link.ask("take"), 20)
        link.ask("bye")
        assert copying.finish(coordinator, "here").proved
        link.close()
    finally:
        server.close()
        coordinator.close()


def test_a_worker_whose_coordinator_is_gone_ends_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(tmp_path / "source", files=10)
    (tmp_path / "journal").mkdir()
    monkeypatch.setattr(spread, "SILENCE_S", 1.0)
    monkeypatch.setattr(Coordinator, "take", lambda _self, _node: {"wait": 0.05})
    job = Job(bytes(tmp_path / "source"), bytes(tmp_path / "target"))
    coordinator = Coordinator(job, Begun(job, None, tmp_path / "journal", 2), ["here", A])
    server = spread._Server(coordinator, [A])
    machines = Machines([A])
    machines.pids = tmp_path
    worker = machines.start(server.ticket(1, 0))
    try:
        wait_for(lambda: A in server.look(all_gone=False)[1], 20)
        server.close()
        assert worker.wait(60) == 0
        assert worker_pid(A) is None
    finally:
        worker.kill()
        coordinator.close()


JOB = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-4]", "SLURMD_NODENAME": "n2"}


def test_a_step_is_one_task_on_each_other_node_and_takes_no_options_from_the_job(tmp_path: Path) -> None:
    (tmp_path / "srun").touch(0o755)
    environ = {
        **JOB,
        "PATH": str(tmp_path),
        "SLURM_NTASKS": "96",
        "SLURM_CONF": "/etc/s.conf",
        "HOME": "/home/a",
    }
    job = step.allocation(environ)
    assert job is not None
    assert (job.here, job.others) == ("n2", ("n1", "n3", "n4"))
    words = step.argv(job, job.others, ["worker"], environ)
    assert {"--overlap", "--jobid=7", "--nodes=3", "--ntasks=3", "--nodelist=n[1,3-4]"} <= set(words)
    left = step.environment(environ)
    assert left == {"PATH": str(tmp_path), "HOME": "/home/a", "SLURM_CONF": "/etc/s.conf"}


def test_of_a_heterogeneous_job_it_is_the_component_of_the_instance(tmp_path: Path) -> None:
    (tmp_path / "srun").touch(0o755)
    components = {
        "SLURM_JOB_ID_HET_GROUP_0": "7", "SLURM_JOB_NODELIST_HET_GROUP_0": "n[1-4]", "SLURM_HET_SIZE": "2",
        "SLURM_JOB_ID_HET_GROUP_1": "8", "SLURM_JOB_NODELIST_HET_GROUP_1": "g1",
    }  # fmt: skip
    inside = {**JOB, **components, "PATH": str(tmp_path)}
    instance = {"BEEOND_JOB_ID": "8", "BEEOND_NODES": "g1"}
    for more, wanted in (
        ({}, ["--jobid=7", "--het-group=0"]),
        ({"SLURM_JOB_NODELIST": "g1"}, ["--jobid=7", "--het-group=1"]),
        (instance, ["--jobid=7", "--het-group=1"]),
        ({"SLURM_JOB_ID": "9"}, ["--jobid=9", "--overlap"]),  # within a job that was submitted from within
    ):
        environ = {**inside, **more}
        job = step.allocation(environ)
        assert job is not None
        assert step.argv(job, job.nodes, ["worker"], environ)[1:3] == wanted
        assert step.environment(environ).keys() & components.keys() == (
            components.keys() if "--het-group" in wanted[1] else set()
        )


@pytest.mark.parametrize(
    "change", [{"SLURM_JOB_ID": ""}, {"SLURM_JOB_ID": "7; x"}, {"SLURM_JOB_NODELIST": "n[1-"}]
)
def test_what_is_no_job_is_none(change: dict[str, str]) -> None:
    assert step.allocation({**JOB, **change}) is None


def test_the_nodes_are_those_of_the_instance_of_this_job_alone() -> None:
    mine = step.allocation({**JOB, "BEEOND_JOB_ID": "7", "BEEOND_NODES": "n[2-3]"})
    other = step.allocation({**JOB, "BEEOND_JOB_ID": "8", "BEEOND_NODES": "n[2-3]"})
    assert mine is not None
    assert other is not None
    assert (mine.nodes, len(other.nodes)) == (("n2", "n3"), 4)


def test_rates_are_shown_for_each_node(capsys: pytest.CaptureFixture[str]) -> None:
    with progress.shown("json") as show:
        for second in range(1, 4):
            nodes = {"a": second * 10, "b": second * 30}
            show(Progress(True, second, 9, second * 40, 400, 0, float(second), 0.0, nodes))
    event = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert event["nodes"] == {"a": {"bytes": 30, "rate": 10}, "b": {"bytes": 90, "rate": 30}}


# --- flushes ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def old_areas(request: pytest.FixtureRequest) -> Iterator[list[Path]]:
    """One for each test that takes one, on a disk, with files in `inst/out` that nobody has written to for a while."""
    with tempfile.TemporaryDirectory(prefix="beeond-test-", dir="/var/tmp") as base:
        takers = [item for item in request.session.items if "area" in getattr(item, "fixturenames", ())]
        areas = [
            Path(base) / str(number) for number in range(sum(item.path == request.path for item in takers))
        ]
        for area in areas:
            make(area / "inst/out", files=60)
        until_old(areas[-1] / "inst/out/d19/f59")
        yield areas


@pytest.fixture
def area(old_areas: list[Path]) -> Path:
    return old_areas.pop()


def until_old(path: Path) -> None:
    """Wait until a flush can prove the file at `path`."""

    def is_old() -> bool:
        with tempfile.NamedTemporaryFile(dir=path.parents[2]) as clock:
            return os.fstat(clock.fileno()).st_ctime_ns - path.stat().st_ctime_ns > quiet.QUIET_NS

    wait_for(is_old, 10)


def whole_of(area: Path, *flags: str) -> Job:
    mount = area / "inst"
    return Job(bytes(mount / "out"), bytes(area / "target"), flags, flushes=bytes(mount / flushes.NAME))


def flushed(area: Path, only: str, *flags: str, live: bool = True) -> Job:
    """The whole transfer, after a flush of `only`."""
    mount, whole = area / "inst", whole_of(area, *flags)
    part = whole._replace(only=os.fsencode(only), live=live)
    place = flushes.place(str(mount), part.source, part.destination, part.only)
    place.mkdir(parents=True, exist_ok=True)
    assert copy_local(part, journal_dir=place, workers=1).proved
    return whole


def finish(area: Path, whole: Job) -> Any:
    (area / "journal").mkdir(exist_ok=True)
    return copy_local(whole, journal_dir=area / "journal", workers=1)


def test_the_whole_leaves_out_what_was_flushed_and_copies_what_changed_since(area: Path) -> None:
    whole = flushed(area, "d3")
    assert sorted(os.listdir(area / "target")) == ["d3"]
    assert same(area / "inst/out/d3", area / "target/d3")
    changed = area / "inst/out/d3/f3"
    stamp = changed.stat()
    changed.write_bytes(b"y" * stamp.st_size)
    os.utime(changed, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))  # only its change time tells
    (area / "target/d3/f23").write_bytes(b"not what was flushed, and of another size")
    summary = finish(area, whole)
    assert (summary.proved, summary.copied, summary.skipped) == (True, 59, 1)
    for name in ("f3", "f23"):
        assert (area / "target/d3" / name).read_bytes() == (area / "inst/out/d3" / name).read_bytes()


def test_a_dry_run_of_a_part_names_the_part(area: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert foreseen.show(whole_of(area)._replace(only=b"d3"), as_json=True) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["source"], said["destination"]) == (str(area / "inst/out/d3"), str(area / "target/d3"))


@pytest.mark.parametrize("place", ["copy", "out/copy", "../link/copy"])
def test_a_flush_into_the_file_system_that_it_is_to_outlive_is_refused(tmp_path: Path, place: str) -> None:
    mount = tmp_path / "inst"
    make(mount / "out", files=20)
    (tmp_path / "link").symlink_to(mount)
    before = contents(mount)
    summary = finish(tmp_path, flush._job(str(mount), "out/d3", f"{mount}/{place}"))
    assert not summary.proved
    assert "which goes when the job has ended" in summary.refused
    assert contents(mount) == before


def test_a_single_file_can_be_flushed_and_keeps_its_place(area: Path) -> None:
    whole = flushed(area, "d7/f7")
    assert [path.name for path in (area / "target").rglob("f*")] == ["f7"]
    assert finish(area, whole).skipped == 1
    assert same(area / "inst/out", area / "target")


@pytest.mark.parametrize(
    "lie",
    ["nothing", "zeros", "text", "fifo", "cut", "other", "directory", "still",
     *(pytest.param(lie, marks=needs_root) for lie in ("foreign", "foreign directory"))],
)  # fmt: skip
def test_a_journal_that_lies_or_makes_no_sense_proves_nothing(area: Path, lie: str) -> None:
    whole = flushed(area, "d3", live=lie != "still")
    (journal,) = (area / "inst" / flushes.NAME).rglob("*.journal")
    data = journal.read_bytes()
    journal.unlink()
    if lie == "zeros":
        journal.write_bytes(data[:400])
        os.truncate(journal, 1 << 42)
    elif lie == "text":
        journal.write_bytes(os.urandom(5000))
    elif lie == "fifo":
        os.mkfifo(journal)
    elif lie == "cut":
        journal.write_bytes(data[: len(data) // 2])
    elif lie == "other":
        journal.write_bytes(data)
        whole = whole._replace(destination=bytes(area / "elsewhere"))
    elif lie == "directory":
        journal.mkdir()
    elif lie == "still":  # of a transfer that has taken nobody to write meanwhile
        journal.write_bytes(data)
    elif lie.startswith("foreign"):
        journal.write_bytes(data)
        os.chown(journal if lie == "foreign" else journal.parent, 65534, 65534)
    summary = finish(area, whole)
    assert (summary.proved, summary.copied + summary.skipped) == (True, 60)
    assert summary.skipped == 0
    assert contents(area / "inst/out") == contents(Path(os.fsdecode(whole.destination)))


@pytest.fixture
def coarse() -> Iterator[Path]:
    """An area whose `inst` keeps times in whole seconds, as BeeGFS does: ext4 with small inodes."""
    with root_directory() as base:
        (base / "inst").mkdir()
        with (base / "image").open("wb") as file:
            file.truncate(32 << 20)
        subprocess.run(["mkfs.ext4", "-q", "-I", "128", base / "image"], check=True)
        subprocess.run(["mount", "-o", "loop", base / "image", base / "inst"], check=True)
        yield base


def by_each(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The engines in turn."""
    for name, value in (("native", "1"), ("portable", "0")):
        monkeypatch.setattr(spawn, "_ENVIRONMENT", {**spawn._ENVIRONMENT, "BEEOND_CTL_NATIVE": value})
        yield name


BIG = 130 << 20
"""Bytes of a file that is copied in pieces; nearly all of it is a hole."""


def fill(path: Path, text: bytes) -> os.stat_result:
    """Write `text` into the file in place."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT)
    try:
        os.pwrite(fd, text, BIG - len(text) if path.name == "big" else 0)
        return os.fstat(fd)
    finally:
        os.close(fd)


def ahead_ns() -> int:
    """A time so far ahead that a file with it is not waited for."""
    return (int(time.time()) + 1000) * 10**9


def fill_dated(path: Path, text: bytes, when_ns: int) -> os.stat_result:
    """Write `text` into the file in place, and date it."""
    fill(path, text)
    os.utime(path, ns=(when_ns, when_ns))
    return path.stat()


def state(info: os.stat_result) -> tuple[int, int, int]:
    return info.st_size, info.st_mtime_ns, info.st_ctime_ns


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
@pytest.mark.parametrize("flags", [(), ("update",)])
def test_what_is_written_so_soon_after_a_flush_that_its_times_stay_is_copied_again(
    coarse: Path, monkeypatch: pytest.MonkeyPatch, flags: tuple[str, ...]
) -> None:
    part = coarse / "inst/out/part"
    part.mkdir(parents=True)
    paths = [part / name for name in ("small", "big", "first", "second")]
    fill(paths[2], b"before")
    os.link(paths[2], paths[3])
    for engine in by_each(monkeypatch):

        def written_twice_within_a_second(engine: str = engine) -> bool:
            wait_for(lambda: time.time() % 1 < 0.1, 5)
            when_ns = ahead_ns()
            before = [fill_dated(path, f"before {engine}".encode(), when_ns) for path in paths]
            flushed(coarse, "part", *flags)
            after = [fill_dated(path, f"behind {engine}".encode(), when_ns) for path in paths]
            return [state(info) for info in before] == [state(info) for info in after]

        wait_for(written_twice_within_a_second, 30)
        assert (coarse / "target/part/small").read_text() == f"before {engine}"
        summary = finish(coarse, whole_of(coarse, *flags))
        assert summary.proved
        assert same(coarse / "inst/out", coarse / "target")


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_what_is_stored_through_a_mapping_after_a_flush_is_copied_again(
    coarse: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mapped = {}
    for engine in by_each(monkeypatch):
        part = coarse / "inst/out" / engine
        part.mkdir(parents=True)
        for name in ("small", "big", "left"):
            size = BIG if name == "big" else 4096
            with (part / name).open("wb+") as file:
                file.truncate(size)
                mapped[part / name] = mmap.mmap(file.fileno(), size)
                mapped[part / name][-10:] = b"1" * 10
    until_old(part / "left")
    for engine in by_each(monkeypatch):
        part = coarse / "inst/out" / engine
        flushed(coarse, engine)
        for name in ("small", "big"):
            mapped[part / name][-10:] = b"2" * 10
    for each in mapped.values():
        each.close()
    summary = finish(coarse, whole_of(coarse))
    assert (summary.proved, summary.copied, summary.skipped) == (True, 4, 2)
    assert same(coarse / "inst/out", coarse / "target")


def by_hand(area: Path) -> subprocess.CompletedProcess[str]:
    """`stage out out TARGET` as it is typed in the job that has `inst`."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("BEEOND", "SLURM"))}
    return subprocess.run(
        [Path(sys.executable).with_name("beeond-ctl"), "stage", "out", "--json", "out", area / "target"],
        env={**clean, "XDG_STATE_HOME": str(area), "BEEOND": str(area / "inst"), "BEEOND_JOB_ID": "7"},
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


def ended(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_what_is_stored_through_a_mapping_while_a_transfer_by_hand_is_interrupted_is_copied_again(
    coarse: Path,
) -> None:
    out, obstacle = coarse / "inst/out", coarse / "target/other"
    out.mkdir()
    obstacle.mkdir(parents=True)
    for name in ("other", "left"):
        (out / name).write_text(name)
    with (out / "mapped").open("wb+") as file:
        file.truncate(4096)
        mapped = mmap.mmap(file.fileno(), 4096)
    with mapped:
        mapped[:6] = b"before"
        until_old(out / "left")
        done = by_hand(coarse)
        assert (done.returncode, ended(done)["copied"]) == (1, 2), done.stdout
        mapped[:6] = b"behind"
    obstacle.rmdir()
    done = by_hand(coarse)
    assert (done.returncode, ended(done)["copied"], ended(done)["skipped"]) == (0, 2, 1), done.stdout
    assert contents(out) == contents(coarse / "target")


def test_a_journal_of_a_transfer_that_minded_no_writers_counts_for_none_that_does(area: Path) -> None:
    whole, obstacle = whole_of(area), area / "target/d3/f3"
    (area / "inst" / flushes.NAME).mkdir()
    for live, skipped in ((False, 0), (True, 0), (True, 59)):
        obstacle.mkdir(parents=True)
        summary = finish(area, whole._replace(live=live))
        assert (summary.proved, summary.failed, summary.skipped) == (False, 1, skipped)
        obstacle.rmdir()


def test_a_transfer_by_hand_waits_for_what_was_just_written_and_says_what_it_did_not_wait_for(
    area: Path,
) -> None:
    fill(area / "inst/out/new", b"new")
    when_ns = ahead_ns()
    fill_dated(area / "inst/out/ahead", b"ahead", when_ns)
    done = by_hand(area)
    assert done.returncode == 0, done.stdout
    (remark,) = ended(done)["remarks"]
    assert remark.startswith("1 entry ('ahead') may still be written to;")
    times = {name: (area / "target" / name).stat().st_mtime_ns for name in ("new", "ahead")}
    assert times == {"new": (area / "inst/out/new").stat().st_mtime_ns, "ahead": when_ns - quiet.EARLY_NS}


def test_what_a_killed_flush_left_is_removed_by_the_stage_out(area: Path) -> None:
    whole = flushed(area, "d3")
    (journal,) = (area / "inst" / flushes.NAME).rglob("*.journal")
    data = journal.read_bytes()
    token = json.loads(data[8 : data.index(b"}", 8) + 1].partition(b"\t")[2])["token"]
    journal.write_bytes(data[:-7])  # the record that it ended in order
    left = area / "target/d3" / f".beeond-ctl.{token}.1.2.3"
    left.write_text("half")
    assert finish(area, whole).proved  # a flush may still run: this is another one's
    assert left.exists()
    assert finish(area, whole._replace(alone=True)).proved
    assert not left.exists()


def test_flushes_of_the_same_that_no_lock_keeps_apart_share_no_temporary_name(tmp_path: Path) -> None:
    make(tmp_path / "source", files=10)
    tags = set()
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        job = Job(bytes(tmp_path / "source"), bytes(tmp_path / "target"))
        coordinator = Coordinator(job, Begun(job, None, tmp_path / name, 1), ["here"])
        try:
            while "work" not in (answer := coordinator.take("here")):
                coordinator.wait(answer["wait"])
            tags.add(answer["work"]["tag"])
        finally:
            coordinator.close()
    assert len(tags) == 2


def places_in(top: Path, *transfers: tuple[str, str]) -> Callable[[str], tuple[str, str]]:
    """Where a path that is typed is flushed to by these stage-outs, with `top` as $BEEOND: source and destination."""
    wanted: list[tuple[str, str, tuple[str, ...]]] = [(*each, ()) for each in transfers]
    return lambda path: flush._place_of(f"{top}/{path}", str(top), wanted)[:2]


def test_the_place_of_a_path_is_that_of_the_narrowest_stage_out(tmp_path: Path) -> None:
    narrowest = places_in(tmp_path, (".", "/all"), ("out", "/results"), ("out/x", "/x"))
    assert narrowest("out/x/y") == (f"{tmp_path}/out/x", "/x")
    assert narrowest("out/y") == (f"{tmp_path}/out", "/results")
    assert narrowest("outer") == (f"{tmp_path}", "/all")
    with pytest.raises(UsageError, match="no stage-out"):
        places_in(tmp_path, ("out", "/results"))("outer")
    with pytest.raises(UsageError, match="2 places"):
        places_in(tmp_path, ("out", "/a"), ("out", "/b"))("out")


def test_the_place_below_a_link_is_that_which_stage_out_will_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It follows a link that is its source; one below it is copied as a link."""
    top = tmp_path / "inst"
    make(top / "run1/ck1", files=20)
    make(top / "other/ck", files=20)
    (top / "out").symlink_to("run1")
    (top / "latest").symlink_to("run1/ck1")
    (top / "run1/aside").symlink_to("../other/ck")
    (top / "outside").symlink_to(tmp_path)

    by_link = places_in(top, (".", "/all"), ("out", "/results"))
    assert by_link("out/ck1") == by_link("run1/ck1") == by_link("latest") == (f"{top}/out", "/results")
    assert by_link("out") == (f"{top}/out", "/results")
    assert by_link("out/aside") == (f"{top}", "/all")
    both = places_in(top, ("out", "/a"), ("run1", "/b"))
    assert both("out/ck1") == (f"{top}/out", "/a")
    assert both("run1/ck1") == (f"{top}/run1", "/b")
    with pytest.raises(UsageError, match="2 places"):
        both("latest")

    monkeypatch.setattr(flush, "_transfers", lambda _: [("out", str(tmp_path / "results"), ())])
    for path in ("out/ck1", "run1/ck1", "latest"):
        job = flush._job(str(top), path, None)
        assert (job.source, job.only) == (bytes(top / "out"), b"ck1")
    assert finish(tmp_path, job).proved
    assert os.listdir(tmp_path / "results") == ["ck1"]
    assert same(top / "run1/ck1", tmp_path / "results/ck1")
    assert flush._job(str(top), "out", None).only == b""
    with pytest.raises(UsageError, match="not below"):
        flush._job(str(top), "outside/x", "/x")


BEEOND_CTL = Path(sys.executable).with_name("beeond-ctl")


def typed(area: Path, *words: str) -> subprocess.Popen[bytes]:
    """`flush` of inst/ck to `copy` in the area, as a job types it that has no other nodes."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("BEEOND", "SLURM"))}
    return subprocess.Popen(
        [BEEOND_CTL, "flush", *words, "ck", area / "copy"],
        env={**clean, "BEEOND": str(area / "inst"), "BEEOND_JOB_ID": "7"},
        preexec_fn=lambda: signal.signal(
            signal.SIGINT, signal.SIG_DFL
        ),  # ignored in what runs in the background
        stdout=subprocess.DEVNULL,
        stderr=(area / "said").open("wb"),
    )


def see_it_wait(area: Path, child: subprocess.Popen[bytes]) -> None:
    wait_for(lambda: child.poll() is not None or "waits for the flush of" in (area / "said").read_text(), 20)
    assert child.poll() is None


def test_waiting_for_the_flushes_of_a_file_system_that_died_meanwhile_is_no_success(
    area: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BEEOND", str(area / "dead"))
    with pytest.raises(UserError, match="none that is there"):
        flush._wait(str(area / "dead"), quiet=True, as_json=False)


@pytest.fixture
def runs_still(area: Path) -> Iterator[Callable[[], None]]:
    """Another flush of inst/ck has passed all of it, and runs until this is called."""
    (area / "inst/out/d1").rename(area / "inst/ck")
    assert typed(area, "--wait").wait(60) == 0
    (place,) = (area / "inst" / flushes.NAME).iterdir()
    status = flushes.read(place)
    lock = stage.locked(place)
    assert status is not None
    assert lock is not None
    flushes.write(place, {**status, "run": "another", "state": "running"})
    held = [lock]

    def end() -> None:
        flushes.write(place, {**status, "run": "another"})
        os.close(held.pop())

    yield end
    if held:
        end()


@pytest.mark.parametrize("words", [["--wait"], []], ids=["in the foreground", "in the background"])
def test_what_was_written_behind_a_flush_that_runs_is_copied_by_the_next(
    area: Path, runs_still: Callable[[], None], words: list[str]
) -> None:
    (area / "inst/ck/f1").write_text("new, and the other flush has passed it")
    child = typed(area, *words)
    try:
        see_it_wait(area, child)
        runs_still()
        assert child.wait(60) == 0
    finally:
        child.kill()
        child.wait()
    (place,) = (area / "inst" / flushes.NAME).iterdir()
    wait_for(lambda: (flushes.read(place) or {}).get("state") == "proved", 20)
    done = flushes.read(place)
    assert done is not None
    assert (done["copied"], done["skipped"]) == (1, 2)
    assert contents(area / "copy") == contents(area / "inst/ck")


def test_who_does_not_wait_for_a_flush_that_runs_leaves_none_behind(
    area: Path, runs_still: Callable[[], None]
) -> None:
    (area / "inst/ck/f1").write_text("new")
    child = typed(area)
    see_it_wait(area, child)
    child.send_signal(signal.SIGINT)
    assert child.wait(60) == 130
    assert (area / "said").read_text().endswith("beeond-ctl: interrupted\n")
    runs_still()
    time.sleep(1)
    (found,) = flushes.read_all(str(area / "inst"))
    assert found["run"] == "another"
    assert (area / "copy/f1").read_bytes() != b"new"


def test_a_flush_that_no_longer_says_that_it_runs_counts_as_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = flushes.place(str(tmp_path), b"/s", b"/d", b"")
    place.mkdir(parents=True)
    flushes.write(place, {"state": "running"})
    assert [status["state"] for status in flushes.read_all(str(tmp_path))] == ["running"]
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + flushes.LOST_S + 1)
    assert [status["state"] for status in flushes.read_all(str(tmp_path))] == ["lost"]
    (place / "status.json").write_text("[")
    assert flushes.read_all(str(tmp_path)) == []


# --- looking first ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("flags", [(), ("update",), ("delete",), ("delete", "update")])
@pytest.mark.parametrize("before", [False, True])
def test_what_is_foreseen_is_what_is_done_and_looking_changes_nothing(
    tmp_path: Path, flags: tuple[str, ...], *, before: bool
) -> None:
    trees.build(bytes(tmp_path / "source"), 5, entries=60)
    job = Job(bytes(tmp_path / "source"), bytes(tmp_path / "target"), flags)
    (tmp_path / "journal").mkdir()
    if before:
        assert copy_local(job._replace(flags=()), journal_dir=tmp_path / "journal", workers=1).proved
        for path in (tmp_path / "journal").iterdir():
            path.unlink()
        (tmp_path / "target/extra/deep").mkdir(parents=True)
        (tmp_path / "target/extra/deep/file").write_text("x")
        (tmp_path / "source/new").write_text("y")
    seen = sorted(os.walk(tmp_path))
    found = preview.look(job)
    assert sorted(os.walk(tmp_path)) == seen
    summary = copy_local(job, journal_dir=tmp_path / "journal", workers=1)
    assert (found.copy, found.skip, found.special) == (summary.copied, summary.skipped, summary.special.count)
    assert found.copy_bytes == summary.bytes
    gone = {name for name in ("extra", "extra/deep", "extra/deep/file") if before and "delete" in flags}
    assert set(found.delete_names) == gone
    assert (tmp_path / "target/extra").exists() is (before and not gone)


def test_a_look_that_may_not_take_long_says_that_it_saw_a_part(tmp_path: Path) -> None:
    make(tmp_path / "source")
    assert not preview.look(Job(bytes(tmp_path / "source"), b"/nowhere"), within_s=0.0).complete


# --- how long it takes ------------------------------------------------------------------------------------


def test_the_expected_time_follows_from_the_rate_of_the_flushes_and_what_is_left(tmp_path: Path) -> None:
    make(tmp_path / "out", files=100, size=1 << 14)
    hint = {
        "places": [["out", str(tmp_path / "target"), []]],
        "transfers": [{"direction": "in", "bytes": 100 << 20, "entries": 0, "seconds": 1.0}],
    }
    work = 100 * ((1 << 14) + estimate.ENTRY_COST)
    expected = estimate.stage_out(hint, str(tmp_path))
    assert expected is not None
    assert expected.rate_of == "the stage-in"
    assert expected.seconds == pytest.approx(work / (100 << 20))
    place = flushes.place(str(tmp_path), b"s", b"d", b"")
    place.mkdir(parents=True)
    flushes.write(place, {"state": "proved", "bytes": 20 << 20, "copied": 0, "seconds": 10.0, "began": 1})
    expected = estimate.stage_out(hint, str(tmp_path))
    assert expected is not None
    assert (expected.rate_of, expected.complete) == ("the flushes", True)
    seconds = work / (2 << 20)
    assert expected.seconds == pytest.approx(seconds)
    assert estimate.warning(expected, seconds + 1) == ""
    assert "flush now what is finished" in estimate.warning(expected, 1.0)


def test_without_any_rate_no_time_is_made_up(tmp_path: Path) -> None:
    make(tmp_path / "out", files=10)
    hint = {"places": [["out", "/nowhere", []]], "transfers": []}
    expected = estimate.stage_out(hint, str(tmp_path))
    assert expected is not None
    assert expected.seconds is None
    assert estimate.warning(expected, 0.0) == ""


def test_without_any_rate_a_job_is_warned_of_what_no_storage_would_take_in_the_time_left() -> None:
    expected = estimate.Estimate(1, 1 << 40, complete=True, seconds=None, rate_of="")
    assert estimate.warning(expected, 1025) == ""
    assert "17:04 min or more for 1 entry, 1TiB, even at 1GiB a second" in estimate.warning(expected, 1000)


def test_a_job_of_an_array_is_told_its_own_time(tmp_path: Path) -> None:
    squeue = tmp_path / "squeue"
    squeue.write_text("#!/bin/sh\necho 13 1:59; echo 12 0:30; echo 14 UNLIMITED\n")
    squeue.chmod(0o755)
    left = [estimate.time_left_s(job, {"PATH": str(tmp_path)}) for job in (12, 13, 14, 15)]
    assert left == [30.0, 119.0, None, None]


# --- the job's output -------------------------------------------------------------------------------------


def test_only_a_file_that_is_there_is_told(tmp_path: Path) -> None:
    output = tmp_path / "slurm-1.out"
    assert tell.append(bytes(output), b"line\n") != ""
    assert not output.exists()
    output.write_text("the job's\n")
    assert tell.append(bytes(output), b"line\n") == ""
    assert output.read_text() == "the job's\nline\n"
    (tmp_path / "link").symlink_to(output)
    os.mkfifo(tmp_path / "fifo")
    for name in ("link", "fifo", "."):
        assert tell.append(bytes(tmp_path / name), b"line\n") != ""
    assert output.read_text() == "the job's\nline\n"
