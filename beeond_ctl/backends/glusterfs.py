"""GlusterFS without its management daemon: one brick per target, one FUSE client per node, all from volume files.

Pure: makes text and command lines, touches nothing. It must not know how processes are run or storage is prepared.

Files lie whole on one brick, chosen by name. What follows was measured with GlusterFS 10.3 and decides the
options below:

- What one node has written the others see as soon as they look: names and attributes are kept by nobody, contents
  from open to close at most (the kernel's pages; as with BeeGFS). A client that caches for a second makes a node
  read an old size right after its peer's MPI message told it that the file is complete. Writes return when the
  brick has them, so an error is the writer's and not lost in a close() that nobody checks.
- Whoever connects to a brick proves that it knows the job's password, which is in root's files on the job's nodes
  and nowhere else. Addresses prove nothing: other jobs' users are on the same network.
- A client that loses a brick ends, and takes its mount along: at once where the brick dies, after `_SILENCE_S` where
  it is silent. It could go on with the other bricks, but then lists directories without the lost one's files and
  reports no error, and a stage-out would prove to be complete what is not.
- A brick whose device has died lives on. Directories are listed without its files then, and no error is reported
  either: nothing may be proved before each node has seen that its own devices work.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from beeond_ctl.backends import File, Mount, Mounted, PortOpen, Service
from beeond_ctl.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from beeond_ctl.backends import Command, Keys, Question
    from beeond_ctl.config import SiteConfig
    from beeond_ctl.plan import Plan, Target

PROGRAMS: Final = ("glusterfsd", "glusterfs")
ROOT_IS_DATA: Final = True
MANAGED: Final = ""

_EXPORT: Final = "data"
"""Name under which each brick exports its target."""

_USER: Final = "beeond"
"""GlusterFS's login needs a name beside the password."""

_LOG_LEVEL: Final = "ERROR"
"""One level more and every process prints its volume file, with the password, into its log."""

_SILENCE_S: Final = 20
"""Seconds after which a brick that answers no ping counts as dead. GlusterFS's own 42 would outlast our deadlines;
much less takes a node for dead that only computes on all of its cores."""

_OPERATION_S: Final = 600
"""Seconds a living brick may take for one operation, such as syncing a large file to a slow device."""


def edition(config: SiteConfig, find: Callable[[str], str | None]) -> str:  # noqa: ARG001
    """There is only one."""
    return ""


def services(plan: Plan, node: str, keys: Keys) -> tuple[Service, ...]:
    """The bricks of `node`, one per target: brick t listens at `plan.block + t`."""
    if not plan.serves(node):
        return ()
    return tuple(_brick(plan, node, target, keys) for target in plan.targets)


def membership(plan: Plan, keys: Keys) -> tuple[Question, ...]:  # noqa: ARG001 - the backends' common interface
    """None: each node sees its own bricks listening, and a client that does not reach one of them ends."""
    return ()


def mount(plan: Plan, node: str, keys: Keys) -> Mount:  # noqa: ARG001
    """The FUSE client, the same on every node."""
    point, log = plan.mount_point, f"{plan.run_dir}/logs/client.log"
    volume = f"{plan.run_dir}/client.vol"
    argv = (
        "glusterfs", "--no-daemon", f"--volfile={volume}", f"--log-file={log}", f"--log-level={_LOG_LEVEL}",
        # what df(1) and mount(8) show; it has no other use where no server is asked for the volume file
        f"--volfile-id=beeond-{plan.job.job_id}",
        "--process-name=fuse", "--acl", "--attribute-timeout=0", "--entry-timeout=0", "--negative-timeout=0",
        # $BEEOND/.meta would show every option to the user, the password too: give it a name that no path can have
        "--xlator-option=meta-autoload.meta-dir-name=/",
        # its own default is to keep pages from one open to the next, whatever other nodes have written meanwhile
        "--fopen-keep-cache=off",
        "--event-history=off", "--reader-thread-count=4", "--fuse-mountopts=nodev,nosuid", point,
    )  # fmt: skip
    client = Service(
        name="glusterfs client",
        argv=argv,
        log=log,
        ready=Mounted(point, "fuse.glusterfs"),
        files=(File(volume, client_volume(plan, keys)),),
    )
    return Mount(point=point, fstype="fuse.glusterfs", service=client)


def arrange(plan: Plan, keys: Keys) -> tuple[Command, ...]:  # noqa: ARG001
    """Nothing: GlusterFS places whole files."""
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


def _brick(plan: Plan, node: str, target: Target, keys: Keys) -> Service:
    name = f"brick-{target.index}"
    log = f"{plan.run_dir}/logs/{name}.log"
    volume = f"{plan.run_dir}/{name}.vol"
    host, port = plan.address(node), plan.block + target.index
    return Service(
        name=f"glusterfs {name}",
        argv=(
            "glusterfsd", "--no-daemon", f"--volfile={volume}", f"--log-file={log}", f"--log-level={_LOG_LEVEL}",
            f"--process-name={name}",
        ),
        log=log,
        ready=PortOpen(host, port),
        files=(File(volume, brick_volume(target.data, host, port, keys)),),
    )  # fmt: skip


def brick_volume(directory: str, host: str, port: int, keys: Keys) -> str:
    """Volume file of a brick that serves `directory` at `host`:`port` to those who know the job's password."""
    return "\n".join((
        _volume("posix", "storage/posix", [
            ("directory", directory),
            ("max-hardlinks", "0"),  # no limit of its own; the default is 100
            ("ctime", "off"),  # times in an extended attribute of every file serve replicas, which we have not
            ("gfid2path", "off"),  # so does this, for healing
            # its check writes a file, and ends a brick whose device is only full; we look at devices before a proof
            ("health-check-interval", "0"),
            ("reserve", "0"),  # 1 % that only GlusterFS itself may use; what tear-down needs is kept by ourselves
        ]),
        _volume("access", "features/access-control", [], ["posix"]),
        _volume("locks", "features/locks", [], ["access"]),
        _volume(_EXPORT, "performance/io-threads", [("thread-count", "16")], ["locks"]),
        _volume("server", "protocol/server", [
            ("transport-type", "tcp"),
            ("transport.address-family", "inet"),
            ("transport.socket.bind-address", host),
            ("transport.socket.listen-port", str(port)),
            ("transport.socket.nodelay", "on"),
            ("transport.listen-backlog", "1024"),
            ("event-threads", "4"),
            (f"auth.login.{_EXPORT}.allow", _USER),
            (f"auth.login.{_USER}.password", keys.authentication),
            # without this a client that names no user, or another one, is somebody else's business
            ("strict-auth-accept", "on"),
        ], [_EXPORT]),
    ))  # fmt: skip


_latest: tuple[Plan, Keys, str] | None = None


def client_volume(plan: Plan, keys: Keys) -> str:
    """Volume file of every client: the same text on all nodes, made once per plan (it names every brick)."""
    global _latest  # a plan of 10,000 nodes asks 10,000 times, and is slow to hash
    if _latest is not None and _latest[0] is plan and _latest[1] == keys:
        return _latest[2]
    bricks = [
        (f"brick-{index}-{target.index}", plan.address(node), plan.block + target.index)
        for index, node in enumerate(plan.servers)
        for target in plan.targets
    ]
    text = "\n".join((
        *(
            _volume(name, "protocol/client", [
                ("transport-type", "tcp"),
                ("transport.address-family", "inet"),
                ("transport.socket.nodelay", "on"),
                ("transport.tcp-user-timeout", str(_SILENCE_S)),
                ("remote-host", host),
                ("remote-port", str(port)),
                ("remote-subvolume", _EXPORT),
                ("username", _USER),
                ("password", keys.authentication),
                ("ping-timeout", str(_SILENCE_S)),
                ("frame-timeout", str(_OPERATION_S)),
                ("event-threads", "4"),
                # a job of many nodes has more bricks than a host has privileged ports
                ("client-bind-insecure", "on"),
            ])
            for name, host, port in bricks
        ),
        _volume("spread", "cluster/distribute", [
            ("lookup-optimize", "on"),  # a new name is looked up on one brick, not on all
            ("assert-no-child-down", "on"),
        ], [name for name, _, _ in bricks]),
    ))  # fmt: skip
    _latest = (plan, keys, text)
    return text


def _volume(name: str, kind: str, options: Iterable[tuple[str, str]], subvolumes: Iterable[str] = ()) -> str:
    lines = [f"volume {name}", f"    type {kind}"]
    lines += [f"    option {key} {_quoted(value)}" for key, value in options]
    if below := " ".join(subvolumes):
        lines.append(f"    subvolumes {below}")
    return "\n".join([*lines, "end-volume", ""])


def _quoted(value: str) -> str:
    if not value.isprintable() or "`" in value:
        raise ConfigError(
            f"{value!r} cannot stand in a GlusterFS volume file; choose a path of printable characters"
        )
    return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
