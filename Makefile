# One command for each everyday act; `make help` lists them.
SHELL   := /bin/sh
VENV    := .venv
PY      := $(VENV)/bin/python
PACKAGES := slurm-wlm libslurm-dev munge pdsh openssh-server openssh-client glusterfs-server glusterfs-client \
	xfsprogs e2fsprogs iproute2 attr acl lua5.4 lua-check lua-posix shellcheck clang clang-tools valgrind rsync \
	gcc make python3-venv sudo util-linux procps
# Tests mostly wait; each of the two has a cluster of its own, and a file's tests stay together.
AT_ONCE := -n 2 --dist loadfile
SHELL_SCRIPTS := .ci/run slurm/prolog.d/50-beeond slurm/epilog.d/50-beeond

.PHONY: help deps venv spank unit test lint format docs bench demo clean

help: ## this list
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 12

deps: ## install what Debian provides (root; only what is missing)
	@missing=$$(for p in $(PACKAGES); do dpkg-query -W -f='$${Status}' $$p 2>/dev/null | grep -q 'ok installed' || echo $$p; done); \
	if [ -n "$$missing" ]; then \
		echo "installing: $$missing"; \
		apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $$missing >/dev/null; \
	fi

venv: $(VENV)/.ready ## Python with pinned versions

# The nodes of the testbed see the tree read-only, so byte code is made here.
$(VENV)/.ready: requirements.lock pyproject.toml
	/usr/bin/python3 -m venv $(VENV)
	$(VENV)/bin/pip install --quiet --disable-pip-version-check -r requirements.lock
	$(VENV)/bin/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	$(PY) -m compileall -q $(VENV)/lib || true
	touch $@

spank: ## build the SPANK plugin
	@$(MAKE) --no-print-directory -C spank

unit: venv ## tests without root, in seconds
	$(PY) -m pytest tests/unit -q -m "not root" $(AT_ONCE)

test: deps venv spank ## everything that tests the project (root)
	$(PY) -m compileall -q beeond_ctl
	$(PY) -m pytest tests $(AT_ONCE)

lint: deps venv ## every linter, strictest settings
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	shellcheck $(SHELL_SCRIPTS)
	shellcheck -e SC2016 examples/*.sh
	luacheck --quiet slurm tests/vectors
	@$(MAKE) --no-print-directory -C spank lint

format: venv ## put the Python code into its form
	$(VENV)/bin/ruff format .
	$(VENV)/bin/ruff check --fix .

docs: venv ## make the reference and the example configuration from the code
	$(PY) -m tools.gen_reference

bench: deps venv spank ## measure, beside peers; writes build/bench.json (root)
	$(PY) -m compileall -q beeond_ctl
	$(PY) -m bench

demo: deps venv spank ## the whole job on a test cluster on this machine, step by step (root)
	$(PY) -m compileall -q beeond_ctl
	$(PY) -m tests.demo

clean: ## remove what was built
	rm -rf build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	@$(MAKE) --no-print-directory -C spank clean
