# make install  the environment that the others share   make demo  the main job, end to end
# make test     lint, types, tests: 24 minutes          make bench the benchmarks, and the tables of bench/RESULTS.md
# make test-long the rest of the tests: more models, faults and layouts, the benchmarks' short forms; as long again
# make test-gpu what this machine's GPUs allow    make coverage  which lines no test without a GPU reaches
# make docs     the pages of docs/ and a table of all options, as a site: build/docs/index.html
# make pages    the pages of docs/ that are written from the code: options, commands, files, Python API, environment
# make faults   every fault in every phase on real jobs, over an hour; writes docs/faults.md   (CELLS='host-*/sync/*')
# make constraints  the lists of what is installed, renewed from pyproject.toml
# make test-versions  unit tests and a job with the lowest and the highest versions that pyproject.toml allows
# make dist     sdist and wheel in build/dist, looked at as PyPI does
# make clean    remove the environment and the runs
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# make install BACKEND=cuda: with the vLLM for GPUs; from then on the environment is that, until it is made with another.
HELD := $(shell cat $(VENV)/.installed 2>/dev/null)
BACKEND ?= $(or $(HELD),cpu)
# uv or pip: that one, and no other.
INSTALLER ?= auto

.PHONY: install constraints demo test packages test-long test-versions test-gpu coverage faults lint docs pages dist bench clean

install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml setup.py $(wildcard constraints/*.txt)
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11, 4) and "Python 3.11.4 or newer is needed: make PYTHON=python3.12 ...")'
	$(PYTHON) -m tools.install $(VENV) --backend $(BACKEND) --installer $(INSTALLER)
	echo $(BACKEND) > $@
ifneq ($(HELD),$(BACKEND))
.PHONY: $(VENV)/.installed
endif

# UPGRADE=1: with the newest of all that pyproject.toml allows.
constraints: install
	$(BIN)/python -m tools.constraints $(if $(UPGRADE),--upgrade)

demo: install
	@echo "starting 2 training processes and an engine (about 20 s) ..."
	@OMP_NUM_THREADS=1 DS_ACCELERATOR=cpu $(BIN)/accelerate launch --config_file configs/cpu.yaml train.py

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m tools.sizes
	$(BIN)/python -m tools.foreign_assignments
	$(BIN)/python -m tools.prose
	$(BIN)/shellcheck --external-sources --check-sourced launch/*.sbatch launch/local_2node.sh .ci/run

docs: install
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet
	@echo "build/docs/index.html"

pages: install
	@for name in commands environment files options python_api; do $(BIN)/python -m tools.$${name}_page || exit 1; done

# The wheel is built from the sdist: what is missing there is missing here too.
dist: install
	rm -rf build/dist
	$(BIN)/pyproject-build --no-isolation --outdir build/dist .
	$(BIN)/twine check --strict build/dist/*

# GRPO_TEST_SLURM=install installs Debian's Slurm first, GRPO_TEST_CHROMIUM=install its Chromium, both as root; otherwise no
# system package is touched.
# Linters use one core, and apt-get hardly any: side by side.
test: install
	@$(MAKE) --no-print-directory --jobs 2 --output-sync=line lint packages
	$(BIN)/python -m pytest
	@$(BIN)/python -m tests.slurm report
	@$(BIN)/python -m tests.chromium report
	@$(BIN)/python -m tests.namespaces report

packages: install
	@$(BIN)/python -m tests.slurm install
	@$(BIN)/python -m tests.chromium install

# More of what `test` has some of, and what starts several whole stacks.
test-long: packages
	$(BIN)/python -m pytest -m long

test-versions: install
	$(BIN)/python -m tools.versions

# On the environment that is there, and it may be one with torch and pytest alone: a GPU machine has its own.
#   make test-gpu PYTHON=python3.12     where there is no .venv, or another is meant
test-gpu:
	@$(if $(filter-out file,$(origin PYTHON)),$(PYTHON),$(firstword $(wildcard $(BIN)/python) $(PYTHON))) -m tests.gpu

# Unit, multiprocess and engine tests with every process measured, then the table in docs/gpu.md held against it.
coverage: packages
	$(BIN)/python -m tests.line_coverage run

faults: install
	$(BIN)/python -m tests.faults.run $(CELLS)

# One that fails does not keep the others from running; the last one reads what the others have written.
BENCHMARKS := weight_sync padding overlap overlap_ragged dispatch balance generate multi_turn multi_turn_ahead neighbours agents rewards lora startup save engine_restart timeline scale
bench: install
	@failed=; \
	for name in $(BENCHMARKS); do \
	  echo "--- bench.$$name"; \
	  $(BIN)/python -m bench.$$name || failed="$$failed $$name"; \
	done; \
	$(BIN)/python -m bench.tables || failed="$$failed tables"; \
	if [ -n "$$failed" ]; then echo "failed:$$failed"; exit 1; fi

clean:
	rm -rf $(VENV) runs .mypy_cache .ruff_cache .pytest_cache
