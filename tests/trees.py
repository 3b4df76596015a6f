"""Awkward trees: what staging has to bring across, and how to compare two of them with a program that is not ours."""

from __future__ import annotations

AWKWARD = r"""
set -eu
mkdir -p "$1" && cd "$1"
mkdir -p 'with space/deep' empty 'closed dir' many links
printf 'newline' > "$(printf 'new\nline')"
printf 'bytes' > "$(printf 'caf\351-\377')"
printf 'plain' > 'with space/deep/file'
printf ':%%,\\' > 'co:lon,comma%j\back'
: > zero
truncate -s 300M sparse
printf 'head' | dd of=sparse conv=notrunc status=none
printf 'middle' | dd of=sparse conv=notrunc status=none bs=1 seek=157286400
printf 'linked' > links/a; ln links/a links/b; ln links/a 'with space/c'
ln -s ../zero links/inside; ln -s /etc/hostname links/outside; ln -s nowhere links/dangling
setfattr -n user.beeond -v value zero
setfattr -n user.empty many
printf 'inside' > 'closed dir/file'
chmod 640 zero; chmod 755 links; chmod 1777 empty; chmod 4711 links/a
touch -d '2001-02-03 04:05:06.123456789' zero 'with space'
i=0; while [ $i -lt "$2" ]; do echo "$i" > "many/$i"; i=$((i + 1)); done
touch -d '1999-12-31 23:59:59.5' many
chmod 500 'closed dir'
"""
"""A shell script that makes the tree: $1 where, $2 how many small files."""


def compare(source: str, destination: str) -> list[str]:
    """The rsync command that prints one line for each difference between two trees, and nothing if there is none."""
    return ["rsync", "-aHAXn", "--checksum", "--itemize-changes", "--delete", f"{source}/", f"{destination}/"]
