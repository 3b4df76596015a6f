/*
 * The plugin's entry points: which room are we in, and who is responsible there.
 */
#include <stdlib.h>

#include "common.h"

#pragma GCC visibility push(default)
SPANK_PLUGIN(beeond, 1)
#pragma GCC visibility pop

/* So that `beeond-ctl check` sees a build for another release before Slurm refuses to load it. */
#define TEXT_OF(number) #number
#define TEXT(number) TEXT_OF(number)
__attribute__((used)) static const char build[] = "beeond-ctl SPANK plugin for Slurm " TEXT(SLURM_VERSION_NUMBER);

/* srun within an allocation starts a step of a job; anywhere else it submits a job, as sbatch and salloc do. */
static bool is_submission(void)
{
	switch (spank_context()) {
	case S_CTX_ALLOCATOR:
		return true;
	case S_CTX_LOCAL:
		return getenv("SLURM_JOB_ID") == NULL && getenv("SLURM_JOBID") == NULL;
	default:
		return false;
	}
}

int slurm_spank_init(spank_t sp, int ac, char **av)
{
	struct beeond_args args;
	bool submission;

	switch (spank_context()) {
	case S_CTX_LOCAL:
	case S_CTX_ALLOCATOR:
		submission = is_submission();
		if (submission)
			beeond_options_drop_inherited(sp);
		return beeond_options_register(sp, !submission);
	case S_CTX_REMOTE:
		/* Unregistered, each option that comes with a step would be an error in slurmd's log. */
		(void)beeond_options_register(sp, false);
		return 0;
	case S_CTX_SLURMD:
		args = beeond_args_parse(ac, av);
		if (args.bad != NULL)
			slurm_error("beeond: plugstack.conf: argument '%s' is not understood, and ignored", args.bad);
		return 0;
	default:
		return 0;
	}
}

int slurm_spank_init_post_opt(spank_t sp, int ac, char **av)
{
	switch (spank_context()) {
	case S_CTX_LOCAL:
	case S_CTX_ALLOCATOR:
		return beeond_submit_post_opt(sp, ac, av, is_submission());
	case S_CTX_REMOTE:
		/*
		 * Here and not in user_init, which runs with the effective user id of the job's user. Never fail
		 * here: Slurm 22.05 calls the job COMPLETED and drains the node.
		 */
		beeond_step_load(sp, ac, av);
		return 0;
	default:
		return 0;
	}
}

int slurm_spank_task_init(spank_t sp, int ac, char **av)
{
	(void)ac;
	(void)av;
	return spank_context() == S_CTX_REMOTE ? beeond_step_task_init(sp) : 0;
}

int slurm_spank_exit(spank_t sp, int ac, char **av)
{
	(void)sp;
	(void)ac;
	(void)av;
	beeond_options_forget();
	beeond_step_exit();
	return 0;
}
