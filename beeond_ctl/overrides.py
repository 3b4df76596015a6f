"""What a site adds to BeeGFS's own settings: `beegfs-*.conf` as BeeOND takes them, and its pool file.

Pure: text in, values out. Knows nothing of plans; `beeond_ctl.config` reads the files. What would take an instance out
of its own ports, files, hosts and secrets is refused here, since nothing after this looks at the settings again.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

PROGRAMS: Final = ("mgmtd", "meta", "storage", "client", "helperd")
"""Whose settings there are; `client` is the kernel client."""

Value = str | int | float | bool
Settings = dict[str, Value | dict[str, Value]]
"""Of one program. Tables are for mgmtd of BeeGFS 8 alone."""

_OURS: Final = re.compile(
    # ports, hosts, secrets and interfaces
    r"conn\w*Port\w*|connAuthFile|connDisableAuthentication|connInterfaces(File|List)|connRDMAInterfacesFile|sysMgmtdHost"
    # files and directories
    r"|cfgFile|store\w*Directory|storeFsUUID|storeAllowFirstRunInit|sysTargetAttachmentFile|logStdFile|logType|logHelperdIP"
    # how a daemon is run, and who may join
    r"|pidFile|runDaemonized|sysAllowNewServers|sysAllowNewTargets|tunePreferred(Meta|Storage)File"
    # flushes of all nodes lock each other out
    r"|tuneUseGlobalFileLocks"
    # the same of mgmtd 8
    r"|init|fs-uuid|upgrade|import-from-v7|config-file|db-file|log-target|\w+-port|port-shift|tls-.+|auth-.+|interfaces"
    r"|registration-disable|license-.+|daemonize(-pid-file)?"
)
"""Keys that are beeond-ctl's own. BeeGFS 7.4's are in CamelCase, those of mgmtd 8 have dashes."""


def check(program: str, settings: Mapping[str, object]) -> None:
    """See that `settings` of `program` can be added to an instance's own. Raises ValueError naming the key."""
    if program not in PROGRAMS:
        raise ValueError(f"there is no beegfs-{program}; the programs are {', '.join(PROGRAMS)}")
    for key, value in settings.items():
        if not re.fullmatch(r"[A-Za-z][A-Za-z0-9-]*", key):
            raise ValueError(f"beegfs-{program}: {key!r} is not the name of a setting")
        if _OURS.fullmatch(key):
            raise ValueError(f"beegfs-{program}: {key} is set for each instance by itself; take it out")
        if isinstance(value, dict):
            if program != "mgmtd" or "-" not in key:
                raise ValueError(f"beegfs-{program}: {key} is a table, and only mgmtd of BeeGFS 8 has some")
            check(program, value)
        elif isinstance(value, str) and not value.isprintable():
            raise ValueError(f"beegfs-{program}: the value of {key} has to be one printable line")


def parse_conf(text: str) -> dict[str, str]:
    """The settings in a `beegfs-*.conf`: lines `key = value`. Raises ValueError naming the line."""
    found = {}
    for number, line in enumerate(text.splitlines(), 1):
        key, equals, value = (part.strip() for part in line.partition("="))
        if key.startswith("#") or not (key or equals):
            continue
        if not equals or not key:
            raise ValueError(f"line {number}: {line.strip()!r} is not KEY = VALUE")
        found[key] = value
    return found


def conf_text(settings: Mapping[str, object]) -> str:
    """`settings` as BeeGFS's daemons read them."""
    return "".join(f"{key} = {_plain(value)}\n" for key, value in settings.items())


def _plain(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def toml_text(settings: Mapping[str, object]) -> str:
    """`settings` as mgmtd of BeeGFS 8 reads them: scalars, then tables."""
    lines = [f"{key} = {_toml(value)}" for key, value in settings.items() if not isinstance(value, dict)]
    for key, value in settings.items():
        if isinstance(value, dict):
            lines += ["", f"[{key}]", *(f"{name} = {_toml(part)}" for name, part in value.items())]
    return "\n".join([*lines, ""]) if lines else ""


def _toml(value: object) -> str:
    if isinstance(value, str):
        return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
    return _plain(value)


def parse_pools(text: str) -> dict[str, list[str]]:
    """The pools in a file of BeeOND's `-t`: lines `NAME:PATH,PATH`. Raises ValueError naming the line."""
    pools: dict[str, list[str]] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        name, colon, paths = line.strip().partition(":")
        found = [path for path in paths.split(",") if path]
        if not re.fullmatch(r"\w+", name, re.ASCII) or not colon or not found or len(line.split()) != 1:
            raise ValueError(f"line {number}: {line.strip()!r} is not NAME:PATH,PATH without blanks")
        if name.lower() in {known.lower() for known in pools}:
            raise ValueError(f"line {number}: pool {name} is there twice")
        pools[name] = [path.rstrip("/") for path in found]
    if not pools:
        raise ValueError("names no pool")
    return pools
