"""How parents and children talk: lines of ASCII, fields parted by tabs, JSON in them. Pure but for the pipe.

Names are `str` as `surrogateescape` makes them; JSON carries the lone surrogates as `\\udcXX`, so any bytes
pass. What a child says is untrusted: a line has a limit, and whoever reads one checks each field.
"""

from __future__ import annotations

try:  # what `json` is made of: all of it, with `re` and `enum`, is a third of what a child needs to start
    import _json
except ImportError:  # not CPython
    _json = None  # type: ignore[assignment]

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import IO, Any

MAX_LINE = 16 << 20
"""Bytes that a line may have."""

MAX_TEXT = 256 << 10
"""Characters of paths that fill a line, counted as if each name in it came with its directory: an answer may name all
of them so. One path may have as many. A line that two such paths make too full still passes: a character is at most 12
bytes of JSON, and 14 where that is in JSON again."""

PIECE = 64 << 20
"""Bytes of a big file that one copier does at a time."""
MOST_PIECES = 1 << 22
"""Of one file, 256 TiB: the coordinator remembers each."""

LOOKS_PER_NODE = 2
"""Works for each node in which names are looked at for the scanner, so that none is without."""

MAX_FAILURES = 4096
"""Failures that one result may name: more than entries in a batch."""

EXAMPLES = 5
"""Names that a summary shows of each kind, and an answer says."""

_SHOWN = 400
_DIGITS = frozenset("0123456789abcdef")
"""Of a token (`re` takes longer to read in than the rest)."""


class ProtocolError(Exception):
    """The other side said something that this one does not understand."""


class _Strict:
    """What `json.loads` has by default."""

    strict = True
    object_hook = object_pairs_hook = None
    parse_float = parse_constant = float
    parse_int = int


def _refuse(value: object) -> None:
    raise TypeError(f"{type(value).__name__} is not for the wire")


def _ways() -> tuple[Callable[[object], str], Callable[[str], Any]]:
    """How to write and how to read JSON. What the short way does not read, `json` reads or finds wrong."""

    def read_otherwise(text: str) -> Any:  # noqa: ANN401
        import json

        return json.loads(text)

    def write_otherwise(value: object) -> str:
        import json

        return json.dumps(value, separators=(",", ":"))

    try:
        encode = _json.make_encoder(
            None, _refuse, _json.encode_basestring_ascii, None, ":", ",", False, False, True
        )
        scan = _json.make_scanner(_Strict)  # type: ignore[arg-type]
    except (AttributeError, TypeError):  # another version's, or none
        return write_otherwise, read_otherwise

    def read(text: str) -> Any:  # noqa: ANN401
        text = text.removesuffix("\n")
        try:
            value, end = scan(text, 0)
        except (ValueError, StopIteration, SystemError):
            return read_otherwise(text)
        return value if end == len(text) else read_otherwise(text)

    return lambda value: "".join(encode(value, 0)), read


_write, _read = _ways()


def dumps(value: object) -> str:
    """`value` as JSON in one line of ASCII."""
    return _write(value)


def loads(text: str | bytes) -> Any:  # noqa: ANN401 (whatever it is: the caller checks)
    """The value in `text`. Raises ProtocolError."""
    try:
        return _read(text if isinstance(text, str) else text.decode())
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"not JSON: {type(error).__name__}") from None


def is_token(value: object) -> bool:
    """Whether `value` is what temporary names of a transfer have in common, as we make it: eight hexadecimal digits.

    >>> is_token("0123abcd"), is_token("../../x1")
    (True, False)
    """
    return isinstance(value, str) and len(value) == 8 and _DIGITS.issuperset(value)


def shown(name: str) -> str:
    """As much of a name as a message can show: its end, which tells it from others.

    >>> shown("f"), shown("d/" * 300 + "f")[:5]
    ('f', '…/d/d')
    """
    return name if len(name) <= _SHOWN else "…" + name[-_SHOWN:]


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
