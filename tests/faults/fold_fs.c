/* A file system that passes everything on to a directory and takes names for the same that differ in case only. It keeps the
 * spelling that an entry was made with, as vfat, SMB and others do.
 *
 *     cc -O2 -o fold_fs fold_fs.c $(pkg-config --cflags --libs fuse3)
 *     FOLD_FS_BELOW=/data fold_fs -f /mnt
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

/* `path` as it is spelled below `root`, as far as it is there; in memory that is not used again for a while. */
static const char *spelled(const char *path)
{
	static __thread char memory[4][PATH_MAX];
	static __thread int turn;
	char *text = memory[turn++ % 4], *name;
	if (!path[1])
		return ".";
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

static int done(int result)
{
	return result < 0 ? -errno : 0;
}

static int fs_getattr(const char *path, struct stat *info, struct fuse_file_info *file)
{
	path = spelled(path);
	return done(file ? fstat((int)file->fh, info) : fstatat(root, path, info, AT_SYMLINK_NOFOLLOW));
}

static int fs_readlink(const char *path, char *text, size_t size)
{
	ssize_t length = readlinkat(root, spelled(path), text, size - 1);
	if (length < 0)
		return -errno;
	text[length] = '\0';
	return 0;
}

static int fs_readdir(const char *path, void *list, fuse_fill_dir_t fill, off_t at, struct fuse_file_info *file,
                      enum fuse_readdir_flags flags)
{
	int fd = openat(root, spelled(path), O_RDONLY | O_DIRECTORY);
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
	return opened(openat(root, spelled(path), file->flags & ~O_NOFOLLOW), file);
}

static int fs_create(const char *path, mode_t mode, struct fuse_file_info *file)
{
	return opened(openat(root, spelled(path), file->flags | O_CREAT, mode), file);
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
	(void)path;
	return done(data_only ? fdatasync((int)file->fh) : fsync((int)file->fh));
}

static int fs_mkdir(const char *path, mode_t mode)
{
	return done(mkdirat(root, spelled(path), mode));
}

static int fs_unlink(const char *path)
{
	return done(unlinkat(root, spelled(path), 0));
}

static int fs_rmdir(const char *path)
{
	return done(unlinkat(root, spelled(path), AT_REMOVEDIR));
}

static int fs_symlink(const char *text, const char *path)
{
	return done(symlinkat(text, root, spelled(path)));
}

static int fs_rename(const char *from, const char *to, unsigned int flags)
{
	return done(renameat2(root, spelled(from), root, spelled(to), flags));
}

static int fs_link(const char *from, const char *to)
{
	return done(linkat(root, spelled(from), root, spelled(to), 0));
}

static int fs_chmod(const char *path, mode_t mode, struct fuse_file_info *file)
{
	(void)file;
	return done(fchmodat(root, spelled(path), mode, 0));
}

static int fs_chown(const char *path, uid_t uid, gid_t gid, struct fuse_file_info *file)
{
	(void)file;
	return done(fchownat(root, spelled(path), uid, gid, AT_SYMLINK_NOFOLLOW));
}

static int fs_truncate(const char *path, off_t size, struct fuse_file_info *file)
{
	int fd = file ? (int)file->fh : openat(root, spelled(path), O_WRONLY), result;
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
	return done(utimensat(root, spelled(path), times, AT_SYMLINK_NOFOLLOW));
}

static void *fs_init(struct fuse_conn_info *connection, struct fuse_config *config)
{
	(void)connection;
	config->use_ino = 1;
	config->entry_timeout = config->attr_timeout = config->negative_timeout = 0;
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
	const char *below = getenv("FOLD_FS_BELOW");
	root = below ? open(below, O_RDONLY | O_DIRECTORY) : -1;
	if (root < 0) {
		perror("FOLD_FS_BELOW");
		return 1;
	}
	umask(0);
	return fuse_main(argc, argv, &operations, NULL);
}
