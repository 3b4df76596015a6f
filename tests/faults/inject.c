/* Makes one system call fail, or kills the process at it: LD_PRELOAD=inject.so FAULT=CALL:NTH:ERRNO
 *
 * Counting starts when the process gives up its privileges (prctl), so that the start of the interpreter is left
 * alone. ERRNO 0 kills, -1 freezes, -3 as well, until it is told to go on as if nothing had been, -2 lets a write
 * succeed with a wrong byte in it. With FAULT_STICKY the call fails
 * from then on. With FAULT_NO_KINDS listings do not tell what is a directory, as on some file systems; with
 * FAULT_NO_NAMELESS there are no files without a name; with FAULT_NO_EMPTY_PATH such a file gets one only by its path in
 * /proc, as before Linux 6.10. With FAULT_ONCE=PATH it comes once, whichever process is the first: that one makes PATH.
 * A listing (`list`) that fails just ends. With FAULT_SLOW_US looking at a file takes so much longer.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

static int armed, wanted_errno, sticky;
static useconds_t slow_us;
static long countdown;
static char wanted[32];

__attribute__((constructor)) static void read_fault(void)
{
	const char *text = getenv("FAULT"), *slow = getenv("FAULT_SLOW_US");
	slow_us = slow ? (useconds_t)atoi(slow) : 0;
	const char *colon = text ? strchr(text, ':') : NULL;
	if (!colon || (size_t)(colon - text) >= sizeof wanted)
		return;
	memcpy(wanted, text, (size_t)(colon - text));
	countdown = strtol(colon + 1, NULL, 10);
	colon = strchr(colon + 1, ':');
	wanted_errno = colon ? atoi(colon + 1) : EIO;
	sticky = getenv("FAULT_STICKY") != NULL;
}

static int due(const char *call)
{
	if (armed && slow_us && strcmp(call, "stat") == 0)
		usleep(slow_us);
	if (!armed || strcmp(call, wanted) != 0)
		return 0;
	long now = __sync_sub_and_fetch(&countdown, 1);
	if (now != 0 && !(sticky && now < 0))
		return 0;
	const char *once = getenv("FAULT_ONCE");
	if (once) {
		int (*real)(const char *, int, ...) = dlsym(RTLD_NEXT, "open");
		int made = real(once, O_CREAT | O_EXCL | O_WRONLY, 0600);
		if (made < 0)
			return 0;
	}
	if (wanted_errno == -2)
		return 2;
	if (wanted_errno < 0)
		raise(SIGSTOP);
	if (wanted_errno == -3)
		return 0;
	if (wanted_errno == 0)
		kill(getpid(), SIGKILL);
	errno = wanted_errno;
	return 1;
}

int prctl(int option, ...)
{
	va_list list;
	va_start(list, option);
	unsigned long a = va_arg(list, unsigned long), b = va_arg(list, unsigned long);
	unsigned long c = va_arg(list, unsigned long), d = va_arg(list, unsigned long);
	va_end(list);
	int (*real)(int, ...) = dlsym(RTLD_NEXT, "prctl");
	armed = 1;
	return real(option, a, b, c, d);
}

#define WRAP(type, name, label, parameters, ...)                                                                       \
	type name parameters                                                                                           \
	{                                                                                                              \
		static type(*real) parameters;                                                                         \
		if (!real)                                                                                             \
			*(void **)&real = dlsym(RTLD_NEXT, #name);                                                     \
		if (due(label) == 1)                                                                                     \
			return (type)-1;                                                                               \
		return real(__VA_ARGS__);                                                                              \
	}

#define WRAP_OPEN(name, label, parameters, ...)                                                                        \
	int name parameters                                                                                            \
	{                                                                                                              \
		static int (*real)(int, const char *, int, ...);                                                       \
		mode_t mode = 0;                                                                                       \
		va_list list;                                                                                          \
		va_start(list, flags);                                                                                 \
		mode = va_arg(list, mode_t);                                                                           \
		va_end(list);                                                                                          \
		if (!real)                                                                                             \
			*(void **)&real = dlsym(RTLD_NEXT, #name);                                                     \
		if ((flags & O_TMPFILE) == O_TMPFILE && getenv("FAULT_NO_NAMELESS")) {                                 \
			errno = EOPNOTSUPP;                                                                            \
			return -1;                                                                                     \
		}                                                                                                      \
		if (due(label) == 1)                                                                                     \
			return -1;                                                                                     \
		return real(__VA_ARGS__);                                                                              \
	}

WRAP_OPEN(openat, "open", (int fd, const char *path, int flags, ...), fd, path, flags, mode)
WRAP_OPEN(openat64, "open", (int fd, const char *path, int flags, ...), fd, path, flags, mode)
WRAP(ssize_t, read, "read", (int fd, void *data, size_t size), fd, data, size)
WRAP(ssize_t, preadv64, "read", (int fd, const struct iovec *v, int n, off64_t at), fd, v, n, at)
WRAP(ssize_t, preadv64v2, "read", (int fd, const struct iovec *v, int n, off64_t at, int f), fd, v, n, at, f)

ssize_t write(int fd, const void *data, size_t size)
{
	static ssize_t (*real)(int, const void *, size_t);
	char wrong[4096];
	int fault = fd <= STDERR_FILENO && wanted_errno == -2 ? 0 : due("write"); /* files only */
	if (!real)
		*(void **)&real = dlsym(RTLD_NEXT, "write");
	if (fault == 1)
		return -1;
	if (fault == 2 && size && size <= sizeof wrong) {
		memcpy(wrong, data, size);
		wrong[size / 2] ^= 1;
		return real(fd, wrong, size);
	}
	return real(fd, data, size);
}

WRAP(ssize_t, pwrite64, "write", (int fd, const void *data, size_t size, off64_t at), fd, data, size, at)
WRAP(ssize_t, copy_file_range, "write", (int a, off64_t *x, int b, off64_t *y, size_t n, unsigned f), a, x, b, y, n, f)
WRAP(int, fsync, "sync", (int fd), fd)
WRAP(int, fdatasync, "sync", (int fd), fd)
WRAP(int, syncfs, "sync", (int fd), fd)
WRAP(int, sync_file_range, "sync", (int fd, off64_t at, off64_t size, unsigned f), fd, at, size, f)
WRAP(int, renameat, "rename", (int a, const char *x, int b, const char *y), a, x, b, y)
WRAP(int, renameat2, "rename", (int a, const char *x, int b, const char *y, unsigned f), a, x, b, y, f)
WRAP(int, mkdirat, "mkdir", (int fd, const char *path, mode_t mode), fd, path, mode)

int linkat(int a, const char *x, int b, const char *y, int f)
{
	static int (*real)(int, const char *, int, const char *, int);
	if (!real)
		*(void **)&real = dlsym(RTLD_NEXT, "linkat");
	if (due("link") == 1)
		return -1;
	if (f & AT_EMPTY_PATH && getenv("FAULT_NO_EMPTY_PATH")) {
		errno = ENOENT;
		return -1;
	}
	return real(a, x, b, y, f);
}

WRAP(int, symlinkat, "symlink", (const char *text, int fd, const char *path), text, fd, path)
WRAP(ssize_t, readlinkat, "readlink", (int fd, const char *path, char *data, size_t size), fd, path, data, size)
WRAP(int, unlinkat, "unlink", (int fd, const char *path, int flags), fd, path, flags)
WRAP(int, fchmod, "chmod", (int fd, mode_t mode), fd, mode)
WRAP(int, chmod, "unlock", (const char *path, mode_t mode), path, mode)
WRAP(int, fchmodat, "unlock", (int fd, const char *path, mode_t mode, int flags), fd, path, mode, flags)
WRAP(int, fchown, "chown", (int fd, uid_t uid, gid_t gid), fd, uid, gid)
WRAP(int, futimens, "utime", (int fd, const struct timespec times[2]), fd, times)
WRAP(int, fstat64, "stat", (int fd, struct stat64 *info), fd, info)
WRAP(int, statx, "stat", (int fd, const char *path, int flags, unsigned mask, struct statx *info), fd, path, flags, mask, info)
WRAP(int, fstatat64, "stat", (int fd, const char *path, struct stat64 *info, int flags), fd, path, info, flags)

struct dirent64 *readdir64(DIR *dir)
{
	static struct dirent64 *(*real)(DIR *);
	if (!real)
		*(void **)&real = dlsym(RTLD_NEXT, "readdir64");
	if (due("list") == 1) {
		errno = 0;
		return NULL;
	}
	struct dirent64 *entry = real(dir);
	if (entry && getenv("FAULT_NO_KINDS"))
		entry->d_type = DT_UNKNOWN;
	return entry;
}

WRAP(ssize_t, flistxattr, "xattr", (int fd, char *data, size_t size), fd, data, size)
WRAP(ssize_t, fgetxattr, "xattr", (int fd, const char *name, void *data, size_t size), fd, name, data, size)
WRAP(int, fsetxattr, "xattr", (int fd, const char *n, const void *d, size_t s, int f), fd, n, d, s, f)
WRAP(int, ftruncate64, "truncate", (int fd, off64_t size), fd, size)
WRAP(off64_t, lseek64, "seek", (int fd, off64_t at, int whence), fd, at, whence)
WRAP(int, close, "close", (int fd), fd)
