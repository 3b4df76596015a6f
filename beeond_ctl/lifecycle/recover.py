"""Recovery: finishing what the Epilog could not, on all nodes of an ended job.

`everywhere` runs where an admin typed it; `on_this_node` is what it starts on each node, in one round.
"""

from __future__ import annotations

import os
import re
import socket
import sys
from contextlib import suppress
from typing import TYPE_CHECKING

from beeond_ctl import config as configuration
from beeond_ctl import events, slurm, storage
from beeond_ctl import state as states
from beeond_ctl.errors import BeeondError, NodeError, UsageError, one_line
from beeond_ctl.launch import all_done, on_nodes
from beeond_ctl.lifecycle import claims, guard, own, proof, steps, teardown, tell
from beeond_ctl.lifecycle.here import Here
from beeond_ctl.plan import port_blocks

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from beeond_ctl.config import SiteConfig
    from beeond_ctl.lifecycle.team import Team


def everywhere(
    config: SiteConfig, job_id: int, node_list: str | None, *, discard: bool, owner: int | None = None
) -> Iterator[str]:
    """Recover on all nodes of the job; yields what to tell who asked: root, or the user with the uid `owner`.

    Raises UsageError when the nodes are not known, NodeError when a node did not end clean.
    """
    nodes = slurm.expand_nodes(node_list) if node_list else _known_nodes(config, job_id)
    yield f"job {job_id}: recovering on {slurm.fold_nodes(nodes)}"
    deadline_s = config.deadlines.meet + 7 * 86400  # the copying has its own deadline for standing still
    words = ["beeond-ctl", "recover", str(job_id)]
    # Each node writes the proof down before it acts on it, and others may not have learnt of it.
    asked = on_nodes(nodes, [*words, "--ask"], timeout_s=config.deadlines.meet)
    form = rf"{job_id}\.[0-9]+\.[0-9a-f]+"
    proved = {word for answer in asked for word in answer.output.split() if re.fullmatch(form, word)}
    how = ["--discard"] if discard else [word for each in sorted(proved) for word in ("--proved", each)]
    how += [] if owner is None else ["--owner", str(owner)]
    # All at once: each waits for all others.
    answers = on_nodes(nodes, [*words, "--here", *how], timeout_s=deadline_s, fanout=len(nodes))
    yield from all_done(answers, f"job {job_id} is not finished")


def _known_nodes(config: SiteConfig, job_id: int) -> tuple[str, ...]:
    state = states.read(config.paths.run, job_id)
    if state is not None:
        return state.nodes
    for record in storage.read_records(config):
        if record.job_id == job_id:
            return record.nodes
    try:
        shown = slurm.run(config.slurm.path, "scontrol", "show", "node")
    except NodeError:
        shown = ""
    # Reasons quote users' paths, so only what stands at the end of one of ours counts, and only nodes that Slurm has.
    known = frozenset(re.findall(r"^NodeName=(\S+)", shown, re.MULTILINE))
    prefix, named = re.escape(guard.drain_prefix(job_id)), r"'?([\w.,\[\]-]+)'?"
    ours = rf"(?:Reason=|\| ){prefix}[^|\n]*beeond-ctl recover {job_id} --nodes {named}"
    for match in re.finditer(ours + r"(?= \||\s*(?:\[[^\]\n]*\])?$)", shown, re.MULTILINE):
        if known.issuperset(nodes := slurm.expand_nodes(match[1])):
            return nodes
    raise UsageError(
        f"the nodes of job {job_id} are not known here; name them with --nodes, if it is not recovered already"
    )


def alive(config: SiteConfig, job_id: int, state: states.State | None) -> str:
    """In which state Slurm says that the job still has its nodes; empty when it has not. For who has the job's lock.

    Raises NodeError when Slurm, who alone knows, does not answer.
    """
    if own.without_slurm(config, job_id):
        # Bring-up holds the lock until the instance is ready: one that never was has been left by it. One without a
        # state has been so for longer than its first or last moment: the node was rebooted.
        return "in use until `beeond-ctl down`" if state is not None and state.ran else ""
    found, _ = slurm.state_and_nodes(config.slurm.path, job_id)
    return found if found in slurm.ALIVE else ""


def on_this_node(
    config: SiteConfig, job_id: int, *, discard: bool, proved: Sequence[str], owner: int | None = None
) -> None:
    """Recover this node's part; `proved` names the stage-outs that nodes know to be proved, as `proofs` does.

    With `owner`, only if the job was that user's. Raises RetainedError when the data has to stay, NodeError when
    something is stuck, the job still runs, or it is not the owner's.
    """
    with states.locked(config.paths.run, job_id, "run it again"):
        state = states.read(config.paths.run, job_id)
        if owner is not None and _owners(config, job_id, state) - {owner}:
            raise NodeError(f"job {job_id} is not yours; ask its owner or an admin to recover it")
        if state is None or state.phase != "retained":
            running = alive(config, job_id, state) if state is not None or recorded(config, job_id) else ""
            if running:
                raise NodeError(f"job {job_id} is not over ({running}); there is nothing to recover yet")
        fresh = state is None
        state = state or rebuilt(config, job_id)
        if state is None:
            sys.stdout.write(f"nothing left of job {job_id}\n")
            if owner is None:  # whose job it was is not known any more
                asks = rf"beeond-ctl recover {job_id}( --nodes \S+)?$|another beeond-ctl works on it"
                _resume(config, slurm.node_name(os.environ), job_id, asks)
            return
        here = Here(configuration.recorded(state.config, job_id), state)
        lost = storage.absent(here.first_plan) if here.serves and (here.owed or discard) else []
        # Written down below, so that a wipe that is cut off is not taken for kept data.
        state.proved = state.proved or (bool(state.attempt) and proof.name(state) in proved)
        unwanted = discard and here.owed
        state.given_up = state.given_up or discard
        state.secret = ""  # all is started anew, with the secret that the leader has now
        if fresh:
            states.create(config.paths.run, state)
            if here.owed and state.rebooted:
                here.events.log("rebooted", nodes=[here.node])
        here.events.log("recover", discard=discard, proved=list(proved), lost=lost)
        with (
            guard.accounted(config, here.node, job_id, ends=True),
            guard.draining(config, here.node, job_id),
            here.events.timed("recovery"),
            guard.interruptible(),
        ):
            here.save()
            text = "wiped, data given up" if discard else "staged out, verified and wiped"
            if not here.owed or not here.serves:  # a node that only mounted has nothing to give
                steps.remove_instance(here, lost=lost)
                by = "an admin" if owner is None else state.job.user
                with tell.telling(here, tell.discarded(here, by) if unwanted else ""):
                    pass
                steps.forget(here)
            else:
                teardown.end(here, "recover", prepare=_restart)
                if state.rebooted:
                    text += "; this node was rebooted before, and what had not reached its devices by then is lost"
        sys.stdout.write(text + (f"; not there, so not wiped: {', '.join(lost)}" if lost else "") + "\n")
        _resume(config, here.node, job_id, "")


def rebuilt(config: SiteConfig, job_id: int) -> states.State | None:
    """The state as the records on the devices tell it, not yet written down: `/run` is empty after a reboot."""
    records = recorded(config, job_id)
    return state_of(records) if records else None


def see_that_nothing_is_lost(here: Here, lost: Sequence[str]) -> None:
    """Data of which a part is not there is not recovered. Raises NodeError if it is owed, and `lost` names any home."""
    if lost and here.owed:
        raise NodeError(
            f"job {here.state.job.job_id}: {', '.join(lost)} is not there; mount its device, or give the data up with "
            "recover --discard"
        )


def _owners(config: SiteConfig, job_id: int, state: states.State | None) -> set[int]:
    """The users whose data this node has for a job."""
    found = {record.job.uid for record in recorded(config, job_id)}
    return found | {state.job.uid} if state else found


def recorded(config: SiteConfig, job_id: int) -> list[storage.Record]:
    """What this node's devices say of the job."""
    return [record for record in storage.read_records(config) if record.job_id == job_id]


def state_of(records: Sequence[storage.Record]) -> states.State:
    """The state that a job's records on this node's devices stand for.

    What was being wiped was proved, or given up; of what was being prepared nothing has run. Either holds for all of
    the node's targets, those too that are not there. The configuration is the one of the record: today's may name other
    devices, or another file system. Raises NodeError when the records are not of one run, or not in their places.
    """
    record = records[0]
    if {other.instance for other in records} != {record.instance}:
        raise NodeError(
            f"job {record.job_id}: its devices hold different runs; look at them before anything is wiped"
        )
    made_with = configuration.recorded(record.config, record.job_id)
    state = states.State(
        job=record.job, nodes=record.nodes, node=record.node, request=record.request, block=record.block,
        config=record.config, phase="retained",
        ran=all(other.phase not in {"preparing", "wiping"} for other in records),
        names=record.names, attempt=record.attempt,
        rebooted=any(other.rebooted or other.phase == "live" for other in records),
        mount=f"{made_with.mount.root}/{record.job_id}",  # no other job's; a chosen one may be another's by now
    )  # fmt: skip
    wanted = {target.home for target in Here(made_with, state).first_plan.targets}
    if elsewhere := sorted({other.home for other in records} - wanted):
        raise NodeError(
            f"job {record.job_id}: {', '.join(elsewhere)} was made at another place, one of "
            f"{', '.join(sorted(wanted))}; mount its device there"
        )
    return state


def proofs(config: SiteConfig, job_id: int) -> list[str]:
    """The whole stage-outs of jobs with this id that this node knows to be proved, by state or event log.

    The log may also be that of earlier jobs: a node takes the proof only of a stage-out that it had a part in.
    """
    found = {
        f"{event['run']}.{event['attempt']}"
        for event in events.read(config.paths.log, job_id)
        if event.get("event") == "proved" and event.get("run") and event.get("attempt")
    }
    found.update(proof.in_memory(config, job_id))
    with suppress(NodeError):  # what cannot be read is told by who needs it
        state = states.read(config.paths.run, job_id)
        if state is not None and state.proved and state.attempt:
            found.add(proof.name(state))
    return sorted(found)


def _restart(here: Here, team: Team) -> None:
    """Bring a retained instance up again as it was, for root's eyes only but for the copying."""
    see_that_nothing_is_lost(here, storage.absent(here.plan))
    steps.unmount(here)
    steps.stop(here, keep=True)
    storage.attach(here.plan, deadline_s=here.config.deadlines.start)
    teardown.make_room(here)
    free = claims.claim_ports(
        here.config.paths.run, here.state.job.job_id, port_blocks(here.config, here.state.job)
    )
    steps.agree_on_ports(here, team, free, here.state.names)
    steps.start_services(here, team)
    if trouble := steps.mount_and_settle(here, team, fresh=False):
        raise NodeError(trouble)
    here.enter("staging-out")


def _resume(config: SiteConfig, node: str, job_id: int, asks: str) -> None:
    """Return the node to service if it was out of it for this job alone.

    Only those of its reasons count in which the pattern `asks` is found: a broken device is not mended by recovery.
    """
    if not config.slurm.resume_after_recover:
        return
    try:
        with guard.changing_reasons(config):
            slurm.undrain(config.slurm.path, node, guard.drain_prefix(job_id), asks)
    except BeeondError as error:
        name = node or socket.gethostname()
        sys.stdout.write(f"{name} is clean but not back in service: {one_line(error)}\n")
