"""The steps that bring-up, tear-down and recovery share; each is safe to repeat.

Every step is announced in the state file by `Here.enter` before it is taken.
"""

from __future__ import annotations

import os
import shutil
import time
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from beeond_ctl import hints, logs, mounts, storage, supervisor
from beeond_ctl.errors import BeeondError, EndedError, NodeError, PeerError, one_line
from beeond_ctl.lifecycle import claims
from beeond_ctl.lifecycle.team import open_team
from beeond_ctl.plan import port_blocks

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from beeond_ctl.backends import Answer, Question, Service
    from beeond_ctl.lifecycle.here import Here
    from beeond_ctl.lifecycle.team import Combine, Team


def meet(here: Here, team: Team, point: str, timeout_s: float, **report: Any) -> dict[str, Any]:  # noqa: ANN401
    """Meet the others at `point`, with the waiting time in the event log. Raises PeerError."""
    with here.events.timed(f"meeting {point}"):
        return team.meet(point, report, timeout_s)


def combine(here: Here) -> dict[str, Combine]:
    """The leader's part of the meetings of `agree_on_ports`, `start_services` and `mount_and_settle`."""
    return {
        "prepared": partial(_agree, here),
        "registered": _see_that_none_is_missing,
        "settled": _see_that_none_is_missing,
    }


def _agree(here: Here, reports: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The leader's choice: the first block that is free everywhere. Raises PeerError for nodes of another edition."""
    edition = here.state.edition
    found_on = {node: report["edition"] for node, report in reports.items()}
    others = {node: other for node, other in found_on.items() if other not in {edition, None}}
    if others:
        found = ", ".join(f"{node} has {other}" for node, other in others.items())
        raise PeerError(
            f"{here.first_plan.backend} {edition} is on {here.node} and {found}; install the same everywhere",
            tuple(others),
        )
    for block in port_blocks(here.config, here.instance):
        if all(block in report["free"] for report in reports.values()):
            names = _known_names(reports)
            return {"block": block, "names": names, "secret": here.secret_name, "edition": edition}
    return {"block": None}


def _known_names(reports: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The job's names from whoever has them: a rebooted leader has forgotten what it told the others."""
    return next((report["names"] for report in reports.values() if report["names"]), {})


def agree_on_ports(
    here: Here, team: Team, free: list[int], names: dict[str, Any], *, wait_s: float = 0
) -> None:
    """Meet at `prepared`; take the port block, the names and the secret that the leader tells.

    Waits for `wait_s` seconds, or `deadlines.meet`. Raises NodeError, PeerError.
    """
    search_path = here.config.backend.path
    found = None  # a node that only mounts need not have the servers' programs, and takes the leader's word
    if here.serves:
        found = here.backend.edition(here.config, lambda name: supervisor.find_program(name, search_path))
        here.state.edition = found
    wait_s = wait_s or here.config.deadlines.meet
    answer = meet(here, team, "prepared", wait_s, free=free, names=names, edition=found)
    if answer["block"] is None:
        raise PeerError(
            f"no block of 16 ports out of {here.config.network.ports} is free on all nodes; widen network.ports "
            "or see what listens there (ss -ltnp)"
        )
    here.state.block, here.state.names = answer["block"], answer["names"]
    here.state.secret, here.state.edition = answer["secret"], answer["edition"]
    claims.keep_ports(here.config.paths.run, here.state.job.job_id, answer["block"])
    here.save()


def start_services(here: Here, team: Team) -> None:
    """Start all servers of this node at once, and meet when those of all nodes serve and are registered.

    Where the servers are managed, they are started when their manager, on the leader, is ready.
    """
    deadline_s = here.config.deadlines.start
    services = here.backend.services(here.plan, here.node, here.keys)
    questions = here.backend.membership(here.plan, here.keys) if here.leads else ()
    with here.step("starting") as extra:
        extra["services"] = len(services)
        if here.backend.MANAGED:
            start(here, [service for service in services if service.first], check=team.check)
            meet(here, team, "managed", deadline_s)
        started = launch(here, [service for service in services if not service.first and not service.last])
        check = _suspecting(here, team, questions[0]) if questions else team.check
        supervisor.wait_ready(started, deadline_s=deadline_s, check=check)
    meet(here, team, "serving", deadline_s)
    if here.backend.MANAGED:
        _start_last(here, team, [service for service in services if service.last or service.twice])
        missing = _wait_for_members(here, team, questions, "registering") if here.leads else {}
        late_s = here.config.deadlines.silence  # the leader asks until its deadline
        meet(here, team, "registered", deadline_s + late_s, missing=missing)


def _start_last(here: Here, team: Team, services: Sequence[Service]) -> None:
    """Start `services` now that all others serve; those that ran already are killed, since they have no clients yet."""
    with here.events.timed("starting the last"):
        for service in services:
            if service.twice:
                supervisor.kill(supervisor.Process(service.name, *here.state.processes[service.name]))
        start(here, services, check=team.check)


def mount_and_settle(here: Here, team: Team, *, fresh: bool = True) -> str:
    """Mount, and see that the file system is fit for use and laid out as it was asked for.

    Returns what was wrong with that; whose fault it is, is not known here. Which comes first is the file system's
    matter. `fresh` is one that is not laid out yet. Raises NodeError on the leader, PeerError.
    """
    if here.backend.mounts_early(here.plan):
        trouble = _trouble(mount, here)
        late = _settle(here, team, fresh=fresh)
        return trouble or late
    trouble = _settle(here, team, fresh=fresh)
    if trouble:
        here.enter("mounting")  # as others do: they have to be unmounted before the manager ends
    return trouble or _trouble(mount, here)


def _trouble(action: Callable[[Here], object], here: Here) -> str:
    try:
        action(here)
    except EndedError:
        raise
    except NodeError as error:
        return one_line(error)
    return ""


def _settle(here: Here, team: Team, *, fresh: bool) -> str:
    """Meet when the leader has seen that all servers work, and has laid out the file system if it is `fresh`.

    Returns why it could not be laid out, on the leader. Raises NodeError there, PeerError.
    """
    if not here.backend.MANAGED:
        return ""
    deadline_s, missing, trouble = here.config.deadlines.start, {}, ""
    if here.leads:
        questions = here.backend.usable(here.plan, here.keys)
        early = here.backend.arranges_early(here.plan)
        if fresh and early:
            trouble = _trouble(_arrange, here)
        missing = _wait_for_members(
            here, team, questions, "becoming usable"
        )  # in trouble, too: it tells of whom
        if fresh and not early and not missing:
            trouble = _trouble(_arrange, here)  # which may begin a resynchronisation
            missing = _wait_for_members(here, team, questions, "becoming whole")
    late_s = here.config.deadlines.silence  # the leader asks until its deadline
    meet(here, team, "settled", 3 * deadline_s + late_s, missing=missing)
    return trouble


def _arrange(here: Here) -> None:
    with here.events.timed("arranging"):
        for command in here.backend.arrange(here.plan, here.keys):
            supervisor.run(
                command, search_path=here.config.backend.path, deadline_s=here.config.deadlines.start
            )


_ASK_AGAIN_S: Final = 0.05
"""Seconds between two questions: a program is run for each, on the leader alone."""
_ASK_EARLY_S: Final = 0.3
"""The same, as long as nothing but "not yet" is to be expected."""


_SUSPICIOUS_S: Final = 0.5
"""Seconds that servers may take to start until their manager is looked at."""


def _suspecting(here: Here, team: Team, question: Question) -> Callable[[], None]:
    """A check for `wait_ready`: when servers take long it sees, once, whether their manager answers.

    They would wait for it for ever. It raises NodeError naming it: each node would blame its own servers.
    """
    began, looked = time.monotonic(), False

    def check() -> None:
        nonlocal looked
        team.check()
        if not looked and time.monotonic() > began + _SUSPICIOUS_S:
            looked = True
            _see_that_it_answers(here, question, began + here.config.deadlines.silence)

    return check


def _see_that_it_answers(here: Here, question: Question, deadline: float) -> None:
    while True:
        left_s = max(1.0, deadline - time.monotonic())
        answer = supervisor.ask(question.command, search_path=here.config.backend.path, deadline_s=left_s)
        if answer is not None and question.answered(answer):
            return
        if time.monotonic() > deadline:
            raise _silent(here, answer)
        time.sleep(_ASK_AGAIN_S)


def _silent(here: Here, answer: Answer | None) -> NodeError:
    name = here.backend.MANAGED
    said = "nothing" if answer is None else " ".join(answer.errors.decode(errors="replace").split())[-200:]
    return NodeError(
        f"{name} on {here.node} listens and does not answer ({said or 'nothing'}); see its log, and its device"
    )


def _wait_for_members(here: Here, team: Team, questions: Sequence[Question], what: str) -> dict[str, str]:
    """Ask until nobody is missing, or the deadline has passed; who is missing then, and what of them.

    Raises PeerError when a node fails meanwhile, NodeError when there is no answer.
    """
    search_path, deadline_s = here.config.backend.path, here.config.deadlines.start
    began = time.monotonic()
    deadline = began + deadline_s
    with here.events.timed(what) as extra:
        extra["asked"] = 0
        for question in questions:
            due = began + question.due_s
            while True:
                left_s = max(1.0, deadline - time.monotonic())
                answer = supervisor.ask(question.command, search_path=search_path, deadline_s=left_s)
                extra["asked"] += 1
                missing = question.missing(answer.output) if answer else {}
                there = answer is not None and question.answered(answer)
                if there and not missing:
                    break
                team.check()
                if time.monotonic() > deadline:
                    if not there:
                        raise _silent(here, answer)
                    return missing
                time.sleep(_ASK_EARLY_S if time.monotonic() + _ASK_EARLY_S < due else _ASK_AGAIN_S)
    return {}


def _see_that_none_is_missing(reports: dict[str, dict[str, Any]]) -> dict[str, Any]:
    for missing in (report["missing"] for report in reports.values()):
        if missing:
            what = ", ".join(f"{node}: {text}" for node, text in missing.items())
            raise PeerError(f"servers do not come to the file system: {what}; see their logs", tuple(missing))
    return {}


def start(here: Here, services: Sequence[Service], *, check: Callable[[], object] = bool) -> None:
    """Start `services` and wait until they are ready, or `check` raises something. Raises NodeError."""
    supervisor.wait_ready(launch(here, services), deadline_s=here.config.deadlines.start, check=check)


def launch(here: Here, services: Sequence[Service]) -> list[tuple[Service, supervisor.Process]]:
    """Start `services`, which need not be ready yet. Raises NodeError."""

    if services:
        logs.make(here.run_dir / "logs")

    def record(process: supervisor.Process) -> None:
        here.state.processes[process.name] = (process.pid, process.start_time)
        here.save()

    return [
        (
            service,
            supervisor.start(
                service, token=here.state.token, search_path=here.config.backend.path, record=record
            ),
        )
        for service in services
    ]


def mount(here: Here) -> None:
    """Mount the file system on this node, seen by nobody but root until it is given to the user. Raises NodeError."""
    with here.step("mounting"):
        how = here.backend.mount(here.plan, here.node, here.keys)
        claims.claim_mount(here.config.paths.run, here.state.job.job_id, how.point)
        mounts.make_point(how.point)
        here.state.mount = how.point
        here.save()
        start(here, [helper for helper in how.helpers if not lives(here, helper.name)])
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


def damage(here: Here) -> str:
    """What of the instance no longer runs on this node; empty when all of it does.

    A client that was started again counts as damage to whoever began before: it is known by pid and start time.
    """
    how = here.backend.mount(here.plan, here.node, here.keys)
    running = (*here.backend.services(here.plan, here.node, here.keys), *how.helpers, how.service)
    dead = [service.name for service in running if service is not None and not lives(here, service.name)]
    if mounts.mount_at(how.point) is None:
        dead.append("mount")
    return f"{', '.join(dead)} died" if dead else ""


def roll_back(here: Here) -> None:
    """Remove an instance that no user has seen. Raises NodeError naming what could not be removed.

    A client that outlives its file system's manager cannot be unmounted, so where there is one the nodes meet between
    unmounting and stopping. Nobody mounts before all have started, and whoever does not come is passed over.
    """
    if here.backend.MANAGED and here.state.phase not in {"claimed", "preparing", "starting"}:
        try:
            with open_team(here, "roll-back", combine={}, handlers={}) as team:
                unmount(here)
                meet(here, team, "unmounted", here.config.deadlines.stop)
        except (PeerError, NodeError) as error:
            here.events.log("roll-back alone", message=one_line(error))
    remove_instance(here)


def remove_instance(here: Here, *, lost: Sequence[str] = ()) -> None:
    """Remove whatever there is of the instance on this node, its data too. A no-op where there is nothing.

    `lost`: homes that are not there, and are given up. Raises NodeError naming what could not be removed.
    """
    unmount(here)
    stop(here, keep=False)
    wipe(here, lost=lost)


def unmount(here: Here) -> None:
    """Unmount; processes that hold the mount are ended, and named in the event log. Raises NodeError."""
    # Its usual point is no other job's: it may have been made in the moment before the state could say so.
    point = here.state.mount or f"{here.config.mount.root}/{here.instance.job_id}"
    if here.state.mount is None and not os.path.lexists(point):
        return
    with here.step("unmounting") as extra:
        _see_that_it_is_managed(here, point)
        try:
            killed = mounts.unmount(point, deadline_s=here.config.deadlines.stop, uid=here.state.job.uid)
        except NodeError:
            with suppress(NodeError):  # it is detached
                mounts.remove_point(point)
            raise
        if killed:
            extra["ended"] = killed
        mounts.remove_point(point)
        here.state.mount = None


def _see_that_it_is_managed(here: Here, point: str) -> None:
    """Start the manager again if it has died: without it no node's client can be unmounted. Never fails."""
    name = here.backend.MANAGED
    if not name or not here.leads or lives(here, name) or mounts.mount_at(point) is None:
        return
    here.events.log("revived", services=[name])
    try:
        services = here.backend.services(here.plan, here.node, here.keys)
        start(here, [service for service in services if service.name == name])
    except BeeondError as error:  # clients give up after a while; and the deadline counts for each of them
        here.events.log("not-revived", services=[name], message=one_line(error))


def stop(here: Here, *, keep: bool) -> None:
    """Stop all processes of the instance at once. Raises NodeError.

    They end in order, which takes BeeGFS seconds, only if there is data to `keep`: what is wiped need not be whole.
    """
    with here.step("stopping") as extra:
        known = [supervisor.Process(name, *process) for name, process in here.state.processes.items()]
        killed = supervisor.stop(
            known, token=here.state.token, timeout_s=here.config.deadlines.stop, in_order=keep
        )
        if killed:
            extra["killed"] = killed
        here.state.processes = {}


def wipe(here: Here, *, lost: Sequence[str] = ()) -> None:
    """Remove the data and prove that it is gone, but for homes that are `lost`. Raises NodeError."""
    with here.step("wiping") as extra:
        if here.serves:
            receipts = storage.wipe(
                here.plan,
                here.config.storage.wipe,
                deadline_s=here.config.deadlines.wipe,
                lost=lost,
                leave=not here.state.ran,  # kept data of an earlier run of the job is why this one came to nothing
            )
            extra["receipts"] = [receipt.as_dict() for receipt in receipts]
    claims.release(here.config.paths.run, here.state.job.job_id)


def forget(here: Here) -> None:
    """Remove the run directory: the node is clean."""
    here.events.log("clean")
    hints.remove(here.config.paths.run, here.state.job.job_id)
    logs.remove(here.run_dir / "logs")
    shutil.rmtree(here.run_dir)
