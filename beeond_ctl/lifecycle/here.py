"""One node's part of one instance: configuration, plan, state and event log, held together for the steps."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from beeond_ctl import state as states
from beeond_ctl.backends import Backend, Keys, get
from beeond_ctl.events import EventLog
from beeond_ctl.keys import derive, read_secret
from beeond_ctl.plan import Plan, make_plan
from beeond_ctl.request import JobNames, Request, Transfer, decode, expand

if TYPE_CHECKING:
    from collections.abc import Iterator

    from beeond_ctl.config import SiteConfig
    from beeond_ctl.state import State


@dataclass
class Here:
    """This node. `state` is on disk as it is here whenever a step begins."""

    config: SiteConfig
    state: State

    @property
    def node(self) -> str:
        """This node's name."""
        return self.state.node

    @cached_property
    def request(self) -> Request:
        """What was asked for. Raises RequestError."""
        return decode(self.state.request)

    @cached_property
    def events(self) -> EventLog:
        """The job's event log on this node."""
        return EventLog(self.config.paths.log, self.state.job.job_id, self.node)

    @cached_property
    def first_plan(self) -> Plan:
        """The plan before the nodes agreed on ports. Raises RequestError."""
        return make_plan(self.config, self.request, self.state.job, self.state.nodes)

    @property
    def plan(self) -> Plan:
        """The plan with the ports and the edition that the nodes agreed on."""
        block, edition = self.state.block, self.state.edition
        return self.first_plan if block is None else replace(self.first_plan, block=block, edition=edition)

    @property
    def backend(self) -> Backend:
        """The plan's backend."""
        return get(self.first_plan.backend)

    @property
    def owed(self) -> bool:
        """Whether data may be here that was asked to be staged out, is not proved to be, and was not given up."""
        state = self.state
        return state.ran and bool(self.request.stage_out) and not (state.proved or state.given_up)

    @property
    def leads(self) -> bool:
        """Whether this node is the leader."""
        return self.node == self.first_plan.leader

    @property
    def run_dir(self) -> Path:
        """The job's run directory."""
        return states.run_dir(self.config.paths.run, self.state.job.job_id)

    @cached_property
    def _secret(self) -> bytes:
        return read_secret(Path(self.config.paths.secret))

    def key(self, purpose: str) -> bytes:
        """A key of this run of the job, for `purpose` alone."""
        return derive(self._secret, f"{purpose} {self.state.job.run_id}")

    @cached_property
    def keys(self) -> Keys:
        """The backend's secrets."""
        return Keys(authentication=self.key("authentication").hex())

    def enter(self, phase: str) -> None:
        """Write down that the step of `phase` comes next."""
        self.state.phase = phase
        self.save()
        self.events.log("phase", phase=phase)

    def save(self) -> None:
        """Write the state as it is now."""
        states.write(self.config.paths.run, self.state)

    @contextmanager
    def step(self, phase: str) -> Iterator[dict[str, Any]]:
        """Enter `phase` and time the block."""
        self.enter(phase)
        with self.events.timed(phase) as extra:
            yield extra

    def transfers(self, *, inward: bool) -> list[Transfer]:
        """The transfers of the request with their `%` patterns replaced. Raises RequestError."""
        job, names = self.state.job, self.state.names
        known = JobNames(
            job.job_id, job.user, names.get("job_name"), names.get("array_job_id"), names.get("array_task_id")
        )
        chosen = self.request.stage_in if inward else self.request.stage_out
        return [expand(transfer, known, inward=inward) for transfer in chosen]
