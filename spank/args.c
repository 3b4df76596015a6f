/*
 * Arguments in plugstack.conf. Every one is checked; what is not understood is kept for whoever may complain:
 * the submitting command refuses, daemons log, and the tasks of a running job never suffer for it.
 */
#include <string.h>

#include "common.h"

/* The value of `word` when it is `key` followed by an absolute path, otherwise NULL. */
static const char *absolute(const char *word, const char *key)
{
	size_t len = strlen(key);

	if (strncmp(word, key, len) != 0 || word[len] != '/')
		return NULL;
	return word + len;
}

struct beeond_args beeond_args_parse(int ac, char **av)
{
	struct beeond_args args = {
		.controller = "/usr/bin/beeond-ctl", /* where the packages put it */
		.run_dir = "/run/beeond-ctl",        /* where the controller keeps its state files */
		.bad = NULL,
	};
	const char *value;

	for (int i = 0; i < ac; i++) {
		if ((value = absolute(av[i], "controller=")) != NULL)
			args.controller = value;
		else if ((value = absolute(av[i], "run_dir=")) != NULL)
			args.run_dir = value;
		else if (args.bad == NULL)
			args.bad = av[i];
	}
	return args;
}
