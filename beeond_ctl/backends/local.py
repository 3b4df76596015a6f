"""A node's own storage for a job of one node, where a parallel file system would only cost.

Pure. Of several targets only the first is used: a directory cannot be spread over devices.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from beeond_ctl.backends import Mount

if TYPE_CHECKING:
    from collections.abc import Callable

    from beeond_ctl.backends import Command, Keys, Question, Service
    from beeond_ctl.config import SiteConfig
    from beeond_ctl.plan import Plan

PROGRAMS: Final[tuple[str, ...]] = ()
ROOT_IS_DATA: Final = False
"""The root is given to the user where it is mounted, when it has been probed: nobody else has it mounted."""
MANAGED: Final = ""


def edition(config: SiteConfig, find: Callable[[str], str | None]) -> str:  # noqa: ARG001
    """There is only one."""
    return ""


def services(plan: Plan, node: str, keys: Keys) -> tuple[Service, ...]:  # noqa: ARG001 - the backends' interface
    """None."""
    return ()


def membership(plan: Plan, keys: Keys) -> tuple[Question, ...]:  # noqa: ARG001
    """None: there are no servers."""
    return ()


def mount(plan: Plan, node: str, keys: Keys) -> Mount:  # noqa: ARG001
    """The first target, bound to the mount point."""
    return Mount(point=plan.mount_point, fstype="none", bind_source=plan.targets[0].data)


def arrange(plan: Plan, keys: Keys) -> tuple[Command, ...]:  # noqa: ARG001
    """Nothing."""
    return ()


def arranges_early(plan: Plan) -> bool:  # noqa: ARG001
    """There is nothing to arrange."""
    return True


def mounts_early(plan: Plan) -> bool:  # noqa: ARG001
    """There is nothing to wait for."""
    return True


def usable(plan: Plan, keys: Keys) -> tuple[Question, ...]:  # noqa: ARG001
    """None."""
    return ()
