"""The parts of staging that can be told apart from any file system."""

from __future__ import annotations

import os
import random
from typing import TYPE_CHECKING

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from beeond_ctl.staging import data, wire
from beeond_ctl.staging.journal import Journal, records
from beeond_ctl.staging.scan import Proofs, fingerprint, read_proofs
from beeond_ctl.staging.transfer import Fold, Summary, show

if TYPE_CHECKING:
    from pathlib import Path


def test_a_journal_cut_at_any_byte_keeps_every_whole_record_and_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    journal = Journal(path)
    written = [("kind", f"text {number}") for number in range(5)]
    ends = [0]
    for record in written:
        journal.append(record)
        ends.append(journal.length)
    journal.close()
    whole = path.read_bytes()
    for cut in range(len(whole) + 1):
        path.write_bytes(whole[:cut])
        again = Journal(path)
        kept = sum(1 for end in ends if 0 < end <= cut)
        assert list(records(again.fd)) == written[:kept]
        again.append(("kind", "after"))
        again.close()
        assert list(records(os.open(path, os.O_RDONLY))) == [*written[:kept], ("kind", "after")]


def test_a_journal_with_a_damaged_byte_keeps_nothing_behind_it(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    journal = Journal(path)
    journal.append(("a", "1"), ("b", "2"), ("c", "3"))
    journal.close()
    damaged = bytearray(path.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    path.write_bytes(damaged)
    assert list(records(os.open(path, os.O_RDONLY))) == [("a", "1")]


@given(st.binary(min_size=1, max_size=60).filter(lambda name: b"\0" not in name and b"/" not in name))
def test_any_name_passes_the_wire_and_stays_one_printable_line(name: bytes) -> None:
    text = name.decode(errors="surrogateescape")
    line = wire.dumps([text])
    assert line.isascii()
    assert "\n" not in line
    assert "\t" not in line
    assert wire.loads(line)[0].encode(errors="surrogateescape") == name
    assert show(text).isprintable()


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000, "nul"])
def test_what_is_no_json_is_a_protocol_error(text: str) -> None:
    with pytest.raises(wire.ProtocolError):
        wire.loads(text)


def test_proofs_hold_for_one_state_of_one_file_only() -> None:
    entry = ["name", 10, 20, 30, 40, "00"]
    proofs = read_proofs(
        iter([("proof", wire.dumps([["dir", [entry]]])), ("proof", "no JSON"), ("proof", "[1]")])
    )
    assert proofs.has(fingerprint("dir/name", 10, 20, 30, 40))
    for other in (("dir/other", 10, 20, 30, 40), ("dir/name", 11, 20, 30, 40), ("dir/name", 10, 20, 31, 40)):
        assert not proofs.has(fingerprint(*other))
    assert not Proofs([], {}).has(1)


@pytest.mark.parametrize("seed", range(10))
def test_a_sparse_range_is_copied_with_its_holes_and_the_checksum_of_its_bytes(
    tmp_path: Path, seed: int
) -> None:
    rng = random.Random(seed)
    size = rng.randrange(1, 8 << 20)
    path = tmp_path / "source"
    with open(path, "wb") as file:
        file.truncate(size)
        for _ in range(3):
            file.seek(rng.randrange(size))
            file.write(rng.randbytes(rng.randrange(1, 100_000)))
    size = path.stat().st_size
    source = os.open(path, os.O_RDONLY)
    target = os.open(tmp_path / "target", os.O_RDWR | os.O_CREAT)
    os.ftruncate(target, size)
    middle = rng.randrange(size)
    for start, end in ((0, middle), (middle, size)):
        digest = data.copy_range(source, target, start, end, sparse=True)
        assert digest == xxhash.xxh3_128_digest(path.read_bytes()[start:end])
        assert data.hash_range(target, start, end, sparse=True) == digest
    assert (tmp_path / "target").read_bytes() == path.read_bytes()
    assert os.fstat(target).st_blocks <= path.stat().st_blocks + 16
    assert data.hash_range(target, 0, size + 1, sparse=False) is None


def test_a_summary_says_one_line_for_each_cause_with_examples() -> None:
    names = [f"file\n{number}" for number in range(9)]
    summary = Summary(
        b"/a", b"/b", failures={("denied", "source"): Fold().add(9, names), ("quota", "destination"): Fold(1)}
    )
    lines = summary.problems()
    assert len(lines) == 2
    assert all(line.isprintable() for line in lines)
    assert lines[0].startswith("9 entries (e.g. 'file\\n0', ")
    assert lines[0].endswith("not copied: permission denied at the source")
    assert lines[1] == "1 entry not copied: quota exceeded at the destination"
