# Backhaul: `make run` shows it, `make up` keeps it running.
.DEFAULT_GOAL := help
SHELL := /bin/bash
MAKEFLAGS += --no-print-directory

VENV ?= .venv
BIN := $(VENV)/bin
ARGS ?=
SIM ?=
GATEWAY ?=
TLS ?=

# The environments are made by the first of these that is Python 3.11 (the engines' packages are built for it).
PYTHON ?= $(shell for python in python3.11 python3; do \
	$$python -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null && echo $$python && break; done)

# An environment named on the command line (make test VENV=...) is taken as it is.
ifeq ($(VENV),.venv)
ENVIRONMENTS := $(if $(SIM),install-services,install)
endif

PROTOS := $(patsubst proto/%,%,$(wildcard proto/backhaul/*/v*/*.proto))
# Google's protos (google/api, google/rpc) come with googleapis-common-protos.
INCLUDES = -I. -I"$$(python -c 'import pathlib, google.rpc; print(pathlib.Path(google.rpc.__path__[0]).parents[1])')"
IN_PROTO = cd proto && PATH="$(abspath $(BIN)):$$PATH" && protoc() { python -m grpc_tools.protoc $(INCLUDES) "$$@"; }
PROTOC = $(IN_PROTO) && \
	protoc --python_out=$(1) --grpc_python_out=$(1) --mypy_out=quiet:$(1) --mypy_grpc_out=quiet:$(1) $(PROTOS) && \
	protoc --include_imports --descriptor_set_out=$(1)/backhaul/router/v1/router.binpb \
		backhaul/router/v1/http.proto backhaul/router/v1/router.proto google/rpc/error_details.proto
PRIVATE := /(home|root|Users)/[a-z]|(py)pi[.]org|(python)hosted[.]org|(py)torch[.]org|(npm)js[.]org

.PHONY: help
help: ## Prints this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-13s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

.PHONY: run
run: $(ENVIRONMENTS) ## Installs what is needed, then plays a conversation with and without reuse (SIM=1: simulated engines; ARGS=--help for options)
	@$(BIN)/python -m backhaul_local run $(if $(SIM),--simulated) $(GATEWAY:%=--gateway %) $(if $(TLS),--tls) $(ARGS)

.PHONY: up
up: $(ENVIRONMENTS) ## The same stack, in the foreground until Ctrl-C (SIM=1: simulated engines; GATEWAY=envoy: Envoy in front; TLS=1: TLS on every hop; ARGS=--help for options)
	@$(BIN)/python -m backhaul_local up $(if $(SIM),--simulated) $(GATEWAY:%=--gateway %) $(if $(TLS),--tls) $(ARGS)

.PHONY: certs
certs: $(if $(ENVIRONMENTS),install-services) ## A CA and certificates for all services in .state/certs, for trying TLS (docs/tls.md; ARGS=--help for options)
	@$(BIN)/python -m backhaul_local certs $(ARGS)

.PHONY: install
install: ## Makes both environments, .venv and .venv-engine, unless they are up to date
	$(if $(PYTHON),,$(error Backhaul needs Python 3.11, and neither python3.11 nor python3 is it))
	@PYTHONPATH=deploy/local/src $(PYTHON) -B -m backhaul_local.install .

.PHONY: install-services
install-services:
	$(if $(PYTHON),,$(error Backhaul needs Python 3.11, and neither python3.11 nor python3 is it))
	@PYTHONPATH=deploy/local/src $(PYTHON) -B -m backhaul_local.install . --services-only

.PHONY: test
test: $(ENVIRONMENTS) ## Runs all tests: unit, contract, integration with etcd, end to end on real engines, mutants
	@$(BIN)/python -m tests $(ARGS)

.PHONY: soak
soak: $(if $(ENVIRONMENTS),install-services) ## Plays 200,000 random turns on simulated engines, every text checked (ARGS=--help for options)
	@$(BIN)/python -m tests.soak $(ARGS)

.PHONY: fuzz
fuzz: $(if $(ENVIRONMENTS),install-services) ## Gives every parser 1,000,000 inputs in all that nobody sends in earnest (ARGS=--help for options)
	@$(BIN)/python -m tests.fuzz $(ARGS)

.PHONY: replay
replay: $(if $(ENVIRONMENTS),install-services) ## What each retention policy would save on a trace of turns, in virtual time (ARGS=--help for options)
	@$(BIN)/python -m backhaul_replay $(ARGS)

.PHONY: bench
bench: ## Runs all benchmarks of docs/performance.md, one after the other: an hour on two quiet cores
	@trap 'exit 130' INT TERM; missed=; for each in engines overhead registry connector agent scale; do \
		$(MAKE) bench-$$each ARGS= || missed="$$missed bench-$$each"; \
	done; [ -z "$$missed" ] || { echo "missed a target, or could not be run:$$missed"; exit 1; }

.PHONY: bench-routing
bench-routing: $(if $(ENVIRONMENTS),install-services) ## What choosing routes is worth, on loads against simulated engines (ARGS=--help for options)
	@$(BIN)/python -m benchmarks.routing $(ARGS)

.PHONY: bench-engines
bench-engines: $(ENVIRONMENTS) ## Time to the first token on real engines, one-way P/D beside Backhaul (SIM=1: tries the benchmark itself; ARGS=--help for options)
	@$(BIN)/python -m benchmarks.engines $(if $(SIM),--simulated) $(ARGS)

.PHONY: bench-scale
bench-scale: $(if $(ENVIRONMENTS),install-services) ## What a turn costs the control plane, from 1 to 96 engines, in virtual time (ARGS=--help for options)
	@$(BIN)/python -m benchmarks.scale $(ARGS)

.PHONY: bench-gateway
bench-gateway: $(if $(ENVIRONMENTS),install-services) ## What tokens cost a router, behind Envoy and over its own API (ARGS=--help for options)
	@$(BIN)/python -m benchmarks.gateway $(ARGS)

.PHONY: bench-agent
bench-agent: $(if $(ENVIRONMENTS),install-services) ## What a node agent costs that holds 10, 1,000 and 10,000 block sets (ARGS=--help for options)
	@$(BIN)/python -m benchmarks.agent $(ARGS)

.PHONY: bench-connector
bench-connector: $(ENVIRONMENTS) ## What the connector costs an engine's scheduler, under vLLM's own and in real engines (ARGS=--help for options)
	@$(BIN)/python -m benchmarks.connector $(ARGS)

.PHONY: bench-registry
bench-registry: $(if $(ENVIRONMENTS),install-services) ## What lookups, publications and claims cost, beside bare handlers on the same etcd (ARGS=--help for options)
	@$(BIN)/python -m benchmarks.registry $(ARGS)

.PHONY: bench-overhead
bench-overhead: $(if $(ENVIRONMENTS),install-services) $(if $(BACKHAUL_VLLM_ROUTER_BINARY),,.venv-peer) ## What a router adds to turns, beside vllm-router, Envoy and no router at all (ARGS=--help for options)
	@BACKHAUL_VLLM_ROUTER_BINARY=$${BACKHAUL_VLLM_ROUTER_BINARY:-.venv-peer/bin/vllm-router} \
		$(BIN)/python -m benchmarks.overhead $(ARGS)

# vllm-router needs versions of its own of what the services use, too.
.venv-peer: benchmarks/overhead/requirements.txt
	$(if $(PYTHON),,$(error vllm-router needs Python 3.11, and neither python3.11 nor python3 is it))
	@$(PYTHON) -m venv $@ && $@/bin/pip install --quiet -r $< && touch $@

.PHONY: check
check: $(ENVIRONMENTS) ## Lint, types, import direction, protos, generated code up to date, images and manifests, nothing private in any file
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports
	@image=$$(mktemp --suffix=.binpb) && trap 'rm -f "$$image"' EXIT && $(IN_PROTO) && \
		protoc --include_imports --include_source_info --descriptor_set_out="$$image" $(PROTOS) && \
		buf lint "$$image" --config buf.yaml --path backhaul && buf format --diff --exit-code
	@fresh=$$(mktemp -d) && trap 'rm -rf "$$fresh"' EXIT && ($(call PROTOC,"$$fresh")) && \
		diff -r -x __init__.py -x py.typed -x __pycache__ proto/gen "$$fresh" || \
		{ echo "generated code is not up to date: run make proto"; exit 1; }
	$(BIN)/hadolint deploy/docker/*.Dockerfile
	$(BIN)/check-jsonschema --builtin-schema vendor.compose-spec deploy/compose/*.yaml
	@set -o pipefail; for overlay in deploy/kustomize/overlays/*; do echo "kubectl kustomize $$overlay | kubernetes-validate"; \
		$(BIN)/kubectl kustomize $$overlay | $(BIN)/kubernetes-validate --strict --quiet - || exit; done
	@! git grep -nIE '$(PRIVATE)' || { echo "these lines name a machine's paths or a package registry"; exit 1; }

.PHONY: proto
proto: $(ENVIRONMENTS) ## Regenerates the code in proto/gen
	@$(call PROTOC,gen)
	@find proto/gen/backhaul -type d -not -name __pycache__ -exec touch {}/__init__.py \;

.PHONY: clean
clean: ## Removes the environments, models, logs and caches
	rm -rf .venv .venv-engine .venv-peer .state .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
