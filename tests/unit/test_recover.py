from __future__ import annotations

import os
import shutil
from typing import TYPE_CHECKING

import pytest

from beeond_ctl import state as states
from beeond_ctl import storage
from beeond_ctl.config import SiteConfig
from beeond_ctl.errors import BeeondError, NodeError
from beeond_ctl.events import EventLog
from beeond_ctl.launch import Answer
from beeond_ctl.lifecycle import recover, secret
from beeond_ctl.lifecycle.here import Here
from beeond_ctl.lifecycle.stage import Stage
from beeond_ctl.plan import Job, make_plan
from beeond_ctl.request import Request, Transfer, encode
from beeond_ctl.state import State
from tests.unit.root_directory import root_directory

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

JOB = Job(42, 1000, 1000, "alice", 1)


def site(tmp_path: Path) -> SiteConfig:
    return SiteConfig.model_validate({"paths": {"run": f"{tmp_path}/run", "log": f"{tmp_path}/log"}})


def record(index: int, **more: object) -> storage.Record:
    config = SiteConfig.model_validate({"storage": {"paths": ["/nvme0/x", "/nvme1/x"]}}).model_dump(
        mode="json"
    )
    values: dict[str, object] = {
        "instance": "a", "job": JOB, "nodes": ("n1",), "node": "n1", "backend": "local", "request": '{"v":1}',
        "block": 21008, "phase": "live", "created": 0.0, "config": config, "home": f"/nvme{index}/x/job-42",
    }  # fmt: skip
    return storage.Record(**(values | more))  # type: ignore[arg-type]


def test_a_proof_names_the_stage_out_that_it_is_of(tmp_path: Path) -> None:
    config = site(tmp_path)
    assert recover.proofs(config, 42) == []
    log = EventLog(config.paths.log, 42, "n1")
    log.log("prolog")
    log.log("proved", run="42.0", attempt="a1")
    log.log("prolog")
    log.log("proved", run="42.0")  # nothing tells of which
    assert recover.proofs(config, 42) == ["42.0.a1"]


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_the_proof_of_an_earlier_job_with_the_same_id_wipes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The real thing, but for the way to the node: kept data of a user, and the log of another one's job."""
    node = os.uname().nodename.partition(".")[0]
    with root_directory() as root:
        for name in ("nvme0", "bin"):
            (root / name).mkdir(mode=0o755)
        for name in ("scontrol", "squeue"):
            (root / "bin" / name).write_text("#!/bin/sh\necho Invalid job id specified >&2; exit 1\n")
            (root / "bin" / name).chmod(0o755)
        said: list[str] = []
        config = SiteConfig.model_validate({
            "storage": {"kind": "directory", "paths": [f"{root}/nvme0"]}, "mount": {"root": f"{root}/mnt"},
            "paths": {"run": f"{root}/run", "log": f"{root}/log", "secret": f"{root}/secret"},
            "slurm": {"path": [f"{root}/bin"]},
        })  # fmt: skip
        secret.add(config)
        job = Job(42, 1000, 1000, "nobody-here")
        asked = Request(stage_out=(Transfer("out", f"{root}/nowhere"),))
        state = State(
            job, (node,), node, encode(asked), config.model_dump(mode="json"), phase="retained", ran=True,
            attempt="b2",
        )  # fmt: skip
        states.create(config.paths.run, state)
        plan = make_plan(config, asked, job, (node,))
        storage.prepare(plan, node)
        (root / "nvme0/job-42/data/result").write_text("owed")
        storage.set_attempt(plan, "b2")
        storage.set_phase(plan, "retained")
        log = EventLog(config.paths.log, 42, node)
        log.log("prolog", run="42.0", uid=1001)
        log.log("proved", run="42.0", attempt="a1")
        log.log("clean")
        log.log("prolog", run="42.0", uid=1000)

        def on_nodes(nodes: Sequence[str], words: Sequence[str], **_: object) -> list[Answer]:
            if "--ask" in words:
                return [Answer(node, 0, " ".join(recover.proofs(config, 42)) or "no")]
            given = [words[index + 1] for index, word in enumerate(words) if word == "--proved"]
            try:
                recover.on_this_node(config, 42, discard=False, proved=given)
            except BeeondError as error:
                said.append(str(error))
                return [Answer(node, 1, str(error))]
            return [Answer(node, 0, "")]

        monkeypatch.setattr(recover, "on_nodes", on_nodes)
        shutil.rmtree(root / "run/jobs/42")  # a reboot: what the records say is all there is
        with pytest.raises(NodeError, match="not finished"):
            list(recover.everywhere(config, 42, node, discard=False))
        assert (root / "nvme0/job-42/data/result").read_text() == "owed"
        assert said[0].startswith("data kept, stage-out is not proved")
        (attempt,) = {record.attempt for record in recover.recorded(config, 42)}
        assert attempt not in {"", "b2"}  # was written down before the copying, that failed, began
        # What the leader says of the very stage-out that this node was part of.
        log.log("proved", run="42.0", attempt=attempt)
        list(recover.everywhere(config, 42, node, discard=False))
        assert not (root / "nvme0/job-42").exists()


def test_each_stage_out_has_a_name_of_its_own() -> None:
    from beeond_ctl.lifecycle.teardown import _ending

    told = [_ending({"n1": {"ran": True, "hurry": False}}) for _ in range(2)]
    assert told[0]["attempt"] != told[1]["attempt"]
    assert told[0]["ran"] == ["n1"]


def test_what_the_leader_writes_down_is_the_proof_of_the_stage_out_that_just_ended(tmp_path: Path) -> None:
    config = site(tmp_path)
    state = State(JOB, ("n1",), "n1", '{"v":1}', config.model_dump(mode="json"), attempt="a1")
    states.create(config.paths.run, state)
    staging = Stage(Here(config, state), inward=False)
    staging.combine["proved"]({"n1": {"damage": "meta died"}})
    assert recover.proofs(config, 42) == []
    staging.combine["proved"]({"n1": {"damage": ""}})
    assert recover.proofs(config, 42) == ["42.1.a1"]
    shutil.rmtree(tmp_path / "run")  # the log alone
    assert recover.proofs(config, 42) == ["42.1.a1"]


def test_a_discard_that_was_cut_off_is_neither_owed_nor_a_proof_for_others(tmp_path: Path) -> None:
    config = site(tmp_path)
    asked = '{"v":1,"stage_out":[["out","/g",[]]]}'
    state = State(JOB, ("n1",), "n1", asked, config.model_dump(mode="json"), phase="wiping", ran=True)
    assert Here(config, state).owed
    state.given_up = True
    states.create(config.paths.run, state)
    assert not Here(config, state).owed
    assert recover.proofs(config, 42) == []
    state.proved, state.attempt = True, "a1"
    states.write(config.paths.run, state)
    assert recover.proofs(config, 42) == ["42.1.a1"]


def test_a_state_is_rebuilt_with_the_configuration_of_its_time() -> None:
    state = recover.state_of([record(0, attempt="a1"), record(1, attempt="a1")])
    assert state.config["storage"]["paths"] == ["/nvme0/x", "/nvme1/x"]
    assert (state.job, state.ran, state.phase, state.attempt) == (JOB, True, "retained", "a1")


def test_data_of_which_a_device_is_missing_is_not_recovered_in_part() -> None:
    with pytest.raises(NodeError, match="/nvme1/x/job-42 is not there"):
        recover.state_of([record(0)])


def test_devices_that_hold_different_runs_are_not_mixed() -> None:
    with pytest.raises(NodeError, match="different runs"):
        recover.state_of([record(0), record(1, instance="b")])


def test_what_was_being_wiped_on_any_device_is_not_taken_for_kept_data() -> None:
    assert not recover.state_of([record(0), record(1, phase="wiping")]).ran


def test_the_job_ran_unless_every_node_says_that_it_did_not() -> None:
    from beeond_ctl.lifecycle.teardown import _all_ran

    told = _all_ran({"n1": {"ran": True, "hurry": False}, "n2": {"ran": False, "hurry": True}})
    assert told == {"ran": ["n1"], "failed": ["n2"], "hurry": True}
