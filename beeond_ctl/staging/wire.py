"""How parents and children talk: lines of ASCII, fields parted by tabs, JSON in them. Pure but for the pipe.

Names are `str` as `surrogateescape` makes them; JSON carries the lone surrogates as `\\udcXX`, so any bytes
pass. What a child says is untrusted: a line has a limit, and whoever reads one checks each field.
"""

from __future__ import annotations

import json

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import IO, Any

MAX_LINE = 16 << 20
"""Bytes that a line may have. A batch has at most 256 names of 255 bytes below directories of any depth."""

MAX_FAILURES = 4096
"""Failures that one result may name: more than entries in a batch."""


class ProtocolError(Exception):
    """The other side said something that this one does not understand."""


def dumps(value: object) -> str:
    """`value` as JSON in one line of ASCII."""
    return json.dumps(value, separators=(",", ":"))


def loads(text: str | bytes) -> Any:  # noqa: ANN401 (whatever it is: the caller checks)
    """The value in `text`. Raises ProtocolError."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"not JSON: {type(error).__name__}") from None


def send(stream: IO[bytes], *fields: str) -> None:
    """Write one line. Raises OSError when the other side is gone."""
    stream.write("\t".join(fields).encode("ascii") + b"\n")
    stream.flush()


def lines(stream: IO[bytes]) -> Iterator[list[str]]:
    """The lines of `stream` as lists of fields until it ends. Raises ProtocolError."""
    while line := stream.readline(MAX_LINE):
        if not line.endswith(b"\n"):
            raise ProtocolError("a line is cut off or too long")
        try:
            text = line[:-1].decode("ascii")
        except UnicodeDecodeError:
            raise ProtocolError("a line is not ASCII") from None
        yield text.split("\t")
