from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from beeond_ctl.config import SiteConfig, load, parse
from beeond_ctl.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path


def test_an_empty_file_is_a_whole_configuration() -> None:
    assert parse("") == SiteConfig()


def test_a_configuration_survives_being_stored_with_an_instance() -> None:
    config = parse('[storage]\nkind = "image"\ncapacity = "2TiB"\npaths = ["/nvme0/x", "/nvme1/x"]')
    assert SiteConfig.model_validate(config.model_dump(mode="json")) == config
    assert config.storage.capacity == 2 * 2**40


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[storage]\nkind = 'tape'", ["storage.kind", "'directory'"]),
        ("[storage]\npaths = []", ["storage.paths"]),
        ("[storage]\npaths = ['nvme']", ["storage.paths.0", "absolute"]),
        ("[storage]\npaths = ['/home']", ["storage.paths.0", "directory of the system"]),
        ("[storage]\ncapacity = '1 lot'", ["storage.capacity", "size"]),
        ("[network]\nports = '80-90'", ["network.ports", "21000-24999"]),
        ("[network]\nports = '21000-21010'", ["network.ports", "256"]),
        ("[network]\nsuffix = '; reboot'", ["network.suffix"]),
        ("[deadlines]\nmeet = -1", ["deadlines.meet"]),
        ("[storage]\nsize = 3", ["storage.size"]),
        ("[mount]\nroot = '/mnt/../etc'", ["mount.root", ".."]),
        ("[slurm]\nlists = '/scratch/lists'", ["slurm.lists", "%u"]),
        ("[slurm]\nlists = '/scratch/%u/%j'", ["slurm.lists", "%u"]),
        ("[mount]\nchoices = ['/mnt/beeond']", ["/mnt/beeond", "lies in"]),
        ("[mount]\nchoices = ['/mnt/beeond/x']", ["/mnt/beeond/x", "lies in"]),
        ("[storage]\npaths = ['/a/b', '/a/b/c']", ["/a/b/c", "lies in"]),
        ("[beegfs]\nchunk_size = '4GiB'", ["beegfs.chunk_size", "from 64KiB to 2GiB"]),
        ("storage = ", ["TOML"]),
    ],
)
def test_a_mistake_is_named_with_its_place(text: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(text, "/etc/x.toml")
    for word in ["/etc/x.toml", *words]:
        assert word in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_file_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="beeond-ctl check" if os.geteuid() == 0 else "ask your admin"):
        load(tmp_path / "none.toml")


@pytest.mark.root
def test_root_takes_no_configuration_that_others_may_write(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text("")
    path.chmod(0o666)
    with pytest.raises(ConfigError, match="others than root"):
        load(path)
    path.chmod(0o644)
    os.chown(path, 65534, 65534)
    with pytest.raises(ConfigError, match="others than root"):
        load(path)
