/*
 * What the parts of the plugin share. Each part is a file; who may run when is decided in beeond.c alone.
 */
#ifndef BEEOND_COMMON_H
#define BEEOND_COMMON_H

#include <stdbool.h>
#include <stddef.h>

/* We compile with -fvisibility=hidden: what Slurm gives us, and what we give Slurm, is the exception. */
#pragma GCC visibility push(default)
#include <slurm/spank.h>
#pragma GCC visibility pop

/* What Slurm puts in front of this name, it puts there itself: the Prolog sees SPANK_BEEOND_REQUEST. */
#define BEEOND_REQUEST "BEEOND_REQUEST"

/* Bytes an encoded request may have: the same limit as beeond_ctl.request.MAX_ENCODED. */
#define BEEOND_REQUEST_MAX ((size_t)64 * 1024)

#define BEEOND_NO_MEMORY "beeond: out of memory"

/* --- args.c: the words behind the plugin's name in plugstack.conf ----------------------------------------- */

struct beeond_args {
	const char *controller; /* absolute path of beeond-ctl */
	const char *run_dir;    /* absolute path of the directory that holds jobs/JOBID/ */
	const char *bad;        /* the first word that is not understood, NULL if there is none */
};

struct beeond_args beeond_args_parse(int ac, char **av);

/* --- options.c: what the user typed ----------------------------------------------------------------------- */

/* Pairs `name\0value\0`, in the order given: just what `beeond-ctl request encode` reads. */
struct beeond_asked {
	char *pairs;
	size_t len;
};

/* `step`: for srun within a job. Options that repeat the job's own are not kept there. */
int beeond_options_register(spank_t sp, bool step);
const struct beeond_asked *beeond_options_asked(void);
void beeond_options_forget(void);
void beeond_options_drop_inherited(spank_t sp);

enum beeond_step_asks {
	BEEOND_NOTHING,      /* but what its job was given */
	BEEOND_PERHAPS_MORE, /* Slurm does not say what the job was given */
	BEEOND_MORE,         /* what its job was certainly not given */
};

/* What a step asks for; `option` names the one that it may be more by. */
enum beeond_step_asks beeond_options_in_step(const char **option);

/* --- child.c: one run of the controller ------------------------------------------------------------------- */

enum beeond_outcome {
	BEEOND_ANSWERED, /* `out` holds one line of printable ASCII */
	BEEOND_REFUSED,  /* `err` holds one printable line: what the controller has against it */
	BEEOND_BROKEN,   /* `err` holds one printable line: why there is no answer */
};

struct beeond_answer {
	enum beeond_outcome outcome;
	char *out;
	char err[1024];
};

void beeond_child_encode(const char *controller, const struct beeond_asked *asked, int timeout_ms,
			 struct beeond_answer *answer);

/* --- submit.c and step.c: the two rooms that do something ------------------------------------------------- */

int beeond_submit_post_opt(spank_t sp, int ac, char **av, bool submission);

void beeond_step_load(spank_t sp, int ac, char **av);
int beeond_step_task_init(spank_t sp);
void beeond_step_exit(void);

/* Makes `text` one that can be shown: control characters become '?'. */
void beeond_printable(char *text);

#endif
