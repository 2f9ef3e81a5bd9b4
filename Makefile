# Two commands do everything: `make run` and `make test`.
PYTHON ?= python3
PIP_FLAGS ?=
VENV := .venv

.PHONY: run test clean

run: $(VENV)/installed
	$(VENV)/bin/mixval run

test: $(VENV)/installed
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/pytest -n auto

$(VENV)/installed: pyproject.toml constraints.txt
	@echo "Installing into $(VENV). torch from PyPI brings CUDA: about 5.6 GB, also where there is no GPU."
	@echo "Smaller: make $(MAKECMDGOALS) PIP_FLAGS='--extra-index-url URL', with the CPU index that pytorch.org names"
	@echo "under 'Start Locally'; or PIP_FLAGS='--find-links DIR' with CPU wheels of torch and torchvision in DIR."
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install --quiet --disable-pip-version-check $(PIP_FLAGS) -c constraints.txt -e '.[dev]'
	@touch $@

clean:
	rm -rf $(VENV) runs
