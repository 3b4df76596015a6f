#!/usr/bin/python
"""What of Slurm and beeond-ctl is on a host: looks only, in one go, so that the roles need few tasks."""

from __future__ import annotations

import glob
import json
import os
import re
import shutil
import subprocess
from typing import TYPE_CHECKING, Any

from ansible.module_utils.basic import AnsibleModule

if TYPE_CHECKING:
    from collections.abc import Iterator

    Settings = dict[str, str]

DOCUMENTATION = r"""
module: beeond_ctl_facts
short_description: What of Slurm and beeond-ctl is on a host
description: Looks only; the same in check mode. Sets the fact C(beeond_ctl_found).
options:
  prefix: {description: Where releases of beeond-ctl are, type: path, required: true}
  node: {description: The host's NodeName in Slurm; none for hosts that are no compute nodes, type: str, default: ""}
  storage: {description: The storage.paths of the configuration, type: list, elements: path, default: []}
author: The beeond-ctl authors
"""
EXAMPLES = r"""
- name: Look at the host
  beeond_ctl_facts:
    prefix: /opt/beeond-ctl
"""
RETURN = r"""
ansible_facts:
  description: What was found
  returned: always
  type: dict
"""

CONTROLLER = "/usr/bin/beeond-ctl"
CONFIGURATION = "/etc/beeond-ctl/config.toml"
JOBS = "/run/beeond-ctl/jobs"
TIMEOUT_S = 60
PATH = "/usr/bin:/bin:/usr/sbin:/sbin:/opt/slurm/bin:/usr/local/bin"


def run(*words: str) -> tuple[str | None, str]:
    """What a command prints; None, and why, where it is not there or fails."""
    try:
        done = subprocess.run(
            words, stdin=subprocess.DEVNULL, capture_output=True, timeout=TIMEOUT_S, check=False,
            env={"PATH": PATH, "LC_ALL": "C.UTF-8"},
        )  # fmt: skip
    except OSError as error:
        return None, error.strerror or str(error)
    except subprocess.TimeoutExpired:
        return None, f"no answer within {TIMEOUT_S} s"
    if done.returncode != 0:
        told = done.stderr.decode(errors="replace").strip().splitlines()
        return None, told[-1] if told else f"exit code {done.returncode}"
    return done.stdout.decode(errors="replace"), ""


def output(*words: str) -> str | None:
    """What a command prints; None where it is not there or fails."""
    return run(*words)[0]


def text_of(path: str) -> str:
    """What is in a file; nothing where it cannot be read."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return ""


def slurm() -> dict[str, Any]:
    """Slurm's settings (scontrol show config), and the release of its programs."""
    settings: Settings = {}
    for line in (output("scontrol", "show", "config") or "").splitlines():
        name, equals, value = line.partition("=")
        if equals:
            settings[name.strip()] = value.strip()
    found = re.search(
        r"(\d+\.\d+)\.\S+", settings.get("SLURM_VERSION") or output("scontrol", "--version") or ""
    )
    return {"settings": settings, "release": found.group(1) if found else ""}


def plugin_directory(settings: Settings) -> str:
    """Where Slurm looks for plugins."""
    for directory in settings.get("PluginDir", "").split(":"):
        if os.path.isdir(directory):
            return directory
    return ""


def values(settings: Settings, name: str) -> list[str]:
    """A setting that newer releases have several of: Prolog, or Prolog[0], Prolog[1], and so on."""
    found = [value for key, value in sorted(settings.items()) if re.fullmatch(name + r"(\[\d+\])?", key)]
    return [value for value in found if value not in ("", "(null)")]


def hook(settings: Settings, name: str) -> dict[str, Any]:
    """Where the site's Prolog or Epilog scripts are: a pattern of files, or scripts that each have to call ours."""
    set_to = values(settings, name)
    for value in set_to:
        directory, base = os.path.split(value)
        if base.startswith("*"):
            own = os.path.join(directory, "50-beeond" + base[1:])
            others = [path for path in glob.glob(value) if path != own]
            return {"pattern": value, "path": own, "others": bool(others), "called": True, "script": ""}
    path = "/usr/libexec/beeond-ctl/" + name.lower()
    called = any(value == path or path in text_of(value) for value in set_to)
    return {"pattern": "", "path": path, "others": True, "called": called, "script": ", ".join(set_to)}


def hints(settings: Settings, hooks: dict[str, dict[str, Any]]) -> Iterator[str]:
    """What only the site can put into its slurm.conf, or its scripts, word by word."""
    for name, found in sorted(hooks.items()):
        path = found["path"]
        if found["script"] and not found["called"]:
            yield f"{name}={found['script']} is a script of the site: have it run `{path} || exit $?`"
        elif not found["pattern"] and not found["called"]:
            yield f"slurm.conf: add {name}={path}"
    flags = settings.get("PrologFlags", "").lower().split(",")
    if "alloc" not in flags and "contain" not in flags:
        yield "slurm.conf: add Alloc to PrologFlags: PrologFlags=Alloc"
    for flag in ("RunInJob", "Serial"):
        if flag.lower() in flags:
            yield f"slurm.conf: take {flag} out of PrologFlags; `beeond-ctl check` says why"
    health = settings.get("HealthCheckProgram", "(null)")
    ours = "/usr/libexec/beeond-ctl/health-check"
    if health in ("", "(null)"):
        more = "HealthCheckInterval=300"
        yield f"slurm.conf, if you like nodes to be swept by slurmd: HealthCheckProgram={ours} {more}"
    elif health != ours and ours not in text_of(health):
        yield f"HealthCheckProgram={health} is a script of the site: have it run {ours}, if you like"


def plugstack(settings: Settings) -> dict[str, Any]:
    """The file that names SPANK plugins, and whether it includes the directory beside it."""
    conf = settings.get("SLURM_CONF", "/etc/slurm/slurm.conf")
    named = settings.get("PlugStackConfig", "(null)")
    path = named if named not in ("", "(null)") else os.path.join(os.path.dirname(conf), "plugstack.conf")
    directory = os.path.join(os.path.dirname(path), "plugstack.conf.d")
    patterns = [
        os.path.join(os.path.dirname(path), found)
        for found in re.findall(r"^\s*include\s+(\S+)", text_of(path), re.MULTILINE)
    ]
    included = any(os.path.dirname(pattern) == directory for pattern in patterns)
    text = text_of(path)
    rest = re.sub(r"^# BEGIN beeond-ctl$.*?^# END beeond-ctl$", "", text, flags=re.MULTILINE | re.DOTALL)
    whose = "site" if rest.strip() else "ours" if text.strip() else ""
    return {"path": path, "directory": directory, "included": included, "whose": whose}


def burst_buffer(settings: Settings) -> dict[str, str]:
    """The script beside slurm.conf, and whose it is."""
    path = os.path.join(
        os.path.dirname(settings.get("SLURM_CONF", "/etc/slurm/slurm.conf")), "burst_buffer.lua"
    )
    if not os.path.lexists(path):
        return {"path": path, "whose": ""}
    return {"path": path, "whose": "ours" if "beeond-ctl" in text_of(path)[:400] else "site"}


def firewall() -> str:
    """The firewall that runs: firewalld, or nftables with rules for what comes in."""
    if shutil.which("firewall-cmd", path=PATH) and output("firewall-cmd", "--state") is not None:
        return "firewalld"
    rules = output("nft", "list", "ruleset") if shutil.which("nft", path=PATH) else None
    return "nftables" if rules and "hook input" in rules else ""


def node(name: str) -> dict[str, str]:
    """What Slurm says of a node."""
    shown = output("scontrol", "--oneliner", "show", "node", name) or ""
    state = re.search(r" State=(\S+)", shown)
    reason = re.search(r" Reason=(.*?)(?: \[\S+@\S+\])?\s*$", shown)
    return {
        "name": name,
        "state": state.group(1) if state else "",
        "reason": reason.group(1) if reason else "",
    }


def ask(trouble: list[str], *words: str) -> Any:  # noqa: ANN401 - whatever JSON can say
    """What the installed controller prints as JSON; None, and the reason in `trouble`, where it does not answer."""
    text, why = run(CONTROLLER, *words)
    if text is not None:
        try:
            return json.loads(text)
        except ValueError as error:
            why = f"its answer is not JSON ({error})"
    trouble.append(f"`beeond-ctl {' '.join(words)}` fails: {why}")
    return None


def controller() -> dict[str, Any]:
    """The node's instances and secrets. None stands for what is not known, which must not be taken for none."""
    trouble: list[str] = []
    if os.path.exists(CONTROLLER) and os.path.exists(CONFIGURATION):
        instances, secret = ask(trouble, "status", "--json"), ask(trouble, "secret", "show", "--json")
    else:
        instances, secret = [], {}
        if left := glob.glob(JOBS + "/*"):
            instances = None
            trouble.append(f"{', '.join(left)}: there is no controller with a configuration to ask about it")
    return {"instances": instances, "secret": secret, "trouble": trouble}


def main() -> None:
    """Run as Ansible runs modules."""
    module = AnsibleModule(
        argument_spec={
            "prefix": {"type": "path", "required": True},
            "node": {"type": "str", "default": ""},
            "storage": {"type": "list", "elements": "path", "default": []},
        },
        supports_check_mode=True,
    )
    prefix, name = module.params["prefix"], module.params["node"]
    found = slurm()
    settings = found["settings"]
    hooks = {kind: hook(settings, kind) for kind in ("Prolog", "Epilog")} if name else {}
    facts = {
        "prefix": prefix,
        "paths": module.params["storage"],
        "slurm": found["release"],
        "answers": bool(settings),
        "settings": {
            key: settings.get(key, "") for key in ("PrologFlags", "HealthCheckProgram", "BurstBufferType")
        },
        "plugin_directory": plugin_directory(settings),
        "plugstack": plugstack(settings),
        "burst_buffer": burst_buffer(settings),
        "releases": sorted(path.split(os.sep)[-2] for path in glob.glob(prefix + "/releases/*/complete")),
        "plugins": sorted(
            os.sep.join(path.split(os.sep)[-3::2]) for path in glob.glob(prefix + "/releases/*/spank/*.so")
        ),
        "missing": [
            os.path.dirname(path)
            for path in module.params["storage"]
            if not os.path.isdir(os.path.dirname(path))
        ],
        "current": os.path.basename(os.path.realpath(prefix + "/current")),
        "packaged": os.path.isfile(CONTROLLER) and not os.path.islink(CONTROLLER),
        "firewall": firewall(),
        "hooks": hooks,
        "hints": list(hints(settings, hooks)) if name else [],
        "node": node(name) if name else {},
        **(controller() if name else {"instances": [], "secret": {}, "trouble": []}),
        "storage": [
            os.path.join(path, entry)
            for path in module.params["storage"]
            if os.path.isdir(path)
            for entry in os.listdir(path)
            if not entry.startswith("metadata-")
        ],
    }
    module.exit_json(changed=False, ansible_facts={"beeond_ctl_found": facts})


if __name__ == "__main__":
    main()
