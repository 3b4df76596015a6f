"""The plugin as it is built: what it exports, for which Slurm, what valgrind says; and the drop-ins."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

PROJECT = Path(__file__).resolve().parents[2]
HEADERS = Path("/usr/include/slurm")

pytestmark = pytest.mark.skipif(not HEADERS.exists(), reason="needs Slurm's headers (libslurm-dev)")


def run(*argv: str | Path, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(word) for word in argv], capture_output=True, text=True, env=env, check=False)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the plugin's source, so that the work tree stays as it is."""
    top = tmp_path_factory.mktemp("spank")
    built = shutil.ignore_patterns("*.o", "*.so")
    return Path(shutil.copytree(PROJECT / "spank", top / "spank", ignore=built))


@pytest.fixture(scope="module")
def plugin(source: Path) -> Path:
    built = run("make", "-C", source, "SLURM_HOME=")
    assert built.returncode == 0, built.stderr
    return source / "beeond.so"


def exported(plugin: Path) -> set[str]:
    listed = run("nm", "-D", "--defined-only", plugin).stdout
    return {line.split()[2] for line in listed.splitlines()}


def test_only_what_slurm_looks_for_is_exported(plugin: Path) -> None:
    assert exported(plugin) == {
        "plugin_name", "plugin_type", "plugin_version", "spank_plugin_version",
        "slurm_spank_init", "slurm_spank_init_post_opt", "slurm_spank_task_init", "slurm_spank_exit",
    }  # fmt: skip


def test_no_prolog_or_epilog_of_spank_is_run_for_every_job(plugin: Path) -> None:
    # slurmd starts a slurmstepd for each of the two, on every node, for jobs that asked for nothing as well.
    assert not exported(plugin) & {"slurm_spank_job_prolog", "slurm_spank_job_epilog"}


def test_the_plugin_says_for_which_slurm_it_was_built(plugin: Path) -> None:
    header = (HEADERS / "slurm_version.h").read_text()
    found = re.search(r"#define SLURM_VERSION_NUMBER (0x[0-9a-f]+)", header)
    assert found
    address = next(
        int(line.split()[0], 16)
        for line in run("nm", "-D", plugin).stdout.splitlines()
        if line.endswith(" plugin_version")
    )
    span = [f"--start-address={address}", f"--stop-address={address + 4}"]
    dump = run("objdump", "-s", "-j", ".rodata", *span, plugin)
    last = dump.stdout.splitlines()[-1].split()[1]
    assert int.from_bytes(bytes.fromhex(last), "little") == int(found[1], 16)


def test_the_plugin_is_hardened(plugin: Path) -> None:
    headers = run("readelf", "-lWd", plugin).stdout
    assert "GNU_RELRO" in headers
    assert "BIND_NOW" in headers
    assert re.search(r"GNU_STACK +\S+ \S+ \S+ \S+ \S+ RW ", headers)


def test_the_plugin_is_installed_where_it_is_told(source: Path, plugin: Path, tmp_path: Path) -> None:
    done = run("make", "-C", source, "install", f"DESTDIR={tmp_path}", "plugindir=/opt/slurm/lib/slurm")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "opt/slurm/lib/slurm/beeond.so").read_bytes() == plugin.read_bytes()


@pytest.mark.skipif(not shutil.which("clang"), reason="needs clang")
def test_clang_finds_nothing(source: Path) -> None:
    done = run("make", "-C", source, "lint")
    assert done.returncode == 0, done.stderr
    assert "warning:" not in done.stdout + done.stderr


@pytest.mark.skipif(not shutil.which("valgrind"), reason="needs valgrind")
def test_the_plugin_keeps_its_promises_without_leaks_or_errors_even_without_memory(source: Path) -> None:
    done = run("make", "-C", source, "check")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "checks passed" in done.stdout


@pytest.mark.parametrize("hook", ["prolog", "epilog"])
def test_a_job_that_did_not_ask_starts_no_program(hook: str, tmp_path: Path) -> None:
    # No PATH, as a slurmd started by hand has it, and a job without a state directory.
    trace = tmp_path / "trace"
    script = PROJECT / f"slurm/{hook}.d/50-beeond"
    done = run("/usr/bin/env", "-i", "SLURM_JOB_ID=4294967295", script)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    if shutil.which("strace"):
        watch = ["strace", "-f", "-o", str(trace), "-e", "trace=process"]
        run(*watch, "/usr/bin/env", "-i", "SLURM_JOB_ID=4294967295", script)
        assert len(re.findall(r"execve\(.*= 0", trace.read_text())) == 2  # env, and the drop-in's own shell
        assert not re.search(r"\b(v?fork|clone3?)\(", trace.read_text())


@pytest.mark.skipif(not shutil.which("shellcheck"), reason="needs shellcheck")
@pytest.mark.parametrize("hook", ["prolog", "epilog"])
def test_shellcheck_finds_nothing(hook: str) -> None:
    done = run("shellcheck", PROJECT / f"slurm/{hook}.d/50-beeond")
    assert done.returncode == 0, done.stdout
