"""Who is at fault when a new file system does not answer."""

from __future__ import annotations

import os
import signal
import subprocess
from typing import Any

import pytest

from beeond_ctl import supervisor
from beeond_ctl.errors import PeerError
from beeond_ctl.lifecycle import fault
from tests.waiting import wait_for


def meet(
    wrong: dict[str, str], own: dict[str, str], nodes: tuple[str, ...] = ("n1", "n2", "n3")
) -> PeerError | None:
    """What comes of the two meetings."""
    combine = fault.combine("/mnt/beeond/7")
    if not combine["mounted"]({node: {"wrong": wrong.get(node, "")} for node in nodes})["wrong"]:
        return None
    with pytest.raises(PeerError) as caught:
        combine["judged"]({node: {"own": own.get(node, "")} for node in nodes})
    return caught.value


@pytest.mark.parametrize(
    ("wrong", "own", "blamed", "words"),
    [
        (
            {"n1": "hangs", "n3": "hangs"},
            {"n2": "brick is stopped"},
            ("n2",),
            "n2: brick is stopped: /mnt/beeond/7",
        ),
        ({"n1": "a", "n2": "b", "n3": "c"}, {"n2": "x", "n3": "y"}, ("n2", "n3"), "n2: x; n3: y"),
        ({"n2": "no route"}, {}, ("n2",), "n2: /mnt/beeond/7 does not answer (no route); see"),
        (
            {"n2": "no route", "n3": "no"},
            {},
            ("n2", "n3"),
            "n2: /mnt/beeond/7 does not answer (no route) (and on n3)",
        ),
        ({"n1": "a", "n2": "b", "n3": "c"}, {}, (), "/mnt/beeond/7 answers on none of n[1-3] (a)"),
    ],
)
def test_whoever_is_at_fault_is_named_and_nobody_where_that_cannot_be_told(
    wrong: dict[str, str], own: dict[str, str], blamed: tuple[str, ...], words: str
) -> None:
    error = meet(wrong, own)
    assert error is not None
    assert error.nodes == blamed
    assert words in str(error)


def test_a_node_that_is_alone_has_nobody_else_to_blame() -> None:
    error = meet({"n1": "hangs"}, {}, ("n1",))
    assert error is not None
    assert error.nodes == ("n1",)


def test_nobody_is_judged_where_the_file_system_answers() -> None:
    assert meet({}, {}) is None


def test_a_process_that_is_stopped_is_seen_and_one_that_waits_is_not() -> None:
    processes: list[subprocess.Popen[Any]] = [subprocess.Popen(["sleep", "60"]) for _ in range(2)]
    try:
        known = [
            supervisor.Process(name, process.pid, supervisor._stat(process.pid)[1])
            for name, process in zip(("stopped", "waiting"), processes, strict=True)
        ]
        os.kill(processes[0].pid, signal.SIGSTOP)
        wait_for(lambda: supervisor._stat(processes[0].pid)[0] == "T", 5)
        assert set(supervisor.stuck(known, looks=2, pause_s=0.01)) == {"stopped"}
    finally:
        for process in processes:
            process.kill()
            process.wait()
