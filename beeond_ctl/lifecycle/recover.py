"""Recovery: finishing what the Epilog could not, on all nodes of an ended job.

`everywhere` runs where an admin typed it; `on_this_node` is what it starts on each node, in one round.
"""

from __future__ import annotations

import re
import socket
import sys
from typing import TYPE_CHECKING

from beeond_ctl import events, slurm, storage
from beeond_ctl import state as states
from beeond_ctl.config import SiteConfig
from beeond_ctl.errors import BeeondError, NodeError, UsageError, one_line
from beeond_ctl.launch import fold, on_nodes
from beeond_ctl.lifecycle import claims, guard, steps, teardown
from beeond_ctl.lifecycle.here import Here
from beeond_ctl.plan import port_blocks

if TYPE_CHECKING:
    from collections.abc import Iterator

    from beeond_ctl.lifecycle.team import Team

PROVED = "proved"


def everywhere(config: SiteConfig, job_id: int, node_list: str | None, *, discard: bool) -> Iterator[str]:
    """Recover on all nodes of the job; yields what to tell the admin.

    Raises UsageError when the nodes are not known, NodeError when a node did not end clean.
    """
    nodes = slurm.expand_nodes(node_list) if node_list else _known_nodes(config, job_id)
    yield f"job {job_id}: recovering on {slurm.fold_nodes(nodes)}"
    deadline_s = config.deadlines.meet + 7 * 86400  # the copying has its own deadline for standing still
    words = ["beeond-ctl", "recover", str(job_id)]
    # The leader writes the proof down before it tells the others, and may have died in between.
    asked = on_nodes(nodes, [*words, "--ask"], timeout_s=config.deadlines.meet)
    proved = any(answer.output.strip() == PROVED for answer in asked)
    how = ["--discard"] if discard else ["--proved"] if proved else []
    answers = on_nodes(nodes, [*words, "--here", *how], timeout_s=deadline_s)
    for told, text in fold(answers):
        yield f"{slurm.fold_nodes(told)}: {text}"
    bad = [answer.node for answer in answers if answer.code != 0]
    if bad:
        raise NodeError(
            f"job {job_id} is not finished on {slurm.fold_nodes(bad)}; mend the cause named above and run it again"
        )


def _known_nodes(config: SiteConfig, job_id: int) -> tuple[str, ...]:
    state = states.read(config.paths.run, job_id)
    if state is not None:
        return state.nodes
    for record in storage.read_records(config):
        if record.job_id == job_id:
            return record.nodes
    try:
        reasons = slurm.run(config.slurm.path, "scontrol", "show", "node")
    except NodeError:
        reasons = ""
    match = re.search(rf"beeond-ctl recover {job_id} --nodes (\S+)", reasons)
    if match:
        return slurm.expand_nodes(match[1])
    raise UsageError(f"the nodes of job {job_id} are not known here; name them with --nodes")


def on_this_node(config: SiteConfig, job_id: int, *, discard: bool, proved: bool) -> None:
    """Recover this node's part. Raises RetainedError when the data has to stay, NodeError when something is stuck."""
    with states.locked(config.paths.run, job_id, "run it again"):
        state = states.read(config.paths.run, job_id) or _rebuild(config, job_id)
        if state is None:
            sys.stdout.write(f"nothing left of job {job_id}\n")
            return
        here = Here(SiteConfig.model_validate(state.config), state)
        here.events.log("recover", discard=discard, proved=proved)
        with guard.draining(config, here.node, job_id), here.events.timed("recovery"), guard.interruptible():
            if discard or proved or state.proved or not state.ran or not here.request.stage_out:
                steps.remove_instance(here)
                steps.forget(here)
            else:
                teardown.end(here, "recover", prepare=_restart)
        sys.stdout.write(("wiped, data given up" if discard else "staged out, verified and wiped") + "\n")
        _resume(config, here, job_id)


def _rebuild(config: SiteConfig, job_id: int) -> states.State | None:
    """The state as the records on the devices tell it: `/run` is empty after a reboot."""
    for record in storage.read_records(config):
        if record.job_id == job_id:
            state = state_of(config, record)
            states.create(config.paths.run, state)
            return state
    return None


def state_of(config: SiteConfig, record: storage.Record) -> states.State:
    """The state that a record on a device stands for. What was being wiped was proved, or given up."""
    return states.State(
        job=record.job, nodes=record.nodes, node=record.node, request=record.request, block=record.block,
        config=config.model_dump(mode="json"), phase="retained", ran=record.phase != "wiping",
        mount=f"{config.mount.root}/{record.job_id}",  # no other job's; a chosen one may be another's by now
    )  # fmt: skip


def is_proved(config: SiteConfig, job_id: int) -> bool:
    """Whether this node knows that the job's whole stage-out is proved: by its state, or by its event log."""
    state = states.read(config.paths.run, job_id)
    if state is not None and state.proved:
        return True
    logged = [
        event["event"] for event in events.read(config.paths.log, job_id) if event.get("event") in _RUNS
    ]
    return logged[-1:] == ["proved"]


_RUNS = ("prolog", "proved")
"""A job that was requeued begins anew in the same log: an earlier run's proof says nothing of the last one."""


def _restart(here: Here, team: Team) -> None:
    """Bring a retained instance up again as it was, for root's eyes only but for the copying."""
    steps.unmount(here)
    steps.stop(here)
    storage.attach(here.plan, deadline_s=here.config.deadlines.start)
    free = claims.claim_ports(
        here.config.paths.run, here.state.job.job_id, port_blocks(here.config, here.state.job)
    )
    steps.agree_on_ports(here, team, free, here.state.names)
    steps.start_services(here, team)
    steps.mount(here)
    here.enter("staging-out")


def _resume(config: SiteConfig, here: Here, job_id: int) -> None:
    """Return the node to service if it was out of it for this job alone."""
    if not config.slurm.resume_after_recover:
        return
    try:
        slurm.undrain(config.slurm.path, here.node, guard.drain_prefix(job_id))
    except BeeondError as error:
        name = here.node or socket.gethostname()
        sys.stdout.write(f"{name} is clean but not back in service: {one_line(error)}\n")
