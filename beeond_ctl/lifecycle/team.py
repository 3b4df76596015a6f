"""The nodes of a job while they work together: meetings, and questions to the leader.

A job of one node has nobody to meet; its team answers itself, so that the steps need not know.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

from beeond_ctl.errors import JobGoneError, OutsideError, PeerError, RequestError, UserError, one_line

if TYPE_CHECKING:
    from beeond_ctl.lifecycle.here import Here

Combine = Callable[[dict[str, dict[str, Any]]], dict[str, Any]]
"""Makes the answer to all from the reports of all, on the leader."""
Handler = Callable[[str, dict[str, Any]], dict[str, Any]]
"""Answers one node's question, on the leader."""


class Team(Protocol):
    """See `open_team`."""

    def meet(self, point: str, report: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        """Wait for all nodes at `point`; the leader's answer. Raises PeerError."""

    def check(self) -> None:
        """Raises PeerError when another node has failed meanwhile."""

    def ask(self, kind: str, payload: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        """Ask the leader. Raises PeerError."""

    def fail(self, message: str, *, user_fault: bool, nobody: bool = False) -> None:
        """Tell all that this node cannot go on; `nobody`: neither it nor the user is at fault."""


class _Alone:
    def __init__(self, node: str, combine: Mapping[str, Combine], handlers: Mapping[str, Handler]) -> None:
        self._node, self._combine, self._handlers = node, combine, handlers

    def meet(self, point: str, report: dict[str, Any], timeout_s: float) -> dict[str, Any]:  # noqa: ARG002
        combine = self._combine.get(point)
        return combine({self._node: report}) if combine else {}

    def check(self) -> None:
        """Nobody else."""

    def ask(self, kind: str, payload: dict[str, Any], timeout_s: float) -> dict[str, Any]:  # noqa: ARG002
        return self._handlers[kind](self._node, payload)

    def fail(self, message: str, *, user_fault: bool, nobody: bool = False) -> None:
        """Nobody to tell."""


@contextmanager
def open_team(
    here: Here,
    purpose: str,
    *,
    combine: Mapping[str, Combine],
    handlers: Mapping[str, Handler],
) -> Iterator[Team]:
    """The team of the job's nodes for `purpose` (prolog, epilog, recover); all have to give the same.

    Who only mounted has no part in a recovery: after a reboot such a node knows nothing of the job. Guests have none in
    an Epilog: their component ends when it likes.

    Raises NodeError when the leader finds no port to listen on, OutsideError where users have them.
    """
    plan = here.first_plan
    nodes = {"recover": plan.servers, "epilog": plan.own_nodes}.get(purpose, plan.nodes)
    if len(nodes) == 1:
        yield _Alone(here.node, combine, handlers)
        return
    from beeond_ctl.rendezvous import Leader, Member

    key, silence_s = here.key(f"rendezvous {purpose}"), here.config.deadlines.silence
    others = here.other_keys(f"rendezvous {purpose}")
    address = plan.address(plan.leader)
    if here.leads:
        with (
            Leader(
                key, nodes, plan.rendezvous_ports,
                name=plan.leader, combine=combine, handlers=handlers, silence_s=silence_s,
                uncertain=plan.guests if purpose == "share" else (),  # they may not have asked for a part in it
            ),
            Member(key, here.node, address, plan.rendezvous_ports, leader=plan.leader, silence_s=silence_s) as me,
        ):  # fmt: skip
            yield me
    else:
        with Member(
            key, here.node, address, plan.rendezvous_ports,
            leader=plan.leader, silence_s=silence_s, other_keys=others,
        ) as me:  # fmt: skip
            yield me


@contextmanager
def telling(team: Team, here: Here) -> Iterator[None]:
    """Tell the others when the block fails here, so that nobody waits for this node."""
    try:
        yield
    except PeerError:
        raise
    except BaseException as error:
        user_fault = isinstance(error, (UserError, RequestError, JobGoneError))
        team.fail(one_line(error), user_fault=user_fault, nobody=isinstance(error, OutsideError))
        here.events.log("failed", message=one_line(error), user_fault=user_fault)
        raise
