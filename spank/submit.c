/*
 * The submitting command, as the user, on a login node or within a job: have the request checked, send it along,
 * or refuse the submission with the reason.
 */
#include <stdlib.h>
#include <string.h>

#include "common.h"

/* An interpreter starts in well under a second; the rest is patience with a slow file system. */
#define CONTROLLER_TIMEOUT_MS 10000

static int refuse_bad_argument(const char *word)
{
	slurm_error("beeond: plugstack.conf: argument '%s' is not understood (there are controller=/PATH and "
		    "run_dir=/PATH); this is for the cluster's administrator to mend", word);
	return -1;
}

static int submit(spank_t sp, const struct beeond_args *args, const struct beeond_asked *asked)
{
	struct beeond_answer answer;
	int rv = -1;

	beeond_child_encode(args->controller, asked, CONTROLLER_TIMEOUT_MS, &answer);
	if (answer.outcome != BEEOND_ANSWERED) {
		slurm_error("beeond: %s", answer.err);
		goto out;
	}
	if (spank_job_control_setenv(sp, BEEOND_REQUEST, answer.out, 1) != ESPANK_SUCCESS) {
		slurm_error("beeond: Slurm does not take the request along");
		goto out;
	}
	rv = 0;
out:
	free(answer.out);
	return rv;
}

/*
 * Whether the job that this step belongs to was submitted with --beeond, or has an instance by other means. In the
 * shell of salloc there is no $BEEOND_JOB_ID, because no slurmstepd started it, but salloc left the request there;
 * from there, because srun has emptied the job control environment by now (Slurm 22.05).
 */
static bool job_has_instance(void)
{
	const char *job = getenv("SLURM_JOB_ID"), *instance = getenv("BEEOND_JOB_ID");

	if (job != NULL && instance != NULL && strcmp(job, instance) == 0)
		return true;
	return getenv("SLURM_SPANK_" BEEOND_REQUEST) != NULL;
}

static int start_step(void)
{
	const char *option;

	if (!job_has_instance()) {
		slurm_error("beeond: this job has no instance, and a step cannot get one; give --beeond to sbatch, "
			    "salloc, or an srun outside of a job");
		return -1;
	}
	switch (beeond_options_in_step(&option)) {
	case BEEOND_MORE:
		slurm_error("beeond: --%s: this job has its instance already, and a step cannot change it; leave the "
			    "option out, or give it to sbatch, salloc, or an srun outside of a job", option);
		return -1;
	case BEEOND_PERHAPS_MORE:
		slurm_info("beeond: --%s: this job has its instance already, and the options of a step change nothing "
			   "in it", option);
		return 0;
	default:
		return 0;
	}
}

int beeond_submit_post_opt(spank_t sp, int ac, char **av, bool submission)
{
	const struct beeond_asked *asked = beeond_options_asked();
	struct beeond_args args;
	int rv = 0;

	if (asked->len == 0) {
		/* Another component of a heterogeneous job may have asked; this one has not. */
		if (submission)
			(void)spank_job_control_unsetenv(sp, BEEOND_REQUEST);
		return 0;
	}
	if (submission) {
		/* Only those who ask are told: everybody else's jobs do not depend on us. */
		args = beeond_args_parse(ac, av);
		rv = args.bad == NULL ? submit(sp, &args, asked) : refuse_bad_argument(args.bad);
	} else {
		rv = start_step();
	}
	/* Called once for each component of a heterogeneous job, with that component's options. */
	beeond_options_forget();
	return rv;
}
