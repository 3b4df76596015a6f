"""What the Ansible roles decide by themselves, run on this machine: ports, and a controller that does not answer."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from types import ModuleType

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
pytestmark = pytest.mark.skipif(
    not (BIN / "ansible-playbook").exists(), reason="no ansible-core in this environment"
)

FIREWALL = """#!/bin/sh
# firewall-cmd, as far as the role uses it: one file for each port that is open, now or --permanent.
kept=now
for word; do case $last in --*-port) port=$word ;; esac; last=$word
    case $word in --permanent) kept=later ;; --query-port|--add-port|--remove-port) act=$word ;; esac; done
file="$OPENED/$kept $(echo "$port" | tr / .)"
case $act in --query-port) [ -e "$file" ] ;; --add-port) : >"$file" ;; --remove-port) rm "$file" ;; esac
"""


def play(
    tmp_path: Path, tasks: str, found: dict[str, Any], **variables: Any
) -> subprocess.CompletedProcess[str]:
    """Run one file of the compute nodes' role on this machine."""
    book = [{
        "hosts": "localhost", "gather_facts": False, "connection": "local",
        "vars": {"beeond_ctl_found": found, "ansible_python_interpreter": sys.executable, **variables},
        "tasks": [{"ansible.builtin.include_role": {"name": "beeond_ctl_compute", "tasks_from": tasks}}],
    }]  # fmt: skip
    return run(tmp_path, book)


def run(tmp_path: Path, book: list[dict[str, Any]]) -> subprocess.CompletedProcess[str]:
    """Run a playbook on this machine."""
    (tmp_path / "book.json").write_text(json.dumps(book))
    environment = {
        "PATH": f"{tmp_path}/bin:{BIN}:/usr/bin:/bin", "HOME": str(tmp_path), "OPENED": f"{tmp_path}/open",
        "ANSIBLE_CONFIG": f"{ROOT}/ansible/ansible.cfg", "ANSIBLE_ROLES_PATH": f"{ROOT}/ansible/roles",
        "ANSIBLE_LOCALHOST_WARNING": "0", "LC_ALL": "C.UTF-8",
    }  # fmt: skip
    argv = [f"{BIN}/ansible-playbook", "-i", "localhost,", f"{tmp_path}/book.json"]
    return subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=120, check=False)


def opened(tmp_path: Path, tasks: str, config: dict[str, Any]) -> list[str]:
    """The ports that are open in firewalld after `tasks`."""
    (tmp_path / "bin").mkdir(exist_ok=True)
    (tmp_path / "open").mkdir(exist_ok=True)
    (tmp_path / "bin/firewall-cmd").write_text(FIREWALL)
    (tmp_path / "bin/firewall-cmd").chmod(0o755)
    done = play(tmp_path, tasks, {"firewall": "firewalld"}, beeond_ctl_config=config)
    assert done.returncode == 0, done.stdout + done.stderr
    return sorted(os.listdir(tmp_path / "open"))


def test_firewalld_lets_in_what_beegfs_speaks_and_is_closed_again(tmp_path: Path) -> None:
    offered = {"backend": {"allowed": ["beegfs", "local"]}, "network": {"ports": "30000-30999"}}
    (tmp_path / "open").mkdir()
    for when in ("now", "later"):  # as it was opened by a run before BeeGFS was offered
        (tmp_path / f"open/{when} 30000-30999.tcp").touch()
    both = [f"{when} 30000-30999.{protocol}" for when in ("later", "now") for protocol in ("tcp", "udp")]
    assert opened(tmp_path, "firewall.yml", offered) == both
    assert opened(tmp_path, "close.yml", offered) == []


def test_firewalld_lets_in_no_udp_where_nothing_speaks_it(tmp_path: Path) -> None:
    assert opened(tmp_path, "firewall.yml", {}) == ["later 21000-24999.tcp", "now 21000-24999.tcp"]


def test_nftables_rules_are_told_for_what_beegfs_speaks(tmp_path: Path) -> None:
    config = {"backend": {"default": "beegfs"}}
    done = play(tmp_path, "firewall.yml", {"firewall": "nftables"}, beeond_ctl_config=config)
    assert "tcp dport 21000-24999 accept and udp dport 21000-24999 accept" in " ".join(done.stdout.split())


# --- a controller that does not answer --------------------------------------------------------------------


@pytest.fixture
def facts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module that looks, on a node with an installed controller."""
    spec = importlib.util.spec_from_file_location("facts", ROOT / "ansible/library/beeond_ctl_facts.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for name in ("CONTROLLER", "CONFIGURATION", "JOBS"):
        monkeypatch.setattr(module, name, f"{tmp_path}/{name}")
    (tmp_path / "CONFIGURATION").touch()
    return module


def installed(tmp_path: Path, script: str) -> None:
    (tmp_path / "CONTROLLER").write_text(f"#!/bin/sh\n{script}\n")
    (tmp_path / "CONTROLLER").chmod(0o755)


def test_what_the_controller_says_is_taken(tmp_path: Path, facts: ModuleType) -> None:
    installed(tmp_path, 'case $1 in status) echo "[{\\"job\\": 7}]" ;; *) echo "{}" ;; esac')
    assert facts.controller() == {"instances": [{"job": 7}], "secret": {}, "trouble": []}


@pytest.mark.parametrize(
    ("script", "why"),
    [
        ("echo 'beeond-ctl: no such key' >&2; exit 2", "beeond-ctl: no such key"),
        ("exit 1", "exit code 1"),
        ("echo Traceback", "not JSON"),
        ("exec sleep 60", "no answer within 0.2 s"),
    ],
)
def test_a_controller_that_fails_is_not_taken_for_one_that_has_nothing(
    tmp_path: Path, facts: ModuleType, monkeypatch: pytest.MonkeyPatch, script: str, why: str
) -> None:
    if "sleep" in script:  # what answers may take its time
        monkeypatch.setattr(facts, "TIMEOUT_S", 0.2)
    installed(tmp_path, script)
    found = facts.controller()
    assert (found["instances"], found["secret"]) == (None, None)
    assert [why in told for told in found["trouble"]] == [True, True]


def test_jobs_that_no_controller_can_be_asked_about_are_not_taken_for_none(
    tmp_path: Path, facts: ModuleType
) -> None:
    assert facts.controller() == {"instances": [], "secret": {}, "trouble": []}
    (tmp_path / "JOBS/41").mkdir(parents=True)
    found = facts.controller()
    assert found["instances"] is None
    assert "JOBS/41" in found["trouble"][0]


def test_flags_that_jobs_would_fail_by_are_told(facts: ModuleType) -> None:
    def told(flags: str) -> list[str]:
        return [hint for hint in facts.hints({"PrologFlags": flags}, {}) if "PrologFlags" in hint]

    assert told("Alloc") == []
    (serial,) = told("Alloc,Serial")
    assert "take Serial out of PrologFlags" in serial


def test_no_secret_is_made_where_it_is_not_known_whether_there_is_one(tmp_path: Path) -> None:
    found = {"secret": None, "trouble": ["`beeond-ctl secret show --json` fails: exit code 1"]}
    done = play(tmp_path, "secret.yml", found)
    assert done.returncode == 2
    assert "not known whether this node has the site secret" in " ".join(done.stdout.split())


TAKE, RETURN = "Take the node out of service", "Return the node to service"
STATES = [
    (TAKE, "IDLE", "", True),
    (TAKE, "MIXED+POWERED_DOWN", "", True),
    (TAKE, "IDLE+DRAIN", "fan", False),
    (TAKE, "DOWN", "bad dimm", False),
    (TAKE, "DOWN*", "bad dimm", False),
    (TAKE, "IDLE+FAIL", "bad dimm", False),
    (RETURN, "IDLE+DRAIN", "ours", True),
    (RETURN, "IDLE+DRAIN", "fan", False),
    (RETURN, "DOWN+DRAIN", "ours", False),
    (RETURN, "DOWN", "bad dimm", False),
]


@pytest.mark.parametrize("name", ["uninstall", "upgrade"])
def test_only_nodes_in_service_are_taken_out_of_it_and_returned(tmp_path: Path, name: str) -> None:
    yaml = pytest.importorskip("yaml")
    plays = yaml.safe_load((ROOT / f"ansible/{name}.yml").read_text())
    imported = [
        task["ansible.builtin.import_role"].get("tasks_from", "main.yml")
        for each in plays for task in each.get("tasks", []) if "ansible.builtin.import_role" in task
    ]  # fmt: skip
    tasks = [
        task
        for each in ("drain.yml", "resume.yml") if each in imported
        for task in yaml.safe_load((ROOT / "ansible/roles/beeond_ctl/tasks" / each).read_text())
    ]  # fmt: skip
    book = []
    for number, (task, state, reason, _) in enumerate(STATES):
        (asked,) = (each["when"] for each in tasks if each["name"] == task)
        book.append({
            "hosts": "localhost", "gather_facts": False, "connection": "local",
            "vars": {
                "beeond_ctl_found": {"node": {"state": state, "reason": reason}}, "beeond_ctl_reason": "ours",
            },
            "tasks": [{"ansible.builtin.debug": {"msg": f"case {number}."}, "when": asked}],
        })  # fmt: skip
    done = run(tmp_path, book)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [f"case {number}." in done.stdout for number in range(len(STATES))] == [each[3] for each in STATES]
