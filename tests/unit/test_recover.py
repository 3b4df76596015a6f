from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from beeond_ctl import state as states
from beeond_ctl import storage
from beeond_ctl.config import SiteConfig
from beeond_ctl.errors import NodeError
from beeond_ctl.events import EventLog
from beeond_ctl.lifecycle import recover
from beeond_ctl.lifecycle.here import Here
from beeond_ctl.plan import Job
from beeond_ctl.state import State

if TYPE_CHECKING:
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


def test_a_proof_names_the_run_that_it_is_of(tmp_path: Path) -> None:
    config = site(tmp_path)
    assert recover.proof(config, 42) == ""
    log = EventLog(config.paths.log, 42, "n1")
    log.log("prolog")
    log.log("proved", run="42.0")
    log.log("prolog")
    assert recover.proof(config, 42) == "42.0"  # and so proves nothing of run 42.1


def test_a_discard_that_was_cut_off_is_neither_owed_nor_a_proof_for_others(tmp_path: Path) -> None:
    config = site(tmp_path)
    asked = '{"v":1,"stage_out":[["out","/g",[]]]}'
    state = State(JOB, ("n1",), "n1", asked, config.model_dump(mode="json"), phase="wiping", ran=True)
    assert Here(config, state).owed
    state.given_up = True
    states.create(config.paths.run, state)
    assert not Here(config, state).owed
    assert recover.proof(config, 42) == ""
    state.proved = True
    states.write(config.paths.run, state)
    assert recover.proof(config, 42) == "42.1"


def test_a_state_is_rebuilt_with_the_configuration_of_its_time() -> None:
    state = recover.state_of([record(0), record(1)])
    assert state.config["storage"]["paths"] == ["/nvme0/x", "/nvme1/x"]
    assert (state.job, state.ran, state.phase) == (JOB, True, "retained")


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
