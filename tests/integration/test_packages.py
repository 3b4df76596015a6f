"""The Debian packages: installed by dpkg on machines that have nothing of ours, up to a job, and removed again."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.integration.site_config import CONFIG
from tests.testbed import Cluster, slurm
from tests.testbed.host import CommandError

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(shutil.which("dh") is None, reason="needs debhelper; run `make deps`"),
    pytest.mark.skipif(slurm.HOME != "", reason="for the distribution's Slurm, and SLURM_HOME is another"),
]

ROOT = Path(__file__).resolve().parents[2]
SOURCES = (
    "beeond_ctl",
    "spank",
    "slurm",
    "deploy",
    "packaging",
    "tools",
    "docs",
    "pyproject.toml",
    "requirements.lock",
)
JOB = """
#!/bin/sh
#SBATCH --beeond-stage-out=out:/global/alice/from-packages
mkdir "$BEEOND/out"
srun sh -c 'stat -f -c %T "$BEEOND" > "$BEEOND/out/$SLURMD_NODENAME"'
"""


@pytest.fixture(scope="module")
def packages() -> None:
    """Packages of the tree as it is now."""
    made = [path.stat().st_mtime for path in (ROOT / "dist").glob("*.deb")]
    files = [file for source in SOURCES for file in ((ROOT / source), *(ROOT / source).rglob("*.*"))]
    newest = max(file.stat().st_mtime for file in files if "__pycache__" not in file.parts and file.is_file())
    if not made or min(made) < newest:
        done = subprocess.run(["packaging/build", "deb"], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-3000:]


@pytest.fixture(scope="module")
def bare(packages: None) -> Iterator[Cluster]:
    """A cluster of two nodes without anything of the product."""
    with Cluster.up(f"tp{os.getpid() % 10000}", nodes=2) as made:
        yield made


def ours(cluster: Cluster, machine: str) -> set[str]:
    """Paths that the packages could leave on a machine."""
    # Below it there is this machine, too: where the project is, and what other tests make and remove meanwhile.
    places = ("/var/lib/dpkg", "/work", "'/var/lib/beeond-test-*'")
    others = " -o ".join(f"-path {place} -prune" for place in places)
    find = f"find / -xdev -ignore_readdir_race {others} -o -name '*beeond*' -print"
    return set(cluster.run(machine, ["sh", "-c", find]).stdout.split())


def test_packages_are_all_that_a_job_needs_and_go_without_a_trace(bare: Cluster) -> None:
    machines = ("login", "n1", "n2")
    before = {name: ours(bare, name) for name in machines}
    assert not any("ctl" in path for path in before["n1"]), "the machine has something of the product"
    with pytest.raises(CommandError, match="unrecognized option"):
        bare.submit("alice", JOB.lstrip(), "-N2")

    bare.install_packages(CONFIG.format(kind="directory", more=""))
    checked = bare.run("n1", ["beeond-ctl", "check"], check=False)
    assert checked.returncode == 0, checked.stdout
    bare.run_job("alice", JOB.lstrip(), "-N2")
    made = {name: bare.read("login", f"/global/alice/from-packages/{name}").strip() for name in ("n1", "n2")}
    assert made == {"n1": "fuseblk", "n2": "fuseblk"}
    # users' Python settings do not reach it, and it is the package's own
    code = "import beeond_ctl.staging._native as native; print(native.__file__)"
    python = ["/usr/lib/beeond-ctl/bin/python3", "-I", "-c", code]
    assert bare.run("n1", python).stdout.startswith("/usr/lib/beeond-ctl/lib/")
    hostile = {"PYTHONPATH": "/nowhere", "PYTHONHOME": "/nowhere"}
    assert "0.1" in bare.run("login", ["beeond-ctl", "--version"], user="alice", env=hostile).stdout
    typed = ". /usr/share/bash-completion/completions/beeond-ctl; COMP_WORDS=(beeond-ctl swe); COMP_CWORD=1;"
    shown = bare.run(
        "login", ["bash", "-c", typed + "_beeond_ctl_completion beeond-ctl; echo ${COMPREPLY[@]}"]
    )
    assert shown.stdout.split() == ["sweep"]
    # what dpkg put there is as it was
    assert bare.run("n1", ["sh", "-c", "dpkg --verify beeond-ctl beeond-ctl-hooks"]).stdout == ""

    # without the plugin its line may not stay, or nobody could submit anything
    names = "$(dpkg-query -W -f '${Package}\\n' 'beeond-ctl-spank-*')"
    for name in machines:
        bare.run(name, ["sh", "-c", f"dpkg --no-triggers -r {names}"])
    bare.run_job("alice", "#!/bin/sh\ntrue\n", "-N2")
    assert bare.read("n1", "/etc/slurm/plugstack.conf.d/beeond.conf") == ""
    for name in machines:
        bare.run(
            name,
            ["sh", "-c", f"dpkg --no-triggers -P {names} $(dpkg-query -W -f '${{Package}} ' 'beeond-ctl*')"],
        )
    left = {name: ours(bare, name) - before[name] for name in machines}
    site = {"/etc/beeond-ctl", "/var/log/beeond-ctl"}  # the site's own: configuration, secret, event logs
    assert {name: {path for path in left[name] if path not in site} for name in machines} == {
        "login": set(),
        "n1": {"/mnt/beeond"},
        "n2": {"/mnt/beeond"},
    }
    assert bare.run("n1", ["sh", "-c", "cat /etc/slurm/prolog.d/*"]).stdout == "#!/bin/sh\nexit 0\n"
