"""Run suites over networks and batch sizes; say what came out and write it to a file."""

import itertools
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from mixval import choose
from mixval.bench.case import Case
from mixval.bench.suites import Result, run
from mixval.engine import num_cores, start_engine
from mixval.environment import environment
from mixval.errors import UserError
from mixval.files import write_atomically
from mixval.recipe import Choice, EngineSettings, Recipe


def run_all(
    suites: Sequence[str],
    *,
    models: Sequence[str],
    batch_sizes: Sequence[int],
    seconds: float,
    threads: int | None = None,
    device: str = "auto",
    precision: str = "bf16",
    samples: int = 50_000,
    file: Path | None = None,
    say: Callable[[str], None] = print,
) -> list[Result]:
    """Measure every suite with every network and batch size, `seconds` each."""
    if any(size % 2 for size in batch_sizes):
        raise UserError(f"--batch-size: must be even for timm's mixup, got {list(batch_sizes)}")
    if max(batch_sizes) > samples:
        raise UserError(f"--samples: must be at least a batch of {max(batch_sizes)}, got {samples}")
    choices = [_network(model) for model in models]
    settings = {"device": device, "precision": precision, "channels_last": True}
    settings["threads"] = threads or num_cores()
    engine = start_engine(EngineSettings.model_validate(settings))
    results: list[Result] = []
    for suite, model, size in itertools.product(suites, choices, batch_sizes):
        case = Case(model, size, engine, samples)
        results.append(run(suite, case, seconds))
        say(f"{results[-1]}\n")
        if file is not None:  # after each, so that what was measured survives what fails
            write_atomically(file, json.dumps(_described(results), indent=1).encode())
    return results


def _described(results: list[Result]) -> dict[str, object]:
    machine = {"cores": num_cores(), "cpu": torch.backends.cpu.get_cpu_capability()}
    return {
        "environment": {**environment(), **machine},
        "results": [result.described() for result in results],
    }


def _network(name: str) -> Choice:
    """Return an option of `models`, or else timm's architecture of that name, checked."""
    own = name in choose.options("models") and name != "timm"
    described = {"name": name} if own else {"name": "timm", "architecture": name}
    return Recipe.model_validate({"name": "bench", "model": described}).model
