"""One machine of the cluster: its root file system, its mounts and its services. Starts nothing itself.

The root is an overlay on the machine's own `/`; what belongs to that machine and not to its software
(`/etc/slurm`, `/home`, `/var/log`, keys, …) is hidden and made anew.
"""

from __future__ import annotations

import grp
import os
import pwd
import shutil
import stat
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.testbed import host, ns, slurm

HIDDEN = [
    "etc/slurm",
    "etc/munge",
    "etc/ssh",
    "etc/beeond-ctl",
    "home",
    "root",
    "mnt",
    "media",
    "srv",
    "var/tmp",
    "var/log",
    "var/mail",
    "var/lib/slurm",
    "var/lib/munge",
    "var/lib/beeond-ctl",
    "var/spool/slurmd",
]
MACHINE_UUID = Path("/sys/class/dmi/id/product_uuid")
"""Every real node has one. Where there is none, each server of BeeGFS 8 looks through all block devices for another
before it registers; and here these are the devices of all nodes."""
LOOP_NODES = 128  # device nodes /dev/loopN made beforehand: nothing creates them in a /dev of one's own
DISK_TYPES = frozenset(["ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs"])
SOFTWARE = ("/usr", "/etc", "/var", "/opt", "/lib", "/bin", "/sbin")


@dataclass(frozen=True, slots=True)
class User:
    """An ordinary user of the cluster; the home is on global storage, as at most sites."""

    name: str
    uid: int

    @property
    def home(self) -> str:
        return f"/global/{self.name}"


USERS = (User("alice", 2001), User("bob", 2002))
PROJECT = ("project", 2100)  # a group that both users are also in


@dataclass(frozen=True, slots=True)
class Machine:
    """A node of the cluster; role is "controller", "login" or "compute"."""

    name: str
    role: str
    address: str

    @property
    def mac(self) -> str:
        """The same after a reboot: with a new one, the others would send into the void for seconds."""
        return "02:00:" + ":".join(f"{int(part):02x}" for part in self.address.split("."))


def machines(count: int) -> list[Machine]:
    """The machines of a cluster with `count` compute nodes; addresses are private to the cluster's bridge."""
    return [
        Machine("ctl", "controller", "10.77.0.1"),
        Machine("login", "login", "10.77.0.2"),
        *(Machine(f"n{i}", "compute", f"10.77.{1 + i // 250}.{1 + i % 250}") for i in range(1, count + 1)),
    ]


def put(root: Path, path: str, text: str, mode: int = 0o644, owner: str = "root") -> None:
    """Write a file below `root`, with its directories."""
    target = root / path.lstrip("/")
    target.parent.mkdir(parents=True, exist_ok=True)
    if target.is_symlink():
        target.unlink()
    entry = pwd.getpwnam(owner)
    descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, mode)
    with os.fdopen(descriptor, "w") as handle:
        os.fchown(handle.fileno(), entry.pw_uid, entry.pw_gid)
        os.fchmod(handle.fileno(), mode)
        handle.write(text)


def make_directory(root: Path, path: str, mode: int, owner: str = "root") -> None:
    """Make a directory below `root`."""
    entry = pwd.getpwnam(owner)
    target = root / path
    target.mkdir(parents=True, exist_ok=True)
    os.chown(target, entry.pw_uid, entry.pw_gid)
    target.chmod(mode)


def prepare_overlays(machine_directory: Path, overlays: dict[str, str]) -> None:
    """Make the upper and work directories before the overlays are mounted, with what is HIDDEN hidden.

    And what the node's firmware tells, where this machine's tells nothing.
    """
    made = uuid.uuid5(uuid.NAMESPACE_DNS, machine_directory.name)
    put(machine_directory / "firmware", os.path.relpath(MACHINE_UUID, "/sys/class"), f"{made}\n", 0o400)
    for suffix in overlays.values():
        (machine_directory / f"upper{suffix}").mkdir(parents=True)
        (machine_directory / f"work{suffix}").mkdir()
    for path in (f"/{path}" for path in HIDDEN):
        if os.path.lexists(path):
            top = max((top for top in overlays if f"{path}/".startswith(f"{top.rstrip('/')}/")), key=len)
            directory = machine_directory / f"upper{overlays[top]}" / os.path.relpath(path, top)
            directory.mkdir(parents=True, exist_ok=True)
            os.setxattr(directory, "trusted.overlay.opaque", b"y")


def furnish(root: Path, machine: Machine, every: list[Machine], keys: Path, slurm_conf: str) -> None:
    """Write all that makes it this machine; `root` is its root directory as seen from here."""
    make_directory(root, "root", 0o700)
    make_directory(root, "var/tmp", 0o1777)
    make_directory(root, "global", 0o755)
    make_directory(root, "etc/munge", 0o700, "munge")
    make_directory(root, "var/lib/munge", 0o711, "munge")
    make_directory(root, "var/log/munge", 0o700, "munge")
    make_directory(root, "var/log/slurm", 0o755, "slurm")
    make_directory(root, "var/lib/slurm/slurmctld", 0o755, "slurm")
    make_directory(root, "var/spool/slurmd", 0o755)
    for hook in ("prolog.d", "epilog.d"):
        # A pattern that matches nothing is an error to slurmd, and drains the node.
        put(root, f"etc/slurm/{hook}/00-site", "#!/bin/sh\nexit 0\n", 0o755)
    make_directory(root, "etc/slurm/plugstack.conf.d", 0o755)
    put(root, "etc/hostname", machine.name + "\n")
    put(root, "etc/hosts", "127.0.0.1 localhost\n" + "".join(f"{m.address} {m.name}\n" for m in every))
    put(root, "etc/resolv.conf", "")
    put(root, "etc/nsswitch.conf", "passwd: files\ngroup: files\nshadow: files\nhosts: files\n")
    put(
        root,
        "etc/passwd",
        _accounts("passwd", [f"{u.name}:x:{u.uid}:{u.uid}::{u.home}:/bin/bash" for u in USERS]),
    )
    put(root, "etc/group", _accounts("group", [
        *(f"{u.name}:x:{u.uid}:" for u in USERS),
        f"{PROJECT[0]}:x:{PROJECT[1]}:{','.join(u.name for u in USERS)}",
    ]))  # fmt: skip
    put(root, "etc/shadow", _accounts("shadow", [f"{u.name}:*:19000::::::" for u in USERS]), 0o640)
    os.chown(root / "etc/shadow", 0, grp.getgrnam("shadow").gr_gid)
    if slurm.HOME:
        _put_programs(root, Path(slurm.HOME))
    put(root, "etc/slurm/slurm.conf", slurm_conf)
    put(root, "etc/slurm/plugstack.conf", slurm.PLUGSTACK_CONF)
    put(root, "etc/slurm/cgroup.conf", slurm.CGROUP_CONF)
    put(root, "etc/munge/munge.key", (keys / "munge.key").read_text(), 0o400, "munge")
    put(root, SERVICES_PATH, SERVICES, 0o755)
    _fill_ssh(root, machine, every, keys)


def _put_programs(root: Path, home: Path) -> None:
    """Slurm's programs, where the distribution's are or would be, and a place for plugins."""
    make_directory(root, slurm.OUR_PLUGINS.lstrip("/"), 0o755)
    for program in [*home.glob("bin/*"), *home.glob("sbin/*")]:
        link = root / "usr" / program.relative_to(home)
        link.unlink(missing_ok=True)
        link.symlink_to(program)


SERVICES_PATH = "usr/local/sbin/testbed-services"

# A diskful node's boot: what systemd would do for the services of this machine.
SERVICES = r"""#!/bin/sh
# testbed-services start|stop ROLE: the services of one machine of the test cluster.
set -eu
as() { user=$1; shift; setpriv --reuid="$user" --regid="$user" --init-groups -- "$@"; }
start_slurm() {
    install -d -o slurm -g slurm -m 0755 /run/slurm
    case $1 in
        controller) as slurm /usr/sbin/slurmctld ;;
        compute) /usr/sbin/slurmd ${2-} ;;
    esac
}
stop_slurm() {
    for name in slurmctld slurmd; do
        [ -f "/run/slurm/$name.pid" ] || continue
        pid=$(cat "/run/slurm/$name.pid")
        kill "$pid" 2>/dev/null || continue
        while kill -0 "$pid" 2>/dev/null; do sleep 0.02; done
    done
}
case $1 in
    boot)
        install -d -m 0755 /run/lock /run/sshd /run/mount /run/blkid
        install -d -o munge -g munge -m 0755 /run/munge
        as munge /usr/sbin/munged
        /usr/sbin/sshd
        start_slurm "$2" "${3-}" ;;
    restart-slurm) stop_slurm; start_slurm "$2" ;;
esac
"""


def _accounts(name: str, more: list[str]) -> str:
    ours = {line.split(":")[0] for line in more}
    lines = Path("/etc", name).read_text().splitlines()
    return "\n".join([*(line for line in lines if line.split(":")[0] not in ours), *more]) + "\n"


def _fill_ssh(root: Path, machine: Machine, every: list[Machine], keys: Path) -> None:
    """Sshd everywhere; root comes from the controller and from compute nodes, not from the login node."""
    host, public, user = (keys / name for name in ("host", "host.pub", "root"))
    put(root, "etc/ssh/ssh_host_ed25519_key", host.read_text(), 0o600)
    put(root, "etc/ssh/ssh_host_ed25519_key.pub", public.read_text())
    put(root, "etc/ssh/sshd_config", SSHD_CONFIG)
    put(root, "etc/ssh/ssh_config", SSH_CONFIG)
    kind, key = public.read_text().split()[:2]
    put(root, "etc/ssh/ssh_known_hosts", "".join(f"{m.name},{m.address} {kind} {key}\n" for m in every))
    if Path("/etc/ssh/moduli").exists():
        shutil.copyfile("/etc/ssh/moduli", root / "etc/ssh/moduli")
    make_directory(root, "root/.ssh", 0o700)
    put(root, "root/.ssh/authorized_keys", user.with_suffix(".pub").read_text(), 0o600)
    if machine.role != "login":
        put(root, "root/.ssh/id_ed25519", user.read_text(), 0o600)


SSHD_CONFIG = """\
HostKey /etc/ssh/ssh_host_ed25519_key
PermitRootLogin prohibit-password
PasswordAuthentication no
KbdInteractiveAuthentication no
UsePAM no
UseDNS no
MaxStartups 200
"""
SSH_CONFIG = """\
Host *
    StrictHostKeyChecking yes
    BatchMode yes
    ConnectTimeout 10
"""


def namespace_spec(
    machine: Machine,
    room: str,
    hub_pid: int,
    overlays: dict[str, str],
    shown: list[str],
    readonly: list[str],
) -> dict[str, Any]:
    """What ns.py needs to start this machine.

    `room` is the directory that holds the machines' overlays and devices as the hub sees it; `shown` are
    directories of this machine (the project and its Python) that appear in the node, read-only, at their
    own paths; `readonly` are directories of global storage that are read-only for now.
    """
    mine = f"{room}/{machine.name}"
    root = f"{mine}/root"
    mounts: list[dict[str, Any]] = [
        _mount("proc", "/proc", "proc", ns.MS_NOSUID | ns.MS_NODEV | ns.MS_NOEXEC),
        _mount("sysfs", "/sys", "sysfs", ns.MS_NOSUID | ns.MS_NODEV | ns.MS_NOEXEC),
        _mount("tmpfs", "/dev", "tmpfs", ns.MS_NOSUID, "mode=755"),
        _mount(
            "devpts",
            "/dev/pts",
            "devpts",
            ns.MS_NOSUID | ns.MS_NOEXEC,
            "newinstance,ptmxmode=666,mode=620,gid=5",
        ),
        _mount("tmpfs", "/dev/shm", "tmpfs", ns.MS_NOSUID | ns.MS_NODEV, "mode=1777"),
        _mount("mqueue", "/dev/mqueue", "mqueue", ns.MS_NOSUID | ns.MS_NODEV | ns.MS_NOEXEC),
        _mount("tmpfs", "/run", "tmpfs", ns.MS_NOSUID | ns.MS_NODEV, "mode=755"),
        _mount("tmpfs", "/tmp", "tmpfs", ns.MS_NOSUID | ns.MS_NODEV, "mode=1777"),
        _bind(f"{room}/global", "/global"),
    ]
    if not MACHINE_UUID.exists():
        lower = f"{mine}/firmware:{root}/sys/class"
        mounts.append(_mount("overlay", "/sys/class", "overlay", 0, f"lowerdir={lower}"))
    if machine.role == "compute":
        mounts.append(_bind(f"{room}/nvme/{machine.name}", "/nvme"))
    mounts += [_bind(path, path, readonly=True) for path in shown]
    mounts += [_bind(f"{room}{path}", path, readonly=True) for path in readonly]
    return {
        "join": hub_pid,
        "hostname": machine.name,
        "process_name": "testbed-init",
        "root": root,
        "overlays": [
            _mount("overlay", root + (path if path != "/" else ""), "overlay", 0,
                   f"lowerdir={path},upperdir={mine}/upper{suffix},workdir={mine}/work{suffix},xino=on")
            for path, suffix in overlays.items()
        ],
        "mounts": mounts,
        "devices": _devices(),
        "device_links": {
            "fd": "/proc/self/fd", "stdin": "/proc/self/fd/0", "stdout": "/proc/self/fd/1",
            "stderr": "/proc/self/fd/2", "ptmx": "pts/ptmx",
        },
        "reachable": shown,
    }  # fmt: skip


def software_file_systems() -> dict[str, str]:
    """The file systems that hold this machine's software, each with the suffix of its upper directory.

    `/` always; `/usr`, `/var` and the like where they are file systems of their own. Not what tests mount meanwhile.
    """
    found = {"/": ""}
    for line in host.mount_table():
        before, after = line.split(" - ")
        path, (kind, source) = before.split()[4], after.split()[:2]
        if source.startswith("/dev/loop") or path.startswith("/var/lib/beeond-test-"):
            continue
        if kind in DISK_TYPES and any(path == top or path.startswith(top + "/") for top in SOFTWARE):
            found[path] = path.replace("/", "-")
    return found


def _devices() -> list[list[Any]]:
    wanted = ["null", "zero", "full", "random", "urandom", "tty", "fuse", "loop-control"]
    found: list[list[Any]] = []
    for name in wanted:
        try:
            status = os.stat(f"/dev/{name}")
        except FileNotFoundError:
            continue
        mode = 0o600 if name == "loop-control" else 0o666
        found.append([name, "c", os.major(status.st_rdev), os.minor(status.st_rdev), mode])
    step = _loop_minor_step()
    return found + [[f"loop{i}", "b", 7, i * step, 0o660] for i in range(LOOP_NODES)]


def _loop_minor_step() -> int:
    """Minor numbers per loop device: more than one where the kernel was told to keep some for partitions."""
    try:
        status = os.stat("/dev/loop1")
    except FileNotFoundError:
        return 1
    return os.minor(status.st_rdev) if stat.S_ISBLK(status.st_mode) else 1


def _mount(source: str, target: str, kind: str, flags: int = 0, data: str = "") -> dict[str, Any]:
    return {"source": source, "target": target, "type": kind, "flags": flags, "data": data}


def _bind(source: str, target: str, *, readonly: bool = False) -> dict[str, Any]:
    return {"source": source, "target": target, "type": "bind", "readonly": readonly}
