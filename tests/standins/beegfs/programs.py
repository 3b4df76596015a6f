"""Stand-ins for the programs of BeeGFS 7.4 and 8: as strict and as awkward as the real ones, where the product notices.

They serve no file system. What "mount.beegfs" mounts is a directory that all nodes share, once the conditions for a
mount are met; while a server is silent, whoever touches it waits. Run as `programs.py EDITION PROGRAM ARGUMENTS...`;
needs nothing but Python. `install` makes the commands. What is imitated, and from where: docs/beegfs.md.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

SHARED = Path("/global/.beegfs-stand-in")
"""Where the contents of the imitated file systems lie, one directory each."""

ONLINE_S = 3.0
RETRY_S = 1.5
STOP_S = 2.0
TOLD_S = 5.0
"""Seconds after its start at which mgmtd of 7.4 tells its servers of each other."""
HASTE = Path("/etc/beegfs-stand-in-haste")
"""A machine that has this file has no time to lose: there all of these are a twentieth."""
STUBBORN = "/etc/beegfs-stand-in-stubborn"
"""Servers of a machine that has this file do not end by SIGTERM."""
SILENT_S = 2.0
"""Seconds after which a client takes a server for silent. One that hangs up is so at once."""
LEAVE_S = 6.0
"""Seconds after which a client that is unmounted gives up telling an mgmtd that is gone."""


def pace(seconds: float) -> float:
    """How long what takes `seconds` takes here."""
    return seconds / 20 if HASTE.exists() else seconds


PROGRAMS = {
    "7.4": ("beegfs-mgmtd", "beegfs-meta", "beegfs-storage", "beegfs-helperd", "beegfs-ctl"),
    "8": ("beegfs-mgmtd", "beegfs-meta", "beegfs-storage", "beegfs"),
}

_COMMON = {
    "cfgFile", "logLevel", "logNoDate", "logStdFile", "logNumLines", "logNumRotatedFiles", "logType",
    "connPortShift", "connUseRDMA", "connAuthFile", "connDisableAuthentication", "runDaemonized", "pidFile",
}  # fmt: skip
_SERVER = {
    "sysMgmtdHost",
    "connInterfacesList",
    "connInterfacesFile",
    "storeAllowFirstRunInit",
    "connMaxInternodeNum",
    "tuneNumWorkers",
}
_LIMITS = {
    f"tune{kind}{what}"
    for kind in ("Meta", "Storage")
    for what in (
        "SpaceLowLimit", "SpaceEmergencyLimit", "InodesLowLimit", "InodesEmergencyLimit", "DynamicPools",
    )
}  # fmt: skip
KEYS = {
    "beegfs-mgmtd": _COMMON
    | _LIMITS
    | {"storeMgmtdDirectory", "storeAllowFirstRunInit", "connInterfacesList", "tuneNumWorkers"},
    "beegfs-storage": _COMMON | _SERVER | {"storeStorageDirectory"},
    "beegfs-meta": _COMMON
    | _SERVER
    | {"storeMetaDirectory", "storeUseExtendedAttribs", "storeClientXAttrs", "storeClientACLs"},
    "beegfs-helperd": _COMMON | {"connInterfacesFile", "tuneNumWorkers"},
    "beegfs-ctl": {"cfgFile", "sysMgmtdHost", "connPortShift", "connAuthFile", "connUseRDMA", "logEnabled"},
    "mount.beegfs": {
        "sysMgmtdHost", "connPortShift", "connAuthFile", "connDisableAuthentication", "connInterfacesFile",
        "connUseRDMA", "sysMountSanityCheckMS", "sysXAttrsEnabled", "tuneUseGlobalFileLocks", "quotaEnabled",
        "tunePreferredMetaFile", "tunePreferredStorageFile", "tuneFileCacheType",
    },
}  # fmt: skip


def install(directory: Path, edition: str, mount_directory: Path | None) -> None:
    """Make the commands of `edition` in `directory`.

    In `mount_directory`, mount.beegfs where mount(8) looks for it, and an umount(8) that is found before the real one.
    """
    directory.mkdir(parents=True, exist_ok=True)
    places = {directory / name: _start(edition, name) for name in PROGRAMS[edition]}
    if mount_directory is not None:
        places[mount_directory / "mount.beegfs"] = _start(edition, "mount.beegfs")
        places[mount_directory / "umount"] = UMOUNT.format(start=_start(edition, "umount.beegfs"))
    for path, line in places.items():
        path.unlink(missing_ok=True)
        path.write_text(f"#!/bin/sh\n{line}\n")
        path.chmod(0o755)


def _start(edition: str, name: str) -> str:
    return f'exec /usr/bin/python3 -ISE {Path(__file__).resolve()} {edition} {name} "$@"'


UMOUNT = """\
for point; do :; done
grep -q " /[.]beegfs-stand-in/[^ ]* $point " /proc/self/mountinfo || exec /usr/bin/umount "$@"
{start}"""
"""Unmounting what mount.beegfs mounted is the client's business."""


def install_real(directory: Path, home: Path, edition: str, mount_directory: Path) -> None:
    """Put the real programs that are below `home` into `directory`; they only mount where the kernel can.

    Elsewhere mount.beegfs is a stand-in that sees whether the daemons are there, and shows a directory of all nodes.
    """
    install(directory, edition, mount_directory)
    (mount_directory / "umount").unlink()
    for name in PROGRAMS[edition]:
        (directory / name).unlink()
        (directory / name).write_bytes(_program(home, name).read_bytes())
        (directory / name).chmod(0o755)
    mounter = mount_directory / "mount.beegfs"
    if can_mount():
        mounter.unlink()
        if found := sorted(home.rglob("mount.beegfs")):  # 8 resolves names in it, 7.4 does without
            mounter.write_bytes(found[0].read_bytes())
            mounter.chmod(0o755)
    else:
        mounter.write_text(
            mounter.read_text().replace(f" {edition} mount.beegfs ", f" {edition} mount.real ")
        )


def real_edition(home: Path) -> str:
    """Which generation the programs below `home` are of."""
    return "7.4" if any(home.rglob("beegfs-ctl")) else "8"


def can_mount() -> bool:
    """Whether the kernel knows BeeGFS, or has a module for it."""
    if "\tbeegfs\n" in Path("/proc/filesystems").read_text():
        return True
    modprobe = shutil.which("modprobe")
    return modprobe is not None and subprocess.run([modprobe, "-qn", "beegfs"], check=False).returncode == 0


def _program(home: Path, name: str) -> Path:
    for directory in (home / "sbin", home / "bin", home):
        if (directory / name).is_file():
            return directory / name
    raise FileNotFoundError(f"{name} is not in {home}, its sbin or its bin")


def fail(code: int, text: str) -> NoReturn:
    """Say `text` and end."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()
    os._exit(code)


# --- settings ---------------------------------------------------------------------------------------------


def read_settings(program: str, edition: str, path: str) -> dict[str, str]:
    """The settings in a file of `key = value` lines. An unknown key is fatal."""
    settings: dict[str, str] = {}
    try:
        text = Path(path).read_text()
    except OSError as error:
        fail(1, f"Unable to load config file: {error}")
    for line in text.splitlines():
        key, equals, value = (part.strip() for part in line.partition("="))
        if key and not key.startswith("#"):
            _check_key(program, edition, key, equals)
            settings[key] = value
    return settings


def _check_key(program: str, edition: str, key: str, equals: str) -> None:
    if (
        not equals
        or key not in KEYS[program]
        or (key == "logType" and edition == "8" and program == "mount.beegfs")
    ):
        fail(1, f"\nError: The config argument '{key}' is invalid\n\n[BeeGFS Version: {edition}]\n")


def settings_of(program: str, edition: str, arguments: list[str]) -> dict[str, str]:
    """What the arguments, which win, and the file that they name say."""
    given: dict[str, str] = {}
    for argument in arguments:
        key, equals, value = argument.partition("=")
        _check_key(program, edition, key, equals)
        given[key] = value
    file = given.get("cfgFile", f"/etc/beegfs/{program}.conf")
    return {
        **(read_settings(program, edition, file) if "cfgFile" in given or Path(file).exists() else {}),
        **given,
    }


def secret_of(settings: dict[str, str], code: int = 3) -> str:
    """What proves that one belongs to the file system. A key is required."""
    path = settings.get("connAuthFile", "")
    if not path and settings.get("connDisableAuthentication") == "true":
        return ""
    try:
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()
    except OSError:
        fail(code, "No connAuthFile configured. Using BeeGFS without connection authentication is insecure.")


def port(settings: dict[str, str], number: int) -> int:
    """A port with the file system's shift."""
    return number + int(settings.get("connPortShift", "0"))


# --- talking ----------------------------------------------------------------------------------------------


def ask(
    host: str, number: int, question: dict[str, Any], *, forever: bool = True
) -> tuple[socket.socket, Any]:
    """Ask mgmtd. Who is not answered waits and tries again, for ever."""
    while True:
        try:
            connection = socket.create_connection((host, number), timeout=10)
            connection.sendall(json.dumps(question).encode() + b"\n")
            line = connection.makefile("rb").readline()
            if line:
                connection.settimeout(None)
                return connection, json.loads(line)
            # mgmtd hangs up on who has another key; that this is the reason is in its own log alone
            say(
                f"Communication error: Soft disconnect from {host}:{number}; Peer: beegfs-mgmtd. (RegisterNode)"
            )
        except socket.gaierror:
            say(f"Failed to resolve hostname. hostname: {host}; System error: Name or service not known")
            fail(3, "Waiting for beegfs-mgmtd canceled")
        except OSError:
            say(f"Waiting for beegfs-mgmtd@{host}:{number}...")
        sys.stderr.flush()
        if not forever:
            raise ConnectionError("no answer from beegfs-mgmtd")
        time.sleep(pace(RETRY_S))


def say(text: str) -> None:
    """Log `text` as BeeGFS does."""
    sys.stderr.write(f"(1) {time.strftime('%H:%M:%S')} Main [App] >> {text}\n")


def listen(number: int, code: int = 2) -> socket.socket:
    """Listen on TCP and UDP, as the servers do."""
    try:
        udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        udp.bind(("", number))
        listener = socket.create_server(("", number), backlog=256)
    except OSError as error:
        say(f"TCP socket: Unable to bind to port: {number}. SysErr: {error.strerror}")
        say("Unable to initialize socket")
        fail(code, "(1) 00:00:00 Main [App] >> A hard error occurred. Shutting down...")
    _kept.append(udp)
    return listener


_kept: list[Any] = []


def on_stop(delay_s: float) -> None:
    """End by SIGTERM, but not at once."""

    def stop(*_: object) -> None:
        time.sleep(pace(delay_s))
        if not os.path.exists(STUBBORN):
            say("All components stopped. Exiting now!")
            os._exit(0)

    signal.signal(signal.SIGTERM, stop)


def begin(settings: dict[str, str]) -> None:
    """Turn to the log, and fork if asked to: before anything is known to work."""
    log = settings.get("logStdFile")
    if log:
        if not Path(log).parent.is_dir():
            fail(1, f"Unable to open log file: {log}")
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
    if settings.get("runDaemonized") == "true" and os.fork():
        os._exit(0)


def wait() -> NoReturn:
    """Serve until the signal comes."""
    while True:
        signal.pause()


# --- mgmtd ------------------------------------------------------------------------------------------------


class Management:
    """Who is there, since when, and which stripe patterns were set."""

    def __init__(self, path: Path, edition: str, secret: str) -> None:
        self.path, self.edition, self.secret = path, edition, secret
        self.lock = threading.Lock()
        self.stored: dict[str, Any] = (
            json.loads(path.read_text())
            if path.exists()
            else {"id": uuid.uuid4().hex, "members": [], "patterns": {}}
        )
        self.live: dict[tuple[str, int], float] = {}
        self.began = time.monotonic()
        self.known: dict[int, set[int]] = {}
        """Which metadata servers each of them has been told of."""
        self.root = SHARED / self.stored["id"]
        self.root.mkdir(parents=True, exist_ok=True)
        self._save()

    def _save(self) -> None:
        self.path.write_text(json.dumps(self.stored))

    def states(self) -> list[dict[str, Any]]:
        now, found = time.monotonic(), []
        for kind, number, node in self.stored["members"]:
            since = self.live.get((kind, number))
            early = "Probably-offline" if self.edition == "7.4" else "Offline"
            state = "Online" if since is not None and now - since >= pace(ONLINE_S) else early
            found.append(
                {"kind": kind, "number": number, "node": node, "reachability": state, "consistency": "Good"}
            )
        return found

    def _acquainted(self) -> bool:
        """Whether all metadata servers know each other: by having registered last, or by having been told."""
        every = {number for kind, number, _ in self.stored["members"] if kind == "meta"}
        told = self.edition == "8" or time.monotonic() - self.began > TOLD_S
        return told or all(every <= self.known.get(number, set()) for number in every)

    def serve(self, listener: socket.socket) -> NoReturn:
        while True:
            connection, _ = listener.accept()
            threading.Thread(target=self._talk, args=(connection,), daemon=True).start()

    def _talk(self, connection: socket.socket) -> None:
        mine: list[tuple[str, int]] = []
        with connection:
            try:
                for line in connection.makefile("rb"):
                    question = json.loads(line)
                    if question["auth"] != self.secret:
                        return
                    with self.lock:
                        answer = self._answer(question, mine)
                    connection.sendall(json.dumps(answer).encode() + b"\n")
            except (OSError, ValueError):
                pass
            with self.lock:
                for kind, number in mine:
                    self.live.pop((kind, number), None)

    def _answer(self, question: dict[str, Any], mine: list[tuple[str, int]]) -> dict[str, Any]:
        match question["ask"]:
            case "register":
                numbers = []
                for given in question["numbers"]:
                    kind, used = (
                        question["kind"],
                        {n for k, n, _ in self.stored["members"] if k == question["kind"]},
                    )
                    number = given or next(n for n in range(1, 65536) if n not in used)
                    if [kind, number, question["node"]] not in self.stored["members"]:
                        self.stored["members"].append([kind, number, question["node"]])
                    self.live[kind, number] = time.monotonic()
                    if kind == "meta":
                        self.known[number] = {n for k, n, _ in self.stored["members"] if k == "meta"}
                    mine.append((kind, number))
                    numbers.append(number)
                self._save()
                return {"numbers": numbers}
            case "list":
                return {"targets": self.states()}
            case "root":
                return {"root": str(self.root), "targets": self.states()}
            case "ping" | "leave":
                return {}
            case "make":
                missing = [path for path in question["paths"] if not self._acquainted()]
                codes = {}
                for path in question["paths"]:
                    made = self.root / path.lstrip("/")
                    codes[path] = 5 if missing else 7 if made.exists() else 0
                    if codes[path] == 0:
                        made.mkdir(mode=question["mode"])
                        os.chown(made, question["uid"], question["gid"])
                return {"codes": codes}
            case "pattern":
                for path in question["paths"]:
                    if not (self.root / path.lstrip("/")).is_dir():
                        return {
                            "error": f"Unable to find metadata node for path: {path}\nError: Path does not exist"
                        }
                    self.stored["patterns"][path] = question["pattern"]
                self._save()
                return {}
            case "patterns":
                return {"patterns": {path: self.stored["patterns"].get(path) for path in question["paths"]}}
            case "pool":
                self.stored.setdefault("pools", {})[str(question["id"])] = [
                    question["name"],
                    question["targets"],
                ]
                self._save()
                return {}
            case "mirror":
                self.stored.setdefault("mirrored", []).append(question["kind"])
                self._save()
                return {}
        return {"error": "what?"}


def mgmtd_7(edition: str, arguments: list[str]) -> NoReturn:
    settings = settings_of("beegfs-mgmtd", edition, arguments)
    directory = Path(settings.get("storeMgmtdDirectory", ""))
    if not directory.is_absolute():
        fail(1, "Path to storage directory must be absolute")
    secret = secret_of(settings)
    directory.mkdir(exist_ok=True)
    listener = listen(port(settings, 8008), code=2)  # before the fork
    begin(settings)
    on_stop(STOP_S)
    serve_management(Management(directory / "state.json", edition, secret), listener)


def serve_management(management: Management, *listeners: socket.socket) -> NoReturn:
    for listener in listeners:
        threading.Thread(target=management.serve, args=(listener,), daemon=True).start()
    wait()


def mgmtd_8(edition: str, arguments: list[str]) -> NoReturn:
    flags = {"init": False, "tls-disable": False, "auth-disable": False, "license-disable": False}
    values = {
        "config-file": "",
        "db-file": "",
        "log-target": "",
        "auth-file": "",
        "port-shift": "0",
        "interfaces": "",
    }
    words = iter(arguments)
    for word in words:
        name = word.removeprefix("--")
        if word.startswith("--") and name in flags:
            flags[name] = True
        elif word.startswith("--") and name in values:
            values[name] = next(words)
        else:
            fail(2, f"error: unexpected argument '{word}' found")
    if values["log-target"] != "stderr" and not Path("/run/systemd/journal/socket").exists():
        fail(101, "thread 'main' panicked: could not connect to journald")
    if not values["config-file"]:
        if Path("/etc/beegfs/beegfs-mgmtd.toml").exists():
            fail(1, "took the settings of another file system from /etc/beegfs/beegfs-mgmtd.toml")
    elif not Path(values["config-file"]).exists():
        fail(1, f"Could not open config file at {values['config-file']!r}")
    database = Path(values["db-file"])
    if flags["init"]:
        if database.exists():
            fail(1, f"Error: {database} already exists")
        database.write_text(json.dumps({"id": uuid.uuid4().hex, "members": [], "patterns": {}}))
        os._exit(0)
    if not database.exists():
        fail(1, f"Error: no database at {database}; run with --init")
    if not flags["tls-disable"]:
        fail(1, "Error: could not read TLS certificate /etc/beegfs/cert.pem")
    settings = {"connPortShift": values["port-shift"], "connAuthFile": values["auth-file"]}
    secret = "" if flags["auth-disable"] else secret_of(settings, 1)
    time.sleep(0.02)
    on_stop(STOP_S)
    listeners = [listen(port(settings, number)) for number in (8008, 8010)]
    serve_management(Management(database, edition, secret), *listeners)


# --- servers ----------------------------------------------------------------------------------------------


def read_number(directory: Path, name: str) -> int:
    path = directory / name
    return int(path.read_text()) if path.exists() else 0


def store(settings: dict[str, str], key: str) -> list[Path]:
    paths = [Path(text.strip()) for text in settings.get(key, "").split(",")]
    if not all(path.is_absolute() for path in paths):
        fail(1, f"Path to storage directory must be absolute: {settings.get(key, '')}")
    for path in paths:
        path.mkdir(exist_ok=True)
    return paths


def storage(edition: str, arguments: list[str]) -> NoReturn:
    settings = settings_of("beegfs-storage", edition, arguments)
    secret, paths = secret_of(settings), store(settings, "storeStorageDirectory")
    begin(settings)
    numbers = []
    for path in paths:
        number = read_number(path, "targetNumID")
        if number and not (path / "targetID").exists():
            fail(1, f"Found targetNumID, but no corresponding string ID: {path}")
        numbers.append(number)
    serve(settings, secret, "storage", numbers, 8003)


def skeleton_tops() -> tuple[str, ...]:
    return ("inodes", "dentries", "buddymir/inodes", "buddymir/dentries")


def meta(edition: str, arguments: list[str]) -> NoReturn:
    settings = settings_of("beegfs-meta", edition, arguments)
    secret, (path,) = secret_of(settings), store(settings, "storeMetaDirectory")
    try:
        os.setxattr(path, "user.fhgfs", b"x")
        os.removexattr(path, "user.fhgfs")
    except OSError as error:
        fail(1, f"Unable to set extended attributes: {error}")
    log = settings.get("logStdFile", "/dev/stderr")
    for top in skeleton_tops():
        if not (path / top / "7F" / "7F").is_dir():
            for outer in range(128):
                for inner in range(128):
                    (path / top / f"{outer:X}" / f"{inner:X}").mkdir(parents=True, exist_ok=True)
            with open(log, "a") as out:
                out.write(f"made the directories of {top}\n")
    begin(settings)
    serve(settings, secret, "meta", [read_number(path, "nodeNumID")], 8005)


def serve(settings: dict[str, str], secret: str, kind: str, numbers: list[int], number: int) -> NoReturn:
    """Find mgmtd, whatever it takes; only then see whether the ports can be had."""
    on_stop(STOP_S)
    node = socket.gethostname()
    question = {"auth": secret, "ask": "register", "kind": kind, "numbers": numbers, "node": node}
    host, manager = settings["sysMgmtdHost"], port(settings, 8008)
    connection, _ = ask(host, manager, question)
    listener = listen(port(settings, number))

    def stay() -> None:
        """Register again with an mgmtd that was started again."""
        found = connection
        while True:
            while found.recv(4096):
                pass
            found, _ = ask(host, manager, question)

    for work in (stay, lambda: answer(listener)):
        threading.Thread(target=work, daemon=True).start()
    wait()


def answer(listener: socket.socket) -> NoReturn:
    """Tell clients that this server is there, for as long as it is."""

    def talk(connection: socket.socket) -> None:
        with connection, suppress(OSError):
            while connection.recv(4096):
                connection.sendall(b"{}\n")

    while True:
        threading.Thread(target=talk, args=(listener.accept()[0],), daemon=True).start()


def helperd(edition: str, arguments: list[str]) -> NoReturn:
    settings = settings_of("beegfs-helperd", edition, arguments)
    secret_of(settings)
    begin(settings)
    on_stop(0)
    _kept.append(listen(port(settings, 8006)))
    wait()


# --- tools ------------------------------------------------------------------------------------------------


def ctl_7(edition: str, arguments: list[str]) -> NoReturn:
    options = dict(word.partition("=")[::2] for word in arguments if word.startswith("--"))
    paths = [word for word in arguments if not word.startswith("--")]
    settings = read_settings(
        "beegfs-ctl", edition, options.get("--cfgFile", "/etc/beegfs/beegfs-client.conf")
    )
    try:
        _ctl_7(options, paths, settings["sysMgmtdHost"], port(settings, 8008), secret_of(settings))
    except OSError:
        fail(3, f"Management node communication failed: {settings['sysMgmtdHost']}")
    sys.stdout.flush()
    os._exit(0)


def _ctl_7(options: dict[str, str], paths: list[str], host: str, number: int, secret: str) -> None:
    def asked(**question: Any) -> dict[str, Any]:
        _, answer = ask(host, number, {"auth": secret, **question}, forever=False)
        if "error" in answer:
            fail(3, answer["error"])
        return dict(answer)

    if "--listtargets" in options:
        answer = asked(ask="list")
        sys.stdout.write(f"{'TargetID':>8} {'Reachability':>16} {'Consistency':>12}   {'NodeID':>6}\n")
        sys.stdout.write(f"{'========':>8} {'============':>16} {'===========':>12}   {'======':>6}\n")
        for target in answer["targets"]:
            if target["kind"] == options.get("--nodetype", "storage"):
                sys.stdout.write(
                    f"{target['number']:>8} {target['reachability']:>16} {target['consistency']:>12}   "
                    f"beegfs-{target['kind']} {target['node']} [ID: {target['number']}]\n"
                )
    elif "--createdir" in options and "--unmounted" in options:
        owner = {
            "uid": int(options["--uid"]),
            "gid": int(options["--gid"]),
            "mode": int(options["--access"], 8),
        }
        code = asked(ask="make", paths=paths, **owner)["codes"][paths[0]]
        if code:
            fail(3, f"Node encountered an error: {'Unknown node' if code == 5 else 'Entry exists already'}")
        sys.stdout.write("Operation succeeded.\n")
    elif "--setpattern" in options and "--unmounted" in options:
        wanted = [options["--chunksize"], int(options["--numtargets"]), options.get("--storagepoolid", "1")]
        if options.get("--pattern") == "buddymirror":
            wanted.append("mirrored")
        asked(ask="pattern", paths=paths, pattern=wanted)
    elif "--getentryinfo" in options and "--unmounted" in options:
        sys.stdout.write(json.dumps(asked(ask="patterns", paths=paths)["patterns"]) + "\n")
    elif "--addstoragepool" in options:
        asked(ask="pool", id=options["--id"], name=options["--desc"], targets=options["--targets"])
    elif "--addmirrorgroup" in options and "--automatic" in options:
        asked(ask="mirror", kind=options["--nodetype"])
    elif "--mirrormd" in options:
        asked(ask="mirror", kind="root")
    else:
        fail(1, "Invalid mode")


def largest_unit(size: str) -> str:
    """How the tool prints a size such as 1024Mi: 1G."""
    number, unit = int(size[:-2]), size[-2]
    while number % 1024 == 0:
        number, unit = number // 1024, {"K": "M", "M": "G"}[unit]
    return f"{number}{unit}"


def tool_8(edition: str, arguments: list[str]) -> NoReturn:
    values = {
        "--mgmtd-addr": "auto",
        "--auth-file": "/etc/beegfs/conn.auth",
        "--output": "table",
        "--mount": "auto",
    }
    names = ("--chunk-size", "--num-targets", "--uid", "--gid", "--permissions", "--pool", "--pattern")
    values |= dict.fromkeys(names, "")
    flags, words, rest = set(), [], iter(arguments)
    for word in rest:
        name, equals, value = word.partition("=")
        if name in values:
            values[name] = value if equals else next(rest)
        elif word in {"--tls-disable", "--auth-disable", "--state"}:
            flags.add(word)
        elif word.startswith("-"):
            fail(1, f"Error: unknown flag: {word}")
        else:
            words.append(word)
    if "--tls-disable" not in flags:
        fail(1, "Error: could not read TLS certificate /etc/beegfs/cert.pem")
    host, _, number = values["--mgmtd-addr"].partition(":")
    secret = secret_of({"connAuthFile": values["--auth-file"]}, 1)

    def asked(**question: Any) -> dict[str, Any]:
        try:
            _, answer = ask(host, int(number), {"auth": secret, **question}, forever=False)
        except OSError:
            fail(1, "Error: rpc error: code = Unavailable desc = connection error")
        if "error" in answer:
            fail(1, f"Error: {answer['error']}")
        return dict(answer)

    rows = []
    if words[:2] == ["target", "list"]:
        kinds = {"meta": 2, "storage": 3}
        rows = [
            {
                "id": {"num_id": target["number"], "node_type": kinds[target["kind"]]},
                "type": kinds[target["kind"]],
                "alias": f"target_{target['kind']}_{target['number']}",
                "node": f"{target['kind'][0]}:1",
                "storage_pool": "s:1" if target["kind"] == "storage" else "(n/a)",
                "reachability": target["reachability"],
                "last_contact": "0s ago",
                "consistency": target["consistency"],
                "sync_state": "Healthy",
            }
            for target in asked(ask="list")["targets"]
        ]
    elif words[:3] == ["entry", "create", "directory"] and values["--mount"] == "none":
        owner = {
            "uid": int(values["--uid"]),
            "gid": int(values["--gid"]),
            "mode": int(values["--permissions"], 8),
        }
        codes = asked(ask="make", paths=words[3:], **owner)["codes"]
        rows = [{"name": path, "status": code, "entry_id": "n/a", "type": 1} for path, code in codes.items()]
    elif words[:2] == ["entry", "set"] and values["--mount"] == "none":
        wanted = [values["--chunk-size"], int(values["--num-targets"]), values["--pool"]]
        asked(ask="pattern", paths=words[2:], pattern=wanted)
        sys.stdout.write(f"Summary: processed {len(words) - 2} entries\n")
    elif words[:2] == ["entry", "info"] and values["--mount"] == "none":
        for path, pattern in asked(ask="patterns", paths=words[2:])["patterns"].items():
            shown = f"RAID0 ({pattern[1]}x{largest_unit(pattern[0])})" if pattern else "RAID0 (4x512K)"
            rows.append({"path": path, "entry_id": "n/a", "stripe_pattern": shown, "type": 1})
    elif words[:2] in (["pool", "create"], ["mirror", "autocreate"], ["mirror", "init"]):
        fail(1, "Error: License verification library not loaded. Feature unavailable.")
    else:
        fail(1, f"Error: unknown command {words[:2]}")
    for first in range(0, len(rows), 100):
        sys.stdout.write(json.dumps(rows[first : first + 100]) + "\n")
    sys.stdout.flush()
    fail(1, "Error: unable to verify licensed status: License verification library not loaded.")


def mount(edition: str, arguments: list[str]) -> NoReturn:
    """What mount(8) runs: SOURCE POINT [-sfnv] [-o OPTIONS]."""
    point = arguments[1]
    options = arguments[arguments.index("-o") + 1].split(",")
    path = next((option.removeprefix("cfgFile=") for option in options if option.startswith("cfgFile=")), "")
    settings = read_settings("mount.beegfs", edition, path or "/etc/beegfs/beegfs-client.conf")
    secret = secret_of(settings, 32)
    if edition == "7.4":
        try:
            socket.create_connection(("127.0.0.1", port(settings, 8006)), timeout=2).close()
        except OSError:
            fail(32, "mount.beegfs: mount failed: beegfs-helperd does not answer")
    try:
        question = {"auth": secret, "ask": "root"}
        _, answer = ask(settings["sysMgmtdHost"], port(settings, 8008), question, forever=False)
    except OSError:
        fail(32, "mount.beegfs: mount failed: authentication or connection to beegfs-mgmtd failed")
    if edition == "8" and any(target["reachability"] != "Online" for target in answer["targets"]):
        fail(32, "mount.beegfs: mount failed: targets are not online")
    words = ["mount", "-i", "-n", "--bind", "-o", "nodev,nosuid", answer["root"], point]
    if subprocess.run(words, check=False).returncode:
        os._exit(32)
    numbers = {"meta": port(settings, 8005), "storage": port(settings, 8003)}
    servers = {(target["node"], numbers[target["kind"]]) for target in answer["targets"]}
    client = Client(point, (settings["sysMgmtdHost"], port(settings, 8008)), secret, servers)
    if os.fork() == 0:
        os.setsid()
        for descriptor in range(3):
            os.dup2(os.open(os.devnull, os.O_RDWR), descriptor)
        client.run()
    os._exit(0)


class Client:
    """What the kernel does for a mount: for as long as a server is silent, whoever touches the mount waits.

    To that end it has the kernel ask before anything in the mount is opened (fanotify(7)), and does not answer: from
    the mount's beginning until all servers have answered once, as nobody gets anything from one that was silent
    before. It can do without mgmtd until it is unmounted: it ends when mgmtd has been told of that.
    """

    def __init__(
        self, point: str, manager: tuple[str, int], secret: str, servers: set[tuple[str, int]]
    ) -> None:
        self.point, self.manager, self.servers = point, manager, servers
        self.greeting = json.dumps({"auth": secret, "ask": "ping"}).encode() + b"\n"
        self.leaving = {"auth": secret, "ask": "leave"}
        self.connections: dict[tuple[str, int], socket.socket] = {}
        self.mount_id = mounted_at(point)[-1][0]
        self.silence = held_up(point)

    def run(self) -> NoReturn:
        with open("/proc/self/mountinfo") as table:
            while any(words[0] == self.mount_id for words in mounted_at(self.point)):
                well = all(self.answers(server) for server in self.servers)
                if not well and self.silence < 0:
                    self.silence = held_up(self.point)
                elif well and self.silence >= 0:
                    os.close(self.silence)  # whoever waits goes on
                    self.silence = -1
                changed = select.poll()
                changed.register(table, select.POLLPRI | select.POLLERR)
                for connection in self.connections.values():
                    changed.register(connection, select.POLLIN)  # its server is gone
                changed.poll(200)
        signal.alarm(int(LEAVE_S))
        ask(*self.manager, self.leaving)
        os._exit(0)

    def answers(self, server: tuple[str, int]) -> bool:
        try:
            if server not in self.connections:
                self.connections[server] = socket.create_connection(server, timeout=SILENT_S)
            self.connections[server].sendall(self.greeting)
            if self.connections[server].recv(4096):
                return True
        except OSError:
            pass
        with suppress(KeyError):
            self.connections.pop(server).close()
        return False


def held_up(point: str) -> int:
    """Have whoever opens something in the mount at `point` wait until the descriptor is closed that this returns."""
    libc = ctypes.CDLL(None, use_errno=True)
    open_perm, on_dir, add_to_mount, unlimited = 0x10000, 0x40000000, 0x11, 0x10  # linux/fanotify.h
    group = libc.fanotify_init(
        0x5 | unlimited, os.O_RDONLY | os.O_CLOEXEC
    )  # to decide on contents; close on exec
    mask, here = ctypes.c_uint64(open_perm | on_dir), -100
    if group < 0 or libc.fanotify_mark(group, add_to_mount, mask, here, os.fsencode(point)):
        raise OSError(ctypes.get_errno(), "fanotify")
    return int(group)


def mounted_at(point: str) -> list[list[str]]:
    """The lines of the mount table (proc(5), mountinfo) about `point`, in words; the last one is on top."""
    lines = [
        line.split() for line in Path("/proc/self/mountinfo").read_text(errors="surrogateescape").splitlines()
    ]
    return [words for words in lines if words[4] == point]


def umount(edition: str, arguments: list[str]) -> NoReturn:
    """What umount(8) does to a mount of BeeGFS: when it is gone from the mount table, its client takes leave of mgmtd.

    That is what it then waits for.
    """
    point = arguments[-1]
    clients = [
        int(entry)
        for entry in os.listdir("/proc")
        if entry.isdigit() and f"\0mount.beegfs\0beegfs_nodev\0{point}\0" in _command_line(entry)
    ]
    done = subprocess.run(["/usr/bin/umount", *arguments], check=False)
    if not mounted_at(point) and not {"-l", "--lazy"} & set(arguments):
        for pid in clients:
            with suppress(ProcessLookupError):
                gone = select.poll()
                gone.register(os.pidfd_open(pid), select.POLLIN)
                gone.poll()
    os._exit(done.returncode)


def _command_line(pid: str) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace")
    except OSError:
        return ""


def mount_real(edition: str, arguments: list[str]) -> NoReturn:
    """As `mount`, where mgmtd is the real one and the kernel has no client: a connection is all that can be seen."""
    point = arguments[1]
    options = arguments[arguments.index("-o") + 1].split(",")
    path = next((option.removeprefix("cfgFile=") for option in options if option.startswith("cfgFile=")), "")
    settings = read_settings("mount.beegfs", edition, path)
    secret, host, number = secret_of(settings, 32), settings["sysMgmtdHost"], port(settings, 8008)
    try:
        if edition == "7.4":
            socket.create_connection(("127.0.0.1", port(settings, 8006)), timeout=2).close()
        socket.create_connection((host, number), timeout=2).close()
    except OSError as error:
        fail(32, f"mount.beegfs: mount failed: {error}")
    root = SHARED / f"real-{secret[:16]}"
    root.mkdir(parents=True, exist_ok=True)
    words = ["mount", "-i", "-n", "--bind", "-o", "nodev,nosuid", str(root), point]
    os._exit(subprocess.run(words, check=False).returncode)


def main() -> NoReturn:
    edition, program, *arguments = sys.argv[1:]
    run = {
        ("7.4", "beegfs-mgmtd"): mgmtd_7,
        ("8", "beegfs-mgmtd"): mgmtd_8,
        ("7.4", "beegfs-ctl"): ctl_7,
        ("8", "beegfs"): tool_8,
    }
    both = {"beegfs-meta": meta, "beegfs-storage": storage, "beegfs-helperd": helperd, "mount.beegfs": mount}
    both |= {"mount.real": mount_real, "umount.beegfs": umount}
    action = run.get((edition, program)) or both[program]
    action(edition, arguments)


if __name__ == "__main__":
    main()
