/*
 * The plugin against a stand-in for Slurm, under valgrind: what it does in every context, with every answer of the
 * controller, and with every allocation failing once. Each CHECK is a statement about the plugin.
 */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "common.h"

#define CHECK(statement) check((statement), #statement, __LINE__)

static int checks;

static void check(bool holds, const char *statement, int line)
{
	checks++;
	if (holds)
		return;
	fprintf(stderr, "check.c:%d: not so: %s\n", line, statement);
	exit(1);
}

/* --- memory and files, as bad as they can be -------------------------------------------------------------- */

void *__real_malloc(size_t size);
void *__real_realloc(void *old, size_t size);
int __real_fstat(int fd, struct stat *st);
void *__wrap_malloc(size_t size);
void *__wrap_realloc(void *old, size_t size);
int __wrap_fstat(int fd, struct stat *st);

static int fail_allocation; /* 1: the next one, 0: none */
static uid_t owner;

static bool allocation_fails(void)
{
	if (fail_allocation == 0 || --fail_allocation > 0)
		return false;
	errno = ENOMEM;
	return true;
}

void *__wrap_malloc(size_t size)
{
	return allocation_fails() ? NULL : __real_malloc(size);
}

void *__wrap_realloc(void *old, size_t size)
{
	return allocation_fails() ? NULL : __real_realloc(old, size);
}

int __wrap_fstat(int fd, struct stat *st)
{
	int rv = __real_fstat(fd, st);

	st->st_uid = owner;
	return rv;
}

/* --- Slurm ------------------------------------------------------------------------------------------------ */

static struct {
	spank_context_t context;
	struct spank_option *options[8];
	int option_count;
	char messages[32768];
	char *request;
	char job_env[8][256]; /* NAME=VALUE */
	int task;
	bool no_job_id;
} slurm;

spank_context_t spank_context(void)
{
	return slurm.context;
}

__attribute__((format(printf, 1, 0))) static void say(const char *format, va_list ap)
{
	size_t len = strlen(slurm.messages);

	(void)vsnprintf(slurm.messages + len, sizeof(slurm.messages) - len, format, ap);
	(void)strncat(slurm.messages, "\n", sizeof(slurm.messages) - strlen(slurm.messages) - 1);
}

void slurm_error(const char *format, ...)
{
	va_list ap;

	va_start(ap, format);
	say(format, ap);
	va_end(ap);
}

void slurm_info(const char *format, ...)
{
	va_list ap;

	va_start(ap, format);
	say(format, ap);
	va_end(ap);
}

spank_err_t spank_option_register(spank_t sp, struct spank_option *opt)
{
	(void)sp;
	slurm.options[slurm.option_count++] = opt;
	return ESPANK_SUCCESS;
}

spank_err_t spank_job_control_setenv(spank_t sp, const char *name, const char *value, int overwrite)
{
	(void)sp;
	CHECK(strcmp(name, "BEEOND_REQUEST") == 0 && overwrite == 1);
	free(slurm.request);
	slurm.request = __real_malloc(strlen(value) + 1);
	strcpy(slurm.request, value);
	return ESPANK_SUCCESS;
}

spank_err_t spank_job_control_unsetenv(spank_t sp, const char *name)
{
	(void)sp;
	if (strcmp(name, "BEEOND_REQUEST") == 0) {
		free(slurm.request);
		slurm.request = NULL;
	}
	return ESPANK_SUCCESS;
}

static char *job_variable(const char *name)
{
	size_t len = strlen(name);

	for (int i = 0; i < 8; i++) {
		if (strncmp(slurm.job_env[i], name, len) == 0 && slurm.job_env[i][len] == '=')
			return slurm.job_env[i];
	}
	return NULL;
}

static bool job_has(const char *variable)
{
	for (int i = 0; i < 8; i++) {
		if (strcmp(slurm.job_env[i], variable) == 0)
			return true;
	}
	return false;
}

spank_err_t spank_getenv(spank_t sp, const char *name, char *buf, int len)
{
	char *variable = job_variable(name);

	(void)sp;
	if (variable == NULL)
		return ESPANK_ENV_NOEXIST;
	return snprintf(buf, (size_t)len, "%s", variable + strlen(name) + 1) < len ? ESPANK_SUCCESS : ESPANK_NOSPACE;
}

spank_err_t spank_unsetenv(spank_t sp, const char *name)
{
	char *variable = job_variable(name);

	(void)sp;
	if (variable != NULL)
		*variable = '\0';
	return ESPANK_SUCCESS;
}

spank_err_t spank_setenv(spank_t sp, const char *name, const char *value, int overwrite)
{
	CHECK(overwrite == 1);
	(void)spank_unsetenv(sp, name);
	for (int i = 0; i < 8; i++) {
		if (slurm.job_env[i][0] == '\0') {
			(void)snprintf(slurm.job_env[i], sizeof(slurm.job_env[i]), "%s=%s", name, value);
			return ESPANK_SUCCESS;
		}
	}
	return ESPANK_ERROR;
}

spank_err_t spank_get_item(spank_t sp, spank_item_t item, ...)
{
	va_list ap;

	(void)sp;
	va_start(ap, item);
	if (item == S_JOB_ID)
		*va_arg(ap, uint32_t *) = 42;
	else if (item == S_TASK_ID)
		*va_arg(ap, int *) = slurm.task;
	else
		CHECK(!"an item that the plugin needs");
	va_end(ap);
	return item == S_JOB_ID && slurm.no_job_id ? ESPANK_ERROR : ESPANK_SUCCESS;
}

int slurm_spank_init(spank_t sp, int ac, char **av);
int slurm_spank_init_post_opt(spank_t sp, int ac, char **av);
int slurm_spank_task_init(spank_t sp, int ac, char **av);
int slurm_spank_exit(spank_t sp, int ac, char **av);

/* --- helpers ---------------------------------------------------------------------------------------------- */

static char dir[] = "/tmp/beeond-check.XXXXXX";
static char controller_arg[128], run_arg[128];
static char *args[] = { controller_arg, run_arg, NULL };

static const char *in_dir(const char *name)
{
	static char path[256];

	(void)snprintf(path, sizeof(path), "%s/%s", dir, name);
	return path;
}

static void put(const char *name, const void *data, size_t len, mode_t mode)
{
	int fd;

	(void)unlink(in_dir(name));
	fd = open(in_dir(name), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, mode);
	CHECK(fd >= 0 && write(fd, data, len) == (ssize_t)len && fchmod(fd, mode) == 0);
	(void)close(fd);
}

static void put_text(const char *name, const char *text)
{
	put(name, text, strlen(text), 0644);
}

static void controller_does(const char *script)
{
	char text[1024];

	(void)snprintf(text, sizeof(text), "#!/bin/sh\ncd %s\n%s\n", dir, script);
	put("controller", text, strlen(text), 0755);
}

static size_t get(const char *name, char *data, size_t size)
{
	int fd = open(in_dir(name), O_RDONLY | O_CLOEXEC);
	ssize_t len;

	CHECK(fd >= 0);
	len = read(fd, data, size - 1);
	CHECK(len >= 0);
	data[len] = '\0';
	(void)close(fd);
	return (size_t)len;
}

static void enter(spank_context_t context)
{
	slurm.context = context;
	slurm.option_count = 0;
	slurm.messages[0] = '\0';
	CHECK(slurm_spank_init(NULL, 2, args) == 0);
}

static int type(const char *name, const char *value)
{
	for (int i = 0; i < slurm.option_count; i++) {
		if (strcmp(slurm.options[i]->name, name) == 0)
			return slurm.options[i]->cb(slurm.options[i]->val, value, 0);
	}
	CHECK(!"a registered option");
	return -1;
}

static int post_opt(void)
{
	return slurm_spank_init_post_opt(NULL, 2, args);
}

static void leave(void)
{
	CHECK(slurm_spank_exit(NULL, 2, args) == 0);
	(void)spank_job_control_unsetenv(NULL, "BEEOND_REQUEST");
	memset(slurm.job_env, 0, sizeof(slurm.job_env));
}

static bool said(const char *text)
{
	return strstr(slurm.messages, text) != NULL;
}

static int open_files(void)
{
	DIR *files = opendir("/proc/self/fd");
	int count = 0;

	CHECK(files != NULL);
	while (readdir(files) != NULL)
		count++;
	(void)closedir(files);
	return count;
}

/* --- submission ------------------------------------------------------------------------------------------- */

static void check_submission(void)
{
	static const char pairs[] = "beeond\0\0beeond-stage-in\0/a:b\0beeond\0meta=1\0beeond-stage-out\0b:/%s%n\n\xff";
	char data[1024];

	controller_does("cat > stdin; env > env; ls /proc/$$/fd > fds; echo '{\"v\":1}'");
	enter(S_CTX_ALLOCATOR);
	CHECK(slurm.option_count == 3);
	CHECK(post_opt() == 0 && slurm.request == NULL);
	CHECK(type("beeond", NULL) == 0 && type("beeond-stage-in", "/a:b") == 0 && type("beeond", "meta=1") == 0);
	CHECK(type("beeond-stage-in", "/a:b") == 0 && type("beeond-stage-out", "b:/%s%n\n\xff") == 0);
	CHECK(post_opt() == 0);
	CHECK(strcmp(slurm.request, "{\"v\":1}") == 0 && slurm.messages[0] == '\0');
	CHECK(get("stdin", data, sizeof(data)) == sizeof(pairs) && memcmp(data, pairs, sizeof(pairs)) == 0);
	CHECK(get("env", data, sizeof(data)) > 0 && strstr(data, "SECRET") == NULL && strstr(data, "LC_ALL=C.UTF-8"));
	(void)get("fds", data, sizeof(data));
	CHECK(strstr(data, "77") == NULL && strncmp(data, "0\n1\n", 4) == 0);
	/* The next component of a heterogeneous job asks for nothing. */
	CHECK(post_opt() == 0 && slurm.request == NULL);
	leave();
}

static void refused(const char *script, const char *message)
{
	controller_does(script);
	enter(S_CTX_ALLOCATOR);
	CHECK(type("beeond", "") == 0);
	CHECK(post_opt() < 0 && slurm.request == NULL);
	if (!said(message))
		fprintf(stderr, "%s: want: %s; said: %s", script, message, slurm.messages);
	CHECK(said(message));
	leave();
}

static void check_refusals(void)
{
	refused("echo 'beeond-ctl: --beeond: %s%n is wrong' >&2; exit 2", "beeond: --beeond: %s%n is wrong\n");
	refused("printf 'Traceback\\n  x\\nKeyError: 1\\n\\n' >&2; exit 1", "beeond: KeyError: 1\n");
	refused("printf 'a\\033[2Jb' >&2; exit 1", "beeond: a?[2Jb\n");
	refused("exit 3", "failed with status 3 and said nothing");
	refused("kill -9 $$", "was ended by signal 9");
	refused("true", "is no request");
	refused("echo one; echo two", "is no request");
	refused("printf 'a\\377\\n'", "is no request");
	refused("head -c 65537 /dev/zero | tr '\\0' x", "is no request");
	refused("head -c 999999 /dev/zero | tr '\\0' x", "is no request");
	refused("head -c 999999 /dev/zero | tr '\\0' x >&2; exit 1", "beeond: xxx");
	controller_does("head -c 65536 /dev/zero | tr '\\0' x; echo");
	enter(S_CTX_ALLOCATOR);
	CHECK(type("beeond", "") == 0 && post_opt() == 0 && strlen(slurm.request) == 65536);
	leave();

	(void)unlink(in_dir("controller"));
	enter(S_CTX_ALLOCATOR);
	CHECK(type("beeond", "") == 0 && post_opt() < 0);
	CHECK(said("controller cannot be run: No such file or directory") && said("administrator"));
	leave();
	put("controller", "#!/bin/sh\n", 10, 0644);
	enter(S_CTX_ALLOCATOR);
	CHECK(type("beeond", "") == 0 && post_opt() < 0 && said("Permission denied"));
	leave();
}

static void check_arguments(void)
{
	char word[] = "controler=/x", relative[] = "run_dir=run";
	char *bad[] = { word, NULL }, *worse[] = { relative, NULL };

	enter(S_CTX_ALLOCATOR);
	CHECK(slurm_spank_init_post_opt(NULL, 1, bad) == 0 && slurm.messages[0] == '\0');
	CHECK(type("beeond", "") == 0 && slurm_spank_init_post_opt(NULL, 1, bad) < 0);
	CHECK(said("'controler=/x'") && said("administrator"));
	leave();
	slurm.context = S_CTX_SLURMD;
	slurm.messages[0] = '\0';
	CHECK(slurm_spank_init(NULL, 1, worse) == 0 && said("'run_dir=run'"));
	enter(S_CTX_REMOTE);
	CHECK(slurm_spank_init_post_opt(NULL, 1, worse) == 0 && slurm_spank_task_init(NULL, 1, worse) == 0);
	leave();
}

static void check_child(void)
{
	static char much[512 * 1024];
	struct beeond_asked asked = { much, sizeof(much) };
	struct beeond_answer answer;
	struct sigaction ignore = { .sa_handler = SIG_IGN }, now;
	struct timespec start, end;

	/* It does not read what it is given. */
	controller_does("echo ok");
	beeond_child_encode(controller_arg + strlen("controller="), &asked, 10000, &answer);
	CHECK(answer.outcome == BEEOND_ANSWERED);
	free(answer.out);
	/* It answers before it has read all, and then waits for the rest. */
	controller_does("echo ok; exec >&- 2>&-; cat >/dev/null");
	beeond_child_encode(controller_arg + strlen("controller="), &asked, 10000, &answer);
	CHECK(answer.outcome == BEEOND_ANSWERED);
	free(answer.out);
	/* It hangs, before and after it closed its output. */
	(void)clock_gettime(CLOCK_MONOTONIC, &start);
	controller_does("exec sleep 60");
	beeond_child_encode(controller_arg + strlen("controller="), &asked, 300, &answer);
	CHECK(answer.outcome == BEEOND_BROKEN && strstr(answer.err, "did not answer within") != NULL && !answer.out);
	controller_does("exec >&- 2>&-; exec sleep 60");
	beeond_child_encode(controller_arg + strlen("controller="), &asked, 300, &answer);
	CHECK(answer.outcome == BEEOND_BROKEN && strstr(answer.err, "did not answer within") != NULL && !answer.out);
	(void)clock_gettime(CLOCK_MONOTONIC, &end);
	CHECK(end.tv_sec - start.tv_sec < 20);
	CHECK(waitpid(-1, NULL, WNOHANG) < 0 && errno == ECHILD);
	/* The caller ignores SIGCHLD. */
	controller_does("echo beeond-ctl: no >&2; exit 2");
	(void)sigaction(SIGCHLD, &ignore, NULL);
	beeond_child_encode(controller_arg + strlen("controller="), &asked, 10000, &answer);
	CHECK(answer.outcome == BEEOND_REFUSED && strcmp(answer.err, "no") == 0);
	(void)sigaction(SIGCHLD, NULL, &now);
	CHECK(now.sa_handler == SIG_IGN);
	ignore.sa_handler = SIG_DFL;
	(void)sigaction(SIGCHLD, &ignore, NULL);
}

/* The user closed all three; valgrind keeps its own. */
static void check_without_stdio(void)
{
	struct beeond_asked asked = { (char *)"beeond\0", 8 };
	struct beeond_answer answer;
	int saved[3];

	controller_does("cat >stdin; echo ok; echo said >&2");
	for (int i = 0; i < 3; i++) {
		saved[i] = fcntl(i, F_DUPFD_CLOEXEC, 100);
		(void)close(i);
	}
	beeond_child_encode(controller_arg + strlen("controller="), &asked, 10000, &answer);
	for (int i = 0; i < 3; i++) {
		(void)dup2(saved[i], i);
		(void)close(saved[i]);
	}
	CHECK(answer.outcome == BEEOND_ANSWERED && strcmp(answer.out, "ok") == 0);
	free(answer.out);
}

/* --- steps ------------------------------------------------------------------------------------------------ */

static void check_srun_in_job_whose_options_are_told(void)
{
	static const char beeond[] = "SLURM_SPANK__SLURM_SPANK_OPTION_beeond_beeond";
	static const char stage_in[] = "SLURM_SPANK__SLURM_SPANK_OPTION_beeond_beeond_stage_in";

	CHECK(setenv("SLURM_SPANK_BEEOND_REQUEST", "x", 1) == 0);
	CHECK(setenv(beeond, "capacity=1TiB", 1) == 0);
	enter(S_CTX_LOCAL);
	CHECK(type("beeond", "capacity=1TiB") == 0 && post_opt() == 0);
	CHECK(type("beeond", "capacity=1TiB") == 0 && type("beeond", "capacity=1TiB") == 0 && post_opt() == 0);
	CHECK(type("beeond", "capacity=1TiB") == 0 && type("beeond", "") == 0 && post_opt() == 0);
	CHECK(slurm.messages[0] == '\0');
	CHECK(type("beeond", "meta=1") == 0 && type("beeond", "capacity=1TiB") == 0 && post_opt() == 0);
	CHECK(said("--beeond: this job has its instance already, and the options of a step change nothing"));
	CHECK(type("beeond", "capacity=2TiB") == 0 && type("beeond", "") == 0 && post_opt() < 0);
	slurm.messages[0] = '\0';
	CHECK(type("beeond", "capacity=1TiB") == 0 && type("beeond", "capacity=2TiB") == 0 && post_opt() < 0);
	CHECK(said("--beeond: this job has its instance already, and a step cannot change it"));
	CHECK(type("beeond-stage-in", "/a:b") == 0 && post_opt() < 0 && said("--beeond-stage-in: this job"));
	/* The job may have other transfers than the last, which is all that Slurm tells. */
	CHECK(setenv(stage_in, "/c:d", 1) == 0);
	slurm.messages[0] = '\0';
	CHECK(type("beeond-stage-in", "/c:d") == 0 && post_opt() == 0 && slurm.messages[0] == '\0');
	CHECK(type("beeond-stage-in", "/a:b") == 0 && type("beeond-stage-in", "/c:d") == 0 && post_opt() == 0);
	CHECK(said("--beeond-stage-in: this job has its instance already, and the options of a step change nothing"));
	CHECK(type("beeond-stage-in", "/a:b") == 0 && type("beeond-stage-out", "a:/b") == 0 && post_opt() < 0);
	CHECK(said("--beeond-stage-out: this job has its instance already, and a step cannot change it"));
	/* What it tells of a heterogeneous job is of one component. */
	CHECK(setenv("SLURM_HET_SIZE", "2", 1) == 0);
	CHECK(type("beeond", "capacity=2TiB") == 0 && type("beeond-stage-out", "a:/b") == 0 && post_opt() == 0);
	CHECK(unsetenv("SLURM_HET_SIZE") == 0 && unsetenv(beeond) == 0 && unsetenv(stage_in) == 0);
	CHECK(unsetenv("SLURM_SPANK_BEEOND_REQUEST") == 0);
	leave();
}

static void check_srun_in_job(void)
{
	controller_does("echo called");
	CHECK(setenv("SLURM_JOB_ID", "42", 1) == 0);
	enter(S_CTX_LOCAL);
	CHECK(post_opt() == 0);
	CHECK(type("beeond", "") == 0 && post_opt() < 0 && said("a step cannot get one") && slurm.request == NULL);
	CHECK(setenv("BEEOND_JOB_ID", "41", 1) == 0); /* of the job that this one was submitted from */
	CHECK(type("beeond", "") == 0 && post_opt() < 0);
	CHECK(setenv("BEEOND_JOB_ID", "42", 1) == 0);
	slurm.messages[0] = '\0';
	CHECK(type("beeond", "") == 0 && post_opt() == 0 && slurm.request == NULL && slurm.messages[0] == '\0');
	CHECK(unsetenv("BEEOND_JOB_ID") == 0);
	CHECK(setenv("SLURM_SPANK_BEEOND_REQUEST", "x", 1) == 0); /* by salloc */
	CHECK(type("beeond", "") == 0 && post_opt() == 0 && slurm.request == NULL);
	/* Nothing says what the job was given. */
	CHECK(type("beeond", "") == 0 && type("beeond-stage-in", "/a:b") == 0 && post_opt() == 0);
	CHECK(said("--beeond-stage-in: this job has its instance already, and the options of a step change nothing"));
	CHECK(type("beeond", "foo=1") == 0 && post_opt() == 0 && said("--beeond: this job has its instance already"));
	leave();
	CHECK(unsetenv("SLURM_SPANK_BEEOND_REQUEST") == 0);
	check_srun_in_job_whose_options_are_told();
	CHECK(unsetenv("SLURM_JOB_ID") == 0);
	enter(S_CTX_LOCAL);
	CHECK(type("beeond", "") == 0 && post_opt() == 0 && strcmp(slurm.request, "called") == 0);
	leave();
}

static void check_inheritance(void)
{
	char data[256];

	CHECK(setenv("SLURM_SPANK_BEEOND_REQUEST", "x", 1) == 0);
	CHECK(setenv("SLURM_SPANK__SLURM_SPANK_OPTION_beeond_beeond", "x", 1) == 0);
	CHECK(setenv("_SLURM_SPANK_OPTION_beeond_beeond_stage_in", "x", 1) == 0);
	CHECK(setenv("SLURM_SPANK__SLURM_SPANK_OPTION_other_beeond", "x", 1) == 0);
	enter(S_CTX_ALLOCATOR);
	CHECK(getenv("SLURM_SPANK_BEEOND_REQUEST") == NULL);
	CHECK(getenv("SLURM_SPANK__SLURM_SPANK_OPTION_beeond_beeond") == NULL);
	CHECK(getenv("_SLURM_SPANK_OPTION_beeond_beeond_stage_in") == NULL);
	CHECK(getenv("SLURM_SPANK__SLURM_SPANK_OPTION_other_beeond") != NULL);
	/* sbatch has prepared one component of a heterogeneous job, and comes to the next. */
	controller_does("cat >stdin; echo ok");
	CHECK(setenv("SLURM_SPANK__SLURM_SPANK_OPTION_beeond_beeond_stage_in", "/a:b", 1) == 0);
	CHECK(type("beeond-stage-in", "/a:b") == 0 && post_opt() == 0 && slurm.request == NULL);
	CHECK(setenv("SLURM_SPANK__SLURM_SPANK_OPTION_beeond_beeond_stage_in", "/a:b", 1) == 0);
	CHECK(type("beeond-stage-in", "/a:b") == 0 && type("beeond-stage-in", "/a:b") == 0 && post_opt() == 0);
	CHECK(slurm.request != NULL && get("stdin", data, sizeof(data)) == sizeof("beeond-stage-in\0/a:b"));
	leave();
}

static int step(void)
{
	CHECK(post_opt() == 0);
	return slurm_spank_task_init(NULL, 2, args);
}

static void check_step(void)
{
	static char long_text[70000];

	enter(S_CTX_REMOTE);
	CHECK(step() == 0 && slurm.messages[0] == '\0' && !job_variable("BEEOND"));
	leave();

	CHECK(mkdir(in_dir("jobs"), 0755) == 0 && mkdir(in_dir("jobs/42"), 0755) == 0);
	put_text("jobs/42/env", "BEEOND=/mnt/a b=c\nBEEOND_JOB_ID=42\nBEEOND_NODES=n[1-2]\nLD_PRELOAD=x\nBEEOND_X=1\n\nnone");
	enter(S_CTX_REMOTE);
	(void)spank_setenv(NULL, "BEEOND", "/old", 1);
	CHECK(type("beeond", "") == 0 && step() == 0);
	CHECK(job_has("BEEOND=/mnt/a b=c") && job_has("BEEOND_JOB_ID=42") && job_has("BEEOND_NODES=n[1-2]"));
	CHECK(!job_variable("LD_PRELOAD") && !job_variable("BEEOND_X") && said("'LD_PRELOAD'") && said("'none'"));
	leave();

	put_text("jobs/42/failure", "n1: /a/%s%n: No such\033 file\n\nsecond\n");
	enter(S_CTX_REMOTE);
	slurm.task = 1;
	CHECK(step() < 0 && !said("second"));
	slurm.task = 0;
	CHECK(slurm_spank_task_init(NULL, 2, args) < 0);
	CHECK(said("beeond: n1: /a/%s%n: No such? file\nbeeond: second\n"));
	leave();

	put_text("jobs/42/failure", "");
	enter(S_CTX_REMOTE);
	CHECK(step() < 0 && said("could not be made"));
	leave();

	memset(long_text, 'x', sizeof(long_text));
	put("jobs/42/failure", long_text, sizeof(long_text), 0644);
	enter(S_CTX_REMOTE);
	CHECK(step() < 0 && said("beeond: xxxx") && strlen(slurm.messages) < 9000);
	leave();

	owner = 1000;
	enter(S_CTX_REMOTE);
	CHECK(step() < 0 && said("only root can write") && said("cannot be read on this node") && !said("xxxx"));
	leave();
	owner = 0;

	put("jobs/42/failure", "x", 1, 0666);
	enter(S_CTX_REMOTE);
	CHECK(step() < 0 && said("only root can write"));
	leave();
	CHECK(unlink(in_dir("jobs/42/failure")) == 0);

	put("jobs/42/env", long_text, sizeof(long_text), 0644);
	enter(S_CTX_REMOTE);
	CHECK(step() == 0 && said("too long") && !job_variable("BEEOND"));
	leave();

	put_text("target", "BEEOND=/stolen\n");
	CHECK(unlink(in_dir("jobs/42/env")) == 0 && symlink("../../target", in_dir("jobs/42/env")) == 0);
	enter(S_CTX_REMOTE);
	CHECK(step() == 0 && !job_variable("BEEOND"));
	leave();

	CHECK(unlink(in_dir("jobs/42/env")) == 0 && mkfifo(in_dir("jobs/42/env"), 0644) == 0);
	enter(S_CTX_REMOTE);
	CHECK(step() == 0 && !job_variable("BEEOND"));
	leave();
	CHECK(unlink(in_dir("jobs/42/env")) == 0);

	/* It asked, and there is nothing. */
	enter(S_CTX_REMOTE);
	CHECK(type("beeond-stage-in", "/a:b") == 0 && step() < 0 && said("there is none on this node"));
	leave();
	enter(S_CTX_REMOTE);
	(void)spank_setenv(NULL, "SLURM_HET_SIZE", "2", 1);
	CHECK(type("beeond", "") == 0 && step() == 0);
	leave();
	slurm.no_job_id = true;
	enter(S_CTX_REMOTE);
	CHECK(step() == 0);
	CHECK(type("beeond", "") == 0 && step() < 0);
	slurm.no_job_id = false;
	leave();

	/* Variables of the job that this one was submitted from go; a user's own stay. */
	enter(S_CTX_REMOTE);
	(void)spank_setenv(NULL, "BEEOND", "/of/41", 1);
	(void)spank_setenv(NULL, "BEEOND_JOB_ID", "41", 1);
	CHECK(step() == 0 && !job_variable("BEEOND") && !job_variable("BEEOND_JOB_ID"));
	(void)spank_setenv(NULL, "BEEOND", "mine", 1);
	CHECK(step() == 0 && job_has("BEEOND=mine"));
	leave();
}

/* --- every allocation fails once -------------------------------------------------------------------------- */

static void check_without_memory(void)
{
	int failures = 0;

	controller_does("cat >/dev/null; echo ok");
	put_text("jobs/42/env", "BEEOND=/mnt\n");
	put_text("jobs/42/failure", "reason\n");
	for (int nth = 1;; nth++) {
		int refusal;

		enter(S_CTX_ALLOCATOR);
		fail_allocation = nth;
		refusal = type("beeond", "meta=1") < 0 || type("beeond-stage-in", "/a:b") < 0 || post_opt() < 0;
		if (fail_allocation > 0)
			break;
		CHECK(refusal && slurm.request == NULL && said("out of memory"));
		failures++;
		leave();
	}
	fail_allocation = 0;
	CHECK(failures >= 4 && strcmp(slurm.request, "ok") == 0);
	leave();

	for (int nth = 1; nth <= 2; nth++) {
		enter(S_CTX_REMOTE);
		fail_allocation = nth;
		CHECK(post_opt() == 0 && fail_allocation == 0 && said("out of memory"));
		CHECK(slurm_spank_task_init(NULL, 2, args) < 0);
		leave();
	}
	CHECK(unlink(in_dir("jobs/42/failure")) == 0);
	enter(S_CTX_REMOTE);
	CHECK(type("beeond", "") == 0);
	fail_allocation = 1;
	CHECK(step() < 0);
	leave();
}

int main(void)
{
	char command[sizeof(dir) + 8];
	int files;

	CHECK(mkdtemp(dir) != NULL);
	(void)snprintf(controller_arg, sizeof(controller_arg), "controller=%s/controller", dir);
	(void)snprintf(run_arg, sizeof(run_arg), "run_dir=%s", dir);
	(void)unsetenv("SLURM_JOB_ID");
	(void)unsetenv("SLURM_JOBID");
	CHECK(setenv("SECRET", "1", 1) == 0 && dup2(STDIN_FILENO, 77) == 77);

	files = open_files();
	check_submission();
	check_refusals();
	check_arguments();
	check_child();
	check_without_stdio();
	check_srun_in_job();
	check_inheritance();
	check_step();
	check_without_memory();
	CHECK(open_files() == files);

	(void)close(77);
	(void)unsetenv("SECRET");
	(void)snprintf(command, sizeof(command), "rm -rf %s", dir);
	CHECK(system(command) == 0);
	printf("%d checks passed\n", checks);
	return 0;
}
