"""`python -m bench [PART ...]`: runs the parts, prints a table of each, writes build/bench.json.

A part that fails or takes too long is named and left out; the others go on.
"""

from __future__ import annotations

import importlib
import json
import os
import platform
import signal
import sys
import time
import traceback
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from collections.abc import Iterator

    from bench.row import Row

PARTS = {
    "startup": ("Start of the controller's processes", 60),
    "plan": ("The plan of a job of 10,000 nodes", 120),
    "hooks": ("Prolog and Epilog of a job that asked for nothing", 180),
    "burst_buffer": ("Two hundred jobs with #BB_LUA lines pass through slurmctld", 400),
    "bringup": ("Bring-up and tear-down, by Slurm, from the scripts' exec to their return", 300),
    "scale": ("Bring-up by number of nodes, all of them on this machine", 300),
    "beegfs": ("BeeGFS, with real daemons where BEEGFS_HOME names them", 600),
    "rendezvous": ("The nodes of a large job meet, all of them on this machine", 180),
    "staging": ("Staging", 1500),
    "listed": ("Stage-in by the list that was made while the job was pending", 400),
    "scan": ("A source whose calls wait, looked at by many nodes", 300),
    "spread": ("One large file over three nodes' mounts", 900),
}
"""Name of the module, what it is about, and the seconds it may take."""

RESULT = Path(__file__).resolve().parents[1] / "build" / "bench.json"


@contextmanager
def at_most(seconds: int) -> Iterator[None]:
    """Raise TimeoutError in the block when it takes longer."""

    def late(*_: object) -> None:
        raise TimeoutError(f"not done in {seconds} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def table(title: str, rows: list[Row]) -> Table:
    """Rows for a terminal."""
    made = Table(title=title, title_justify="left", title_style="bold", expand=False)
    made.add_column("what")
    for name in ("value", "goal"):
        made.add_column(name, justify="right", no_wrap=True)
    made.add_column("peer")
    for name in ("peer's", "ratio"):
        made.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        style = {True: "green", False: "bold red", None: ""}[row.holds]
        made.add_row(
            row.name,
            f"[{style}]{_number(row.value)} {row.unit}[/]" if style else f"{_number(row.value)} {row.unit}",
            "" if row.goal is None else f"≤ {_number(row.goal)}",
            row.peer,
            "" if row.peer_value is None else f"{_number(row.peer_value)} {row.unit}",
            "" if row.ratio is None else f"{row.ratio:.2f}",
        )
    return made


def _number(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


@click.command()
@click.argument("parts", nargs=-1, type=click.Choice(list(PARTS)))
def main(parts: tuple[str, ...]) -> None:
    """Measure PARTS (default: all), print tables, and write build/bench.json."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # what a part has set up is taken down
    out = Console(width=None if sys.stdout.isatty() else 160, highlight=False)
    machine = {"cores": os.cpu_count(), "kernel": platform.release(), "python": platform.python_version()}
    load = os.getloadavg()[0]
    out.print(
        f"{machine['cores']} cores, Linux {machine['kernel']}, Python {machine['python']}, load {load:.1f} before"
    )
    rows: list[Row] = []
    failed = []
    for name in parts or tuple(PARTS):
        title, limit_s = PARTS[name]
        start = time.monotonic()
        try:
            with at_most(limit_s):
                module = importlib.import_module(f"bench.{name}")
                if not hasattr(module, "rows"):
                    out.print(f"{name}: not measured, bench/{name}.py has no rows()")
                    continue
                found: list[Row] = module.rows()
        except Exception:  # noqa: BLE001 - whatever it is: the other parts count, too
            failed.append(name)
            out.print(f"[bold red]{name} could not be measured:[/]")
            out.print(traceback.format_exc(), markup=False)
            continue
        rows += found
        told = f"{time.monotonic() - start:.0f} s, load {os.getloadavg()[0]:.1f} at its end"
        out.print(table(f"{title} ({name}: {told})", found))
    RESULT.parent.mkdir(exist_ok=True)
    result = {"machine": machine, "load_before": load, "rows": [row.as_dict() for row in rows]}
    RESULT.write_text(json.dumps(result, indent=2) + "\n")
    missed = [row.name for row in rows if row.holds is False]
    out.print(f"{sum(row.holds is True for row in rows)} goals reached, {len(missed)} missed; {RESULT}")
    for name in missed:
        out.print(f"  missed: {name}", style="red")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
