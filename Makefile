# CI and people run the same targets. `make help` lists them.
INVENTORY ?= inventory/lab
LAB_ENGINE ?= nspawn
export LAB_ENGINE

# ssh's control sockets lie below the checkout (ansible.cfg), unless its path is too long for a socket's name.
ifneq ($(shell test $$(printf %s '$(CURDIR)' | wc -c) -le 67 || echo long),)
export ANSIBLE_SSH_CONTROL_PATH_DIR ?= $(HOME)/.ssh/pdstack
endif

BIN := .venv/bin
PLAYBOOK := $(BIN)/ansible-playbook -i $(INVENTORY) $(ANSIBLE_ARGS)

.DEFAULT_GOAL := help
.PHONY: help setup deploy test check lint unit lab-up lab-down bench bench-rerun bench-roles bench-probe bench-checkpoint docs kernels format lock wheelhouse clean
.NOTPARALLEL:

help: ## List the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 14
	@echo
	@echo 'Variables: INVENTORY=inventory/yours  ANSIBLE_ARGS="--check --diff"  PYTEST_ARGS="-k default"  LAB_ENGINE=nspawn|podman'

setup: ## Prepare this machine as the controller: .venv, collections, system packages
	@tools/setup

deploy: setup $(if $(filter inventory/lab,$(INVENTORY)),lab-up) ## Deploy to INVENTORY; by default to a lab host that it boots here
	$(PLAYBOOK) playbooks/deploy_pd.yml

test: setup lint ## Run every check and test, the lab scenarios last
	$(MAKE) kernels
	$(BIN)/pytest tests/policy tests/unit tests/scenarios $(PYTEST_ARGS)

kernels: setup ## Test the kernel extension without a GPU: interpreted, and compiled for sm_120 and sm_90
	$(MAKE) -C kernels test

check: lint unit ## Lint, types, policy and unit tests: all that needs no lab host

lint: setup
	$(BIN)/ruff check
	$(BIN)/ruff format --check --quiet
	$(BIN)/mypy
	$(BIN)/yamllint --strict .
	PATH=$(CURDIR)/$(BIN):$$PATH ansible-lint --offline

unit: setup
	$(BIN)/pytest tests/policy tests/unit $(PYTEST_ARGS)

lab-up: setup ## Boot the lab host
	$(BIN)/ansible-playbook -i inventory/lab $(ANSIBLE_ARGS) playbooks/lab_up.yml

lab-down: setup ## Take the lab host away, with all that it left on this machine
	$(BIN)/ansible-playbook -i inventory/lab $(ANSIBLE_ARGS) playbooks/lab_down.yml

bench: bench-rerun bench-roles bench-probe bench-checkpoint ## Print every table that needs no GPU; deploy first

bench-probe: setup ## Time the probe on one host and on many (simulated)
	$(BIN)/python tools/bench_probe

bench-checkpoint: setup ## Time fetching, verifying and sharing a checkpoint beside their bounds
	$(BIN)/python tools/bench_checkpoint
	$(BIN)/python tools/bench_checkpoint_fanout

bench-rerun: setup ## Time a run that changes nothing beside as many no-op tasks
	$(BIN)/python tools/bench-rerun --inventory $(INVENTORY)

bench-roles: setup ## Time a deployment to INVENTORY by role: cold, warm or without a change, as the hosts are
	ANSIBLE_CALLBACKS_ENABLED=ansible.posix.profile_roles $(PLAYBOOK) playbooks/deploy_pd.yml

docs: setup ## Write the reference under docs/reference from the code
	$(BIN)/python tools/reference

format: setup ## Format the Python files
	$(BIN)/ruff check --fix --quiet
	$(BIN)/ruff format --quiet

lock: setup ## Lock pyproject.toml's groups and the releases again; LOCK_ARGS=--upgrade moves the versions
	$(BIN)/python tools/lock-controller $(LOCK_ARGS)
	$(BIN)/python tools/lock-releases $(LOCK_ARGS)

RELEASE ?= cpu-0.5.23
wheelhouse: setup ## Fetch and check the wheels of RELEASE, for hosts without network; WHEELHOUSE_ARGS=--verify hashes all
	$(BIN)/python tools/wheelhouse $(RELEASE) $(WHEELHOUSE_ARGS)

clean: ## Remove .venv, collections, caches and reports
	rm -rf .venv .ansible .cache .mypy_cache .pytest_cache .ruff_cache .hypothesis reports
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +
