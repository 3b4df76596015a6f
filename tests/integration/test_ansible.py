"""The Ansible roles: a real `ansible-playbook` over real ssh, against machines that have nothing of the product.

The tests stand in the order in which a site would do these things, and share one cluster. In the middle a job runs.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.testbed import slurm
from tests.waiting import wait_for

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.testbed import Cluster
    from tests.testbed.snapshot import Snapshot

PROJECT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(not (BIN / "ansible-playbook").exists(), reason="no ansible-core in this environment"),
    pytest.mark.skipif(slurm.HOME != "", reason="for the distribution's Slurm, and SLURM_HOME is another"),
]

CONFIG = {
    "storage": {"kind": "directory", "paths": ["/nvme/beeond"]},
    "deadlines": {"meet": 12, "start": 15, "stop": 10, "silence": 4},
}
INVENTORY = {
    "all": {
        "children": {
            "beeond_ctl_controller": {"hosts": {"ctl": {}}},
            "beeond_ctl_login": {"hosts": {"login": {}}},
            "beeond_ctl_compute": {"hosts": {"n1": {}, "n2": {}}},
        },
        "vars": {
            "beeond_ctl_wheels": "/root/wheels",
            "beeond_ctl_compute_packages": {"Debian": []},  # the cluster's machines share this one's software
            "beeond_ctl_rotate_pause_s": 0,
            "beeond_ctl_drain_poll_s": 1,
            "beeond_ctl_config": CONFIG,
            "beeond_ctl_controller_pool": "8GiB",
        },
    }
}
HOSTS = ("ctl", "login", "n1", "n2")
HOLD = """#!/bin/sh
mkdir "$BEEOND/out"; echo result > "$BEEOND/out/file"
touch /global/alice/begun
while [ -e /global/alice/begun ]; do sleep 0.1; done
"""


@dataclass(frozen=True, slots=True)
class Play:
    """How a run of ansible-playbook ended."""

    code: int
    output: str

    @property
    def changed(self) -> dict[str, int]:
        """Changes by host, as the recap has them."""
        return {
            host: int(number) for host, number in re.findall(r"^(\S+) +: .*changed=(\d+)", self.output, re.M)
        }


def play(cluster: Cluster, book: str, *options: str, code: int = 0) -> Play:
    """Run a playbook on the controller, as an admin would."""
    environment = {
        "ANSIBLE_CONFIG": f"{PROJECT}/ansible/ansible.cfg",
        "PATH": f"{BIN}:/usr/bin:/bin:/usr/sbin:/sbin",
    }
    done = cluster.run(
        "ctl", ["ansible-playbook", "-i", "/root/hosts.json", book, *options],
        cwd=f"{PROJECT}/ansible", env=environment, timeout_s=180, check=False,
    )  # fmt: skip
    assert done.returncode == code, done.stdout + done.stderr
    return Play(done.returncode, done.stdout + done.stderr)


# --- wheels -----------------------------------------------------------------------------------------------


def wheels(directory: Path) -> Path:
    """The wheels of an installation: ours is made of the work tree, the others are kept from run to run."""
    lock = PROJECT / "requirements.lock"
    kept = PROJECT / "build" / f"test-wheels-{hashlib.sha1(lock.read_bytes()).hexdigest()[:8]}"
    pip = [str(BIN / "python"), "-m", "pip", "--quiet", "--disable-pip-version-check", "wheel"]
    source = directory / "source"
    source.mkdir()
    for name in ("pyproject.toml", "setup.py", "README.md"):
        if (PROJECT / name).exists():
            shutil.copy(PROJECT / name, source)
    ignored = shutil.ignore_patterns("__pycache__", "*.so")
    shutil.copytree(PROJECT / "beeond_ctl", source / "beeond_ctl", ignore=ignored)
    made = directory / "made"
    subprocess.run([*pip, "--no-deps", "--no-build-isolation", "-w", made, source], check=True)
    if not kept.exists():
        new = kept.with_name(f"{kept.name}.{os.getpid()}")
        subprocess.run([*pip, "-c", lock, "-w", new, "pip", next(made.iterdir())], check=True)
        for own in new.glob("beeond_ctl-*"):
            own.unlink()
        new.rename(kept)
    shutil.copytree(kept, made, dirs_exist_ok=True)
    return made


def next_version(wheel: Path) -> str:
    """Make the wheel one of the version that follows, in its place."""
    version = wheel.name.split("-")[1]
    following = f"{version}.1"
    renamed = wheel.with_name(wheel.name.replace(version, following, 1))
    with zipfile.ZipFile(wheel) as old, zipfile.ZipFile(renamed, "w") as new:
        for name in old.namelist():
            data = old.read(name)
            if ".dist-info/" in name:
                data = data.replace(f"Version: {version}\n".encode(), f"Version: {following}\n".encode())
                data = data.replace(f"-{version}.dist-info".encode(), f"-{following}.dist-info".encode())
            new.writestr(name.replace(f"-{version}.dist-info", f"-{following}.dist-info"), data)
    wheel.unlink()
    return following


# --- the cluster ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Site:
    """The cluster, what its nodes were like before, and what the first run said."""

    cluster: Cluster
    before: list[Snapshot]
    first: Play


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    from tests.testbed import Cluster

    with Cluster.up(f"a{os.getpid() % 10000}", nodes=2) as cluster:
        root = cluster.path("ctl", "/root")
        shutil.copytree(wheels(tmp_path_factory.mktemp("wheels")), root / "wheels")
        (root / "hosts.json").write_text(json.dumps(INVENTORY))
        before = cluster.snapshots(["n1", "n2", "login"])
        yield Site(cluster, before, play(cluster, "site.yml"))


@pytest.fixture(scope="module")
def job(site: Site) -> int:
    """A job of both nodes that has written its result and waits."""
    cluster = site.cluster
    cluster.run("login", ["rm", "-rf", "/global/alice/begun", "/global/alice/result"])
    made = cluster.submit("alice", HOLD, "-N2", "-n2", "--beeond-stage-out=out:/global/alice/result")
    cluster.wait_job(made, "RUNNING")
    begun = Path("/global/alice/begun")
    wait_for(lambda: cluster.run("login", ["test", "-e", str(begun)], check=False).returncode == 0, 30)
    return made


def short_job(cluster: Cluster) -> str:
    script = "#!/bin/sh\nsrun sh -c 'echo $(df --output=target \"$BEEOND\" | tail -1)'\n"
    return cluster.run_job("alice", script, "-N2", "-n2", "--beeond")


# --- the tests --------------------------------------------------------------------------------------------


def test_machines_that_had_nothing_run_a_job_after_one_run(site: Site) -> None:
    assert all(site.first.changed[host] > 0 for host in HOSTS)
    assert len(set(short_job(site.cluster).split())) == 1
    for host in ("n1", "n2"):
        assert site.cluster.run(host, ["beeond-ctl", "check"]).returncode == 0
    mode = site.cluster.run("n1", ["stat", "-c", "%a %U", "/etc/beeond-ctl/secret"]).stdout.split()
    assert mode == ["600", "root"]
    limits = site.cluster.run("ctl", ["beeond-ctl", "bb", "limits"]).stdout
    assert site.cluster.read("ctl", "/etc/beeond-ctl/limits") == limits
    assert site.cluster.read("ctl", "/etc/beeond-ctl/pool") == "8GiB\n"
    for host in ("ctl", "login"):  # users are there
        assert not site.cluster.path(host, "/etc/beeond-ctl/secret").exists()
    assert site.cluster.run("n1", ["/usr/libexec/beeond-ctl/health-check"]).returncode == 0


def test_a_second_run_changes_nothing_while_a_job_runs(site: Site, job: int) -> None:
    assert play(site.cluster, "site.yml").changed == dict.fromkeys(HOSTS, 0)
    assert site.cluster.job(job)["JobState"] == "RUNNING"


def changes(cluster: Cluster, before: list[Snapshot]) -> list[str]:
    """Files that are different, but for what the file system of the job that runs does by itself."""
    found = [line for then in before for line in cluster.snapshot(then.node).diff(then)]
    return [line for line in found if " files: " in line and "/nvme/beeond/job-" not in line]


def test_check_mode_shows_what_would_change_and_changes_nothing(site: Site, job: int) -> None:
    before = site.cluster.snapshots(["n1", "n2", "login"])
    config = site.cluster.read("n1", "/etc/beeond-ctl/config.toml")
    changed = json.dumps({"beeond_ctl_config": CONFIG | {"sweep": {"kept_days": 7}}})
    told = play(site.cluster, "site.yml", "--check", "--diff", "--limit", "n1", "-e", changed)
    assert told.changed == {"n1": 1}
    assert re.search(r"^\+kept_days = 7$", told.output, re.MULTILINE)
    assert site.cluster.read("n1", "/etc/beeond-ctl/config.toml") == config
    assert changes(site.cluster, before) == []


def test_a_configuration_that_is_not_valid_replaces_nothing(site: Site) -> None:
    config = site.cluster.read("login", "/etc/beeond-ctl/config.toml")
    broken = json.dumps({"beeond_ctl_config": {"deadlines": {"meet": -1}}})
    refused = play(site.cluster, "site.yml", "--limit", "login", "-e", broken, code=2)
    assert "deadlines.meet" in refused.output
    assert site.cluster.read("login", "/etc/beeond-ctl/config.toml") == config


def secrets_of(cluster: Cluster, host: str) -> set[str]:
    return set(re.findall(r"\b[0-9a-f]{64,}\b", cluster.read(host, "/etc/beeond-ctl/secret")))


def test_the_secret_is_rotated_while_a_job_runs_and_is_shown_nowhere(site: Site, job: int) -> None:
    cluster = site.cluster
    (old,) = secrets_of(cluster, "n1")
    told = play(cluster, "rotate-secret.yml", "-vvv", "--diff")
    both = secrets_of(cluster, "n1")
    assert both == secrets_of(cluster, "n2")
    assert old in both  # the running job still needs it
    assert len(both) == 2
    for secret in both:
        assert secret not in told.output + site.first.output
        for host in HOSTS:
            kept = cluster.run(
                host, ["grep", "-rlF", secret, "/root", "/var/log", "/run", "/tmp"], check=False
            )
            assert kept.stdout == ""
    # One node that uses the new one, and one that only accepts it, as in the middle of a rotation.
    names = json.loads(cluster.run("n1", ["beeond-ctl", "secret", "show", "--json"]).stdout)
    cluster.run("n2", ["beeond-ctl", "secret", "use", names["accepted"][0]])
    assert len(set(short_job(cluster).split())) == 1
    cluster.run("n2", ["beeond-ctl", "secret", "use", names["current"]])


def test_uninstall_refuses_as_long_as_an_instance_is_there(site: Site, job: int) -> None:
    before = site.cluster.snapshots(["n1", "n2", "login"])
    assert str(job) in play(site.cluster, "uninstall.yml", code=2).output
    assert changes(site.cluster, before) == []


@pytest.mark.parametrize("book", ["uninstall.yml", "upgrade.yml"])
def test_a_controller_that_does_not_answer_is_not_taken_for_a_node_without_instances(
    site: Site, job: int, book: str
) -> None:
    config = site.cluster.path("n2", "/etc/beeond-ctl/config.toml")
    right = config.read_text()
    config.write_text(f"nonsense = 1\n{right}")
    try:
        told = " ".join(play(site.cluster, book, "--limit", "n2", code=2).output.split())
    finally:
        config.write_text(right)
    assert "`beeond-ctl status --json` fails: " in told
    assert "nonsense: no such key" in told
    assert json.loads(site.cluster.run("n2", ["beeond-ctl", "status", "--json"]).stdout)[0]["job"] == job


def test_an_upgrade_waits_for_the_job_and_returns_only_the_nodes_that_it_took(site: Site, job: int) -> None:
    cluster = site.cluster
    (wheel,) = cluster.path("ctl", "/root/wheels").glob("beeond_ctl-*.whl")
    version = next_version(wheel)
    cluster.run("ctl", ["scontrol", "update", "NodeName=n2", "State=DRAIN", "Reason=broken fan"])
    with ThreadPoolExecutor(1) as pool:
        upgrade = pool.submit(play, cluster, "upgrade.yml", "--limit", "beeond_ctl_compute")
        try:
            wait_for(lambda: "DRAIN" in cluster.node_state("n1").flags or upgrade.done(), 60)
            assert cluster.node_state("n1").reason.startswith("beeond-ctl: upgrade")
            assert version not in cluster.run("n1", ["beeond-ctl", "--version"]).stdout
        finally:
            cluster.run("login", ["rm", "-f", "/global/alice/begun"])
        changed = upgrade.result().changed
    assert cluster.wait_job(job)["JobState"] == "COMPLETED"
    assert (
        cluster.read("login", "/global/alice/result/file") == "result\n"
    )  # by either release: it is the same program
    assert changed["n1"] > 0
    assert changed["n2"] > 0
    for host in ("n1", "n2"):
        assert version in cluster.run(host, ["beeond-ctl", "--version"]).stdout
    wait_for(lambda: cluster.node_state("n1").flags == {"IDLE"}, 30)
    assert cluster.node_state("n2").reason.startswith("broken fan")
    cluster.resume("n2")
    assert len(set(short_job(cluster).split())) == 1
    assert cluster.run("n1", ["beeond-ctl", "secret", "forget"]).stdout == "changed\n"
    assert len(secrets_of(cluster, "n1")) == 1


LATE = """#!/bin/sh
# In place of scontrol: a job begins after uninstall.yml has looked, and before it takes this node out of service.
case "$*" in *State=DRAIN*)
    /usr/bin/scontrol release JOB
    until [ -e /global/alice/begun ]; do sleep 0.1; done ;;
esac
exec /usr/bin/scontrol "$@"
"""


def test_uninstall_waits_for_a_job_that_began_meanwhile_and_leaves_nothing(site: Site) -> None:
    cluster = site.cluster
    cluster.wait_idle()
    cluster.run("login", ["rm", "-rf", "/global/alice/late"])
    job = cluster.submit("alice", HOLD, "--hold", "-wn1", "--beeond-stage-out=out:/global/alice/late")
    late = cluster.path("n1", "/usr/local/sbin/scontrol")
    late.write_text(LATE.replace("JOB", str(job)))
    late.chmod(0o755)
    cluster.run("ctl", ["scontrol", "update", "NodeName=n2", "State=DRAIN", "Reason=broken fan"])
    with ThreadPoolExecutor(1) as pool:
        removal = pool.submit(play, cluster, "uninstall.yml")
        try:
            wait_for(lambda: "DRAIN" in cluster.node_state("n1").flags or removal.done(), 60)
            assert cluster.node_state("n1").reason.startswith("beeond-ctl: uninstall")
            assert cluster.job(job)["JobState"] == "RUNNING"
        finally:
            cluster.run("login", ["rm", "-f", "/global/alice/begun"])
        removal.result()
    late.unlink()
    assert cluster.wait_job(job)["JobState"] == "COMPLETED"
    assert cluster.read("login", "/global/alice/late/file") == "result\n"
    wait_for(lambda: cluster.node_state("n1").flags == {"IDLE"}, 30)
    assert cluster.node_state("n2").reason.startswith("broken fan")
    cluster.resume("n2")
    # Ansible's own: connections that it keeps open for the next run, and a directory.
    cluster.kill("ctl", r"^ssh: .*\[mux\]")
    for host in ("n1", "n2", "login"):
        cluster.run(host, ["rm", "-rf", "/root/.ansible"])
    cluster.wait_clean(site.before)
    ours = "/usr/bin/beeond-ctl /opt/beeond-ctl /etc/beeond-ctl /etc/slurm/b*.lua"
    assert (
        cluster.run("ctl", ["sh", "-c", f"ls -d {ours} /usr/lib/*/slurm-wlm/beeond.so"], check=False).stdout
        == ""
    )
