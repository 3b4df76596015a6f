"""See `portable`, which says what each of these is for."""

from array import array

WRITE: int
PLACE: int
VERIFY: int
SYNC_EACH: int
DROP_CACHE: int
MADE: int
LIVE: int
NAMELESS: int
DIRECT: int
PRIVATE: int
NO_REPLACE: int

def harden() -> None: ...
def marks(known: array[int]) -> object: ...
def has(known: object, mark: int) -> bool: ...
def opendir(fd: int) -> object: ...
def readdir(directory: object, limit: int) -> tuple[bytes, list[str], bool]: ...
def examine(
    source: int, target: int, names: bytes, prefix: bytes, known: object, update: bool, /
) -> tuple[int, list[str], list[int], list[str]]: ...
def look(
    source: int, target: int, names: bytes, prefix: bytes, /
) -> tuple[list[str], list[int], list[str], list[int], list[int]]: ...
def put_new(directory: int, temp: bytes, name: bytes, /) -> bool: ...
def copy(
    source: int,
    target: int,
    names: list[str],
    prefix: bytes,
    temp: str,
    first: int,
    gid: int,
    flags: int,
    before: bytes,
    quiet_ns: int,
    /,
) -> tuple[bytes, int, list[int], list[int], bytes]: ...
