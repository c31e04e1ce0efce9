# Each target makes .venv on first use, or adds to it what it needs; it needs Python 3.11 and make, nothing else.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
RESULTS := benchmarks/results
MINUTES ?= 3
PEERS := benchmarks/.peers
MODELS := .venv-models
PYTEST := PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest
ELSEWHERE := $(addprefix --ignore ,tests/matrix tests/models tests/launch/ray tests/docs/test_conf.py tests/docs/test_types.py)
PURELIB := import sysconfig; print(sysconfig.get_path('purelib'))

.PHONY: demo demo-compare test test-all test-ray test-matrix test-models soak lint types docs plots bench bench-more bench-page bench-peers clean

# The package with what the demo needs; then the dependency group of each other target.
$(STAMP): pyproject.toml constraints.txt tools/install.py
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python tools/install.py demo
	@touch $@

$(STAMP)-%: $(STAMP)
	@$(BIN)/python tools/install.py $*
	@touch $@

# Once for each dtype, and again where a source of the kernels has changed: or every process of the tests waits for them.
$(STAMP)-kernels: $(STAMP)-test $(shell find src/anabranch/tables -name '*.py') src/anabranch/collectives/shared_memory.py
	@echo "compiling kernels (about a minute)"
	@printf '%s others tables\n' "float32 caches" "float64 caches" "bfloat16 caches" float16 | \
		xargs -P 4 -L 1 $(BIN)/python tools/compile_kernels.py
	@touch $@

# It kills a process of experts and a worker of its own, once.
DEMO := $(BIN)/anabranch run --workers 2 --servers 1 --experts 2
MODEL := examples/language_model.py --steps 420

demo: $(STAMP)
	@$(DEMO) --log-dir runs/demo/logs $(MODEL) --out runs/demo --kill

# The demo, the same undisturbed, and one process.
demo-compare: demo
	@$(DEMO) --log-dir runs/undisturbed/logs $(MODEL) --out runs/undisturbed
	@$(BIN)/python $(MODEL) --out runs/alone
	@$(BIN)/python tools/compare_runs.py runs/demo runs/undisturbed runs/alone

# Four at once on two cores: many tests wait for other processes. The empty variable: hundreds of processes would compile
# the same sources where the environment forbids to keep that.
test: $(STAMP)-kernels
	@$(PYTEST) -n 4 --dist worksteal --durations=10 -m "not slow" $(ELSEWHERE) $(ARGS)

test-all: $(STAMP)-kernels
	@$(PYTEST) -n 3 --dist worksteal --durations=10 $(ELSEWHERE) $(ARGS)

# Jobs on a Ray cluster of three nodes of this machine: two minutes and 2 GB.
test-ray: $(STAMP)-kernels $(STAMP)-ray
	@$(PYTEST) -n 0 -q tests/launch/ray $(ARGS)

# Every way in which Python may change between two steps, against the plain loop.
test-matrix: $(STAMP)-kernels
	@$(PYTEST) -n 2 --dist worksteal -q -m matrix tests/matrix $(ARGS)

# Models and optimizers of other libraries, in a virtual environment of their own that borrows torch from ours.
$(MODELS)/.installed: $(STAMP)-test $(STAMP)-ray
	@test -x $(MODELS)/bin/python || $(BIN)/python -m venv $(MODELS)
	@$(BIN)/python -c "$(PURELIB)" > "$$($(MODELS)/bin/python -c "$(PURELIB)")/ours.pth"
	@echo "installing the libraries into $(MODELS) (once)"
	@$(MODELS)/bin/python -m pip install --quiet --disable-pip-version-check --upgrade "pip>=25.1" -c constraints.txt
	@$(MODELS)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --group models
	@touch $@

test-models: $(MODELS)/.installed $(STAMP)-kernels
	@PYTHONDONTWRITEBYTECODE= PYTHONPATH=src $(MODELS)/bin/python -m pytest -n 2 --dist worksteal -q -m models tests/models $(ARGS)

# Random processes of training jobs are killed or frozen: every 20 seconds, every minute, and workers every few seconds
# in each mode; nine minutes. Ends with a table, and with 1 if a promise was broken.
soak: $(STAMP)
	@$(BIN)/python tools/soak.py --minutes $(MINUTES) $(ARGS)

lint: $(STAMP)-lint
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/lint-imports

# The sources; then examples and guides as a user's type checkers see them.
types: $(STAMP)-test $(STAMP)-types
	@$(BIN)/mypy
	@$(PYTEST) -n 2 -q tests/docs/test_types.py

docs: $(STAMP)-test $(STAMP)-docs
	@$(PYTEST) -n 0 -q tests/docs/test_conf.py
	@$(BIN)/python -m sphinx -W --keep-going -q -b html docs docs/_build/html

# The pictures of docs/performance.md, from the tables in docs/benchmarks.md, and of the pipeline's schedules.
plots: $(STAMP)
	@$(BIN)/python tools/draw_plots.py

# The figures that have targets: a quarter of an hour on two free cores. Results land in benchmarks/results.
bench: $(STAMP)-bench
	@mkdir -p $(RESULTS)
	$(BIN)/python benchmarks/tape_overhead.py --rounds 15 --out $(RESULTS)
	$(BIN)/python benchmarks/step_graph.py --rounds 7 --out $(RESULTS)
	$(BIN)/anabranch run --workers 2 benchmarks/data_parallel.py --rounds 5 --out $(RESULTS)
	$(BIN)/anabranch run --workers 4 benchmarks/all_reduce.py --out $(RESULTS)
	$(BIN)/python benchmarks/tables.py --largest 1000000 --out $(RESULTS)
	$(BIN)/python benchmarks/parameter_server.py --out $(RESULTS)
	$(BIN)/python benchmarks/cached_tables.py --out $(RESULTS)
	$(BIN)/python benchmarks/pipeline.py threads --rounds 3 --out $(RESULTS)
	$(BIN)/anabranch run --workers 2 benchmarks/pipeline.py ranks --rounds 3 --out $(RESULTS)
	$(BIN)/python benchmarks/experts.py --only nop,ffn,mixture,callers --seconds 1 --out $(RESULTS)
	$(BIN)/python benchmarks/autodiff.py --out $(RESULTS)
	$(BIN)/python benchmarks/start.py --out $(RESULTS)
	@$(BIN)/python benchmarks/summary.py $(RESULTS)

# The others: half an hour, and the graph with Inductor.
bench-more: $(STAMP)-bench
	@mkdir -p $(RESULTS)
	$(BIN)/python benchmarks/step_graph.py --compile --floor --rounds 9 --out $(RESULTS)
	$(BIN)/python benchmarks/first_steps.py --rounds 1 --out $(RESULTS)
	$(BIN)/python benchmarks/capture_time.py --out $(RESULTS)
	$(BIN)/anabranch run --workers 2 --servers 1 benchmarks/plans.py --rounds 2 --steps 5 --out $(RESULTS)
	$(BIN)/python benchmarks/cached_tables.py --skews --out $(RESULTS)
	$(BIN)/python benchmarks/snapshots.py --bytes 1e9 --out $(RESULTS)
	$(BIN)/python benchmarks/pipeline.py simulator --out $(RESULTS)
	$(BIN)/python benchmarks/experts.py --only overload --out $(RESULTS)/overload
	$(BIN)/python benchmarks/transport.py --out $(RESULTS)
	$(BIN)/python benchmarks/compression.py --out $(RESULTS)
	$(BIN)/python benchmarks/observing.py --out $(RESULTS)
	$(BIN)/python benchmarks/table_kinds.py --out $(RESULTS)

# The tables of docs/benchmarks.md, where there are results.
bench-page: $(STAMP)
	@$(BIN)/python benchmarks/summary.py $(RESULTS) --docs docs/benchmarks.md

# Beside other libraries, in a virtual environment of their own that borrows torch from ours.
bench-peers: $(STAMP)
	@mkdir -p $(RESULTS)
	@test -x $(PEERS)/bin/python || $(BIN)/python -m venv $(PEERS)
	@$(BIN)/python -c "$(PURELIB)" > "$$($(PEERS)/bin/python -c "$(PURELIB)")/torch.pth"
	@$(PEERS)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps fbgemm-gpu-cpu==1.8.0 \
		torchgpipe==0.0.7
	@$(PEERS)/bin/python -m pip install --quiet --disable-pip-version-check hivemind==1.1.12
	PYTHONPATH=src $(PEERS)/bin/python benchmarks/tables.py --out $(RESULTS)/peers
	PYTHONPATH=src $(PEERS)/bin/python benchmarks/pipeline.py threads --out $(RESULTS)
	PYTHONPATH=src $(PEERS)/bin/python benchmarks/experts_peers.py --out $(RESULTS)

clean:
	rm -rf $(VENV) $(PEERS) $(MODELS) docs/_build build dist .pytest_cache .mypy_cache .ruff_cache
