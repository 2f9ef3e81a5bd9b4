"""What every test shares: a tiny recipe, a way to run commands, and no silent skips."""

import copy
import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

pytest_plugins = "pytester"

# Part of a test's id or of its reason. A skip that is not listed here fails the session,
# so that a test which can't run is noticed instead of counted as passed.
ALLOWED_SKIPS: tuple[str, ...] = ()

TINY: dict[str, Any] = {
    "name": "tiny",
    "data": {"source": "digits", "train": 60, "val_f": 40, "val_dev": 40},
    "model": {"name": "mlp", "hidden": [16]},
    "training": {"epochs": 4, "batch_size": 20, "lr": 0.05, "evaluate_every": 2},
    "base": {"alpha": 1, "clean": "none"},
    "teachers": {"failures": {"data": "train+failures", "alpha": 1, "clean": "none"}},
    "scores": {"rows": 50, "chunk": 20},
    "arms": {
        "erm": {"alpha": 0},
        "all": {"alpha": 1, "control": "erm"},
        "guided": {"teacher": "failures", "filter": "negative", "control": "yoked"},
        "yoked": {"filter": {"name": "yoked", "of": "guided"}, "control": "all"},
    },
    "seeds": [0],
    "engine": {"device": "cpu", "workers": 1},
}


# -- no silent skips ----------------------------------------------------------------------


def _skips(config: pytest.Config) -> list[tuple[str, str]]:
    """Return the id and the reason of every skipped test, also of skipped modules."""
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    reports = reporter.stats.get("skipped", []) if reporter is not None else []
    return [(report.nodeid, _reason(report.longrepr)) for report in reports]


def _reason(longrepr: Any) -> str:
    return str(longrepr[2] if isinstance(longrepr, tuple) else longrepr)


def _allowed(nodeid: str, reason: str) -> bool:
    return any(part in nodeid or part in reason for part in ALLOWED_SKIPS)


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    if exitstatus == 0 and not all(_allowed(*skip) for skip in _skips(session.config)):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    for nodeid, reason in _skips(config):
        verdict = "allowed" if _allowed(nodeid, reason) else "NOT ALLOWED"
        terminalreporter.write_line(f"skipped ({verdict}): {nodeid}: {reason}")
    for marker, there in NEEDED.items():
        if not there:  # they are not collected, so that nobody takes them for passed
            terminalreporter.write_line(
                f"left out: the tests marked {marker!r}; see pyproject.toml"
            )


# -- tests that need data which is not here are left out, not skipped -----------------------

NEEDED = {  # by marker: whether what it needs is there
    "data": bool(os.environ.get("MIXVAL_DATA")),
    "packs": Path(os.environ.get("MIXVAL_DATA", "nowhere"), "unpack.py").is_file(),
    "lightning": importlib.util.find_spec("pytorch_lightning") is not None,
    "fashion": Path("/usr/share/datasets/fashion-mnist").is_dir(),
}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    absent = {marker for marker, there in NEEDED.items() if not there}
    left_out = [item for item in items if absent & {mark.name for mark in item.iter_markers()}]
    items[:] = [item for item in items if item not in left_out]
    config.hook.pytest_deselected(items=left_out)


# -- recipes ------------------------------------------------------------------------------


def lay_over(described: dict[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of nested dictionaries with dotted keys replaced; None removes a key."""
    laid = copy.deepcopy(described)
    for dotted, value in changes.items():
        *path, last = dotted.split(".")
        inner = laid
        for key in path:
            inner = inner.setdefault(key, {})
        if value is None:
            inner.pop(last, None)
        else:
            inner[last] = value
    return laid


@pytest.fixture(scope="session")
def tiny_description() -> Callable[..., dict[str, Any]]:
    """Return a maker of the tiny recipe as nested dictionaries, with dotted changes."""
    return lambda changes=None: lay_over(TINY, changes or {})


@pytest.fixture(scope="session")
def tiny_recipe() -> Callable[..., Any]:
    """Return a maker of the tiny recipe, with dotted changes."""
    from mixval import make_recipe

    return lambda changes=None: make_recipe(lay_over(TINY, changes or {}))


# -- commands -----------------------------------------------------------------------------


@pytest.fixture(scope="session")
def mixval_script() -> str:
    """Return the path of the command as it was installed beside this Python."""
    script = shutil.which("mixval", path=str(Path(sys.executable).parent))
    assert script is not None, "mixval is not installed beside this Python: pip install -e ."
    return script


@pytest.fixture
def mixval(mixval_script: str, tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Return a runner of `mixval ...` in a process of its own, in an empty folder."""

    def run(*words: object, cwd: Path = tmp_path) -> subprocess.CompletedProcess[str]:
        command = [mixval_script, *map(str, words)]
        return subprocess.run(
            command, cwd=cwd, capture_output=True, text=True, timeout=120, check=False
        )

    return run


# -- torch --------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    """The number of threads can change the last bits."""
    torch.set_num_threads(1)


# -- networks -----------------------------------------------------------------------------


@pytest.fixture
def engine() -> Any:
    from mixval.engine import start_engine
    from mixval.recipe import EngineSettings

    return start_engine(EngineSettings(device="cpu"))


@pytest.fixture(scope="session")
def splits() -> Any:
    """Return the splits of the tiny recipe, seed 0."""
    from mixval.datasets import digits
    from mixval.splits import load_splits

    return load_splits(digits(), seed=0, train=60, val_f=40, val_dev=40, label_noise=0.0)


@pytest.fixture(scope="session")
def make_job(tiny_recipe: Callable[..., Any], splits: Any) -> Callable[..., Any]:
    """Return a maker of the job of an arm of the tiny recipe; keywords replace its fields."""
    from mixval.training import Job

    def make(changes: Mapping[str, Any] | None = None, arm: str = "all", **fields: Any) -> Any:
        recipe = tiny_recipe(changes)
        learner = recipe.arms[arm]
        job = {
            "learner": learner,
            "training": recipe.training,
            "model": recipe.model_of(learner),
            "epochs": recipe.epochs_of(learner),
            "part": splits.train,
            "splits": splits,
            "seed": 0,
            "stream": "student",
        }
        return Job(**{**job, **fields})

    return make


@pytest.fixture(scope="session")
def teacher_model(make_job: Callable[..., Any], splits: Any) -> Any:
    """Return a network that knows more than a student on train, and is too sure of mixes.

    So r_hat has both signs from the first step on.
    """
    from mixval.engine import start_engine
    from mixval.recipe import EngineSettings
    from mixval.training import Watch, train
    from mixval.types import Part

    more = Part.join([splits.train, splits.val_f])
    changes = {"arms.all.alpha": 0, "arms.all.epochs": 40, "training.lr": 0.2}
    job = make_job(changes, part=more, stream="teacher")
    return train(job, start_engine(EngineSettings(device="cpu")), None, Watch()).model


@pytest.fixture(scope="session")
def scorer(teacher_model: Any) -> Any:
    from mixval.losses import cross_entropy
    from mixval.posteriors import point
    from mixval.rhat import Scorer

    return Scorer(point([teacher_model]), cross_entropy)


@pytest.fixture(scope="session")
def snapshot() -> Callable[[Path], dict[str, bytes | None]]:
    """Return a function that reads a whole folder, to see that nothing in it changed."""

    def read(folder: Path) -> dict[str, bytes | None]:
        return {
            str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
            for path in sorted(folder.rglob("*"))
        }

    return read
