/* What staging does to ordinary entries, thousands at a time, without the interpreter.
 *
 * An accelerator and nothing else: scan.py and copier.py can do all of it by themselves, and what is done here is done
 * by the same steps in the same order, but where a file gets its name last of all (NAMELESS) or first (DIRECT:
 * docs/staging.md says when). Whatever turns out not to be ordinary is left to them, as it was found: here nothing is
 * retried and no failure is explained. The only verdict given is that a file reads back differently.
 *
 * All calls go through libc's functions, so that tests can make each of them fail. No global state: any number of
 * threads may be in here, and none holds the interpreter's lock while it touches files.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <sys/types.h>
#include <sys/xattr.h>
#include <unistd.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

enum {
	SMALL = 1 << 20,   /* data.SMALL: bytes up to which a file is read in one go */
	WHOLE = 128 << 20, /* two of wire.PIECE: bytes up to which a file is copied by one copier */
	XATTR_NAMES = 8192,
	PROOF = 24,        /* see proof.py */
	TEMP_MAX = 200,
};

enum {
	WRITE = 1, PLACE = 2, VERIFY = 4, SYNC_EACH = 8, DROP_CACHE = 16, MADE = 32, LIVE = 64, NAMELESS = 128, DIRECT = 256,
	PRIVATE = 512, NO_REPLACE = 1024
};

/* Names with a NUL behind each. */
struct names {
	char *data;
	size_t length, room;
};

static int add_name(struct names *names, const char *name)
{
	size_t size = strlen(name) + 1;
	if (names->length + size > names->room) {
		size_t room = 2 * names->room + size + 4096;
		char *data = realloc(names->data, room);
		if (!data)
			return -1;
		names->data = data;
		names->room = room;
	}
	memcpy(names->data + names->length, name, size);
	names->length += size;
	return 0;
}

enum { SECOND = 1000000000 };

/* Whether a time is later than another, or the same. Nanoseconds since 1970 have no room in 64 bits after 2262. */
static int is_later(struct timespec one, struct timespec other)
{
	return one.tv_sec > other.tv_sec || (one.tv_sec == other.tv_sec && one.tv_nsec > other.tv_nsec);
}

static int is_equal(struct timespec one, struct timespec other)
{
	return one.tv_sec == other.tv_sec && one.tv_nsec == other.tv_nsec;
}

/* metadata.same_time: whether `kept` is `source` as a file system keeps it that has coarser clocks, or does not reach so
   far. */
static int same_time(struct timespec source, struct timespec kept)
{
	static const long grains[] = {1, 100, 1000, 1000000, SECOND};
	static const int64_t latest[] = {INT32_MAX, UINT32_MAX, 15032385535, 16299260424}, earliest[] = {0, INT32_MIN};
	for (size_t i = 0; i < sizeof grains / sizeof *grains; i++) {
		if (source.tv_sec == kept.tv_sec && source.tv_nsec - source.tv_nsec % grains[i] == kept.tv_nsec)
			return 1;
	}
	if (kept.tv_nsec != 0)
		return 0;
	for (size_t i = 0; i < sizeof latest / sizeof *latest; i++) {
		if (kept.tv_sec == latest[i] && is_later(source, kept))
			return 1;
	}
	for (size_t i = 0; i < sizeof earliest / sizeof *earliest; i++) {
		if (kept.tv_sec == earliest[i] && is_later(kept, source))
			return 1;
	}
	return 0;
}

/* --- fingerprints ------------------------------------------------------------------------------------------------ */

/* Room for what a fingerprint is made of (see proof.fingerprint): four numbers and the path. */
struct mark {
	char *text;
	size_t prefix;
};

enum { NUMBERS = 32 };

static int mark_init(struct mark *mark, const char *prefix, size_t length)
{
	mark->prefix = NUMBERS + length;
	mark->text = malloc(mark->prefix + NAME_MAX + 1);
	if (!mark->text)
		return -1;
	memcpy(mark->text + NUMBERS, prefix, length);
	return 0;
}

/* Nanoseconds since 1970, as many as 64 bits hold: proof.fingerprint cuts them off, too. */
static uint64_t low_ns(struct timespec time)
{
	return (uint64_t)time.tv_sec * SECOND + (uint64_t)time.tv_nsec;
}

static uint64_t mark_of(struct mark *mark, const char *name, const struct stat *info)
{
	uint64_t numbers[4] = {(uint64_t)info->st_size, low_ns(info->st_mtim), low_ns(info->st_ctim), info->st_ino};
	size_t length = strnlen(name, NAME_MAX);
	for (int i = 0; i < 4; i++) {
		for (int byte = 0; byte < 8; byte++)
			mark->text[8 * i + byte] = (char)(numbers[i] >> (8 * byte));
	}
	memcpy(mark->text + mark->prefix, name, length);
	return XXH3_64bits(mark->text, mark->prefix + length);
}

/* A set of fingerprints: open addressing, at most half full, 0 for an empty place. */
struct marks {
	uint64_t mask;
	uint64_t slots[];
};

static int has_mark(const struct marks *marks, uint64_t mark)
{
	mark = mark ? mark : 1;
	for (uint64_t at = mark & marks->mask; marks->slots[at]; at = (at + 1) & marks->mask) {
		if (marks->slots[at] == mark)
			return 1;
	}
	return 0;
}

static void add_mark(struct marks *marks, uint64_t mark)
{
	uint64_t at;
	mark = mark ? mark : 1;
	for (at = mark & marks->mask; marks->slots[at]; at = (at + 1) & marks->mask) {
		if (marks->slots[at] == mark)
			return;
	}
	marks->slots[at] = mark;
}

/* Room for `size` of them, all empty. Places are looked for at random: in large pages, where the system has them. To
 * find those takes it milliseconds, which a smaller set does not make up for. */
static struct marks *empty_marks(uint64_t size)
{
	enum { LARGE_PAGE = 2 << 20, LARGE = 32 << 20 };
	size_t length = sizeof(struct marks) + size * sizeof(uint64_t);
	void *memory;

	if (length < LARGE)
		return calloc(1, length);
	length = (length + LARGE_PAGE - 1) / LARGE_PAGE * LARGE_PAGE;
	if (posix_memalign(&memory, LARGE_PAGE, length))
		return NULL;
	madvise(memory, length, MADV_HUGEPAGE); /* or not: it is an advice */
	return memset(memory, 0, length);
}

static void free_marks(PyObject *capsule)
{
	free(PyCapsule_GetPointer(capsule, "marks"));
}

static PyObject *py_marks(PyObject *self, PyObject *args)
{
	Py_buffer data;
	struct marks *marks;
	uint64_t count, size = 16;
	PyObject *capsule;

	(void)self;
	if (!PyArg_ParseTuple(args, "y*:marks", &data))
		return NULL;
	count = (uint64_t)data.len / sizeof(uint64_t);
	while (size < 2 * count)
		size *= 2;
	marks = empty_marks(size);
	if (!marks) {
		PyBuffer_Release(&data);
		return PyErr_NoMemory();
	}
	marks->mask = size - 1;
	for (uint64_t i = 0; i < count; i++) {
		uint64_t mark;
		memcpy(&mark, (const char *)data.buf + i * sizeof mark, sizeof mark);
		add_mark(marks, mark);
	}
	PyBuffer_Release(&data);
	capsule = PyCapsule_New(marks, "marks", free_marks);
	if (!capsule)
		free(marks);
	return capsule;
}

static PyObject *py_has(PyObject *self, PyObject *args)
{
	PyObject *capsule;
	unsigned long long mark;
	const struct marks *marks;

	(void)self;
	if (!PyArg_ParseTuple(args, "OK:has", &capsule, &mark))
		return NULL;
	marks = PyCapsule_GetPointer(capsule, "marks");
	return marks ? PyBool_FromLong(has_mark(marks, mark)) : NULL;
}

/* --- scanning ---------------------------------------------------------------------------------------------------- */

static void free_dir(PyObject *capsule)
{
	closedir(PyCapsule_GetPointer(capsule, "dir"));
}

static PyObject *py_opendir(PyObject *self, PyObject *args)
{
	int fd, own;
	DIR *dir;
	PyObject *capsule;

	(void)self;
	if (!PyArg_ParseTuple(args, "i:opendir", &fd))
		return NULL;
	own = fcntl(fd, F_DUPFD_CLOEXEC, 0);
	dir = own < 0 ? NULL : fdopendir(own);
	if (!dir) {
		PyErr_SetFromErrno(PyExc_OSError);
		if (own >= 0)
			close(own);
		return NULL;
	}
	rewinddir(dir);
	capsule = PyCapsule_New(dir, "dir", free_dir);
	if (!capsule)
		closedir(dir);
	return capsule;
}

static PyObject *list_of(const struct names *names)
{
	PyObject *list = PyList_New(0);
	for (size_t at = 0; list && at < names->length; at += strlen(names->data + at) + 1) {
		PyObject *name = PyUnicode_DecodeFSDefault(names->data + at);
		if (!name || PyList_Append(list, name) < 0)
			Py_CLEAR(list);
		Py_XDECREF(name);
	}
	return list;
}

static PyObject *py_readdir(PyObject *self, PyObject *args)
{
	PyObject *capsule, *result = NULL;
	int limit, count, error = 0;
	struct names names = {0}, dirs = {0};
	DIR *dir;

	(void)self;
	if (!PyArg_ParseTuple(args, "Oi:readdir", &capsule, &limit))
		return NULL;
	dir = PyCapsule_GetPointer(capsule, "dir");
	if (!dir)
		return NULL;
	Py_BEGIN_ALLOW_THREADS
	for (count = 0; count < limit; count++) {
		const struct dirent *entry;
		errno = 0;
		entry = readdir(dir);
		if (!entry) {
			error = errno;
			break;
		}
		if (strcmp(entry->d_name, ".") == 0 || strcmp(entry->d_name, "..") == 0)
			continue;
		if (add_name(entry->d_type == DT_DIR ? &dirs : &names, entry->d_name) < 0) {
			error = ENOMEM;
			break;
		}
	}
	Py_END_ALLOW_THREADS
	if (error) {
		errno = error;
		PyErr_SetFromErrno(PyExc_OSError);
	} else {
		PyObject *below = list_of(&dirs);
		if (below)
			result = Py_BuildValue("(y#NO)", names.data ? names.data : "", (Py_ssize_t)names.length, below,
			                       count < limit ? Py_True : Py_False);
	}
	free(names.data);
	free(dirs.data);
	return result;
}

enum verdict { COPY, KEPT, OTHER };

/* portable.look: what the destination has under the name of an ordinary file. */
enum there { NOTHING, IF_PROVED, THE_SAME };

struct seen {
	const char *name;
	off_t size;
	enum verdict verdict;
	uint64_t mark;
	enum there there;
};

struct question {
	int source, target, update;
	const struct marks *marks;
	struct mark mark;
};

/* The status of an entry; `fresh` is what its server says, where there is one, whatever this node remembers (statx(2)):
 * what another node has changed a moment ago must not count as what is there. */
static int status(int dir, const char *name, int fresh, struct stat *info)
{
	struct statx found;

	if (!fresh)
		return fstatat(dir, name, info, AT_SYMLINK_NOFOLLOW);
	if (statx(dir, name, AT_SYMLINK_NOFOLLOW | AT_STATX_FORCE_SYNC, STATX_BASIC_STATS, &found) < 0)
		return -1;
	memset(info, 0, sizeof *info);
	info->st_mode = found.stx_mode;
	info->st_nlink = found.stx_nlink;
	info->st_size = (off_t)found.stx_size;
	info->st_ino = found.stx_ino;
	info->st_mtim = (struct timespec){.tv_sec = found.stx_mtime.tv_sec, .tv_nsec = found.stx_mtime.tv_nsec};
	info->st_ctim = (struct timespec){.tv_sec = found.stx_ctime.tv_sec, .tv_nsec = found.stx_ctime.tv_nsec};
	return 0;
}

/* Whether one entry is a file that one copier takes on, among others; its status is put into `info`. */
static int is_ordinary(const struct question *question, struct seen *seen, struct stat *info)
{
	if (status(question->source, seen->name, question->target >= 0, info) < 0)
		return 0;
	seen->size = info->st_size;
	return S_ISREG(info->st_mode) && info->st_nlink == 1 && info->st_size <= WHOLE;
}

/* What the destination has of it; -1 if that cannot be told. */
static int compare(const struct question *question, const char *name, const struct stat *info)
{
	struct stat there;

	if (status(question->target, name, 1, &there) < 0)
		return errno == ENOENT ? NOTHING : -1;
	if (!S_ISREG(there.st_mode) || there.st_size != info->st_size ||
	    !same_time(info->st_mtim, there.st_mtim))
		return NOTHING;
	return there.st_mode == info->st_mode ? THE_SAME : IF_PROVED;
}

/* Whether one entry is an ordinary file, and if so, whether the destination has it already. */
static enum verdict examine(struct question *question, struct seen *seen)
{
	struct stat info;
	int proved, there;

	if (!is_ordinary(question, seen, &info))
		return OTHER;
	if (question->target < 0)
		return COPY;
	proved = question->marks && has_mark(question->marks, mark_of(&question->mark, seen->name, &info));
	if (!proved && !question->update)
		return COPY;
	there = compare(question, seen->name, &info);
	if (there < 0)
		return OTHER;
	return there == THE_SAME || (there == IF_PROVED && proved) ? KEPT : COPY;
}

/* All that `examine` goes by. */
static enum verdict look(struct question *question, struct seen *seen)
{
	struct stat info;
	int there = NOTHING;

	if (!is_ordinary(question, seen, &info))
		return OTHER;
	seen->mark = mark_of(&question->mark, seen->name, &info);
	if (question->target >= 0)
		there = compare(question, seen->name, &info);
	if (there < 0)
		return OTHER;
	seen->there = (enum there)there;
	return COPY;
}

/* Both of all names, each with a NUL behind; NULL without memory. To be freed. */
static struct seen *each_of(struct question *question, enum verdict what(struct question *, struct seen *),
                            const char *names, Py_ssize_t length, size_t *count)
{
	struct seen *seen;
	size_t at = 0;

	*count = 0;
	for (Py_ssize_t i = 0; i < length; i++)
		*count += !names[i];
	seen = calloc(*count ? *count : 1, sizeof *seen);
	if (!seen)
		return NULL;
	Py_BEGIN_ALLOW_THREADS
	for (size_t i = 0; i < *count; i++) {
		seen[i].name = names + at;
		seen[i].verdict = what(question, &seen[i]);
		at += strlen(seen[i].name) + 1;
	}
	Py_END_ALLOW_THREADS
	return seen;
}

static PyObject *py_look(PyObject *self, PyObject *args)
{
	struct question question = {0};
	const char *names, *prefix;
	Py_ssize_t length, prefix_length;
	size_t count;
	PyObject *lists[5] = {0}, *result = NULL;
	struct seen *seen = NULL;
	int bad = 0;

	(void)self;
	if (!PyArg_ParseTuple(args, "iiy#y#:look", &question.source, &question.target, &names, &length, &prefix,
	                      &prefix_length))
		return NULL;
	if (mark_init(&question.mark, prefix, (size_t)prefix_length) < 0)
		return PyErr_NoMemory();
	seen = each_of(&question, look, names, length, &count);
	if (!seen) {
		PyErr_NoMemory();
		goto out;
	}
	for (size_t i = 0; i < 5; i++)
		bad |= !(lists[i] = PyList_New(0));
	for (size_t i = 0; !bad && i < count; i++) {
		int is_other = seen[i].verdict == OTHER;
		PyObject *values[] = {
			is_other ? NULL : PyUnicode_DecodeFSDefault(seen[i].name),
			is_other ? NULL : PyLong_FromLongLong(seen[i].size),
			is_other ? PyUnicode_DecodeFSDefault(seen[i].name) : NULL,
			is_other ? NULL : PyLong_FromUnsignedLongLong(seen[i].mark),
			is_other ? NULL : PyLong_FromLong(seen[i].there),
		};
		for (size_t k = 0; k < 5; k++) {
			if (is_other == (k == 2))
				bad |= !values[k] || PyList_Append(lists[k], values[k]) < 0;
			Py_XDECREF(values[k]);
		}
	}
	if (!bad)
		result = Py_BuildValue("(OOOOO)", lists[0], lists[1], lists[2], lists[3], lists[4]);
out:
	for (size_t i = 0; i < 5; i++)
		Py_XDECREF(lists[i]);
	free(question.mark.text);
	free(seen);
	return result;
}

static PyObject *py_examine(PyObject *self, PyObject *args)
{
	struct question question = {0};
	const char *names, *prefix;
	Py_ssize_t length, prefix_length;
	size_t count, kept = 0;
	PyObject *capsule, *files = NULL, *sizes = NULL, *others = NULL, *result = NULL;
	struct seen *seen;

	(void)self;
	if (!PyArg_ParseTuple(args, "iiy#y#Op:examine", &question.source, &question.target, &names, &length, &prefix,
	                      &prefix_length, &capsule, &question.update))
		return NULL;
	if (capsule != Py_None) {
		question.marks = PyCapsule_GetPointer(capsule, "marks");
		if (!question.marks)
			return NULL;
	}
	if (mark_init(&question.mark, prefix, (size_t)prefix_length) < 0)
		return PyErr_NoMemory();
	seen = each_of(&question, examine, names, length, &count);
	if (!seen) {
		free(question.mark.text);
		return PyErr_NoMemory();
	}
	files = PyList_New(0);
	sizes = PyList_New(0);
	others = PyList_New(0);
	for (size_t i = 0; files && sizes && others && i < count; i++) {
		PyObject *name, *size;
		int bad;
		if (seen[i].verdict == KEPT) {
			kept++;
			continue;
		}
		name = PyUnicode_DecodeFSDefault(seen[i].name);
		size = PyLong_FromLongLong(seen[i].size);
		bad = !name || !size || PyList_Append(seen[i].verdict == COPY ? files : others, name) < 0 ||
		      (seen[i].verdict == COPY && PyList_Append(sizes, size) < 0);
		Py_XDECREF(name);
		Py_XDECREF(size);
		if (bad)
			goto out;
	}
	if (files && sizes && others)
		result = Py_BuildValue("(nOOO)", (Py_ssize_t)kept, files, sizes, others);
out:
	Py_XDECREF(files);
	Py_XDECREF(sizes);
	Py_XDECREF(others);
	free(question.mark.text);
	free(seen);
	return result;
}

/* --- copying ----------------------------------------------------------------------------------------------------- */

enum state { UNTOUCHED, WRITTEN, PLACED, MISMATCH };

struct file {
	struct stat info;
	XXH128_canonical_t digest;
	enum state state;
};

struct batch {
	int source, target, flags, by_proc;
	uid_t me;
	gid_t gid; /* that new files get in this directory; -1: not known yet */
	const char *temp;
	size_t first;
	struct timespec quiet;
	char *data; /* SMALL + 1 bytes */
	struct mark mark;
};

static void temp_name(const struct batch *batch, size_t index, char name[TEMP_MAX + 32])
{
	snprintf(name, TEMP_MAX + 32, "%s%zu", batch->temp, batch->first + index);
}

/* Whether there are attributes that are the user's to keep; -1 when that cannot be told. */
static int has_attributes(int fd)
{
	char names[XATTR_NAMES];
	ssize_t length = flistxattr(fd, names, sizeof names);
	if (length < 0)
		return errno == EOPNOTSUPP || errno == ENOSYS ? 0 : -1;
	for (ssize_t at = 0; at < length; at += (ssize_t)strlen(names + at) + 1) {
		if (strncmp(names + at, "user.", 5) == 0 || strcmp(names + at, "system.posix_acl_access") == 0 ||
		    strcmp(names + at, "system.posix_acl_default") == 0)
			return 1;
	}
	return 0;
}

/* All of a file of `size` bytes; -1 when it has not exactly as many, or cannot be read. */
static int read_all(int fd, char *data, size_t size)
{
	size_t have = 0;
	for (;;) {
		ssize_t count = read(fd, data + have, size + 1 - have);
		if (count < 0)
			return -1;
		have += (size_t)count;
		if (!count || have > size)
			return have == size ? 0 : -1;
		if (have == size && (size_t)count == size)
			return 0; /* as hash_small in data.py: one call for a file that has not grown */
	}
}

static int write_all(int fd, const char *data, size_t size)
{
	while (size) {
		ssize_t count = write(fd, data, size);
		if (count < 0)
			return -1;
		data += count;
		size -= (size_t)count;
	}
	return 0;
}

static int same(const struct stat *one, const struct stat *other)
{
	return one->st_size == other->st_size && is_equal(one->st_mtim, other->st_mtim) &&
	       is_equal(one->st_ctim, other->st_ctim);
}

/* Owner and mode as metadata.copy_metadata gives them to a file without attributes. `has`: the mode that it has, or -1. */
static int give_owner(struct batch *batch, int target, const struct stat *info, mode_t has)
{
	mode_t mode = info->st_mode & 07777;
	gid_t gid = batch->gid;

	if (gid == (gid_t)-1) {
		struct stat there;
		if (fstat(target, &there) < 0)
			return -1;
		gid = batch->gid = there.st_gid;
	}
	if (batch->me == 0) {
		if ((gid != info->st_gid || info->st_uid != 0) && fchown(target, info->st_uid, info->st_gid) < 0)
			return -1;
	} else {
		if (gid != info->st_gid && fchown(target, (uid_t)-1, info->st_gid) < 0) {
			if (errno != EPERM && errno != EACCES)
				return -1;
			mode &= ~(mode_t)S_ISGID;
		}
		if (info->st_uid != batch->me)
			mode &= ~(mode_t)S_ISUID;
	}
	return mode == has ? 0 : fchmod(target, mode);
}

static int give_times(int target, const struct stat *info)
{
	const struct timespec times[2] = {info->st_atim, info->st_mtim};
	return futimens(target, times);
}

/* The data of an open source into an open, empty target. */
static int fill(struct batch *batch, int source, int target, struct file *file)
{
	size_t size = (size_t)file->info.st_size;

	if (read_all(source, batch->data, size) < 0 || write_all(target, batch->data, size) < 0)
		return -1;
	if (batch->flags & VERIFY)
		XXH128_canonicalFromHash(&file->digest, XXH3_128bits(batch->data, size));
	return 0;
}

/* Whether the source is what it was when its copy began; then the copy is synced, where each is. */
static int conclude(const struct batch *batch, int source, int target, const struct file *file)
{
	struct stat after;

	if (fstat(source, &after) < 0 || !same(&file->info, &after))
		return -1;
	return batch->flags & SYNC_EACH ? fsync(target) : 0;
}

/* Write out dirty pages. On a device of this machine without the journal: here nothing has to survive a crash. */
static int write_out(int source, const struct stat *info)
{
	const unsigned all = SYNC_FILE_RANGE_WAIT_BEFORE | SYNC_FILE_RANGE_WRITE | SYNC_FILE_RANGE_WAIT_AFTER;

	return major(info->st_dev) ? sync_file_range(source, 0, 0, all) : fdatasync(source);
}

/* Whether whatever is written from now on changes the file's times; see quiet.py, and _settle in copier.py. */
static int is_settled(const struct batch *batch, int source, const struct stat *info)
{
	return !is_later(info->st_mtim, batch->quiet) && !is_later(info->st_ctim, batch->quiet) &&
	       write_out(source, info) == 0;
}

/* Whether what is open for reading has the size and the contents that were written; WRITTEN if so. */
static enum state read_back(const struct batch *batch, int fd, const struct file *file)
{
	XXH128_canonical_t digest;
	size_t size = (size_t)file->info.st_size;

	if (read_all(fd, batch->data, size) < 0)
		return UNTOUCHED;
	XXH128_canonicalFromHash(&digest, XXH3_128bits(batch->data, size));
	return memcmp(&digest, &file->digest, sizeof digest) == 0 ? WRITTEN : MISMATCH;
}

static int is_kept(const struct stat *there, const struct stat *info)
{
	return there->st_size == info->st_size && same_time(info->st_mtim, there->st_mtim);
}

/* The same, and the mode, where that was not set but asked for. */
static int is_as_written(const struct batch *batch, const struct stat *there, const struct stat *info)
{
	return is_kept(there, info) && (!(batch->flags & DIRECT) || (there->st_mode & 0777) == (info->st_mode & 0777));
}

/* A name for an open file without one. */
static int give_name(struct batch *batch, int target, const char *name)
{
	char path[64];

	if (!batch->by_proc) {
		if (linkat(target, "", batch->target, name, AT_EMPTY_PATH) == 0)
			return 0;
		if (errno != ENOENT)
			return -1;
		batch->by_proc = 1; /* before Linux 6.10 that is for root alone */
	}
	snprintf(path, sizeof path, "/proc/self/fd/%d", target);
	return linkat(AT_FDCWD, path, batch->target, name, AT_SYMLINK_FOLLOW);
}

/* The whole way of a file that has no name before it is proved, and leaves nothing when it is not. */
static enum state copy_nameless(struct batch *batch, const char *name, struct file *file, int source, int target)
{
	struct stat there;
	enum state state = UNTOUCHED;

	if (fill(batch, source, target, file) < 0)
		return state;
	if (batch->flags & VERIFY) {
		if (lseek(target, 0, SEEK_SET) < 0)
			return state;
		state = read_back(batch, target, file);
		if (state != WRITTEN)
			return state;
	}
	if (give_times(target, &file->info) < 0 || fstat(target, &there) < 0 || !is_kept(&there, &file->info))
		return UNTOUCHED;
	if (batch->gid == (gid_t)-1)
		batch->gid = there.st_gid;
	if (give_owner(batch, target, &file->info, there.st_mode & 07777) < 0 ||
	    conclude(batch, source, target, file) < 0)
		return UNTOUCHED;
	if (give_name(batch, target, name) == 0)
		return PLACED;
	if (errno != EEXIST)
		batch->flags &= ~NAMELESS; /* not once more for each of them */
	return UNTOUCHED;
}

/* An open file without a name, where the name it is for is free; -1 where there is no such thing. */
static int make_nameless(struct batch *batch, const char *name, mode_t mode)
{
	struct stat there;
	int fd, how = batch->flags & VERIFY ? O_RDWR : O_WRONLY;

	if (!(batch->flags & MADE) && (fstatat(batch->target, name, &there, AT_SYMLINK_NOFOLLOW) == 0 || errno != ENOENT))
		return -1;
	fd = openat(batch->target, ".", how | O_TMPFILE | O_CLOEXEC, mode & 0777);
	if (fd < 0)
		batch->flags &= ~NAMELESS;
	return fd;
}

static void write_one(struct batch *batch, const char *name, struct file *file, const char *temp)
{
	int done = -1, target = -1;
	mode_t mode;
	int source = openat(batch->source, name, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);

	if (source < 0)
		return;
	if (fstat(source, &file->info) < 0 || !S_ISREG(file->info.st_mode) || file->info.st_size > SMALL ||
	    file->info.st_blocks * 512 < file->info.st_size || has_attributes(source) ||
	    (batch->flags & LIVE && !is_settled(batch, source, &file->info))) {
		close(source);
		return;
	}
	if (batch->flags & NAMELESS && batch->flags & PLACE)
		target = make_nameless(batch, name, file->info.st_mode);
	if (target >= 0) {
		file->state = copy_nameless(batch, name, file, source, target);
		close(target);
		close(source);
		return;
	}
	/* Under its own name it has its mode from the start: a call less. */
	mode = batch->flags & DIRECT ? 0600 | (file->info.st_mode & 0777) : 0600;
	target = openat(batch->target, temp, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, mode);
	if (target >= 0) {
		if (fill(batch, source, target, file) == 0 &&
		    give_owner(batch, target, &file->info, batch->flags & DIRECT ? mode : (mode_t)-1) == 0 &&
		    give_times(target, &file->info) == 0)
			done = conclude(batch, source, target, file);
		if (close(target) < 0) /* NFS and FUSE may report a full disk only here */
			done = -1;
		if (done < 0)
			unlinkat(batch->target, temp, 0);
		else
			file->state = WRITTEN;
	}
	close(source);
}

/* Read back what was written and compare. */
static enum state prove(const struct batch *batch, const struct file *file, const char *temp)
{
	struct stat there;
	enum state state = UNTOUCHED;
	const int how = O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC;
	int fd = openat(batch->target, temp, how | O_NOATIME); /* its times have been set */

	if (fd < 0 && errno == EPERM)
		fd = openat(batch->target, temp, how);
	if (fd < 0)
		return state;
	if (batch->flags & DROP_CACHE)
		posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
	if (fstat(fd, &there) == 0 && is_as_written(batch, &there, &file->info))
		state = read_back(batch, fd, file);
	close(fd);
	return state;
}

/* The name of a proved file. One that is newer than what replaces it has to be kept under another name, and what holds no
   data, as a device, is in the way: not for us. */
static enum state put(const struct batch *batch, const char *temp, const char *name, const struct file *file)
{
	struct stat there;

	if (!(batch->flags & MADE && batch->flags & PRIVATE)) {
		if (batch->flags & MADE && batch->flags & NO_REPLACE &&
		    renameat2(batch->target, temp, batch->target, name, RENAME_NOREPLACE) == 0)
			return PLACED;
		if (fstatat(batch->target, name, &there, AT_SYMLINK_NOFOLLOW) < 0) {
			if (errno != ENOENT)
				return UNTOUCHED;
		} else if (S_ISREG(there.st_mode) ? is_later(there.st_mtim, file->info.st_mtim) : !S_ISLNK(there.st_mode)) {
			return UNTOUCHED;
		}
	}
	return renameat(batch->target, temp, batch->target, name) < 0 ? UNTOUCHED : PLACED;
}

static void place_one(const struct batch *batch, const char *name, struct file *file, const char *temp)
{
	struct stat there;

	if (batch->flags & VERIFY) {
		file->state = prove(batch, file, temp);
	} else if (fstatat(batch->target, temp, &there, AT_SYMLINK_NOFOLLOW) < 0 ||
	           !is_as_written(batch, &there, &file->info)) {
		file->state = UNTOUCHED;
	}
	if (file->state == WRITTEN && batch->flags & DIRECT) {
		file->state = PLACED;
		return;
	}
	if (file->state == WRITTEN)
		file->state = put(batch, temp, name, file);
	if (file->state != PLACED)
		unlinkat(batch->target, temp, 0);
}

static void work(struct batch *batch, const char *name, struct file *files, size_t count)
{
	for (size_t i = 0; i < count; i++, name += strlen(name) + 1) {
		char made[TEMP_MAX + 32];
		const char *temp = batch->flags & DIRECT ? name : made;
		temp_name(batch, i, made);
		if (batch->flags & WRITE)
			write_one(batch, name, &files[i], temp);
		if (batch->flags & PLACE && files[i].state == WRITTEN)
			place_one(batch, name, &files[i], temp);
	}
}

static int encode(PyObject *list, struct names *names, size_t *count)
{
	Py_ssize_t size = PyList_Size(list);
	if (size < 0)
		return -1;
	for (Py_ssize_t i = 0; i < size; i++) {
		PyObject *item = PyList_GetItem(list, i), *bytes = NULL;
		char *text;
		int bad = !item || !PyUnicode_FSConverter(item, &bytes);
		if (!bad) {
			text = PyBytes_AsString(bytes);
			bad = !text || add_name(names, text) < 0;
			Py_DECREF(bytes);
		}
		if (bad) {
			if (!PyErr_Occurred())
				PyErr_NoMemory();
			return -1;
		}
	}
	*count = (size_t)size;
	return 0;
}

/* What became of a batch: proofs, bytes, the names left to others, those that read back differently. */
static PyObject *outcome(struct batch *batch, const struct names *names, const struct file *files, size_t count)
{
	PyObject *left = PyList_New(0), *different = PyList_New(0), *result = NULL;
	char *proofs = malloc(PROOF * count + 1);
	const char *name = names->data;
	size_t placed = 0, written = 0;
	unsigned long long bytes = 0;

	if (!proofs)
		PyErr_NoMemory();
	for (size_t i = 0; proofs && left && different && i < count; i++, name += strlen(name) + 1) {
		if (files[i].state == PLACED) {
			uint64_t mark = mark_of(&batch->mark, name, &files[i].info);
			for (int byte = 0; byte < 8; byte++)
				proofs[PROOF * placed + (size_t)byte] = (char)(mark >> (8 * byte));
			memcpy(proofs + PROOF * placed + 8, &files[i].digest, sizeof files[i].digest);
			placed++;
			bytes += (unsigned long long)files[i].info.st_size;
		} else if (files[i].state == WRITTEN) {
			written++;
		} else {
			PyObject *index = PyLong_FromSize_t(i);
			int bad = !index || PyList_Append(files[i].state == MISMATCH ? different : left, index) < 0;
			Py_XDECREF(index);
			if (bad)
				goto out;
		}
	}
	if (proofs && left && different) {
		/* What is only written waits for its sync: the caller brings these back. */
		result = Py_BuildValue("(y#KOOy#)", proofs, (Py_ssize_t)(PROOF * placed), bytes, left, different,
		                       (const char *)files, (Py_ssize_t)(written ? count * sizeof *files : 0));
	}
out:
	free(proofs);
	Py_XDECREF(left);
	Py_XDECREF(different);
	return result;
}

static struct timespec time_of(long long ns)
{
	long long rest = ns % SECOND;

	rest += rest < 0 ? SECOND : 0; /* one before 1970, too, is so much after a second */
	return (struct timespec){.tv_sec = (ns - rest) / SECOND, .tv_nsec = (long)rest};
}

static PyObject *py_copy(PyObject *self, PyObject *args)
{
	struct batch batch = {0};
	struct names names = {0};
	struct file *files = NULL;
	PyObject *list, *result = NULL;
	const char *prefix, *before;
	Py_ssize_t prefix_length, before_length, first;
	long long gid, quiet;
	size_t count = 0;

	(void)self;
	if (!PyArg_ParseTuple(args, "iiOy#snLiy#L:copy", &batch.source, &batch.target, &list, &prefix, &prefix_length,
	                      &batch.temp, &first, &gid, &batch.flags, &before, &before_length,
	                      &quiet))
		return NULL;
	if (strlen(batch.temp) > TEMP_MAX) {
		PyErr_SetString(PyExc_ValueError, "the temporary name is too long");
		return NULL;
	}
	batch.first = (size_t)first;
	batch.gid = (gid_t)gid;
	batch.quiet = time_of(quiet);
	batch.me = geteuid();
	if (encode(list, &names, &count) < 0)
		goto out;
	if (before_length && (size_t)before_length != count * sizeof *files) {
		PyErr_SetString(PyExc_ValueError, "these are not the files that were written");
		goto out;
	}
	files = calloc(count ? count : 1, sizeof *files);
	batch.data = malloc(SMALL + 1);
	if (!files || !batch.data || mark_init(&batch.mark, prefix, (size_t)prefix_length) < 0) {
		PyErr_NoMemory();
		goto out;
	}
	if (before_length)
		memcpy(files, before, (size_t)before_length);
	Py_BEGIN_ALLOW_THREADS
	work(&batch, names.data, files, count);
	Py_END_ALLOW_THREADS
	result = outcome(&batch, &names, files, count);
out:
	free(batch.mark.text);
	free(batch.data);
	free(files);
	free(names.data);
	return result;
}

static PyObject *py_put_new(PyObject *self, PyObject *args)
{
	int directory, done;
	const char *temp, *name;

	(void)self;
	if (!PyArg_ParseTuple(args, "iyy:put_new", &directory, &temp, &name))
		return NULL;
	Py_BEGIN_ALLOW_THREADS
	done = renameat2(directory, temp, directory, name, RENAME_NOREPLACE) == 0;
	Py_END_ALLOW_THREADS
	return PyBool_FromLong(done);
}

/* --- the process ------------------------------------------------------------------------------------------------- */

static PyObject *py_harden(PyObject *self, PyObject *args)
{
	(void)self;
	(void)args;
	if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) < 0 || prctl(PR_SET_DUMPABLE, 0, 0, 0, 0) < 0)
		return PyErr_SetFromErrno(PyExc_OSError);
	Py_RETURN_NONE;
}

/* --- the module -------------------------------------------------------------------------------------------------- */

static PyMethodDef methods[] = {
	{"harden", py_harden, METH_NOARGS, "Give up what is left of privileges, and let nobody look into this process."},
	{"marks", py_marks, METH_VARARGS, "The set of the fingerprints in a buffer of 64-bit numbers."},
	{"has", py_has, METH_VARARGS, "Whether a set has a fingerprint."},
	{"opendir", py_opendir, METH_VARARGS, "A directory to read, from a descriptor that stays the caller's."},
	{"readdir", py_readdir, METH_VARARGS, "Some entries: names that are no directories, directories, whether that was all."},
	{"examine", py_examine, METH_VARARGS, "What is to be done with names of one directory."},
	{"look", py_look, METH_VARARGS, "The same for somebody else who knows what is proved."},
	{"put_new", py_put_new, METH_VARARGS, "Give what has one name another one, if that is free."},
	{"copy", py_copy, METH_VARARGS, "Copy ordinary files of one directory."},
	{NULL, NULL, 0, NULL},
};

static int add_constants(PyObject *made)
{
	return PyModule_AddIntMacro(made, WRITE) < 0 || PyModule_AddIntMacro(made, PLACE) < 0 ||
	                       PyModule_AddIntMacro(made, VERIFY) < 0 || PyModule_AddIntMacro(made, SYNC_EACH) < 0 ||
	                       PyModule_AddIntMacro(made, DROP_CACHE) < 0 || PyModule_AddIntMacro(made, MADE) < 0 ||
	                       PyModule_AddIntMacro(made, LIVE) < 0 ||
	                       PyModule_AddIntMacro(made, NAMELESS) < 0 || PyModule_AddIntMacro(made, DIRECT) < 0 ||
	                       PyModule_AddIntMacro(made, PRIVATE) < 0 || PyModule_AddIntMacro(made, NO_REPLACE) < 0
	               ? -1
	               : 0;
}

static PyModuleDef_Slot slots[] = {{Py_mod_exec, (void *)add_constants}, {0, NULL}};

static struct PyModuleDef module = {
	PyModuleDef_HEAD_INIT, "_native", "Staging's ordinary work without the interpreter.", 0, methods, slots, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__native(void);

PyMODINIT_FUNC PyInit__native(void)
{
	return PyModuleDef_Init(&module);
}
