/*
 * slurmstepd: give the tasks $BEEOND, or end them with the reason why there is none.
 *
 * Slurm forgives nothing here but task_init: a failure of init_post_opt or user_init drains the node. So files are
 * read early, as root, and whatever is wrong with them is only remembered; task_init, in the task itself, raises it.
 */
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "common.h"

#define ENV_MAX ((size_t)64 * 1024) /* a node list of ten thousand odd names fits */
#define FAILURE_MAX ((size_t)8 * 1024)

static const char *const names[] = { "BEEOND", "BEEOND_JOB_ID", "BEEOND_NODES" };

#define NAMES (sizeof(names) / sizeof(names[0]))

/* What task_init has to raise: text of our own, or the text that the Prolog left. Both NULL: nothing. */
static const char *verdict;
static char *failure;

void beeond_printable(char *text)
{
	for (; *text != '\0'; text++) {
		if ((unsigned char)*text < ' ' || *text == '\177')
			*text = '?';
	}
}

enum file_state { FILE_ABSENT, FILE_READ, FILE_UNFIT };

/*
 * Reads jobs/JOBID/NAME, which only root can have written. Of a file that is longer than `max` the beginning is
 * read and *cut set. `*text` has to be freed.
 */
static enum file_state read_file(const char *run_dir, uint32_t job, const char *name, size_t max, char **text,
				 bool *cut)
{
	char path[PATH_MAX];
	enum file_state state = FILE_UNFIT;
	struct stat st;
	size_t len = 0;
	ssize_t n;
	int fd = -1;

	*text = NULL;
	*cut = false;
	n = snprintf(path, sizeof(path), "%s/jobs/%u/%s", run_dir, job, name);
	if (n < 0 || (size_t)n >= sizeof(path)) {
		slurm_error("beeond: the path of %s is too long", name);
		goto out;
	}
	fd = open(path, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_NOCTTY | O_CLOEXEC);
	if (fd < 0) {
		if (errno == ENOENT)
			state = FILE_ABSENT;
		else
			slurm_error("beeond: cannot open %s: %s", path, strerror(errno));
		goto out;
	}
	if (fstat(fd, &st) < 0 || !S_ISREG(st.st_mode) || st.st_uid != 0 || (st.st_mode & (S_IWGRP | S_IWOTH)) != 0) {
		slurm_error("beeond: %s is not a regular file that only root can write; ignored", path);
		goto out;
	}
	*text = malloc(max + 2);
	if (*text == NULL) {
		slurm_error(BEEOND_NO_MEMORY);
		goto out;
	}
	while (len <= max) { /* one byte more than wanted, to see that there is more */
		n = read(fd, *text + len, max + 1 - len);
		if (n < 0 && errno == EINTR)
			continue;
		if (n < 0) {
			slurm_error("beeond: cannot read %s: %s", path, strerror(errno));
			goto out;
		}
		if (n == 0)
			break;
		len += (size_t)n;
	}
	*cut = len > max;
	(*text)[*cut ? max : len] = '\0';
	state = FILE_READ;
out:
	if (fd >= 0)
		(void)close(fd);
	if (state != FILE_READ) {
		free(*text);
		*text = NULL;
	}
	return state;
}

static void set_variable(spank_t sp, char *line)
{
	char *value = strchr(line, '=');

	if (value != NULL) {
		*value++ = '\0';
		for (size_t i = 0; i < NAMES; i++) {
			if (strcmp(line, names[i]) != 0)
				continue;
			if (spank_setenv(sp, names[i], value, 1) != ESPANK_SUCCESS)
				slurm_error("beeond: cannot set %s for the job", names[i]);
			return;
		}
	}
	beeond_printable(line);
	slurm_error("beeond: env: '%s' is none of the variables that a job gets", line);
}

/* Returns whether the job has an instance on this node. */
static bool load_env(spank_t sp, const char *run_dir, uint32_t job)
{
	char *text, *line, *rest = NULL;
	bool cut;

	if (read_file(run_dir, job, "env", ENV_MAX, &text, &cut) != FILE_READ)
		return false;
	if (cut) {
		slurm_error("beeond: the variables of job %u are too long; ignored", job);
		free(text);
		return false;
	}
	for (line = strtok_r(text, "\n", &rest); line != NULL; line = strtok_r(NULL, "\n", &rest))
		set_variable(sp, line);
	free(text);
	return true;
}

static void load_failure(const char *run_dir, uint32_t job)
{
	bool cut;

	switch (read_file(run_dir, job, "failure", FAILURE_MAX, &failure, &cut)) {
	case FILE_READ:
		verdict = failure[strspn(failure, "\n")] == '\0' ? "the instance could not be made" : failure;
		break;
	case FILE_UNFIT:
		verdict = "the instance could not be made, and the report of the reason cannot be read on this node";
		break;
	case FILE_ABSENT:
		break;
	}
}

static bool in_job_env(spank_t sp, const char *name)
{
	char first[2];
	spank_err_t rc = spank_getenv(sp, name, first, sizeof(first));

	return rc == ESPANK_SUCCESS || rc == ESPANK_NOSPACE;
}

/* slurm_bb_paths sets it for jobs with #BB_LUA directives. That of another job is inherited with --export=ALL. */
static bool has_directives(spank_t sp, uint32_t job)
{
	char found[16], wanted[16];

	(void)snprintf(wanted, sizeof(wanted), "%u", job);
	return spank_getenv(sp, "BEEOND_ASKED", found, sizeof(found)) == ESPANK_SUCCESS && strcmp(found, wanted) == 0;
}

void beeond_step_load(spank_t sp, int ac, char **av)
{
	struct beeond_args args = beeond_args_parse(ac, av);
	bool asked = beeond_options_asked()->len > 0;
	uint32_t job = 0;

	if (args.bad != NULL)
		slurm_error("beeond: plugstack.conf: argument '%s' is not understood, and ignored", args.bad);
	if (spank_get_item(sp, S_JOB_ID, &job) != ESPANK_SUCCESS) {
		slurm_error("beeond: Slurm does not tell the job's id");
		if (asked)
			verdict = "this node does not know which job it runs";
		return;
	}
	asked = asked || has_directives(sp, job);
	load_failure(args.run_dir, job);
	if (load_env(sp, args.run_dir, job))
		return;
	/* With --export=ALL, a job submitted from within a job comes with the variables of that one. */
	if (in_job_env(sp, "BEEOND_JOB_ID")) {
		for (size_t i = 0; i < NAMES; i++)
			(void)spank_unsetenv(sp, names[i]);
	}
	/* Options of one component of a heterogeneous job appear in the others too: they prove nothing there. */
	if (asked && verdict == NULL && !in_job_env(sp, "SLURM_HET_SIZE"))
		verdict = "this job asked for an instance, and there is none on this node; the cluster's administrator finds "
			  "the reason with `beeond-ctl check'";
}

int beeond_step_task_init(spank_t sp)
{
	const char *line = verdict;
	int task = 0;

	if (verdict == NULL)
		return 0;
	/* Every task fails, one of each node says why. The text is data, never a format. */
	if (spank_get_item(sp, S_TASK_ID, &task) != ESPANK_SUCCESS || task == 0) {
		while (*line != '\0') {
			size_t len = strcspn(line, "\n");
			char shown[FAILURE_MAX + 1];

			if (len > 0) {
				memcpy(shown, line, len);
				shown[len] = '\0';
				beeond_printable(shown);
				slurm_error("beeond: %s", shown);
			}
			line += len;
			line += *line == '\n';
		}
	}
	return -1;
}

void beeond_step_exit(void)
{
	free(failure);
	failure = NULL;
	verdict = NULL;
}
