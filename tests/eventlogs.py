"""Event logs of jobs that never ran, as nodes would have written them: what a report is to be tested with."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

START = 1_800_000_000.0

Logs = dict[str, list[dict[str, Any]]]


class _Node:
    def __init__(self, name: str, ahead_s: float) -> None:
        self.name, self.ahead_s = name, ahead_s
        self.log: list[dict[str, Any]] = []

    def say(self, t: float, event: str, **fields: Any) -> None:
        self.log.append({"t": START + t + self.ahead_s, "node": self.name, "event": event, **fields})

    def step(self, end: float, step: str, seconds: float, **fields: Any) -> None:
        self.say(end, "step", step=step, seconds=seconds, **fields)


def transfer(step: str, **changes: Any) -> dict[str, Any]:
    """The fields of a transfer's step, without its time."""
    summary = {
        "proved": True, "missing": False, "cancelled": "", "problems": [], "remarks": [], "copied": 5000,
        "verified": 5000, "skipped": 0, "failed": 0, "bytes": 40 * 1024**3, "seconds": 30.0,
    }  # fmt: skip
    source, destination = ("/lustre/in", "in") if step == "stage-in" else ("out", "/lustre/out")
    return {"transfer": 0, "source": source, "destination": destination, "summary": summary | changes}


def clean(
    names: Sequence[str], *, slow: str = "", slow_s: float = 2.0, clocks: dict[str, float] | None = None,
    staged_s: float = 0.0, run: str = "7.0", at: float = 0.0, said: dict[str, Any] | None = None,
) -> Logs:  # fmt: skip
    """A job that went well on nodes called `names`; the mount of `slow` took `slow_s` longer than the others'.

    `clocks` are seconds by which nodes' clocks are ahead; with `staged_s` there is a stage-in of that many seconds,
    with a sample in each. `said` changes its summary. `at` is when it began, in seconds after `START`.
    """
    nodes = [_Node(name, (clocks or {}).get(name, 0.0) + at) for name in names]
    for number, node in enumerate(nodes):
        late = 0.01 * (number % 7)
        node.say(late, "prolog", nodes=",".join(names), user="alice", uid=2001, run=run)
        node.say(late, "planned", backend="glusterfs", targets=1)
        node.step(0.1 + late, "preparing", 0.1)
        node.step(0.2, "meeting prepared", 0.1 - late)
        node.step(0.35 + late, "starting", 0.15 + late)
        node.step(0.45, "meeting serving", 0.1 - late)
        own_s = 0.2 + late + (slow_s if node.name == slow else 0.0)
        node.step(0.45 + own_s, "mounting", own_s)
        until = 0.55 + (slow_s if slow in names else 0.0) + 0.2
        node.step(until, "meeting mounted", until - 0.45 - own_s)
        if staged_s:
            for second in range(1, int(staged_s)) if number == 0 else ():
                part = int((second + 0.2 * (second % 3)) / (staged_s + 1) * 40 * 1024**3)
                node.say(until + second, "progress", transfer=0, inward=True, bytes=part, entries=second)
            until += staged_s
            led = {"by_node": dict.fromkeys(names, 1024**3)} if number == 0 else {}
            how = {"seconds": staged_s} | (said or {})
            node.step(until, "stage-in", staged_s, **transfer("stage-in", **how), **led)
        node.say(until, "phase", phase="ready")
        node.step(until + 0.02, "meeting ready", 0.02)
        node.say(until + 0.02, "usable", took="1.00 s")
        node.step(until + 0.03, "bring-up", until + 0.03 - late)
        end = until + 3600
        node.say(end + late, "epilog")
        node.step(end + 0.1, "meeting ending", 0.1 - late)
        node.step(end + 0.2 + late, "unmounting", 0.1 + late)
        node.step(end + 0.3, "meeting unmounted", 0.1 - late)
        node.step(end + 0.35, "stopping", 0.05)
        receipt = {
            "home": "/nvme/beeond/job-7", "method": "delete", "files": 12, "bytes": 5 * 1024**3, "seconds": 0.3,
            "verified": "/nvme/beeond/job-7 and all in it are gone", "finished_at": START,
        }  # fmt: skip
        node.step(end + 0.7, "wiping", 0.35, receipts=[receipt])
        node.say(end + 0.7, "clean")
        node.step(end + 0.71, "tear-down", 0.71 - late)
    return {node.name: node.log for node in nodes}


def failed(names: Sequence[str], absent: str, why: str) -> Logs:
    """A job of which one node did not come to the first meeting: the others waited, and gave up."""
    nodes = [_Node(name, 0.0) for name in names if name != absent]
    for node in nodes:
        node.say(0, "prolog", nodes=",".join(names), user="alice", uid=2001, run="7.0")
        node.say(0, "planned", backend="glusterfs", targets=1)
        node.step(0.1, "preparing", 0.1)
        node.step(10, "meeting prepared", 9.9, failed=why)
        node.step(10, "bring-up", 10, failed=why)
        node.step(10.1, "wiping", 0.05, receipts=[])
        node.step(10.1, "roll-back", 0.1)
        node.say(10.1, "phase", phase="failed")
        node.say(10.1, "gave-up", message=why, fault="peer")
    return {node.name: node.log for node in nodes}
