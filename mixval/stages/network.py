"""Train a network or take it from the store: what base, teacher and student have in common."""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from mixval.checkpoints import Checkpoints, load_weights, save_weights
from mixval.engine import Prepared
from mixval.errors import UserError
from mixval.external import check_external, described, labels_seen
from mixval.fingerprints import file_digest
from mixval.recipe import Learner, Teacher
from mixval.record import Record
from mixval.stages.cell import Cell
from mixval.store import Artifact, Store
from mixval.training import train
from mixval.training_job import Cost, Job, Trained, build_model
from mixval.types import FailureSet


@dataclass(frozen=True)
class Network:
    """A trained network, what it cost, and the fingerprint of all it was made from."""

    model: Prepared
    cost: Cost
    fingerprint: str
    record: Record | None = None
    leaks: bool = False  # whether test labels may have reached it
    preparation: Cost = field(default_factory=Cost)  # of what was made for it alone or first


def learn(
    cell: Cell,
    learner: Learner,
    place: tuple[str, ...],
    store: Store,
    *,
    stream: str,
    failures: FailureSet | None = None,
    extra: dict[str, Any] | None = None,
    make_job: Callable[[Job, Artifact], Job] = lambda job, artifact: job,
    leaks: bool = False,
) -> Network:
    """Return the learner's network: from the store if it is there, else trained and stored.

    `extra` is what else decides the weights (a teacher, a replayed run), by fingerprint;
    `make_job` adds it to the job, and `leaks` says whether it knows test labels.
    """
    recipe = cell.recipe
    leaks = leaks or recipe.leaks_test_labels(learner)
    job = Job(
        learner=learner,
        training=recipe.training,
        model=recipe.model_of(learner),
        epochs=recipe.epochs_of(learner),
        part=cell.pool(learner.data, failures),
        splits=cell.splits,
        seed=cell.seed,
        stream=stream,
    )
    made_from = {
        "settings": learner.model_dump(mode="json", exclude={"title", "control", "weights"}),
        "training": recipe.training.model_dump(mode="json"),
        "model": job.model.model_dump(mode="json"),
        "training data": job.part.fingerprint,
        **(extra or {}),
    }
    artifact = cell.artifact(store, *place, made_from=made_from)
    facts = cell.reuse(artifact)
    if facts is not None:
        return _load(cell, job, artifact, facts)
    checkpoints = Checkpoints(artifact.path("checkpoints"), artifact.fingerprint)
    job = replace(make_job(job, artifact), folder=artifact.folder)
    trained = train(job, cell.engine, checkpoints, cell.watch)
    if cell.engine.processes.is_main:
        _save(cell, job, artifact, trained, leaks)
        checkpoints.clear()
    cell.engine.processes.wait()
    return Network(
        trained.model, trained.cost, artifact.fingerprint, trained.record, leaks, job.preparation
    )


def load_external(cell: Cell, place: str, teacher: Teacher) -> Network:
    """Return a finished network from a file, after checking that it fits this data and model."""
    path = Path(teacher.weights or "")
    facts = check_external(cell.recipe, place, teacher)
    if facts["classes"] != str(cell.splits.num_classes):
        raise UserError(
            f"{place}.weights: {path} has {facts['classes']} classes, "
            f"the data has {cell.splits.num_classes}; give a teacher of the same classes"
        )
    if facts["content"] != cell.splits.content:
        raise UserError(
            f"{place}.weights: {path} is of another dataset; give a teacher of this one"
        )
    choice = cell.recipe.model_of(teacher)
    model = cell.engine.prepare(build_model(choice, cell.splits, cell.seed, "teacher"))
    try:
        model.network.load_state_dict(load_weights(path))
    except RuntimeError as error:
        raise UserError(f"{place}.weights: {path} does not fit {choice.name}: {error}") from error
    # Without a test split of the dataset's own, each seed draws another one: a teacher of
    # another seed or run may have trained on what is test here.
    foreign = not cell.splits.own_test and facts["splits"] != cell.data_fingerprint
    leaks = foreign or facts["leaks"] != "no"
    return Network(model.eval(), Cost(), file_digest(path)[:16], leaks=leaks)


def _save(cell: Cell, job: Job, artifact: Artifact, trained: Trained, leaks: bool) -> None:
    header = {
        "dataset": cell.data.source.name,
        "classes": str(cell.splits.num_classes),
        "model": described(job.model),
        "content": cell.splits.content,
        "splits": cell.data_fingerprint,
        "labels": labels_seen(cell.recipe, job.learner),
        "leaks": "yes" if leaks else "no",
        "fingerprint": artifact.fingerprint,
    }
    save_weights(artifact.path("weights.safetensors"), trained.model.network.state_dict(), header)
    lines = "".join(json.dumps(row) + "\n" for row in trained.metrics)
    artifact.path("metrics.jsonl").write_text(lines)
    last = {key: trained.metrics[-1][key] for key in ("val_dev_accuracy", "val_dev_nll")}
    costs = {"cost": asdict(trained.cost), "preparation": asdict(job.preparation)}
    artifact.finish({**costs, **last, "leaks_test_labels": leaks})


def _load(cell: Cell, job: Job, artifact: Artifact, facts: dict[str, Any]) -> Network:
    model = cell.engine.prepare(build_model(job.model, job.splits, job.seed, job.stream))
    model.network.load_state_dict(load_weights(artifact.folder / "weights.safetensors"))
    replay = Record(artifact.folder) if Record.is_in(artifact.folder) else None
    cost, preparation = Cost(**facts["cost"]), Cost(**facts["preparation"])
    leaks = facts["leaks_test_labels"]
    return Network(model.eval(), cost, artifact.fingerprint, replay, leaks, preparation)
