"""BeeGFS 7.4 and 8.x: mgmtd on the leader, metadata servers on the first nodes, storage and a kernel client on all.

Pure: makes commands and configuration, touches nothing. It must not know how processes are run or storage is prepared.

The two generations are told apart by their programs and share the servers' configuration keys; management service,
command line tool and ports differ. Numbers of nodes and targets are ours and not mgmtd's choice (files beside the data
say so, as BeeGFS's own beegfs-setup-storage writes them), so its list can be compared with the plan. docs/beegfs.md
has the reasons and figures. Nothing here lets a program look for its site-wide default file: that one may be of a
permanent BeeGFS.
"""

from __future__ import annotations

import json
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from beeond_ctl.backends import Command, File, Mount, Once, PortOpen, Question, Service
from beeond_ctl.errors import ConfigError, NodeError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from beeond_ctl.backends import Advice, Keys
    from beeond_ctl.config import SiteConfig
    from beeond_ctl.plan import Plan

PROGRAMS: Final = ("beegfs-mgmtd", "beegfs-meta", "beegfs-storage")
ROOT_IS_DATA: Final = False
MANAGED: Final = True
"""A server that asks for mgmtd before it listens loses 1.5 s."""

_TOOLS: Final = {"7.4": ("beegfs-ctl", "beegfs-helperd"), "8": ("beegfs",)}
"""What only one generation has."""

# BeeGFS shifts all its ports together (connPortShift); these are the ones without a shift.
_STORAGE: Final = 8003
_META: Final = 8005
_HELPERD: Final = 8006
_MGMTD: Final = 8008
_GRPC: Final = 8010
PORTS: Final = {
    "storage": _STORAGE,
    "client": 8004,
    "meta": _META,
    "helperd": _HELPERD,
    "mgmtd": _MGMTD,
    "gRPC": _GRPC,
}

_MAX_TARGETS: Final = 65535
"""Target numbers have 16 bits."""

_SERVER_ADVICE: Final[Advice] = (
    ("already in use", "see what has the port (ss -lntup)"),
    ("usable nic", "beegfs.interfaces names none that is up; a host with only lo cannot run a server"),
    ("authentication", "nodes differ in their site secret (paths.secret); make it the same everywhere"),
    ("uuid", "BeeGFS 8 needs the machine's UUID; see /sys/class/dmi/id/product_uuid"),
)
_NO_MODULE: Final = (
    "the client's kernel module is not there for this kernel; install or rebuild it, then `modprobe beegfs`"
)
_MOUNT_ADVICE: Final[Advice] = (
    ("unknown filesystem type", _NO_MODULE),
    ("no such device", _NO_MODULE),
    ("exec format error", _NO_MODULE),
    ("authentication", "nodes differ in their site secret (paths.secret); make it the same everywhere"),
    ("resolve", "the leader's name has no address here; see network.suffix"),
    ("invalid argument", "module and servers may be of different versions; compare them, and see dmesg"),
)


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


def port(plan: Plan, number: int) -> int:
    """The port of this instance that BeeGFS without a shift would have as `number`."""
    return number + _shift(plan)


def _shift(plan: Plan) -> int:
    if plan.block < _STORAGE:
        raise ConfigError(f"network.ports: BeeGFS cannot use ports below {_STORAGE}; choose a higher range")
    return plan.block - _STORAGE


# --- services ---------------------------------------------------------------------------------------------


def services(plan: Plan, node: str, keys: Keys) -> tuple[Service, ...]:
    """mgmtd on the leader, which is first; one storage server for all targets; a metadata server on the first nodes."""
    if len(plan.nodes) * len(plan.targets) > _MAX_TARGETS:
        raise ConfigError(f"backend beegfs has at most {_MAX_TARGETS} targets; use fewer of storage.paths")
    found = []
    if node == plan.leader:
        found.append(_mgmtd_7(plan, keys) if plan.edition == "7.4" else _mgmtd_8(plan, keys))
    if node in plan.meta_nodes:
        found.append(_meta(plan, node, keys))
    found.append(_storage(plan, node, keys))
    return tuple(found)


def _mgmtd_7(plan: Plan, keys: Keys) -> Service:
    settings = {
        "storeMgmtdDirectory": _word(f"{plan.targets[0].data}/mgmtd"),
        "storeAllowFirstRunInit": "true",
        "connPortShift": str(_shift(plan)),
        "connUseRDMA": _flag(plan.config.beegfs.rdma),
        **_interfaces(plan),
    }
    return _daemon(plan, "mgmtd", settings, keys, listens=_MGMTD, first=True)


def _mgmtd_8(plan: Plan, keys: Keys) -> Service:
    database, config = f"{plan.targets[0].data}/mgmtd.sqlite", f"{plan.run_dir}/beegfs-mgmtd.toml"
    # Without its own file it reads the one in /etc; without this log target it needs journald.
    start = ("beegfs-mgmtd", "--config-file", config, "--db-file", database, "--log-target", "stderr")
    interfaces = plan.config.beegfs.interfaces
    argv = (
        *start, "--tls-disable", "--auth-file", _auth_path(plan), "--license-disable",
        "--port-shift", str(_shift(plan)),
        *(("--interfaces", ",".join(interfaces)) if interfaces else ()),
    )  # fmt: skip
    files = (File(config, ""), _auth_file(plan, keys))
    return Service(
        name="beegfs-mgmtd", argv=argv, log=_log(plan, "mgmtd"), files=files, first=True, advice=_SERVER_ADVICE,
        ready=PortOpen(plan.address(plan.leader), port(plan, _MGMTD)),
        once=Once(Command((*start, "--init"), files), creates=database),
    )  # fmt: skip


def _meta(plan: Plan, node: str, keys: Keys) -> Service:
    if plan.metadata is None:
        raise AssertionError("a plan of this backend has metadata")
    directory = plan.metadata.data
    settings = {
        "sysMgmtdHost": plan.address(plan.leader),
        "storeMetaDirectory": _word(directory),
        "storeAllowFirstRunInit": "true",
        "storeUseExtendedAttribs": "true",
        "storeClientXAttrs": "true",
        **_server(plan),
    }
    numbers = (File(f"{directory}/nodeNumID", f"{plan.node_index[node] + 1}\n"),)
    return _daemon(plan, "meta", settings, keys, listens=_META, files=numbers)


def _storage(plan: Plan, node: str, keys: Keys) -> Service:
    directories = [f"{target.data}/storage" for target in plan.targets]
    settings = {
        "sysMgmtdHost": plan.address(plan.leader),
        "storeStorageDirectory": ",".join(_word(directory) for directory in directories),
        "storeAllowFirstRunInit": "true",
        **_server(plan),
    }
    number = plan.node_index[node] + 1
    numbers = []
    for index, directory in enumerate(directories):
        target = target_number(plan, node, index)
        numbers += [
            File(f"{directory}/nodeNumID", f"{number}\n"),
            File(f"{directory}/targetNumID", f"{target}\n"),
            File(f"{directory}/targetID", f"target-{target}\n"),  # BeeGFS takes no number without a name
        ]
    return _daemon(plan, "storage", settings, keys, listens=_STORAGE, files=tuple(numbers))


def target_number(plan: Plan, node: str, index: int) -> int:
    """Number of a node's target, in an instance."""
    return plan.node_index[node] * len(plan.targets) + index + 1


def _daemon(
    plan: Plan,
    name: str,
    settings: Mapping[str, str],
    keys: Keys,
    *,
    listens: int,
    files: tuple[File, ...] = (),
    first: bool = False,
) -> Service:
    # In the foreground: a daemon that forks does so before it knows whether it can work.
    path, log = f"{plan.run_dir}/beegfs-{name}.conf", _log(plan, name)
    text = _text({
        **settings,
        **({"logType": "logfile"} if plan.edition == "8" else {}),
        "logStdFile": log,
        "connAuthFile": _auth_path(plan),
        "runDaemonized": "false",
    })  # fmt: skip
    return Service(
        name=f"beegfs-{name}", argv=(f"beegfs-{name}", f"cfgFile={path}"), log=log, first=first, advice=_SERVER_ADVICE,
        ready=PortOpen(plan.address(plan.leader), port(plan, listens)),
        files=(File(path, text), _auth_file(plan, keys), *files),
    )  # fmt: skip


def _server(plan: Plan) -> dict[str, str]:
    return {
        "connPortShift": str(_shift(plan)),
        "connUseRDMA": _flag(plan.config.beegfs.rdma),
        **_interfaces(plan),
    }


def _interfaces(plan: Plan) -> dict[str, str]:
    names = plan.config.beegfs.interfaces
    return {"connInterfacesList": ",".join(names)} if names else {}


def _auth_path(plan: Plan) -> str:
    return f"{plan.run_dir}/beegfs-auth"


def _auth_file(plan: Plan, keys: Keys) -> File:
    return File(_auth_path(plan), keys.authentication)


def _log(plan: Plan, name: str) -> str:
    return f"{plan.run_dir}/logs/beegfs-{name}.log"


def _text(settings: Mapping[str, str]) -> str:
    return "".join(f"{key} = {value}\n" for key, value in settings.items())


def _flag(value: bool) -> str:  # noqa: FBT001 - a value, not a switch
    return "true" if value else "false"


def _word(path: str) -> str:
    if not path.isprintable() or set(path) & set(",#\" '\\"):
        raise ConfigError(f"{path!r} cannot stand in BeeGFS's configuration; choose a plainer storage.paths")
    return path


# --- the tool ---------------------------------------------------------------------------------------------


def _tool(plan: Plan, keys: Keys, *words_7: str, words_8: tuple[str, ...]) -> Command:
    if plan.edition == "7.4":
        path = f"{plan.run_dir}/beegfs-ctl.conf"
        text = _text({
            "sysMgmtdHost": plan.address(plan.leader),
            "connPortShift": str(_shift(plan)),
            "connAuthFile": _auth_path(plan),
            "connUseRDMA": "false",
            "logEnabled": "false",
        })  # fmt: skip
        return Command(
            ("beegfs-ctl", f"--cfgFile={path}", *words_7), files=(File(path, text), _auth_file(plan, keys))
        )
    address = f"{plan.address(plan.leader)}:{port(plan, _GRPC)}"
    return Command(
        (
            "beegfs", "--mgmtd-addr", address, "--tls-disable", "--auth-file", _auth_path(plan), "--output", "json",
            *words_8,
        ),
        files=(_auth_file(plan, keys),),
        codes=(0, 1),  # it does what it was asked, and exits 1 where the licence library is not installed
    )  # fmt: skip


def membership(plan: Plan, keys: Keys) -> tuple[Question, ...]:
    """mgmtd's own list. 7.4 can be mounted before its targets are Online, 8 cannot."""
    storage = {
        target_number(plan, node, target.index): node for node in plan.nodes for target in plan.targets
    }
    meta = {plan.node_index[node] + 1: node for node in plan.meta_nodes}
    if plan.edition == "7.4":
        return tuple(
            Question(
                _tool(
                    plan, keys, "--listtargets", f"--nodetype={kind}", "--state", "--longnodes", words_8=()
                ),
                partial(missing_7, kind, expected),
            )
            for kind, expected in (("storage", storage), ("meta", meta))
        )
    return (
        Question(
            _tool(plan, keys, words_8=("target", "list", "--state")),
            partial(missing_8, {"storage": storage, "meta": meta}),
        ),
    )


def missing_7(kind: str, expected: Mapping[int, str], answer: bytes) -> dict[str, str]:
    """Nodes out of `expected` (number of a target or metadata server: node) that `beegfs-ctl --listtargets` lacks."""
    there = set()
    for line in answer.decode(errors="replace").splitlines():
        words = line.split()
        if len(words) >= 3 and words[0].isdigit():
            there.add(int(words[0]))
    return {node: f"{kind} server not registered" for number, node in expected.items() if number not in there}


def missing_8(expected: Mapping[str, Mapping[int, str]], answer: bytes) -> dict[str, str]:
    """Nodes out of `expected` (per kind as in `missing_7`) that `beegfs target list` has not Online and Good."""
    states: dict[tuple[str, int], tuple[str, str]] = {}
    for entry in _entries(answer.decode(errors="replace")):
        number = str(entry.get("id", "")).rpartition(":")[2]
        if number.isdigit():
            state = (str(entry.get("reachability")), str(entry.get("consistency")))
            states[str(entry.get("type")).lower(), int(number)] = state
    missing = {}
    for kind, nodes in expected.items():
        for number_, node in nodes.items():
            state_ = states.get((kind, number_))
            if state_ is None:
                missing[node] = f"{kind} server not registered"
            elif state_ != ("Online", "Good"):
                missing[node] = f"{kind} server {' and '.join(state_)}"
    return missing


def _entries(text: str) -> Iterator[dict[str, Any]]:
    """The objects in several JSON lists one after the other: the tool begins a new one every 100 lines."""
    decoder, position = json.JSONDecoder(), 0
    while (
        start := min((i for i in (text.find("[", position), text.find("{", position)) if i >= 0), default=-1)
    ) >= 0:
        try:
            value, position = decoder.raw_decode(text, start)
        except ValueError:
            return
        for entry in value if isinstance(value, list) else [value]:
            if isinstance(entry, dict):
                yield entry


# --- clients ----------------------------------------------------------------------------------------------


def mount(plan: Plan, node: str, keys: Keys) -> Mount:  # noqa: ARG001 - the same on every node
    """The kernel client, and for 7.4 the helperd that it asks for names."""
    path, interfaces = f"{plan.run_dir}/beegfs-client.conf", f"{plan.run_dir}/beegfs-interfaces"
    names = plan.config.beegfs.interfaces
    text = _text({
        "sysMgmtdHost": plan.address(plan.leader),
        "connPortShift": str(_shift(plan)),
        "connAuthFile": _auth_path(plan),
        "connUseRDMA": _flag(plan.config.beegfs.rdma),
        **({"connInterfacesFile": interfaces} if names else {}),
        # Its own check waits up to 11 s for targets that are not Online; every node's write probe checks more.
        "sysMountSanityCheckMS": "0",
        "sysXAttrsEnabled": "true",
        "tuneUseGlobalFileLocks": "true",
        "quotaEnabled": "false",
    })  # fmt: skip
    files = [File(path, text), _auth_file(plan, keys)]
    if names:
        files.append(File(interfaces, "".join(f"{name}\n" for name in names)))
    command = Command(
        (
            "mount",
            "-n",
            "-t",
            "beegfs",
            "-o",
            f"nodev,nosuid,cfgFile={_word(path)}",
            "beegfs_nodev",
            plan.mount_point,
        ),
        files=tuple(files),
        advice=_MOUNT_ADVICE,
    )
    return Mount(
        point=plan.mount_point,
        fstype="beegfs",
        command=command,
        helpers=(_helperd(plan, keys),) if plan.edition == "7.4" else (),
    )


def _helperd(plan: Plan, keys: Keys) -> Service:
    return _daemon(plan, "helperd", {"connPortShift": str(_shift(plan))}, keys, listens=_HELPERD)


def settle(plan: Plan, keys: Keys) -> tuple[Command, ...]:
    """The stripe pattern of the root, and the site's directories with a pattern of their own, which are the user's."""
    targets = len(plan.nodes) * len(plan.targets)
    point, job = plan.mount_point, plan.job
    count = plan.request.stripe_count or plan.config.beegfs.stripe_count
    commands = [Command(("chmod", "0700", point)), _pattern(plan, keys, "/", min(count, targets))]
    for number in plan.config.beegfs.stripe_directories:
        path = f"{point}/stripe_{number}"
        commands += [
            Command(("mkdir", "-m", "0700", path)),
            _pattern(plan, keys, f"/stripe_{number}", min(number, targets)),
            Command(("chown", "-h", f"{job.uid}:{job.gid}", path)),
        ]
    return tuple(commands)


def _pattern(plan: Plan, keys: Keys, path: str, count: int) -> Command:
    size = plan.request.chunk_size or plan.config.beegfs.chunk_size
    whole = size % 1024**2 == 0
    number = size // (1024**2 if whole else 1024)
    return _tool(
        plan, keys,
        "--setpattern", "--unmounted", f"--chunksize={number}{'m' if whole else 'k'}", f"--numtargets={count}", path,
        words_8=(
            "entry", "set", "--mount=none", "--chunk-size", f"{number}{'Mi' if whole else 'Ki'}",
            "--num-targets", str(count), path,
        ),
    )  # fmt: skip


# --- metadata ---------------------------------------------------------------------------------------------


def skeleton_directories() -> Iterator[str]:
    """The 66,000 directories that a metadata server makes when it misses the last of them, parents first."""
    for top in ("inodes", "dentries", "buddymir", "buddymir/inodes", "buddymir/dentries"):
        yield top
        if top == "buddymir":
            continue
        for outer in range(128):
            yield f"{top}/{outer:X}"
            yield from (f"{top}/{outer:X}/{inner:X}" for inner in range(128))


def skeleton() -> str:
    """The directories as a prototype file of mkfs.xfs(8)."""
    directory = "d--755 0 0"
    lines, open_ = ["/dev/null", "0 0", directory], list[str]()
    for path in skeleton_directories():
        parts = path.split("/")
        while parts[:-1] != open_:  # an empty directory is closed when the next one is not in it
            open_.pop()
            lines.append("$")
        lines.append(f"{parts[-1]} {directory}")
        open_ = parts
    return "\n".join([*lines, *("$" for _ in open_), "$", ""])
