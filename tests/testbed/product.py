"""What of the product goes where on the cluster's machines, as an installation at a site would put it.

A list, not code: a line here is a file there. What does not exist in the project yet is named in one error.
"""

from __future__ import annotations

import os
import secrets
import stat
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tests.testbed import slurm
from tests.testbed.host import TestbedError
from tests.testbed.node import Machine, put

PROJECT = Path(__file__).resolve().parents[2]
CONFIG_PATH = "/etc/beeond-ctl/config.toml"
SECRET_PATH = "/etc/beeond-ctl/secret"
EVERYWHERE = frozenset(["controller", "login", "compute"])
NODES_AND_CONTROLLER = frozenset(["controller", "compute"])
COMPUTE = frozenset(["compute"])

STORAGE = "/nvme/beeond"  # the directory on each node's device that is the product's own
DIRECTORIES = {  # on compute nodes: what an installation makes, and the product would when it misses it
    STORAGE: 0o700,
    "/mnt/beeond": 0o755,
    "/run/beeond-ctl": 0o755,
    "/run/beeond-ctl/jobs": 0o755,
    "/run/beeond-ctl/claims": 0o700,
    "/run/beeond-ctl/locks": 0o700,
    "/run/beeond-ctl/users": 0o755,
}


@dataclass(frozen=True, slots=True)
class Item:
    """Files of the project (a pattern) that are copied into a directory on machines of these roles."""

    source: str
    destination: str
    roles: frozenset[str]
    mode: int


def plugin_directory() -> str:
    """Where Slurm looks for plugins: where this machine's own are."""
    if slurm.HOME:
        return slurm.OUR_PLUGINS
    for pattern in ("/usr/lib/*/slurm-wlm", "/usr/lib64/slurm", "/usr/lib/*/slurm"):
        for directory in sorted(Path("/").glob(pattern.lstrip("/"))):
            if (directory / "select_cons_tres.so").exists():
                return str(directory)
    return "/usr/lib/slurm"


# Where spank/Makefile puts the plugin.
BUILT = f"build/spank-{Path(slurm.HOME).name}" if slurm.HOME else "spank"

ITEMS = (
    Item("slurm/prolog.d/*", "/etc/slurm/prolog.d", COMPUTE, 0o755),
    Item("slurm/epilog.d/*", "/etc/slurm/epilog.d", COMPUTE, 0o755),
    Item("slurm/plugstack.conf.d/*.conf", "/etc/slurm/plugstack.conf.d", EVERYWHERE, 0o644),
    Item(f"{BUILT}/*.so", plugin_directory(), EVERYWHERE, 0o755),
)


def shown_directories() -> list[str]:
    """The project, the Python environment that runs this, Slurm's: what every node sees at the same path."""
    python = (_environment() / "bin/python").resolve().parent.parent
    found = [str(PROJECT)]
    for path in (_environment(), python, *([Path(slurm.HOME)] if slurm.HOME else [])):
        if not path.is_relative_to(PROJECT) and not path.is_relative_to("/usr"):
            found.append(str(path))
    return found


def config(storage: str = "directory") -> str:
    """The site configuration where the caller gives none; `storage` is "directory" or "image"."""
    return f"""\
[storage]
kind = "{storage}"
paths = ["{STORAGE}"]
"""


def missing() -> list[str]:
    """What of the product is not there to be installed."""
    lost = [item.source for item in ITEMS if not sorted(PROJECT.glob(item.source))]
    if not _controller().exists():
        lost.append(str(_controller()))
    if not PROJECT.stat().st_mode & stat.S_IXOTH:
        lost.append(f"permission for the cluster's users to enter it (chmod o+rx {PROJECT})")
    return lost


def new_secret() -> str:
    """A site secret: 32 random bytes, in hexadecimal."""
    return secrets.token_hex(32)


PACKAGES = {  # which of our Debian packages go where
    "controller": (),
    "login": ("beeond-ctl", "beeond-ctl-spank-slurm*"),
    "compute": ("beeond-ctl", "beeond-ctl-hooks", "beeond-ctl-spank-slurm*"),
}


def packages(machine: Machine) -> list[str]:
    """The Debian packages for a machine, out of dist/. Raises TestbedError naming what is not there."""
    found = []
    for name in PACKAGES[machine.role]:
        files = sorted((PROJECT / "dist").glob(f"{name}_*.deb"))
        if len(files) != 1:
            raise TestbedError(f"{PROJECT}/dist has {len(files)} of {name}_*.deb, not one: run `make deb`")
        found.append(str(files[0]))
    return found


def install_site_files(root: Path, machine: Machine, config_text: str, secret: str) -> None:
    """What an admin adds to packages: configuration, secret, and a directory on each device."""
    put(root, CONFIG_PATH, config_text)
    if machine.role in NODES_AND_CONTROLLER:
        put(root, SECRET_PATH, secret + "\n", 0o600)
    if machine.role == "compute":
        (root / STORAGE.lstrip("/")).mkdir(mode=0o700, parents=True, exist_ok=True)


def install(root: Path, machine: Machine, config_text: str, secret: str) -> None:
    """Put the product on one machine, whose root directory is `root` as seen from here.

    Raises TestbedError naming everything that is missing.
    """
    if lost := missing():
        raise TestbedError(f"the product cannot be installed, {PROJECT} lacks: {', '.join(lost)}")
    for item in ITEMS:
        if machine.role not in item.roles:
            continue
        directory = root / item.destination.lstrip("/")
        directory.mkdir(parents=True, exist_ok=True)
        for source in sorted(PROJECT.glob(item.source)):
            target = directory / source.name
            target.unlink(missing_ok=True)
            target.write_bytes(source.read_bytes())
            target.chmod(item.mode)
    put(root, CONFIG_PATH, config_text)
    if machine.role in NODES_AND_CONTROLLER:
        put(root, SECRET_PATH, secret + "\n", 0o600)
    make_directories(root, machine)
    command = root / "usr/bin/beeond-ctl"
    command.unlink(missing_ok=True)
    os.symlink(_controller(), command)


def make_directories(root: Path, machine: Machine) -> None:
    """What an installation makes, and systemd-tmpfiles at each boot."""
    if machine.role == "compute":
        for path, mode in DIRECTORIES.items():
            (root / path.lstrip("/")).mkdir(mode=mode, parents=True, exist_ok=True)


def compile_python() -> None:
    """Write the bytecode that an installation would have: the nodes see the project read-only.

    For their users to read: a root of another umask may have written it before.
    """
    argv = [str(_environment() / "bin/python"), "-m", "compileall", "-q", str(PROJECT / "beeond_ctl")]
    subprocess.run(argv, check=False, stdout=subprocess.DEVNULL, umask=0o022)
    for directory in (PROJECT / "beeond_ctl").rglob("__pycache__"):
        directory.chmod(0o755)
        for path in directory.glob("*.pyc"):
            with suppress(FileNotFoundError):  # another process is just writing it
                path.chmod(0o644)


def _environment() -> Path:
    """The virtual environment that this runs in, or the project's own when this is the system's Python."""
    return PROJECT / ".venv" if sys.prefix == sys.base_prefix else Path(sys.prefix).resolve()


def _controller() -> Path:
    return _environment() / "bin/beeond-ctl"
