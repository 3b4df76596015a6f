"""The steps that bring-up, tear-down and recovery share; each is safe to repeat.

Every step is announced in the state file by `Here.enter` before it is taken.
"""

from __future__ import annotations

import shutil
from functools import partial
from typing import TYPE_CHECKING, Any

from beeond_ctl import mounts, storage, supervisor
from beeond_ctl.errors import NodeError
from beeond_ctl.lifecycle import claims
from beeond_ctl.plan import port_blocks

if TYPE_CHECKING:
    from collections.abc import Sequence

    from beeond_ctl.backends import Service
    from beeond_ctl.lifecycle.here import Here
    from beeond_ctl.lifecycle.team import Combine, Team


def meet(here: Here, team: Team, point: str, timeout_s: float, **report: Any) -> dict[str, Any]:  # noqa: ANN401
    """Meet the others at `point`, with the waiting time in the event log. Raises PeerError."""
    with here.events.timed(f"meeting {point}"):
        return team.meet(point, report, timeout_s)


def combine(here: Here) -> dict[str, Combine]:
    """The leader's part of the meetings of `agree_on_ports`."""
    return {"prepared": partial(_agree, here)}


def _agree(here: Here, reports: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The leader's choice: the first block that is free everywhere."""
    for block in port_blocks(here.config, here.state.job):
        if all(block in report["free"] for report in reports.values()):
            return {"block": block, "names": _known_names(reports)}
    return {"block": None, "names": {}}


def _known_names(reports: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The job's names from whoever has them: a rebooted leader has forgotten what it told the others."""
    return next((report["names"] for report in reports.values() if report["names"]), {})


def agree_on_ports(here: Here, team: Team, free: list[int], names: dict[str, Any]) -> None:
    """Meet at `prepared`, and take the port block and the names that the leader tells. Raises NodeError."""
    answer = meet(here, team, "prepared", here.config.deadlines.meet, free=free, names=names)
    if answer["block"] is None:
        raise NodeError(
            f"no block of 16 ports out of {here.config.network.ports} is free on all nodes; widen network.ports "
            "or see what listens there (ss -ltnp)"
        )
    here.state.block, here.state.names = answer["block"], answer["names"]
    claims.keep_ports(here.config.paths.run, here.state.job.job_id, answer["block"])
    here.save()


def start_services(here: Here, team: Team) -> None:
    """Start all servers of this node at once, and meet when those of all nodes serve."""
    with here.step("starting") as extra:
        services = here.backend.services(here.plan, here.node, here.keys)
        extra["services"] = len(services)
        start(here, services)
    meet(here, team, "serving", here.config.deadlines.start)


def start(here: Here, services: Sequence[Service]) -> None:
    """Start `services` and wait until they are ready. Raises NodeError."""

    def record(process: supervisor.Process) -> None:
        here.state.processes[process.name] = (process.pid, process.start_time)
        here.save()

    started = [
        (
            service,
            supervisor.start(
                service, token=here.state.token, search_path=here.config.backend.path, record=record
            ),
        )
        for service in services
    ]
    supervisor.wait_ready(started, deadline_s=here.config.deadlines.start)


def mount(here: Here) -> None:
    """Mount the file system on this node, seen by nobody but root until it is given to the user. Raises NodeError."""
    with here.step("mounting"):
        how = here.backend.mount(here.plan, here.node, here.keys)
        claims.claim_mount(here.config.paths.run, here.state.job.job_id, how.point)
        mounts.make_point(how.point)
        here.state.mount = how.point
        here.save()
        start(here, how.helpers)
        if how.service is not None:
            start(here, (how.service,))
        if how.command is not None:
            supervisor.run(
                how.command, search_path=here.config.backend.path, deadline_s=here.config.deadlines.start
            )
        if how.bind_source is not None:
            mounts.bind(how.bind_source, how.point)


def lives(here: Here, name: str) -> bool:
    """Whether the service called `name` runs on this node."""
    process = here.state.processes.get(name)
    return process is not None and supervisor.alive(supervisor.Process(name, *process))


def remove_instance(here: Here) -> None:
    """Remove whatever there is of the instance on this node, its data too. A no-op where there is nothing.

    Raises NodeError naming what could not be removed.
    """
    unmount(here)
    stop(here)
    wipe(here)


def unmount(here: Here) -> None:
    """Unmount; processes that hold the mount are ended, and named in the event log. Raises NodeError."""
    point = here.state.mount
    if point is None:
        return
    with here.step("unmounting") as extra:
        killed = mounts.unmount(point, deadline_s=here.config.deadlines.stop)
        if killed:
            extra["ended"] = killed
        mounts.remove_point(point)
        here.state.mount = None


def stop(here: Here) -> None:
    """Stop all processes of the instance at once. Raises NodeError."""
    with here.step("stopping") as extra:
        known = [supervisor.Process(name, *process) for name, process in here.state.processes.items()]
        killed = supervisor.stop(known, token=here.state.token, timeout_s=here.config.deadlines.stop)
        if killed:
            extra["killed"] = killed
        here.state.processes = {}


def wipe(here: Here) -> None:
    """Remove the data and prove that it is gone. Raises NodeError."""
    with here.step("wiping") as extra:
        receipts = storage.wipe(here.plan, here.config.storage.wipe, deadline_s=here.config.deadlines.wipe)
        extra["receipts"] = [receipt.as_dict() for receipt in receipts]
    claims.release(here.config.paths.run, here.state.job.job_id)


def forget(here: Here) -> None:
    """Remove the run directory: the node is clean."""
    here.events.log("clean")
    shutil.rmtree(here.run_dir)
