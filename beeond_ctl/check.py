"""Does this node fit? Looks at configuration, secret, devices, programs and Slurm's settings; changes nothing.

Each look is a `Finding`: "ok", "warn" (works, but will bite) or "fail" (jobs would fail).
"""

from __future__ import annotations

import os
import re
import shutil
import stat
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from beeond_ctl import backends, slurm, userfiles
from beeond_ctl import config as configuration
from beeond_ctl.errors import BeeondError, ConfigError, NodeError, one_line, visible

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from beeond_ctl.config import SiteConfig

PLUGIN: Final = "beeond.so"
_CONTROLLER: Final = "/usr/bin/beeond-ctl"
"""Where burst_buffer.lua expects us."""
_MARK: Final = rb"beeond-ctl SPANK plugin for Slurm 0x([0-9a-f]{2,4})([0-9a-f]{2})([0-9a-f]{2})\0"
"""Compiled into the plugin, so that a build for another release is seen before Slurm refuses to load it."""

_MACHINE_UUID: Final = Path("/sys/class/dmi/id/product_uuid")
"""What servers of BeeGFS 8 tell their management (docs/beegfs.md, "The missed answer")."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing looked at."""

    subject: str
    verdict: str
    text: str


def check_configuration(config_path: Path) -> list[Finding]:
    """What is to be said of the file alone."""
    return _read(config_path)[1]


def _read(config_path: Path) -> tuple[SiteConfig | None, list[Finding]]:
    """The configuration, if it can be used, and what is to be said of it."""
    try:
        config = configuration.load(config_path)
    except ConfigError as error:
        wrong = [" ".join(text.split()) for text in error.mistakes]
        return None, [Finding("configuration", "fail", visible(text)) for text in wrong]
    return config, [Finding("configuration", "ok", str(config_path))]


def check_node(config_path: Path) -> list[Finding]:
    """All findings on this node."""
    config, findings = _read(config_path)
    if config is None:
        return findings
    for subject, look in _LOOKS.items():
        try:
            findings += look(config)
        except (BeeondError, OSError) as error:
            findings.append(Finding(subject, "fail", one_line(error)))
    return findings


def _lack(subject: str, text: str) -> Finding:
    """Something that a compute node cannot do without is not there."""
    if _start_of("slurmd") is None:
        return Finding(subject, "warn", f"{text} (no slurmd runs here: only compute nodes need it)")
    return Finding(subject, "fail", text)


def _secret(config: SiteConfig) -> Iterator[Finding]:
    if os.geteuid() != 0:
        yield Finding(
            "secret", "warn", "only root can look at it; run `beeond-ctl check` as root on a compute node"
        )
        return
    from beeond_ctl.keys import read_secret

    if not os.path.lexists(config.paths.secret) and _start_of("slurmd") is None:
        yield _lack("secret", f"no {config.paths.secret}")
        return
    read_secret(Path(config.paths.secret))
    yield Finding("secret", "ok", config.paths.secret)


def _devices(config: SiteConfig) -> Iterator[Finding]:
    from beeond_ctl import devices

    for device in config.storage.devices:
        if os.geteuid() != 0:
            yield Finding(
                "storage", "warn", f"only root can look at {device}; run `beeond-ctl check` as root"
            )
            continue
        found = devices.content(device)
        if found is None:
            yield Finding("storage", "ok", f"{device} carries nothing")
        else:
            yield Finding("storage", "ok", f"{device} holds the file system of job {found.job_id}")


def _storage(config: SiteConfig) -> Iterator[Finding]:
    if config.storage.kind == "device":
        yield from _devices(config)
        return
    for path in config.storage.paths:
        try:
            status = os.lstat(path)
        except FileNotFoundError:
            yield _lack("storage", f"{path} is not there; make it on the node's NVMe file system")
            continue
        if not stat.S_ISDIR(status.st_mode):
            yield Finding(
                "storage", "fail", f"{path} is not a directory; make it on the node's NVMe file system"
            )
        elif status.st_uid != 0 or status.st_mode & 0o022:
            yield Finding(
                "storage",
                "fail",
                f"{path} can be written by others than root; chown root {path}; chmod 700 {path}",
            )
        else:
            from beeond_ctl.units import format_size

            room = os.statvfs(path)
            yield Finding("storage", "ok", f"{path}: {format_size(room.f_bavail * room.f_frsize)} free")
        if os.path.realpath(path) != path:
            yield Finding(
                "storage",
                "fail",
                f"{path} leads through a symbolic link; name {os.path.realpath(path)} instead",
            )


def _programs(config: SiteConfig) -> Iterator[Finding]:
    search = os.pathsep.join(config.backend.path)
    for name in config.backend.allowed:
        for program in backends.get(name).PROGRAMS:
            found = shutil.which(program, path=search)
            if found:
                yield Finding(f"backend {name}", "ok", found)
            else:
                yield _lack(
                    f"backend {name}", f"{program} is not in {search}; install it or set backend.path"
                )
    if "beegfs" in config.backend.allowed:
        try:
            found = backends.get("beegfs").edition(config, lambda program: shutil.which(program, path=search))
            yield Finding("backend beegfs", "ok", f"version {found}")
            if found == "8" and not _MACHINE_UUID.exists():
                yield Finding(
                    "backend beegfs",
                    "warn",
                    f"{_MACHINE_UUID} is missing: each server looks through all block devices for another when it "
                    "starts; a virtual machine can be given one",
                )
        except NodeError as error:
            yield _lack("backend beegfs", one_line(error))
        if shutil.which("mkfs.xfs", path=search) is None:
            yield _lack("backend beegfs", f"mkfs.xfs is not in {search}; its metadata needs it")
    needed = {"image": ("mkfs.xfs", "losetup"), "device": ("mkfs.xfs", "blkid")}.get(config.storage.kind, ())
    for program in needed:
        if shutil.which(program, path=search) is None:
            yield _lack("storage", f"{program} is not in {search}; storage.kind needs it")
    if "glusterfs" in config.backend.allowed and not Path("/dev/fuse").exists():
        yield _lack("backend glusterfs", "/dev/fuse is missing; load the kernel module fuse")


def _run_directory(config: SiteConfig) -> Iterator[Finding]:
    usual = configuration.Paths().run
    if config.paths.run != usual:
        text = f"{config.paths.run} is not {usual}, where the SPANK plugin and the Epilog look; take paths.run out"
        yield Finding("paths.run", "fail", text)


def _mount_root(config: SiteConfig) -> Iterator[Finding]:
    path = Path(config.mount.root)
    while not path.exists():
        path = path.parent
    status = path.stat()
    if status.st_uid != 0 or status.st_mode & 0o022:
        yield Finding(
            "mount", "fail", f"{path} can be written by others than root; choose another mount.root"
        )
    else:
        yield Finding("mount", "ok", config.mount.root)


def _told(config: SiteConfig) -> Iterator[Finding]:
    """Where metrics and reports go; without them jobs run as well."""
    if config.metrics.directory is not None:
        where = config.metrics.directory
        if os.path.isdir(where):
            yield Finding("metrics", "ok", where)
        else:
            yield Finding(
                "metrics", "warn", f"{where} is not there; install node_exporter, or mend metrics.directory"
            )
    if config.report.directory is not None:
        try:
            with userfiles.own_directory(config.report.directory):
                pass
        except FileNotFoundError:
            where = config.report.directory
            yield Finding(
                "report",
                "warn",
                f"{where} is not there: no reports for users; as root: install -d -m 755 {where}",
            )
            return
        except (OSError, NodeError) as error:
            yield Finding("report", "warn", f"no reports for users: {one_line(error)}")
            return
        if os.geteuid() == 0 and not os.access(config.report.directory, os.W_OK):
            yield Finding(
                "report",
                "warn",
                f"root may not write in {config.report.directory}; export it without root_squash",
            )
        else:
            yield Finding("report", "ok", config.report.directory)


def _slurm(config: SiteConfig) -> Iterator[Finding]:
    text = slurm.run(config.slurm.path, "scontrol", "show", "config")
    values = {
        key.strip(): value.strip() for key, _, value in (line.partition("=") for line in text.splitlines())
    }
    flags = values.get("PrologFlags", "").lower().split(",")
    if "alloc" in flags or "contain" in flags:  # Contain implies Alloc, slurm.conf(5)
        yield Finding("PrologFlags", "ok", values["PrologFlags"])
    else:
        yield Finding(
            "PrologFlags",
            "fail",
            "without Alloc the Prolog waits for the first job step; set PrologFlags=Alloc",
        )
    if "runinjob" in flags:
        yield Finding(
            "PrologFlags",
            "fail",
            "RunInJob ends the file system's services with the job's cgroup, before the Epilog; remove it",
        )
    if "serial" in flags:
        yield Finding(
            "PrologFlags",
            "fail",
            "Serial lets two jobs that share nodes wait for each other in their Prologs, until nodes are drained; "
            "remove it",
        )
    for name in ("Prolog", "Epilog"):
        # Releases that know several write Prolog[0], Prolog[1], and so on.
        set_to = [value for key, value in values.items() if re.fullmatch(rf"{name}(\[\d+\])?", key)]
        if not set(set_to) - {"(null)"}:
            yield Finding(
                name, "fail", f"is not set; set {name}=/etc/slurm/{name.lower()}.d/* and put 50-beeond there"
            )
    staging = config.deadlines.meet + config.deadlines.stall
    # In later releases (seen on 25.11) the two may differ, and are then shown instead of the one.
    both: list[str] = [name for name in ("PrologTimeout", "EpilogTimeout") if name in values]
    for name in both or ["PrologEpilogTimeout"]:
        yield _timeout(name, values, staging, "Slurm would kill a stage-in or stage-out that takes longer")
    yield _timeout(
        "BatchStartTimeout", values, staging, "Slurm would take a job that waits for its stage-in for lost"
    )
    yield from _plugin(values)
    if values.get("BurstBufferType") == "burst_buffer/lua" and _start_of("slurmctld") is not None:
        yield from _burst_buffer(config, Path(values.get("SLURM_CONF", "/etc/slurm/slurm.conf")).parent)
        if config.slurm.look_as_user and os.geteuid() == 0:
            yield _sudo_rule(values.get("SlurmUser", "root").partition("(")[0])
        if config.slurm.lists and not config.slurm.look_as_user:
            yield Finding(
                "lists", "warn", "slurm.lists does nothing without slurm.look_as_user; set both, or none"
            )


def _burst_buffer(config: SiteConfig, directory: Path) -> Iterator[Finding]:
    """What burst_buffer.lua reads, on a host of slurmctld; `directory` is that of slurm.conf."""
    from beeond_ctl.bb import LIMITS, POOL
    from beeond_ctl.limits import make_limits
    from beeond_ctl.units import parse_size

    script, beside = directory / "burst_buffer.lua", directory / "beeond_directives.lua"
    if "beeond-ctl" in script.read_text(errors="replace") and not beside.exists():
        yield Finding(
            "burst buffer",
            "fail",
            f"{beside} is not there, and no job with directives is taken; copy it from beside burst_buffer.lua",
        )
    limits = _text(LIMITS)
    if limits is None:
        yield Finding(
            "limits",
            "warn",
            f"slurmctld cannot read {LIMITS}; run `beeond-ctl bb limits >{LIMITS}; chmod 644 {LIMITS}`",
        )
    elif limits != make_limits(config):
        yield Finding(
            "limits",
            "warn",
            f"{LIMITS} is not what the configuration says now; run `beeond-ctl bb limits >{LIMITS}`",
        )
    else:
        yield Finding("limits", "ok", LIMITS)
    pool = _text(POOL)
    if pool is None:
        yield Finding(
            "pool",
            "warn",
            f"slurmctld cannot read {POOL}; write what all nodes' devices hold, such as 120TiB",
        )
        return
    try:
        if parse_size(pool.strip()) < 1 << 20:
            raise ValueError(f"{pool.strip()} is too small; write it with its unit")  # noqa: TRY301
    except ValueError as error:
        yield Finding("pool", "warn", f"{POOL}: {error}; capacity= is not scheduled by it")
    else:
        yield Finding("pool", "ok", f"{pool.strip()} ({POOL})")


def _sudo_rule(slurm_user: str) -> Finding:
    """Whether sudo lets SlurmUser do, as any user, what burst_buffer.lua has it do."""
    argv = ["sudo", "-n", "-l", "-U", slurm_user, "-u", "nobody", "--", _CONTROLLER, "bb", "data_in", "1"]
    try:
        done = subprocess.run(argv, capture_output=True, timeout=10, check=False)
        allowed = done.returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        allowed = False
    if allowed:
        return Finding("sudo", "ok", f"{slurm_user} may look at sources as their users")
    return Finding(
        "sudo",
        "warn",
        f"{slurm_user} may not look at sources as their users; add to /etc/sudoers.d: "
        f"{slurm_user} ALL=(ALL) NOPASSWD: {_CONTROLLER} bb data_in *",
    )


def _text(path: str) -> str | None:
    """What is in a file that everybody may read; None where there is none."""
    if not os.path.isfile(path) or not os.stat(path).st_mode & stat.S_IROTH:
        return None
    return Path(path).read_text(errors="replace")


def _timeout(name: str, values: dict[str, str], needed_s: float, otherwise: str) -> Finding:
    match = re.match(r"(\d+)", values.get(name, ""))
    if match is None or int(match[1]) >= 65534:  # NO_VAL16: unlimited
        return Finding(name, "ok", "unlimited")
    if int(match[1]) < needed_s:
        return Finding(
            name,
            "warn",
            f"{match[1]} s is short: {otherwise}; set at least {needed_s:.0f}, better the longest staging",
        )
    return Finding(name, "ok", f"{match[1]} s")


def _plugin(values: dict[str, str]) -> Iterator[Finding]:
    named = values.get("PlugStackConfig", "(null)")
    beside = Path(values.get("SLURM_CONF", "/etc/slurm/slurm.conf")).with_name("plugstack.conf")
    paths = list(plugins(beside if named == "(null)" else Path(named), values.get("PluginDir", "")))
    if not paths:
        yield Finding(
            "SPANK plugin",
            "fail",
            f"no line for {PLUGIN} in plugstack.conf; copy slurm/plugstack.conf.d/beeond.conf",
        )
    for path in paths:
        if not path.exists():
            yield Finding(
                "SPANK plugin", "fail", f"{path} is named in plugstack.conf and does not exist; install it"
            )
            continue
        built = re.search(_MARK, path.read_bytes())
        runs = values.get("SLURM_VERSION", "?")
        release = "{}.{:02}.{}".format(*(int(part, 16) for part in built.groups())) if built else "unknown"
        if built is None or release.split(".")[:2] != runs.split(".")[:2]:
            yield Finding(
                "SPANK plugin", "fail", f"{path} is built for Slurm {release}, this is {runs}; build it again"
            )
        else:
            yield Finding("SPANK plugin", "ok", f"{path} for Slurm {release}")
        started = _start_of("slurmd")
        if started is not None and started < path.stat().st_ctime:
            yield Finding("slurmd", "warn", "was started before the SPANK plugin was installed; restart it")


def plugins(path: Path, plugin_dir: str, depth: int = 0) -> Iterator[Path]:
    """Paths of our plugin that the plugstack file `path` names, its includes followed; `plugin_dir` as Slurm has it."""
    if depth > 8 or not path.is_file():
        return
    for line in path.read_text(errors="replace").splitlines():
        words = line.partition("#")[0].split()
        if len(words) >= 2 and words[0] == "include":
            for included in sorted(
                path.parent.glob(words[1]) if not words[1].startswith("/") else Path("/").glob(words[1][1:])
            ):
                yield from plugins(included, plugin_dir, depth + 1)
        elif (
            len(words) >= 2 and words[0] in {"required", "optional"} and words[1].rpartition("/")[2] == PLUGIN
        ):
            # An absolute path stands for itself, whatever is before it.
            paths = [Path(directory, words[1]) for directory in plugin_dir.split(":")]
            yield next((each for each in paths if each.exists()), paths[0])


def _start_of(daemon: str) -> float | None:
    """When this node's slurmd or slurmctld was started, in seconds since the epoch; None where none runs."""
    boot = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and (entry / "comm").read_bytes().strip() == daemon.encode():
                ticks = int((entry / "stat").read_bytes().rpartition(b")")[2].split()[19])
                return boot + ticks / os.sysconf("SC_CLK_TCK")
        except OSError:
            continue
    return None


_LOOKS: Final[dict[str, Callable[[SiteConfig], Iterator[Finding]]]] = {
    "secret": _secret,
    "storage": _storage,
    "backend": _programs,
    "mount": _mount_root,
    "paths.run": _run_directory,
    "report": _told,
    "Slurm": _slurm,
}
