"""One node's part of one instance: configuration, plan, state and event log, held together for the steps."""

from __future__ import annotations

from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from beeond_ctl import hints
from beeond_ctl import state as states
from beeond_ctl.backends import Backend, Keys, get
from beeond_ctl.errors import NodeError, RequestError, one_line
from beeond_ctl.events import EventLog
from beeond_ctl.keys import Secrets, derive, name_of, read_secrets
from beeond_ctl.plan import Job, Plan, make_plan
from beeond_ctl.request import JobNames, Request, Transfer, decode, expand_all
from beeond_ctl.slurm import fold_nodes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from beeond_ctl.config import SiteConfig
    from beeond_ctl.state import State

_FOR_THE_USER: Final = frozenset(["ready", "staging-out", "retained"])
_ONLY_END: Final = frozenset(["unmounting", "stopping"])
"""Steps that end mounts and processes, and can be taken from any phase that the state may still say."""


@dataclass
class Here:
    """This node. `state` is on disk as it is here whenever a step begins."""

    config: SiteConfig
    state: State
    transferred: list[dict[str, Any]] = field(default_factory=list)
    """What came of the transfers that this process took part in."""

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
        kin = self.state.kin
        if kin is None:
            return make_plan(self.config, self.request, self.state.job, self.state.nodes)
        guests = tuple(node for _, _, nodes in kin.guests for node in nodes)
        own = self.state.job.job_id
        return make_plan(self.config, self.request, kin.job, kin.nodes, guests=guests, run_as=own)

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
    def instance(self) -> Job:
        """The job whose instance it is."""
        return self.state.instance

    @property
    def is_guest(self) -> bool:
        """Whether this job mounts the instance of another component, or was going to."""
        return self.instance.job_id != self.state.job.job_id or self.request.join is not None

    @property
    def owed(self) -> bool:
        """Whether data may be here that was asked to be staged out, is not proved to be, and was not given up."""
        state = self.state
        if not state.ran or state.proved or state.given_up or state.phase == "failed":  # was rolled back
            return False
        return not self.is_guest and bool(self.request.stage_out)

    @property
    def serves(self) -> bool:
        """Whether this node holds data of the instance; otherwise it only mounts."""
        return not self.is_guest and self.node in self.first_plan.servers

    @property
    def leads(self) -> bool:
        """Whether this node is the leader."""
        return not self.is_guest and self.node == self.first_plan.leader

    @property
    def run_dir(self) -> Path:
        """The job's run directory."""
        return states.run_dir(self.config.paths.run, self.state.job.job_id)

    @cached_property
    def _secrets(self) -> Secrets:
        return read_secrets(Path(self.config.paths.secret))

    @property
    def _secret(self) -> bytes:
        """What the instance was made with, or is about to be if this node leads. Raises ConfigError, NodeError."""
        name = self.state.secret
        found = self._secrets.find(name) if name else self._secrets.current
        if found is None:
            raise NodeError(
                f"the site secret {name} of job {self.state.job.job_id} is no longer in {self.config.paths.secret}; "
                f"run: beeond-ctl recover {self.state.job.job_id}"
            )
        return found

    @property
    def secret_name(self) -> str:
        """Names the secret that `key` uses; tells nothing of it."""
        return name_of(self._secret)

    def key(self, purpose: str) -> bytes:
        """A key of this run of the job, for `purpose` alone."""
        return derive(self._secret, f"{purpose} {self.instance.run_id}")

    def other_keys(self, purpose: str) -> list[bytes]:
        """What the leader may have in the place of `key`, as long as it is not known which secret it uses."""
        accepted = () if self.state.secret else self._secrets.accepted
        return [derive(secret, f"{purpose} {self.instance.run_id}") for secret in accepted]

    @property
    def keys(self) -> Keys:
        """The backend's secrets."""
        return Keys(authentication=self.key("authentication").hex())

    def log_begin(self, event: str) -> None:
        """Log that work on a new run of the job begins here."""
        job = self.state.job
        nodes = fold_nodes(self.state.nodes)
        self.events.log(event, nodes=nodes, user=job.user, uid=job.uid, run=job.run_id)

    def enter(self, phase: str) -> None:
        """Write down that the step of `phase` comes next. Raises NodeError where it must not be taken otherwise."""
        self.state.phase = phase
        try:
            self.save()
        except NodeError as error:
            if phase not in _ONLY_END:
                raise
            self.events.log("not-saved", message=one_line(error))
        self.events.log("phase", phase=phase)
        if phase in _FOR_THE_USER:
            hints.write(self.config.paths.run, self.state.job.job_id, self.state.job.uid, self._hint())

    def _hint(self) -> dict[str, Any]:
        state = self.state
        return {
            "job": state.job.job_id, "instance": self.instance.job_id, "user": state.job.user, "node": state.node,
            "phase": state.phase, "nodes": fold_nodes(state.nodes), "backend": self.first_plan.backend,
            "mount": state.mount,
            "reason": state.reason or None, "took": self.events.took(),
            "took_s": self.events.took_s(), "transfers": self.transferred,
            "places": self._places(),
        }  # fmt: skip

    def _places(self) -> list[tuple[str, str, tuple[str, ...]]]:
        """Where what is below $BEEOND is to be staged out: source, destination, flags. For `flush` and `status`."""
        with suppress(RequestError):  # is raised where it matters
            return [(each.source, each.destination, each.flags) for each in self.transfers(inward=False)]
        return []

    def save(self) -> None:
        """Write the state as it is now. Raises NodeError."""
        states.write(self.config.paths.run, self.state)

    @contextmanager
    def step(self, phase: str) -> Iterator[dict[str, Any]]:
        """Enter `phase` and time the block."""
        self.enter(phase)
        with self.events.timed(phase) as extra:
            yield extra

    def transfers(self, *, inward: bool, lengths: bool = False) -> list[Transfer]:
        """The transfers of the request with their `%` patterns replaced. Raises RequestError.

        `lengths`: whether one that is too long is refused, which costs nothing before the job runs. Afterwards it is
        one transfer that fails, and in no other's way.
        """
        job, names = self.instance, self.state.names
        known = JobNames(
            job.job_id, job.user, names.get("job_name"), names.get("array_job_id"), names.get("array_task_id")
        )
        return expand_all(
            self.request, known, inward=inward, mount=self.first_plan.mount_point, lengths=lengths
        )
