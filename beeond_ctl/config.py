"""The site's configuration: one TOML file, the same on every node, checked in full before anything uses it.

Pure but for `load`, which reads that one file. Knows nothing of jobs.
"""

from __future__ import annotations

import os
import tomllib
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, Self

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

from beeond_ctl import CONFIG_PATH, overrides
from beeond_ctl.errors import ConfigError, NodeError
from beeond_ctl.units import check_chunk, parse_size

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

DEFAULT_PATH: Final = Path(CONFIG_PATH)


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


def _device(text: str) -> str:
    if not text.startswith("/dev/") or "/../" in text:
        raise ValueError("want a block device such as /dev/nvme1n1")
    return text


BlockDevice = Annotated[str, AfterValidator(_absolute), AfterValidator(_device)]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Storage(_Section):
    """Where the data of an instance lies on each node."""

    kind: Literal["directory", "image", "device"] = Field(
        "directory",
        description="directory: a directory per job on an existing file system. image: a file of fixed size "
        "per job, with a file system in it, which limits what the job can take. device: whole devices, one job at a "
        "time on each, with a file system that is made for the job and erased after it",
    )
    devices: Annotated[list[BlockDevice], Field(max_length=12)] = Field(
        [],
        description="of kind device, instead of paths: empty block devices, such as /dev/nvme1n1, for beeond-ctl "
        "alone; one that carries anything else is not touched",
    )
    paths: Annotated[list[OwnDirectory], Field(min_length=1, max_length=12)] = Field(
        ["/nvme/beeond"],
        description="one directory per device, owned by root, for beeond-ctl alone; each is one target of an instance",
    )
    capacity: Size | None = Field(
        None,
        description="size of each image where the user asks for none; default: 90 % of what is free at the job's start",
    )
    without: list[Annotated[str, Field(pattern=r"^[A-Za-z0-9_.*?\[\]!-]{1,64}$")]] = Field(
        [],
        description="names of nodes that have none of these directories, with * ? [..] as in a shell: "
        "they mount, and serve nothing",
    )
    wipe: Literal["delete", "discard", "zero"] = Field(
        "delete",
        description="delete: unlink. discard: unlink, then free the device's blocks. zero: overwrite, then unlink",
    )

    @model_validator(mode="after")
    def _devices_for_their_kind(self) -> Self:
        if (self.kind == "device") != bool(self.devices):
            raise ValueError("devices belong to kind = 'device'; name both or none")
        if len({device.rpartition("/")[2] for device in self.devices}) != len(self.devices):
            raise ValueError("devices must differ in the last part of their names")
        return self


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
    storage: Annotated[int, Field(ge=1)] | Literal["all"] = Field(
        "all", description="storage servers where the user asks for no number; all: one on every node"
    )
    stripe_count: Annotated[int, Field(ge=1, le=255)] = Field(
        4, description="targets that one file is spread over where the user asks for no number; at most all"
    )
    chunk_size: Size = Field(
        1024**2,
        description="bytes of a file on one target before the next one's turn: a power of two, at most 2GiB",
    )
    stripe_directories: Annotated[list[Annotated[int, Field(ge=1, le=255)]], Field(max_length=16)] = Field(
        [], description="make directories stripe_N, spread over N targets, for each N named here"
    )
    prefer_local: bool = Field(
        False,
        description="new files on the targets of the node that makes them, where the user does not say",
    )
    interfaces: list[Annotated[str, Field(pattern=r"^[A-Za-z0-9_.:-]{1,15}$")]] = Field(
        [], description="network interfaces to use, best first, and those users may choose from; none: all"
    )
    rdma: bool = Field(False, description="use RDMA where both sides have it")
    licensed: bool = Field(
        False,
        description="the site has the licence that BeeGFS asks for mirroring and storage pools; users may then "
        "ask for mirror=yes",
    )
    pools: dict[Annotated[str, Field(pattern=r"^[A-Za-z0-9_]{1,32}$")], list[OwnDirectory]] = Field(
        {},
        description="storage pools: which of storage.paths each has; a directory of the pool's name is made. "
        "What is in none, or in one called default, is in BeeGFS's own",
    )
    pool_file: AbsolutePath | None = Field(
        None, description="a file as BeeOND's -t takes it, in place of pools: lines NAME:PATH,PATH"
    )
    settings: dict[str, dict[str, Any]] = Field(
        {},
        description="further settings of BeeGFS's programs: mgmtd, meta, storage, client and helperd have a table each",
    )
    conf_dir: AbsolutePath | None = Field(
        None,
        description="a directory as BeeOND's -f takes it: beegfs-PROGRAM.conf, and beegfs-mgmtd.toml of version 8; "
        "what settings says wins",
    )

    @field_validator("chunk_size")
    @classmethod
    def _power_of_two(cls, value: int) -> int:
        return check_chunk(value)

    @field_validator("settings")
    @classmethod
    def _known_settings(cls, value: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
        for program, settings in value.items():
            overrides.check(program, settings)
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
    look: Seconds = Field(
        20, description="for looking at the sources of a pending job that has #BB_LUA directives"
    )


class Staging(_Section):
    """How data is copied."""

    workers: Annotated[int, Field(ge=0, le=256)] = Field(
        0, description="copying processes per node; 0: one per core, at most 8"
    )
    job_check: Seconds = Field(10, description="seconds between two looks whether the job is still there")


def _of_each_user(text: str) -> str:
    if "%u" not in text or "%" in text.replace("%u", ""):
        raise ValueError("want a directory of each user's own: %u stands for the user's name")
    return text


class Slurm(_Section):
    """How Slurm is spoken to."""

    path: list[AbsolutePath] = Field(
        ["/usr/bin", "/opt/slurm/bin", "/usr/local/bin"], description="where Slurm's commands are searched"
    )
    resume_after_recover: bool = Field(
        True,
        description="return a node to service after `recover`, if the drain reason is the one beeond-ctl set",
    )
    tell_in_output: bool = Field(
        True,
        description="warn a job, in its output, when its time limit is nearer than the end of its stage-out would be; "
        "after the job append a line, as its user, that says what became of the stage-out",
    )
    tell_in_accounting: bool = Field(
        False,
        description="put the same line into AdminComment of the job's record in slurmdbd, by sacctmgr as root on the "
        "job's first node; replaces what is there",
    )
    look_as_user: bool = Field(
        False,
        description="on the hosts of slurmctld, sudo lets SlurmUser run `beeond-ctl bb data_in` as any user: sources "
        "of pending jobs are looked at as their users; see docs/burst-buffer.md",
    )
    lists: Annotated[str, AfterValidator(_absolute), AfterValidator(_of_each_user)] | None = Field(
        None,
        description="with look_as_user, a directory of each user's on global storage, such as /scratch/%u/.beeond; "
        "what is seen there of sources on the same file system is listed for stage-in. It is made where it is missing, "
        "what is above of it is not",
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


class Report(_Section):
    """Where `beeond-ctl report` finds what happened to a job. Without it only root can ask, node by node over ssh."""

    directory: OwnDirectory | None = Field(
        None,
        description="a directory of root's on global storage: each node puts its events of an ended job there, "
        "for the job's user and root to read",
    )


class Metrics(_Section):
    """Numbers for Prometheus."""

    directory: AbsolutePath | None = Field(
        None,
        description="the text-file collector's directory of node_exporter, on each node; beeond_ctl.prom is kept there",
    )


class Sweep(_Section):
    """What `beeond-ctl sweep` does with what is old."""

    kept_days: Annotated[float, Field(gt=0)] | None = Field(
        None,
        description="days that kept data may wait for `recover`; after that, sweep reports it and exits with 1. "
        "Default: for ever",
    )
    remove_expired: bool = Field(
        False,
        description="wipe kept data that is older than kept_days, without staging it out",
    )
    log_days: Annotated[float, Field(ge=1)] = Field(
        90,
        description="days after which a job's event log is removed; `recover` reads the proof of a stage-out in it",
    )

    @model_validator(mode="after")
    def _an_age_to_remove_by(self) -> Self:
        if self.remove_expired and self.kept_days is None:
            raise ValueError(
                "sweep.remove_expired needs sweep.kept_days, the age after which data is given up"
            )
        return self


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
    report: Report = Report()
    metrics: Metrics = Metrics()
    sweep: Sweep = Sweep()

    @model_validator(mode="after")
    def _pools_of_known_targets(self) -> Self:
        pools = self.beegfs.pools
        used = [path for paths in pools.values() for path in paths]
        for path in used:
            if path not in {*self.bases, *self.storage.devices}:
                raise ValueError(f"beegfs.pools: {path} is not one of storage.paths")
            if used.count(path) > 1:
                raise ValueError(f"beegfs.pools: {path} is in two pools")
        if pools and not self.beegfs.licensed:
            raise ValueError(
                "beegfs.pools: storage pools need a licence of BeeGFS; set beegfs.licensed if there is one"
            )
        return self

    @property
    def bases(self) -> tuple[str, ...]:
        """Where the targets' directories are made on a node: one for each device."""
        if self.storage.kind == "device":
            names = (device.rpartition("/")[2] for device in self.storage.devices)
            return tuple(f"{self.paths.run}/devices/{name}" for name in names)
        return tuple(self.storage.paths)

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
        mistakes = tuple(f"{name}: {_mistake(each)}" for each in error.errors(include_url=False))
        more = f" (and {len(mistakes) - 1} more)" if len(mistakes) > 1 else ""
        raise ConfigError(f"{mistakes[0]}{more}; see `beeond-ctl check`", mistakes) from None


def _mistake(found: ErrorDetails) -> str:
    where = ".".join(str(part) for part in found["loc"]) or "file"
    if found["type"] == "extra_forbidden":
        return f"{where}: no such key; {_near(found['loc'])}"
    return f"{where}: {found['msg'].removeprefix('Value error, ')}"


def recorded(data: object, job_id: int) -> SiteConfig:
    """The configuration that the instance of a job was made with, as its state or record has it. Raises NodeError.

    Another version may have written it. Keys that this one does not know are left out; one that gets a new name has to
    be translated here, or tear-down would not go where the data is.
    """
    try:
        return SiteConfig.model_validate(_known(SiteConfig, data))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"]) or "its configuration"
        raise NodeError(
            f"the record of job {job_id} was written by another version of beeond-ctl, which had another {where} "
            f"({first['msg'].removeprefix('Value error, ')}); finish the job with that version"
        ) from None


def _known(section: type[BaseModel], data: object) -> object:
    """`data` without the keys that `section`, and those in it, do not have."""
    if not isinstance(data, dict):
        return data
    found: dict[str, object] = {}
    for name, field in section.model_fields.items():
        inner = field.annotation
        if name in data and isinstance(inner, type) and issubclass(inner, BaseModel):
            found[name] = _known(inner, data[name])
        elif name in data:
            found[name] = data[name]
    return found


def _near(loc: tuple[int | str, ...]) -> str:
    """The keys that may stand where `loc` points, or the one that was probably meant."""
    import difflib

    keys = list(SiteConfig.model_fields)
    if len(loc) > 1 and loc[0] in SiteConfig.model_fields:
        section = SiteConfig.model_fields[str(loc[0])].annotation
        keys = list(getattr(section, "model_fields", {}))
    close = difflib.get_close_matches(str(loc[-1]), keys, 1)
    return f"did you mean {close[0]}?" if close else f"the keys are {', '.join(keys)}"


def load(path: Path = DEFAULT_PATH) -> SiteConfig:
    """The configuration in the file `path`, with the files for BeeGFS that it names.

    As root, only files that nobody else may write are taken. Raises ConfigError.
    """
    try:
        text = _read_own(path)
    except FileNotFoundError:
        if os.geteuid() != 0:
            raise ConfigError(
                f"{path}: no such file on this host; ask your admin for the site's configuration"
            ) from None
        raise ConfigError(
            f"{path}: no such file; make it, empty for all defaults, and run `beeond-ctl check`"
        ) from None
    config = parse(text, str(path))
    return _with_files(config) if config.beegfs.conf_dir or config.beegfs.pool_file else config


def _read_own(path: Path) -> str:
    """The text of a file of root's. Raises ConfigError, and FileNotFoundError."""
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            if os.geteuid() == 0 and (status.st_uid != 0 or status.st_mode & 0o022):
                raise ConfigError(
                    f"{path}: others than root may write it; run `chown root {path}; chmod 644 {path}`"
                )
            return file.read().decode()
    except FileNotFoundError:
        raise
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None


def _with_files(config: SiteConfig) -> SiteConfig:
    """`config` with what the files that it names say: from here on it is all in the one value, and in each record."""
    found: dict[str, dict[str, Any]] = {}
    directory, data = config.beegfs.conf_dir, config.model_dump()
    path = directory or ""
    try:
        if directory:
            os.stat(directory)  # one that is not there is a mistake, not an empty one
        for program in overrides.PROGRAMS if directory else ():
            for suffix, read in (("conf", overrides.parse_conf), ("toml", tomllib.loads)):
                path = f"{directory}/beegfs-{program}.{suffix}"
                if suffix == "conf" or program == "mgmtd":
                    with suppress(FileNotFoundError):
                        found.setdefault(program, {}).update(read(_read_own(Path(path))))
        if config.beegfs.pool_file is not None:
            path = config.beegfs.pool_file
            pools = overrides.parse_pools(_read_own(Path(path)))
            data["beegfs"] |= {"pools": pools, "pool_file": None}
        for program, settings in config.beegfs.settings.items():
            found.setdefault(program, {}).update(settings)
        path = directory or path
        found = {program: settings for program, settings in found.items() if settings}
        data["beegfs"] |= {"settings": found, "conf_dir": None}
        return SiteConfig.model_validate(data)
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file; make it, or take it out of the configuration") from None
    except ValidationError as error:
        what = error.errors(include_url=False)[0]["msg"].removeprefix("Value error, ")
        raise ConfigError(f"{path}: {what}; see `beeond-ctl check`", (f"{path}: {what}",)) from None
    except ValueError as error:  # the parsers', of TOML too
        raise ConfigError(f"{path}: {error}") from None
