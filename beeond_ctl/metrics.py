"""Numbers for Prometheus, kept in a file for node_exporter's text-file collector.

Counted from what a process has logged, so that event log and metrics cannot disagree. Prolog and Epilog are gone in a
moment, so the counts lie in a file of root's in between; like it, they begin anew after a reboot, which Prometheus
expects of counters. `docs/report.md` describes each; names and labels stay as they are.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from beeond_ctl.errors import NodeError
from beeond_ctl.state import write_atomically

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

FILE: Final = "beeond_ctl.prom"
STATE: Final = "metrics.json"
LOCK_S: Final = 1.0
"""How long another process of ours may hold the counts, which it does for milliseconds."""


@dataclass(frozen=True, slots=True)
class Metric:
    """One family of samples."""

    name: str
    kind: str
    labels: tuple[str, ...]
    help: str


METRICS: Final = (
    Metric("beeond_ctl_bring_ups_total", "counter", ("result",),
           "Bring-ups on this node: ready, or whose fault it was that there is no file system: user, node, peer, gone"),
    Metric("beeond_ctl_bring_up_seconds", "histogram", (),
           "Time from the start of the Prolog until the file system was ready on this node, without stage-in"),
    Metric("beeond_ctl_tear_down_seconds", "histogram", (),
           "Time from the start of the Epilog until this node was clean, or kept data, without stage-out"),
    Metric("beeond_ctl_steps_total", "counter", ("step", "result"), "Steps taken on this node: ok or failed"),
    Metric("beeond_ctl_step_seconds_total", "counter", ("step",),
           "Time spent in steps on this node; waiting is the time spent in meetings with other nodes"),
    Metric("beeond_ctl_transfers_total", "counter", ("direction", "result"),
           "Transfers led by this node: proved, missing (no source), failed or cancelled"),
    Metric("beeond_ctl_transfer_bytes_total", "counter", ("direction",),
           "Bytes copied by all nodes in transfers led by this node"),
    Metric("beeond_ctl_transfer_entries_total", "counter", ("direction",),
           "Files, links and directories copied or found to be there in transfers led by this node"),
    Metric("beeond_ctl_transfer_seconds_total", "counter", ("direction",), "Time of transfers led by this node"),
    Metric("beeond_ctl_wiped_targets_total", "counter", (), "Targets wiped on this node, and seen to be empty"),
    Metric("beeond_ctl_wiped_bytes_total", "counter", (), "Space given back by wiping on this node"),
    Metric("beeond_ctl_retained_total", "counter", (),
           "Times that data was kept on this node because its stage-out is not proved"),
    Metric("beeond_ctl_drains_total", "counter", (), "Times that this node was drained by beeond-ctl"),
    Metric("beeond_ctl_revived_services_total", "counter", (),
           "Services that died during a job on this node and were started again for its stage-out"),
    Metric("beeond_ctl_swept_total", "counter", ("verdict",),
           "What sweeps found on this node, by what came of it: live, kept, removed, stuck and so on"),
    Metric("beeond_ctl_sweep_timestamp_seconds", "gauge", (), "When this node was last swept, since the epoch"),
    Metric("beeond_ctl_sweep_stuck", "gauge", (), "What the last sweep found and could not remove"),
    Metric("beeond_ctl_instances", "gauge", ("phase",), "Instances on this node, by phase"),
    Metric("beeond_ctl_update_timestamp_seconds", "gauge", (), "When this file was last written, since the epoch"),
)  # fmt: skip

BUCKETS_S: Final = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
"""A bring-up takes a fraction of a second; one of a minute has met a deadline."""

STEPS: Final = frozenset([
    "preparing", "starting", "starting the last", "registering", "arranging", "becoming usable", "becoming whole",
    "mounting", "probe", "destinations", "stage-in", "whole", "syncing", "stage-out", "unmounting", "stopping",
    "wiping", "roll-back",
])  # fmt: skip
"""Names for the label `step`; others count as "other", so that it stays short."""
_OUTER: Final = {"bring-up": "beeond_ctl_bring_up_seconds", "tear-down": "beeond_ctl_tear_down_seconds"}

Counts = dict[str, float]
"""By sample, as it stands in the file: `name{label="value"}`."""


_RESULTS: Final = {
    "beeond_ctl_bring_ups_total": ("ready", "user", "node", "peer", "gone"),
    "beeond_ctl_steps_total": ("ok", "failed"),
    "beeond_ctl_transfers_total": ("proved", "missing", "failed", "cancelled"),
}
_VALUES: Final[dict[str, tuple[str, ...]]] = {
    "direction": ("in", "out"),
    "step": (*sorted(STEPS), "waiting", "other"),
    "verdict": ("live", "kept", "removed", "stuck"),
}


def zeros() -> Counts:
    """Every counter at 0: Prometheus takes no notice of the first step of one that was not there before."""
    counts: Counts = {}
    for metric in METRICS:
        if metric.kind == "histogram":
            for bound in (*(f"{bound:g}" for bound in BUCKETS_S), "+Inf"):
                counts[sample(f"{metric.name}_bucket", le=bound)] = 0
            counts[f"{metric.name}_sum"] = counts[f"{metric.name}_count"] = 0
        elif metric.kind == "counter":
            for values in product(*(_values(metric.name, label) for label in metric.labels)):
                counts[sample(metric.name, **dict(zip(metric.labels, values, strict=True)))] = 0
    return counts


def _values(name: str, label: str) -> tuple[str, ...]:
    return _RESULTS[name] if label == "result" else _VALUES[label]


def sample(name: str, **labels: str) -> str:
    """How a sample is called."""
    inner = ",".join(f'{label}="{value}"' for label, value in labels.items())
    return f"{name}{{{inner}}}" if inner else name


def count(counts: Counts, logged: Sequence[Mapping[str, Any]]) -> None:
    """Add what one process has logged of one job on this node to `counts`."""

    def add(name: str, value: float = 1, **labels: str) -> None:
        key = sample(name, **labels)
        counts[key] = counts.get(key, 0) + value

    ready = False
    staged_s = 0.0
    for event in logged:
        match event["event"]:
            case "phase":
                ready = ready or event["phase"] == "ready"
                if event["phase"] == "retained":
                    add("beeond_ctl_retained_total")
            case "drained":
                add("beeond_ctl_drains_total")
            case "gave-up":
                add("beeond_ctl_bring_ups_total", result=event.get("fault", "node"))
            case "revived":
                add("beeond_ctl_revived_services_total", len(event["services"]))
            case "step":
                step, seconds = str(event["step"]), float(event["seconds"])
                if step in ("stage-in", "stage-out"):
                    staged_s += seconds
                    if "by_node" in event:
                        _count_transfer(add, step.removeprefix("stage-"), event["summary"])
                for receipt in event.get("receipts", ()):
                    add("beeond_ctl_wiped_targets_total")
                    add("beeond_ctl_wiped_bytes_total", receipt["bytes"])
                if step in _OUTER:
                    if step == "bring-up" and ready:
                        add("beeond_ctl_bring_ups_total", result="ready")
                    if step == "tear-down" or ready:
                        _observe(add, _OUTER[step], max(0.0, seconds - staged_s))
                else:
                    known = "waiting" if step.startswith("meeting ") else step if step in STEPS else "other"
                    add("beeond_ctl_steps_total", step=known, result="failed" if "failed" in event else "ok")
                    add("beeond_ctl_step_seconds_total", seconds, step=known)


def _count_transfer(add: Any, direction: str, summary: Mapping[str, Any]) -> None:  # noqa: ANN401 - `count`'s own
    result = "cancelled" if summary["cancelled"] else "missing" if summary["missing"] else "failed"
    add("beeond_ctl_transfers_total", direction=direction, result="proved" if summary["proved"] else result)
    add("beeond_ctl_transfer_bytes_total", summary["bytes"], direction=direction)
    add("beeond_ctl_transfer_entries_total", summary["copied"] + summary["skipped"], direction=direction)
    add("beeond_ctl_transfer_seconds_total", summary["seconds"], direction=direction)


def _observe(add: Any, name: str, seconds: float) -> None:  # noqa: ANN401 - `count`'s own
    for bound in BUCKETS_S:
        add(f"{name}_bucket", seconds <= bound, le=f"{bound:g}")
    add(f"{name}_bucket", le="+Inf")
    add(f"{name}_sum", seconds)
    add(f"{name}_count")


def count_sweep(counts: Counts, verdicts: Sequence[str], now: float) -> None:
    """Take in what a sweep found, and when it was (seconds since the epoch)."""
    for verdict in verdicts:
        key = sample("beeond_ctl_swept_total", verdict=verdict)
        counts[key] = counts.get(key, 0) + 1
    counts["beeond_ctl_sweep_stuck"] = sum(verdict == "stuck" for verdict in verdicts)
    counts["beeond_ctl_sweep_timestamp_seconds"] = round(now, 3)


def render(counts: Counts) -> str:
    """The file: every metric that has a sample, in the order of `METRICS`."""
    lines = []
    for metric in METRICS:
        endings = ("_bucket", "_sum", "_count") if metric.kind == "histogram" else ("",)
        found = [
            f"{key} {value:.15g}"
            for ending in endings
            for key, value in counts.items()
            if key.partition("{")[0] == metric.name + ending
        ]
        if found:
            lines += [f"# HELP {metric.name} {metric.help}", f"# TYPE {metric.name} {metric.kind}", *found]
    return "".join(f"{line}\n" for line in lines)


def update(
    directory: str, run: str, phases: Sequence[str], *, logged: Sequence[Mapping[str, Any]] = (),
    swept: Sequence[str] | None = None,
) -> None:  # fmt: skip
    """Count what was `logged`, or what a sweep found, and replace the file in `directory`.

    `run` is where the counts are kept, `phases` those of the instances on this node. Raises OSError, or NodeError when
    another process does not give the counts free.
    """
    now = time.time()
    with _counts(run) as counts:
        count(counts, logged)
        if swept is not None:
            count_sweep(counts, swept, now)
        shown = counts | {sample("beeond_ctl_instances", phase="ready"): 0}
        for phase in phases:
            key = sample("beeond_ctl_instances", phase=phase)
            shown[key] = shown.get(key, 0) + 1
        shown["beeond_ctl_update_timestamp_seconds"] = round(now, 3)
        write_atomically(Path(directory) / FILE, render(shown), 0o644)


@contextmanager
def _counts(run: str) -> Iterator[Counts]:
    """The counts until now, for this process alone; what it makes of them is kept."""
    path = Path(run) / STATE
    path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    descriptor = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        _lock(descriptor, path)
        counts = zeros()
        with suppress(OSError, ValueError):  # the first time, or after the disk was full
            counts |= json.loads(path.read_text())
        yield counts
        write_atomically(path, json.dumps(counts))
    finally:
        os.close(descriptor)


def _lock(descriptor: int, path: Path) -> None:
    deadline = time.monotonic() + LOCK_S
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise NodeError(
                    f"{path}: another beeond-ctl keeps it; see what hangs (fuser {path}.lock)"
                ) from None
            time.sleep(0.005)
        else:
            return
