"""The site's configuration: one TOML file, the same on every node, checked in full before anything uses it.

Pure but for `load`, which reads that one file. Knows nothing of jobs.
"""

from __future__ import annotations

import os
import tomllib
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

from beeond_ctl.errors import ConfigError
from beeond_ctl.units import parse_size

DEFAULT_PATH: Final = Path("/etc/beeond-ctl/config.toml")
CONFIG_VARIABLE: Final = "BEEOND_CTL_CONFIG"
"""Names another file; honoured by `beeond-ctl --config` only, never by Prolog and Epilog."""


def _absolute(text: str) -> str:
    if not text.startswith("/") or ".." in text.split("/") or "\0" in text:
        raise ValueError("want an absolute path without '..'")
    return text.rstrip("/") or "/"


def _below_root(text: str) -> str:
    if text.count("/") < 2 and text in {
        "/",
        "/bin",
        "/boot",
        "/dev",
        "/etc",
        "/home",
        "/lib",
        "/proc",
        "/root",
        "/run",
        "/sbin",
        "/sys",
        "/tmp",
        "/usr",
        "/var",
    }:
        raise ValueError("is a directory of the system; name one of beeond-ctl's own")
    return text


def _size(value: Any) -> Any:  # noqa: ANN401 - pydantic hands over whatever stands in the file
    return parse_size(value) if isinstance(value, str) else value


def _ports(text: str) -> str:
    first, _, last = text.partition("-")
    if not (first.isdigit() and last.isdigit() and int(first) >= 1024 and int(last) <= 65535):
        raise ValueError("want a range such as 21000-24999, within 1024-65535")
    if int(last) - int(first) + 1 < 16 * 16:
        raise ValueError("want a range of at least 256 ports: each instance takes a block of 16")
    return text


AbsolutePath = Annotated[str, AfterValidator(_absolute)]
OwnDirectory = Annotated[str, AfterValidator(_absolute), AfterValidator(_below_root)]
Size = Annotated[int, BeforeValidator(_size), Field(gt=0)]
Seconds = Annotated[float, Field(gt=0, le=7 * 86400)]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Storage(_Section):
    """Where the data of an instance lies on each node."""

    kind: Literal["directory", "image"] = Field(
        "directory",
        description="directory: a directory per job on an existing file system. image: a file of fixed size "
        "per job, with a file system in it, which limits what the job can take",
    )
    paths: Annotated[list[OwnDirectory], Field(min_length=1, max_length=12)] = Field(
        ["/nvme/beeond"],
        description="one directory per device, owned by root, for beeond-ctl alone; each is one target of an instance",
    )
    capacity: Size | None = Field(
        None,
        description="size of each image where the user asks for none; default: 90 % of what is free at the job's start",
    )
    wipe: Literal["delete", "discard", "zero"] = Field(
        "delete",
        description="delete: unlink. discard: unlink, then free the device's blocks. zero: overwrite, then unlink",
    )


class Mount(_Section):
    """Where users find an instance."""

    root: OwnDirectory = Field("/mnt/beeond", description="an instance is mounted at ROOT/JOBID")
    choices: list[OwnDirectory] = Field(
        [],
        description="further mount points that users may choose with mount=PATH; one job at a time on a node has each",
    )


class Network(_Section):
    """How the nodes of a job reach each other."""

    ports: Annotated[str, AfterValidator(_ports)] = Field(
        "21000-24999", description="ports for rendezvous and services; each instance takes a free block of 16"
    )
    suffix: str = Field(
        "",
        pattern=r"^[A-Za-z0-9.-]{0,64}$",
        description="what to append to a node's name to get its address on the fast network, such as '-ib'",
    )


class Backend(_Section):
    """Which file systems there are."""

    default: Literal["beegfs", "glusterfs", "local"] = Field(
        "glusterfs", description="used when the user names none"
    )
    allowed: list[Literal["beegfs", "glusterfs", "local"]] = Field(
        ["glusterfs", "local"], description="what users may name"
    )
    local_for_one_node: bool = Field(
        True,
        description="give a job of one node a plain local directory: a parallel file system would only cost",
    )
    path: list[AbsolutePath] = Field(
        ["/usr/sbin", "/usr/bin", "/sbin", "/bin"],
        description="where the file systems' programs are searched",
    )


class BeeGFS(_Section):
    """How BeeGFS is set up, for backend beegfs. Its programs are often in /opt/beegfs/sbin: see backend.path."""

    version: Literal["auto", "7.4", "8"] = Field(
        "auto", description="generation to use; auto: the one whose programs are on the nodes"
    )
    meta: Annotated[int, Field(ge=1)] | Literal["all"] = Field(
        1, description="metadata servers where the user asks for no number; all: one on every node"
    )
    meta_size: Size = Field(
        8 * 1024**3,
        description="space for a metadata server on the first of storage.paths; a million files take about 1 GiB",
    )
    stripe_count: Annotated[int, Field(ge=1, le=255)] = Field(
        4, description="targets that one file is spread over where the user asks for no number; at most all"
    )
    chunk_size: Size = Field(
        1024**2, description="bytes of a file on one target before the next one's turn: a power of two"
    )
    stripe_directories: Annotated[list[Annotated[int, Field(ge=1, le=255)]], Field(max_length=16)] = Field(
        [], description="make directories stripe_N, spread over N targets, for each N named here"
    )
    interfaces: list[Annotated[str, Field(pattern=r"^[A-Za-z0-9_.:-]{1,15}$")]] = Field(
        [], description="network interfaces to use, best first; none: all"
    )
    rdma: bool = Field(False, description="use RDMA where both sides have it")

    @field_validator("chunk_size")
    @classmethod
    def _power_of_two(cls, value: int) -> int:
        if value < 64 * 1024 or value & (value - 1):
            raise ValueError("want a power of two of at least 64KiB, such as 1MiB")
        return value

    @field_validator("meta_size")
    @classmethod
    def _large_enough(cls, value: int) -> int:
        if value < 512 * 1024**2:  # mkfs.xfs(8) refuses less than 300 MiB
            raise ValueError("want at least 512MiB")
        return value


class Deadlines(_Section):
    """How long to wait, in seconds, before a wait ends with the name of who did not come."""

    meet: Seconds = Field(60, description="for all nodes of a job to arrive in Prolog or Epilog")
    start: Seconds = Field(60, description="for a service or mount to be ready")
    stop: Seconds = Field(30, description="for unmounting, and for services to stop, before they are killed")
    silence: Seconds = Field(10, description="for a sign of life from a node while others wait for it")
    stall: Seconds = Field(600, description="for any progress of a stage-in or stage-out")
    wipe: Seconds = Field(600, description="for wiping a node's targets")


class Staging(_Section):
    """How data is copied."""

    workers: Annotated[int, Field(ge=0, le=256)] = Field(
        0, description="copying processes per node; 0: one per core, at most 8"
    )
    job_check: Seconds = Field(10, description="seconds between two looks whether the job is still there")


class Slurm(_Section):
    """How Slurm is spoken to."""

    path: list[AbsolutePath] = Field(
        ["/usr/bin", "/opt/slurm/bin", "/usr/local/bin"], description="where Slurm's commands are searched"
    )
    resume_after_recover: bool = Field(
        True,
        description="return a node to service after `recover`, if the drain reason is the one beeond-ctl set",
    )


class Paths(_Section):
    """Files of beeond-ctl itself."""

    secret: AbsolutePath = Field(
        "/etc/beeond-ctl/secret",
        description="at least 32 random bytes, the same on all compute nodes, readable by root alone",
    )
    run: OwnDirectory = Field(
        "/run/beeond-ctl", description="state of running instances; empty after a reboot"
    )
    log: OwnDirectory = Field("/var/log/beeond-ctl", description="event logs, one per job")


class SiteConfig(_Section):
    """Everything a site decides."""

    storage: Storage = Storage()
    mount: Mount = Mount()
    network: Network = Network()
    backend: Backend = Backend()
    beegfs: BeeGFS = BeeGFS()
    deadlines: Deadlines = Deadlines()
    staging: Staging = Staging()
    slurm: Slurm = Slurm()
    paths: Paths = Paths()

    @model_validator(mode="after")
    def _no_place_in_another(self) -> Self:
        # Tear-down unmounts everything below a mount point: it must never be another job's.
        places = [self.mount.root, *self.mount.choices, *self.storage.paths, self.paths.run, self.paths.log]
        for place in places:
            for other in places:
                if place is not other and f"{place}/".startswith(f"{other}/"):
                    raise ValueError(
                        f"{place} lies in {other}; mount points, storage and state need places of their own"
                    )
        return self


def parse(text: str, name: str = str(DEFAULT_PATH)) -> SiteConfig:
    """The configuration in `text`; `name` is the file named in messages. Raises ConfigError."""
    try:
        return SiteConfig.model_validate(tomllib.loads(text))
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{name}: not valid TOML: {error}") from None
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"]) or "file"
        what = first["msg"].removeprefix("Value error, ")
        more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
        raise ConfigError(f"{name}: {where}: {what}{more}; see `beeond-ctl check`") from None


def load(path: Path = DEFAULT_PATH) -> SiteConfig:
    """The configuration in the file `path`.

    As root, only a file that nobody else may write is taken. Raises ConfigError.
    """
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            if os.geteuid() == 0 and (status.st_uid != 0 or status.st_mode & 0o022):
                raise ConfigError(
                    f"{path}: others than root may write it; run `chown root {path}; chmod 644 {path}`"
                )
            text = file.read().decode()
    except FileNotFoundError:
        raise ConfigError(
            f"{path}: no such file; copy docs/config.example.toml there and run `beeond-ctl check`"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None
    return parse(text, str(path))
