"""The servers of a node and its kernel client: commands and configuration of both generations. Pure.

Nothing here lets a program look for its site-wide default file: that one may be of a permanent BeeGFS. What a site adds
to the settings was checked by `beeond_ctl.overrides`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from beeond_ctl import overrides
from beeond_ctl.backends import Command, File, Mount, Once, PortOpen, Service
from beeond_ctl.backends.beegfs import layout
from beeond_ctl.backends.beegfs.layout import PORTS
from beeond_ctl.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from beeond_ctl.backends import Advice, Keys
    from beeond_ctl.plan import Plan

_SECRET_ADVICE: Final = "nodes differ in their site secret (paths.secret); make it the same everywhere"  # noqa: S105
_SERVER_ADVICE: Final[Advice] = (
    ("already in use", "see what has the port (ss -lntup)"),
    ("usable nic", "beegfs.interfaces names none that is up; a host with only lo cannot run a server"),
    ("failed to resolve", "the leader's name has no address here; see network.suffix"),
    (
        "config argument",
        "this version of BeeGFS does not know that setting; see beegfs.settings and beegfs.conf_dir",
    ),
    # mgmtd hangs up on who has another key, and the server asks again for ever
    ("soft disconnect", _SECRET_ADVICE),
    ("authentication", _SECRET_ADVICE),
    ("waiting for", "mgmtd on the leader is silent, or something between the nodes drops what they send"),
    ("uuid", "BeeGFS 8 needs the machine's UUID; see /sys/class/dmi/id/product_uuid"),
)
_NO_MODULE: Final = (
    "the client's kernel module is not there for this kernel; install or rebuild it, then `modprobe beegfs`"
)
_MOUNT_ADVICE: Final[Advice] = (
    ("unknown filesystem type", _NO_MODULE),
    ("no such device", _NO_MODULE),
    ("exec format error", _NO_MODULE),
    ("authentication", _SECRET_ADVICE),
    ("resolve", "the leader's name has no address here; see network.suffix"),
    ("invalid argument", "module and servers may be of different versions; compare them, and see dmesg"),
)

_SOFTLY: Final = ("chrt", "--batch", "0")
"""Starts mgmtd so that it does not push others aside when it wakes up.

A server that registers asks by UDP, and waits 1.0 s in vain for an answer that came before it began to wait: where both
share a busy core, each second one did.
"""

_LOG_SIZE: Final = {"logNumLines": "2500", "logNumRotatedFiles": "1"}
"""All servers of a node together stay below `logs.SIZE`, which their own 50,000 would not. The newest stay."""

# Classes of free space that decide where new files may go. BeeGFS's own are for large permanent systems: a target of
# less than 1 TiB would be in short supply from the start, and files get fewer stripes than asked when targets differ.
_LOW_SPACE, _LEAST_SPACE = 1024**3, 256 * 1024**2
_LOW_INODES, _LEAST_INODES = 100_000, 10_000


def services(plan: Plan, node: str, keys: Keys) -> tuple[Service, ...]:
    """mgmtd on the leader, which is first; one storage server for all targets of a node; a metadata server on some."""
    found = []
    if node == plan.leader:
        found.append(_mgmtd_7(plan, keys) if plan.edition == "7.4" else _mgmtd_8(plan, keys))
    if node in plan.meta_nodes:
        found.append(_meta(plan, node, keys))
    if node in plan.storage_nodes:
        found.append(_storage(plan, node, keys))
    return tuple(found)


def _mgmtd_7(plan: Plan, keys: Keys) -> Service:
    limits: dict[str, str] = {}
    for kind in ("Meta", "Storage"):
        limits |= {
            f"tune{kind}SpaceLowLimit": str(_LOW_SPACE),
            f"tune{kind}SpaceEmergencyLimit": str(_LEAST_SPACE),
            f"tune{kind}InodesLowLimit": str(_LOW_INODES),
            f"tune{kind}InodesEmergencyLimit": str(_LEAST_INODES),
            f"tune{kind}DynamicPools": "false",
        }
    settings = {
        "storeMgmtdDirectory": word(f"{plan.targets[0].data}/mgmtd"),
        "storeAllowFirstRunInit": "true",
        **limits,
        **_network(plan),
    }
    return _daemon(plan, "mgmtd", settings, keys, listens=PORTS["mgmtd"], first=True)


def _mgmtd_8(plan: Plan, keys: Keys) -> Service:
    database, config = f"{plan.targets[0].data}/mgmtd.sqlite", f"{plan.run_dir}/beegfs-mgmtd.toml"
    # Without its own file it reads the one in /etc; without this log target it needs journald.
    start = ("beegfs-mgmtd", "--config-file", config, "--db-file", database, "--log-target", "stderr")
    argv = (
        *_SOFTLY, *start, "--tls-disable", "--auth-file", auth_path(plan),
        # Which licence a site has is in a file of its own, the same for all its file systems.
        *(() if plan.config.beegfs.licensed else ("--license-disable",)),
        "--port-shift", str(layout.shift(plan)),
        # By itself it names loopback, too, and who registers sends to each address. See _SOFTLY.
        "--interfaces", ",".join(plan.interfaces) or "! lo,*",
    )  # fmt: skip
    limits = {
        "inodes-low": _LOW_INODES, "inodes-emergency": _LEAST_INODES,
        "space-low": _LOW_SPACE, "space-emergency": _LEAST_SPACE,
    }  # fmt: skip
    text = overrides.toml_text({
        "cap-pool-meta-limits": limits, "cap-pool-storage-limits": limits, **_site(plan, "mgmtd", dashes=True),
    })  # fmt: skip
    files = (File(config, text), auth_file(plan, keys))
    return Service(
        name="beegfs-mgmtd", argv=argv, log=_log(plan, "mgmtd"), files=files, first=True, advice=_SERVER_ADVICE,
        ready=PortOpen(plan.address(plan.leader), layout.port(plan, PORTS["mgmtd"])),
        once=Once(Command((*start, "--init"), files), creates=database),
    )  # fmt: skip


def _meta(plan: Plan, node: str, keys: Keys) -> Service:
    if plan.metadata is None:
        raise AssertionError("a plan of this backend has metadata")
    directory = plan.metadata.data
    settings = {
        "sysMgmtdHost": plan.address(plan.leader),
        "storeMetaDirectory": word(directory),
        "storeAllowFirstRunInit": "true",
        "storeUseExtendedAttribs": "true",
        "storeClientXAttrs": "true",
        **_network(plan),
    }
    numbers = (File(f"{directory}/nodeNumID", f"{layout.node_number(plan, node)}\n"),)
    # A metadata server learns of the others when it registers, and of those that register later by messages that were
    # seen to come seconds after all is Online and Good. Meanwhile it puts files on too few targets, and refuses what
    # needs a server that it does not know ("Unknown node": EREMOTEIO). So one alone is started last. Several have to
    # know each other: they are started twice, the second time when all are registered.
    alone = len(plan.meta_nodes) == 1
    made = _daemon(plan, "meta", settings, keys, listens=PORTS["meta"], files=numbers)
    return replace(made, last=alone, twice=not alone)


def _storage(plan: Plan, node: str, keys: Keys) -> Service:
    directories = [f"{target.data}/storage" for target in plan.targets]
    settings = {
        "sysMgmtdHost": plan.address(plan.leader),
        "storeStorageDirectory": ",".join(word(directory) for directory in directories),
        "storeAllowFirstRunInit": "true",
        **_network(plan),
    }
    numbers = []
    for index, directory in enumerate(directories):
        target = layout.target_number(plan, node, index)
        numbers += [
            File(f"{directory}/nodeNumID", f"{layout.node_number(plan, node)}\n"),
            File(f"{directory}/targetNumID", f"{target}\n"),
            File(f"{directory}/targetID", f"target-{target}\n"),  # BeeGFS takes no number without a name
        ]
    return _daemon(plan, "storage", settings, keys, listens=PORTS["storage"], files=tuple(numbers))


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
    text = overrides.conf_text({
        **settings,
        **({"logType": "logfile"} if plan.edition == "8" else {}),
        "logStdFile": log,
        **_LOG_SIZE,
        "connAuthFile": auth_path(plan),
        "runDaemonized": "false",
        **_site(plan, name),
    })  # fmt: skip
    argv = (*(_SOFTLY if first else ()), f"beegfs-{name}", f"cfgFile={path}")
    return Service(
        name=f"beegfs-{name}", argv=argv, log=log, first=first, advice=_SERVER_ADVICE,
        ready=PortOpen(plan.address(plan.leader), layout.port(plan, listens)),
        files=(File(path, text), auth_file(plan, keys), *files),
    )  # fmt: skip


def _site(plan: Plan, program: str, *, dashes: bool = False) -> dict[str, object]:
    """What the site adds for `program`; settings of mgmtd 8 have dashes in their names, all others have none."""
    settings = plan.config.beegfs.settings.get(program, {})
    return {key: value for key, value in settings.items() if ("-" in key) == dashes}


def _network(plan: Plan) -> dict[str, str]:
    names = plan.interfaces
    return {
        "connPortShift": str(layout.shift(plan)),
        "connUseRDMA": _flag(plan.config.beegfs.rdma),
        **({"connInterfacesList": ",".join(names)} if names else {}),
    }


def auth_path(plan: Plan) -> str:
    """The connection key's file."""
    return f"{plan.run_dir}/beegfs-auth"


def auth_file(plan: Plan, keys: Keys) -> File:
    """The connection key."""
    return File(auth_path(plan), keys.authentication)


def _log(plan: Plan, name: str) -> str:
    return f"{plan.run_dir}/logs/beegfs-{name}.log"


def _flag(value: bool) -> str:  # noqa: FBT001 - a value, not a switch
    return "true" if value else "false"


def word(path: str) -> str:
    """`path`, which has to be one word in BeeGFS's configuration. Raises ConfigError."""
    if not path.isprintable() or set(path) & set(",#\" '\\"):
        raise ConfigError(f"{path!r} cannot stand in BeeGFS's configuration; choose a plainer storage.paths")
    return path


# --- the client -------------------------------------------------------------------------------------------


def mount(plan: Plan, node: str, keys: Keys) -> Mount:
    """The kernel client, and for 7.4 the helperd that it asks for names."""
    path, interfaces = f"{plan.run_dir}/beegfs-client.conf", f"{plan.run_dir}/beegfs-interfaces"
    preferred = _preferred(plan, node)
    text = overrides.conf_text({
        "sysMgmtdHost": plan.address(plan.leader),
        "connPortShift": str(layout.shift(plan)),
        "connAuthFile": auth_path(plan),
        "connUseRDMA": _flag(plan.config.beegfs.rdma),
        **({"connInterfacesFile": interfaces} if plan.interfaces else {}),
        # Its own check waits up to 11 s for targets that are not Online; every node's write probe checks more.
        "sysMountSanityCheckMS": "0",
        "sysXAttrsEnabled": "true",
        "tuneUseGlobalFileLocks": "true",
        "quotaEnabled": "false",
        **{key: file.path for key, file in preferred.items()},
        **_site(plan, "client"),
    })  # fmt: skip
    files = [File(path, text), auth_file(plan, keys), *preferred.values()]
    if plan.interfaces:
        files.append(File(interfaces, "".join(f"{name}\n" for name in plan.interfaces)))
    options = f"nodev,nosuid,cfgFile={word(path)}"
    command = Command(
        ("mount", "-n", "-t", "beegfs", "-o", options, "beegfs_nodev", plan.mount_point),
        files=tuple(files),
        advice=_MOUNT_ADVICE,
    )
    return Mount(
        point=plan.mount_point,
        fstype="beegfs",
        command=command,
        helpers=(_helperd(plan, keys),) if plan.edition == "7.4" else (),
    )


def _preferred(plan: Plan, node: str) -> dict[str, File]:
    """Files that tell the client which servers are this node's own; one that has none asks all alike."""
    if not plan.prefer_local:
        return {}
    found = {}
    if node in plan.storage_nodes:
        numbers = [layout.target_number(plan, node, target.index) for target in plan.targets]
        text = "".join(f"{number}\n" for number in numbers)
        found["tunePreferredStorageFile"] = File(f"{plan.run_dir}/beegfs-preferred-storage", text)
    if node in plan.meta_nodes:
        number = layout.node_number(plan, node)
        found["tunePreferredMetaFile"] = File(f"{plan.run_dir}/beegfs-preferred-meta", f"{number}\n")
    return found


def _helperd(plan: Plan, keys: Keys) -> Service:
    settings = {"connPortShift": str(layout.shift(plan))}
    return _daemon(plan, "helperd", settings, keys, listens=PORTS["helperd"])
