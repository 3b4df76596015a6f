"""Who is at fault when a new file system does not answer: `docs/lifecycle.md`, "Whose fault it is".

A file system that spans nodes hangs on all of them when one has lost a server. No node may be drained for another's
fault, nor all of them because nobody can tell.
"""

from __future__ import annotations

import os
import secrets
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from beeond_ctl import aside, supervisor
from beeond_ctl.errors import NodeError, PeerError
from beeond_ctl.lifecycle import steps
from beeond_ctl.slurm import fold_nodes

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from beeond_ctl.lifecycle.here import Here
    from beeond_ctl.lifecycle.team import Combine, Team

_NOTICED_S: Final = 1.0
"""After this long the leader has seen that a node is silent, and everybody has heard of it."""
_LOOKS: Final = 5
_LOOK_S: Final = 0.2
_WRITE_S: Final = 3.0
"""How long a device may take for a byte, while nothing else is done on it."""


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


def own_trouble(here: Here) -> str:
    """What is wrong with this node's own servers or devices, as far as that can be seen; empty if nothing is."""
    running = here.state.processes
    processes = (supervisor.Process(name, *running[name]) for name in servers(here) if name in running)
    stuck = supervisor.stuck(processes, looks=_LOOKS, pause_s=_LOOK_S)
    trouble = [f"{name} {why}" for name, why in stuck.items()]
    for target in here.plan.targets if here.serves else ():
        if wrong := aside.tried(lambda home=target.home: _write(Path(home)), within_s=_WRITE_S):  # type: ignore[misc]
            trouble.append(f"{target.home} takes no data ({wrong})")
            break  # the next may take as long
    return "; ".join(trouble)


def _write(home: Path) -> None:
    """A byte onto the device. `home` is root's alone. Raises OSError."""
    path = home / f".beeond-probe-{secrets.token_hex(8)}"
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        os.unlink(path)
        os.write(descriptor, b"x")
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def combine(point: str) -> dict[str, Combine]:
    """The leader's part of the meetings of `see_that_it_answers`, for the mount `point`."""
    wrong: dict[str, str] = {}

    def gather(reports: dict[str, dict[str, Any]]) -> dict[str, Any]:
        wrong.update({node: report["wrong"] for node, report in reports.items() if report["wrong"]})
        return {"wrong": bool(wrong)}

    def judge(reports: dict[str, dict[str, Any]]) -> dict[str, Any]:
        own = {node: report["own"] for node, report in reports.items() if report["own"]}
        raise _verdict(point, wrong, own, len(reports))

    return {"mounted": gather, "probed": gather, "judged": judge}


def _verdict(point: str, wrong: dict[str, str], own: dict[str, str], count: int) -> PeerError:
    """Who is at fault: `wrong` is what nodes saw of the file system, `own` what of themselves; of `count` nodes."""
    where = fold_nodes(list(wrong))
    if own:
        told = "; ".join(f"{node}: {text}" for node, text in own.items())
        return PeerError(f"{told}: {point} does not answer on {where}", tuple(own))
    node, text = next(iter(wrong.items()))
    if count == 1 or len(wrong) < count:
        also = f" (and on {fold_nodes(list(wrong)[1:])})" if len(wrong) > 1 else ""
        return PeerError(
            f"{node}: {point} does not answer ({text}){also}; see the services' logs", tuple(wrong)
        )
    return PeerError(
        f"{point} answers on none of {where} ({text}), and nothing is known to be wrong with any of them; see the "
        "services' logs"
    )


def see_that_it_answers(here: Here, team: Team, meeting: str, wrong: str) -> None:
    """Come to `meeting` with what is `wrong` with the file system on this node, if anything is.

    If it is anywhere, every node looks at its own servers and devices, and the leader judges. Raises NodeError where
    that is this node's fault, PeerError elsewhere.
    """
    deadlines = here.config.deadlines
    # Another's deadline may have begun later, and who is silent then is to be known.
    others_s = 2 * deadlines.start + deadlines.silence + _NOTICED_S
    if steps.meet(here, team, meeting, others_s, wrong=wrong)["wrong"]:
        try:
            steps.meet(here, team, "judged", others_s, own=own_trouble(here))
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
