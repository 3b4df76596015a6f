"""Stage-in and stage-out by all nodes of a job: work goes from the leader's list to whoever is idle.

Joins `beeond_ctl.staging`, which knows no nodes' ways to speak, with the team, which knows no files.
"""

from __future__ import annotations

import os
import threading
import time
from contextlib import suppress
from functools import cached_property
from typing import TYPE_CHECKING, Any

from beeond_ctl import flushes, slurm
from beeond_ctl.errors import JobGoneError, NodeError, PeerError, RetainedError, UserError, shortened
from beeond_ctl.lifecycle import fault, proof, steps
from beeond_ctl.request import printable

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from beeond_ctl.lifecycle.here import Here
    from beeond_ctl.lifecycle.team import Combine, Team
    from beeond_ctl.request import Transfer
    from beeond_ctl.staging.coordinator import Coordinator
    from beeond_ctl.staging.job import Identity, Job

_ASK_S = 60.0
_GONE = "the job was cancelled"
_SAMPLE_S = 1.0
"""Seconds between two looks at how far a transfer is; twice as many after each `_SAMPLES` looks."""
_SAMPLES = 240
_LONGEST = 10_000
"""Characters of what is told of transfers that failed: each node has it in memory."""


class Stage:
    """One direction of staging, of all transfers of a request, on this node."""

    def __init__(self, here: Here, *, inward: bool, trust_missing: bool = True, listed: bool = False) -> None:
        """`trust_missing`: whether a source of a stage-out that is not there counts as nothing to stage out.

        `listed`: there may be lists of the sources of a stage-in, made while the job was pending.
        """
        self._here, self._inward, self._trust_missing = here, inward, trust_missing
        self._listed = listed
        self._coordinators: dict[int, Coordinator] = {}
        count = len(here.request.stage_in if inward else here.request.stage_out)
        self.handlers = {"take": self._take, "report": self._report}
        self.combine: dict[str, Combine] = {f"staged-{index}": self._summing(index) for index in range(count)}
        self.combine["proved"] = self._prove
        self.combine["absent"] = lambda reports: {"damage": _damage(reports)}

    @cached_property
    def _every(self) -> list[Transfer]:
        """All transfers, once the names that are in them are known."""
        return self._here.transfers(inward=self._inward)

    def run(self, team: Team) -> None:
        """Copy everything, together with all other nodes; of a stage-out also what comes after a transfer that failed.

        Raises UserError or JobGoneError for a stage-in that did not succeed, RetainedError for a stage-out that is not
        proved, NodeError when this node cannot copy, PeerError when another one is lost.
        """
        failed: list[str] = []
        absent: list[int] = []
        for index, transfer in enumerate(self._every):
            with self._here.events.timed("stage-in" if self._inward else "stage-out") as extra:
                extra |= {"transfer": index, "source": transfer.source, "destination": transfer.destination}
                summary = self._transfer(team, index, transfer)
                extra["summary"] = summary
                self._here.transferred.append(_in_short(transfer, summary, inward=self._inward))
                if index in self._coordinators:
                    extra["by_node"] = self._coordinators[index].progress().bytes_by_node
                    if self._coordinators[index].listed:
                        extra["listed"] = self._coordinators[index].listed
            if summary["cancelled"] == _GONE:
                raise JobGoneError(f"job {self._here.state.job.job_id}: {_GONE} during its stage-in")
            if summary["missing"] and not self._inward and (self._trust_missing or summary["absent"]):
                absent.append(index)
            elif not summary["proved"]:
                failed.append(_told(transfer, summary, inward=self._inward))
                if self._inward:
                    raise UserError(shortened(failed[0], _LONGEST))
                if summary["cancelled"]:
                    break
        if failed:
            if absent and self._trust_missing:
                self._remember(team, absent)
            raise RetainedError(shortened("; ".join(failed), _LONGEST))
        if not self._inward:
            self._prove_together(team)

    def _remember(self, team: Team, absent: list[int]) -> None:
        """Have `recover` know which sources the job never made, if all nodes see that nothing has died."""
        here = self._here
        with suppress(PeerError):
            damage = steps.damage(here) or fault.own_devices(here)
            told = steps.meet(here, team, "absent", here.config.deadlines.meet, damage=damage)
            if not told["damage"]:
                here.state.absent = absent
                here.save()

    def _prove_together(self, team: Team) -> None:
        """All nodes see that what was copied was the whole file system, then that it is proved.

        Raises RetainedError when a server, client or device died meanwhile: it may have taken files out of sight.
        """
        here = self._here
        damage = steps.damage(here) or fault.own_devices(here)
        told = steps.meet(here, team, "proved", here.config.deadlines.meet, damage=damage)
        damage = told["damage"]
        if damage:
            raise RetainedError(f"the file system broke while it was copied: {damage}")
        if not here.leads:
            with suppress(NodeError):  # has been told; the leader has it
                proof.keep(here)
        here.state.proved = True
        here.save()

    def _prove(self, reports: dict[str, dict[str, Any]]) -> dict[str, Any]:
        damage = _damage(reports)
        if not damage:
            # Before anyone learns of it and wipes: the others' proof is this record.
            proof.keep(self._here)
            self._here.state.proved = True
            self._here.save()
        return {"damage": damage}

    def _transfer(self, team: Team, index: int, transfer: Transfer) -> dict[str, Any]:
        from beeond_ctl.staging.worker import serve

        here = self._here
        user = identity(here)
        if here.leads:
            if "delete" in transfer.flags:
                self._announce_deletion(index, transfer, user)
            self._coordinators[index] = self._coordinator(index, transfer, user)
        watch = _Watch(here, self._coordinators.get(index), index, inward=self._inward)
        stop = threading.Event()
        with watch:
            serve(
                lambda: team.ask("take", {"transfer": index}, _ASK_S),
                lambda result: _ignore(team.ask("report", {"transfer": index, "result": result}, _ASK_S)),
                user,
                stop,
                processes=here.config.staging.workers or None,
            )
            absent = index in here.state.absent and not here.state.rebooted
            return team.meet(f"staged-{index}", {"absent": absent}, here.config.deadlines.stall)

    def _announce_deletion(self, index: int, transfer: Transfer, user: Identity) -> None:
        """Have it in the event log what is going to be deleted, before it is."""
        from beeond_ctl.staging.preview import look_as

        try:
            doomed = look_as(self._job(transfer), user, within_s=self._here.config.deadlines.start)
        except OSError as error:
            doomed = {"problem": str(error)}
        self._here.events.log("deletes", transfer=index, destination=transfer.destination, **doomed)

    def _coordinator(self, index: int, transfer: Transfer, user: Identity) -> Coordinator:
        from beeond_ctl.staging.begin import Begun
        from beeond_ctl.staging.coordinator import Coordinator

        here = self._here
        journal = self._journal_dir()
        try:
            journal.mkdir(mode=0o700, exist_ok=True)
            nodes = here.plan.nodes if self._inward else here.plan.own_nodes  # guests have gone by then
            job = self._job(transfer)._replace(listed=self._list_path(index))
            return Coordinator(job, Begun(job, user, journal, len(nodes)), nodes)
        except OSError as error:
            raise NodeError(f"staging cannot start: {error}") from error

    def _list_path(self, index: int) -> bytes:
        """Where there may be a list of the source of a stage-in; nothing where there is none."""
        lists, job = self._here.config.slurm.lists, self._here.state.job
        if not (lists and self._listed):
            return b""
        from beeond_ctl.staging.listing import path_of

        return os.fsencode(path_of(lists, job.user, job.job_id, index))

    def _journal_dir(self) -> Path:
        """On the device: it survives a reboot, goes with the data, and what is many files is not held in memory."""
        from pathlib import Path

        return Path(self._here.plan.targets[0].home) / "journal"

    def _job(self, transfer: Transfer) -> Job:
        from beeond_ctl.staging.job import Job

        top = os.fsencode(self._here.plan.mount_point) + b"/"
        source, destination = os.fsencode(transfer.source), os.fsencode(transfer.destination)
        base = top if self._inward else b""
        others = tuple(base + os.fsencode(each.destination) for each in self._every if each != transfer)
        if self._inward:
            return Job(
                source, top + destination, transfer.flags, durable=False, all_or_nothing=True, others=others
            )
        return Job(
            top + source, destination, transfer.flags,
            flushes=top + os.fsencode(flushes.NAME), alone=True, outside=top[:-1], others=others,
        )  # fmt: skip

    # --- on the leader --------------------------------------------------------------------------------

    def _take(self, node: str, payload: dict[str, Any]) -> dict[str, Any]:
        coordinator = self._coordinators.get(payload["transfer"])
        return coordinator.take(node) if coordinator else {"wait": 0.01}

    def _report(self, node: str, payload: dict[str, Any]) -> dict[str, Any]:
        self._coordinators[payload["transfer"]].report(node, payload["result"])
        return {}

    def _summing(self, index: int) -> Callable[[dict[str, dict[str, Any]]], dict[str, Any]]:
        """What the leader answers once all nodes have finished transfer `index`."""

        def combine(reports: dict[str, dict[str, Any]]) -> dict[str, Any]:
            summary = self._coordinators[index].summary()
            self._coordinators[index].close(wait_s=0)  # the meeting's thread: all are waiting for it
            return {
                "proved": summary.proved, "missing": summary.missing, "cancelled": summary.cancelled,
                "problems": summary.problems()[:20], "remarks": summary.remarks()[:20],
                "copied": summary.copied, "verified": summary.verified, "skipped": summary.skipped,
                "failed": summary.failed, "bytes": summary.bytes, "seconds": round(summary.seconds, 3),
                "full": ("no-space", "destination") in summary.failures,
                "absent": all(report.get("absent") for report in reports.values()),
            }  # fmt: skip

        return combine


def check_destinations(here: Here) -> None:
    """See that the user may write where the stage-out is to go. Raises UserError naming the first place that is not.

    Asked by the leader before the job runs: afterwards it would cost the nodes that keep the data.
    """
    from beeond_ctl.staging.writable import unwritable

    transfers = here.transfers(inward=False, lengths=True)
    if not transfers or not here.leads:
        return
    paths = [os.fsencode(transfer.destination) for transfer in transfers]
    with here.events.timed("destinations"):
        found = unwritable(paths, identity(here), here.config.deadlines.start)
    for path, reason in found:
        raise UserError(
            f"stage-out to {printable(os.fsdecode(path))}: {reason}; name a place that you may write"
        )


class _Watch:
    """On the leader: ends a transfer that stands still, or whose job is gone, and logs how far it is.

    Elsewhere it does nothing.
    """

    def __init__(self, here: Here, coordinator: Coordinator | None, index: int, *, inward: bool) -> None:
        self._here, self._coordinator, self._index, self._inward = here, coordinator, index, inward
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> None:
        if self._coordinator is not None:
            self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._done.set()
        if self._coordinator is not None:
            self._thread.join(1)
            self._coordinator.close()

    def _run(self) -> None:
        coordinator = self._coordinator
        assert coordinator is not None  # noqa: S101
        config, job_id = self._here.config, self._here.state.job.job_id
        looked = sampled = time.monotonic()
        samples = 0
        while not self._done.wait(min(_SAMPLE_S, config.staging.job_check)) and not coordinator.finished():
            now, progress = time.monotonic(), coordinator.progress()
            if now - sampled >= _SAMPLE_S * 2 ** (samples // _SAMPLES):
                self._here.events.log(
                    "progress", transfer=self._index, inward=self._inward,
                    bytes=progress.bytes_done, entries=progress.entries_done,
                )  # fmt: skip
                sampled, samples = now, samples + 1
            if now - looked < config.staging.job_check:
                continue
            looked = now
            if progress.idle_s > config.deadlines.stall:
                coordinator.cancel(
                    f"nothing was copied for {config.deadlines.stall:.0f} s; is global storage there?"
                )
            with suppress(OSError):
                if self._inward and not slurm.job_wants_us(config.slurm.path, job_id):
                    coordinator.cancel(_GONE)


def identity(here: Here) -> Identity:
    """The job's user with that user's groups. Raises NodeError when this node does not know the user."""
    from beeond_ctl.staging.job import Identity

    job = here.state.job
    try:
        groups = os.getgrouplist(job.user, job.gid)
    except (KeyError, OSError) as error:
        raise NodeError(f"the groups of user {job.user} are not known here: {error}") from None
    return Identity(job.uid, job.gid, tuple(groups))


def _damage(reports: dict[str, dict[str, Any]]) -> str:
    """What of the file system died, by node."""
    return "; ".join(f"{node}: {report['damage']}" for node, report in reports.items() if report["damage"])


def _told(transfer: Transfer, summary: dict[str, Any], *, inward: bool) -> str:
    """One line that says which transfer failed, and why."""
    name = "stage-in" if inward else "stage-out"
    path = transfer.source if inward else transfer.destination
    shown = printable(path)
    if inward and summary["missing"]:
        return f"stage-in of {shown}: no such file or directory; make it, or mend its name, and submit the job again"
    if summary["missing"]:
        source = printable(transfer.source)
        return (
            f"stage-out to {shown}: {source} is not there now; "
            "if the job never made it, `recover --discard` gives it up when nothing else is named here"
        )
    reasons = "; ".join(summary["problems"]) or summary["cancelled"] or "no proof"
    reasons = reasons.removeprefix(f"{shown}: ")
    if inward and summary["full"]:
        reasons += "; ask for more with capacity=, or for more nodes"
    return f"{name} {'of' if inward else 'to'} {shown}: {reasons}"


def _in_short(transfer: Transfer, summary: dict[str, Any], *, inward: bool) -> dict[str, Any]:
    """For `status`."""
    return {
        "direction": "in" if inward else "out",
        "source": printable(transfer.source),
        "destination": printable(transfer.destination),
        "proved": summary["proved"],
        "entries": summary["copied"] + summary["skipped"],
        "bytes": summary["bytes"],
        "seconds": summary["seconds"],
        "remarks": summary["remarks"],
    }


def _ignore(_: object) -> None:
    return None
