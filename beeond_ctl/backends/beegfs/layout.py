"""Numbers of an instance: ports, nodes, targets, pools. Pure facts of a plan; knows no command.

Numbers of nodes and targets are ours and not mgmtd's choice (files beside the data say so, as BeeGFS's own
beegfs-setup-storage writes them), so mgmtd's list can be compared with the plan.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from beeond_ctl.errors import ConfigError

if TYPE_CHECKING:
    from beeond_ctl.plan import Plan

# BeeGFS shifts all its ports together (connPortShift); these are the ones without a shift.
PORTS: Final = {
    "storage": 8003,
    "client": 8004,
    "meta": 8005,
    "helperd": 8006,
    "mgmtd": 8008,
    "gRPC": 8010,
}

DEFAULT_POOL: Final = 1
"""The number of BeeGFS's own pool, which has all targets that are in no other."""


@dataclass(frozen=True, slots=True)
class Pool:
    """A storage pool of the site's, with the numbers of its targets."""

    number: int
    name: str
    targets: tuple[int, ...]


def shift(plan: Plan) -> int:
    """What is added to each of PORTS. Raises ConfigError."""
    if plan.block < PORTS["storage"]:
        raise ConfigError(
            f"network.ports: BeeGFS cannot use ports below {PORTS['storage']}; choose a higher range"
        )
    return plan.block - PORTS["storage"]


def port(plan: Plan, number: int) -> int:
    """The port of this instance that BeeGFS without a shift would have as `number`."""
    return number + shift(plan)


def node_number(plan: Plan, node: str) -> int:
    """Number of a node's servers, in an instance."""
    return plan.node_index[node] + 1


def target_number(plan: Plan, node: str, index: int) -> int:
    """Number of a node's target, in an instance; it has 16 bits, see `plan.MOST_TARGETS`."""
    return plan.node_index[node] * len(plan.targets) + index + 1


def targets(plan: Plan) -> dict[int, str]:
    """The node of each target."""
    return {
        target_number(plan, node, target.index): node
        for node in plan.storage_nodes
        for target in plan.targets
    }


def metadata_servers(plan: Plan) -> dict[int, str]:
    """The node of each metadata server."""
    return {node_number(plan, node): node for node in plan.meta_nodes}


def pools(plan: Plan) -> tuple[Pool, ...]:
    """The site's pools, without BeeGFS's own."""
    named = [(name, bases) for name, bases in plan.config.beegfs.pools.items() if name.lower() != "default"]
    found = []
    for number, (name, bases) in enumerate(named, DEFAULT_POOL + 1):
        indices = [target.index for target in plan.targets if {target.base, target.device} & set(bases)]
        numbers = [target_number(plan, node, index) for node in plan.storage_nodes for index in indices]
        found.append(Pool(number, name, tuple(numbers)))
    return tuple(found)


def root_pool(plan: Plan) -> Pool | None:
    """The pool of what is in no pool's directory: None is BeeGFS's own, unless the others have all targets."""
    chosen = pools(plan)
    left = len(plan.storage_nodes) * len(plan.targets) - sum(len(pool.targets) for pool in chosen)
    return chosen[0] if chosen and left == 0 else None
