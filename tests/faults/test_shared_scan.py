"""Where calls wait, the nodes of a transfer look at the source together: the list is the same, whoever fails at it."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from beeond_ctl.staging import listing, wire
from beeond_ctl.staging.begin import Begun
from beeond_ctl.staging.coordinator import Coordinator
from beeond_ctl.staging.job import Job
from beeond_ctl.staging.look import look
from beeond_ctl.staging.worker import Copier
from tests.faults import trees
from tests.faults.injected import (
    CALLS,
    ERRNOS,
    RUNS,
    assert_same,
    await_end,
    children_after,
    children_with,
)
from tests.waiting import wait_for

if TYPE_CHECKING:
    from collections.abc import Callable

    from beeond_ctl.staging.transfer import Summary

SLOW = {"FAULT_SLOW_US": "2000"}
"""Long enough that a few files are worth it."""

Report = dict[str, Any]


class Two:
    """Two nodes, with a copier each."""

    def __init__(
        self,
        area: Path,
        *flags: str,
        spoil: Callable[[Report], Report] = lambda report: report,
        listed: bytes = b"",
    ) -> None:
        """`spoil`: what becomes of what copiers say of names that they looked at."""
        (area / "journal").mkdir(exist_ok=True)
        job = Job(os.fsencode(area / "source"), os.fsencode(area / "target"), flags, listed=listed)
        self.transfer = Coordinator(job, Begun(job, None, area / "journal", 2), ["n1", "n2"])
        self.spoil = spoil
        self.kinds: Counter[str] = Counter()
        self.looked = self.asked = 0
        """Names that copiers had something to say of, and that they were asked for."""

    def _node(self, name: str) -> None:
        copier, pause = Copier(None), threading.Event()
        while "done" not in (answer := self.transfer.take(name)):
            if "wait" in answer:
                pause.wait(0.002)
                continue
            work = answer["work"]
            self.kinds[work["kind"]] += 1
            result = copier.run(work)
            if work["kind"] == "look":
                self.asked += sum(len(names) for _, names in wire.loads(work["fields"][1]))
                self.looked += sum(len(part[0]) for part in wire.loads(result.get("looked", "[]")))
                result = self.spoil(result)
            self.transfer.report(name, result)
        copier.close()

    def run(self) -> Summary:
        """To the end."""
        threads = [threading.Thread(target=self._node, args=(name,)) for name in ("n1", "n2")]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        assert not any(thread.is_alive() for thread in threads)
        self.transfer.close()
        return self.transfer.summary()


def tree(area: Path) -> None:
    """Something of each kind, enough that calls are known to wait, and some directories with nothing in them."""
    trees.build(os.fsencode(area / "source"), 3, entries=150)
    for number in range(20):
        (area / "source" / f"dir{number}").mkdir()
    for number in range(400):
        path = area / "source" / f"dir{number % 10}" / f"file{number}"
        path.write_text(str(number))
        os.utime(path, ns=(10**18 + number, 10**18 + number))
    os.link(area / "source" / "dir1" / "file1", area / "source" / "dir2" / "linked")
    os.mkfifo(area / "source" / "dir3" / "fifo")


@pytest.mark.parametrize("kinds", ["told", "not told"])
def test_other_nodes_look_and_the_copy_is_the_same(kinds: str, area: Path, injector: Path) -> None:
    tree(area)
    with children_with(
        LD_PRELOAD=str(injector), **SLOW, **({} if kinds == "told" else {"FAULT_NO_KINDS": "1"})
    ):
        two = Two(area)
        summary = two.run()
    assert summary.proved, summary.problems()
    assert two.looked
    assert summary.special.count == 1
    (area / "source" / "dir3" / "fifo").unlink()
    os.utime(area / "source" / "dir3", ns=(1, 1))
    os.utime(area / "target" / "dir3", ns=(1, 1))
    assert_same(area)


@pytest.mark.parametrize("flags", [(), ("update",)])
def test_what_is_there_is_told_by_others_as_well(flags: tuple[str, ...], area: Path, injector: Path) -> None:
    tree(area)
    (area / "source" / "dir3" / "fifo").unlink()
    with children_with(LD_PRELOAD=str(injector), **SLOW):
        first = Two(area, *flags).run()
        assert first.proved, first.problems()
        if flags:  # nothing of what was proved is known
            for journal in (area / "journal").iterdir():
                journal.unlink()
        (area / "target" / "dir4" / "file4").write_text("5")  # as large, but newer
        (area / "source" / "dir5" / "file5").write_text("6")
        (area / "target" / "dir6" / "file6").unlink()
        (area / "target" / "dir7" / "file7").chmod(0o600)  # which only an update minds
        again = Two(area, *flags)
        second = again.run()
    assert second.proved, second.problems()
    assert again.looked
    assert second.copied == (4 if flags else 3)
    assert second.skipped == first.copied - second.copied
    (area / "target" / "dir7" / "file7").chmod((area / "source" / "dir7" / "file7").stat().st_mode & 0o777)
    newer = [path for path in (area / "target" / "dir4").iterdir() if ".newer-" in path.name]
    assert [path.read_text() for path in newer] == ["5"]
    newer[0].unlink()
    subprocess.run(["touch", "-r", area / "source" / "dir4", area / "target" / "dir4"], check=True)
    assert_same(area)


def test_another_name_of_a_listed_file_is_a_link_to_its_copy_whoever_looks(
    area: Path, injector: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listing, "QUIET_NS", 0)
    for name in ("lists", "source/a", "source/b"):
        (area / name).mkdir(parents=True, mode=0o700)
    for number in range(40):
        (area / "source" / "a" / f"file{number}").write_text(str(number))
        (area / "source" / "b" / f"file{number}").write_text(str(number))
    made_ns = (area / "source" / "b").stat().st_ctime_ns
    wait_for(lambda: touched_ns(area) > made_ns, 10)
    path = area / "lists" / "7.0.list"
    assert not look(str(area / "source"), time.monotonic() + 60, str(path)).unlisted
    for number in range(40):
        os.link(area / "source" / "a" / f"file{number}", area / "source" / "b" / f"link{number}")
    with children_with(LD_PRELOAD=str(injector), **SLOW):
        two = Two(area, listed=bytes(path))
        summary = two.run()
    assert summary.proved, summary.problems()
    assert two.transfer.listed["files"] == 40
    assert two.kinds["look"]
    assert_same(area)


def touched_ns(area: Path) -> int:
    (area / "clock").touch()
    return (area / "clock").stat().st_ctime_ns


@pytest.mark.parametrize("kind", ["links", "directories"])
def test_where_others_have_nothing_to_say_the_scanner_soon_looks_itself(
    kind: str, area: Path, injector: Path
) -> None:
    for number in range(9000):
        path = area / "source" / f"dir{number % 30}" / f"entry{number}"
        path.parent.mkdir(parents=True, exist_ok=True)
        if kind == "links":
            path.symlink_to("nowhere")
        else:
            path.mkdir()
    faults = {"FAULT_SLOW_US": "500", **({} if kind == "links" else {"FAULT_NO_KINDS": "1"})}
    with children_with(LD_PRELOAD=str(injector), **faults):
        two = Two(area)
        summary = two.run()
    assert summary.proved, summary.problems()
    # Four lots may be under way before anything is known, each of 511 at most and a directory; then it is one in five.
    assert two.asked < 4 * (511 + 300) + 9000 // 5 + (511 + 300)
    assert_same(area)


def nothing(report: Report) -> Report:
    return {**report, "looked": "null"}


def others(report: Report) -> Report:
    return {**report, "looked": wire.dumps([[["x"], [1], [], [1], [0]]])}


def one_less(report: Report) -> Report:
    looked = wire.loads(report["looked"])
    for part in looked:
        for column in part:
            del column[:1]
    return {**report, "looked": wire.dumps(looked)}


def one_twice(report: Report) -> Report:
    looked = [[column + column[:1] for column in part] for part in wire.loads(report["looked"])]
    return {**report, "looked": wire.dumps(looked)}


def nonsense(report: Report) -> Report:
    looked = [[files, ["x"] * len(sizes), *rest] for files, sizes, *rest in wire.loads(report["looked"])]
    return {**report, "looked": wire.dumps(looked)}


def dead(report: Report) -> Report:
    return {"id": report["id"], "attempt": report["attempt"], "died": "killed"}


def not_even_json(report: Report) -> Report:
    return {**report, "looked": 5}


@pytest.mark.parametrize("spoil", [nothing, others, one_less, one_twice, nonsense, dead, not_even_json])
def test_a_look_that_says_nothing_of_a_name_leaves_it_to_the_scanner(
    spoil: Callable[[Report], Report], area: Path, injector: Path
) -> None:
    tree(area)
    (area / "source" / "dir3" / "fifo").unlink()
    with children_with(LD_PRELOAD=str(injector), **SLOW):
        two = Two(area, spoil=spoil)
        summary = two.run()
    assert two.kinds["look"]
    assert summary.proved, summary.problems()
    assert_same(area)


def test_a_transfer_that_is_given_up_while_others_look_ends(area: Path, injector: Path) -> None:
    tree(area)
    looks = threading.Event()

    def forget(report: Report) -> Report:
        looks.set()
        return {"id": -1, "attempt": report["attempt"]}

    with children_with(LD_PRELOAD=str(injector), **SLOW):
        two = Two(area, spoil=forget)
        runs = threading.Thread(target=two.run)
        runs.start()
        assert looks.wait(60)
        two.transfer.cancel("stopped")
        runs.join(60)
    assert not runs.is_alive()
    assert not two.transfer.summary().proved


@pytest.mark.parametrize("seed", range(RUNS))
def test_one_failing_call_while_others_look_is_reported_and_the_next_run_completes(
    seed: int, area: Path, injector: Path
) -> None:
    rng = random.Random(seed)
    trees.build(os.fsencode(area / "source"), seed, entries=100)
    call, number, code = rng.choice(("stat", "open", *CALLS)), rng.randrange(1, 150), rng.choice(ERRNOS)
    with children_with(LD_PRELOAD=str(injector), FAULT=f"{call}:{number}:{code}", **SLOW):
        summary = Two(area).run()
    if summary.proved:
        assert summary.problems() == []
        assert_same(area)
    else:
        assert summary.problems() != []
    again = Two(area).run()
    assert again.proved, (call, number, code, again.problems())
    assert_same(area)


_PROGRAM = """
import sys
from pathlib import Path
from tests.faults.injected import children_with
from tests.faults.test_shared_scan import SLOW, Two
print("go", flush=True)
with children_with(LD_PRELOAD=sys.argv[2], **SLOW):
    Two(Path(sys.argv[1])).run()
"""


@pytest.mark.parametrize("seed", range(max(1, RUNS // 3)))
def test_killed_as_a_whole_while_others_look_the_transfer_resumes(
    seed: int, area: Path, injector: Path
) -> None:
    rng = random.Random(seed)
    trees.build(os.fsencode(area / "source"), seed, entries=300)
    argv = [sys.executable, "-c", _PROGRAM, str(area), str(injector)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, cwd=Path(__file__).parents[2]) as program:
        assert program.stdout is not None
        program.stdout.readline()
        children = children_after(program, rng.uniform(0.1, 0.6))
        program.kill()
    await_end(children)
    with children_with(LD_PRELOAD=str(injector), **SLOW):
        summary = Two(area).run()
    assert summary.proved, summary.problems()
    assert_same(area)
