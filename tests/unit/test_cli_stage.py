"""`beeond-ctl stage in|out` as a user types it: real copies by the real command."""

from __future__ import annotations

import json
import os
import pty
import select
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from beeond_ctl.cli import progress
from beeond_ctl.staging.transfer import Progress
from bench import slow_calls
from tests.areas import area_in
from tests.faults import trees
from tests.testbed.host import PATIENCE

if TYPE_CHECKING:
    from collections.abc import Iterator

BEEOND_CTL = Path(sys.executable).with_name("beeond-ctl")
IS_ROOT = os.geteuid() == 0
NOBODY = 65534
MANY = 20_000


@pytest.fixture(scope="module")
def many() -> Iterator[Path]:
    """So many files that a transfer of them can be hit half way."""
    with area_in() as area:
        for number in range(MANY):
            if number % 1000 == 0:
                (area / f"d{number}").mkdir()
            (area / f"d{number // 1000 * 1000}" / f"f{number}").write_text(str(number))
        yield area


def environment(area: Path, **more: str) -> dict[str, str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("BEEOND", "XDG"))}
    return {**clean, "XDG_STATE_HOME": str(area / "state"), "COLUMNS": "200", **more}


def stage(
    area: Path, *words: str | bytes | Path, beeond: Path | None = None, before: tuple[str | Path, ...] = (), **how: Any
) -> subprocess.CompletedProcess[str]:  # fmt: skip
    more = {"BEEOND": str(beeond), "BEEOND_JOB_ID": "7"} if beeond else {}
    return subprocess.run(
        [*before, BEEOND_CTL, "stage", *words],
        cwd=how.pop("cwd", area),
        env=environment(area, **more),
        capture_output=True,
        text=True,
        timeout=120,
        **how,
    )


def events(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def journals(area: Path) -> list[Path]:
    return sorted((area / "state").rglob("*.journal"))


def same(source: Path, target: Path) -> bool:
    return trees.snapshot(bytes(source)) == trees.snapshot(bytes(target))


# --- paths ------------------------------------------------------------------------------------------------


def test_outside_of_a_job_paths_are_those_of_the_working_directory(area: Path) -> None:
    trees.build(bytes(area / "source"), 3)
    done = stage(area, "out", "source", "made/target")
    assert done.returncode == 0, done.stderr
    assert same(area / "source", area / "made/target")


def test_in_a_job_the_inner_path_is_below_beeond_and_the_outer_one_is_not(area: Path) -> None:
    for name in ("beeond", "here"):
        (area / name).mkdir()
    (area / "here/input").write_text("in")
    done = stage(area, "in", "input", "deep/copy", beeond=area / "beeond", cwd=area / "here")
    assert done.returncode == 0, done.stderr
    assert (area / "beeond/deep/copy").read_text() == "in"
    done = stage(area, "out", "deep", "results", beeond=area / "beeond", cwd=area / "here")
    assert done.returncode == 0, done.stderr
    assert (area / "here/results/copy").read_text() == "in"


def test_a_file_goes_into_a_directory_named_with_a_slash(area: Path) -> None:
    (area / "file").write_text("x")
    assert stage(area, "in", "file", "into/").returncode == 0
    assert (area / "into/file").read_text() == "x"


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (("in", "only-one"), 2),
        (("in", "a", "b", "c"), 2),
        (("sideways", "a", "b"), 2),
        (("in", "", "b"), 2),
        (("in", "--workers", "0", "a", "b"), 2),
        (("in", "--compress", "a", "b"), 2),
        (("in", "/etc/hostname", "../out"), 2),
        (("out", "x/../../y", "/nowhere"), 2),
        (("out", "not-there", "copy"), 1),
    ],
)
def test_a_mistake_is_one_line_and_changes_nothing(area: Path, words: tuple[str, ...], code: int) -> None:
    (area / "beeond").mkdir()
    done = stage(area, *words, "--quiet", beeond=area / "beeond")
    assert done.returncode == code, done.stderr
    assert done.stderr.startswith("beeond-ctl: ")
    assert ".; " not in done.stderr
    assert done.stdout == "" or code == 1
    assert os.listdir(area / "beeond") == []
    assert journals(area) == []


def test_a_beeond_that_is_gone_is_not_made_anew(area: Path) -> None:
    (area / "file").write_text("x")
    done = stage(area, "in", "file", "copy", beeond=area / "gone")
    assert done.returncode == 1
    assert "$BEEOND" in done.stderr
    assert not (area / "gone").exists()


@pytest.mark.parametrize("direction", ["in", "out"])
def test_in_a_job_without_beeond_nothing_goes_to_or_comes_from_where_it_would_have_been(
    area: Path, direction: str
) -> None:
    (area / "source").mkdir()
    (area / "source" / "file").write_text("x")
    job = ("env", "SLURM_JOB_ID=7")
    paths = (area / "source", "copy") if direction == "in" else ("source", area / "copy")
    done = stage(area, direction, *paths, before=job)
    assert done.returncode == 1
    assert "--beeond" in done.stderr
    assert not (area / "copy").exists()
    done = stage(area, direction, "--here", area / "source", area / "copy", before=job)
    assert done.returncode == 0, done.stderr
    assert (area / "copy" / "file").read_text() == "x"


def test_a_copy_into_beeond_is_the_only_one_that_need_not_survive_a_crash(
    area: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from beeond_ctl.cli.stage import _job

    (area / "beeond").mkdir()
    (area / "beeondage").mkdir()
    (area / "link").symlink_to("beeond")
    monkeypatch.setenv("BEEOND", str(area / "beeond"))
    assert not _job("/x", "y", (), inward=True).durable
    assert not _job("/x", str(area / "link/y"), (), inward=True).durable
    assert _job("/x", str(area / "beeondage/y"), (), inward=True).durable
    assert _job("x", "/y", (), inward=False).durable
    monkeypatch.delenv("BEEOND")
    assert _job("/x", "y", (), inward=True).durable


# --- flags ------------------------------------------------------------------------------------------------


def test_flags_do_what_they_do_in_a_request(area: Path) -> None:
    for name in ("one", "two"):
        (area / "source").mkdir(exist_ok=True)
        (area / "source" / name).write_text(name)
    assert stage(area, "in", "source", "target").returncode == 0
    (area / "target/extra").write_text("x")

    (end,) = events(stage(area, "in", "--json", "--quiet", "--update", "source", "target").stdout)[-1:]
    assert (end["copied"], end["skipped"]) == (0, 2)
    (end,) = events(stage(area, "in", "--json", "--metadata-only", "source", "target").stdout)[-1:]
    assert (end["copied"], end["verified"]) == (2, 0)
    assert (area / "target/extra").exists()
    done = stage(area, "in", "--delete", "--yes", "source", "target")
    assert done.returncode == 0
    assert sorted(os.listdir(area / "target")) == ["one", "two"]
    assert "'extra'" in done.stderr


def test_the_help_names_every_flag_and_whose_work_it_is(area: Path) -> None:
    from beeond_ctl.request import FLAGS

    text = stage(area, "out", "--help").stdout
    assert all(f"--{flag}" in text for flag in FLAGS)
    assert "In a job all its nodes copy" in " ".join(text.split())


# --- what is shown ----------------------------------------------------------------------------------------


def test_a_repeat_copies_anew_since_a_proved_transfer_keeps_no_journal(area: Path) -> None:
    (area / "file").write_text("right")
    assert stage(area, "in", "file", "copy").returncode == 0
    stamp = (area / "copy").stat()
    (area / "copy").write_text("wrong")  # of the same size; only reading could tell
    os.utime(area / "copy", ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    done = stage(area, "in", "file", "copy")
    assert done.stdout.startswith("copied 1, verified 1, skipped 0, failed 0; 5B in ")
    assert (area / "copy").read_text() == "right"
    assert list((area / "state/beeond-ctl/journals").iterdir()) == []


def test_events_are_json_and_add_up(area: Path) -> None:
    source = area / "source"
    source.mkdir()
    for number in range(300):
        (source / f"{number}").write_bytes(b"x" * number)
    told = events(stage(area, "in", "--json", "source", "target").stdout)
    assert [each["event"] for each in (told[0], told[-1])] == ["start", "end"]
    steps, end = [each for each in told if each["event"] == "progress"], told[-1]
    assert len(steps) == len(told) - 2 > 0
    assert steps[-1]["entries_done"] == steps[-1]["entries_total"] == end["copied"] == end["verified"] == 300
    assert steps[-1]["bytes_done"] == steps[-1]["bytes_total"] == end["bytes"] == sum(range(300))
    assert end["proved"] is True
    assert end["failed"] == end["skipped"] == 0


def test_quiet_says_nothing_of_a_success(area: Path) -> None:
    (area / "file").write_text("x")
    done = stage(area, "in", "--quiet", "file", "copy")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_without_a_terminal_nothing_drives_one(area: Path, many: Path) -> None:
    done = stage(area, "in", many, "target")
    assert done.returncode == 0
    assert "\x1b" not in done.stdout + done.stderr
    assert "\r" not in done.stdout + done.stderr
    assert done.stdout.startswith(f"copied {MANY}, verified {MANY}, skipped 0, failed 0; ")


def test_a_terminal_gets_a_live_display_that_is_cleared(area: Path, many: Path) -> None:
    master, slave = pty.openpty()
    words = [BEEOND_CTL, "stage", "in", "--workers", "1", many, "target"]
    how = {"stdin": slave, "stdout": slave, "stderr": slave, "cwd": area}
    child = subprocess.Popen(words, env=environment(area, TERM="xterm"), **how)  # type: ignore[call-overload]
    os.close(slave)
    seen = b""
    while True:
        try:
            part = os.read(master, 1 << 16)
        except OSError:  # the last writer has gone
            break
        if not part:
            break
        seen += part
    os.close(master)
    assert child.wait(60) == 0
    assert f"{MANY} entries".encode() in seen
    assert b"\x1b[?25l" in seen  # the cursor goes
    assert seen.rfind(b"\x1b[?25h") > seen.rfind(b"\x1b[?25l")  # and comes back
    assert f"copied {MANY}, ".encode() in seen[seen.rfind(b"\x1b[?25h") :]


def known(seconds: float, entries: int, size: int, *, total: int = 100, scanned: bool = True) -> Progress:
    return Progress(scanned, entries, total, size, 1000 << 20, 0, seconds, 0.0, {})


def test_a_plain_line_comes_every_ten_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    with progress.shown("plain") as tell:
        for second in range(1, 36):
            tell(known(float(second), second, second * 10 << 20))
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3
    assert lines[0] == "copying: 100MiB of 1000MiB, 1:30 min left, 10MiB/s, 10 of 100 entries"


def test_no_time_left_is_given_before_it_can_be_known() -> None:
    pace = progress.Pace()
    pace.add(known(1.0, 10, 10 << 20, scanned=False))
    pace.add(known(2.0, 20, 20 << 20, scanned=False))
    assert pace.left_s() is None


def test_the_time_left_is_that_of_the_bytes_that_are_left_though_most_entries_were_there() -> None:
    pace = progress.Pace()
    pace.add(known(1.0, 98, 0))
    pace.add(known(2.0, 98, 100 << 20))
    assert pace.left_s() == pytest.approx(9, rel=0.01)


def test_what_counts_no_longer_is_no_rate_below_zero() -> None:
    pace = progress.Pace()
    pace.add(known(1.0, 1, 100 << 20))
    pace.add(known(2.0, 1, 10 << 20))
    assert pace.rate() == 0
    assert pace.left_s() is None


# --- failures ---------------------------------------------------------------------------------------------


def test_what_cannot_be_read_is_one_line_and_all_else_is_copied(area: Path) -> None:
    source, target = area / "source", area / "free" / "target"
    source.mkdir()
    for directory in (target.parent, area / "state"):
        directory.mkdir()
        directory.chmod(0o777)
    for name in ("fine", "shut", "new\nline\x1b[2J"):
        (source / name).write_text("x")
        (source / name).chmod(0o644)
    for name in ("shut", "new\nline\x1b[2J"):
        (source / name).chmod(0)
    user: dict[str, Any] = {"user": NOBODY, "group": NOBODY, "extra_groups": []} if IS_ROOT else {}
    os.chmod(area / "state", 0o700)
    if IS_ROOT:
        os.chown(area / "state", NOBODY, NOBODY)
        for path in (source, *source.iterdir()):
            os.chown(path, NOBODY, NOBODY)
    done = stage(area, "out", source, target, **user)
    assert done.returncode == 1
    assert os.listdir(target) == ["fine"]
    problem, again = done.stderr.splitlines()
    assert problem.startswith("beeond-ctl: 2 entries (")
    assert problem.endswith("not copied: permission denied at the source")
    assert "'shut'" in problem
    assert "new\\nline\\x1b[2J" in problem
    assert done.stdout.startswith("copied 1, verified 1, skipped 0, failed 2; ")

    for name in ("shut", "new\nline\x1b[2J"):
        (source / name).chmod(0o644)
    command = shlex.split(again.split("again: ")[1])
    assert command[:3] == ["beeond-ctl", "stage", "out"]
    (end,) = events(stage(area, *command[2:], "--json", **user).stdout)[-1:]
    assert (end["proved"], end["copied"], end["skipped"]) == (True, 2, 1)
    assert journals(area) == []


def test_a_dry_run_says_where_nothing_can_be_written(area: Path) -> None:
    for name in ("source", "shut", "own"):
        (area / name).mkdir()
        (area / name).chmod(0o755)
    (area / "source/f").write_text("x")
    (area / "source/f").chmod(0o644)
    (area / "shut").chmod(0o555)
    user: dict[str, Any] = {"user": NOBODY, "group": NOBODY, "extra_groups": []} if IS_ROOT else {}
    if IS_ROOT:
        os.chown(area / "own", NOBODY, NOBODY)
    done = stage(area, "out", "--dry-run", "source", "shut/made", **user)
    assert (done.returncode, done.stdout) == (1, "would copy 1 (1B), skip 0, delete 0\n")
    (line,) = done.stderr.splitlines()
    assert line.startswith("beeond-ctl: nothing can be copied there: '/")
    assert line.endswith("/shut' is not yours to write")
    for mode in (0o555, 0):  # is opened up while it is copied to
        (area / "own").chmod(mode)
        done = stage(area, "out", "--dry-run", "source", "own", **user)
        assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.root
def test_a_dry_run_says_that_the_destination_is_read_only(area: Path) -> None:
    for name in ("source", "target"):
        (area / name).mkdir()
    (area / "source/f").write_text("x")
    mount = ("unshare", "--mount", "sh", "-c", 'mount --bind -o ro "$0" "$0" && exec "$@"', area / "target")
    done = stage(area, "out", "--dry-run", "source", "target", before=mount)
    assert (done.returncode, done.stdout) == (1, "would copy 1 (1B), skip 0, delete 0\n")
    assert done.stderr.endswith("/target' is read-only\n")


@pytest.mark.root
def test_a_full_destination_is_a_problem_of_its_own_and_can_be_resumed(area: Path) -> None:
    source, target = area / "source", area / "mount"
    source.mkdir()
    target.mkdir()
    for number in range(8):
        (source / f"{number}").write_bytes(os.urandom(1 << 20))
    mount = f'mount -t tmpfs -o size=4m none {target} && exec "$@"'
    before = ("unshare", "-m", "sh", "-c", mount, "sh")
    done = stage(area, "in", "--json", source, target, before=before)
    assert done.returncode == 1
    told = events(done.stdout)
    (problem,) = [each["text"] for each in told if each["event"] == "problem"]
    assert problem.endswith("not copied: no space left at the destination")
    assert told[-1]["failed"] + told[-1]["copied"] == 8
    assert told[-1]["failed"] > 0
    assert journals(area)
    assert stage(area, *shlex.split(told[-1]["resume"])[2:]).returncode == 0
    assert trees.files_in(bytes(source)) == trees.files_in(bytes(target))


def test_a_transfer_that_is_running_is_not_started_again(
    area: Path, many: Path, slow: dict[str, str]
) -> None:
    first = start(area, many, slow)
    half_way(area, first)
    first.send_signal(signal.SIGSTOP)  # for as long as the second may take to start
    second = stage(area, "in", many, area / "target")
    assert first.poll() is None
    first.send_signal(signal.SIGINT)
    first.send_signal(signal.SIGCONT)
    first.communicate(timeout=60)
    assert second.returncode == 1
    assert "already running" in second.stderr
    assert stage(area, "in", many, area / "target").returncode == 0
    assert same(many, area / "target")


@pytest.mark.root
@pytest.mark.parametrize("owned", ["state", "state/beeond-ctl/journals"])
def test_root_keeps_no_journal_where_another_could_lead_it_astray(area: Path, owned: str) -> None:
    (area / owned).mkdir(parents=True)
    os.chown(area / owned, NOBODY, NOBODY)
    (area / "file").write_text("x")
    done = stage(area, "in", "file", "copy")
    assert done.returncode == 1
    assert "XDG_STATE_HOME" in done.stderr
    assert not (area / "copy").exists()


# --- being stopped ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def slow() -> Iterator[dict[str, str]]:
    """What makes a transfer take long enough to be hit half way, however fast it is and however busy the machine."""
    with tempfile.TemporaryDirectory() as place:
        os.chmod(place, 0o755)
        yield {**slow_calls.environment(Path(place), 1000), "CALL_DELAY_BELOW": "/dev/shm"}


def start(area: Path, many: Path, slow: dict[str, str], *more: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [BEEOND_CTL, "stage", "in", "--workers", "1", *more, many, area / "target"],
        env=environment(area, **slow),
        preexec_fn=lambda: signal.signal(
            signal.SIGINT, signal.SIG_DFL
        ),  # ignored in what runs in the background
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def half_way(area: Path, child: subprocess.Popen[str]) -> None:
    """Wait until some is proved; a transfer of MANY files has then most of its time before it."""
    deadline = time.monotonic() + 60 * PATIENCE
    while not any(path.stat().st_size > 20_000 for path in journals(area)):
        assert child.poll() is None, child.communicate()
        assert time.monotonic() < deadline, "nothing was copied"
        time.sleep(0.002)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_transfer_names_the_command_that_resumes_it(
    area: Path, many: Path, slow: dict[str, str], number: int
) -> None:
    child = start(area, many, slow)
    half_way(area, child)
    while child.poll() is None:  # an impatient user cuts nothing off
        child.send_signal(number)
        time.sleep(0.005)
    _, said = child.communicate(timeout=60)
    assert child.returncode == 128 + number
    (line,) = said.splitlines()
    command = shlex.split(line.split("To go on: ")[1])
    assert command[:2] == ["beeond-ctl", "stage"]
    (end,) = events(stage(area, *command[2:], "--json").stdout)[-1:]
    assert end["proved"] is True
    assert end["skipped"] > 0
    assert end["copied"] + end["skipped"] == MANY
    assert same(many, area / "target")
    assert journals(area) == []


def test_a_stop_is_an_event_too(area: Path, many: Path, slow: dict[str, str]) -> None:
    child = start(area, many, slow, "--json")
    half_way(area, child)
    child.send_signal(signal.SIGINT)
    out, err = child.communicate(timeout=60)
    assert (child.returncode, err) == (130, "")
    end = events(out)[-1]
    assert (end["event"], end["proved"], end["cancelled"]) == ("end", False, "interrupted")
    assert shlex.split(end["resume"])[-1] == str(area / "target")


def test_a_killed_transfer_is_resumed_by_the_same_command(
    area: Path, many: Path, slow: dict[str, str]
) -> None:
    child = start(area, many, slow)
    half_way(area, child)
    child.kill()
    child.communicate(timeout=60)
    (end,) = events(stage(area, "in", "--json", many, area / "target").stdout)[-1:]
    assert end["proved"] is True
    assert end["skipped"] > 0
    assert same(many, area / "target")
    assert trees.leftovers(bytes(area / "target")) == []


@pytest.mark.parametrize(("said", "code", "why"), [(b"\x03", 130, b"interrupted"), (b"n\n", 1, b"aborted")])
def test_ctrl_c_at_the_question_is_told_from_a_no(area: Path, said: bytes, code: int, why: bytes) -> None:
    for name in ("source", "target"):
        (area / name).mkdir()
    (area / "target/extra").write_text("x")
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(area)
        words = ["beeond-ctl", "stage", "out", "--delete", "source", "target"]
        os.execve(BEEOND_CTL, words, environment(area))
    seen = b""
    with suppress(OSError):  # the last writer has gone
        while True:
            part = os.read(terminal, 1000) if select.select([terminal], [], [], 2.0)[0] else b""
            seen += part
            # Again after a while: a signal between readline's prompt and its wait for a key is seen with the next one.
            asked, _, heard = seen.partition(b"[y/N]: ")
            if seen != asked and why not in heard and (not part or not heard):
                os.write(terminal, said)
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == code, seen
    assert seen.endswith(b"beeond-ctl: " + why + b"\r\n")
    assert os.listdir(area / "target") == ["extra"]


# --- where nothing can be said ----------------------------------------------------------------------------


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&-", "<&- >&- 2>&-"])
def test_what_is_closed_is_as_if_nobody_listened(area: Path, closed: str) -> None:
    trees.build(bytes(area / "source"), 3)
    done = stage(area, "in", "source", "target", before=("sh", "-c", f'exec "$@" {closed}', "sh"))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("copied ") == (">&-" not in closed or closed == "2>&-")
    assert same(area / "source", area / "target")


@pytest.mark.parametrize(
    "words", [["stage", "in", "file", "copy"], ["stage", "in", "--json", "file", "copy"], ["--help"]]
)
def test_a_full_output_is_not_taken_for_a_full_destination_nor_for_a_fault(
    area: Path, words: list[str]
) -> None:
    (area / "file").write_text("x")
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [BEEOND_CTL, *words], cwd=area, env=environment(area), stdout=full, stderr=subprocess.PIPE, text=True,
            timeout=60,
        )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr == (
        "beeond-ctl: standard output cannot be written: No space left on device; send it elsewhere\n"
    )
    assert (area / "copy").exists() == (words[:3] == ["stage", "in", "file"])


def test_a_working_directory_that_was_removed_is_a_mistake_for_relative_paths_alone(area: Path) -> None:
    (area / "file").write_text("x")
    (area / "gone").mkdir()
    gone = ("sh", "-c", 'rmdir ../gone && exec "$@"', "sh")
    done = stage(area, "in", area / "file", "copy", cwd=area / "gone", before=gone)
    assert done.returncode == 1
    assert done.stderr.startswith("beeond-ctl: the working directory is not there any more; ")
    (area / "gone").mkdir()
    assert stage(area, "in", area / "file", area / "copy", cwd=area / "gone", before=gone).returncode == 0


@pytest.mark.parametrize(
    "name", [b"two  words", b"new\nline", b"caf\xe9", "näme'".encode(), b"$(id)\\x41", b"-rf"]
)
def test_the_command_that_resumes_is_one_line_whatever_the_name(area: Path, name: bytes) -> None:
    done = stage(area, "out", bytes(area / "gone/") + b"/" + name, area / "target")
    assert done.returncode == 1
    command = done.stderr.splitlines()[-1].split("again: ")[1]
    words = subprocess.run(
        ["bash", "-c", f"printf '%s\\0' {command}"], check=True, capture_output=True
    ).stdout
    assert words.split(b"\0")[-3] == bytes(area / "gone") + b"/" + name
    assert len(done.stderr.splitlines()) == 2


@pytest.mark.parametrize("yes", [[], ["--yes"]])
def test_the_command_that_resumes_agrees_to_deletions_only_where_that_was_typed(
    area: Path, yes: list[str]
) -> None:
    done = stage(area, "out", "--delete", *yes, "gone", "target")
    assert done.returncode == 1
    assert ("--yes" in shlex.split(done.stderr.splitlines()[-1])) == bool(yes)


def test_a_journal_that_nobody_wants_any_more_is_removed(area: Path) -> None:
    old = area / "state/beeond-ctl/journals/0123456789abcdef"
    old.mkdir(parents=True, mode=0o700)
    (old / "x.journal").write_text("x")
    (area / "file").write_text("x")
    assert stage(area, "in", "file", "copy").returncode == 0
    assert old.exists()
    for path in (old / "x.journal", old):
        os.utime(path, (1, 1))
    assert (old / "lock").exists() is False
    assert stage(area, "in", "file", "copy").returncode == 0
    assert not old.exists()
