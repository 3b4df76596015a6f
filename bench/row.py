"""One measurement, beside that of a peer in the same run."""

from __future__ import annotations

import os
import time
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Row:
    """`value` in `unit`, the median where it was measured more than once; less is better, at most `goal`."""

    name: str
    value: float
    unit: str
    peer: str = ""
    """What does the same work, or as much of it as there is to compare with."""
    peer_value: float | None = None
    goal: float | None = None

    @property
    def ratio(self) -> float | None:
        """How many times the peer's value this is."""
        return self.value / self.peer_value if self.peer_value else None

    @property
    def holds(self) -> bool | None:
        """Whether the goal is reached; None where there is none."""
        return None if self.goal is None else self.value <= self.goal

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), "ratio": self.ratio, "holds": self.holds}


def process_s(argv: list[str], env: dict[str, str], *, stdin: str = os.devnull) -> float:
    """Seconds from starting a process to its end; its output goes nowhere. Raises RuntimeError when it fails."""
    files = [
        (os.POSIX_SPAWN_OPEN, 0, stdin, os.O_RDONLY, 0),
        (os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0),
    ]
    start = time.perf_counter()
    _, status = os.waitpid(os.posix_spawn(argv[0], argv, env, file_actions=files), 0)
    seconds = time.perf_counter() - start
    if status:
        raise RuntimeError(f"{' '.join(argv)}: ended with wait status {status}")
    return seconds
