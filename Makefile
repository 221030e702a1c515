# make round    all set-up, then the smoke round, to the acceptance table
# make test     all set-up, then lint, types and every test
# make lint     ruff and mypy alone
# make unit     the fast tests alone
# make benchmarks    the benchmarks; not part of the tests

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.ONESHELL:
.DEFAULT_GOAL := test
.PHONY: round test lint unit benchmarks

PYTHON = deployments/bin/python

# $(call step,NAME,COMMAND): say what runs and how long it took; its failure is the target's.
define step
echo "== $(1)"
began=$$SECONDS
$(2) || { status=$$?; echo "== $(1): FAILED after $$((SECONDS - began)) s"; exit $$status; }
echo "== $(1): $$((SECONDS - began)) s"
endef

round:
	@deployments/bin/eagle3 round smoke

test:
	@whole=$$SECONDS
	$(call step,environments,$(PYTHON) -m infra.environments build flows vllm-cpu sglang-cpu)
	$(call step,ruff,$(PYTHON) -m ruff check .)
	$(call step,mypy,$(PYTHON) -m mypy)
	# Tests of live engines and of faults spend much of their time waiting: two lanes, the second one's output at its end.
	log=$$(mktemp) && began=$$SECONDS
	exec $(PYTHON) -m pytest tests/live > "$$log" 2>&1 & live=$$!
	trap 'kill -INT $$live 2>/dev/null && wait $$live; rm -f "$$log"' EXIT
	for tier in unit flows faults; do
	  $(call step,tests/$$tier,$(PYTHON) -m pytest tests/$$tier)
	done
	status=0 && wait $$live || status=$$?
	cat "$$log"
	echo "== tests/live: exit status $$status after $$((SECONDS - began)) s"
	test $$status = 0
	echo "== all: $$((SECONDS - whole)) s"

lint:
	@$(call step,ruff,$(PYTHON) -m ruff check .)
	$(call step,mypy,$(PYTHON) -m mypy)

unit:
	@$(call step,tests/unit,$(PYTHON) -m pytest tests/unit)

benchmarks:
	@$(call step,benchmarks,$(PYTHON) -m pytest tests/benchmarks -s)
