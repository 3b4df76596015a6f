/*
 * The options, and what the user said with them. Values are not looked at here: the grammar is the controller's.
 */
#include <stdlib.h>
#include <string.h>

#include "common.h"

/* More than any request can encode to, so a refusal for its length is the controller's, with its message. */
#define ASKED_MAX ((size_t)1024 * 1024)

enum { OPT_BEEOND, OPT_STAGE_IN, OPT_STAGE_OUT };

static int collect(int val, const char *optarg, int remote);

static struct spank_option options[] = {
	{ "beeond", "[KEY=VALUE,...]",
	  "[beeond] a parallel file system of the job's own, over the NVMe of its nodes, mounted at $BEEOND. "
	  "Keys: backend, meta, storage, stripe-count, stripe-dirs, chunk-size, capacity, mirror, prefer-local, "
	  "interfaces, mount, share, join",
	  2 /* getopt's optional_argument */, OPT_BEEOND, collect },
	{ "beeond-stage-in", "SRC:DST[:FLAGS]",
	  "[beeond] copy SRC of global storage to DST, relative to $BEEOND, before the job starts. "
	  "Flags, joined by \"+\": delete, metadata-only, update. May be given more than once",
	  1, OPT_STAGE_IN, collect },
	{ "beeond-stage-out", "SRC:DST[:FLAGS]",
	  "[beeond] copy SRC, relative to $BEEOND, to DST on global storage when the job has ended. "
	  "Flags as above. May be given more than once",
	  1, OPT_STAGE_OUT, collect },
};

#define OPTIONS (sizeof(options) / sizeof(options[0]))

/*
 * Slurm puts options into the environment of a job, and reads them from there as if the user had typed them. The
 * variables, in the order of `options`; without the prefix, it is what slurmstepd reads.
 */
#define SLURM_SPANK "SLURM_SPANK_"

static const char *const inherited[] = {
	SLURM_SPANK "_SLURM_SPANK_OPTION_beeond_beeond",
	SLURM_SPANK "_SLURM_SPANK_OPTION_beeond_beeond_stage_in",
	SLURM_SPANK "_SLURM_SPANK_OPTION_beeond_beeond_stage_out",
};

_Static_assert(sizeof(inherited) / sizeof(inherited[0]) == OPTIONS, "one variable for each option");

static struct beeond_asked asked;
static bool in_step; /* srun within a job, whose options are in the environment */
static bool beeond_differs; /* the last --beeond with a value is not what was inherited */

int beeond_options_register(spank_t sp, bool step)
{
	in_step = step;
	for (size_t i = 0; i < OPTIONS; i++) {
		if (spank_option_register(sp, &options[i]) != ESPANK_SUCCESS) {
			slurm_error("beeond: cannot register the option --%s", options[i].name);
			return -1;
		}
	}
	return 0;
}

const struct beeond_asked *beeond_options_asked(void)
{
	return &asked;
}

void beeond_options_forget(void)
{
	free(asked.pairs);
	asked = (struct beeond_asked){ 0 };
	beeond_differs = false;
}

static bool is_asked(const char *pair, size_t len)
{
	const char *p = asked.pairs, *end = asked.pairs + asked.len;

	while (p < end) {
		size_t name = strlen(p) + 1, both = name + strlen(p + name) + 1;

		if (both == len && memcmp(p, pair, len) == 0)
			return true;
		p += both;
	}
	return false;
}

static bool is_inherited(int val, const char *value)
{
	const char *variable = getenv(inherited[val]);

	if (variable == NULL || strcmp(variable, value) != 0)
		return false;
	/* The next one with this value is typed. In a step it repeats what the job has, and asks for nothing. */
	if (!in_step)
		(void)unsetenv(inherited[val]);
	return true;
}

static int collect(int val, const char *optarg, int remote)
{
	/* Slurm 22.05 passes NULL where an optional argument was left out. */
	const char *name = options[val].name, *value = optarg == NULL ? "" : optarg;
	size_t name_size = strlen(name) + 1, value_size = strlen(value) + 1, len = name_size + value_size;
	char *pairs;

	/*
	 * What was in the environment comes first, and is not of the user's typing: in a step, the options of the job;
	 * in a submission, those of the component before this one of a heterogeneous job. In slurmstepd, the last value
	 * of each option is all that arrives: that it was used is all there is to know.
	 */
	if (!remote && is_inherited(val, value)) {
		if (val == OPT_BEEOND)
			beeond_differs = false;
		return 0;
	}
	if (val == OPT_BEEOND && *value != '\0')
		beeond_differs = true;
	if (len > ASKED_MAX - asked.len) {
		slurm_error("beeond: --%s: the request is too long; name directories instead of single files", name);
		return -1;
	}
	pairs = realloc(asked.pairs, asked.len + len);
	if (pairs == NULL) {
		slurm_error(BEEOND_NO_MEMORY);
		return -1;
	}
	asked.pairs = pairs;
	memcpy(pairs + asked.len, name, name_size);
	memcpy(pairs + asked.len + name_size, value, value_size);
	/*
	 * Slurm may call back more than once for one option. Of --beeond the last value counts, which a repetition
	 * does not change; a transfer is made once.
	 */
	if (val == OPT_BEEOND || !is_asked(pairs + asked.len, len))
		asked.len += len;
	return 0;
}

/* The script may be run with and without sbatch: to want just what the job has, by --beeond alone, is no mistake. */
static bool asks_by(size_t option)
{
	const char *name, *value, *end = asked.pairs + asked.len;

	for (name = asked.pairs; name < end; name = value + strlen(value) + 1) {
		value = name + strlen(name) + 1;
		if (strcmp(name, options[option].name) == 0 && (option != OPT_BEEOND || *value != '\0'))
			return true;
	}
	return false;
}

/*
 * Slurm says the last value alone of each option of the job; none at all in a job that srun began, and in a heterogeneous
 * one those of another component.
 */
enum beeond_step_asks beeond_options_in_step(const char **option)
{
	bool told = false, het = getenv("SLURM_HET_SIZE") != NULL;
	enum beeond_step_asks asks = BEEOND_NOTHING;

	for (size_t i = 0; i < OPTIONS; i++)
		told = told || getenv(inherited[i]) != NULL;
	for (size_t i = 0; i < OPTIONS; i++) {
		if (!asks_by(i))
			continue;
		*option = options[i].name;
		asks = BEEOND_PERHAPS_MORE;
		if (told && !het && (i == OPT_BEEOND ? getenv(inherited[i]) && beeond_differs : !getenv(inherited[i])))
			return BEEOND_MORE;
	}
	return asks;
}

/* A job submitted from within a job would get a request that was not made for it, and copy its files. */
void beeond_options_drop_inherited(spank_t sp)
{
	for (size_t i = 0; i < OPTIONS; i++) {
		const char *variable = inherited[i] + strlen(SLURM_SPANK);

		(void)unsetenv(inherited[i]);
		(void)unsetenv(variable);
		/* srun has copied them before it calls us. */
		(void)spank_job_control_unsetenv(sp, variable);
	}
	(void)unsetenv(SLURM_SPANK BEEOND_REQUEST);
	(void)spank_job_control_unsetenv(sp, BEEOND_REQUEST);
}
