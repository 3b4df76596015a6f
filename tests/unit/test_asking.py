"""Slurm is asked again while slurmctld is silent, and no node is at fault for that."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from beeond_ctl import slurm
from beeond_ctl import state as states
from beeond_ctl.config import SiteConfig
from beeond_ctl.errors import EndedError, NodeError, OutsideError, PeerError
from beeond_ctl.lifecycle import bringup, kin, team
from beeond_ctl.lifecycle.asking import answered
from beeond_ctl.lifecycle.here import Here
from beeond_ctl.plan import Job
from beeond_ctl.request import Request, Transfer, encode

if TYPE_CHECKING:
    from pathlib import Path

SILENT = "echo 'Unable to contact slurm controller (connect failure)' >&2; exit 1"
RECORD = "JobId=7 JobName=it\\n   JobState=RUNNING\\n"


@pytest.fixture
def here(tmp_path: Path) -> Here:
    """The only node of a job, which asks for as long as it takes."""
    return node(tmp_path, meet_s=60)


@pytest.fixture
def hasty(tmp_path: Path) -> Here:
    """The same, but it soon gives up."""
    return node(tmp_path, meet_s=1.5)


def node(tmp_path: Path, meet_s: float) -> Here:
    for name in ("scontrol", "squeue"):
        program(tmp_path, name, SILENT)
    config = SiteConfig.model_validate({
        "slurm": {"path": [str(tmp_path)]}, "deadlines": {"meet": meet_s},
        "paths": {"run": f"{tmp_path}/run", "log": f"{tmp_path}/log"},
    })  # fmt: skip
    job = Job(7, os.getuid(), os.getgid(), "alice")
    return Here(config, states.State(job, ("n1",), "n1", encode(Request()), config.model_dump(mode="json")))


def program(directory: Path, name: str, text: str) -> None:
    (directory / name).write_text(f"#!/bin/sh\n{text}\n")
    (directory / name).chmod(0o755)


def ask(here: Here) -> dict[str, str]:
    return answered(here, lambda: slurm.job_fields(here.config.slurm.path, 7))


def test_slurm_is_asked_until_it_answers(tmp_path: Path, here: Here) -> None:
    known = tmp_path / "known"
    program(tmp_path, "scontrol", f"[ -e {known} ] && printf '{RECORD}' && exit; touch {known}; {SILENT}")
    assert ask(here)["JobName"] == "it"


def test_slurm_that_never_answers_is_nobodys_fault(hasty: Here) -> None:
    with pytest.raises(OutsideError, match=r"Slurm does not answer \(scontrol show job 7: Unable to contact"):
        ask(hasty)


def test_a_node_without_slurms_commands_is_at_fault_at_once(tmp_path: Path, here: Here) -> None:
    (tmp_path / "squeue").unlink()
    with pytest.raises(NodeError, match=r"squeue is not in .*; set slurm.path") as caught:
        ask(here)
    assert not isinstance(caught.value, OutsideError)


def test_who_is_told_to_end_or_hears_of_another_fault_asks_no_more(here: Here) -> None:
    def end() -> None:
        raise EndedError("ended by SIGTERM")

    def others() -> None:
        raise PeerError("n2 is dead", ("n2",))

    with pytest.raises(EndedError):
        answered(here, end)
    with pytest.raises(PeerError, match="n2 is dead"):
        answered(here, lambda: slurm.job_fields(here.config.slurm.path, 7), check=others)


def test_directives_names_and_components_are_all_asked_for_so(hasty: Here) -> None:
    out = (Transfer("out", "/global/%x"),)
    named = Here(hasty.config, replace(hasty.state, request=encode(Request(stage_out=out))))
    with pytest.raises(OutsideError), team.open_team(named, "prolog", combine={}, handlers={}) as alone:
        bringup._names(named, alone)
    with pytest.raises(OutsideError):
        bringup._learn(hasty, None)
    with pytest.raises(OutsideError):
        kin._of_host(hasty, 1)
    _, problem = kin._with_guests(hasty, "1")
    assert isinstance(problem, OutsideError)
