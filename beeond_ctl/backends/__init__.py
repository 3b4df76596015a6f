"""What a backend is: a module that turns a plan into descriptions of services and mounts.

A backend starts nothing and touches nothing; `beeond_ctl.supervisor` runs what it describes, and knows no file
system. Each module of this package with these functions is one backend:

    PROGRAMS                        names of the programs it needs on a node
    services(plan, node, keys)      the servers of `node`, all startable at once
    membership(plan, keys)          a question only the leader asks, to know that all servers are registered
    mount(plan, node, keys)         how `node` mounts the file system
    settle(plan, keys)              commands the leader runs once all nodes have mounted (stripe patterns)
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, cast

if TYPE_CHECKING:
    from beeond_ctl.plan import Plan


@dataclass(frozen=True, slots=True)
class File:
    """A file to be written before a service starts. Root's alone unless `mode` (octal) says otherwise."""

    path: str
    content: str
    mode: int = 0o600


@dataclass(frozen=True, slots=True)
class PortOpen:
    """Ready when something accepts connections at this address."""

    host: str
    port: int


@dataclass(frozen=True, slots=True)
class Mounted:
    """Ready when a file system of type `fstype` (as in /proc/self/mountinfo) is mounted at `path`."""

    path: str
    fstype: str


@dataclass(frozen=True, slots=True)
class Service:
    """One process that runs in the foreground for as long as the instance lives.

    `argv[0]` is a bare program name, searched in the site's `backend.path`. `log` receives stdout and stderr.
    """

    name: str
    argv: tuple[str, ...]
    log: str
    ready: PortOpen | Mounted | None = None
    files: tuple[File, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Command:
    """A program that is run to its end. `files` are written first."""

    argv: tuple[str, ...]
    files: tuple[File, ...] = ()


@dataclass(frozen=True, slots=True)
class Question:
    """A command whose answer says who is missing: `missing(stdout)` names services, and is empty when all are there.

    Some tools print the right answer and exit 1, so only stdout counts.
    """

    command: Command
    missing: Callable[[bytes], list[str]]


@dataclass(frozen=True, slots=True)
class Mount:
    """How a node mounts the instance: by a service that stays (FUSE), or by commands (a kernel client).

    `helpers` are services that must be ready before.
    """

    point: str
    fstype: str
    service: Service | None = None
    command: Command | None = None
    bind_source: str | None = None
    helpers: tuple[Service, ...] = ()


@dataclass(frozen=True, slots=True)
class Keys:
    """Secrets of one run of one job, derived from the site's. Never in an argv, an environment or a log."""

    authentication: str


class Backend(Protocol):
    """See the module's docstring."""

    PROGRAMS: tuple[str, ...]

    def services(self, plan: Plan, node: str, keys: Keys) -> tuple[Service, ...]: ...  # noqa: D102
    def membership(self, plan: Plan, keys: Keys) -> Question | None: ...  # noqa: D102
    def mount(self, plan: Plan, node: str, keys: Keys) -> Mount: ...  # noqa: D102
    def settle(self, plan: Plan, keys: Keys) -> tuple[Command, ...]: ...  # noqa: D102


def get(name: str) -> Backend:
    """The backend called `name`, one of `Plan.backend`'s values. Imported here since a job needs only one."""
    return cast("Backend", importlib.import_module(f"beeond_ctl.backends.{name}"))
