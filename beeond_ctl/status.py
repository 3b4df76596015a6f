"""What is on this node: the instances, their health, and what was kept. Changes nothing."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from beeond_ctl import events, mounts, slurm, storage, supervisor
from beeond_ctl import state as states
from beeond_ctl.plan import choose_backend
from beeond_ctl.request import decode
from beeond_ctl.units import format_size

if TYPE_CHECKING:
    from beeond_ctl.config import SiteConfig


def instances(config: SiteConfig, job_id: int | None) -> list[dict[str, Any]]:
    """All instances of this node, or that of one job, as JSON-able facts; for root."""
    found = []
    known = set()
    for state in states.read_all(config.paths.run):
        known.add(state.job.job_id)
        if job_id in (None, state.job.job_id):
            found.append(_from_state(config, state))
    for record in storage.read_records(config):
        if record.job_id not in known and job_id in (None, record.job_id):
            known.add(record.job_id)
            found.append(
                {
                    "job": record.job_id, "phase": f"{record.phase} (node was rebooted)", "user": record.job.user,
                    "nodes": slurm.fold_nodes(record.nodes),
                    "reason": f"beeond-ctl recover {record.job_id} --nodes {slurm.fold_nodes(record.nodes)}",
                }
            )  # fmt: skip
    return found


def _from_state(config: SiteConfig, state: states.State) -> dict[str, Any]:
    request = decode(state.request)
    point = request.mount or f"{config.mount.root}/{state.job.job_id}"
    mounted = mounts.mount_at(point) is not None
    services = {
        name: "running" if supervisor.alive(supervisor.Process(name, *process)) else "dead"
        for name, process in state.processes.items()
    }
    steps = [
        event for event in events.read(config.paths.log, state.job.job_id) if event.get("event") == "step"
    ]
    return {
        "job": state.job.job_id,
        "phase": state.phase,
        "user": state.job.user,
        "nodes": slurm.fold_nodes(state.nodes),
        "backend": choose_backend(config, request, len(state.nodes)),
        "mount": point if mounted else None,
        "capacity": _room(point) if mounted and "dead" not in services.values() else None,
        "services": services,
        "stage_out": "proved" if state.proved else ("owed" if request.stage_out else None),
        "reason": state.reason or None,
        "timings": {event["step"]: event["seconds"] for event in steps},
    }


def mounted(config: SiteConfig, job_id: int | None) -> list[dict[str, Any]]:
    """What a user can see: the mounts of their own jobs on this node."""
    found = []
    for info in mounts.below(config.mount.root):
        name = info.point.rpartition("/")[2]
        try:
            owner = os.stat(info.point).st_uid
        except OSError:
            continue
        if owner == os.getuid() and name.isdigit() and job_id in (None, int(name)):
            found.append(
                {"job": int(name), "phase": "mounted", "mount": info.point, "capacity": _room(info.point)}
            )
    return found


def _room(point: str) -> str:
    room = os.statvfs(point)
    return (
        f"{format_size(room.f_bavail * room.f_frsize)} free of {format_size(room.f_blocks * room.f_frsize)}"
    )
