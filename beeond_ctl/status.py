"""What is on this node: the instances, their health, and what was kept. Changes nothing.

What one instance is made of is read from its own state alone: neither a later configuration, nor what is wrong with
another job, may hide it.
"""

from __future__ import annotations

import json
import os
import shlex
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

from beeond_ctl import config as configuration
from beeond_ctl import events, hints, mounts, slurm, storage, supervisor
from beeond_ctl import state as states
from beeond_ctl.aside import aside
from beeond_ctl.errors import BeeondError, one_line
from beeond_ctl.plan import choose_backend
from beeond_ctl.request import decode
from beeond_ctl.units import format_size

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from beeond_ctl.config import SiteConfig
    from beeond_ctl.request import Request

T = TypeVar("T")

_USABLE: Final = frozenset(["ready", "staging-in", "staging-out"])
_KEPT: Final = "data kept"
ANSWER_S: Final = 5.0
"""How long a mounted file system may take to say how full it is, before it counts as not answering."""


def instances(config: SiteConfig, job_id: int | None) -> list[dict[str, Any]]:
    """All instances of this node, or that of one job, as JSON-able facts; for root.

    One whose state cannot be read is among them, with the phase "unknown" and the reason.
    """
    found = []
    known = set()
    for number, state in _states(config.paths.run):
        known.add(number)
        if isinstance(state, BeeondError):
            if job_id in (None, number):
                found.append(_unknown(number, state))
        elif job_id in (None, number, state.instance.job_id):
            found.append(_from_state(config, state))
    for record in storage.read_records(config):
        if record.job_id not in known and job_id in (None, record.job_id):
            known.add(record.job_id)
            found.append(
                {
                    "job": record.job_id, "node": record.node, "phase": f"{record.phase} (node was rebooted)",
                    "user": record.job.user, "nodes": (nodes := slurm.fold_nodes(record.nodes)), "health": _KEPT,
                    "recover": _recovery(record.job_id, nodes),
                }
            )  # fmt: skip
    return found


def _recovery(job_id: int, nodes: str) -> str:
    return f"beeond-ctl recover {job_id} --nodes {shlex.quote(nodes)}"


def _states(root: str) -> Iterator[tuple[int, states.State | BeeondError]]:
    """The state of each job on this node, by job id, or why it cannot be read."""
    jobs = Path(root, "jobs")
    for number in sorted(int(name) for name in (os.listdir(jobs) if jobs.is_dir() else ()) if name.isdigit()):
        try:
            state = states.read(root, number)
        except BeeondError as error:
            yield number, error
        else:
            if state is not None:
                yield number, state


def _unknown(number: int, error: BeeondError) -> dict[str, Any]:
    return {
        "job": number, "node": slurm.node_name(os.environ), "phase": "unknown", "user": None, "nodes": None,
        "health": "state cannot be read", "reason": one_line(error),
    }  # fmt: skip


def _asked(state: states.State) -> tuple[Request | None, str | None, str]:
    """What was asked for, the backend, and what is wrong where a job was refused: that is no fault of the others."""
    request = None
    try:
        request = decode(state.request)
        made_with = configuration.recorded(state.config, state.job.job_id)
        return request, choose_backend(made_with, request, len(state.nodes)), ""
    except BeeondError as error:
        return request, None, one_line(error)


def _from_state(config: SiteConfig, state: states.State) -> dict[str, Any]:
    request, backend, wrong = _asked(state)
    job = state.instance
    services = {
        name: "running" if supervisor.alive(supervisor.Process(name, *process)) else "dead"
        for name, process in state.processes.items()
    }
    logged = events.last_run(events.read(config.paths.log, state.job.job_id))
    steps = [event for event in logged if event.get("event") == "step"]
    usable: dict[str, Any] = next((event for event in reversed(logged) if "took" in event), {})
    dead = [name for name, how in services.items() if how == "dead"]
    own = job == state.job
    return {
        "job": state.job.job_id,
        "node": state.node,
        "phase": state.phase,
        "user": state.job.user,
        "nodes": slurm.fold_nodes(state.nodes),
        **({} if own else {"instance": job.job_id}),
        "backend": backend,
        **_mount(state.mount or "", state.phase, dead),
        "services": services,
        "stage_out": "proved" if state.proved else "owed" if request and request.stage_out and own else None,
        "transfers": [
            {"direction": step["step"].removeprefix("stage-"), "source": step.get("source"),
             "destination": step.get("destination"), **step["summary"]}
            for step in steps if "summary" in step
        ],
        "reason": state.reason or wrong or None,
        "recover": _recovery(state.job.job_id, slurm.fold_nodes(state.nodes)) if state.phase == "retained" else None,
        "took": usable.get("took"),
        "took_s": usable.get("took_s"),
        "timings": {event["step"]: event["seconds"] for event in steps},
    }  # fmt: skip


def of_user(config: SiteConfig, job_id: int | None) -> list[dict[str, Any]]:
    """What a user can see: the instances of their own on this node."""
    found = []
    for hint in hints.read_all(config.paths.run):
        if job_id in (None, hint["job"], hint.get("instance")):
            found.append({**hint, **_mount(hint["mount"] or "", hint["phase"], [])})
            if hint["phase"] == "retained":
                found[-1]["recover"] = (
                    f"sudo beeond-ctl recover --mine {hint['job']}, where the site allows it"
                )
            if found[-1]["health"] == "ok" and hint["phase"] == "ready":
                found[-1] |= _within(partial(_staging, hint)) or {}
    known = {number for hint in found for number in (hint["job"], hint.get("instance"))}
    # Where /run keeps no ACLs there are no hints.
    for info in mounts.below(config.mount.root):
        name = info.point.rpartition("/")[2]
        if name.isdigit() and int(name) not in known and job_id in (None, int(name)) and _owned(info.point):
            found.append({"job": int(name), "phase": "mounted", **_mount(info.point, "ready", [])})
    return found


def _staging(hint: dict[str, Any]) -> dict[str, Any]:
    """The flushes of the job so far, how long its stage-out would take now, and seconds until its time limit."""
    from beeond_ctl import estimate, flushes

    expected = estimate.stage_out(hint, hint["mount"])
    return {
        "flushes": flushes.read_all(hint["mount"]),
        "expected": expected and expected.as_dict(),
        "time_left_s": estimate.time_left_s(hint["job"], os.environ),
    }


def _owned(point: str) -> bool:
    return _within(lambda: os.stat(point).st_uid) == os.getuid()


def _mount(point: str, phase: str, dead: list[str]) -> dict[str, Any]:
    """Where the instance is mounted, how much room it has, and whether all that it needs is alive."""
    mounted = mounts.mount_at(point) is not None
    room = _within(lambda: _room(point)) if mounted and not dead else None
    trouble = [f"{name} is dead" for name in dead]
    if not mounted and phase in _USABLE:
        trouble.append("not mounted")
    elif mounted and not dead and room is None:
        trouble.append(f"no answer from {point} within {ANSWER_S:.0f} s")
    if phase == "retained":
        trouble = [_KEPT]
    return {
        "mount": point if mounted else None, "capacity": room and _told(room), "capacity_bytes": room,
        "health": ", ".join(trouble) or "ok",
    }  # fmt: skip


def _room(point: str) -> dict[str, int]:
    room = os.statvfs(point)
    return {"free": room.f_bavail * room.f_frsize, "size": room.f_blocks * room.f_frsize}


def _told(room: dict[str, int]) -> str:
    return f"{format_size(room['free'])} free of {format_size(room['size'])}"


def _within(look: Callable[[], T]) -> T | None:
    """What `look` finds, which JSON can say; None where it fails, or hangs in a file system whose servers are gone."""
    try:
        found: T | None = json.loads(aside(lambda: json.dumps(look()).encode(), within_s=ANSWER_S))
    except (OSError, ValueError):
        return None
    return found
