"""The plan: everything decided from site configuration, request and node list.

Pure data, computed identically on every node. No I/O; knows no backend's commands (`beeond_ctl.backends` turns a
plan into those).
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Final

from beeond_ctl.errors import RequestError
from beeond_ctl.units import format_size

if TYPE_CHECKING:
    from beeond_ctl.config import SiteConfig
    from beeond_ctl.request import Request

BLOCK: Final = 16
"""Ports an instance takes: BeeGFS's 8003 to 8010 shifted together, or one per brick; the last is the rendezvous'."""

METADATA_LAYOUT: Final = 1
"""Part of the name of what metadata servers are copied from: another layout is another file."""

CANDIDATES: Final = 8
"""Blocks an instance may choose from. Derived from the job, so that no node has to be told where to look."""


FIRST_OWN_ID: Final = 1_000_000_000
"""Ids from here on are of instances without Slurm, whose job ids end at 67,108,863 (slurm.conf(5), MaxJobId)."""


@dataclass(frozen=True, slots=True)
class Job:
    """A job as Slurm names it on its nodes. `restart` tells one run of a requeued job from the next."""

    job_id: int
    uid: int
    gid: int
    user: str
    restart: int = 0

    @property
    def run_id(self) -> str:
        """Names this run of the job in key derivation and records."""
        return f"{self.job_id}.{self.restart}"


@dataclass(frozen=True, slots=True)
class Target:
    """One directory on one device of a node. All nodes have the same.

    `home` is the job's own directory on the device (root's alone); `data` is where the file system's data lies.
    """

    index: int
    base: str
    home: str
    data: str
    image: str | None = None


@dataclass(frozen=True, slots=True)
class Metadata:
    """Where a metadata server's own file system is, on the nodes that have one.

    `image` is a copy of `template`, which holds the directories that every metadata server begins with.
    """

    image: str
    data: str
    template: str
    size: int


@dataclass(frozen=True)
class Plan:
    """What will run where."""

    config: SiteConfig
    request: Request
    job: Job
    nodes: tuple[str, ...]
    backend: str
    block: int
    """First port of the block that the nodes agreed on."""
    edition: str = ""
    """Generation of the file system's programs that the nodes agreed on, where there are several."""

    @property
    def leader(self) -> str:
        """The first node: hosts management service and rendezvous."""
        return self.nodes[0]

    @property
    def run_dir(self) -> str:
        """Directory of this job's state files on a node."""
        return f"{self.config.paths.run}/jobs/{self.job.job_id}"

    @property
    def mount_point(self) -> str:
        """Where the job's user finds the file system."""
        return self.request.mount or f"{self.config.mount.root}/{self.job.job_id}"

    @cached_property
    def targets(self) -> tuple[Target, ...]:
        """The targets of each node."""
        image = self.config.storage.kind == "image"
        targets = []
        for index, base in enumerate(self.config.storage.paths):
            home = f"{base}/job-{self.job.job_id}"
            data = f"{self.run_dir}/target-{index}/data" if image else f"{home}/data"
            targets.append(Target(index, base, home, data, f"{home}/image" if image else None))
        return tuple(targets)

    @cached_property
    def metadata(self) -> Metadata | None:
        """The same on all nodes; made on `meta_nodes` alone."""
        if self.backend != "beegfs":
            return None
        return Metadata(
            image=f"{self.targets[0].home}/metadata",
            data=f"{self.run_dir}/metadata",
            template=metadata_template(self.config),
            size=self.config.beegfs.meta_size,
        )

    @cached_property
    def meta_nodes(self) -> tuple[str, ...]:
        """The nodes with a metadata server."""
        if self.backend != "beegfs":
            return ()
        count = self.request.meta or self.config.beegfs.meta
        return self.nodes if count == "all" else self.nodes[: int(count)]

    @property
    def target_capacity(self) -> int | None:
        """Bytes one target may take, where the request or the site says so."""
        if self.request.capacity is not None:
            return -(-self.request.capacity // (len(self.nodes) * len(self.config.storage.paths)))
        return self.config.storage.capacity

    @cached_property
    def node_index(self) -> dict[str, int]:
        """Position of each node in the node list."""
        return {node: index for index, node in enumerate(self.nodes)}

    def address(self, node: str) -> str:
        """The host name under which the others reach `node`."""
        return node + self.config.network.suffix

    @property
    def rendezvous_ports(self) -> tuple[int, ...]:
        """Where the leader may listen."""
        return tuple(block + BLOCK - 1 for block in port_blocks(self.config, self.job))


def metadata_template(config: SiteConfig) -> str:
    """What metadata images are copied from: on the device of the first target, so that blocks can be shared."""
    return f"{config.storage.paths[0]}/metadata-{METADATA_LAYOUT}-{config.beegfs.meta_size}"


def port_blocks(config: SiteConfig, job: Job) -> tuple[int, ...]:
    """First ports of the blocks that `job` may take, best first."""
    first, last = (int(part) for part in config.network.ports.split("-"))
    count = (last - first + 1) // BLOCK
    seed = int.from_bytes(hashlib.sha256(job.run_id.encode()).digest()[:8])
    return tuple(
        first + (seed + attempt * (count // CANDIDATES)) % count * BLOCK for attempt in range(CANDIDATES)
    )


def choose_backend(config: SiteConfig, request: Request, node_count: int) -> str:
    """The backend for `request` on `node_count` nodes. Raises RequestError when site or job do not allow it."""
    wanted = request.backend
    if wanted is None:
        return "local" if node_count == 1 and config.backend.local_for_one_node else config.backend.default
    if wanted not in config.backend.allowed:
        raise RequestError(
            f"--beeond: backend={wanted} is not offered here; choose {' or '.join(config.backend.allowed)}"
        )
    if wanted == "local" and node_count > 1:
        raise RequestError(
            f"--beeond: backend=local is for jobs of one node and this one has {node_count}; leave it out"
        )
    return wanted


def check_request(config: SiteConfig, request: Request, node_count: int | None = None) -> None:
    """Refuse what this site cannot do, as early as it can be known. Raises RequestError."""
    backend = (
        choose_backend(config, request, node_count or 2)
        if node_count or request.backend != "local"
        else "local"
    )
    choices = config.mount.choices
    if request.mount is not None and request.mount not in choices:
        offer = f"choose {' or '.join(choices)}" if choices else "this site offers none; leave it out"
        raise RequestError(
            f"--beeond: mount={request.mount} is not a mount point that may be chosen; {offer}"
        )
    if backend in {"glusterfs", "local"}:
        for name, value in (
            ("meta", request.meta),
            ("stripe-count", request.stripe_count),
            ("chunk-size", request.chunk_size),
            ("mirror", request.mirror or None),
        ):
            if value is not None:
                raise RequestError(
                    f"--beeond: {name} does not apply to backend {backend}, which keeps each file whole; leave it out"
                )
    if backend == "beegfs":
        _check_beegfs(config, request, node_count)
    if request.capacity is not None and config.storage.kind == "image" and node_count:
        share = request.capacity // (node_count * len(config.storage.paths))
        if share < MIN_IMAGE:
            raise RequestError(
                f"--beeond: capacity={format_size(request.capacity)} is {format_size(share)} on each target; ask for "
                "at least "
                f"{format_size(MIN_IMAGE * node_count * len(config.storage.paths))}"
            )


def _check_beegfs(config: SiteConfig, request: Request, node_count: int | None) -> None:
    if request.mirror:
        raise RequestError(
            "--beeond: mirror=yes needs a licence of BeeGFS that this site has not set up; leave it out"
        )
    if not node_count:
        return
    targets = node_count * len(config.storage.paths)
    for name, value, limit, what in (
        ("meta", request.meta, node_count, "nodes"),
        ("stripe-count", request.stripe_count, targets, "targets"),
    ):
        if isinstance(value, int) and value > limit:
            raise RequestError(f"--beeond: {name}={value} is too much: this job has {limit} {what}")


MIN_IMAGE: Final = 512 * 1024**2
"""Bytes of the smallest image: mkfs.xfs(8) refuses less than 300 MiB."""


def make_plan(
    config: SiteConfig, request: Request, job: Job, nodes: tuple[str, ...], *, block: int | None = None
) -> Plan:
    """The plan for `request` on `nodes`; `block` is the agreed port block, by default the first candidate.

    Raises RequestError when the request does not fit the site or the node list.
    """
    check_request(config, request, len(nodes))
    return Plan(
        config=config,
        request=request,
        job=job,
        nodes=nodes,
        backend=choose_backend(config, request, len(nodes)),
        block=port_blocks(config, job)[0] if block is None else block,
    )
