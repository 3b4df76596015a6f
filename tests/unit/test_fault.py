"""Who is at fault when a new file system does not answer."""

from __future__ import annotations

import os
import signal
import subprocess
from contextlib import nullcontext
from typing import Any

import pytest

from beeond_ctl import supervisor
from beeond_ctl.config import SiteConfig
from beeond_ctl.errors import OutsideError, PeerError
from beeond_ctl.lifecycle import bringup, fault, probe
from beeond_ctl.lifecycle.here import Here
from beeond_ctl.plan import Job
from beeond_ctl.request import Request, encode
from beeond_ctl.state import State
from tests.waiting import wait_for

NODES = ("n1", "n2", "n3")
POINT = "/mnt/beeond/7"


def meet(
    wrong: dict[str, str],
    *,
    trouble: dict[str, str] | None = None,
    servers: dict[str, str] | None = None,
    devices: dict[str, str] | None = None,
    nodes: tuple[str, ...] = NODES,
) -> PeerError | None:
    """What comes of the two meetings."""
    combine = fault.combine(POINT)
    told = {node: {"wrong": wrong.get(node, ""), "trouble": (trouble or {}).get(node, "")} for node in nodes}
    if not combine["mounted"](told)["wrong"]:
        return None
    own = {
        node: {"servers": (servers or {}).get(node, ""), "devices": (devices or {}).get(node, "")}
        for node in nodes
    }
    with pytest.raises(PeerError) as caught:
        combine["judged"](own)
    return caught.value


USERS = f"File exists{probe.PERHAPS_THE_USERS}"
ALL = {"n1": "a", "n2": "b", "n3": "c"}


@pytest.mark.parametrize(
    ("asked", "blamed", "words"),
    [
        ({"wrong": {"n1": "x", "n3": "y"}, "servers": {"n2": "brick died"}}, ("n2",), f"n2: brick died: {POINT} does"),
        ({"wrong": ALL, "servers": {"n2": "x"}, "devices": {"n3": "slow"}}, ("n2",), "does not answer on n[1-3]"),
        ({"wrong": ALL, "devices": {"n2": "x", "n3": "y"}}, ("n2", "n3"), "n2: x; n3: y"),
        ({"wrong": {"n2": "no route"}}, ("n2",), f"n2: {POINT} does not answer (no route); see"),
        ({"wrong": {"n1": "no route", "n3": "no"}}, (), f"{POINT} does not answer on n[1,3] (no route), and nothing"),
        ({"wrong": ALL}, (), f"{POINT} does not answer on n[1-3] (a)"),
        ({"wrong": {"n2": "x"}, "nodes": ("n1", "n2")}, (), "its 2 nodes"),
        ({"wrong": {}, "trouble": {"n2": "no module"}, "nodes": ("n1", "n2")}, ("n2",), "come up (no module)"),
        ({"wrong": {"n2": "x", "n3": "y"}, "trouble": {"n1": "silent"}}, ("n1",), "(silent)"),
        ({"wrong": {}, "trouble": ALL}, (), f"{POINT} does not answer on n[1-3] (a)"),
        ({"wrong": {"n1": "hangs"}, "nodes": ("n1",)}, ("n1",), "(hangs)"),
        ({"wrong": {"n2": USERS}}, (), f"{POINT} does not answer on n2 ({USERS}), and nothing is known"),
        ({"wrong": {"n2": USERS, "n3": "no route"}}, ("n3",), "n3:"),
        ({"wrong": {"n2": USERS}, "servers": {"n3": "brick died"}}, ("n3",), "n3: brick died"),
        ({"wrong": {"n1": USERS}, "nodes": ("n1",)}, (), "nothing is known"),
    ],
)  # fmt: skip
def test_whoever_is_at_fault_is_named_and_nobody_where_that_cannot_be_told(
    asked: dict[str, Any], blamed: tuple[str, ...], words: str
) -> None:
    error = meet(**asked)
    assert error is not None
    assert error.nodes == blamed, str(error)
    assert words in str(error)


def test_nobody_is_judged_where_the_file_system_answers() -> None:
    assert meet({}) is None


@pytest.mark.parametrize(
    ("trouble", "excused"),
    [("brick-0 ended: Address already in use", True), ("brick-0 ended: no memory", False), ("", False)],
)
def test_a_port_that_somebody_had_for_a_moment_is_no_fault_of_the_node(
    trouble: str, *, excused: bool
) -> None:
    config = SiteConfig()
    block = int(config.network.ports.partition("-")[0])
    state = State(Job(7, 0, 0, "root"), ("n1",), "n1", encode(Request()), {}, block=block)
    told = pytest.raises(OutsideError, match="submit it again") if excused else nullcontext()
    with told:
        bringup._see_that_no_port_was_taken(Here(config, state), trouble)


def test_a_process_that_is_stopped_is_seen_and_one_that_waits_is_not() -> None:
    processes: list[subprocess.Popen[Any]] = [subprocess.Popen(["sleep", "60"]) for _ in range(2)]
    try:
        known = [
            supervisor.Process("sleep", process.pid, supervisor._stat(process.pid)[1])
            for process in processes
        ]
        os.kill(processes[0].pid, signal.SIGSTOP)
        wait_for(lambda: supervisor._stat(processes[0].pid)[0] == "T", 5)
        assert [supervisor.stopped(each) for each in known] == [True, False]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert not supervisor.stopped(known[0])
