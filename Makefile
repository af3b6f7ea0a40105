# Targets that need the environment (.venv) set it up first. They set it up again when the
# requirements or the set-up script change.

python := .venv/bin/python
environment := .venv/.ready

# Some images set this. Then each process would spend seconds on compiling its imports again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo lab test quick lint thorough versions containers bench soak aws clean

help: ## list the targets, most needed first
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-10s %s\n", $$1, $$2 }' Makefile

demo: $(environment) ## run the notebooks on this machine, without an AWS account; results beside them
	@$(python) scripts/demo.py

lab: $(environment) ## open JupyterLab on the environment
	@$(python) -m jupyterlab

test: $(environment) ## run the tests, four files at a time
	@$(python) -m pytest -n 4 --dist loadfile --no-loadscope-reorder -m "not thorough"

quick: $(environment) ## check the style, and run the tests that start no job
	@$(python) -m ruff format --check -q . && $(python) -m ruff check -q .
	@$(python) -m pytest -q -n 2 -m quick $$(grep -rl pytest.mark.quick tests) # pytest imports only these

lint: $(environment) ## check format and style
	@$(python) -m ruff format --check .
	@$(python) -m ruff check .

# With PART=0 to 4: a fifth of them, as .ci/run does. Ray's run alone, since it gives a node 30 s to
# start; pytest exits with 5 if a fifth has none of them.
thorough: $(environment) build/bench/packages/.ready ## run the long tests, which `make test` leaves out, and all endings of a job
	@failed=0; export PART=$(PART); \
	$(python) -m pytest -n 2 --dist loadfile -m thorough --ignore tests/docs/test_ray.py || failed=1; \
	$(python) -m pytest tests/docs/test_ray.py || [ $$? = 5 ] || failed=1; \
	$(python) tests/endings.py 1 || failed=1; \
	exit $$failed

versions: $(environment) ## test what people copy with the other Pythons, and the oldest PyTorch
	@tests/versions.sh $(VERSIONS)

containers: $(environment) ## run the jobs in replicas of AWS's containers, and Studio's (needs root, Python 3.12, 3.10)
	@tests/containers/run.sh $(IMAGES)

bench: $(environment) build/bench/packages/.ready ## measure the loader and the jobs on this machine
	@missed=0; \
	$(python) benchmarks/loader.py || missed=1; \
	$(python) benchmarks/spare_cores.py || missed=1; \
	$(python) benchmarks/job.py 1 || missed=1; \
	$(python) benchmarks/scale.py || missed=1; \
	$(python) benchmarks/environments.py || missed=1; \
	$(python) benchmarks/ray_jobs.py 3 || missed=1; \
	exit $$missed

# Only the benchmarks and docs/ray need these packages, so they are not in .venv, which has their
# dependencies.
build/bench/packages/.ready: benchmarks/requirements.txt
	@$(python) -m pip install -q --no-deps --upgrade --target build/bench/packages -r $<
	@touch $@

soak: $(environment) build/bench/packages/.ready ## cause random failures in jobs and in the loader, and end jobs with Ray; half an hour or more
	@$(python) tests/soak.py 0 50
	@SOAK=1 $(python) -m pytest $(addprefix tests/pt.grpc.sagemaker/test_,feed_hosts.py feed_servers.py)
	@SOAK=1 $(python) -m pytest tests/docs/test_ray.py -k endings

aws: $(environment) ## run the notebooks on AWS: shows the cost, and asks before it starts; results in results/
	@$(python) -m scripts.aws

clean: ## remove everything that make has created, including the environment
	rm -rf .venv .containers build *.sagemaker/executed-* .pytest_cache .ruff_cache
	find . \( -name __pycache__ -o -name .ipynb_checkpoints \) -prune -exec rm -rf {} +

# The script writes the stamp itself when everything has been installed.
$(environment): requirements.txt constraints.txt scripts/setup.sh
	@scripts/setup.sh
