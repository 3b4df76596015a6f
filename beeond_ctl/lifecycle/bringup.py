"""Bring-up: what the Prolog does on each node. `docs/lifecycle.md`, section "Bring-up", has the steps."""

from __future__ import annotations

import os
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from beeond_ctl import bb, slurm, storage
from beeond_ctl import config as configuration
from beeond_ctl import state as states
from beeond_ctl.aside import tried
from beeond_ctl.errors import (
    EndedError,
    JobGoneError,
    NodeError,
    OutsideError,
    PeerError,
    RequestError,
    UserError,
    one_line,
)
from beeond_ctl.lifecycle import claims, fault, guard, kin, probe, stage, steps, watch
from beeond_ctl.lifecycle.asking import answered, patience_s
from beeond_ctl.lifecycle.here import Here
from beeond_ctl.lifecycle.team import open_team, telling
from beeond_ctl.plan import port_blocks
from beeond_ctl.request import Request, encode, needs_scheduler

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    from beeond_ctl.lifecycle.team import Team


def prolog(environ: Mapping[str, str], config_path: Path = configuration.DEFAULT_PATH) -> int:
    """Slurm's Prolog on one node; the exit code for Slurm.

    0 also where the job will fail by its user's mistake, or nobody's: `task_init` raises that, and no node is drained.
    Raises BeeondError where this node is at fault; the node has then been drained with the reason.
    """
    request = environ.get(slurm.REQUEST_VARIABLE)
    has_directives = bb.MARK in environ.get("SLURM_JOB_COMMENT", "")
    if not request and not has_directives:
        return 0
    where = slurm.prolog(environ)
    config = guard.configured(config_path, where.node, where.job.job_id)
    state = states.State(
        job=where.job,
        nodes=where.nodes,
        node=where.node,
        request=request or encode(Request()),
        config=config.model_dump(mode="json"),
    )
    here = Here(config, state)
    with (
        guard.accounted(config, where.node, where.job.job_id, ends=False),
        guard.draining(config, where.node, where.job.job_id),
        states.locked(config.paths.run, where.job.job_id, "try again", wait_s=guard.LOCK_S),
    ):
        states.create(config.paths.run, state)
        here.log_begin("prolog")
        try:
            with here.events.timed("bring-up"), guard.interruptible():
                if has_directives and not _learn(here, request):
                    steps.forget(here)
                    return 0
                kin.learn(here)
                bring_up(here, listed=has_directives)
        except (UserError, RequestError) as error:
            _give_up(here, one_line(error), "user")
        except JobGoneError as error:
            here.events.log("gone", message=one_line(error))
            _give_up(here, one_line(error), "gone")
        except PeerError as error:
            text, leads = one_line(error), _leads(here)
            if leads and here.node in error.nodes and not error.user_fault:  # nobody else would drain it
                _give_up(here, f"no file system for this job: {text}", "node")
                raise NodeError(text) from error
            if many := _are_most(here, error.nodes) and not error.user_fault:
                text += "; these are most of the job's nodes, so none is drained on another's word"
            whose = "user" if error.user_fault else "peer"
            _give_up(here, text if error.user_fault else f"no file system for this job: {text}", whose)
            if leads and not many and not error.user_fault:
                _drain_missing(here, error)
        except OutsideError as error:
            _give_up(here, f"no file system for this job: {here.node}: {one_line(error)}", "peer")
        except BaseException as error:
            _give_up(here, f"no file system for this job: {here.node}: {one_line(error)}", "node")
            raise
        else:
            watch.begin(here)
    return 0


def bring_up(here: Here, *, listed: bool = False) -> None:
    """Everything from an empty node to a usable file system with the input in it.

    `listed`: its sources may have been listed while the job was pending.
    Raises UserError, RequestError, JobGoneError, PeerError, OutsideError or NodeError; tear-down finds what was made.
    """
    here.events.log("planned", backend=here.first_plan.backend, targets=len(here.first_plan.targets))
    storage.name_instance(here.first_plan)
    staging = stage.Stage(here, inward=True, listed=listed)
    judges = fault.combine(here.first_plan.mount_point)
    with (
        open_team(
            here,
            "prolog",
            combine={**steps.combine(here), **judges, **staging.combine},
            handlers=staging.handlers,
        ) as team,
        telling(team, here),
    ):
        with here.step("preparing"):
            job_id = here.state.job.job_id
            free = claims.claim_ports(here.config.paths.run, job_id, port_blocks(here.config, here.instance))
            storage.prepare(here.plan, here.node)
            if here.backend.ROOT_IS_DATA and here.serves:
                # Before anything is mounted: GlusterFS's clients keep the owner of the root they saw first.
                for target in here.plan.targets:
                    _give_to_user(here, target.data)
        asks = needs_scheduler(here.request)
        wait_s = patience_s(here, leads=here.leads) if asks else here.config.deadlines.meet
        steps.agree_on_ports(here, team, free, _names(here, team), wait_s=wait_s)
        if here.state.names:  # a stage-out after a reboot of all nodes needs them
            storage.set_names(here.plan, here.state.names)
        here.transfers(inward=True, lengths=True)  # what is no path is told before anything is started
        stage.check_destinations(here)
        with _excused_for_ports(here):
            steps.start_services(here, team)
        with fault.unless_another_fell_silent(here, team):
            trouble = steps.mount_and_settle(here, team)
            _see_that_no_port_was_taken(here, trouble)
        _probe(here, team, trouble)
        if here.request.stage_in:
            here.enter("staging-in")
            staging.run(team)
        with fault.unless_another_fell_silent(here, team):
            fault.see_that_all_lives(here)
        _announce(here)
        steps.meet(here, team, "ready", here.config.deadlines.meet)
        here.events.log("usable", took=here.events.took(), took_s=here.events.took_s())


def _learn(here: Here, request: str | None) -> bool:
    """Have the leader ask Slurm for the job's directives, and take their request. False: there is nothing asked for.

    Raises RequestError, JobGoneError, PeerError or NodeError.
    """
    asking = kin.alone(here)
    combine = {"asked": lambda reports: reports[asking.node]}
    with open_team(asking, "directives", combine=combine, handlers={}) as team, telling(team, asking):
        path, job_id = here.config.slurm.path, here.state.job.job_id
        found = answered(here, lambda: bb.asked(path, job_id), check=team.check) if asking.leads else ""
        wait_s = patience_s(here, leads=asking.leads)
        found = steps.meet(asking, team, "asked", wait_s, request=found)["request"]
    if found and request:
        raise RequestError(
            "this job has both --beeond and #BB_LUA directives; say all of it in one of the two ways"
        )
    here.state.request = found or request or here.state.request
    here.save()
    return bool(found or request)


def _leads(here: Here) -> bool:
    """`here.leads`; of a job that has no plan, as none of its nodes has storage, its first node does."""
    try:
        return here.leads
    except RequestError:
        return here.node == here.state.nodes[0]


def _are_most(here: Here, nodes: Collection[str]) -> bool:
    """Whether `nodes` are more than half of those that take part: the cause is then hardly in each of them."""
    kin = here.state.kin
    count = len(kin.nodes) + sum(len(guests) for _, _, guests in kin.guests) if kin else len(here.state.nodes)
    return 2 * len(nodes) > count


def _drain_missing(here: Here, error: PeerError) -> None:
    # A node that never answered cannot drain itself; those that told us their fault have done so.
    for node in error.nodes:
        if node != here.node:
            try:
                if not slurm.reason(here.config.slurm.path, node):
                    text = guard.drain_prefix(here.state.job.job_id) + one_line(error)
                    slurm.drain(here.config.slurm.path, node, text)
            except NodeError as failure:
                here.events.log("not-drained", peer=node, message=one_line(failure))


def _give_up(here: Here, text: str, fault: str) -> None:
    """Undo everything, and leave the text that fails the job. `fault` says whose it was, for the event log."""
    if here.state.phase != "claimed":  # an impossible request has made nothing, and has no plan to remove
        with here.events.timed("roll-back"):
            steps.roll_back(here)
    here.state.reason = text
    states.write_atomically(here.run_dir / "failure", text + "\n")
    here.enter("failed")
    here.events.log("gave-up", message=text, fault=fault)


@contextmanager
def _excused_for_ports(here: Here) -> Iterator[None]:
    """Raises OutsideError where something fails in the block for want of a port that was taken in time."""
    try:
        yield
    except (EndedError, OutsideError):
        raise
    except NodeError as error:
        _see_that_no_port_was_taken(here, one_line(error))
        raise


def _see_that_no_port_was_taken(here: Here, trouble: str) -> None:
    """Raises OutsideError if that may be why there is `trouble`: any user can reckon which ports a job has."""
    if trouble and ((users := claims.taken(here.plan.block)) or "address already in use" in trouble.lower()):
        told = f"{users}: {trouble}" if users else trouble
        raise OutsideError(
            f"ports of this job were taken after it had claimed them ({told}); submit it again"
        )


def _names(here: Here, team: Team) -> dict[str, Any]:
    """What only Slurm knows of the job; asked by the leader alone, and only if a path needs it.

    Raises JobGoneError, OutsideError, NodeError or PeerError.
    """
    if not here.leads or not needs_scheduler(here.request):
        return {}
    path, job_id = here.config.slurm.path, here.state.job.job_id
    fields = answered(here, lambda: slurm.job_fields(path, job_id), check=team.check)
    if not fields:
        raise JobGoneError(f"Slurm no longer knows job {job_id}")
    names: dict[str, Any] = {"job_name": fields.get("JobName", "")}
    if fields.get("ArrayJobId", "").isdigit():
        names["array_job_id"] = int(fields["ArrayJobId"])
    if fields.get("ArrayTaskId", "").isdigit():
        names["array_task_id"] = int(fields["ArrayTaskId"])
    return names


def _probe(here: Here, team: Team, trouble: str) -> None:
    """Show that every node reaches every server, and that what one node writes another one reads.

    Who gets no answer, or had `trouble` before, says so at the meeting, where it turns out whose fault that is. Raises
    NodeError, PeerError.
    """
    plan = here.plan
    point, deadline_s = Path(plan.mount_point), here.config.deadlines.start
    before = plan.nodes[plan.node_index[here.node] - 1]
    own_servers = fault.servers(here)
    fault.see_that_all_lives(here, own_servers)
    missed = ""
    if trouble and here.backend.mount(plan, here.node, here.keys).service is not None:
        missed, trouble = trouble, ""  # a client that ends does so for want of some server

    def check() -> None:
        fault.see_that_all_lives(here, own_servers)
        team.check()

    def read() -> None:
        probe.check(point, before)
        if here.leads and not here.backend.ROOT_IS_DATA:
            _give_to_user(here, str(point))

    early = here.backend.ROOT_IS_DATA
    for meeting, action, is_users in (
        ("mounted", partial(probe.write, point, here.node), early),
        ("probed", read, early or len(plan.nodes) > 1),  # the leader may have read, and given the root away
    ):
        with here.events.timed("probe"):
            wrong = missed
            if not (missed or trouble):
                action = partial(probe.excusing, action) if is_users else action
                wrong = tried(action, within_s=deadline_s, check=check)
            fault.see_that_all_lives(here, own_servers)
            try:
                fault.see_that_all_lives(here)
            except NodeError as error:  # its client; that may be for want of another's servers
                wrong = str(error)
        fault.see_that_it_answers(here, team, meeting, trouble=trouble, wrong=wrong)


def _give_to_user(here: Here, path: str) -> None:
    os.chmod(path, 0o700)
    os.chown(path, here.state.job.uid, here.state.job.gid)


def _announce(here: Here) -> None:
    """Let the job find its file system. From here on the user's program may have run."""
    plan = here.plan
    lines = {
        "BEEOND": plan.mount_point,
        "BEEOND_JOB_ID": str(plan.job.job_id),
        "BEEOND_NODES": slurm.fold_nodes(plan.own_nodes),
    }
    states.write_atomically(
        here.run_dir / "env", "".join(f"{name}={value}\n" for name, value in lines.items())
    )
    here.state.ran = True
    here.enter("ready")
