"""Every message that the product can print about a failure, found in its source.

A message is known by its patterns: the literal text, with `…` for each part that is only known when it happens.
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

from beeond_ctl import errors

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT: Final = Path(__file__).resolve().parents[1]
HOLE: Final = "…"

_ERRORS: Final = frozenset(
    name
    for name, kind in vars(errors).items()
    if isinstance(kind, type) and issubclass(kind, errors.BeeondError)
)
_ENDS: Final = frozenset(["_end"])  # the rendezvous' leader: ends a meeting with a message to all
_C_CALL: Final = re.compile(
    r"(?:slurm_error\(|broken\(answer,|verdict = )((?:[^;\"]*?\"(?:[^\"\\]|\\.)*\")+)", re.DOTALL
)


def python_messages() -> dict[str, str]:
    """Patterns of the errors that Python code makes, each with the file it is in."""
    found: dict[str, str] = {}
    for path in sorted((ROOT / "beeond_ctl").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            for text in _texts(node):
                if any(len(part) >= 4 for part in text.split(HOLE)):
                    found.setdefault(" ".join(text.split()), str(path.relative_to(ROOT)))
    return found


def _texts(node: ast.AST) -> Iterator[str]:
    if not (isinstance(node, ast.Call) and isinstance(node.func, (ast.Name, ast.Attribute))):
        return
    name = node.func.id if isinstance(node.func, ast.Name) else node.func.attr
    if name in _ERRORS | _ENDS and node.args:
        yield from _variants(node.args[0])
    elif name == "Finding" and len(node.args) == 3 and "ok" not in ast.unparse(node.args[1]):
        yield from _variants(node.args[2])
    elif name == "_lack" and len(node.args) == 2:
        yield from _variants(node.args[1])


def _variants(text: ast.expr) -> Iterator[str]:
    match text:
        case ast.Constant(value=str(value)):
            yield value
        case ast.JoinedStr(values=parts):
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else HOLE for part in parts)
        case ast.IfExp(body=yes, orelse=no):
            yield from _variants(yes)
            yield from _variants(no)


def c_messages() -> dict[str, str]:
    """Patterns of what the SPANK plugin says, each with the file it is in."""
    found: dict[str, str] = {}
    for path in sorted((ROOT / "spank").glob("*.c")):
        for call in _C_CALL.findall(path.read_text()):
            joined = "".join(re.findall(r"\"((?:[^\"\\]|\\.)*)\"", call))
            text = re.sub(r"%[-0-9]*(?:zu|[sdu])", HOLE, joined).replace("\\n", "").replace('\\"', '"')
            text = text.removeprefix("beeond: ")
            if any(len(part) >= 4 for part in text.split(HOLE)):
                found.setdefault(" ".join(text.split()), str(path.relative_to(ROOT)))
    return found


def stable_part(pattern: str) -> str:
    """The longest literal piece of a message: what a person would search for."""
    return max((part.strip() for part in pattern.split(HOLE)), key=len)


if __name__ == "__main__":
    for pattern, where in {**python_messages(), **c_messages()}.items():
        sys.stdout.write(f"{where}: {pattern}\n")
