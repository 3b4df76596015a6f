"""Tear-down of one node: the other nodes are stood in for by a team that answers as they would."""

from __future__ import annotations

import os
import shutil
import subprocess
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from beeond_ctl import slurm, storage
from beeond_ctl import state as states
from beeond_ctl.config import SiteConfig
from beeond_ctl.errors import NodeError, PeerError, RetainedError
from beeond_ctl.lifecycle import teardown, tell
from beeond_ctl.lifecycle.here import Here
from beeond_ctl.plan import Job
from beeond_ctl.staging.transfer import Fold, Summary
from tests.unit.root_directory import root_directory

if TYPE_CHECKING:
    from collections.abc import Iterator

    from beeond_ctl.lifecycle.team import Team

pytestmark = [pytest.mark.root, pytest.mark.skipif(os.geteuid() != 0, reason="needs root")]


OF_OLD = {"ran": True, "hurry": False}
"""What a node of a version before says."""


class Others:
    """What the other nodes say; `lost` if they do not come."""

    def __init__(self, *, lost: bool) -> None:
        self._lost = lost
        self.told: list[str] = []
        self.heard: dict[str, dict[str, Any]] = {}

    def meet(self, point: str, report: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        del timeout_s
        self.heard[point] = report
        if self._lost:
            raise PeerError(f"n1 did not come to {point}", ("n1",))
        return teardown._ending({"n1": OF_OLD, "n2": report}) if point == "ending" else {}

    def check(self) -> None:
        """Nothing is wrong."""

    def ask(self, kind: str, payload: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        raise AssertionError(kind, payload, timeout_s)

    def fail(self, message: str, *, user_fault: bool, nobody: bool = False) -> None:
        assert not user_fault
        assert not nobody
        self.told.append(message)


@pytest.fixture
def others(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Others:
    team = Others(lost=getattr(request, "param", True))

    @contextmanager
    def open_team(*_: object, **__: object) -> Iterator[Others]:
        yield team

    monkeypatch.setattr(teardown, "open_team", open_team)
    return team


def second(root: Path, without: list[str], **more: Any) -> Here:
    """The second of a job's nodes, when the job has ended and owes a stage-out."""
    config = SiteConfig.model_validate({
        "storage": {"paths": [f"{root}/nvme0"], "without": without}, "mount": {"root": f"{root}/mnt"},
        "paths": {"run": f"{root}/run", "log": f"{root}/log"}, "slurm": {"tell_in_output": False},
    })  # fmt: skip
    asked = '{"v":1,"stage_out":[["out","/g",[]]]}'
    job = Job(42, 1000, 1000, "alice")
    state = states.State(
        job, ("n1", "n2"), "n2", asked, config.model_dump(mode="json"), phase="ready", ran=True, **more
    )
    states.create(config.paths.run, state)
    return Here(config, state)


def fail(here: Here, team: Team) -> None:
    del here, team
    raise NodeError("the client does not start")


@pytest.mark.usefixtures("others")
def test_a_node_that_only_mounts_keeps_nothing_of_a_stage_out_that_is_not_proved(tmp_path: Path) -> None:
    here = second(tmp_path, ["n2"])
    teardown.end(here, "epilog", prepare=fail)
    assert not here.run_dir.exists()
    here = second(tmp_path, [])
    with pytest.raises(RetainedError, match="n1 did not come"):
        teardown.end(here, "epilog", prepare=fail)
    assert states.read(here.config.paths.run, 42) == here.state
    assert here.state.phase == "retained"


@pytest.mark.parametrize("others", [False], indirect=True)
def test_a_node_that_only_mounts_says_so_when_it_was_its_own_fault(tmp_path: Path, others: Others) -> None:
    here = second(tmp_path, ["n2"])
    with pytest.raises(NodeError, match="the client does not start"):
        teardown.end(here, "epilog", prepare=fail)
    assert others.told == ["the client does not start"]
    assert not here.run_dir.exists()


@pytest.mark.parametrize("others", [False], indirect=True)
@pytest.mark.usefixtures("others")
def test_the_leader_says_in_the_jobs_output_that_data_was_given_up_and_the_first_node_hears_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = second(tmp_path, ["n1"])  # it leads, and n1 has the batch script
    told: list[str] = []
    asked: list[str] = []

    def gave_up(*_: object) -> bool:
        asked.append("")
        return True

    monkeypatch.setattr(slurm, "gave_up", gave_up)
    monkeypatch.setattr(tell, "_tell", lambda _, text: told.append(text))
    monkeypatch.setitem(OF_OLD, "hurry", True)
    teardown.end(here, "epilog", prepare=fail)
    assert told == [tell.GIVEN_UP]
    assert not asked
    assert teardown._is_given_up(Here(here.config, replace(here.state, node="n1")))
    assert len(asked) == 1


@pytest.mark.parametrize("others", [False], indirect=True)
@pytest.mark.usefixtures("others")
def test_data_that_is_proved_is_not_said_to_be_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = second(tmp_path, ["n1"], proved=True)  # by an Epilog that was killed after it
    told: list[str] = []
    monkeypatch.setattr(tell, "_tell", lambda _, text: told.append(text))
    monkeypatch.setitem(OF_OLD, "hurry", True)
    teardown.end(here, "epilog", prepare=fail)
    assert tell.GIVEN_UP not in told
    assert not here.run_dir.exists()


def summary() -> dict[str, Any]:
    return {"proved": True, "missing": False, "copied": 1, "skipped": 0, "bytes": 1, "seconds": 1.0}


@pytest.mark.parametrize("others", [False], indirect=True)
def test_the_user_is_told_which_nodes_were_rebooted_before_the_stage_out(
    tmp_path: Path, others: Others
) -> None:
    here = second(tmp_path, ["n1"], rebooted=True)  # it leads
    here.log_begin("prolog")
    for _ in range(2):  # a recovery that fails, and the next one
        here.state.phase = "retained"
        with pytest.raises(RetainedError, match="the client does not start"):
            teardown.end(here, "recover", prepare=fail)
    assert others.heard["ending"]["rebooted"] is True
    here.events.log("step", step="stage-out", source="out", summary=summary())
    told = tell.staged_out(here)
    assert "proved; n2 WAS REBOOTED before, and what had not reached its devices by then IS LOST" in told
    here.log_begin("prolog")  # another job with this id
    here.events.log("step", step="stage-out", source="out", summary=summary())
    assert tell.staged_out(here).endswith("proved")


def test_the_user_hears_what_was_kept_aside_deleted_and_not_copied_before_the_last_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = second(tmp_path, ["n1"])
    spoken = here.config.slurm.model_copy(update={"tell_in_output": True})
    here = Here(here.config.model_copy(update={"slurm": spoken}), here.state)
    lines: list[str] = []
    monkeypatch.setattr(tell, "_in_output", lambda _, said: lines.extend(said))

    def staged_out(remarks: list[str]) -> list[str]:
        here.events.log("epilog")
        facts = {"destination": "/lustre/caf\udce9", "summary": {**summary(), "remarks": remarks}}
        here.events.log("step", step="stage-out", source="out", **facts)
        lines.clear()
        tell._tell(here, tell.staged_out(here))
        return lines[:]

    here.log_begin("prolog")
    into = {"source": "/lustre/in", "destination": "in"}
    here.events.log(
        "step", step="stage-in", **into, summary={**summary(), "remarks": ["1 entry ('pipe') not copied"]}
    )
    done = Summary(
        b"/s",
        b"/t",
        notes={"newer": Fold(1, ("f\n",))},
        deleted=Fold(2, ("x", "y")),
        special=Fold(1, ("é" * 900,)),
    )
    newer, special, deleted, pipe, last = staged_out(done.remarks())
    assert pipe == "note: stage-in of /lustre/in: 1 entry ('pipe') not copied"
    about = "note: stage-out to /lustre/caf\\udce9: "
    kept = "newer at the destination, replaced; the newer ones were kept as NAME.newer-TOKEN.RUN"
    assert newer == f"{about}1 entry ('f\\n') {kept}"
    assert deleted == f"{about}2 entries ('x', 'y') deleted at the destination, with what was in them"
    assert special.startswith(f"{about}1 entry ('\\xe9\\xe9")
    assert len(special) == 500
    assert last == "stage-in of 1 entry (1B in 1.0 s); stage-out of 1 entry (1B in 1.0 s), proved"
    said = staged_out([f"{number} of something" for number in range(25)])
    assert said[-3:] == [f"{about}19 of something", "note: and 5 more of this kind", last]
    assert staged_out([]) == [last]  # of its stage-in the user has been told


def test_what_is_said_to_be_kept_is_on_the_device(tmp_path: Path) -> None:
    with root_directory() as root:
        (root / "nvme0").mkdir()
        (root / "after").mkdir()
        with (root / "disk").open("wb") as file:
            file.truncate(320 << 20)
        subprocess.run(["mkfs.xfs", "-q", root / "disk"], check=True)
        subprocess.run(["mount", "-o", "loop", root / "disk", root / "nvme0"], check=True)
        here = second(root, [])
        storage.prepare(here.plan, "n2")
        Path(here.plan.targets[0].data, "result").write_bytes(b"weeks" * 100_000)
        with pytest.raises(RetainedError):
            teardown.retain(here, "quota")
        # What a power cut would leave.
        shutil.copy(root / "disk", tmp_path / "disk")
        subprocess.run(["mount", "-o", "loop,nouuid", tmp_path / "disk", root / "after"], check=True)
        (record,) = (root / "after").glob("job-42/instance.json")
        assert '"phase": "retained"' in record.read_text()
        assert (root / "after/job-42/data/result").read_bytes() == b"weeks" * 100_000
