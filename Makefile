# Every target that needs the environment (.venv) sets it up first: once, and again when the
# requirements or the set-up itself change.

python := .venv/bin/python
environment := .venv/.ready

# Else every process would compile again what it imports, wherever an image sets this: seconds each.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo lab test quick lint thorough containers bench soak aws clean

help: ## list the targets, in the order in which people need them
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-10s %s\n", $$1, $$2 }' Makefile

demo: $(environment) ## run the notebooks on this machine, without an AWS account; results in build/
	@$(python) scripts/demo.py

lab: $(environment) ## open JupyterLab on the environment
	@$(python) -m jupyterlab

test: $(environment) ## run the tests, four files at a time: in many of them processes wait
	@$(python) -m pytest -n 4 --dist loadfile --no-loadscope-reorder -m "not thorough"

quick: $(environment) ## for who changes a line: the style, and the tests that start no job
	@$(python) -m ruff format --check -q . && $(python) -m ruff check -q .
	@$(python) -m pytest -q -n 2 -m quick $$(grep -rl pytest.mark.quick tests) # no others are imported

lint: $(environment) ## check format and style
	@$(python) -m ruff format --check .
	@$(python) -m ruff check .

thorough: $(environment) ## run the long tests, which `make test` leaves out, and all endings of a job
	@failed=0; \
	$(python) -m pytest -n 2 --dist loadfile -m thorough || failed=1; \
	$(python) tests/endings.py 1 || failed=1; \
	exit $$failed

containers: $(environment) ## run the jobs in replicas of AWS's containers, and Studio's (needs root, Python 3.12, 3.10)
	@tests/containers/run.sh

bench: $(environment) build/bench/packages/.ready ## measure on this machine, beside others' ways
	@missed=0; \
	$(python) benchmarks/loader.py || missed=1; \
	$(python) benchmarks/spare_cores.py || missed=1; \
	$(python) benchmarks/job.py 1 || missed=1; \
	$(python) benchmarks/scale.py || missed=1; \
	$(python) benchmarks/environments.py || missed=1; \
	exit $$missed

# Not into .venv: nothing else needs them. What they need themselves is there already.
build/bench/packages/.ready: benchmarks/requirements.txt
	@$(python) -m pip install -q --no-deps --upgrade --target build/bench/packages -r $<
	@touch $@

soak: $(environment) ## let random things happen to 50 training jobs and to the loader: half an hour and more
	@$(python) tests/soak.py 0 50
	@SOAK=1 $(python) -m pytest $(addprefix tests/pt.grpc.sagemaker/test_,feed_hosts.py feed_servers.py streams_hosts.py)

aws: $(environment) ## run the notebooks on AWS, which costs money: says what, and asks; results in results/
	@$(python) -m scripts.aws

clean: ## remove everything that make has made, the environment included
	rm -rf .venv .containers build .pytest_cache .ruff_cache
	find . \( -name __pycache__ -o -name .ipynb_checkpoints \) -prune -exec rm -rf {} +

# The set-up writes the stamp itself, when nothing is missing.
$(environment): requirements.txt constraints.txt scripts/setup.sh
	@scripts/setup.sh
