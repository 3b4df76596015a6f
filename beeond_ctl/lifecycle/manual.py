"""Instances without Slurm: `beeond-ctl up` and `down`, by the code that Prolog and Epilog run.

`up` and `down` run where an admin typed them, and start `up_here` and `down_here` on each node, in one round.
"""

from __future__ import annotations

import base64
import json
import os
import pwd
import re
import secrets
import shlex
import socket
import sys
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from beeond_ctl import config as configuration
from beeond_ctl import slurm
from beeond_ctl import state as states
from beeond_ctl.errors import NodeError, PeerError, UsageError, one_line
from beeond_ctl.launch import all_done, fold, on_nodes
from beeond_ctl.lifecycle import bringup, guard, own, recover, steps, teardown
from beeond_ctl.lifecycle.here import Here
from beeond_ctl.plan import FIRST_OWN_ID, LAST_OWN_ID, Job, make_plan
from beeond_ctl.request import JobNames, encode, expand_all, needs_scheduler

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from beeond_ctl.config import SiteConfig
    from beeond_ctl.launch import Answer, Launcher
    from beeond_ctl.request import Request

_LONGEST_S: Final = 7 * 86400.0
"""Copying has its own deadline for standing still."""
_CLEAN: Final = "beeond-ctl-up=nothing-left"
"""A line by which a node says that its part of `up` failed, and left nothing. One that was killed says nothing."""


def read_nodefile(text: str, name: str) -> tuple[str, ...]:
    """Nodes named in a host file: the first word of each line, without `:SLOTS`, each once. Raises UsageError."""
    nodes: dict[str, None] = {}
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if words:
            node = re.sub(r":[0-9]+$", "", words[0])
            if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]*", node):
                raise UsageError(f"{name}: line {number}: {words[0]!r} is not the name of a node")
            nodes[node] = None
    if not nodes:
        raise UsageError(f"{name}: names no node")
    return slurm.expand_nodes(slurm.fold_nodes(list(nodes)))


def up(
    config: SiteConfig, nodes: Sequence[str], user: str, asked: Request, *, launcher: Launcher | None
) -> Iterator[str]:
    """Bring an instance up on `nodes` for `user`; yields what to tell the admin, its id and mount point last.

    Its id is told on stderr before a node hears of it: whatever happens to this process, what they make has a name.
    Raises UsageError, RequestError, or NodeError naming the nodes at fault, and those that may not have rolled back.
    """
    if asked.share is not None or asked.join is not None:
        raise UsageError("share and join are for components of Slurm's heterogeneous jobs; leave them out")
    if needs_scheduler(asked):
        raise UsageError("%x, %A and %a are names of Slurm's jobs; write the paths without them")
    try:
        known = pwd.getpwnam(user)
    except KeyError:
        raise UsageError(f"--user: {user} is not known here; name a user of all these nodes") from None
    run_id = FIRST_OWN_ID + secrets.randbelow(LAST_OWN_ID - FIRST_OWN_ID + 1)
    job = Job(run_id, known.pw_uid, known.pw_gid, user)
    plan = make_plan(config, asked, job, tuple(nodes))
    for inward in (True, False):  # no node need find out
        expand_all(asked, JobNames(run_id, user), inward=inward, mount=plan.mount_point)
    order = {
        "id": run_id, "uid": job.uid, "gid": job.gid, "user": user, "nodes": slurm.fold_nodes(nodes),
        "request": encode(asked),
    }  # fmt: skip
    word = base64.urlsafe_b64encode(json.dumps(order).encode()).decode()
    _tell(f"instance {run_id} on {order['nodes']}; what takes it down: {_undo(run_id, nodes)}")
    try:
        answers = on_nodes(
            nodes,
            ["beeond-ctl", "up", "--here", word],
            timeout_s=_LONGEST_S,
            fanout=len(nodes),
            launcher=launcher,
        )
    except BaseException:
        _tell(f"{order['nodes']} may go on with it; when they have ended, run: {_undo(run_id, nodes)}")
        raise
    left = [answer.node for answer in answers if _CLEAN not in answer.output.splitlines()]
    bad = [_without_mark(answer) for answer in answers if answer.code != 0]
    if bad:
        for told, text in fold(bad):
            yield f"{slurm.fold_nodes(told)}: {text}"
        # A node that was not reached, lost or killed may have come up nonetheless.
        undo = f"; {slurm.fold_nodes(left)} may have a part of it: {_undo(run_id, left)}" if left else ""
        raise NodeError(
            f"no instance: see what {slurm.fold_nodes([answer.node for answer in bad])} said{undo}"
        )
    yield f"{run_id} {plan.mount_point}"


def _tell(text: str) -> None:
    """On stderr, at once; on stdout is what scripts read."""
    sys.stderr.write(f"beeond-ctl: {text}\n")
    sys.stderr.flush()


def _undo(run_id: int, nodes: Sequence[str]) -> str:
    return f"beeond-ctl down {run_id} -w {shlex.quote(slurm.fold_nodes(nodes))}"


def _without_mark(answer: Answer) -> Answer:
    said = [line for line in answer.output.splitlines() if line != _CLEAN]
    return replace(answer, output="\n".join(said))


def down(
    config: SiteConfig, run_id: int, nodes: Sequence[str] | None, *, launcher: Launcher | None
) -> Iterator[str]:
    """Stage out and take down what `up` made; yields what to tell the admin.

    Raises UsageError when the nodes are not known, NodeError when a node did not end clean.
    """
    if nodes is None:
        state = states.read(config.paths.run, run_id)
        if state is None:
            raise UsageError(
                f"the nodes of {run_id} are not known here; name them with --nodes or --nodefile"
            )
        nodes = state.nodes
    answers = on_nodes(
        nodes,
        ["beeond-ctl", "down", "--here", str(run_id)],
        timeout_s=_LONGEST_S,
        fanout=len(nodes),
        launcher=launcher,
    )
    yield from all_done(answers, f"{run_id} is not down")


def up_here(config_path: Path, word: str) -> None:
    """This node's part of `up`. Raises whatever bring-up does, after this node has rolled back, and said so."""
    config = configuration.load(config_path)
    order = _order(word)
    try:
        _up_here(config, order)
    except BaseException:
        if not states.run_dir(config.paths.run, order["id"]).exists():
            sys.stdout.write(f"{_CLEAN}\n")
        raise


def _up_here(config: SiteConfig, order: dict[str, Any]) -> None:
    job = Job(order["id"], order["uid"], order["gid"], order["user"])
    nodes = slurm.expand_nodes(order["nodes"])
    state = states.State(
        job=job,
        nodes=nodes,
        node=_own_name(nodes),
        request=order["request"],
        config=config.model_dump(mode="json"),
    )
    try:
        found = pwd.getpwnam(job.user).pw_uid
    except KeyError:
        raise NodeError(f"{state.node}: user {job.user} is not known here") from None
    if found != job.uid:
        raise NodeError(f"{state.node}: user {job.user} is {found} here and {job.uid} where `up` was typed")
    here = Here(config, state)
    with (
        guard.accounted(config, state.node, job.job_id, ends=False),
        states.locked(config.paths.run, job.job_id, "try again"),
    ):
        states.create(config.paths.run, state)
        here.log_begin("up")
        try:
            with here.events.timed("bring-up"), guard.interruptible():
                bringup.bring_up(here)
        except BaseException as error:
            fault = "peer" if isinstance(error, PeerError) else "node"
            here.events.log("gave-up", message=one_line(error), fault=fault)
            if here.state.phase != "claimed":
                steps.remove_instance(here)
            steps.forget(here)
            raise


def down_here(config: SiteConfig, run_id: int) -> None:
    """This node's part of `down`, which is that of `recover` where data is kept; nothing to do where there is nothing.

    Raises RetainedError when the data was kept, NodeError when something could not be removed.
    """
    if not own.without_slurm(config, run_id):
        raise UsageError(
            f"{run_id} is a job of Slurm's, whose Epilog takes its instance down; see also `recover`"
        )
    with states.locked(config.paths.run, run_id, "try again"):
        state = states.read(config.paths.run, run_id)
        if state is not None and state.phase != "retained":
            here = Here(configuration.recorded(state.config, state.job.job_id), state)
            here.events.log("down")
            with (
                guard.accounted(config, here.node, run_id, ends=True),
                here.events.timed("tear-down"),
                guard.interruptible(),
            ):
                teardown.end(here, "down", prepare=teardown.revive)
            return
    # Of kept data, or after a reboot, nothing is attached, and a source that is missing may have been lost.
    if state is not None or recover.recorded(config, run_id):
        recover.on_this_node(config, run_id, discard=False, proved=[])


def _order(word: str) -> dict[str, Any]:
    order: Any = None
    with suppress(ValueError):
        order = json.loads(base64.urlsafe_b64decode(word))
    if not isinstance(order, dict) or not FIRST_OWN_ID <= order.get("id", 0) <= LAST_OWN_ID:
        raise UsageError("--here is for `beeond-ctl up` itself; leave it out")
    return order


def _own_name(nodes: Sequence[str]) -> str:
    full = socket.gethostname()
    for name in (os.environ.get("SLURMD_NODENAME", ""), full, full.partition(".")[0], socket.getfqdn()):
        if name in nodes:
            return name
    raise NodeError(f"{full}: is not in {slurm.fold_nodes(nodes)}; name the nodes as their `hostname` does")
