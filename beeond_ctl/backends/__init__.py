"""What a backend is: a module that turns a plan into descriptions of services and mounts.

A backend starts nothing and touches nothing; `beeond_ctl.supervisor` runs what it describes, and knows no file
system. Each module of this package with these functions is one backend:

    PROGRAMS                        names of the programs it needs on a node
    ROOT_IS_DATA                    whether the root that the user sees is the targets' data directories, which have to
                                    be the user's before anything is mounted
    MANAGED                         name of the service that is `first` and all others wait for; empty: none
    edition(config, find)           which generation of its programs is on this node
    services(plan, node, keys)      the servers of `node`, startable at once but for those that are `first` or `last`
    membership(plan, keys)          questions only the leader asks, to know that all servers are registered
    usable(plan, keys)              questions only the leader asks then, to know that all servers work
    arrange(plan, keys)             commands the leader runs, once in an instance's life (stripe patterns)
    arranges_early(plan)            whether it runs them as soon as all are registered, or when all work
    mounts_early(plan)              whether nodes mount before all of that, which is waited for before it is used
    mount(plan, node, keys)         how `node` mounts the file system
    skeleton()                      what an empty metadata server consists of, for mkfs.xfs; where `Plan.metadata` is
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, cast

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from beeond_ctl.config import SiteConfig
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


Advice = tuple[tuple[str, str], ...]
"""What to do about a failure: pairs of a part of what the program said, in lower case, and the advice."""


@dataclass(frozen=True, slots=True)
class Service:
    """One process that runs in the foreground for as long as the instance lives.

    `argv[0]` is a bare program name, searched in the site's `backend.path`. `log` receives stdout and stderr.
    The other services of all nodes are started when one that is `first` is ready. `once` is run before. One that is
    `last` is started when all others serve; one that is to be started `twice` is then killed, and started again.
    """

    name: str
    argv: tuple[str, ...]
    log: str
    ready: PortOpen | Mounted | None = None
    files: tuple[File, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    first: bool = False
    once: Once | None = None
    last: bool = False
    twice: bool = False
    advice: Advice = ()


@dataclass(frozen=True, slots=True)
class Command:
    """A program that is run to its end. `files` are written first; `codes` are the exit codes of success.

    A failure is tried again for `again_s` seconds. `wrong(stdout)` says what is wrong with an answer; empty: nothing.
    """

    argv: tuple[str, ...]
    files: tuple[File, ...] = ()
    codes: tuple[int, ...] = (0,)
    advice: Advice = ()
    again_s: float = 0
    wrong: Callable[[bytes], str] | None = None


@dataclass(frozen=True, slots=True)
class Once:
    """A command that is run unless the file that it makes is there already."""

    command: Command
    creates: str


@dataclass(frozen=True, slots=True)
class Answer:
    """What a program said, and its exit code."""

    code: int
    output: bytes
    errors: bytes


@dataclass(frozen=True, slots=True)
class Question:
    """A command whose answer says who is missing: `missing(stdout)` maps nodes to what of them is not there yet.

    `answered` tells an answer from a manager that is silent. Some tools print the right answer and exit 1. Until
    `due_s` seconds after the first time it need be asked only now and then.
    """

    command: Command
    missing: Callable[[bytes], dict[str, str]]
    answered: Callable[[Answer], bool]
    due_s: float = 0.0


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
    ROOT_IS_DATA: bool
    MANAGED: str

    def edition(self, config: SiteConfig, find: Callable[[str], str | None]) -> str: ...  # noqa: D102
    def services(self, plan: Plan, node: str, keys: Keys) -> tuple[Service, ...]: ...  # noqa: D102
    def membership(self, plan: Plan, keys: Keys) -> tuple[Question, ...]: ...  # noqa: D102
    def mount(self, plan: Plan, node: str, keys: Keys) -> Mount: ...  # noqa: D102
    def arrange(self, plan: Plan, keys: Keys) -> tuple[Command, ...]: ...  # noqa: D102
    def usable(self, plan: Plan, keys: Keys) -> tuple[Question, ...]: ...  # noqa: D102
    def arranges_early(self, plan: Plan) -> bool: ...  # noqa: D102
    def mounts_early(self, plan: Plan) -> bool: ...  # noqa: D102
    def skeleton(self) -> str: ...  # noqa: D102


def get(name: str) -> Backend:
    """The backend called `name`, one of `Plan.backend`'s values. Imported here since a job needs only one."""
    return cast("Backend", importlib.import_module(f"beeond_ctl.backends.{name}"))
