"""Who is at fault when a new file system does not answer: `docs/lifecycle.md`, "Whose fault it is".

A file system that spans nodes hangs on all of them when one has lost a server. No node may be drained for another's
fault, nor all of them because nobody can tell.
"""

from __future__ import annotations

import errno
import os
import secrets
import time
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from beeond_ctl import aside, supervisor
from beeond_ctl.errors import NodeError, PeerError
from beeond_ctl.lifecycle import probe, steps
from beeond_ctl.slurm import fold_nodes

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from beeond_ctl.lifecycle.here import Here
    from beeond_ctl.lifecycle.team import Combine, Team

_NOTICED_S: Final = 1.0
"""After this long the leader has seen that a node is silent, and everybody has heard of it."""


def servers(here: Here) -> list[str]:
    """The names of this node's own servers."""
    return [service.name for service in here.backend.services(here.plan, here.node, here.keys)]


def see_that_all_lives(here: Here, names: Iterable[str] | None = None) -> None:
    """Raises NodeError naming what of the instance was started on this node, all or of `names`, and runs no more."""
    dead = [
        name for name in (here.state.processes if names is None else names) if not steps.lives(here, name)
    ]
    if dead:
        raise NodeError(f"{', '.join(dead)} died while the file system came up; see the services' logs")


def _own_servers(here: Here) -> str:
    """What is wrong with this node's servers; empty if nothing is to be seen."""
    told = []
    for name in servers(here):
        process = here.state.processes.get(name)
        if process is None or not steps.lives(here, name):
            told.append(f"{name} died")
        elif supervisor.stopped(supervisor.Process(name, *process)):
            told.append(f"{name} is stopped (SIGSTOP, or a debugger)")
    return ", ".join(told)


def own_devices(here: Here) -> str:
    """Which of this node's devices takes no data; empty if all do. Beside the data: an image can fail by itself."""
    within_s = here.config.deadlines.start / 2
    for target in here.plan.targets if here.serves else ():
        if wrong := aside.tried(partial(_write, Path(target.data).parent), within_s=within_s):
            return f"{target.home} takes no data ({wrong})"
    return ""


def _write(directory: Path) -> None:
    """A byte onto the device. `directory` is root's alone. Raises OSError, but not for one that is full: it answers."""
    path = directory / f".beeond-probe-{secrets.token_hex(8)}"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        descriptor = os.open(path, flags, 0o600)
        try:
            os.unlink(path)
            os.write(descriptor, b"x")
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        if error.errno not in {errno.ENOSPC, errno.EDQUOT}:
            raise


def combine(point: str) -> dict[str, Combine]:
    """The leader's part of the meetings of `see_that_it_answers`, for the mount `point`."""
    trouble: dict[str, str] = {}
    wrong: dict[str, str] = {}

    def gather(reports: dict[str, dict[str, Any]]) -> dict[str, Any]:
        for found, what in ((trouble, "trouble"), (wrong, "wrong")):
            found.update({node: report[what] for node, report in reports.items() if report[what]})
        return {"wrong": bool(trouble or wrong)}

    def judge(reports: dict[str, dict[str, Any]]) -> dict[str, Any]:
        raise _verdict(point, trouble, wrong, reports)

    return {"mounted": gather, "probed": gather, "judged": judge}


def _verdict(
    point: str, trouble: dict[str, str], wrong: dict[str, str], own: dict[str, dict[str, str]]
) -> PeerError:
    """Who is at fault: `trouble` nodes had until all had mounted, `wrong` is what they saw then, and `own` what of
    themselves.

    A device may only be slow, so it counts where all servers are well. Who cannot mount, or gets no answer, is blamed
    for that alone where that is not most: of a node that nobody reaches, it is the others that get no answer. What the
    user may have done to the probes proves nothing against a node.
    """
    no_answer = {**wrong, **trouble}
    proven = {node: text for node, text in no_answer.items() if not text.endswith(probe.PERHAPS_THE_USERS)}
    where, count = fold_nodes([node for node in own if node in no_answer]), len(own)
    for kind in ("servers", "devices"):
        guilty = {node: told[kind] for node, told in own.items() if told[kind]}
        if guilty:
            told = "; ".join(f"{node}: {text}" for node, text in guilty.items())
            return PeerError(f"{told}: {point} does not answer on {where}", tuple(guilty))
    for blamed, most, what in (
        (trouble, count, "did not come up"), (proven, count - 1, "does not answer")
    ):  # fmt: skip
        if blamed and (count == 1 or 2 * len(blamed) <= most):
            node, text = next(iter(blamed.items()))
            also = f" (and on {fold_nodes(list(blamed)[1:])})" if len(blamed) > 1 else ""
            return PeerError(f"{node}: {point} {what} ({text}){also}; see the services' logs", tuple(blamed))
    text = next(iter(no_answer.values()))
    return PeerError(
        f"{point} does not answer on {where} ({text}), and nothing is known to be wrong with any of its {count} nodes; "
        "see the services' logs"
    )


def see_that_it_answers(here: Here, team: Team, meeting: str, *, trouble: str, wrong: str) -> None:
    """Come to `meeting` with the `trouble` of mounting or laying out here, or what is `wrong` since, if anything is.

    If it is anywhere, every node looks at its own servers and devices, and the leader judges. Raises NodeError where
    that is this node's fault, PeerError elsewhere.
    """
    deadlines = here.config.deadlines
    # Another's deadline may have begun later, and who is silent then is to be known.
    others_s = 4 * deadlines.start + deadlines.silence + _NOTICED_S
    if steps.meet(here, team, meeting, others_s, trouble=trouble, wrong=wrong)["wrong"]:
        try:
            steps.meet(here, team, "judged", others_s, servers=_own_servers(here), devices=own_devices(here))
        except PeerError as error:
            if here.node in error.nodes and not error.user_fault:
                raise NodeError(str(error)) from error
            raise


@contextmanager
def unless_another_fell_silent(here: Here, team: Team) -> Iterator[None]:
    """Where a node is cut off or killed, others miss its servers before it counts as silent: it is at fault alone.

    What was raised within waits for `team.check` to say so. A server of this node's own that has died needs no waiting.
    Whom the others wait for in vain meanwhile is this node, which knows better why.
    """
    try:
        yield
    except NodeError:
        until = time.monotonic() + here.config.deadlines.silence + _NOTICED_S
        own = servers(here)
        while len(here.plan.nodes) > 1 and time.monotonic() < until:
            see_that_all_lives(here, own)
            try:
                team.check()
            except PeerError as error:
                if here.node in error.nodes:
                    break
                raise
            time.sleep(0.1)
        raise
