"""The site secret is only read where nobody else can, and what is derived from it follows RFC 5869."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from hypothesis import given
from hypothesis import strategies as st

from beeond_ctl import keys
from beeond_ctl.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

SECRET = bytes(range(32))
PURPOSE = st.text(st.characters(codec="utf-8"), max_size=40)


@given(secret=st.binary(min_size=32, max_size=80), purpose=PURPOSE, length=st.integers(1, 8160))
def test_derive_is_hkdf_as_another_implementation_has_it(secret: bytes, purpose: str, length: int) -> None:
    other = HKDF(SHA256(), length, b"beeond-ctl key derivation 1", purpose.encode()).derive(secret)
    assert keys.derive(secret, purpose, length) == other


@given(st.lists(PURPOSE, min_size=2, max_size=8, unique=True))
def test_no_two_purposes_share_a_key(purposes: list[str]) -> None:
    assert len({keys.derive(SECRET, purpose) for purpose in purposes}) == len(purposes)


@pytest.mark.parametrize("length", [0, -1, 8161])
def test_a_length_that_hkdf_cannot_give_is_refused(length: int) -> None:
    with pytest.raises(ValueError, match="derive"):
        keys.derive(SECRET, "x", length)


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    path = tmp_path / "secret"
    path.write_bytes(SECRET + b"\n")
    path.chmod(0o400)
    return path


def test_a_secret_is_read_as_stored(secret: Path) -> None:
    assert keys.read_secret(secret) == SECRET + b"\n"


@pytest.mark.parametrize("mode", [0o440, 0o404, 0o620, 0o602, 0o410, 0o777])
def test_a_secret_open_to_group_or_others_is_refused(secret: Path, mode: int) -> None:
    secret.chmod(mode)
    with pytest.raises(ConfigError, match="chmod"):
        keys.read_secret(secret)


def test_a_short_secret_is_refused(secret: Path) -> None:
    secret.chmod(0o600)
    secret.write_bytes(SECRET[:31])
    with pytest.raises(ConfigError, match="31 bytes"):
        keys.read_secret(secret)


def test_a_symbolic_link_to_a_secret_is_refused(secret: Path) -> None:
    link = secret.with_name("link")
    link.symlink_to(secret)
    with pytest.raises(ConfigError, match="symbolic link"):
        keys.read_secret(link)


def test_a_directory_is_no_secret(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    with pytest.raises(ConfigError, match="not a regular file"):
        keys.read_secret(tmp_path)


def test_a_fifo_in_the_secrets_place_is_refused_and_does_not_block(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo", 0o600)
    with pytest.raises(ConfigError, match="not a regular file"):
        keys.read_secret(tmp_path / "fifo")


def test_a_missing_secret_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=str(tmp_path / "none")):
        keys.read_secret(tmp_path / "none")


@pytest.mark.root
def test_a_secret_of_another_user_is_refused(secret: Path) -> None:
    os.chown(secret, 12345, -1)
    with pytest.raises(ConfigError, match="uid 12345"):
        keys.read_secret(secret)


@given(st.binary(min_size=32, max_size=80), st.lists(st.binary(min_size=32, max_size=80), max_size=3))
def test_secrets_of_any_bytes_survive_their_file(current: bytes, accepted: list[bytes]) -> None:
    secrets = keys.Secrets(current, tuple(accepted))
    assert keys.parse_secrets(keys.format_secrets(secrets), "x") == secrets


@pytest.mark.parametrize(
    "lines",
    [
        "",
        "accepted {0}",
        "current {0}\ncurrent {0}",
        "current {0}\nother {0}",
        "current xyz",
        "current {0}  ",
        "current 00",
    ],
)
def test_a_file_of_secrets_that_is_not_whole_is_refused(lines: str) -> None:
    with pytest.raises(ConfigError):
        keys.parse_secrets(b"beeond-ctl secrets 1\n" + lines.format(SECRET.hex()).encode(), "x")


def test_the_name_of_a_secret_tells_nothing_of_it_and_finds_it() -> None:
    other = bytes(64)
    secrets = keys.Secrets(SECRET, (other,))
    assert secrets.find(keys.name_of(SECRET)) == SECRET
    assert secrets.find(keys.name_of(other)) == other
    assert secrets.find(keys.name_of(b"x" * 32)) is None
    assert keys.name_of(SECRET) not in SECRET.hex()
