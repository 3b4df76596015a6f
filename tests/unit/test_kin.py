"""Who has part in one instance of a heterogeneous job, by what Slurm says; test_shared.py has whole jobs."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from beeond_ctl import slurm
from beeond_ctl import state as states
from beeond_ctl.config import SiteConfig
from beeond_ctl.errors import JobGoneError, PeerError, RequestError
from beeond_ctl.lifecycle import kin, team, teardown
from beeond_ctl.lifecycle.here import Here
from beeond_ctl.plan import Job
from beeond_ctl.request import Request, encode
from beeond_ctl.slurm import Component

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

SQUEUE = """#!/bin/sh
case $5 in
7) echo "7 7 0 0 RUNNING n[1-2]"; echo "7 8 1 2 COMPLETING n3"; echo "7 9 2 0 PENDING" ;;
8) echo "7 8 1 2 COMPLETING n3" ;;
5) echo "N/A 5 N/A 0 RUNNING n1" ;;
*) echo "slurm_load_jobs error: Invalid job id specified" >&2; exit 1 ;;
esac
"""
ALL = [
    Component(0, 7, 0, "RUNNING", "n[1-2]"),
    Component(1, 8, 2, "COMPLETING", "n3"),
    Component(2, 9, 0, "PENDING", ""),
]


def program(directory: Path, name: str, text: str) -> None:
    (directory / name).write_text(text)
    (directory / name).chmod(0o755)


def test_components_are_found_from_any_of_them(tmp_path: Path) -> None:
    program(tmp_path, "squeue", SQUEUE)
    path = [str(tmp_path)]
    assert slurm.components(path, 7) == slurm.components(path, 8) == ALL
    assert slurm.components(path, 5) == slurm.components(path, 6) == []


@pytest.mark.parametrize(
    ("components", "numbers", "own", "error", "words"),
    [
        ([], [1], 7, RequestError, "share=1 is for heterogeneous jobs, and this is none"),
        (ALL, [1, 3], 7, RequestError, "this job has no component 3; there are 0, 1, 2"),
        (ALL, [1], 8, RequestError, "component 1 is this one itself"),
        (ALL, [2], 7, JobGoneError, "component 2 of this job has no nodes .PENDING."),
    ],
)
def test_a_component_that_cannot_be_meant_is_refused(
    components: list[Component], numbers: list[int], own: int, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        kin._chosen(components, numbers, "share=1", own)


@pytest.fixture
def host(tmp_path: Path) -> Callable[[str, str], Here]:
    """n1, whose guest is n3: as Slurm's states of the guest's component and node have it."""

    def made(component: str, node: str) -> Here:
        program(
            tmp_path, "squeue", f"#!/bin/sh\necho '7 7 0 0 COMPLETING n1'; echo '7 8 1 0 {component} n3'\n"
        )
        program(tmp_path, "scontrol", f"#!/bin/sh\necho 'NodeName=n3 Arch=x86_64 State={node}'\n")
        config = SiteConfig.model_validate({
            "slurm": {"path": [str(tmp_path)]}, "deadlines": {"meet": 0.3},
            "paths": {"run": f"{tmp_path}/run", "log": f"{tmp_path}/log"},
        })  # fmt: skip
        job = Job(7, os.getuid(), os.getgid(), "alice")
        guests = states.Kin(job, ("n1",), ((1, 8, ("n3",)),))
        request = encode(Request(share="1"))
        return Here(
            config, states.State(job, ("n1",), "n1", request, config.model_dump(mode="json"), kin=guests)
        )

    return made


@pytest.mark.parametrize(
    ("component", "node", "strict", "words"),
    [
        ("COMPLETED", "IDLE", True, ""),
        ("CANCELLED", "MIXED+DRAIN Reason=beeond: job 6: stuck [root@2026-01-01T00:00:00]", True, ""),
        ("RUNNING", "MIXED", True, "component 1 (job 8) is RUNNING"),
        ("COMPLETING", "MIXED", False, "component 1 (job 8) is COMPLETING"),
        ("COMPLETED", "DOWN+NOT_RESPONDING", True, "n3 is DOWN+NOT_RESPONDING"),
        ("COMPLETED", "IDLE*", True, "n3 is IDLE*"),
        ("COMPLETED", "IDLE+DRAIN Reason=beeond: job 8: stuck", True, "n3 is drained by its Epilog"),
        ("NODE_FAIL", "IDLE", True, "component 1 (job 8) lost a node"),
        ("NODE_FAIL", "DOWN", False, ""),
    ],
)
def test_guests_have_left_when_their_component_has_ended_well(
    host: Callable[[str, str], Here],
    component: str,
    node: str,
    strict: bool,
    words: str,
) -> None:
    here = host(component, node)
    with team.open_team(here, "epilog", combine=kin.combine(here), handlers={}) as alone:
        found = kin.wait_for_guests(here, alone, strict=strict)
    assert words in found
    assert bool(words) == bool(found)


def test_slurm_that_does_not_answer_is_no_leave(host: Callable[[str, str], Here], tmp_path: Path) -> None:
    here = host("COMPLETED", "IDLE")
    program(tmp_path, "squeue", "#!/bin/sh\necho 'Unable to contact slurm controller' >&2; exit 1\n")
    with team.open_team(here, "epilog", combine=kin.combine(here), handlers={}) as alone:
        assert "Unable to contact" in kin.wait_for_guests(here, alone, strict=True)


def test_a_guest_owes_leads_and_serves_nothing_even_before_it_knows_whose_guest_it_is(
    host: Callable[[str, str], Here],
) -> None:
    here = host("RUNNING", "IDLE")
    job = replace(here.state.job, job_id=8)
    state = replace(here.state, job=job, nodes=("n3",), node="n3", ran=True)
    for guest in (replace(state, kin=None, request=encode(Request(join=0))), state):
        one = Here(here.config, guest)
        assert (one.is_guest, one.owed, one.serves, one.leads) == (True, False, False, False)
    assert not here.is_guest
    assert here.leads


def test_what_guests_have_not_done_is_no_fault_of_their_nodes(
    host: Callable[[str, str], Here], monkeypatch: pytest.MonkeyPatch
) -> None:
    here = host("RUNNING", "MIXED")
    here.state.kin = None

    def nobody_came(*_: object, **__: object) -> None:
        raise PeerError("n2, n3 did not come", ("n1", "n3"))

    monkeypatch.setattr(kin, "open_team", nobody_came)
    with pytest.raises(PeerError, match="not all components of share=1 have joined") as caught:
        kin.learn(here)
    assert caught.value.nodes == ("n1",)


def test_tear_down_of_a_guest_needs_nobody(host: Callable[[str, str], Here]) -> None:
    here = host("RUNNING", "MIXED")
    guest = replace(
        here.state, job=replace(here.state.job, job_id=8), nodes=("n3",), node="n3", ran=True, phase="ready"
    )
    states.create(here.config.paths.run, guest)
    teardown.end(Here(here.config, guest), "epilog", prepare=teardown.revive)
    assert states.read(here.config.paths.run, 8) is None
