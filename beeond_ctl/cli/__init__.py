"""The command line.

Prolog and Epilog are in the way of every job, so they do not pay for parsing a command line with options: this module
handles them by itself, and leaves everything else to `beeond_ctl.cli.commands`.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn


def main() -> None:
    """`beeond-ctl`. Turns every exception into one line on stderr and an exit code, here and nowhere else."""
    try:
        _leave(_run())
    except KeyboardInterrupt:  # while `guarded` still imports, or says what was wrong
        _leave(_say("interrupted", 130))


def _run() -> int:
    if len(sys.argv) == 2 and sys.argv[1] in {"prolog", "epilog"}:
        return guarded(lambda: _hook(sys.argv[1]))
    if sys.argv[1:2] == ["bb"] and sys.argv[2:3] != ["limits"]:
        told = _burst_buffer(sys.argv[2:])
        if told is not None:
            return told
    return guarded(_command)


def _command() -> object:
    from beeond_ctl.cli import output
    from beeond_ctl.cli.commands import cli

    output.prepare()
    code = cli.main(prog_name="beeond-ctl", standalone_mode=False)
    sys.stdout.flush()  # what cannot be written is an error like any other
    return code


def _leave(code: int) -> NoReturn:
    """End this process. All is closed by now, and to take the interpreter apart takes as long as to start it."""
    with suppress(Exception):  # there is nobody left to be told
        sys.stdout.flush()
    os._exit(code)


def _hook(name: str) -> int:
    if name == "prolog":
        from beeond_ctl.lifecycle.bringup import prolog

        return prolog(os.environ)
    from beeond_ctl.lifecycle.teardown import epilog

    return epilog(os.environ)


def _burst_buffer(words: list[str]) -> int | None:
    """What burst_buffer.lua calls, for hundreds of jobs at once: beside slurmctld, as SlurmUser or as a job's user."""
    from beeond_ctl import bb

    return guarded(lambda: bb.run(words)) if bb.is_hook(words) else None


def guarded(work: object) -> int:
    """The exit code of `work`, with whatever it raises as one line on stderr."""
    from beeond_ctl.errors import BeeondError, one_line

    assert callable(work)  # noqa: S101
    try:
        code = work()
    except BeeondError as error:
        return _say(one_line(error), error.exit_code)
    except KeyboardInterrupt:
        return _say("interrupted", 130)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 1
    except Exception as error:
        if type(error).__module__.startswith("click."):
            return _say_usage(error)
        if os.environ.get("BEEOND_CTL_DEBUG"):
            raise
        hint = "set BEEOND_CTL_DEBUG=1 for the traceback, and report it"
        return _say(f"unexpected: {one_line(error)}; {hint}", 1)
    return code if isinstance(code, int) else 0


def _say(text: str, code: int) -> int:
    sys.stderr.write(f"beeond-ctl: {text}\n")
    return code


def _say_usage(error: Exception) -> int:
    import click

    if isinstance(error, click.exceptions.Exit):
        return error.exit_code
    if isinstance(error, click.Abort):  # click makes one of Ctrl-C, too
        stopped = isinstance(error.__context__, KeyboardInterrupt)
        return _say("interrupted", 130) if stopped else _say("aborted", 1)
    if isinstance(error, click.ClickException):
        if type(error).__name__ == "NoArgsIsHelpError":  # click 8.2; before, it prints that by itself
            sys.stderr.write(f"{error.format_message()}\n")
            return error.exit_code
        context = getattr(error, "ctx", None)
        command = context.command_path if context else _typed_command()
        text = " ".join(error.format_message().split()).removesuffix(".")
        return _say(f"{text}; see `{command} --help`", 2)
    raise error


def _typed_command() -> str:
    """The command that was typed: click leaves it out of what it says of options without their argument."""
    import click

    from beeond_ctl.cli.commands import cli

    path = ["beeond-ctl"]
    command: click.Command = cli
    for word in sys.argv[1:]:
        if isinstance(command, click.Group) and word in command.commands:
            path.append(word)
            command = command.commands[word]
    return " ".join(path)
