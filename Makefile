# make round      all set-up, then the smoke round, to the acceptance table
# make test       all set-up, then lint, types and every kind of test; about half an hour on two cores
# make test-long  the long schedules of faults, whole; hours. `make test` has a sample of each
# make lint       ruff, mypy and the import contracts alone
# make unit       the fast tests alone
# make benchmarks the benchmarks; not part of the tests

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.ONESHELL:
.DEFAULT_GOAL := test
.PHONY: round test test-long lint unit benchmarks

PYTHON = deployments/bin/python
PYTEST = $(PYTHON) -m pytest
# Two lanes, since most tests wait for one process or another: tests/conftest.py says how they share the modules.
LANES = -n 2
# The largest first, so that both lanes end at about the same time.
TIERS = tests/live tests/long tests/flows tests/faults
ENGINES = vllm-cpu sglang-cpu

# $(call step,NAME,COMMAND): say what runs and how long it took; its failure is the target's.
define step
echo "== $(1)"
began=$$SECONDS
$(2) || { status=$$?; echo "== $(1): FAILED after $$((SECONDS - began)) s"; exit $$status; }
echo "== $(1): $$((SECONDS - began)) s"
endef

# $(call bounded,TIME,COMMAND): whatever hangs, it is interrupted then, and killed a minute later.
bounded = timeout --foreground --signal=INT --kill-after=60 $(1) $(2)

define lint
$(call step,ruff,$(PYTHON) -m ruff check .)
$(call step,mypy,$(PYTHON) -m mypy)
$(call step,imports,$(PYTHON) -c 'from importlinter.cli import lint_imports_command as main; main()')
endef

define unit
$(call step,tests/unit,$(call bounded,20m,$(PYTEST) tests/unit $(LANES)))
endef

# The flows' environment; the engines' are built from then on, beside what needs none of them, until waited for.
define environments
$(call step,environment of the flows,$(PYTHON) -m infra.environments build flows)
log=$$(mktemp)
$(PYTHON) -m infra.environments build $(ENGINES) > "$$log" 2>&1 & engines=$$!
trap 'kill -INT $$engines 2>/dev/null && wait $$engines; rm -f "$$log"' EXIT
endef

define engines
$(call step,environments of the engines,wait $$engines || { cat "$$log"; false; })
endef

round:
	@deployments/bin/eagle3 round smoke

test:
	@whole=$$SECONDS
	$(environments)
	$(lint)
	$(unit)
	$(engines)
	$(call step,$(TIERS),$(call bounded,70m,$(PYTEST) $(TIERS) $(LANES) --verbose --maxfail=5))
	echo "== all: $$((SECONDS - whole)) s"

test-long:
	@$(environments)
	$(engines)
	$(call step,long tests,$(call bounded,4h,$(PYTEST) tests -m long --verbose))

lint:
	@$(lint)

unit:
	@$(unit)

benchmarks:
	@$(call step,benchmarks,$(PYTEST) tests/benchmarks -s)
