"""BeeGFS 7.4 and 8.x: mgmtd on the leader, metadata servers on the first nodes, storage on all that have some.

Pure: makes commands and configuration, touches nothing. It must not know how processes are run or storage is prepared.
The two generations are told apart by their programs and share the servers' configuration keys; management service,
command line tool and ports differ. docs/beegfs.md has the reasons and figures.

    layout      numbers of ports, nodes, targets and pools
    servers     what runs on a node, and how it mounts
    tool        what the leader asks and sets
    hashdirs    what an empty metadata server consists of
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from beeond_ctl.backends.beegfs import hashdirs
from beeond_ctl.backends.beegfs.servers import mount, services
from beeond_ctl.backends.beegfs.tool import arrange, arranges_early, membership, mounts_early, usable
from beeond_ctl.errors import NodeError

if TYPE_CHECKING:
    from collections.abc import Callable

    from beeond_ctl.config import SiteConfig

__all__ = [
    "MANAGED", "PROGRAMS", "ROOT_IS_DATA", "arrange", "arranges_early", "edition", "membership", "mount",
    "mounts_early", "services", "skeleton", "usable",
]  # fmt: skip

PROGRAMS: Final = ("beegfs-mgmtd", "beegfs-meta", "beegfs-storage")
ROOT_IS_DATA: Final = False
MANAGED: Final = "beegfs-mgmtd"
"""A server that asks for mgmtd before it listens loses 1.5 s."""

_TOOLS: Final = {"7.4": ("beegfs-ctl", "beegfs-helperd"), "8": ("beegfs",)}
"""What only one generation has."""


def edition(config: SiteConfig, find: Callable[[str], str | None]) -> str:
    """The generation whose programs `find` finds, "7.4" or "8". Raises NodeError when there is not exactly one."""
    wanted = config.beegfs.version
    where = ":".join(config.backend.path)
    lacking = {
        name: [program for program in (*PROGRAMS, *tools) if find(program) is None]
        for name, tools in _TOOLS.items()
    }
    if wanted != "auto":
        lacking = {wanted: lacking[wanted]}
    complete = [name for name, lost in lacking.items() if not lost]
    if len(complete) == 1:
        return complete[0]
    if complete:
        raise NodeError(
            f"BeeGFS 7.4 and 8 are both in {where}; set beegfs.version, and let backend.path begin with that one's "
            "programs"
        )
    name, lost = min(lacking.items(), key=lambda item: len(item[1]))
    raise NodeError(
        f"no BeeGFS here: {', '.join(lost)} of version {name} is not in {where}; install it, or set backend.path"
    )


def skeleton() -> str:
    """What an empty metadata server consists of, for mkfs.xfs."""
    return hashdirs.prototype()
