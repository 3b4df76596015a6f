"""Ids of instances without Slurm are no job's of Slurm, a federation's included, and old ones are still known."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from beeond_ctl import devices
from beeond_ctl import state as states
from beeond_ctl.config import SiteConfig
from beeond_ctl.errors import UsageError
from beeond_ctl.events import EventLog
from beeond_ctl.lifecycle import manual, own, teardown
from beeond_ctl.plan import FIRST_OWN_ID, LAST_OWN_ID, Job
from beeond_ctl.request import Request, encode

if TYPE_CHECKING:
    from pathlib import Path

FEDERATED = (15 << 26) + 7
"""A job of the fifteenth cluster of a federation."""
LAST_OF_SLURM = 2**32 - 1


def site(root: Path) -> SiteConfig:
    return SiteConfig.model_validate({"paths": {"run": f"{root}/run", "log": f"{root}/log"}})


def begun(config: SiteConfig, job_id: int, *how: str) -> SiteConfig:
    for event in how:
        EventLog(config.paths.log, job_id, "n1").log(event)
    return config


def test_no_id_of_slurms_is_one_of_ours(tmp_path: Path) -> None:
    config = begun(site(tmp_path), FEDERATED, "prolog", "phase")
    for job_id in (1, 2**26, FEDERATED, FEDERATED + 1, LAST_OF_SLURM):
        assert not own.without_slurm(config, job_id), job_id
    for job_id in (FIRST_OWN_ID, LAST_OWN_ID):
        assert own.without_slurm(config, job_id), job_id


def test_an_old_id_is_whose_the_instance_is_that_began_last(tmp_path: Path) -> None:
    config = site(tmp_path)
    for how, ours in (("up", True), ("phase", True), ("prolog", False), ("up", True)):
        assert own.without_slurm(begun(config, FEDERATED, how), FEDERATED) is ours


def test_down_ends_an_instance_with_an_old_id_and_no_job_of_a_federation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, ended = site(tmp_path), []
    monkeypatch.setattr(teardown, "end", lambda here, *_, **__: ended.append(here.state.job.job_id))
    for job_id, how in ((FEDERATED, "prolog"), (FEDERATED + 1, "up"), (FIRST_OWN_ID, "up")):
        begun(config, job_id, how)
        job, made_with = Job(job_id, 1000, 1000, "alice"), config.model_dump(mode="json")
        states.create(config.paths.run, states.State(job, ("n1",), "n1", encode(Request()), made_with))
    with pytest.raises(UsageError, match="is a job of Slurm's"):
        manual.down_here(config, FEDERATED)
    manual.down_here(config, FEDERATED + 1)
    manual.down_here(config, FIRST_OWN_ID)
    assert ended == [FEDERATED + 1, FIRST_OWN_ID]


@pytest.mark.parametrize("job_id", [FIRST_OWN_ID, LAST_OWN_ID])
def test_the_label_of_a_device_has_room_for_each_id(job_id: int) -> None:
    label = f"bo{job_id}".encode().ljust(12, b"\0")
    first = b"XFSB".ljust(32, b"\0") + devices._uuid(job_id)
    first = first.ljust(108, b"\0") + label
    found = devices._ours(first.ljust(512, b"\0"))
    assert found is not None
    assert found.job_id == job_id
