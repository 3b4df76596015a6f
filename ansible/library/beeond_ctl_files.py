#!/usr/bin/python
"""Directories, links and files of one host, in one go: a run over many hosts takes as long as it has round trips."""

from __future__ import annotations

import os
import shutil
import stat
from typing import Any

from ansible.module_utils.basic import AnsibleModule

DOCUMENTATION = r"""
module: beeond_ctl_files
short_description: Has directories, links and files on a host, or has them not
description:
  - All belong to root. A file is a copy of another one on the same host, and is replaced in one step; so is a link.
  - Missing directories above a path are made with mode 0755.
  - Never replaces a directory by something else, or a file that is there by a link.
options:
  present:
    description: What there has to be; each with one of C(directory), C(link) and C(copy_of).
    type: list
    elements: dict
    default: []
    suboptions:
      path: {description: Where, type: path, required: true}
      mode: {description: Of a directory or file, type: str, default: "0644"}
      directory: {description: Whether it is a directory, type: bool, default: false}
      link: {description: What the link says, type: str}
      copy_of: {description: The file to copy, type: path}
  private_directories:
    description: Directories that there have to be, with mode 0700
    type: list
    elements: path
    default: []
  absent:
    description: What there must not be; directories with all that is in them, and nothing that is mounted.
    type: list
    elements: path
    default: []
  storage:
    description: >-
      Directories of C(storage.paths) that there must not be; with the templates of metadata images in them. Fails where
      anything else is in one, which may be somebody's data, or where one is a link.
    type: list
    elements: path
    default: []
author: The beeond-ctl authors
"""
EXAMPLES = r"""
- name: Have the hook
  beeond_ctl_files:
    present:
      - {path: /etc/slurm/prolog.d/50-beeond, mode: "0755", copy_of: /opt/beeond-ctl/current/slurm/prolog.d/50-beeond}
"""
RETURN = r"""
paths:
  description: What was changed, or would be
  returned: always
  type: list
"""


def look(path: str) -> str:
    """What is at a path, in a line; empty where there is nothing."""
    try:
        status = os.lstat(path)
    except FileNotFoundError:
        return ""
    if stat.S_ISLNK(status.st_mode):
        return "link to " + os.readlink(path)
    kind = "directory" if stat.S_ISDIR(status.st_mode) else "file"
    return f"{kind} {stat.S_IMODE(status.st_mode):04o} {status.st_uid}:{status.st_gid}"


def read(path: str) -> bytes:
    """The content of a file."""
    with open(path, "rb") as file:
        return file.read()


def text(data: bytes) -> str:
    """What can be shown of a file; nothing of a program."""
    return data.decode() if data and b"\0" not in data else ""


def make_parent(path: str) -> None:
    """Make the directories above a path."""
    parent = os.path.dirname(path)
    if not os.path.isdir(parent):
        make_parent(parent)
        os.mkdir(parent)
        os.chmod(parent, 0o755)  # noqa: S103 - whatever the umask is


def put(path: str, entry: dict[str, Any], data: bytes) -> None:
    """Make `path` what `entry` says."""
    mode = int(entry["mode"], 8)
    make_parent(path)
    if entry["directory"]:
        if not os.path.isdir(path):
            os.mkdir(path, mode)
        os.chown(path, 0, 0)
        os.chmod(path, mode)
        return
    new = os.path.join(os.path.dirname(path), "." + os.path.basename(path) + ".new")
    if os.path.lexists(new):
        os.unlink(new)
    if entry["link"]:
        os.symlink(entry["link"], new)
    else:
        descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            os.fchown(descriptor, 0, 0)
            os.fchmod(descriptor, mode)
            os.fsync(descriptor)
    os.rename(new, path)


def mounts_below(path: str) -> list[str]:
    """Where something is mounted, at the path or below it."""
    with open("/proc/self/mountinfo", encoding="utf-8") as lines:
        points = [line.split()[4] for line in lines]
    return [point for point in points if point == path or point.startswith(path + "/")]


def templates(path: str) -> list[str]:
    """The metadata images in a directory of storage.paths; raises ValueError where anything else is in it."""
    with os.scandir(path) as entries:
        found = list(entries)
    for entry in found:
        if not (entry.name.startswith("metadata-") and entry.is_file(follow_symlinks=False)):
            raise ValueError(f"{entry.path} may be data; look with `beeond-ctl status`. It is left as it is")
    return [entry.path for entry in found]


def main() -> None:
    """Run as Ansible runs modules."""
    entry = {
        "path": {"type": "path", "required": True},
        "mode": {"type": "str", "default": "0644"},
        "directory": {"type": "bool", "default": False},
        "link": {"type": "str"},
        "copy_of": {"type": "path"},
    }
    module = AnsibleModule(
        argument_spec={
            "present": {"type": "list", "elements": "dict", "options": entry, "default": []},
            "private_directories": {"type": "list", "elements": "path", "default": []},
            "absent": {"type": "list", "elements": "path", "default": []},
            "storage": {"type": "list", "elements": "path", "default": []},
        },
        supports_check_mode=True,
    )
    changed: list[str] = []
    diffs: list[dict[str, str]] = []

    def note(path: str, before: str, after: str) -> None:
        changed.append(path)
        diffs.append({"before_header": path, "after_header": path, "before": before, "after": after})

    private = [
        {"path": path, "mode": "0700", "directory": True, "link": None, "copy_of": None}
        for path in module.params["private_directories"]
    ]
    for item in private + module.params["present"]:
        path, found, data, old = item["path"], look(item["path"]), b"", b""
        if item["directory"]:
            wanted = f"directory {int(item['mode'], 8):04o} 0:0"
        elif item["link"]:
            wanted = "link to " + item["link"]
        else:
            wanted = f"file {int(item['mode'], 8):04o} 0:0"
            if os.path.isfile(item["copy_of"]):
                data = read(item["copy_of"])
            elif not module.check_mode:  # otherwise it would have been brought before
                module.fail_json(msg=f"{item['copy_of']} is not there to be copied to {path}")
            old = read(path) if found.startswith("file") else b""
        if found == wanted and old == data:
            continue
        if found and found.split()[0] != wanted.split()[0]:
            module.fail_json(msg=f"{path} is there already, as {found}; it is left as it is")
        note(path, found + "\n" + text(old) if found else "", wanted + "\n" + text(data))
        if not module.check_mode:
            put(path, item, data)
    absent, storage = module.params["absent"], [path for path in module.params["storage"] if look(path)]
    for path in storage:
        found = look(os.path.normpath(path))
        if found.startswith("link"):  # which could not be removed when all else is
            module.fail_json(
                msg=f"{path} of storage.paths is a {found}; remove the link first. All is left as it is"
            )
    for path in [*absent, *storage]:
        if mounts_below(path):
            module.fail_json(msg=f"something is mounted at {mounts_below(path)[0]}; it is left as it is")
    try:
        made = [template for path in storage for template in templates(path)]
    except ValueError as error:
        module.fail_json(msg=str(error))
    for path in [*absent, *made, *storage]:
        found = look(path)
        if not found:
            continue
        note(path, found + "\n", "")
        if not module.check_mode:
            if path in storage:
                os.rmdir(path)  # which fails for what came meanwhile
            elif found.startswith("directory"):
                shutil.rmtree(path)
            else:
                os.unlink(path)
    module.exit_json(changed=bool(changed), paths=changed, diff=diffs)


if __name__ == "__main__":
    main()
