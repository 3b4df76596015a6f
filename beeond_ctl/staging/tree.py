"""Directories below one root, opened name by name, never through a symbolic link.

The root itself is opened as the user named it. Whatever lies below is reached with `openat(O_NOFOLLOW)`, so
that a directory that somebody swaps for a link leads nowhere, and paths longer than PATH_MAX work.
"""

from __future__ import annotations

import os
import stat

from beeond_ctl.staging.causes import StagingError

_OPEN = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_OPEN_ROOT = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_KEEP = 256
_EUID = os.geteuid()
_DEFAULT_ACL = "system.posix_acl_default"


class Dir:
    """An open directory; for a destination also what a new file in it starts with."""

    __slots__ = ("default_acl", "device", "fd", "gid", "made")

    def __init__(self, fd: int, *, made: bool = False) -> None:
        """`made`: it was not there before."""
        self.fd = fd
        self.made = made
        self.default_acl = False
        self.device = 0
        """Of the file system that a destination's directory is on."""
        self.gid: int | None = None


class Tree:
    """Open directories by their path relative to the root (`''`), kept until `trim`.

    `make` creates what is missing, with mode 0700, and gives the owner access to what is there: the final
    mode is set when everything is in. Safe for threads without a lock: two that open the same keep the first
    one's.
    """

    def __init__(self, root: str, *, make: bool, fresh: bool = False) -> None:
        """Open `root`; `fresh`: nothing was below it before this transfer. Raises OSError."""
        self.make = make
        self.fresh = fresh
        try:
            fd = os.open(root, _OPEN_ROOT)
        except PermissionError:
            if not make:
                raise
            fd = _unlock(None, root, _OPEN_ROOT)
        self._dirs = {"": Dir(fd, made=fresh)}
        if make:
            self._prepare(self._dirs[""])

    @property
    def root(self) -> Dir:
        """The root."""
        return self._dirs[""]

    def open(self, path: str, *, new: bool = False) -> Dir:
        """The directory `path`; `new`: most likely nobody has made it yet, unless it was there before this transfer.

        Raises OSError, StagingError when something else is in its place.
        """
        found = self._dirs.get(path)
        if found is not None:
            return found
        above, rest = path, []
        while above not in self._dirs:
            above, _, name = above.rpartition("/")
            rest.append(name)
        current, passing = self._dirs[above], False
        while rest:
            name = rest.pop()
            try:
                following = self._enter(current, name, new=new)
            finally:
                if passing:
                    os.close(current.fd)
            above = f"{above}/{name}" if above else name
            passing = bool(rest) and len(rest) > 64  # far up in a deep tree: not worth a descriptor
            if not passing:
                kept = self._dirs.setdefault(above, following)
                if kept is not following:
                    os.close(following.fd)
                following = kept
            current = following
        return current

    def _enter(self, above: Dir, name: str, *, new: bool) -> Dir:
        parent, made, tries = above.fd, self.fresh, 0
        if new and self.make and above.made:  # to look first would only cost a call
            made = _mkdir(parent, name) or made
        while True:
            try:
                found = Dir(os.open(name, _OPEN, dir_fd=parent), made=made)
                break
            except FileNotFoundError:
                tries += 1
                if not self.make or tries > 3:
                    raise
                made = _mkdir(parent, name) or made  # not so where another copier was first
            except PermissionError:
                if not self.make:
                    raise
                found = Dir(_unlock(parent, name, _OPEN))
                break
            except NotADirectoryError:
                raise StagingError(
                    "in-the-way", "not a directory at the destination" if self.make else ""
                ) from None
        if self.make:
            try:
                self._prepare(found)
            except BaseException:
                os.close(found.fd)
                raise
        return found

    def _prepare(self, found: Dir) -> None:
        info = os.fstat(found.fd)
        found.device = info.st_dev
        if info.st_uid == _EUID and info.st_mode & 0o700 != 0o700:  # not one of ours
            os.fchmod(found.fd, stat.S_IMODE(info.st_mode) | 0o700)
        try:
            found.default_acl = _DEFAULT_ACL in os.listxattr(found.fd)
        except OSError:  # a file system without extended attributes, or one that does not show them
            found.default_acl = False

    def begin_to_make(self) -> None:
        """From now on make what is missing, and open up what is closed, as with `make`. Raises OSError."""
        self.make = True
        self.unlock()

    def unlock(self) -> None:
        """Give the owner access to the root again, once its final mode has been set. Raises OSError."""
        self._prepare(self.root)

    def trim(self, keep: int = _KEEP) -> None:
        """Close what was opened first, if there is much open, and what the last one lies in after all else: the next
        most likely lies there, too. Nothing may be in use."""
        surplus = len(self._dirs) - keep
        if surplus <= 0:
            return
        paths = [path for path in self._dirs if path]
        for path in sorted(paths, key=lambda path: paths[-1].startswith(f"{path}/"))[:surplus]:
            os.close(self._dirs.pop(path).fd)

    def close(self) -> None:
        """Close everything."""
        for found in self._dirs.values():
            os.close(found.fd)
        self._dirs.clear()


def _mkdir(parent: int, name: str) -> bool:
    """Make the directory; whether it was missing. Raises OSError."""
    try:
        os.mkdir(name, 0o700, dir_fd=parent)
    except FileExistsError:
        return False
    return True


def _unlock(parent: int | None, name: str, how: int) -> int:
    """Open a directory of ours that its own mode keeps us out of. Raises OSError."""
    fd = os.open(name, how | os.O_PATH, dir_fd=parent)
    try:
        info = os.fstat(fd)
        if info.st_uid != _EUID:
            raise PermissionError(13, "Permission denied")
        os.chmod(f"/proc/self/fd/{fd}", stat.S_IMODE(info.st_mode) | 0o700)
    finally:
        os.close(fd)
    return os.open(name, how, dir_fd=parent)
