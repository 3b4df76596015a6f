"""Tear-down: what the Epilog does on each node. `docs/lifecycle.md`, section "Tear-down", has the steps."""

from __future__ import annotations

import math
import secrets
import shlex
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from beeond_ctl import config as configuration
from beeond_ctl import mounts, slurm, storage
from beeond_ctl import state as states
from beeond_ctl.aside import tried
from beeond_ctl.errors import BeeondError, ConfigError, NodeError, PeerError, RetainedError, one_line
from beeond_ctl.events import EventLog
from beeond_ctl.lifecycle import claims, guard, kin, probe, stage, steps, tell, watch
from beeond_ctl.lifecycle.here import Here
from beeond_ctl.lifecycle.team import open_team
from beeond_ctl.request import printable

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from contextlib import AbstractContextManager

    from beeond_ctl.lifecycle.team import Team


def epilog(environ: Mapping[str, str], config_path: Path = configuration.DEFAULT_PATH) -> int:
    """Slurm's Epilog on one node; the exit code for Slurm.

    Raises BeeondError where the node does not end clean; it has then been drained with the reason.
    """
    job_id, node = slurm.epilog_job(environ), slurm.node_name(environ)
    config = configuration.SiteConfig()
    with suppress(ConfigError):  # what counts is what was valid at bring-up, and lies in the state
        config = configuration.load(config_path)
    with (
        guard.accounted(config, node, job_id, ends=True),
        guard.draining(config, node, job_id),
        ExitStack() as stack,
    ):
        try:
            stack.enter_context(_lock(config, node, job_id))
            state = states.read(config.paths.run, job_id)
            if state is None or slurm.is_of_another(environ, state.job, state.node):
                return 0
            here = Here(configuration.recorded(state.config, job_id), state)
        except NodeError as error:  # what is owed is not known; slurm_bb_data_out looks for what comes first
            raise NodeError(f"{slurm.UNPROVED}{one_line(error)}") from error
        here.events.log("epilog")
        if state.phase == "retained":
            raise _kept(here)  # by a sweep, or another Epilog
        with here.events.timed("tear-down"), guard.interruptible():
            end(here, "epilog", prepare=revive)
    return 0


def _lock(config: configuration.SiteConfig, node: str, job_id: int) -> AbstractContextManager[None]:
    """The job's lock, waited for as long as its holder does something.

    That may be the Epilog of a slurmd that was restarted: as long as it copies, Slurm may not take the job for over.
    """
    return states.locked(
        config.paths.run,
        job_id,
        "try again",
        wait_s=math.inf,
        hung_s=config.deadlines.stall,
        tell=lambda who: EventLog(config.paths.log, job_id, node).log("waiting", message=who),
    )


def end(here: Here, purpose: str, *, prepare: Callable[[Here, Team], None]) -> None:
    """Take this node's part of the instance down; the data is staged out before, or kept.

    `prepare` makes a file system that is owed a stage-out usable again, if it is not. Raises RetainedError when the
    data was kept, NodeError when something could not be removed.
    """
    watch.end(here)
    if not here.state.ran:
        if here.state.phase not in {"claimed", "failed"}:
            steps.roll_back(here)
        steps.forget(here)
        return
    if here.is_guest:
        unwritten = _write_out(here)
        steps.remove_instance(here)
        steps.forget(here)
        if unwritten:  # the component that serves sees by this node's reason that it may not wipe
            raise NodeError(unwritten)
        return
    try:
        _end_together(here, purpose, prepare)
    except NodeError as error:
        if not here.owed or here.state.proved:
            raise
        job_id, nodes = (
            here.state.job.job_id,
            here.state.nodes,
        )  # slurm_bb_data_out looks for what comes first
        raise NodeError(f"{slurm.UNPROVED}{one_line(error)}; {recovery(job_id, nodes)}") from error


def _end_together(here: Here, purpose: str, prepare: Callable[[Here, Team], None]) -> None:
    """`end`, of a node that the job may have run on, with all others that serve."""
    owed = here.owed
    given_up = False
    staging = stage.Stage(here, inward=False, trust_missing=purpose != "recover")
    combine = {"ending": _ending, **kin.combine(here), **steps.combine(here), **staging.combine}
    problem: BeeondError | None = None
    own = ""
    with open_team(here, purpose, combine=combine, handlers=staging.handlers) as team:
        try:
            usable = here.state.phase != "failed"
            hurry = bool(here.request.stage_out) and purpose == "epilog" and _is_given_up(here)
            told = steps.meet(
                here, team, "ending", here.config.deadlines.meet,
                ran=usable, hurry=hurry, rebooted=here.state.rebooted,
            )  # fmt: skip
            if here.leads and told["rebooted"]:
                here.events.log("rebooted", nodes=told["rebooted"])
            given_up = bool(told["hurry"] and told["ran"]) and not here.state.proved
            if told["hurry"] and owed:
                here.state.given_up = True
                here.save()
                owed = False
            if here.request.share is not None:
                writing = kin.wait_for_guests(here, team, strict=purpose == "epilog")
                _see_that_none_writes(writing if owed else "")
            owed = owed and bool(told["ran"])
            if owed:
                _see_that_all_ran(told["failed"])
                here.enter("staging-out")
                prepare(here, team)
                _see_that_it_is_whole(here, team)
                here.state.attempt = told["attempt"]
                here.save()
                storage.set_attempt(here.plan, here.state.attempt)
                staging.run(team)
        except PeerError as error:
            problem = error
        except Exception as error:  # noqa: BLE001 - whatever it is: the data stays, and the others are told
            text = one_line(error)
            problem = RetainedError(text if isinstance(error, RetainedError) else f"{here.node}: {text}")
            if not isinstance(error, RetainedError):
                own = text
                team.fail(text, user_fault=False)
        unproved = owed and not here.state.proved
        keep = unproved and here.serves  # who only mounts has nothing to keep
        stuck = _unmount(here)
        with suppress(PeerError):  # whoever does not come is not waited for twice
            steps.meet(here, team, "unmounted", here.config.deadlines.stop)
    why = one_line(problem) if problem else "stage-out ended without a proof"
    why += f"; {stuck}" if stuck else ""
    text = _told(here, why if unproved else "") if owed else tell.GIVEN_UP if given_up else ""
    with tell.telling(here, text):
        steps.stop(here, keep=keep)
        if keep:
            retain(here, why)
        steps.wipe(here)
    steps.forget(here)
    if stuck or (unproved and own):
        raise NodeError(stuck or own)


def _unmount(here: Here) -> str:
    """Unmount. What was detached since it could not be let go of; the rest of the instance has to end all the same."""
    try:
        steps.unmount(here)
    except NodeError as error:
        here.events.log("detached", message=one_line(error))
        return one_line(error)
    return ""


def _told(here: Here, why: str) -> str:
    """What the user is told of the stage-out; `why` it is not proved."""
    job_id, nodes = here.state.job.job_id, here.state.nodes
    return tell.kept(here, why, recovery(job_id, nodes)) if why else tell.staged_out(here)


def _ending(reports: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The leader's answer to all whose job has ended: what they said together, and a new name for this stage-out."""
    rebooted = [node for node, report in reports.items() if report.get("rebooted")]  # not of a version before
    return {**_all_ran(reports), "rebooted": rebooted, "attempt": secrets.token_hex(8)}


def _all_ran(reports: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """A node that rolled back while another one learnt that all is ready: the job may have run on that one."""
    return {
        "ran": [node for node, report in reports.items() if report["ran"]],
        "failed": [node for node, report in reports.items() if not report["ran"]],
        "hurry": any(report["hurry"] for report in reports.values()),
    }


def _is_given_up(here: Here) -> bool:
    """Whether the user gave the data up by `scancel --hurry`; what cannot be told is no.

    Asked by the job's first node alone, where the batch script mostly ran, and has ended by now. Where it ran elsewhere
    (`sbatch --batch`, a site with another order of nodes) it may not have ended, and the data is staged out.
    """
    if here.node != here.state.nodes[0]:
        return False
    try:
        given_up = slurm.gave_up(here.config.slurm.path, here.state.job.job_id, here.state.job.restart)
    except NodeError:
        return False
    if given_up:
        here.events.log("given-up", by="scancel --hurry")
    return given_up


def _see_that_all_ran(failed: list[str]) -> None:
    if failed:
        raise RetainedError(
            f"the instance was never usable on {', '.join(failed)}, and the job may have run elsewhere"
        )


def _see_that_none_writes(writing: str) -> None:
    if writing:
        raise RetainedError(writing)


def _write_out(here: Here) -> str:
    """Write out what this node's programs stored through mappings; what went wrong. Unmounting does not tell."""
    point = here.plan.mount_point
    if mounts.mount_at(point) is None:
        return ""
    try:
        with here.events.timed("syncing"):
            probe.within(
                here.config.deadlines.stall,
                f"{point}: what this node wrote is not written out",
                lambda: probe.sync(Path(point)),
            )
    except NodeError as error:
        return one_line(error)
    return ""


def _see_that_it_is_whole(here: Here, team: Team) -> None:
    """A file system that lacks a server may say "no such file" of what it has; a node may still hold what was stored.

    Raises NodeError or PeerError.
    """
    point, deadline_s = Path(here.plan.mount_point), here.config.deadlines.start
    with here.events.timed("whole") as extra:
        # A user's own mounts have lost their servers with the job, and would hide data or fail the copying.
        if covered := mounts.uncover(
            str(point), deadline_s=here.config.deadlines.stop, uid=here.state.job.uid
        ):
            extra["unmounted"] = [printable(text) for text in covered]
        probe.within(deadline_s, f"{point} does not answer", lambda: probe.insist(point, deadline_s))
    if len(here.plan.nodes) > 1:
        deadline_s += here.config.deadlines.stall
        if unwritten := _write_out(here):
            raise NodeError(unwritten)
    steps.meet(here, team, "whole", deadline_s)


def make_room(here: Here) -> None:
    """Free what was kept from the job. Raises NodeError, also where the device hangs: before the others give up."""
    probe.within(
        here.config.deadlines.start / 2,
        "the room that was kept for tear-down cannot be freed",
        lambda: storage.make_room(here.plan),
    )


def revive(here: Here, team: Team) -> None:
    """Start again what died during the job, so that its data can still be staged out. Raises NodeError or PeerError."""
    make_room(here)
    services = (
        *here.backend.services(here.plan, here.node, here.keys),
        *here.backend.mount(here.plan, here.node, here.keys).helpers,
    )
    dead = tuple(service for service in services if not steps.lives(here, service.name))
    if dead:
        here.events.log("revived", services=[service.name for service in dead])
        steps.start(here, dead)
    # A GlusterFS client ends itself as long as another node's brick is missing.
    steps.meet(here, team, "revived", here.config.deadlines.start)
    if steps.damage(here):
        here.events.log("remounted", damage=steps.damage(here))
        steps.unmount(here)
        steps.mount(here)
        here.enter("staging-out")


def retain(here: Here, why: str) -> None:
    """Keep the data on the devices, with nothing running. Raises RetainedError, whose text is the drain reason."""
    job_id = here.state.job.job_id
    if here.serves:
        storage.detach(here.plan, deadline_s=here.config.deadlines.stop)
        # What is said to be kept survives a power cut from then on.
        if trouble := tried(lambda: storage.sync(here.plan), within_s=here.config.deadlines.wipe):
            why += f"; {here.node}: its data is not written out: {trouble}"
    storage.set_phase(here.plan, "retained", rebooted=here.state.rebooted)
    claims.release(here.config.paths.run, job_id)
    here.state.reason = why
    here.enter("retained")
    raise _kept(here)


def _kept(here: Here) -> RetainedError:
    """Always in the same words, which do not come twice in one reason; slurm_bb_data_out looks for what comes first."""
    state = here.state
    return RetainedError(
        f"{slurm.KEPT}, stage-out is not proved ({state.reason}); {recovery(state.job.job_id, state.nodes)}"
    )


def recovery(job_id: int, nodes: Sequence[str]) -> str:
    """What to do about kept data. `recover` finds the nodes of a job in a drain reason by these words."""
    return f"when the cause is gone run: beeond-ctl recover {job_id} --nodes {shlex.quote(slurm.fold_nodes(nodes))}"
