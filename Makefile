# Works in a fresh clone: each target first runs scripts/setup, which installs what is needed.
# See docs/how-to/build-and-test.md.

SHELL := /bin/bash
target := $(or $(CARGO_TARGET_DIR),target)

# setup.env adds a Rust toolchain to PATH if necessary.
setup = scripts/setup --quiet --for demo && . $(target)/setup.env

.DEFAULT_GOAL := help
.PHONY: help demo test test-long quick lint doc reference test-unit test-matrix test-matrix-2x \
	test-verbs soak soak-topics soak-hostile install-c wheel bench-fabric bench-ring bench-ipc gpu-bundle fuzz test-fresh clean

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "  make %-15s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: ## Build it and show what it does, on this machine, without special hardware
	@$(setup) && cargo run --locked --release --bin fabricast -- demo

test: ## All checks required before a merge
	@scripts/test

test-long: ## Run-time checkers and fuzzing: slow steps and steps that need a nightly toolchain
	@scripts/test --long

quick: ## Quick subset of test: lint, and the tests of packages that differ from main
	@scripts/test --quick

lint: ## Formatting, clippy, and the checks of CONTRIBUTING.md
	@scripts/test lint

doc: ## The API's documentation; warnings are errors
	@scripts/test doc

reference: ## Write the pages of docs/reference that are generated from declarations
	@$(setup) && WRITE_REFERENCE=1 cargo test --locked --quiet --bins -- documentation_lists

test-unit: ## Unit, integration and documentation tests, with nextest if installed
	@scripts/test unit doc-tests

test-matrix: ## The provider matrix in all environments
	@scripts/matrix

test-matrix-2x: ## The provider matrix on libfabric 2.x only
	@scripts/matrix libfabric-2x headers-2x

test-verbs: ## The verbs cells only, in a virtual machine with an RDMA device
	@scripts/matrix verbs verbs-2x

soak: ## Kill the processes at a ring's ends for MINUTES (10), and check every byte
	@MINUTES=$(or $(MINUTES),10) scripts/soak

wheel: ## The package for Python, with the command, for this machine: target/python/wheel
	@$(setup) && scripts/python-wheel

install-c: ## Install headers and libraries for C and C++ below PREFIX
	@$(setup) && scripts/install-c $(or $(PREFIX),$(error PREFIX is not set. Use: make install-c PREFIX=DIRECTORY))

soak-topics: ## Kill, stop and cut what topics of two nodes need for MINUTES (10), and check every message
	@MINUTES=$(or $(MINUTES),10) scripts/soak topics

soak-hostile: ## Attack two nodes with topics under traffic, and check that subscribers are not affected
	@scripts/soak hostile

bench-fabric: ## Measure the fabric layer against the same written in C
	@$(setup) && scripts/bench-fabric

bench-ring: ## Measure messages through the ring, and what its design decisions cost
	@$(setup) && scripts/bench-ring

bench-ipc: ## Measure allocator and queue against other implementations; needs 10 cores
	@$(setup) && scripts/bench-ipc

gpu-bundle: ## Collect in target/gpu what a machine with GPUs needs to run the tests there
	@$(setup) && scripts/gpu-bundle

fuzz: ## Fuzz each decoder for FUZZ_SECONDS (30), if cargo-fuzz is installed
	@scripts/test fuzz

test-fresh: ## Run set-up and demo in a bare Debian (needs root)
	@scripts/test-fresh

clean: ## Remove all that was built, fetched or cached here
	rm -rf $(addprefix $(target)/,aarch64 asan c-interface fresh headers-2x libfabric-2x loom matrix miri oldest-rust tsan verbs-vm setup.env)
	@! command -v cargo >/dev/null || cargo clean
