"""BeeGFS's command line tools, which only the leader runs: who is there, and how the file system is laid out. Pure.

`beegfs-ctl` (7.4) and `beegfs` (8) work without a mount, so all of it is done before anybody mounts. What they say was
seen with 7.4.7 and 8.3.1. Exit codes of 7.4 can be believed. Those of 8 cannot: where the licence library is not
installed it does what it was asked and exits 1, as it does for a mistake; so what it set is read back.
"""

from __future__ import annotations

import json
import re
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from beeond_ctl import overrides
from beeond_ctl.backends import Answer, Command, File, Question
from beeond_ctl.backends.beegfs import layout
from beeond_ctl.backends.beegfs.layout import PORTS
from beeond_ctl.backends.beegfs.servers import auth_file, auth_path
from beeond_ctl.units import parse_size

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from beeond_ctl.backends import Keys
    from beeond_ctl.plan import Plan

_NODE_TYPES: Final = {2: "meta", 3: "storage"}
"""How version 8 numbers them."""

_SETTLE_S: Final = 5.0
"""Seconds for which what fails is tried again: a server may still be busy with what all the others tell it."""

_ONLINE_S: Final = 2.4
"""Seconds in which servers do not come Online, from when they are seen to be registered: they do so after 3.0 s."""

_MIRROR_S: Final = 30.0
"""Seconds until the metadata servers know of their groups; before, they refuse to be mirrored. Seen: 5 to 8."""


def _tool_7(plan: Plan, keys: Keys, *words: str, again_s: float = _SETTLE_S) -> Command:
    path = f"{plan.run_dir}/beegfs-ctl.conf"
    text = overrides.conf_text({
        "sysMgmtdHost": plan.address(plan.leader),
        "connPortShift": str(layout.shift(plan)),
        "connAuthFile": auth_path(plan),
        "connUseRDMA": "false",
        "logEnabled": "false",
    })  # fmt: skip
    argv = ("beegfs-ctl", f"--cfgFile={path}", *words)
    return Command(argv, files=(File(path, text), auth_file(plan, keys)), again_s=again_s)


def _tool_8(
    plan: Plan,
    keys: Keys,
    *words: str,
    wrong: Callable[[bytes], str] | None = None,
    again_s: float = _SETTLE_S,
) -> Command:
    address = f"{plan.address(plan.leader)}:{layout.port(plan, PORTS['gRPC'])}"
    start = (
        "beegfs",
        "--mgmtd-addr",
        address,
        "--tls-disable",
        "--auth-file",
        auth_path(plan),
        "--output",
        "json",
    )
    codes = (0,) if plan.config.beegfs.licensed else (0, 1)
    return Command(
        (*start, *words), files=(auth_file(plan, keys),), codes=codes, again_s=again_s, wrong=wrong
    )


# --- who is there -----------------------------------------------------------------------------------------


def membership(plan: Plan, keys: Keys) -> tuple[Question, ...]:
    """Whether all servers are in mgmtd's list."""
    return _questions(plan, keys, ready=False)


def usable(plan: Plan, keys: Keys) -> tuple[Question, ...]:
    """Whether all are Online and Good too. Before, metadata servers do not know each other, nor all targets."""
    return _questions(plan, keys, ready=True)


def mounts_early(plan: Plan) -> bool:
    """Whether nodes may mount before all is Online and Good: 8 refuses it, and mirroring has to be set up before."""
    return plan.edition == "7.4" and not plan.request.mirror


def arranges_early(plan: Plan) -> bool:
    """Whether the file system can be laid out before all is Online and Good: a mirror group takes nothing less."""
    return not plan.request.mirror


def _questions(plan: Plan, keys: Keys, *, ready: bool) -> tuple[Question, ...]:
    expected = {"storage": layout.targets(plan), "meta": layout.metadata_servers(plan)}
    due_s = _ONLINE_S if ready else 0.0
    if plan.edition == "8":
        command = _tool_8(plan, keys, "target", "list", "--state")
        return (Question(command, partial(missing_8, expected, ready=ready), answered_8, due_s),)
    return tuple(
        Question(
            _tool_7(plan, keys, "--listtargets", f"--nodetype={kind}", "--state", "--longnodes"),
            partial(missing_7, kind, there, ready=ready),
            answered_7,
            due_s,
        )
        for kind, there in expected.items()
    )


def answered_7(answer: Answer) -> bool:
    """Whether mgmtd answered; the heading is printed when it did, even where nobody is there."""
    return b"TargetID" in answer.output


def answered_8(answer: Answer) -> bool:
    """Whether mgmtd answered: where nobody is there, only its missing licence is printed."""
    return answer.code == 0 or b"num_id" in answer.output or b"licens" in answer.errors.lower()


def missing_7(
    kind: str, expected: Mapping[int, str], answer: bytes, *, ready: bool = False
) -> dict[str, str]:
    """Nodes out of `expected` (number of a target or metadata server: node) that `beegfs-ctl --listtargets` lacks.

    If `ready`, those too that are not Online and Good.
    """
    states = {}
    for line in answer.decode(errors="replace").splitlines():
        words = line.split()
        if len(words) >= 3 and words[0].isdigit():
            states[int(words[0])] = (words[1], words[2])
    return _missing(kind, expected, states, ready=ready)


def missing_8(
    expected: Mapping[str, Mapping[int, str]], answer: bytes, *, ready: bool = True
) -> dict[str, str]:
    """Nodes out of `expected` (per kind as in `missing_7`) that `beegfs target list` lacks, or has not `ready`."""
    states: dict[str, dict[int, tuple[str, str]]] = {"meta": {}, "storage": {}}
    for entry in _entries(answer.decode(errors="replace")):
        kind, number = _identity(entry)
        if kind in states and number:
            states[kind][number] = (str(entry.get("reachability")), str(entry.get("consistency")))
    missing = {}
    for kind, nodes in expected.items():
        missing.update(_missing(kind, nodes, states[kind], ready=ready))
    return missing


def _missing(
    kind: str, expected: Mapping[int, str], states: Mapping[int, tuple[str, str]], *, ready: bool
) -> dict[str, str]:
    missing = {}
    for number, node in expected.items():
        state = states.get(number)
        if state is None:
            missing[node] = f"{kind} server not registered"
        elif ready and state != ("Online", "Good"):
            missing[node] = f"{kind} server {' and '.join(state)}"
    return missing


def _identity(entry: Mapping[str, Any]) -> tuple[str, int]:
    """Kind and number of a target: from numbers as 8.3 prints them, or from text such as "s:1"."""
    found, kind = entry.get("id"), entry.get("type")
    if isinstance(found, dict):
        kind, number = found.get("node_type", kind), found.get("num_id", 0)
    else:
        number = str(found).rpartition(":")[2]
    name = _NODE_TYPES.get(kind, "") if isinstance(kind, int) else str(kind).lower()
    return name, int(number) if str(number).isdigit() else 0


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


# --- how it is laid out -----------------------------------------------------------------------------------


def arrange(plan: Plan, keys: Keys) -> tuple[Command, ...]:
    """Mirror groups, pools, the root's stripe pattern, and the directories that have one of their own.

    These are the user's. To be run once in the life of an instance, when all are registered and nobody has mounted.
    """
    made = _arrange_7(plan, keys) if plan.edition == "7.4" else _arrange_8(plan, keys)
    return tuple(made)


def patterns(plan: Plan) -> dict[str, tuple[int, layout.Pool | None]]:
    """Each directory's number of stripes, and its pool where it is not BeeGFS's own."""
    root, every = layout.root_pool(plan), len(plan.storage_nodes) * len(plan.targets)

    def at_most(wanted: int, pool: layout.Pool | None) -> int:
        there = len(pool.targets) if pool else every - sum(len(other.targets) for other in layout.pools(plan))
        return max(1, min(wanted, there // 2 if plan.request.mirror else there))

    count = plan.request.stripe_count or plan.config.beegfs.stripe_count
    asked = (
        [int(number) for number in plan.request.stripe_dirs.split("+")] if plan.request.stripe_dirs else []
    )
    found = {"/": (at_most(count, root), root)}
    for number in (*plan.config.beegfs.stripe_directories, *asked):
        found[f"/stripe_{number}"] = (at_most(number, root), root)
    for pool in layout.pools(plan):
        found[f"/{pool.name}"] = (at_most(count, pool), pool)
    return found


def _chunk_size(plan: Plan) -> int:
    return plan.request.chunk_size or plan.config.beegfs.chunk_size


def _chunk(plan: Plan) -> tuple[int, str]:
    size = _chunk_size(plan)
    return (size >> 20, "m") if size % 1024**2 == 0 else (size >> 10, "k")


def _arrange_7(plan: Plan, keys: Keys) -> Iterator[Command]:
    if plan.request.mirror:
        for kind in ("storage", "meta"):
            yield _tool_7(plan, keys, "--addmirrorgroup", "--automatic", "--force", f"--nodetype={kind}")
        yield _tool_7(plan, keys, "--mirrormd", again_s=_MIRROR_S)
    for pool in layout.pools(plan):
        yield _tool_7(
            plan,
            keys,
            "--addstoragepool",
            f"--id={pool.number}",
            f"--desc={pool.name}",
            f"--targets={_numbers(pool)}",
        )
    number, unit = _chunk(plan)
    for path, (count, pool_) in patterns(plan).items():
        if path != "/":
            owner = (f"--uid={plan.job.uid}", f"--gid={plan.job.gid}")
            yield _tool_7(plan, keys, "--createdir", "--unmounted", "--access=0700", *owner, path)
        yield _tool_7(
            plan, keys, "--setpattern", "--unmounted", f"--chunksize={number}{unit}", f"--numtargets={count}",
            *(("--pattern=buddymirror",) if plan.request.mirror else ()),
            *((f"--storagepoolid={pool_.number}",) if pool_ else ()), path,
        )  # fmt: skip


def _arrange_8(plan: Plan, keys: Keys) -> Iterator[Command]:
    if plan.request.mirror:
        for kind in ("storage", "meta"):
            yield _tool_8(plan, keys, "mirror", "autocreate", kind, "--ignore-space")
        yield _tool_8(plan, keys, "mirror", "init", "--yes")
    for pool in layout.pools(plan):
        numbers = ",".join(f"s:{number}" for number in pool.targets)
        yield _tool_8(
            plan, keys, "pool", "create", pool.name, "--num-id", str(pool.number), "--targets", numbers
        )
    wanted = patterns(plan)
    if own := [path for path in wanted if path != "/"]:
        owner = ("--uid", str(plan.job.uid), "--gid", str(plan.job.gid))
        yield _tool_8(
            plan, keys, "entry", "create", "directory", "--mount=none", "--permissions", "0700", *owner, *own,
            wrong=partial(unmade, own),
        )  # fmt: skip
    number, unit = _chunk(plan)
    for (count, pool_), paths in _alike(wanted):
        yield _tool_8(
            plan, keys, "entry", "set", "--mount=none", "--chunk-size", f"{number}{unit.upper()}i",
            "--num-targets", str(count), *(("--pattern", "mirrored") if plan.request.mirror else ()),
            *(("--pool", pool_.name) if pool_ else ()), *paths, wrong=partial(unfound, paths),
        )  # fmt: skip
    seen = {path: (count, _chunk_size(plan)) for path, (count, _) in wanted.items()}
    yield _tool_8(plan, keys, "entry", "info", "--mount=none", *seen, wrong=partial(unset, seen), again_s=0)


def _alike(
    wanted: Mapping[str, tuple[int, layout.Pool | None]],
) -> Iterable[tuple[tuple[int, layout.Pool | None], list[str]]]:
    """The paths that want the same: one command can set several."""
    found: dict[tuple[int, layout.Pool | None], list[str]] = {}
    for path, pattern in wanted.items():
        found.setdefault(pattern, []).append(path)
    return found.items()


def _numbers(pool: layout.Pool) -> str:
    return ",".join(str(number) for number in pool.targets)


_MADE: Final = (0, 7)
"""Codes of BeeGFS 8: done, and there already, by an earlier try."""


def unmade(wanted: Iterable[str], answer: bytes) -> str:
    """Which of the directories `wanted` `beegfs entry create directory` does not say to have made."""
    made = {
        entry.get("name")
        for entry in _entries(answer.decode(errors="replace"))
        if entry.get("status") in _MADE
    }
    lost = [path for path in wanted if path not in made]
    return f"directories were not made: {', '.join(lost)}" if lost else ""


def unfound(wanted: Iterable[str], answer: bytes) -> str:
    """`wanted`, if `beegfs entry set` says that it set none of them."""
    return f"no pattern was set for {', '.join(wanted)}" if b"processed 0 entries" in answer else ""


def unset(wanted: Mapping[str, tuple[int, int]], answer: bytes) -> str:
    """Which of `wanted` (path: number of targets, bytes of a chunk) `beegfs entry info` shows otherwise."""
    seen = {
        str(entry.get("path")): str(entry.get("stripe_pattern"))
        for entry in _entries(answer.decode(errors="replace"))
    }
    wrong = [
        f"{path} has {seen.get(path, 'none')}"
        for path, pattern in wanted.items()
        if _pattern(seen.get(path, "")) != pattern
    ]
    return f"stripe patterns were not set: {', '.join(wrong)}" if wrong else ""


def _pattern(shown: str) -> tuple[int, int] | None:
    """Number of targets and bytes of a chunk, out of "RAID0 (4x1M)": it takes the largest unit that fits."""
    found = re.search(r"\((\d+)x(\w+)\)$", re.sub(r"\s", "", shown))
    with suppress(ValueError):
        return (int(found[1]), parse_size(found[2])) if found else None
    return None
