"""What came of a transfer, or comes of it by now. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from beeond_ctl.errors import visible
from beeond_ctl.staging.causes import CAUSES, LOST
from beeond_ctl.staging.wire import EXAMPLES


@dataclass(frozen=True, slots=True)
class Fold:
    """Entries that something happened to, with a few names."""

    count: int = 0
    examples: tuple[str, ...] = ()

    def add(self, count: int, names: list[str]) -> Fold:
        """This and `count` more, some of them called `names`."""
        return Fold(self.count + count, (*self.examples, *names)[:EXAMPLES])

    def __str__(self) -> str:
        """`3 files (e.g. 'a', 'b')`, always one printable line."""
        names = ", ".join(show(name) for name in self.examples)
        noun = "entry" if self.count == 1 else "entries"
        if not names:
            return f"{self.count} {noun}"
        return f"{self.count} {noun} ({'' if self.count <= len(self.examples) else 'e.g. '}{names})"


_NOTES = {
    "xattr": "without their extended attributes, which the destination does not keep",
    "acl": "without their ACLs, which the destination does not keep; the group got what its own entry gives",
    "links": "copied as files of their own, as the destination makes no hard link to them",
    "newer": "newer at the destination, replaced; the newer ones were kept as NAME.newer-TOKEN.RUN",
    "foreign": "directories of another user, whose mode and times were left alone",
    "early": "may still be written to; copied, and dated 2 s earlier, so that nothing takes them for the same",
    "journal": "the journal could not be written, so that this transfer cannot be resumed",
}


@dataclass(frozen=True, slots=True)
class Summary:
    """What came of a transfer. Everything in it is counted from what copiers reported.

    `proved`: every entry of the source is at the destination and was compared with it there (or as far as
    `metadata-only` goes), and nothing was cancelled. `missing`: there was no source. `refused`: why the
    transfer was not even begun (the user's mistake). Special files (`special`) are named, not copied, and do
    not count against `proved`: they hold no data. `apart` are nodes that cannot copy, by reason.
    """

    source: bytes
    destination: bytes
    proved: bool = False
    missing: bool = False
    refused: str = ""
    cancelled: str = ""
    copied: int = 0
    verified: int = 0
    skipped: int = 0
    failed: int = 0
    bytes: int = 0
    seconds: float = 0.0
    failures: dict[tuple[str, str], Fold] = field(default_factory=dict)
    notes: dict[str, Fold] = field(default_factory=dict)
    special: Fold = Fold()
    deleted: Fold = Fold()
    apart: dict[str, tuple[str, ...]] = field(default_factory=dict)

    def problems(self) -> list[str]:
        """What went wrong, a line for each cause."""
        lines = []
        if self.missing:
            lines.append(f"{show_path(self.source)}: no such file or directory")
        if self.refused:
            lines.append(self.refused)
        if self.cancelled:
            lines.append(f"stopped: {self.cancelled}")
        for (cause, side), fold in sorted(self.failures.items()):
            text = CAUSES.get(cause, CAUSES["other"])
            if cause == LOST:  # on no side, and what tells of it are no names
                entries = Fold(fold.count)
                lines.append(f"{entries} not copied: {'; '.join(map(visible, dict.fromkeys(fold.examples)))}")
            elif side == "deletion":
                lines.append(f"{fold} not deleted: {text} at the destination")
            else:
                lines.append(f"{fold} not copied: {text} at the {side}")
        return lines

    def remarks(self) -> list[str]:
        """What a user should know although it went well, a line for each."""
        lines = [f"{fold} {_NOTES[kind]}" for kind, fold in sorted(self.notes.items()) if kind in _NOTES]
        for why, nodes in self.apart.items():
            names = ", ".join(nodes[:EXAMPLES]) + (
                f" and {len(nodes) - EXAMPLES} more" if nodes[EXAMPLES:] else ""
            )
            lines.append(f"{names} left to the others what there was to copy: {visible(why)}")
        if self.special.count:
            lines.append(f"{self.special} not copied: neither file, directory nor link")
        if self.deleted.count:
            lines.append(f"{self.deleted} deleted at the destination, with what was in them")
        return lines

    def as_dict(self) -> dict[str, object]:
        """For JSON."""
        return {
            "source": show_path(self.source),
            "destination": show_path(self.destination),
            "proved": self.proved,
            "missing": self.missing,
            "refused": self.refused,
            "cancelled": self.cancelled,
            "copied": self.copied,
            "verified": self.verified,
            "skipped": self.skipped,
            "failed": self.failed,
            "bytes": self.bytes,
            "seconds": round(self.seconds, 3),
            "problems": self.problems(),
            "remarks": self.remarks(),
        }


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a transfer is. Totals grow until `scanned`."""

    scanned: bool
    entries_done: int
    entries_total: int
    bytes_done: int
    bytes_total: int
    failed: int
    seconds: float
    idle_s: float
    bytes_by_node: dict[str, int]


def show(name: str) -> str:
    """A name from a user's tree, quoted so that a message stays one printable line.

    >>> show("a\\nb"), show("caf\\udce9")
    ("'a\\\\nb'", "'caf\\\\xe9'")
    """
    text = name.encode(errors="surrogateescape").decode(errors="backslashreplace")
    return repr(text).replace("\\\\x", "\\x")


def show_path(path: bytes) -> str:
    """A path, printable."""
    return visible(path.decode(errors="backslashreplace"))
