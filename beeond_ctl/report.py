"""What happened to a job, made of the events that its nodes logged: where the time and the bytes went.

Pure: events in, values out. The events of an ended job may have lain where its user can change them, so nothing in
them is taken for what it should be: texts come out printable and short, numbers finite.

Times are seconds since the epoch, as the nodes' clocks show them. Nodes leave a meeting together, so a node that
always seems to leave it earlier or later than the others has a clock that is off; its times are put right.
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import asdict, dataclass
from statistics import median, median_low
from typing import TYPE_CHECKING, Any, Final

from beeond_ctl.events import BEGINNINGS
from beeond_ctl.units import format_entries, format_size

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    Event = Mapping[str, Any]

_BEGINS: Final = {
    "prolog": "bring-up", "up": "bring-up", "epilog": "tear-down", "down": "tear-down",
    "recover": "recovery", "sweep": "sweep",
}  # fmt: skip
_OUTER: Final = frozenset(["bring-up", "tear-down", "recovery"])
_MEETING: Final = "meeting "
_SKEW_S: Final = 0.1
"""Less than that is not told from what a meeting takes."""
_TOGETHER_S: Final = 0.002
"""Nodes that come within this time come together: no one of them was waited for."""
_TEXT: Final = 600
_END: Final = "its end"
_LISTED: Final = 12
"""More targets are not listed on a terminal one by one."""


@dataclass(frozen=True, slots=True)
class Step:
    """Something that a node did. `waits`: it was in a meeting, and waited for others."""

    name: str
    begin: float
    seconds: float
    waits: bool
    failed: str


@dataclass(frozen=True, slots=True)
class Leg:
    """A piece of the way: until all had come to a meeting, or to the end.

    `last` is who came last, `late_s` how long after the middle one of the nodes; `step` is what it did for
    `step_s` of that time.
    """

    until: str
    begin: float
    seconds: float
    last: str
    late_s: float
    step: str
    step_s: float


@dataclass(frozen=True, slots=True)
class Act:
    """Bring-up, tear-down, a recovery or a sweep: what the nodes did together, from one start to one end."""

    name: str
    begin: float
    end: float
    lanes: dict[str, tuple[Step, ...]]
    legs: tuple[Leg, ...]
    failed: bool


@dataclass(frozen=True, slots=True)
class Sample:
    """How far a transfer was at a time."""

    t: float
    bytes: int
    entries: int


@dataclass(frozen=True, slots=True)
class Transfer:
    """A stage-in or stage-out, as the leader counted it."""

    direction: str
    source: str
    destination: str
    begin: float
    seconds: float
    bytes: int
    copied: int
    skipped: int
    failed: int
    result: str
    """"proved", "nothing there", "cancelled" or "not proved"."""
    notes: tuple[str, ...]
    by_node: dict[str, int]
    samples: tuple[Sample, ...]

    @property
    def rate(self) -> float:
        """Bytes per second."""
        return self.bytes / self.seconds if self.seconds > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Fault:
    """Something that was not as it should be, and the nodes that said so."""

    t: float
    nodes: tuple[str, ...]
    what: str
    text: str


@dataclass(frozen=True, slots=True)
class Receipt:
    """A wiped target."""

    t: float
    node: str
    home: str
    method: str
    files: int
    bytes: int
    seconds: float
    verified: str


@dataclass(frozen=True, slots=True)
class Report:
    """All of it. `outcome` is "clean", "kept", "running", "failed" or "unfinished"; `states` has it by node."""

    job: int
    run: str
    user: str
    nodes: tuple[str, ...]
    silent: tuple[str, ...]
    """Nodes of the job that no events are known of."""
    backend: str
    outcome: str
    states: dict[str, str]
    acts: tuple[Act, ...]
    transfers: tuple[Transfer, ...]
    faults: tuple[Fault, ...]
    receipts: tuple[Receipt, ...]
    clocks: dict[str, float]
    """Seconds by which clocks were ahead, where they were; times here are put right by that."""

    def act(self, name: str) -> Act | None:
        """The last act of that name."""
        return next((act for act in reversed(self.acts) if act.name == name), None)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self) | {"transfers": [asdict(item) | {"rate": item.rate} for item in self.transfers]}


def build(job: int, logs: Mapping[str, Sequence[Event]], nodes: Sequence[str] = ()) -> Report | None:
    """The report of the last run of `job` in `logs`, events by node; None where they tell of none.

    `nodes` are all nodes of the job, as far as they are known.
    """
    runs = {_text(node): _runs(log) for node, log in logs.items()}
    begun = [
        (_number(run[0], "t"), _text(run[0].get("run")), run[0]) for found in runs.values() for run in found
    ]
    if not begun:
        return None
    _, name, first = max(begun, key=lambda item: item[0])
    told = {node: last for node, found in runs.items() if (last := _chosen(found, name))}
    clocks = _clocks(told)
    told = {node: _put_right(events, clocks.get(node, 0.0)) for node, events in told.items()}
    known = sorted({*told, *map(_text, nodes)}, key=_natural)
    acts = _acts(told, known)
    states = {node: _state(events) for node, events in told.items()}
    planned = [event for events in told.values() for event in events if event.get("event") == "planned"]
    return Report(
        job=job,
        run=name,
        user=_text(first.get("user")) or str(_count(first, "uid")),
        nodes=tuple(known),
        silent=tuple(node for node in known if node not in told),
        backend=_text(planned[0].get("backend")) if planned else "",
        outcome=_outcome([*states.values(), *("unknown" for node in known if node not in told)]),
        states=states,
        acts=acts,
        transfers=_transfers(told),
        faults=_faults(told),
        receipts=_receipts(told),
        clocks=clocks,
    )


# --- what an event says -----------------------------------------------------------------------------------


def _number(event: Event, key: str) -> float:
    value = event.get(key)
    # Compared first: an integer of JSON may be too large for a float.
    return float(value) if isinstance(value, (int, float)) and 0 <= value < 1e18 else 0.0


def _count(event: Event, key: str) -> int:
    return int(_number(event, key))


def _text(value: object) -> str:
    """One printable line, not too long. What stands for bytes that are no text is shown as such."""
    text = value if isinstance(value, str) else ""
    shown = "".join(char if char.isprintable() else _escaped(char) for char in text[: _TEXT + 1])
    return shown if len(text) <= _TEXT else shown[:_TEXT] + "…"


def _escaped(char: str) -> str:
    is_byte = "\udc80" <= char <= "\udcff"  # as Python shows what is no UTF-8 in a name
    return f"\\x{ord(char) - 0xDC00:02x}" if is_byte else char.encode("unicode_escape").decode()


def _list(value: object) -> list[str]:
    return [_text(item) for item in value[:10_000]] if isinstance(value, list) else []


def _dict(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _natural(name: str) -> tuple[Any, ...]:
    """A key by which n2 comes before n10."""
    parts: list[Any] = []
    digits = ""
    for char in f"{name} ":
        if char.isdecimal() and char.isascii():
            digits += char
            continue
        if digits:
            parts.append((0, int(digits[:30]), digits))
            digits = ""
        parts.append((1, 0, char))
    return tuple(parts)


def _runs(log: Sequence[Event]) -> list[list[Event]]:
    """The log, cut where a new run of the job begins. An event without a time is left out."""
    runs: list[list[Event]] = []
    for event in (event for event in log if _number(event, "t") > 0):
        if event.get("event") in BEGINNINGS or not runs:
            runs.append([])
        runs[-1].append(event)
    return runs


def _chosen(runs: Sequence[list[Event]], name: str) -> list[Event] | None:
    return next((run for run in reversed(runs) if _text(run[0].get("run")) == name), None)


def _put_right(events: Sequence[Event], ahead_s: float) -> list[Event]:
    return [{**event, "t": _number(event, "t") - ahead_s} for event in events]


def _clocks(told: Mapping[str, Sequence[Event]]) -> dict[str, float]:
    """By how much the clocks of nodes are ahead of the others', where they are."""
    ends: dict[tuple[str, int], dict[str, float]] = {}
    for node, events in told.items():
        seen: Counter[str] = Counter()
        for event in events:
            step = _text(event.get("step"))
            if step.startswith(_MEETING):
                seen[step] += 1
                if "failed" not in event:
                    ends.setdefault((step, seen[step]), {})[node] = _number(event, "t")
    offsets: dict[str, list[float]] = {}
    for by_node in ends.values():
        middle = median(by_node.values())
        for node, end in by_node.items():
            offsets.setdefault(node, []).append(end - middle)
    return {node: round(off, 3) for node, found in offsets.items() if abs(off := median(found)) > _SKEW_S}


# --- acts -------------------------------------------------------------------------------------------------


def _acts(told: Mapping[str, Sequence[Event]], nodes: Sequence[str]) -> tuple[Act, ...]:
    """The n-th act of a name on one node is the n-th of that name on the others."""
    parts: dict[tuple[str, int], dict[str, list[Event]]] = {}
    for node, events in told.items():
        seen: Counter[str] = Counter()
        current = ("bring-up", 1)
        for event in events:
            name = _BEGINS.get(_text(event.get("event")))
            if name:
                seen[name] += 1
                current = (name, seen[name])
            parts.setdefault(current, {}).setdefault(node, []).append(event)
    acts = [_act(name, by_node, nodes) for (name, _), by_node in parts.items()]
    return tuple(sorted(acts, key=lambda act: act.begin))


def _act(name: str, by_node: Mapping[str, Sequence[Event]], nodes: Sequence[str]) -> Act:
    lanes = {node: tuple(_steps(by_node[node])) for node in nodes if node in by_node}
    begins = {node: _number(events[0], "t") for node, events in by_node.items()}
    ends = {node: _number(events[-1], "t") for node, events in by_node.items()}
    begin, end = min(begins.values()), max(ends.values())
    failed = any(
        "failed" in event or event.get("event") in ("failed", "gave-up")
        for events in by_node.values()
        for event in events
    )
    legs = _legs(lanes, begins, ends, nodes if name == "bring-up" else tuple(lanes))
    return Act(name, begin, end, lanes, legs, failed)


def _steps(events: Sequence[Event]) -> Iterable[Step]:
    for event in events:
        name = _text(event.get("step"))
        if event.get("event") == "step" and name not in _OUTER:
            seconds = _number(event, "seconds")
            failed = _text(event["failed"]) or "failed" if "failed" in event else ""
            yield Step(name, _number(event, "t") - seconds, seconds, name.startswith(_MEETING), failed)


def _legs(
    lanes: Mapping[str, Sequence[Step]],
    begins: Mapping[str, float],
    ends: Mapping[str, float],
    nodes: Sequence[str],
) -> tuple[Leg, ...]:
    """The way from the first start to the last end, cut at the meetings: each leg is as long as its last node took."""
    meetings: dict[tuple[str, int], dict[str, Step]] = {}
    for node, steps in lanes.items():
        seen: Counter[str] = Counter()
        for step in steps:
            if step.waits:
                seen[step.name] += 1
                meetings.setdefault((step.name, seen[step.name]), {})[node] = step
    marks = []
    for (name, _), by_node in meetings.items():
        came = {node: step.begin for node, step in by_node.items()}
        over = max(step.begin + step.seconds for step in by_node.values())
        absent = (
            [node for node in nodes if node not in by_node]
            if any(step.failed for step in by_node.values())
            else []
        )
        marks.append((over, name.removeprefix(_MEETING), came, absent))
    marks.sort(key=lambda mark: mark[0])
    marks.append((max(ends.values()), _END, dict(ends), []))
    legs = []
    since = min(begins.values())
    for over, name, came, absent in marks:
        if over > since or name == _END:
            legs.append(_leg(name, since, max(over, since), came, absent, lanes, begins))
            since = max(over, since)
    return tuple(legs)


def _leg(
    name: str, since: float, over: float, came: Mapping[str, float], absent: Sequence[str],
    lanes: Mapping[str, Sequence[Step]], begins: Mapping[str, float],
) -> Leg:  # fmt: skip
    if absent:
        missing = ", ".join(absent[:3]) + (f" and {len(absent) - 3} more" if len(absent) > 3 else "")
        return Leg(name, since, over - since, missing, over - median_low(came.values()), "did not come", 0.0)
    last = max(came, key=lambda node: came[node])
    late_s = came[last] - median_low(came.values())
    best, best_s = "starting late" if begins[last] > since else "", max(0.0, begins[last] - since)
    for step in lanes.get(last, ()):
        inside_s = min(step.begin + step.seconds, came[last]) - max(step.begin, since)
        if not step.waits and inside_s > best_s:
            best, best_s = step.name, inside_s
    return Leg(name, since, over - since, last, late_s if late_s > _TOGETHER_S else 0.0, best, best_s)


# --- the rest ---------------------------------------------------------------------------------------------


def _state(events: Sequence[Event]) -> str:
    """What a node was in at last: "clean", or a phase."""
    for event in reversed(events):
        if event.get("event") == "clean":
            return "clean"
        if event.get("event") == "phase":
            return _text(event.get("phase"))
    return "claimed"


def _outcome(states: Iterable[str]) -> str:
    found = set(states)
    if "retained" in found:
        return "kept"
    if "failed" in found:
        return "failed"
    if found <= {"clean"}:
        return "clean"
    return "running" if found <= {"ready", "clean"} else "unfinished"


def _transfers(told: Mapping[str, Sequence[Event]]) -> tuple[Transfer, ...]:
    found = []
    for events in told.values():
        samples: list[Sample] = []
        for event in events:
            if event.get("event") == "progress":
                samples.append(Sample(_number(event, "t"), _count(event, "bytes"), _count(event, "entries")))
            if event.get("step") in ("stage-in", "stage-out"):
                if "by_node" in event:  # on the leader alone
                    found.append(_transfer(event, samples))
                samples = []
    return tuple(sorted(found, key=lambda transfer: transfer.begin))


def _transfer(event: Event, samples: Sequence[Sample]) -> Transfer:
    summary = _dict(event.get("summary"))
    seconds = _number(event, "seconds")
    result = (
        "cancelled"
        if summary.get("cancelled")
        else "nothing there"
        if summary.get("missing")
        else "not proved"
    )
    notes = [text for text in (*_list(summary.get("problems")), *_list(summary.get("remarks"))) if text]
    return Transfer(
        direction="in" if event.get("step") == "stage-in" else "out",
        source=_text(event.get("source")),
        destination=_text(event.get("destination")),
        begin=_number(event, "t") - seconds,
        seconds=_number(summary, "seconds") or seconds,
        bytes=_count(summary, "bytes"),
        copied=_count(summary, "copied"),
        skipped=_count(summary, "skipped"),
        failed=_count(summary, "failed"),
        result="proved" if summary.get("proved") is True else result,
        notes=tuple(notes[:40]),
        by_node={
            _text(node): _count({"bytes": amount}, "bytes")
            for node, amount in list(_dict(event.get("by_node")).items())[:10_000]
        },
        samples=tuple(samples[:10_000]),
    )


_FAULTS: Final = {
    "failed": "failed", "gone": "job gone", "gave-up": "gave up", "drained": "drained",
    "given-up": "data given up", "not-drained": "not drained", "revived": "services had died",
    "not-revived": "services could not be started again", "detached": "mount could not be let go of",
    "remounted": "mounted again", "rebooted": "node was rebooted", "not-logged": "proof not in the event log",
    "roll-back alone": "rolled back alone",
    "not-accounted": "metrics or report not written",
}  # fmt: skip


def _faults(told: Mapping[str, Sequence[Event]]) -> tuple[Fault, ...]:
    """What went wrong, in order; those nodes together that said the same in one act."""
    found: dict[tuple[str, str], list[tuple[float, str]]] = {}
    for node, events in told.items():
        for event in events:
            kind = _FAULTS.get(_text(event.get("event")))
            if kind:
                found.setdefault((kind, _fault_text(event)), []).append((_number(event, "t"), node))
            for key, what in (
                ("ended", "processes held the mount"),
                ("killed", "processes had to be killed"),
            ):
                if event.get(key) and event.get("event") == "step":
                    text = ", ".join(_list(event[key]))
                    found.setdefault((what, text), []).append((_number(event, "t"), node))
    faults = [
        Fault(min(said)[0], tuple(sorted({node for _, node in said}, key=_natural)), what, text)
        for (what, text), said in found.items()
    ]
    return tuple(sorted(faults, key=lambda fault: fault.t)[:1000])


def _fault_text(event: Event) -> str:
    for key in ("message", "reason", "damage", "by"):
        if isinstance(event.get(key), str):
            return _text(event[key])
    return ", ".join(_list(event.get("services") or event.get("nodes")))


def _receipts(told: Mapping[str, Sequence[Event]]) -> tuple[Receipt, ...]:
    found = []
    for node, events in told.items():
        for event in events:
            listed = event.get("receipts")
            for receipt in listed[:100] if isinstance(listed, list) else ():
                facts = _dict(receipt)
                found.append(
                    Receipt(
                        _number(event, "t"), node, _text(facts.get("home")), _text(facts.get("method")),
                        _count(facts, "files"), _count(facts, "bytes"), _number(facts, "seconds"),
                        _text(facts.get("verified")),
                    )
                )  # fmt: skip
    return tuple(sorted(found, key=lambda receipt: (_natural(receipt.node), receipt.home)))


# --- as text ----------------------------------------------------------------------------------------------

OUTCOMES: Final = {
    "clean": "over, and all nodes are clean",
    "kept": "over, and its data is kept: its stage-out is not proved",
    "running": "under way: the file system is there",
    "failed": "without a file system: its bring-up failed",
    "unfinished": "not finished, as far as is known",
}
"""What the outcomes mean, for people; `A job that is …`."""


def lines(report: Report) -> Iterable[str]:
    """The report as text for a terminal."""
    count = len(report.nodes)
    yield f"job {report.job}  {report.user}  {count} node{'s' * (count != 1)}  {report.backend or 'no backend'}"
    yield f"  {OUTCOMES[report.outcome]}"
    if report.silent:
        yield f"  nothing is known of {_few(report.silent)}"
    for node, off in report.clocks.items():
        yield f"  the clock of {node} is {abs(off):.1f} s {'ahead' if off > 0 else 'behind'}; times are put right"
    for act in report.acts:
        yield ""
        how = "  failed" if act.failed else ""
        yield f"{act.name}  {show_time(act.begin)}  {show_seconds(act.end - act.begin)}{how}"
        for leg in act.legs:
            late = f", {show_seconds(leg.late_s)} after most" if leg.late_s and len(act.lanes) > 1 else ""
            by = f"{leg.step} {show_seconds(leg.step_s)}" if leg.step_s else leg.step
            last = f"last {leg.last}{late}{': ' if by else ''}{by}"
            yield f"  until {leg.until:<11} {show_seconds(leg.seconds):>8}  {last}"
    for title, found in (("transfers", _transfer_lines(report)), ("faults", _fault_lines(report)),
                         ("wiped", _receipt_lines(report))):  # fmt: skip
        told = list(found)
        if told:
            yield from ("", title, *(f"  {line}" for line in told))


def _transfer_lines(report: Report) -> Iterable[str]:
    for item in report.transfers:
        yield f"{item.direction:<3} {item.source} -> {item.destination}"
        yield (
            f"    {format_entries(item.copied)}, {format_size(item.bytes)} in {show_seconds(item.seconds)}, "
            f"{format_size(int(item.rate))}/s: {item.result}"
            + (f"; {item.skipped} were there already" if item.skipped else "")
            + (f"; {item.failed} failed" if item.failed else "")
        )
        for note in item.notes:
            yield f"    {note}"


def _fault_lines(report: Report) -> Iterable[str]:
    for fault in report.faults:
        yield f"{show_time(fault.t)}  {_few(fault.nodes)}: {fault.what}{': ' if fault.text else ''}{fault.text}"


def _receipt_lines(report: Report) -> Iterable[str]:
    if len(report.receipts) > _LISTED:
        yield wiped(report.receipts)
        return
    for item in report.receipts:
        yield (
            f"{item.node}: {item.home}: {item.method}, {format_entries(item.files)}, {format_size(item.bytes)} in "
            f"{show_seconds(item.seconds)}; {item.verified}"
        )


def wiped(receipts: Sequence[Receipt]) -> str:
    """All receipts in one line."""
    nodes = len({item.node for item in receipts})
    return (
        f"{len(receipts)} target{'s' * (len(receipts) != 1)} of {nodes} node{'s' * (nodes != 1)}: "
        f"{format_size(sum(item.bytes for item in receipts))}, "
        f"the longest in {show_seconds(max(item.seconds for item in receipts))}; seen to be gone"
    )


def _few(nodes: Sequence[str]) -> str:
    return ", ".join(nodes[:8]) + (f" and {len(nodes) - 8} more" if len(nodes) > 8 else "")


def show_time(t: float) -> str:
    """A time of day here."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(t if t < 1e11 else 0))


def show_seconds(seconds: float) -> str:
    """A length of time, short.

    >>> show_seconds(0.0123), show_seconds(4.2), show_seconds(754)
    ('12 ms', '4.20 s', '12 min 34 s')
    """
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 120:
        return f"{seconds:.2f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"
