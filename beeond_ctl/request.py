"""What a user asked for: the one grammar behind every front end, checked and turned into a `Request`.

Pure. Knows nothing of the machine, of Slurm's ways to carry a request, or of file systems.
Text is `str` as Python decodes it from the system (`surrogateescape`), so any bytes survive.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Final

from beeond_ctl.errors import RequestError, shortened
from beeond_ctl.units import check_chunk, format_size, parse_size

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

MAX_ENCODED: Final = 64 * 1024
"""Bytes an encoded request may have. Linux allows one environment string 128 KiB (execve(2))."""

_MOST_TRANSFERS: Final = 256
"""Of one direction: slurmctld waits while they are checked."""

_LONGEST_NAME: Final = 255
_LONGEST_PATH: Final = 4095
"""Bytes, of Linux (NAME_MAX; PATH_MAX without its NUL): what is longer can be neither read nor made."""

FLAGS: Final[Mapping[str, str]] = {
    "delete": "also delete at the destination what the source no longer has",
    "metadata-only": "compare size and times after the copy instead of reading the data back",
    "update": "copy only what differs in size, modification time or mode",
}
"""What may stand behind a transfer, joined by `+`, and what it does."""

_EXPANSIONS: Final = "jxuAa%"


@dataclass(frozen=True, slots=True)
class Transfer:
    """One `SRC:DST[:FLAGS]`. Of the two paths, the global one is absolute, the other relative to `$BEEOND`."""

    source: str
    destination: str
    flags: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Request:
    """A request as the user meant it; `None` leaves a choice to the site."""

    backend: str | None = None
    meta: int | str | None = None
    storage: int | str | None = None
    stripe_count: int | None = None
    stripe_dirs: str | None = None
    """Numbers of targets joined by '+': the directories stripe_N."""
    chunk_size: int | None = None
    capacity: int | None = None
    mirror: bool | None = None
    prefer_local: bool | None = None
    interfaces: str | None = None
    """Names joined by '+', best first."""
    mount: str | None = None
    share: str | None = None
    """Numbers of components of a heterogeneous job, joined by '+', that mount this file system too."""
    join: int | None = None
    """The component of a heterogeneous job whose file system is to be mounted; then nothing else is asked for."""
    stage_in: tuple[Transfer, ...] = field(default=())
    stage_out: tuple[Transfer, ...] = field(default=())


@dataclass(frozen=True, slots=True)
class JobNames:
    """What the `%` patterns of paths stand for.

    `job_name` is None when nobody knows any more what Slurm would say; then neither are the array's ids known.
    """

    job_id: int
    user: str
    job_name: str | None = ""
    array_job_id: int | None = None
    array_task_id: int | None = None


# --- the values of --beeond -------------------------------------------------------------------------------


def _word(text: str) -> str:
    if not re.fullmatch(r"[a-z][a-z0-9-]{0,31}", text):
        raise ValueError("want a name of lower-case letters")
    return text


def _meta(text: str) -> int | str:
    if text == "all":
        return text
    try:
        return _count(text)
    except ValueError:
        raise ValueError("want a number of nodes or 'all'") from None


def _count(text: str) -> int:
    if not re.fullmatch(r"[1-9][0-9]{0,5}", text):
        raise ValueError("want a number from 1 to 999999")
    return int(text)


def _counts(text: str) -> str:
    parts = text.split("+")
    if len(parts) > 16 or not all(re.fullmatch(r"[1-9][0-9]{0,2}", part) for part in parts):
        raise ValueError("want at most 16 numbers from 1 to 999, joined by '+', such as 1+8")
    return text


def _component(text: str) -> int:
    if not re.fullmatch(r"0|[1-9][0-9]{0,2}", text):
        raise ValueError("want the number of a component of this job, from 0 on")
    return int(text)


def _components(text: str) -> str:
    if not re.fullmatch(r"(0|[1-9][0-9]{0,2})(\+(0|[1-9][0-9]{0,2}))*", text):
        raise ValueError("want numbers of components of this job, from 0 on, joined by '+', such as 1+2")
    return text


def _interfaces(text: str) -> str:
    if not all(re.fullmatch(r"[A-Za-z0-9_.-]{1,15}", part) for part in text.split("+")):
        raise ValueError("want names of network interfaces joined by '+', such as ib0+ib1")
    return text


def _chunk(text: str) -> int:
    return check_chunk(parse_size(text))


def _capacity(text: str) -> int:
    size = parse_size(text)
    if size < 1024**2:
        raise ValueError("want at least 1MiB, with its unit, such as 2TiB")
    return size


def _flag(text: str) -> bool:
    if text in {"yes", "true", "1", ""}:
        return True
    if text in {"no", "false", "0"}:
        return False
    raise ValueError("want yes or no")


def _mount(text: str) -> str:
    if not text.startswith("/") or _climbs(text) or "\0" in text:
        raise ValueError("want an absolute path without '..'")
    return text.rstrip("/") or "/"


@dataclass(frozen=True, slots=True)
class Key:
    """One key of `--beeond`: the field it fills, how its value is read, and what `--help` says of it."""

    field: str
    parse: Callable[[str], Any]
    metavar: str
    help: str


KEYS: Final[Mapping[str, Key]] = {
    "backend": Key("backend", _word, "NAME", "file system to use; the site's default otherwise"),
    "meta": Key("meta", _meta, "N|all", "metadata servers: a number, or one on every node"),
    "storage": Key("storage", _meta, "N|all", "storage servers: a number, or one on every node"),
    "stripe-count": Key("stripe_count", _count, "N", "targets that one file is spread over"),
    "stripe-dirs": Key("stripe_dirs", _counts, "N[+N]", "directories stripe_N, spread over N targets each"),
    "chunk-size": Key(
        "chunk_size", _chunk, "SIZE", "bytes of a file on one target before the next one's turn"
    ),
    "capacity": Key("capacity", _capacity, "SIZE", "space for the whole job, over all its nodes"),
    "mirror": Key("mirror", _flag, "yes|no", "keep two copies on two nodes"),
    "prefer-local": Key(
        "prefer_local", _flag, "yes|no", "new files on the targets of the node that makes them"
    ),
    "interfaces": Key(
        "interfaces", _interfaces, "IF[+IF]", "network interfaces, out of those that the site allows"
    ),
    "mount": Key("mount", _mount, "PATH", "mount point, out of those that the site allows"),
    "share": Key("share", _components, "N[+N]", "components of a heterogeneous job that mount it too"),
    "join": Key(
        "join", _component, "N", "mount that of component N, and have none of one's own; stands alone"
    ),
}


# --- parsing ----------------------------------------------------------------------------------------------


def split_escaped(text: str, separator: str) -> list[str]:
    r"""Parts of `text` between unescaped `separator`s; a backslash takes its meaning from the next character.

    >>> split_escaped(r"a\:b:c", ":")
    ['a:b', 'c']
    """
    parts, part, escaped = [], [], False
    for char in text:
        if escaped:
            if char not in (":", ",", "\\"):
                part.append("\\")
            part.append(char)
            escaped = False
        elif char == "\\":
            escaped = True
        elif char == separator:
            parts.append("".join(part))
            part = []
        else:
            part.append(char)
    if escaped:
        part.append("\\")
    return [*parts, "".join(part)]


def parse_options(options: Iterable[tuple[str, str]]) -> Request:
    """The request made by `options`: pairs of option name (without dashes) and raw value, in the order given.

    A key given twice keeps its last value, as with Slurm's own options; stage options all count.
    Raises RequestError naming the option, the value and what would be right.
    """
    request = _parse(options)
    for option, transfers in (
        ("--beeond-stage-in", request.stage_in),
        ("--beeond-stage-out", request.stage_out),
    ):
        for transfer in transfers:
            for path in (transfer.source, transfer.destination):
                _check_lengths(path, option, _least_length)
        check_deletions(transfers)
    return request


def _parse(options: Iterable[tuple[str, str]]) -> Request:
    values: dict[str, Any] = {}
    stages: dict[str, list[Transfer]] = {"beeond-stage-in": [], "beeond-stage-out": []}
    for name, text in options:
        if name == "beeond":
            values.update(_parse_keys(text))
        elif name in stages:
            stages[name].append(parse_transfer(text, f"--{name}", inward=name == "beeond-stage-in"))
        else:
            raise RequestError(
                f"--{name}: no such option; the options are --beeond, --beeond-stage-in and --beeond-stage-out"
            )
    if "join" in values and (len(values) > 1 or any(stages.values())):
        raise RequestError(
            f"join={values['join']} stands alone: component {values['join']}, whose file system it is, says all else"
        )
    return Request(
        **values, stage_in=tuple(stages["beeond-stage-in"]), stage_out=tuple(stages["beeond-stage-out"])
    )


def check_deletions(transfers: Sequence[Transfer]) -> None:
    """See that no transfer with `delete` would delete what another one of the same direction copies.

    Raises RequestError. By the names alone: links may still lead two names to one place.
    """
    if len(transfers) > _MOST_TRANSFERS:
        raise RequestError(f"more than {_MOST_TRANSFERS} transfers; name directories instead of single files")
    places = [(each, _place(each.destination)) for each in transfers]
    for deleting, top in places:
        if "delete" in deleting.flags:
            for other, place in places:
                if place.startswith(top) and other != deleting:
                    raise RequestError(
                        f"delete at {show(deleting.destination)} would delete what another transfer copies to "
                        f"{show(other.destination)}; take the flag away, or name another place"
                    )


def _place(path: str) -> str:
    """The names that `path` leads through: what is below it begins with the same.

    >>> _place("/a/./b//../c"), _place(".")
    ('/a/c/', '/')
    """
    parts: list[str] = []
    for part in path.split("/"):
        if part == "..":
            del parts[-1:]
        elif part not in ("", "."):
            parts.append(part)
    return "/" + "".join(f"{part}/" for part in parts)


def _parse_keys(text: str) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for item in split_escaped(text, ",") if text else ():
        name, equals, value = item.partition("=")
        key = KEYS.get(name)
        if key is None:
            raise RequestError(f"--beeond: unknown key {show(name)}; the keys are {', '.join(KEYS)}")
        if not equals and name != "mirror":
            raise RequestError(f"--beeond: {name} has no value; write {name}={key.metavar}")
        try:
            values[key.field] = key.parse(value)
        except ValueError as error:
            raise RequestError(f"--beeond: {name}={show(value)} is not valid: {error}") from None
    return values


_FLAG_BY_COMMA: Final = re.compile(rf"(?<!\\),({'|'.join(FLAGS)})$")
_INSIDE: Final = ("$BEEOND", "${BEEOND}", "$DW_JOB_STRIPED", "${DW_JOB_STRIPED}")


def parse_transfer(text: str, option: str, *, inward: bool) -> Transfer:
    """The transfer that `text` (`SRC:DST[:FLAG[+FLAG]]`) asks for; `option` is named in messages.

    Raises RequestError.
    """
    form = "SRC:DST[:FLAG[+FLAG]]"
    parts = split_escaped(text, ":")
    if len(parts) not in {2, 3}:
        raise RequestError(f"{option}: {show(text)} is not {form}; write '\\:' for a colon in a path")
    if len(parts) == 2 and (mistaken := _FLAG_BY_COMMA.search(text)):
        raise RequestError(
            f"{option}: {show(mistaken[0])} in {show(text)} is part of a name; "
            f"write {show(':' + mistaken[1])} for the flag, or '\\,' for a comma in a path"
        )
    flags = parts[2].split("+") if len(parts) == 3 else []
    for flag in flags:
        if flag not in FLAGS:
            raise RequestError(
                f"{option}: unknown flag {show(flag)} in {show(text)}; the flags are {', '.join(FLAGS)}"
            )
    source, destination = (parts[0], below(parts[1])) if inward else (below(parts[0]), parts[1])
    for path in (source, destination):
        _check_replaced(path, option)
    return _checked(Transfer(source, destination, tuple(sorted(set(flags)))), option, inward=inward)


def below(path: str) -> str:
    """`path` without the words for the instance that scripts put in front; nothing else is ever replaced."""
    for prefix in _INSIDE:
        if path == prefix:
            return "."
        if path.startswith(prefix + "/"):
            return path.removeprefix(prefix).lstrip("/") or "."
    return path


def _checked(transfer: Transfer, option: str, *, inward: bool) -> Transfer:
    outside, inside = transfer.source, transfer.destination
    if not inward:
        outside, inside = inside, outside
    for path in (outside, inside):
        if "\0" in path:
            raise RequestError(f"{option}: {show(path)} has a NUL byte in it")
        for match in re.finditer(r"%(.?)", path, re.DOTALL):
            if match[1] == "" or match[1] not in _EXPANSIONS:
                raise RequestError(
                    f"{option}: {show(match[0])} in {show(path)} means nothing; "
                    "use %j %u %x %A %a, and %% for a percent sign"
                )
    _check_outside(outside, option)
    _check_inside(inside, option)
    return transfer


def _check_replaced(path: str, option: str) -> None:
    """Refuse what looks like a shell's: in a line of a script it stays as it is, and names something else."""
    parts = path.split("/")
    for index, part in enumerate(parts):
        if re.match(r"\$[A-Za-z_{]", part) or (index == 0 and part.startswith("~")):
            raise RequestError(
                f"{option}: no shell replaces {show(part)} in {show(path)}; "
                "write the path out, within $BEEOND relative to it"
            )


def _check_lengths(path: str, option: str, length: Callable[[str], int]) -> None:
    """Refuse what no file system can have; `length` says how many bytes a part of `path` has."""
    if length(path) > _LONGEST_PATH:
        raise RequestError(
            f"{option}: {show(path)} is no path: it has more than {_LONGEST_PATH} bytes; shorten it"
        )
    for part in path.split("/"):
        if length(part) > _LONGEST_NAME:
            raise RequestError(
                f"{option}: {show(part)} in {show(path)} is no name for a file: "
                f"it has more than {_LONGEST_NAME} bytes; shorten it"
            )


def _length(text: str) -> int:
    return len(text.encode(errors="surrogateescape"))


def _least_length(text: str) -> int:
    """Of `text` whatever its patterns stand for, which may be nothing (`%x`)."""
    return _length(re.sub(r"%(.)", lambda match: "%" if match[1] == "%" else "", text))


def _check_outside(path: str, option: str) -> None:
    if not path.startswith("/"):
        raise RequestError(
            f"{option}: {show(path)} is not an absolute path; global storage is named from '/'"
        )


def _check_inside(path: str, option: str) -> None:
    if not path:
        raise RequestError(f"{option}: the path within $BEEOND is empty; write '.' for the whole file system")
    if path.startswith("/"):
        raise RequestError(f"{option}: {show(path)} must be relative to $BEEOND, without a leading '/'")
    if _climbs(path):
        raise RequestError(f"{option}: {show(path)} climbs out of $BEEOND with '..'; name a path below it")


def _climbs(path: str) -> bool:
    return ".." in path.split("/")


def printable(text: str) -> str:
    """`text` without quotes, on one line, whatever bytes it stands for."""
    return (
        text.encode(errors="surrogateescape")
        .decode(errors="backslashreplace")
        .encode("unicode_escape")
        .decode()
    )


def show(text: str) -> str:
    """`text` quoted so that a message stays one printable line."""
    return repr(shortened(text).encode(errors="surrogateescape").decode(errors="backslashreplace"))


# --- %-expansion ------------------------------------------------------------------------------------------


def needs_scheduler(request: Request) -> bool:
    """Whether a path uses a name that a node does not know and has to ask Slurm for (`%x`, `%A`, `%a`)."""
    return any(_asks_slurm(transfer) for transfer in (*request.stage_in, *request.stage_out))


def _asks_slurm(transfer: Transfer) -> bool:
    return not _patterns(transfer).isdisjoint("xAa")


def _patterns(transfer: Transfer) -> set[str]:
    return {letter for path in (transfer.source, transfer.destination) for letter in re.findall("%(.)", path)}


def expand_all(
    request: Request, names: JobNames, *, inward: bool, mount: str = "", lengths: bool = True
) -> list[Transfer]:
    """The transfers of one direction as `expand` has them, and may now be in each other's way. Raises RequestError."""
    chosen = request.stage_in if inward else request.stage_out
    expanded = [expand(transfer, names, inward=inward, mount=mount, lengths=lengths) for transfer in chosen]
    check_deletions(expanded)
    return expanded


def expand(
    transfer: Transfer, names: JobNames, *, inward: bool, mount: str = "", lengths: bool = True
) -> Transfer:
    """`transfer` with `%j %u %x %A %a %%` replaced as Slurm does in file names (sbatch(1)).

    `mount` is where $BEEOND is, as far as that is known: the path below it has to be short enough with it.
    `lengths`: whether what is too long is refused.

    Raises RequestError when the result is no longer allowed: a job name with '/' or '..' in it, or too long.
    """
    option = "--beeond-stage-in" if inward else "--beeond-stage-out"
    task = 4294967294 if names.array_task_id is None else names.array_task_id  # NO_VAL, as Slurm prints it
    meaning = {
        "j": str(names.job_id),
        "u": names.user,
        "x": names.job_name or "",
        "A": str(names.job_id if names.array_job_id is None else names.array_job_id),
        "a": str(task),
        "%": "%",
    }
    if names.job_name is None and _asks_slurm(transfer):
        shown = show(f"{transfer.source}:{transfer.destination}")
        raise RequestError(f"{option}: Slurm no longer knows what %x, %A and %a stand for in {shown}")
    for char in sorted(_patterns(transfer) & {"u", "x"}):
        name = meaning[char]
        if "/" in name or name in {".", ".."} or (lengths and _length(name) > _LONGEST_NAME):
            raise RequestError(f"{option}: %{char} stands for {show(name)}, which is no name for a file")

    def replace(path: str) -> str:
        return re.sub(r"%(.)", lambda match: meaning[match[1]], path, flags=re.DOTALL)

    source, destination = replace(transfer.source), replace(transfer.destination)
    outside, inside = (source, destination) if inward else (destination, source)
    _check_outside(outside, option)
    _check_inside(inside, option)
    if lengths:
        for path in (outside, os.path.join(mount, inside)):
            _check_lengths(path, option, _length)
    return Transfer(source, destination, transfer.flags)


# --- carrying a request from the submission to the nodes --------------------------------------------------

_VERSION: Final = 1


def encode(request: Request) -> str:
    """`request` as one line of ASCII for the environment. Raises RequestError when it is too long."""
    data: dict[str, Any] = {"v": _VERSION}
    for item in fields(Request):
        value = getattr(request, item.name)
        if item.name.startswith("stage_"):
            value = [[t.source, t.destination, list(t.flags)] for t in value]
        if value not in (None, []):
            data[item.name] = value
    text = json.dumps(data, separators=(",", ":"), sort_keys=True)
    if len(text) > MAX_ENCODED:
        raise RequestError(
            f"the request has {format_size(len(text))} where {format_size(MAX_ENCODED)} are possible; "
            "name directories instead of single files"
        )
    return text


def decode(text: str) -> Request:
    """The request in `text`, which is the user's own word by the time it reaches a node: everything is checked again.

    Raises RequestError.
    """
    if len(text) > MAX_ENCODED:
        raise RequestError(f"the request is longer than {format_size(MAX_ENCODED)}")
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        raise RequestError(
            "the request that came with the job is not readable; submit it with --beeond again"
        ) from None
    if not _is_text_of_bytes(data):
        raise RequestError("the request that came with the job is malformed")
    if not isinstance(data, dict) or data.pop("v", None) != _VERSION:
        raise RequestError(
            "the request that came with the job is of another version of beeond-ctl; submit the job again"
        )
    options: list[tuple[str, str]] = []
    by_field = {key.field: name for name, key in KEYS.items()}
    pieces = []
    for name, value in data.items():
        if name in ("stage_in", "stage_out"):
            option = "beeond-" + name.replace("_", "-")
            options += [(option, text) for text in _raw_transfers(value, option)]
        elif name in by_field and isinstance(value, (str, int)):
            plain = ("yes" if value else "no") if isinstance(value, bool) else str(value)
            pieces.append(f"{by_field[name]}={escape(plain)}")
        else:
            raise RequestError(f"the request that came with the job has an unknown part {show(str(name))}")
    return _parse([("beeond", ",".join(pieces)), *options])


def _is_text_of_bytes(data: object) -> bool:
    r"""Whether all text in `data` can be what Python made of bytes; JSON can also say "\ud800"."""
    try:
        json.dumps(data, ensure_ascii=False).encode(errors="surrogateescape")
    except UnicodeEncodeError:
        return False
    return True


def _raw_transfers(value: object, option: str) -> list[str]:
    wrong = RequestError(f"--{option}: the request that came with the job is malformed")
    if not isinstance(value, list):
        raise wrong
    texts = []
    for item in value:
        match item:
            case [str(source), str(destination), [*flags]] if all(isinstance(flag, str) for flag in flags):
                tail = ":" + "+".join(flags) if flags else ""
                texts.append(f"{escape(source)}:{escape(destination)}{tail}")
            case _:
                raise wrong
    return texts


def escape(text: str) -> str:
    """`text` as one value of an option: what `split_escaped` gives back whole."""
    return text.replace("\\", "\\\\").replace(":", "\\:").replace(",", "\\,")
