"""The teacher's H of every planned mix, scored once and used by every student that sees the plan.

Plans are pure functions of (seed, epoch, ...), so what a frozen teacher makes of a mix is
known before a student meets it. 4 bytes a mix, on disk; one epoch of it in memory.
"""

import json
import time
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mixval import choose
from mixval.epoch_file import EpochFile
from mixval.errors import Interrupted
from mixval.feeding import feed
from mixval.files import write_atomically
from mixval.fingerprints import array_fingerprint, fingerprint
from mixval.mixing import RowMaker
from mixval.moments import alpha_at
from mixval.rhat import draw_losses
from mixval.stages.cell import Cell
from mixval.stages.teacher import TeacherSet
from mixval.store import Artifact, Store
from mixval.training_job import (
    Cost,
    Job,
    Plans,
    epoch_uniforms,
    micro_batches,
    num_steps,
    step_rows,
    train_rows,
)

_DONE = "epochs.json"  # the checksums of the epochs that are scored


def bank(
    cell: Cell, name: str, teacher: TeacherSet, job: Job, store: Store
) -> tuple[EpochFile, Cost]:
    """Return the bank of this teacher and this job's mixes, and what making it cost.

    It is named by all that decides H, so another plan, teacher, augmentation or dataset
    has another bank, and one that was put in its place is refused.
    """
    made_from = {
        "teacher": teacher.fingerprint,
        "training data": job.part.fingerprint,
        "plan": _plan_facts(job),
        "augmentation": job.training.augmentation.model_dump(mode="json"),
        "loss": cell.recipe.scores.loss.model_dump(mode="json"),
    }
    place = f"{name}-{fingerprint(made_from)[:8]}"
    artifact = cell.artifact(store, "banks", place, made_from=made_from)
    facts = cell.reuse(artifact)
    if facts is None:
        facts = _make(cell, artifact, teacher, job)
    return EpochFile(artifact.folder / "bank.npy"), Cost(**facts["cost"])


def _plan_facts(job: Job) -> dict[str, Any]:
    described = job.learner.model_dump(
        mode="json", include={"alpha", "mixup_until", "same_lam", "derange"}
    )
    folds = None if job.folds is None else array_fingerprint(job.folds)
    return {**described, "epochs": job.epochs, "stream": job.stream, "folds": folds}


def _make(cell: Cell, artifact: Artifact, teacher: TeacherSet, job: Job) -> dict[str, Any]:
    processes, start = cell.engine.processes, time.monotonic()
    path = artifact.path("bank.npy")
    processes.from_main(lambda: EpochFile.create(path, job.epochs, len(job.part), "float32").path)
    file, maker = EpochFile(path), train_rows(job, cell.engine.device, cell.engine.loaders)
    sums = processes.from_main(lambda: _scored_already(artifact, file))
    mixing = [e for e in range(job.epochs) if alpha_at(job.learner, e, job.epochs) > 0]
    for epoch in mixing:
        if str(epoch) in sums:
            continue
        losses = _epoch_losses(cell, teacher, job, maker, epoch)
        if processes.is_main:
            file.write(epoch, losses)
            sums[str(epoch)] = file.checksum(epoch)
            done = {"made_from": artifact.fingerprint, "sums": sums}
            write_atomically(artifact.path(_DONE), json.dumps(done).encode())
    mixes = len(mixing) * len(job.part)
    cost = Cost(forwards=teacher.passes * mixes, seconds=time.monotonic() - start)
    facts = {"cost": vars(cost), "mixes": mixes}
    if processes.is_main:
        artifact.finish(facts)
    processes.wait()
    return facts


def _scored_already(artifact: Artifact, file: EpochFile) -> dict[str, int]:
    """Return the epochs that an interrupted try has scored, as far as they are whole."""
    path = artifact.folder / _DONE
    done = json.loads(path.read_text()) if path.is_file() else {}
    if done.get("made_from") != artifact.fingerprint:  # other code, or another engine
        return {}
    return {
        epoch: value for epoch, value in done["sums"].items() if file.checksum(int(epoch)) == value
    }


def _epoch_losses(
    cell: Cell, teacher: TeacherSet, job: Job, maker: RowMaker, epoch: int
) -> np.ndarray[Any, Any]:
    """Return H of every mix of an epoch, in the batches that a student would score them in."""
    processes, settings = cell.engine.processes, cell.recipe.scores.loss
    loss = choose.pick("losses", settings.name, settings.parameters)
    plan = Plans(job, epoch, alpha_at(job.learner, epoch, job.epochs))[0]
    steps = num_steps(len(plan), job.training.batch_size)
    own = []
    for step in range(steps):
        rows = plan.keep(step_rows(len(plan), steps, step))
        share = rows.keep(processes.share(len(rows)))
        own.append(micro_batches(share, job.training.accumulate))
    uniforms = epoch_uniforms(job, maker, epoch)
    batches = feed(maker, [part for step in own for part in step], uniforms)
    values: list[Tensor] = []
    for step_plans in own:
        parts = []
        for batch in (next(batches) for _ in step_plans):
            assert batch.mixed is not None and batch.mixed_targets is not None
            log_probs = teacher.posterior(batch.mixed, batch.fold)
            parts.append(draw_losses(log_probs, batch.mixed_targets, loss).mean(0))
        values.append(processes.gather(torch.cat(parts)).cpu())
        if processes.any([cell.watch.should_stop()], cell.engine.device)[0]:
            raise Interrupted
    return torch.cat(values).float().numpy()
