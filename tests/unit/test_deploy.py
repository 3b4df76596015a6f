"""What an admin drops into systems: units that systemd takes, and the modules that Ansible places things with."""

from __future__ import annotations

import importlib.util
import io
import json
import os
import shutil
import subprocess
import sys
import tomllib
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
needs_ansible = pytest.mark.skipif(
    importlib.util.find_spec("ansible") is None, reason="no ansible-core in this environment"
)


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd-analyze here")
def test_systemd_finds_nothing_wrong_with_the_units(tmp_path: Path) -> None:
    for path in (
        "usr/bin/beeond-ctl",
        "usr/lib/systemd/system/sysinit.target",
        "usr/lib/systemd/system/basic.target",
    ):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text("#!/bin/sh\n" if path.startswith("usr/bin") else "[Unit]\n")
    (tmp_path / "usr/bin/beeond-ctl").chmod(0o755)
    units = tmp_path / "etc/systemd/system"
    shutil.copytree(ROOT / "deploy/systemd", units)
    names = sorted(path.name for path in units.iterdir())
    assert len(names) == 3
    swept = (units / "beeond-ctl-sweep.service").read_text().splitlines()
    for order in ("Wants=", "After="):  # ages are taken from the time of day
        assert any(line.startswith(order) and "time-sync.target" in line for line in swept)
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", f"--root={tmp_path}", *names],
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")
    subprocess.run(["systemctl", f"--root={tmp_path}", "enable", *names], check=True, capture_output=True)
    wanted = [path.parent.name for path in sorted(units.glob("*.wants/*"), key=lambda path: path.name)]
    assert wanted == ["multi-user.target.wants", "multi-user.target.wants", "timers.target.wants"]


def module(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, ROOT / f"ansible/library/{name}.py")
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


@pytest.fixture
def files(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs the module beeond_ctl_files in this process; the owner is whoever runs the test."""
    loaded = module("beeond_ctl_files")
    monkeypatch.setattr(os, "chown", lambda *_: None)
    monkeypatch.setattr(os, "fchown", lambda *_: None)
    real = os.lstat

    def lstat(path: str, **more: Any) -> os.stat_result:
        status = list(real(path, **more))
        status[4] = status[5] = 0
        return os.stat_result(status)

    def run(*, check: bool = False, **arguments: Any) -> dict[str, Any]:
        from ansible.module_utils import basic

        given = {"ANSIBLE_MODULE_ARGS": arguments | {"_ansible_check_mode": check}}
        with monkeypatch.context() as patch:
            patch.setattr(basic, "_ANSIBLE_ARGS", json.dumps(given).encode())
            patch.setattr(basic, "_ANSIBLE_PROFILE", "legacy", raising=False)
            patch.setattr(loaded.os, "lstat", lstat)
            printed = io.StringIO()
            with pytest.raises(SystemExit), redirect_stdout(printed):
                loaded.main()
        answer: dict[str, Any] = json.loads(printed.getvalue())
        return answer

    return run


@needs_ansible
def test_placing_files_is_told_before_and_done_once(tmp_path: Path, files: Any) -> None:
    source = tmp_path / "source"
    source.write_text("one\n")
    wanted = {
        "private_directories": [f"{tmp_path}/private"],
        "present": [
            {"path": f"{tmp_path}/made/for/file", "copy_of": str(source), "mode": "0755"},
            {"path": f"{tmp_path}/link", "link": "made/for"},
            {"path": f"{tmp_path}/directory", "directory": True, "mode": "0755"},
        ],
    }
    paths = [f"{tmp_path}/{name}" for name in ("private", "made/for/file", "link", "directory")]
    before = sorted(tmp_path.rglob("*"))
    assert files(check=True, **wanted)["paths"] == paths
    assert sorted(tmp_path.rglob("*")) == before
    assert files(**wanted)["paths"] == paths
    assert (tmp_path / "link/file").read_text() == "one\n"
    assert [path.stat().st_mode & 0o777 for path in map(Path, paths)] == [0o700, 0o755, 0o755, 0o755]
    assert not files(**wanted)["changed"]

    source.write_text("two\n")
    (tmp_path / "private").chmod(0o755)
    told = files(check=True, **wanted)
    assert told["paths"] == paths[:2]
    assert told["diff"][1]["before"].endswith("one\n")
    assert told["diff"][1]["after"].endswith("two\n")
    assert (tmp_path / "link/file").read_text() == "one\n"
    files(**wanted)
    assert (tmp_path / "link/file").read_text() == "two\n"
    assert not files(**wanted)["changed"]

    gone = {"absent": [*paths, f"{tmp_path}/never"]}
    assert files(check=True, **gone)["paths"] == paths
    assert files(**gone)["paths"] == paths
    assert not files(**gone)["changed"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["made", "source"]


@needs_ansible
def test_storage_is_removed_only_where_nothing_is_in_it_that_may_be_data(tmp_path: Path, files: Any) -> None:
    first, second, hook = tmp_path / "nvme0", tmp_path / "nvme1", tmp_path / "hook"
    for path in (first, second, second / "job-7"):
        path.mkdir()
    for path in (first / "metadata-1-64G", hook):
        path.touch()
    gone = {"absent": [str(hook)], "storage": [str(first), str(second), f"{tmp_path}/never"]}
    before = sorted(tmp_path.rglob("*"))
    for check in (True, False):
        assert f"{second}/job-7 may be data" in files(check=check, **gone)["msg"]
        assert sorted(tmp_path.rglob("*")) == before
    (second / "job-7").rename(second / "metadata-job")  # a directory is no image
    assert "may be data" in files(**gone)["msg"]
    (second / "metadata-job").rmdir()
    wanted = [str(hook), f"{first}/metadata-1-64G", str(first), str(second)]
    assert files(check=True, **gone)["paths"] == wanted
    assert files(**gone)["paths"] == wanted
    assert list(tmp_path.iterdir()) == []
    assert not files(**gone)["changed"]


@needs_ansible
@pytest.mark.parametrize("slash", ["", "/"])
def test_storage_that_is_a_link_is_told_before_anything_is_removed(
    tmp_path: Path, files: Any, slash: str
) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "disk/metadata-1-64G").touch()
    (tmp_path / "hook").touch()
    (tmp_path / "nvme0").symlink_to("disk")
    before = sorted(tmp_path.rglob("*"))
    gone = {"absent": [f"{tmp_path}/hook"], "storage": [f"{tmp_path}/nvme0{slash}"]}
    for check in (True, False):
        assert "of storage.paths is a link to disk; " in files(check=check, **gone)["msg"]
        assert sorted(tmp_path.rglob("*")) == before


@needs_ansible
def test_the_configuration_of_an_inventory_is_the_same_in_toml() -> None:
    from jinja2 import Environment

    environment = Environment(trim_blocks=True, keep_trailing_newline=True)
    environment.filters["ansible.builtin.to_json"] = json.dumps
    wanted = {
        "storage": {"kind": "image", "paths": ["/nvme0/x", '/nvme1/\u00fc"\\'], "capacity": "1TiB"},
        "beegfs": {
            "rdma": True,
            "pools": {"fast": ["/nvme0/x"]},
            "settings": {"meta": {"tuneNumWorkers": 8}},
            "meta": 2,
        },
        "deadlines": {"meet": 12.5},
        "staging": {},
    }
    template = environment.from_string(
        (ROOT / "ansible/roles/beeond_ctl/templates/config.toml.j2").read_text()
    )
    text = template.render(
        ansible_managed="made by Ansible", beeond_ctl_config=wanted | {"sweep": {"kept_days": None}}
    )
    assert tomllib.loads(text) == wanted | {"sweep": {}}


@needs_ansible
def test_what_is_something_else_is_not_replaced(tmp_path: Path, files: Any) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/data").write_text("x")
    for item in ({"link": "elsewhere"}, {"copy_of": __file__}):
        answer = files(present=[{"path": f"{tmp_path}/mine", **item}])
        assert answer["failed"]
        assert "is there already" in answer["msg"]
    assert files(present=[{"path": f"{tmp_path}/x", "copy_of": f"{tmp_path}/none"}])["failed"]
    assert (tmp_path / "mine/data").read_text() == "x"


@needs_ansible
def test_hooks_go_beside_the_sites_or_it_is_told_what_to_call(tmp_path: Path) -> None:
    facts = module("beeond_ctl_facts")
    script = tmp_path / "prolog.sh"
    script.write_text("#!/bin/sh\n")
    (tmp_path / "00-site").touch()
    for settings, path, hint in (
        ({"Prolog": f"{tmp_path}/*"}, f"{tmp_path}/50-beeond", ""),
        ({"Prolog[0]": str(script), "Prolog[1]": f"{tmp_path}/*.sh"}, f"{tmp_path}/50-beeond.sh", ""),
        (
            {"Prolog": str(script)},
            "/usr/libexec/beeond-ctl/prolog",
            f"Prolog={script} is a script of the site: have it run",
        ),
        (
            {"Prolog": "(null)"},
            "/usr/libexec/beeond-ctl/prolog",
            "slurm.conf: add Prolog=/usr/libexec/beeond-ctl/prolog",
        ),
        ({}, "/usr/libexec/beeond-ctl/prolog", "slurm.conf: add Prolog=/usr/libexec/beeond-ctl/prolog"),
        ({"Prolog": "/usr/libexec/beeond-ctl/prolog"}, "/usr/libexec/beeond-ctl/prolog", ""),
    ):
        found = facts.hook(settings, "Prolog")
        assert found["path"] == path
        enough = {"PrologFlags": "Alloc", "HealthCheckProgram": "/usr/libexec/beeond-ctl/health-check"}
        hints = list(facts.hints(settings | enough, {"Prolog": found}))
        assert len(hints) == bool(hint)
        assert not hint or hints[0].startswith(hint)
    script.write_text("#!/bin/sh\n/usr/libexec/beeond-ctl/prolog || exit $?\n")
    assert facts.hook({"Prolog": str(script)}, "Prolog")["called"]


@needs_ansible
def test_the_sites_plugstack_and_burst_buffer_are_known_from_ours(tmp_path: Path) -> None:
    facts = module("beeond_ctl_facts")
    settings = {"SLURM_CONF": f"{tmp_path}/slurm.conf"}
    line = f"include {tmp_path}/plugstack.conf.d/*.conf\n"
    block = f"# BEGIN beeond-ctl\n{line}# END beeond-ctl\n"
    for text, included, whose in (
        (None, False, ""),
        ("required x.so\n", False, "site"),
        ("include plugstack.conf.d/*\n", True, "site"),
        (block, True, "ours"),
        (f"required x.so\n{block}", True, "site"),
    ):
        if text is not None:
            (tmp_path / "plugstack.conf").write_text(text)
        found = facts.plugstack(settings)
        assert (found["included"], found["whose"]) == (included, whose)
    assert facts.burst_buffer(settings)["whose"] == ""
    (tmp_path / "burst_buffer.lua").write_text("-- the site's own\n")
    assert facts.burst_buffer(settings)["whose"] == "site"
    shutil.copy(ROOT / "slurm/burst_buffer.lua", tmp_path)
    assert facts.burst_buffer(settings)["whose"] == "ours"


@needs_ansible
def test_the_modules_documentation_is_of_the_form_that_ansible_reads() -> None:
    names = ["beeond_ctl_facts", "beeond_ctl_files"]
    program = str(Path(sys.executable).with_name("ansible-doc"))
    done = subprocess.run(
        [program, "-M", str(ROOT / "ansible/library"), "--json", *names],
        capture_output=True,
        text=True,
        check=True,
    )
    assert sorted(json.loads(done.stdout)) == names
