/*
 * One run of `beeond-ctl request encode`: no shell, nothing of the caller's environment, every wait with an end.
 * The submitting command is not ours: its signal handlers, descriptors and children stay as they are.
 */
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "common.h"

/* A line, its newline, and one byte that shows that there is more. */
#define OUT_SIZE (BEEOND_REQUEST_MAX + 2)
#define ERR_SIZE ((size_t)4096)

/* How long a process may take to be gone after SIGKILL: longer only when it hangs in the kernel. */
#define KILLED_TIMEOUT_MS 1000

/* Where output of the child goes. What does not fit is read and dropped, so that the child is not held up. */
struct sink {
	int fd;
	char *data;
	size_t len;
	size_t size;
};

struct child {
	pid_t pid;
	int input;           /* its standard input, -1 when all is written */
	const char *left;    /* what is still to be written to it */
	size_t left_len;
	struct sink out;
	struct sink err;
	struct sink exec_errno; /* an int, when it could not be started */
};

__attribute__((format(printf, 2, 3)))
static void broken(struct beeond_answer *answer, const char *format, ...)
{
	va_list ap;

	answer->outcome = BEEOND_BROKEN;
	va_start(ap, format);
	(void)vsnprintf(answer->err, sizeof(answer->err), format, ap);
	va_end(ap);
	beeond_printable(answer->err);
}

static void close_fd(int *fd)
{
	if (*fd >= 0)
		(void)close(*fd);
	*fd = -1;
}

/* Out of the way of descriptors 0 to 2, which are free when the user has closed them. */
static int above_stdio(int fd)
{
	int moved, saved;

	if (fd < 0 || fd > STDERR_FILENO)
		return fd;
	moved = fcntl(fd, F_DUPFD_CLOEXEC, STDERR_FILENO + 1);
	saved = errno;
	(void)close(fd);
	errno = saved;
	return moved;
}

static int make_pipe(int *reader, int *writer)
{
	int fds[2];

	if (pipe2(fds, O_CLOEXEC) < 0)
		return -1;
	*reader = above_stdio(fds[0]);
	*writer = above_stdio(fds[1]);
	return *reader < 0 || *writer < 0 ? -1 : 0;
}

/* A socket rather than a pipe: writing to it after the reader has gone need not raise SIGPIPE. */
static int make_socket(int *parent, int *child)
{
	int fds[2];

	if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds) < 0)
		return -1;
	*parent = above_stdio(fds[0]);
	*child = above_stdio(fds[1]);
	return *parent < 0 || *child < 0 ? -1 : 0;
}

/* --- in the child, between fork and execve: async-signal-safe calls only ---------------------------------- */

static void close_from(int first)
{
	long max;

#ifdef SYS_close_range
	if (syscall(SYS_close_range, (unsigned int)first, ~0U, 0U) == 0)
		return;
#endif
	max = sysconf(_SC_OPEN_MAX); /* kernels before 5.9 */
	if (max < 0 || max > 65536)
		max = 65536;
	for (int fd = first; fd < max; fd++)
		(void)close(fd);
}

static void reset_signals(void)
{
	struct sigaction action = { .sa_handler = SIG_DFL };
	sigset_t none;

	(void)sigemptyset(&action.sa_mask);
	(void)sigaction(SIGPIPE, &action, NULL);
	(void)sigaction(SIGCHLD, &action, NULL);
	(void)sigemptyset(&none);
	(void)sigprocmask(SIG_SETMASK, &none, NULL);
}

__attribute__((noreturn))
static void run_controller(const char *controller, int input, int output, int errors, int report)
{
	char *const argv[] = { (char *)controller, (char *)"request", (char *)"encode", NULL };
	/* UTF-8 whatever the user's locale: the bytes of paths go through Python and back unchanged. */
	char *const envp[] = {
		(char *)"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
		(char *)"LANG=C.UTF-8",
		(char *)"LC_ALL=C.UTF-8",
		NULL,
	};
	const int keep = STDERR_FILENO + 1;
	int error;
	ssize_t ignored;

	reset_signals();
	if (dup2(input, STDIN_FILENO) < 0 || dup2(output, STDOUT_FILENO) < 0 || dup2(errors, STDERR_FILENO) < 0)
		goto fail;
	if (report != keep) {
		if (dup3(report, keep, O_CLOEXEC) < 0)
			goto fail;
		report = keep;
	}
	close_from(keep + 1);
	(void)execve(controller, argv, envp);
fail:
	error = errno;
	ignored = write(report, &error, sizeof(error));
	(void)ignored;
	_exit(127);
}

/* --- in the parent ---------------------------------------------------------------------------------------- */

static int64_t now_ms(void)
{
	struct timespec now = { 0 };

	(void)clock_gettime(CLOCK_MONOTONIC, &now);
	return (int64_t)now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

static int start(struct child *child, const char *controller, struct beeond_answer *answer)
{
	int input = -1, output = -1, errors = -1, report = -1;
	int rv = -1;

	if (make_socket(&child->input, &input) < 0 || make_pipe(&child->out.fd, &output) < 0 ||
	    make_pipe(&child->err.fd, &errors) < 0 || make_pipe(&child->exec_errno.fd, &report) < 0) {
		broken(answer, "no pipe to the controller: %s", strerror(errno));
		goto out;
	}
	child->pid = fork();
	if (child->pid == 0)
		run_controller(controller, input, output, errors, report);
	if (child->pid < 0) {
		broken(answer, "no process for the controller: %s", strerror(errno));
		goto out;
	}
	rv = 0;
out:
	close_fd(&input);
	close_fd(&output);
	close_fd(&errors);
	close_fd(&report);
	return rv;
}

static bool try_again(void)
{
	return errno == EINTR || errno == EAGAIN || errno == EWOULDBLOCK;
}

static void feed(struct child *child)
{
	ssize_t n = send(child->input, child->left, child->left_len, MSG_NOSIGNAL | MSG_DONTWAIT);

	if (n < 0 && try_again())
		return;
	if (n > 0) {
		child->left += n;
		child->left_len -= (size_t)n;
	}
	/* When it does not want to read on it has made up its mind: its answer says how. */
	if (n <= 0 || child->left_len == 0)
		close_fd(&child->input);
}

static void drain(struct sink *sink)
{
	char spill[4096];
	bool full = sink->len == sink->size;
	ssize_t n = read(sink->fd, full ? spill : sink->data + sink->len, full ? sizeof(spill) : sink->size - sink->len);

	if (n < 0 && try_again())
		return;
	if (n <= 0)
		close_fd(&sink->fd);
	else if (!full)
		sink->len += (size_t)n;
}

/*
 * Moves data until the child has closed its output; what it has not read by then it does not want. Returns -1 when
 * that is not so by `deadline`.
 */
static int converse(struct child *child, int64_t deadline)
{
	struct sink *sinks[] = { &child->out, &child->err, &child->exec_errno };
	enum { SINKS = sizeof(sinks) / sizeof(sinks[0]) };

	while (child->out.fd >= 0 || child->err.fd >= 0 || child->exec_errno.fd >= 0) {
		struct pollfd fds[SINKS + 1];
		int64_t left = deadline - now_ms();

		if (left <= 0)
			return -1;
		for (int i = 0; i < SINKS; i++) /* poll skips negative descriptors */
			fds[i] = (struct pollfd){ .fd = sinks[i]->fd, .events = POLLIN };
		fds[SINKS] = (struct pollfd){ .fd = child->input, .events = POLLOUT };
		if (poll(fds, SINKS + 1, (int)left) < 0) {
			if (errno == EINTR)
				continue;
			return -1;
		}
		for (int i = 0; i < SINKS; i++) {
			if (fds[i].revents != 0)
				drain(sinks[i]);
		}
		if (fds[SINKS].revents != 0)
			feed(child);
	}
	close_fd(&child->input);
	return 0;
}

/* Waits for the end of the child; returns -1 when it has not come by `deadline`. */
static int reap(pid_t pid, int64_t deadline, int *status)
{
	for (;;) {
		pid_t got = waitpid(pid, status, WNOHANG);

		if (got == pid)
			return 0;
		if (got < 0 && errno != EINTR)
			return -1;
		if (now_ms() >= deadline)
			return -1;
		(void)poll(NULL, 0, 1);
	}
}

/* The last line of `text` that has something in it: the message, or what a traceback ends with. */
static const char *last_line(char *text)
{
	char *newline;

	for (;;) {
		newline = strrchr(text, '\n');
		if (newline == NULL)
			return text;
		if (newline[1] != '\0')
			return newline + 1;
		*newline = '\0';
	}
}

static void judge_refusal(struct child *child, int status, const char *controller, struct beeond_answer *answer)
{
	static const char prefix[] = "beeond-ctl: ";
	const char *line;

	child->err.data[child->err.len] = '\0';
	line = last_line(child->err.data);
	if (strncmp(line, prefix, sizeof(prefix) - 1) == 0)
		line += sizeof(prefix) - 1;
	if (WIFSIGNALED(status)) {
		broken(answer, "the controller %s was ended by signal %d; tell the cluster's administrator", controller,
		       WTERMSIG(status));
	} else if (*line == '\0') {
		broken(answer, "the controller %s failed with status %d and said nothing; tell the cluster's administrator",
		       controller, WEXITSTATUS(status));
	} else {
		broken(answer, "%s", line);
		answer->outcome = BEEOND_REFUSED;
	}
}

static void judge_answer(struct child *child, const char *controller, struct beeond_answer *answer)
{
	char *text = child->out.data;
	size_t len = child->out.len;

	if (len > 0 && text[len - 1] == '\n')
		len--;
	if (len == 0 || len > BEEOND_REQUEST_MAX)
		goto wrong;
	for (size_t i = 0; i < len; i++) {
		if (text[i] < ' ' || text[i] > '~')
			goto wrong;
	}
	text[len] = '\0';
	answer->outcome = BEEOND_ANSWERED;
	answer->out = text;
	child->out.data = NULL;
	return;
wrong:
	broken(answer, "what the controller %s answered is no request; is it of the same version as the plugin?",
	       controller);
}

static void explain_exec(int error, const char *controller, struct beeond_answer *answer)
{
	broken(answer, "the controller %s cannot be run: %s; the package beeond-ctl belongs on every host that submits jobs: "
	       "ask the cluster's administrator to install it, or to name its place with controller= in plugstack.conf",
	       controller, strerror(error));
}

void beeond_child_encode(const char *controller, const struct beeond_asked *asked, int timeout_ms,
			 struct beeond_answer *answer)
{
	const int64_t deadline = now_ms() + timeout_ms;
	struct sigaction before, default_action = { .sa_handler = SIG_DFL };
	int exec_errno = 0, status = 0;
	bool in_time;
	struct child child = {
		.pid = -1,
		.input = -1,
		.left = asked->pairs,
		.left_len = asked->len,
		.out = { .fd = -1, .size = OUT_SIZE },
		.err = { .fd = -1, .size = ERR_SIZE },
		.exec_errno = { .fd = -1, .data = (char *)&exec_errno, .size = sizeof(exec_errno) },
	};

	*answer = (struct beeond_answer){ .outcome = BEEOND_BROKEN };
	/* A user's shell may have SIGCHLD ignored: then there would be no exit status. */
	(void)sigemptyset(&default_action.sa_mask);
	(void)sigaction(SIGCHLD, &default_action, &before);

	child.out.data = malloc(OUT_SIZE + 1);
	child.err.data = malloc(ERR_SIZE + 1);
	if (child.out.data == NULL || child.err.data == NULL) {
		broken(answer, "out of memory");
		goto out;
	}
	if (start(&child, controller, answer) < 0)
		goto out;

	in_time = converse(&child, deadline) == 0 && reap(child.pid, deadline, &status) == 0;
	if (!in_time) {
		(void)kill(child.pid, SIGKILL);
		(void)reap(child.pid, now_ms() + KILLED_TIMEOUT_MS, &status);
		broken(answer, "the controller %s did not answer within %d s; try again, and if that does not help, tell the "
		       "cluster's administrator", controller, timeout_ms / 1000);
	} else if (child.exec_errno.len == sizeof(exec_errno)) {
		explain_exec(exec_errno, controller, answer);
	} else if (status != 0) {
		judge_refusal(&child, status, controller, answer);
	} else {
		judge_answer(&child, controller, answer);
	}
out:
	close_fd(&child.input);
	close_fd(&child.out.fd);
	close_fd(&child.err.fd);
	close_fd(&child.exec_errno.fd);
	free(child.out.data);
	free(child.err.data);
	(void)sigaction(SIGCHLD, &before, NULL);
}
