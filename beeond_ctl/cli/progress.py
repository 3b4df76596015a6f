"""How a transfer looks while it runs and when it has ended: live, as lines, or as JSON events. Decides nothing.

Progress goes to stderr, the result to stdout; with JSON everything is one object per line on stdout.
"""

from __future__ import annotations

import json
import sys
from collections import deque
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from beeond_ctl.estimate import ENTRY_COST
from beeond_ctl.units import duration, format_size

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from beeond_ctl.staging.transfer import Progress, Summary

EVERY_S: Final = {"live": 0.25, "json": 1.0, "plain": 1.0, "quiet": 1.0}
"""The ways to show progress, and how often each wants to be told."""

LINE_EVERY_S: Final = 10.0
"""Between two plain lines."""

_NODE_LINES: Final = 8
_WINDOW_S: Final = 20.0


def way(*, as_json: bool, quiet: bool) -> str:
    """How progress is to be shown: one of `EVERY_S`."""
    if quiet:
        return "quiet"
    if as_json:
        return "json"
    if not sys.stderr.isatty():
        return "plain"
    from rich.console import Console

    return "plain" if Console(stderr=True).is_dumb_terminal else "live"


class Pace:
    """Rate and time left, from what was done in the last 20 s."""

    def __init__(self) -> None:
        """Nothing is known yet."""
        self._seen: deque[Progress] = deque()

    def add(self, now: Progress) -> None:
        """Take in what is known now."""
        self._seen.append(now)
        while len(self._seen) > 2 and self._seen[1].seconds < now.seconds - _WINDOW_S:
            self._seen.popleft()

    def rate(self) -> float:
        """Bytes in a second."""
        first, last = self._seen[0], self._seen[-1]
        if first is last or last.seconds <= first.seconds:
            return last.bytes_done / last.seconds if last.seconds > 0 else 0.0
        # What was copied of a file that is begun again counts no longer.
        return max(0, last.bytes_done - first.bytes_done) / (last.seconds - first.seconds)

    def by_node(self) -> dict[str, tuple[int, float]]:
        """For each node the bytes that it has copied, and how many in a second."""
        first, last = self._seen[0], self._seen[-1]
        before, seconds = first.bytes_by_node, last.seconds - first.seconds
        if first is last or seconds <= 0:
            before, seconds = {}, last.seconds
        return {
            node: (size, (size - before.get(node, 0)) / seconds if seconds > 0 else 0.0)
            for node, size in sorted(last.bytes_by_node.items())
        }

    def left_s(self) -> float | None:
        """Seconds; None as long as nobody can know: the source is still being scanned, or nothing moves."""
        first, last = self._seen[0], self._seen[-1]
        done = _work(last.entries_done, last.bytes_done)
        moved = done - _work(first.entries_done, first.bytes_done)
        left = _work(last.entries_total, last.bytes_total) - done
        if not last.scanned or moved <= 0 or last.seconds <= first.seconds:
            return None
        return max(0.0, left / moved * (last.seconds - first.seconds))


def _work(entries: int, size: int) -> int:
    """What there is to do, in bytes: of `size` are only those that are copied, not what is there already."""
    return entries * ENTRY_COST + size


def phase(now: Progress) -> str:
    """What is being done: `scanning` (and copying what was found), `copying`, `finishing` (directories, deleting)."""
    if not now.scanned:
        return "scanning"
    return "copying" if now.entries_done < now.entries_total else "finishing"


def line(now: Progress, pace: Pace) -> str:
    """All of it on one line, what matters most first: a narrow terminal cuts it off."""
    left_s = pace.left_s() if phase(now) == "copying" else None
    parts = [
        f"{format_size(now.bytes_done)} of {format_size(now.bytes_total)}",
        *([f"{now.failed} failed"] if now.failed else []),
        *([] if left_s is None else [f"{duration(left_s)} left"]),
        f"{format_size(int(pace.rate()))}/s",
        f"{now.entries_done} of {now.entries_total} entries{'' if now.scanned else ' found so far'}",
    ]
    return f"{phase(now)}: {', '.join(parts)}"


def node_lines(pace: Pace) -> list[str]:
    """A line for each node where several copy; of many, the slowest."""
    nodes = pace.by_node()
    if len(nodes) < 2:
        return []
    shown = sorted(sorted(nodes, key=lambda node: nodes[node][1])[:_NODE_LINES])
    width = max(len(node) for node in shown)
    lines = [
        f"{node:<{width}}  {format_size(int(nodes[node][1]))}/s, {format_size(nodes[node][0])}"
        for node in shown
    ]
    more = len(nodes) - len(shown)
    return [*lines, *([f"and {more} faster nodes"] if more else [])]


@contextmanager
def shown(how: str) -> Iterator[Callable[[Progress], None]]:
    """A function to call with each progress, which shows it in the way `how`; the display ends with the block."""
    pace = Pace()
    if how == "live":
        with _live(pace) as show:
            yield show
    elif how == "plain":
        yield _lines(pace)
    elif how == "json":
        yield lambda now: _event("progress", **_facts(now, pace))
    else:
        yield lambda _: None


def _lines(pace: Pace) -> Callable[[Progress], None]:
    due_s = LINE_EVERY_S

    def show(now: Progress) -> None:
        nonlocal due_s
        pace.add(now)
        if now.seconds >= due_s:
            due_s = now.seconds + LINE_EVERY_S
            nodes = pace.by_node()
            rates = ", ".join(
                f"{node} {format_size(int(rate))}/s" for node, (_, rate) in [*nodes.items()][:_NODE_LINES]
            )
            sys.stderr.write(line(now, pace) + (f" ({rates})" if len(nodes) > 1 else "") + "\n")
            sys.stderr.flush()

    return show


@contextmanager
def _live(pace: Pace) -> Iterator[Callable[[Progress], None]]:
    from rich import progress as bars
    from rich.console import Console

    display = bars.Progress(
        bars.BarColumn(bar_width=24),
        bars.TextColumn("{task.description}", markup=False),
        console=Console(stderr=True),
        auto_refresh=False,  # no thread: each progress is drawn when it comes
        transient=True,
    )
    task = display.add_task("starting", total=None)

    def show(now: Progress) -> None:
        pace.add(now)
        total = _work(now.entries_total, now.bytes_total) if now.scanned else None
        done = _work(now.entries_done, now.bytes_done)
        text = "\n".join([line(now, pace), *node_lines(pace)])
        display.update(task, total=total, completed=done, description=text, refresh=True)

    with display:
        yield show


def _facts(now: Progress, pace: Pace) -> dict[str, Any]:
    pace.add(now)
    left_s = pace.left_s()
    return {
        "phase": phase(now),
        "entries_done": now.entries_done,
        "entries_total": now.entries_total,
        "bytes_done": now.bytes_done,
        "bytes_total": now.bytes_total,
        "failed": now.failed,
        "seconds": round(now.seconds, 3),
        "rate": int(pace.rate()),
        "left_s": None if left_s is None else round(left_s, 1),
        "nodes": {node: {"bytes": size, "rate": int(rate)} for node, (size, rate) in pace.by_node().items()},
    }


# --- beginning and end ------------------------------------------------------------------------------------


def started(facts: dict[str, Any], *, as_json: bool) -> None:
    """Say what begins; people have just typed it."""
    if as_json:
        _event("start", **facts)


def news(text: str, *, as_json: bool) -> None:
    """Say at once what people should know although the transfer goes on: a node that is lost."""
    if as_json:
        _event("news", text=one_line(text))
    else:
        _say(f"note: {one_line(text)}")


def ended(summary: Summary, resume: str, *, as_json: bool, quiet: bool) -> None:
    """Say what has come of it: problems and remarks a line each, counts, and what resumes it if it is not proved."""
    problems = [one_line(text) for text in summary.problems()]
    if not problems and not summary.proved:
        problems = ["the transfer did not come to its end"]
    rate = int(summary.bytes / summary.seconds) if summary.seconds > 0 else 0
    if as_json:
        for text in problems:
            _event("problem", text=text)
        again = {} if summary.proved else {"resume": resume}
        _event("end", **summary.as_dict(), rate=rate, **again)
        return
    for text in problems:
        _say(f"beeond-ctl: {text}")
    if quiet and summary.proved:
        return
    for text in summary.remarks():
        _say(f"note: {one_line(text)}")
    counts = ", ".join(
        f"{name} {getattr(summary, name)}" for name in ("copied", "verified", "skipped", "failed")
    )
    size = format_size(summary.bytes)
    sys.stdout.write(f"{counts}; {size} in {summary.seconds:.1f} s, {format_size(rate)}/s\n")
    sys.stdout.flush()
    if not summary.proved:
        _say(f"run this again when it is mended; what is proved is not copied again: {resume}")


def interrupted(resume: str, *, as_json: bool) -> None:
    """Say that it was stopped, and what goes on with it."""
    if as_json:
        _event("end", proved=False, cancelled="interrupted", resume=resume)
    else:
        _say(f"beeond-ctl: interrupted; what is proved is not copied again. To go on: {resume}")


def one_line(text: str) -> str:
    """`text` with everything escaped that would leave its line or drive the terminal.

    >>> one_line("a\\nb")
    'a\\\\nb'
    """
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape", "surrogatepass").decode()
        for char in text
    )


def _say(text: str) -> None:
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def _event(kind: str, **facts: object) -> None:
    sys.stdout.write(json.dumps({"event": kind, **facts}) + "\n")
    sys.stdout.flush()
