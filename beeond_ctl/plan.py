"""The plan: everything decided from site configuration, request and node list.

Pure data, computed identically on every node. No I/O; knows no backend's commands (`beeond_ctl.backends` turns a
plan into those).
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from typing import TYPE_CHECKING, Final

from beeond_ctl.errors import RequestError, shortened
from beeond_ctl.units import format_size

if TYPE_CHECKING:
    from beeond_ctl.config import SiteConfig
    from beeond_ctl.request import Request

BLOCK: Final = 16
"""Ports an instance takes: BeeGFS's 8003 to 8010 shifted together, or one per brick; the last is the rendezvous'."""

METADATA_LAYOUT: Final = 1
TEMPLATES: Final = "/var/lib/beeond-ctl"
"""Part of the name of what metadata servers are copied from: another layout is another file."""

CANDIDATES: Final = 8
"""Blocks an instance may choose from. Derived from the job, so that no node has to be told where to look."""


MOST_TARGETS: Final = 65535
"""BeeGFS's numbers of targets have 16 bits. They follow the node list, so nodes further back only mount."""

FIRST_OWN_ID: Final = 2**32
"""Ids from here on are of instances without Slurm, whose job ids have 32 bits: in federations the highest are the
cluster's number."""

LAST_OWN_ID: Final = 9_999_999_999
"""Labels of devices have room for ten digits."""

OLD_OWN_IDS: Final = range(1_000_000_000, 2_000_000_000)
"""What instances without Slurm had before, some of which may still run; see `lifecycle.own`."""


@dataclass(frozen=True, slots=True)
class Job:
    """A job as Slurm names it on its nodes. `restart` tells one run of a requeued job from the next."""

    job_id: int
    uid: int
    gid: int
    user: str
    restart: int = 0
    cluster: str = ""
    """Whose id it is: a machine may be a node of two."""

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
    device: str | None = None
    """A whole device, whose file system is made for the job and mounted at `base`."""


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
    guests: tuple[str, ...] = ()
    """Those of `nodes`, its last ones, that belong to other components of the job, and only mount."""
    run_as: int | None = None
    """The job that has its run directory here, where it is another component's."""

    @property
    def leader(self) -> str:
        """The first node that serves: hosts management service, rendezvous and journal."""
        return self.servers[0]

    @cached_property
    def own_nodes(self) -> tuple[str, ...]:
        """The nodes of the job whose instance it is."""
        return self.nodes[: len(self.nodes) - len(self.guests)]

    @cached_property
    def _with_storage(self) -> tuple[str, ...]:
        numbered = numbered_nodes(self.config) if self.backend == "beegfs" else None
        return with_storage(self.config, self.own_nodes[:numbered])

    @cached_property
    def servers(self) -> tuple[str, ...]:
        """The nodes that hold data of the instance; the others only mount."""
        if self.backend != "beegfs":
            return self._with_storage
        return max(self.storage_nodes, self.meta_nodes, key=len)

    @cached_property
    def _serving(self) -> frozenset[str]:
        return frozenset(self.servers)

    def serves(self, node: str) -> bool:
        """Whether `node` is one of `servers`."""
        return node in self._serving

    @cached_property
    def storage_nodes(self) -> tuple[str, ...]:
        """The nodes with storage servers, or with bricks."""
        if self.backend != "beegfs":
            return self._with_storage
        wanted = self.request.storage or self.config.beegfs.storage
        return self._with_storage if wanted == "all" else self._with_storage[: int(wanted)]

    @property
    def run_dir(self) -> str:
        """Directory of this job's state files on a node."""
        return f"{self.config.paths.run}/jobs/{self.run_as or self.job.job_id}"

    @property
    def mount_point(self) -> str:
        """Where the job's user finds the file system."""
        return self.request.mount or f"{self.config.mount.root}/{self.job.job_id}"

    @cached_property
    def targets(self) -> tuple[Target, ...]:
        """The targets of each node."""
        image = self.config.storage.kind == "image"
        targets = []
        devices = self.config.storage.devices
        for index, base in enumerate(self.config.bases):
            home = f"{base}/job-{self.job.job_id}"
            data = f"{self.run_dir}/target-{index}/data" if image else f"{home}/data"
            device = devices[index] if devices else None
            targets.append(Target(index, base, home, data, f"{home}/image" if image else None, device))
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
        wanted, there = self.request.meta or self.config.beegfs.meta, len(self._with_storage)
        count = there if wanted == "all" else int(wanted)
        if self.request.mirror and not isinstance(self.request.meta, int):
            count = min(max(2, count + count % 2), there - there % 2)  # they are mirrored in pairs
        return self._with_storage[:count]

    @property
    def prefer_local(self) -> bool:
        """Whether new files go to the targets of the node that makes them."""
        wanted = False if self.request.mirror else self.request.prefer_local
        return self.config.beegfs.prefer_local if wanted is None else wanted

    @property
    def interfaces(self) -> tuple[str, ...]:
        """Network interfaces for BeeGFS, best first; none: all."""
        asked = self.request.interfaces
        return tuple(asked.split("+") if asked else self.config.beegfs.interfaces)

    @property
    def target_capacity(self) -> int | None:
        """Bytes one target may take, where the request or the site says so."""
        if self.request.capacity is not None:
            copies = 2 if self.request.mirror else 1
            return -(-copies * self.request.capacity // (len(self.storage_nodes) * len(self.config.bases)))
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


def with_storage(config: SiteConfig, nodes: tuple[str, ...]) -> tuple[str, ...]:
    """Those of `nodes` that have storage of their own, by `storage.without`."""
    patterns = config.storage.without
    if not patterns:
        return nodes
    return tuple(node for node in nodes if not any(fnmatchcase(node, pattern) for pattern in patterns))


def numbered_nodes(config: SiteConfig) -> int:
    """How many nodes, from the first one on, have targets that BeeGFS has numbers for."""
    return MOST_TARGETS // len(config.bases)


def metadata_template(config: SiteConfig) -> str:
    """What metadata images are copied from: on the device of the first target, so that blocks can be shared.

    A whole device holds nothing between jobs, so there it has a place of its own.
    """
    place = TEMPLATES if config.storage.kind == "device" else config.storage.paths[0]
    return f"{place}/metadata-{METADATA_LAYOUT}-{config.beegfs.meta_size}"


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
        alone = node_count == 1 and config.backend.local_for_one_node and request.share is None
        wanted = "local" if alone else config.backend.default
        if wanted == "local" and request.share is not None:
            raise RequestError(
                "--beeond: share cannot be had of this site's file system, which is for one node"
            )
        return wanted
    if wanted not in config.backend.allowed:
        raise RequestError(
            f"--beeond: backend={wanted} is not offered here; choose {' or '.join(config.backend.allowed)}"
        )
    if wanted == "local" and request.share is not None:
        raise RequestError(
            "--beeond: share does not apply to backend local, which is for one node; leave one of them out"
        )
    if wanted == "local" and node_count > 1:
        raise RequestError(
            f"--beeond: backend=local is for jobs of one node and this one has {node_count}; leave it out"
        )
    return wanted


def check_request(config: SiteConfig, request: Request, node_count: int | None = None) -> None:
    """Refuse what this site cannot do, as early as it can be known. Raises RequestError."""
    backend = choose_backend(config, request, node_count or (1 if request.backend == "local" else 2))
    choices = config.mount.choices
    if request.mount is not None and request.mount not in choices:
        offer = f"choose {' or '.join(choices)}" if choices else "this site offers none; leave it out"
        raise RequestError(
            f"--beeond: mount={shortened(request.mount)} is not a mount point that may be chosen; {offer}"
        )
    if backend in {"glusterfs", "local"}:
        for name, value in (
            ("meta", request.meta),
            ("storage", request.storage),
            ("stripe-count", request.stripe_count),
            ("stripe-dirs", request.stripe_dirs),
            ("chunk-size", request.chunk_size),
            ("mirror", request.mirror or None),
            ("prefer-local", request.prefer_local or None),
            ("interfaces", request.interfaces),
        ):
            if value is not None:
                raise RequestError(
                    f"--beeond: {name} does not apply to backend {backend}, which keeps each file whole; leave it out"
                )
    if backend == "beegfs":
        _check_beegfs(config, request, node_count)
    if request.capacity is not None and config.storage.kind == "image" and node_count:
        share = request.capacity // (node_count * len(config.bases))
        if share < MIN_IMAGE:
            raise RequestError(
                f"--beeond: capacity={format_size(request.capacity)} is {format_size(share)} on each target; ask for "
                "at least "
                f"{format_size(MIN_IMAGE * node_count * len(config.bases))}"
            )


def _check_beegfs(config: SiteConfig, request: Request, node_count: int | None) -> None:
    if request.mirror and not config.beegfs.licensed:
        raise RequestError(
            "--beeond: mirror=yes needs a licence of BeeGFS that this site has not set up; leave it out"
        )
    if request.mirror and config.beegfs.pools:
        raise RequestError("--beeond: mirror=yes cannot be had with this site's storage pools; leave it out")
    if request.mirror and request.prefer_local:
        raise RequestError(
            "--beeond: mirror=yes and prefer-local=yes exclude each other; leave one of them out"
        )
    offered = config.beegfs.interfaces
    for name in request.interfaces.split("+") if request.interfaces else ():
        if name not in offered:
            offer = f"choose out of {'+'.join(offered)}" if offered else "this site names none; leave it out"
            raise RequestError(f"--beeond: interface {name} is not offered here; {offer}")
    if not node_count:
        return
    what = "nodes" if node_count <= numbered_nodes(config) else "nodes that BeeGFS has numbers for"
    node_count = min(node_count, numbered_nodes(config))
    servers = request.storage or config.beegfs.storage
    targets = len(config.bases) * (node_count if servers == "all" else min(int(servers), node_count))
    for name, value, limit, of in (
        ("meta", request.meta, node_count, what),
        ("storage", request.storage, node_count, what),
        ("stripe-count", request.stripe_count, targets, "targets"),
    ):
        if isinstance(value, int) and value > limit:
            raise RequestError(f"--beeond: {name}={value} is too much: this job has {limit} {of}")
    if request.mirror:
        for name, value in (
            ("storage", node_count if servers == "all" else servers),
            ("meta", request.meta if isinstance(request.meta, int) else 2),
        ):
            if int(value) % 2 or node_count < 2:
                raise RequestError(
                    f"--beeond: mirror=yes pairs servers of two nodes; ask for an even number with {name}=N"
                )


MIN_IMAGE: Final = 512 * 1024**2
"""Bytes of the smallest image: mkfs.xfs(8) refuses less than 300 MiB."""


def make_plan(
    config: SiteConfig,
    request: Request,
    job: Job,
    nodes: tuple[str, ...],
    *,
    block: int | None = None,
    guests: tuple[str, ...] = (),
    run_as: int | None = None,
) -> Plan:
    """The plan for `request` on `nodes`; `block` is the agreed port block, by default the first candidate.

    `guests` are nodes of other components of the job, that only mount; for `run_as` see Plan. Raises RequestError when
    the request does not fit the site or the node list.
    """
    if request.join is not None:
        raise RequestError(
            f"--beeond: join={request.join} has no plan of its own; see that of component {request.join}"
        )
    check_request(config, request, len(nodes))
    backend = choose_backend(config, request, len(nodes))
    there = len(with_storage(config, nodes[: numbered_nodes(config)] if backend == "beegfs" else nodes))
    if there == 0:
        raise RequestError(
            "--beeond: no node of this job has storage (storage.without); ask for at least one that has"
        )
    if there < len(nodes) and backend == "beegfs":
        _check_beegfs(config, request, there)
    return Plan(
        config=config,
        request=request,
        job=job,
        nodes=(*nodes, *guests),
        backend=backend,
        block=port_blocks(config, job)[0] if block is None else block,
        guests=guests,
        run_as=run_as,
    )
