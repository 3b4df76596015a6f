# One command for each everyday act; `make help` lists them.
SHELL   := /bin/sh
VENV    := .venv
PY      := $(VENV)/bin/python
PACKAGES := slurm-wlm libslurm-dev munge pdsh openssh-server openssh-client glusterfs-server glusterfs-client \
	xfsprogs e2fsprogs iproute2 attr acl lua5.4 lua-check lua-posix shellcheck clang clang-tools valgrind rsync \
	debhelper gcc make mandoc libfuse3-dev libopenmpi-dev libxxhash-dev openmpi-bin python3-dev python3-venv sudo util-linux procps \
	chromium-headless-shell
# Tests mostly wait; each process has a cluster of its own, and a file's tests stay together. Integration comes first.
AT_ONCE := -n 3 --dist loadfile --no-loadscope-reorder
NATIVE_FLAGS := -std=gnu11 -O2 -Wall -Wextra -Werror -Wshadow -Wformat=2 -Wstrict-prototypes -Wmissing-prototypes -Wundef \
	-Wvla -D_GNU_SOURCE -D_FILE_OFFSET_BITS=64 -DPy_LIMITED_API=0x030B0000
# A path instead of an import hook, which would cost each start of Python 10 ms.
EDITABLE := --config-settings editable_mode=compat
SHELL_SCRIPTS := .ci/run slurm/prolog.d/50-beeond slurm/epilog.d/50-beeond \
	packaging/build packaging/bundle packaging/files \
	deploy/health-check ansible/roles/beeond_ctl/files/install-release

.PHONY: help deps venv spank unit test test-long lint format docs dist wheels deb rpm lint-packages bench demo clean

help: ## this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 16

deps: ## install what Debian provides (root; only what is missing)
	@missing=$$(for p in $(PACKAGES); do dpkg-query -W -f='$${Status}' $$p 2>/dev/null | grep -q 'ok installed' || echo $$p; done); \
	if [ -n "$$missing" ]; then \
		echo "installing: $$missing"; \
		apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $$missing >/dev/null; \
	fi

venv: $(VENV)/.ready ## Python with pinned versions

# The nodes of the testbed see the tree read-only, so byte code is made here.
$(VENV)/.ready: requirements.lock pyproject.toml setup.py beeond_ctl/staging/_native.c
	/usr/bin/python3 -m venv $(VENV)
	$(VENV)/bin/pip install --quiet --disable-pip-version-check -r requirements.lock
	$(VENV)/bin/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation $(EDITABLE) -e .
	$(PY) -m compileall -q $(VENV)/lib || true
	touch $@

spank: ## build the SPANK plugin
	@$(MAKE) --no-print-directory -C spank

unit: venv ## tests without root, in seconds
	$(PY) -m pytest tests/unit -q -m "not root" $(AT_ONCE)

test: deps venv spank ## all tests but those of test-long (root)
	$(PY) -m compileall -q beeond_ctl
	$(PY) -m pytest tests $(AT_ONCE) -m "not long" --durations=20

test-long: deps venv spank ## faults that take long, over BeeGFS's other generation (root)
	$(PY) -m compileall -q beeond_ctl
	$(PY) -m pytest tests $(AT_ONCE) -m long --durations=20

lint: deps venv ## every linter, strictest settings
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	shellcheck $(SHELL_SCRIPTS)
	shellcheck -e SC2016 examples/*.sh
	luacheck --quiet slurm tests/vectors
	cd ansible && PATH="$(CURDIR)/$(VENV)/bin:$$PATH" ansible-lint -q --nocolor
	@$(MAKE) --no-print-directory -C spank lint
	@include=$$($(PY) -c 'import sysconfig; print(sysconfig.get_path("include"))'); \
	for how in -fsyntax-only "--analyze --analyzer-output text -Xclang -analyzer-werror"; do \
		clang $(NATIVE_FLAGS) -isystem $$include $$how beeond_ctl/staging/_native.c || exit 1; \
	done

format: venv ## put the Python code into its form
	$(VENV)/bin/ruff format .
	$(VENV)/bin/ruff check --fix .

docs: venv ## reference and example configuration from the code, then all pages as HTML in build/docs
	$(PY) -m tools.gen_reference
	$(PY) -m tools.site build/docs

dist: venv ## sdist and wheel, in dist/
	packaging/build dist

wheels: venv ## every wheel that an installation without a network needs, in build/wheels
	packaging/build wheels

deb: deps venv ## Debian packages, in dist/: controller, hooks, plugin for the Slurm that is here
	packaging/build deb

rpm: venv ## the same as RPM packages
	@$(MAKE) --no-print-directory deps PACKAGES="gcc libslurm-dev make python3-venv rpm"
	packaging/build rpm

lint-packages: deb rpm ## lintian and rpmlint on both
	@$(MAKE) --no-print-directory deps PACKAGES="lintian rpmlint"
	lintian --allow-root --fail-on error,warning dist/*.deb
	rpmlint -c packaging/rpm/rpmlint.toml packaging/rpm/beeond-ctl.spec dist/*.rpm

bench: deps venv spank ## measure, beside peers; writes build/bench.json (root)
	$(PY) -m compileall -q beeond_ctl
	$(PY) -m bench

demo: deps venv spank ## the whole job on a test cluster on this machine, step by step (root)
	$(PY) -m compileall -q beeond_ctl
	$(PY) -m tests.demo

clean: ## remove what was built
	rm -rf build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	@$(MAKE) --no-print-directory -C spank clean
