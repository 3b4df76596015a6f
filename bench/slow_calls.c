/* Adds CALL_DELAY_US microseconds to each metadata call: what a distant file server costs, for any program alike.
 *
 *     LD_PRELOAD=slow_calls.so CALL_DELAY_US=5000 CALL_DELAY_BELOW=/data rsync -a /data/a/ /data/b/
 *
 * Calls with an absolute path elsewhere (a program's own libraries) are left alone.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <unistd.h>

static useconds_t delay;
static const char *below = "/";

__attribute__((constructor)) static void read_delay(void)
{
	const char *text = getenv("CALL_DELAY_US");
	delay = text ? (useconds_t)strtoul(text, NULL, 10) : 0;
	if (getenv("CALL_DELAY_BELOW"))
		below = getenv("CALL_DELAY_BELOW");
}

static void wait_for(const char *path)
{
	if (path[0] != '/' || strncmp(path, below, strlen(below)) == 0)
		usleep(delay);
}

#define SLOW(type, name, subject, parameters, ...)                                                                             \
	type name parameters                                                                                           \
	{                                                                                                              \
		static type(*real) parameters;                                                                         \
		if (!real)                                                                                             \
			*(void **)&real = dlsym(RTLD_NEXT, #name);                                                     \
		wait_for(subject);                                                                                     \
		return real(__VA_ARGS__);                                                                              \
	}

#define SLOW_OPEN(name, subject, parameters, ...)                                                                              \
	int name parameters                                                                                            \
	{                                                                                                              \
		static int (*real) parameters;                                                                         \
		va_list list;                                                                                          \
		va_start(list, flags);                                                                                 \
		mode_t mode = va_arg(list, mode_t);                                                                    \
		va_end(list);                                                                                          \
		if (!real)                                                                                             \
			*(void **)&real = dlsym(RTLD_NEXT, #name);                                                     \
		wait_for(subject);                                                                                     \
		return real(__VA_ARGS__);                                                                              \
	}

SLOW_OPEN(open, path, (const char *path, int flags, ...), path, flags, mode)
SLOW_OPEN(open64, path, (const char *path, int flags, ...), path, flags, mode)
SLOW_OPEN(openat, path, (int fd, const char *path, int flags, ...), fd, path, flags, mode)
SLOW_OPEN(openat64, path, (int fd, const char *path, int flags, ...), fd, path, flags, mode)
SLOW(int, mkstemp, path, (char *path), path)
SLOW(int, mkstemp64, path, (char *path), path)
SLOW(int, stat, path, (const char *path, struct stat *info), path, info)
SLOW(int, lstat, path, (const char *path, struct stat *info), path, info)
SLOW(int, stat64, path, (const char *path, struct stat64 *info), path, info)
SLOW(int, lstat64, path, (const char *path, struct stat64 *info), path, info)
SLOW(int, fstatat, path, (int fd, const char *path, struct stat *info, int flags), fd, path, info, flags)
SLOW(int, fstatat64, path, (int fd, const char *path, struct stat64 *info, int flags), fd, path, info, flags)
SLOW(int, statx, path, (int fd, const char *path, int f, unsigned m, struct statx *info), fd, path, f, m, info)
SLOW(int, mkdir, path, (const char *path, mode_t mode), path, mode)
SLOW(int, mkdirat, path, (int fd, const char *path, mode_t mode), fd, path, mode)
SLOW(int, rename, x, (const char *x, const char *y), x, y)
SLOW(int, renameat, x, (int a, const char *x, int b, const char *y), a, x, b, y)
SLOW(int, unlinkat, path, (int fd, const char *path, int flags), fd, path, flags)
SLOW(int, chmod, path, (const char *path, mode_t mode), path, mode)
SLOW(int, fchmod, "", (int fd, mode_t mode), fd, mode)
SLOW(int, fchmodat, path, (int fd, const char *path, mode_t mode, int flags), fd, path, mode, flags)
SLOW(int, lchown, path, (const char *path, uid_t uid, gid_t gid), path, uid, gid)
SLOW(int, fchown, "", (int fd, uid_t uid, gid_t gid), fd, uid, gid)
SLOW(int, utimensat, path, (int fd, const char *path, const struct timespec times[2], int f), fd, path, times, f)
SLOW(int, futimens, "", (int fd, const struct timespec times[2]), fd, times)
SLOW(ssize_t, flistxattr, "", (int fd, char *data, size_t size), fd, data, size)
SLOW(ssize_t, readlinkat, path, (int fd, const char *path, char *data, size_t size), fd, path, data, size)
