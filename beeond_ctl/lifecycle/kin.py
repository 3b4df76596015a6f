"""Components of a heterogeneous job that share one instance: who they are, and when they have left it.

`docs/lifecycle.md`, section "Components of a heterogeneous job", has the states. Jobs that do not share pay nothing.
"""

from __future__ import annotations

import time
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any, Final

from beeond_ctl import slurm
from beeond_ctl import state as states
from beeond_ctl.errors import (
    BeeondError,
    EndedError,
    JobGoneError,
    NodeError,
    PeerError,
    RequestError,
    one_line,
)
from beeond_ctl.lifecycle import asking as askings
from beeond_ctl.lifecycle import guard, steps
from beeond_ctl.lifecycle.here import Here
from beeond_ctl.lifecycle.team import open_team, telling
from beeond_ctl.request import Request, decode, encode

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from beeond_ctl.lifecycle.team import Combine, Team
    from beeond_ctl.slurm import Component

_PAUSE_S: Final = (0.05, 1.0)
"""Seconds between two looks at components that are ending: the first pause, and the longest."""


def alone(here: Here, kin: states.Kin | None = None) -> Here:
    """`here` before it is known what is asked for, and who serves: with a plan for nothing but the way to the leader.

    That is the first node of the component, which need not have storage.
    """
    storage = here.config.storage.model_copy(update={"without": []})
    config = here.config.model_copy(update={"storage": storage})
    return Here(config, replace(here.state, request=encode(Request()), kin=kin))


def learn(here: Here) -> None:
    """Learn who has part in the instance, and what a guest's is like. A no-op for a job that neither shares nor joins.

    Raises RequestError, JobGoneError, PeerError or NodeError.
    """
    asked = decode(here.state.request)
    if asked.join is not None:
        asking, problem = alone(here, _of_host(here, asked.join)), None
        advice = f"component {asked.join} does not share with this one: give it --beeond=share=N, N this one's number"
    elif asked.share is not None:
        asking, problem = _with_guests(here, asked.share)
        advice = (
            f"not all components of share={asked.share} have joined: "
            "give each of them --beeond=join=N, N this one's number"
        )
    else:
        return
    combine: dict[str, Combine] = {"shared": lambda reports: reports[asking.node]}
    try:
        with open_team(asking, "share", combine=combine, handlers={}) as team, telling(team, asking):
            if problem is not None:
                raise problem
            kin = asking.state.kin
            mine = {"request": here.state.request, "kin": asdict(kin)} if kin and asking.leads else {}
            # A guest's component has just been answered itself.
            patience_s = askings.patience_s(here, leads=asking.leads or asked.join is not None)
            told = steps.meet(asking, team, "shared", patience_s, **mine)
    except PeerError as error:
        # What guests did not do may be their user's mistake: none of their nodes is at fault for it.
        blamed = tuple(node for node in error.nodes if node in here.state.nodes)
        raise PeerError(f"{advice}; or else: {error}", blamed, user_fault=error.user_fault) from None
    here.state.request, here.state.kin = told["request"], states.read_kin(told["kin"])
    here.save()


def _of_host(here: Here, number: int) -> states.Kin:
    """On a guest: the way to the component that shares. Its first node asks Slurm, and tells the others."""
    asking = alone(here)
    combine: dict[str, Combine] = {"components": lambda reports: reports[asking.node]}
    path, own = here.config.slurm.path, here.state.job.job_id
    with open_team(asking, "kin", combine=combine, handlers={}) as team, telling(team, asking):
        found = []
        if asking.leads:
            components = askings.answered(here, lambda: slurm.components(path, own), check=team.check)
            found = [asdict(each) for each in components]
        patience_s = askings.patience_s(here, leads=asking.leads)
        told = steps.meet(asking, team, "components", patience_s, found=found)["found"]
    components = [slurm.Component(**each) for each in told]
    host = _chosen(components, [number], f"join={number}", own)[0]
    job = replace(here.state.job, job_id=host.job_id, restart=host.restart)
    mine = next(each for each in components if each.job_id == own)
    return states.Kin(job, slurm.expand_nodes(host.nodes), ((mine.number, own, here.state.nodes),))


def _with_guests(here: Here, share: str) -> tuple[Here, BeeondError | None]:
    """On a node of the component that shares: the way to the leader; there, who the guests are, or what is wrong."""
    job, nodes = here.state.job, here.state.nodes
    if not alone(here).leads:
        return alone(here), None
    try:
        components = askings.answered(here, lambda: slurm.components(here.config.slurm.path, job.job_id))
        guests = tuple(
            (each.number, each.job_id, slurm.expand_nodes(each.nodes))
            for each in _chosen(components, _numbers(share), f"share={share}", job.job_id)
        )
    except BeeondError as error:  # whatever it is: this component's other nodes are told
        return alone(here), error
    return alone(here, states.Kin(job, nodes, guests)), None


def _numbers(share: str) -> list[int]:
    return sorted({int(part) for part in share.split("+")})


def _chosen(components: Sequence[Component], numbers: Sequence[int], said: str, own: int) -> list[Component]:
    """Those with these numbers. Raises RequestError naming what `said` is wrong with, JobGoneError."""
    known = {each.number: each for each in components}
    if not known:
        raise RequestError(f"--beeond: {said} is for heterogeneous jobs, and this is none; leave it out")
    for number in numbers:
        if number not in known:
            there = ", ".join(map(str, known))
            raise RequestError(f"--beeond: {said}: this job has no component {number}; there are {there}")
        if known[number].job_id == own:
            raise RequestError(f"--beeond: {said}: component {number} is this one itself; name another")
        if not known[number].nodes:
            raise JobGoneError(f"component {number} of this job has no nodes ({known[number].state})")
    return [known[number] for number in numbers]


# --- tear-down --------------------------------------------------------------------------------------------


def wait_for_guests(here: Here, team: Team, *, strict: bool) -> str:
    """Wait until the guests' components have ended; who may still write, or hold what is not written. Raises PeerError.

    `strict` also counts those that ended with a lost node, or without having unmounted.
    """
    deadline_s = here.config.deadlines.meet
    # The leader asks until its deadline, and once more.
    late_s = 3 * slurm.TIMEOUT_S + here.config.deadlines.silence
    found = _who_may_write(here, time.monotonic() + deadline_s, strict=strict) if here.leads else ""
    return str(steps.meet(here, team, "parted", deadline_s + late_s, found=found)["found"])


def combine(here: Here) -> dict[str, Callable[[dict[str, dict[str, Any]]], dict[str, Any]]]:
    """The leader's part of `wait_for_guests`."""
    return {"parted": lambda reports: reports[here.node]}


def _who_may_write(here: Here, deadline: float, *, strict: bool) -> str:
    path, job_id = here.config.slurm.path, here.state.job.job_id
    wanted = _numbers(here.request.share or "")
    pause_s, longest_s = _PAUSE_S
    while True:
        try:
            guests = [each for each in slurm.components(path, job_id) if each.number in wanted]
            living = [each for each in guests if each.state in slurm.ALIVE]
            text = ", ".join(
                f"component {each.number} (job {each.job_id}) is {each.state}" for each in living
            )
            if not living:
                return _lost(here, guests) if strict else ""
            text = f"the guests may still write: {text}"
        except EndedError:
            raise
        except NodeError as error:
            text = f"it cannot be told whether the guests have ended: {one_line(error)}"
        if time.monotonic() > deadline:
            return text
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, longest_s)


def _lost(here: Here, guests: Sequence[Component]) -> str:
    """What of the guests' nodes did not end well. Raises NodeError."""
    failed = {each.number for each in guests if each.state == "NODE_FAIL"}
    trouble = []
    known = here.state.kin.guests if here.state.kin else ()
    folded = slurm.fold_nodes([node for _, _, nodes in known for node in nodes])
    states_of = slurm.node_states(here.config.slurm.path, folded) if folded else {}
    for number, job_id, nodes in known:
        for node in nodes:
            state, reason = states_of.get(node, ("", ""))
            words = {word.rstrip("*~#!%$@^-") for word in state.split("+")}
            if words & {"DOWN", "NOT_RESPONDING"} or "*" in state:
                trouble.append(f"{node} is {state}")
            elif guard.drain_prefix(job_id) in reason or "Epilog error" in reason:
                trouble.append(f"{node} is drained by its Epilog")
        if number in failed and not trouble:
            trouble.append(f"component {number} (job {job_id}) lost a node")
    return f"the guests may hold what is not written: {', '.join(trouble)}" if trouble else ""
