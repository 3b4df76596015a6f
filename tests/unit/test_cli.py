"""`beeond-ctl` as people type it: help, mistakes, interrupts, and what `status` and `check` say."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from beeond_ctl import cli, hints, status
from beeond_ctl.plan import FIRST_OWN_ID
from tests.unit.test_status import job, site

if TYPE_CHECKING:
    from pathlib import Path

    from beeond_ctl.config import SiteConfig


@pytest.fixture
def config(tmp_path: Path) -> SiteConfig:
    """A site of its own, in `tmp_path`/config.toml."""
    made = site(tmp_path)
    text = f'[paths]\nrun = "{made.paths.run}"\nlog = "{made.paths.log}"\n[storage]\npaths = ["{tmp_path}/nvme"]\n'
    (tmp_path / "config.toml").write_text(text)
    return made


@pytest.fixture(autouse=True)
def outside_of_any_job(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("BEEOND_CTL_CONFIG", str(tmp_path / "config.toml"))
    for name in ("BEEOND_JOB_ID", "SLURM_JOB_ID"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def typed(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Any:
    """Runs the command line: exit code, stdout, stderr."""

    def run(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["beeond-ctl", *words])
        monkeypatch.setattr(sys, "stdout", sys.stdout)  # which the command puts another in the place of
        code = cli._run()
        sys.stdout.flush()
        return (code, *capfd.readouterr())

    return run


def as_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)


@pytest.mark.parametrize("words", [[], ["stage"], ["bb"], ["secret"]])
def test_a_group_alone_shows_its_help_as_it_is(typed: Any, words: list[str]) -> None:
    code, out, err = typed(*words)
    _, wanted, _ = typed(*words, "--help")
    assert (code, out, err) == (2, "", wanted)
    assert len(err.splitlines()) > 5


@pytest.mark.parametrize(
    ("words", "command"),
    [
        (["--nonsense"], "beeond-ctl"),
        (["plan", "-w"], "beeond-ctl plan"),
        (["plan", "--nonsense"], "beeond-ctl plan"),
        (["stage", "in", "--workers"], "beeond-ctl stage in"),
        (["stage", "nonsense"], "beeond-ctl stage"),
        (["secret", "use"], "beeond-ctl secret use"),
    ],
)
def test_a_mistake_names_the_help_of_the_command_it_is_in(typed: Any, words: list[str], command: str) -> None:
    code, out, err = typed(*words)
    assert (code, out, len(err.splitlines())) == (2, "", 1)
    assert err.endswith(f"see `{command} --help`\n")


def test_plan_takes_a_bare_beeond_as_sbatch_does(typed: Any, config: SiteConfig) -> None:
    for words in (["--beeond"], ["--beeond", "--beeond-stage-in=/a:b"], ["--beeond", "capacity=1GiB"], []):
        code, out, _ = typed("plan", "-w", "n[1-2]", "--json", *words)
        assert (code, json.loads(out)["nodes"]) == (0, "n[1-2]")


@pytest.mark.parametrize("name", ["show", "add", "export", "learn", "use", "forget"])
def test_help_of_secret_is_for_everybody_and_the_secret_for_root(
    typed: Any, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    as_user(monkeypatch)
    code, out, _ = typed("secret", name, "--help")
    assert (code, out.startswith(f"Usage: beeond-ctl secret {name}")) == (0, True)
    code, out, err = typed("secret", name, *(["x"] if name == "use" else []))
    assert (code, out, err) == (2, "", "beeond-ctl: secret has to be run as root; ask your admin\n")


_INTERRUPTED = """
import sys
class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupt())
from beeond_ctl.cli import main
sys.argv = ["beeond-ctl", "plan", "-w", "n1"]
main()
"""


@pytest.mark.parametrize("module", ["beeond_ctl.errors", "beeond_ctl.cli.commands", "beeond_ctl.config"])
def test_an_interrupt_while_modules_are_loaded_is_one_line(module: str) -> None:
    code = _INTERRUPTED.format(module=module)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr.strip()) == (130, "", "beeond-ctl: interrupted")


# -- check -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("words", [["check"], ["check", "--only-configuration"]])
def test_check_shows_every_mistake_in_the_configuration(typed: Any, tmp_path: Path, words: list[str]) -> None:
    path = tmp_path / "config.toml"
    path.write_text('[storage]\npaths = ["nvme"]\n[mount]\nrot = "/x"\n')
    code, out, err = typed(*words)
    assert (code, err) == (1, "")
    lines = out.splitlines()
    assert len(lines) == 2
    assert all(line.startswith(f"fail  configuration         {path}: ") for line in lines)
    assert "storage.paths" in out
    assert "mount.rot: no such key; did you mean root?" in out
    assert "beeond-ctl check" not in out
    code, out, _ = typed(*words, "--json")
    assert (code, [found["verdict"] for found in json.loads(out)]) == (1, ["fail", "fail"])


def test_a_configuration_that_is_right_is_one_line(typed: Any, config: SiteConfig, tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    assert typed("check", "--only-configuration") == (0, f"ok    configuration         {path}\n", "")
    _, out, _ = typed("check", "--only-configuration", "--json")
    assert json.loads(out) == [{"subject": "configuration", "verdict": "ok", "text": str(path)}]


def test_check_says_how_the_directory_for_reports_is_made(
    typed: Any, config: SiteConfig, tmp_path: Path
) -> None:
    with (tmp_path / "config.toml").open("a") as file:
        file.write(f'[report]\ndirectory = "{tmp_path}/reports"\n')
    _, out, _ = typed("check", "--json")
    (found,) = [found for found in json.loads(out) if found["subject"] == "report"]
    assert found["verdict"] == "warn"
    assert f"as root: install -d -m 755 {tmp_path}/reports" in found["text"]


@pytest.mark.parametrize(("uid", "words"), [(0, "beeond-ctl check"), (1000, "ask your admin")])
def test_a_host_without_configuration_tells_users_whom_to_ask(
    typed: Any, monkeypatch: pytest.MonkeyPatch, uid: int, words: str
) -> None:
    monkeypatch.setattr("os.geteuid", lambda: uid)
    code, _, err = typed("status")
    assert (code, len(err.splitlines()), words in err) == (2, 1, True)


# -- status and report -------------------------------------------------------------------------------------


def test_status_where_the_job_is_not_names_the_command_that_asks_its_nodes(
    typed: Any, monkeypatch: pytest.MonkeyPatch, config: SiteConfig
) -> None:
    as_user(monkeypatch)
    assert typed("status") == (0, "no instance on this node\n", "")
    monkeypatch.setenv("SLURM_JOB_ID", "42")  # as in the shell of salloc
    code, out, _ = typed("status")
    assert (code, out.splitlines()) == (
        0,
        ["no instance on this node; to ask all nodes of job 42: beeond-ctl status --all-nodes 42"],
    )


def test_status_of_all_nodes_takes_the_job_that_it_is_typed_in(
    typed: Any, monkeypatch: pytest.MonkeyPatch, config: SiteConfig
) -> None:
    asked = []
    answer: tuple[tuple[str, ...], list[Any], list[str]] = (("n1",), [{"node": "n1", "phase": "ready"}], [])

    def of_job(_: object, number: int) -> object:
        asked.append(number)
        return answer

    monkeypatch.setattr("beeond_ctl.lifecycle.gather.status", of_job)
    assert typed("status", "-a")[0] == 2
    monkeypatch.setenv("SLURM_JOB_ID", "42")
    assert typed("status", "-a")[0] == 0
    monkeypatch.setenv("BEEOND_JOB_ID", "41")  # joined to another component's
    assert typed("status", "-a")[0] == 0
    assert typed("status", "-a", "7")[0] == 0
    assert asked == [42, 41, 7]


@pytest.mark.root
def test_status_shows_how_kept_data_is_recovered(typed: Any, config: SiteConfig) -> None:
    job(config, 41, phase="retained", reason="stage-out to /global: no space")
    job(config, 42)
    _, out, _ = typed("status")
    kept, other = out.split("job 42")
    assert "  recover    beeond-ctl recover 41 --nodes 'n[1-2]'\n" in kept
    assert "recover" not in other


def test_status_shows_what_a_stage_in_left_out(
    typed: Any, monkeypatch: pytest.MonkeyPatch, config: SiteConfig
) -> None:
    as_user(monkeypatch)
    went = {"direction": "in", "source": "/s", "destination": "s", "proved": True, "entries": 2, "bytes": 5}
    transfer = {**went, "seconds": 1.0, "remarks": ["1 entry ('p') not copied"]}
    hint = {"job": 41, "node": "n1", "phase": "ready", "mount": None, "transfers": [transfer]}
    monkeypatch.setattr(hints, "read_all", lambda _: [hint])
    code, out, _ = typed("status")
    assert code == 0
    said = ["  stage-in   /s -> s: 2 entries, 5B in 1.0 s, proved", "  note       1 entry ('p') not copied"]
    assert out.splitlines()[-2:] == said


def test_status_tells_a_user_how_kept_data_is_recovered(
    monkeypatch: pytest.MonkeyPatch, config: SiteConfig
) -> None:
    hint = {"job": 41, "phase": "retained", "mount": None}
    monkeypatch.setattr(hints, "read_all", lambda _: [hint])
    (found,) = status.of_user(config, None)
    assert found["recover"].startswith("sudo beeond-ctl recover --mine 41")


@pytest.mark.root
def test_status_calls_what_up_has_made_by_its_id(typed: Any, config: SiteConfig) -> None:
    job(config, FIRST_OWN_ID + 7)
    _, out, _ = typed("status")
    assert out.startswith(f"ID {FIRST_OWN_ID + 7}  ready")


def test_status_has_capacity_in_bytes_for_scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    found = status._mount("/proc", "ready", [])
    assert set(found["capacity_bytes"]) == {"free", "size"}
    monkeypatch.setattr(status, "_room", lambda _: {"free": 1 << 30, "size": 1 << 40})
    assert status._told({"free": 1 << 30, "size": 1 << 40}) == "1GiB free of 1TiB"


@pytest.mark.root
def test_a_report_of_a_job_that_nobody_knows_is_no_bad_usage(
    typed: Any, config: SiteConfig, tmp_path: Path
) -> None:
    (tmp_path / "reports").mkdir(mode=0o755)
    with (tmp_path / "config.toml").open("a") as file:
        file.write(f'[report]\ndirectory = "{tmp_path}/reports"\n[slurm]\npath = ["/nowhere"]\n')
    code, _, err = typed("report", "999")
    assert (code, len(err.splitlines())) == (1, 1)
    assert "nothing is known of job 999" in err
    (tmp_path / "reports").rmdir()
    code, _, err = typed("report", "999")
    assert code == 1
    assert f"{tmp_path}/reports is not there: not mounted on this host, or not made yet" in err
    assert "Errno" not in err
