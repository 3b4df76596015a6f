"""A copier without a scanner, for tests of single steps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from beeond_ctl.staging import copier

if TYPE_CHECKING:
    from pathlib import Path


def worker(area: Path, **more: Any) -> copier.Copier:
    """One from `source` to `target` in `area`; `more` is what its setup says otherwise."""
    for name in ("source", "target"):
        (area / name).mkdir(exist_ok=True)
    inodes = [(area / name).stat().st_ino for name in ("source", "target")]
    setup = {
        "token": "0", "run": 1, "flags": [], "single": None, "fresh": False, "root_made": False, "direct": False,
        "clock": "", "again": False,
        "durable": False, "inodes": inodes, "source": str(area / "source"), "destination": str(area / "target"),
    }  # fmt: skip
    return copier.Copier({**setup, **more})
