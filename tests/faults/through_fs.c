/* A file system that passes everything on to a directory, made awkward as its environment says:
 *
 *     THROUGH_FS_BELOW=DIR      the directory
 *     THROUGH_FS_DELAY_US=5000  it sleeps before each metadata call: what a distant file server costs, whatever calls a
 *                               program makes and however it makes them
 *     THROUGH_FS_FOLD=1         names are the same that differ in case only; an entry keeps the spelling that it was
 *                               made with, as on vfat, SMB and others
 *
 *     cc -O2 -o through_fs through_fs.c $(pkg-config --cflags --libs fuse3)
 *     THROUGH_FS_BELOW=/data through_fs -f -o max_threads=128 /mnt
 *
 * The kernel keeps names and attributes for a second, as with any FUSE file system, but not where names fold. No extended
 * attributes.
 */
#define FUSE_USE_VERSION 31
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <fuse.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/stat.h>
#include <unistd.h>

static int root;
static useconds_t delay;
static int folds;

/* `path` as it is called from `root`, spelled as it is there as far as it is there; in memory that is not used again for a
 * while. */
static const char *below(const char *path)
{
	static __thread char memory[4][PATH_MAX];
	static __thread int turn;
	char *text = memory[turn++ % 4], *name;
	if (!path[1])
		return ".";
	if (!folds)
		return path + 1;
	snprintf(text, PATH_MAX, "%s", path + 1);
	for (name = text; name; name = strchr(name, '/') ? strchr(name, '/') + 1 : NULL) {
		size_t length = strcspn(name, "/");
		char above[PATH_MAX];
		snprintf(above, sizeof above, "%.*s", (int)(name - text), text);
		int fd = openat(root, *above ? above : ".", O_RDONLY | O_DIRECTORY);
		DIR *dir = fd < 0 ? NULL : fdopendir(fd);
		if (!dir)
			break;
		for (const struct dirent *entry; (entry = readdir(dir));)
			if (strlen(entry->d_name) == length && !strncasecmp(entry->d_name, name, length))
				memcpy(name, entry->d_name, length);
		closedir(dir);
	}
	return text;
}

/* The same, after the delay. */
static const char *slow(const char *path)
{
	usleep(delay);
	return below(path);
}

static int done(int result)
{
	return result < 0 ? -errno : 0;
}

static int fs_getattr(const char *path, struct stat *info, struct fuse_file_info *file)
{
	path = slow(path);
	return done(file ? fstat((int)file->fh, info) : fstatat(root, path, info, AT_SYMLINK_NOFOLLOW));
}

static int fs_readlink(const char *path, char *text, size_t size)
{
	ssize_t length = readlinkat(root, slow(path), text, size - 1);
	if (length < 0)
		return -errno;
	text[length] = '\0';
	return 0;
}

static int fs_readdir(const char *path, void *list, fuse_fill_dir_t fill, off_t at, struct fuse_file_info *file,
                      enum fuse_readdir_flags flags)
{
	int fd = openat(root, slow(path), O_RDONLY | O_DIRECTORY);
	DIR *dir = fd < 0 ? NULL : fdopendir(fd);
	(void)at;
	(void)file;
	(void)flags;
	if (!dir)
		return -errno;
	for (const struct dirent *entry; (entry = readdir(dir));) {
		const struct stat info = {.st_ino = entry->d_ino, .st_mode = (mode_t)DTTOIF(entry->d_type)};
		fill(list, entry->d_name, &info, 0, 0);
	}
	closedir(dir);
	return 0;
}

static int opened(int fd, struct fuse_file_info *file)
{
	file->fh = (uint64_t)fd;
	return done(fd);
}

static int fs_open(const char *path, struct fuse_file_info *file)
{
	return opened(openat(root, slow(path), file->flags & ~O_NOFOLLOW), file);
}

static int fs_create(const char *path, mode_t mode, struct fuse_file_info *file)
{
	return opened(openat(root, slow(path), file->flags | O_CREAT, mode), file);
}

static int fs_read(const char *path, char *data, size_t size, off_t at, struct fuse_file_info *file)
{
	ssize_t count = pread((int)file->fh, data, size, at);
	(void)path;
	return count < 0 ? -errno : (int)count;
}

static int fs_write(const char *path, const char *data, size_t size, off_t at, struct fuse_file_info *file)
{
	ssize_t count = pwrite((int)file->fh, data, size, at);
	(void)path;
	return count < 0 ? -errno : (int)count;
}

static int fs_release(const char *path, struct fuse_file_info *file)
{
	(void)path;
	return done(close((int)file->fh));
}

static int fs_fsync(const char *path, int data_only, struct fuse_file_info *file)
{
	(void)slow(path);
	return done(data_only ? fdatasync((int)file->fh) : fsync((int)file->fh));
}

static int fs_mkdir(const char *path, mode_t mode)
{
	return done(mkdirat(root, slow(path), mode));
}

static int fs_unlink(const char *path)
{
	return done(unlinkat(root, slow(path), 0));
}

static int fs_rmdir(const char *path)
{
	return done(unlinkat(root, slow(path), AT_REMOVEDIR));
}

static int fs_symlink(const char *text, const char *path)
{
	return done(symlinkat(text, root, slow(path)));
}

static int fs_rename(const char *from, const char *to, unsigned int flags)
{
	return done(renameat2(root, slow(from), root, below(to), flags));
}

static int fs_link(const char *from, const char *to)
{
	return done(linkat(root, slow(from), root, below(to), 0));
}

static int fs_chmod(const char *path, mode_t mode, struct fuse_file_info *file)
{
	(void)file;
	return done(fchmodat(root, slow(path), mode, 0));
}

static int fs_chown(const char *path, uid_t uid, gid_t gid, struct fuse_file_info *file)
{
	(void)file;
	return done(fchownat(root, slow(path), uid, gid, AT_SYMLINK_NOFOLLOW));
}

static int fs_truncate(const char *path, off_t size, struct fuse_file_info *file)
{
	int fd = file ? (int)file->fh : openat(root, slow(path), O_WRONLY), result;
	if (fd < 0)
		return -errno;
	result = done(ftruncate(fd, size));
	if (!file)
		close(fd);
	return result;
}

static int fs_utimens(const char *path, const struct timespec times[2], struct fuse_file_info *file)
{
	(void)file;
	return done(utimensat(root, slow(path), times, AT_SYMLINK_NOFOLLOW));
}

static void *fs_init(struct fuse_conn_info *connection, struct fuse_config *config)
{
	(void)connection;
	if (folds) {
		config->use_ino = 1;
		config->entry_timeout = config->attr_timeout = config->negative_timeout = 0;
	}
	return NULL;
}

static const struct fuse_operations operations = {
	.init = fs_init,
	.getattr = fs_getattr,   .readlink = fs_readlink, .readdir = fs_readdir, .open = fs_open,
	.create = fs_create,     .read = fs_read,         .write = fs_write,     .release = fs_release,
	.fsync = fs_fsync,       .mkdir = fs_mkdir,       .unlink = fs_unlink,   .rmdir = fs_rmdir,
	.symlink = fs_symlink,   .rename = fs_rename,     .link = fs_link,       .chmod = fs_chmod,
	.chown = fs_chown,       .truncate = fs_truncate, .utimens = fs_utimens,
};

int main(int argc, char **argv)
{
	const char *directory = getenv("THROUGH_FS_BELOW"), *text = getenv("THROUGH_FS_DELAY_US");
	delay = text ? (useconds_t)strtoul(text, NULL, 10) : 0;
	folds = getenv("THROUGH_FS_FOLD") != NULL;
	root = directory ? open(directory, O_RDONLY | O_DIRECTORY) : -1;
	if (root < 0) {
		perror("THROUGH_FS_BELOW");
		return 1;
	}
	umask(0);
	return fuse_main(argc, argv, &operations, NULL);
}
