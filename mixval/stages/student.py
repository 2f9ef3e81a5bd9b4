"""The network that is guided, from scratch."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import nn

from mixval import choose
from mixval.guidance import Guidance
from mixval.moments import epoch_of
from mixval.recipe import Arm
from mixval.rhat import Scorer
from mixval.stages.bank import bank
from mixval.stages.cell import Cell
from mixval.stages.network import Network, learn
from mixval.stages.scores import write_probe
from mixval.stages.teacher import TeacherSet
from mixval.store import Artifact, Store
from mixval.training_job import Job
from mixval.types import FailureSet, Ints


def student(
    cell: Cell,
    name: str,
    failures: FailureSet | None,
    teacher: TeacherSet | None,
    replayed: Network | None,
    folds: Ints | None,
    store: Store,
) -> Network:
    """Return the student of the arm `name`, guided by `teacher` or replaying another arm.

    `folds` are those that partners are drawn within: of its teachers, or of the arm it replays.
    """
    arm = cell.recipe.arms[name]
    behind = [guide for guide in (teacher, replayed) if guide is not None]
    extra: dict[str, Any] = {}
    if teacher is not None:
        extra["teacher"] = teacher.fingerprint
        extra["score"] = cell.recipe.scores.loss.model_dump(mode="json")
    if replayed is not None:
        extra["replayed"] = replayed.fingerprint

    def guided(job: Job, artifact: Artifact) -> Job:
        job = replace(
            job,
            guidance=_guidance(cell, arm, teacher, replayed),
            excluded=arm.excluded,
            folds=folds,
            after_epoch=_probe(cell, teacher, artifact),
        )
        if teacher is None or job.guidance is None or not _uses_bank(cell, arm):
            return job
        file, cost = bank(cell, str(arm.teacher), teacher, job, store)
        return replace(job, guidance=replace(job.guidance, bank=file), preparation=cost)

    return learn(
        cell,
        arm,
        ("students", name),
        store,
        stream="student",
        failures=failures,
        extra=extra,
        make_job=guided,
        leaks=any(guide.leaks for guide in behind),
    )


def _guidance(
    cell: Cell, arm: Arm, teacher: TeacherSet | None, replayed: Network | None
) -> Guidance | None:
    if teacher is None and replayed is None:
        return None
    until = arm.guide_until
    overtakes = until == "overtake" and teacher is not None
    scorer = None
    if teacher is not None and _asks_teacher(arm):
        loss = cell.recipe.scores.loss
        scorer = Scorer(teacher.posterior, choose.pick("losses", loss.name, loss.parameters))
    return Guidance(
        policy=choose.pick("filter_policies", arm.filter.name, arm.filter.parameters),
        scorer=scorer,
        num_teachers=0 if scorer is None or teacher is None else teacher.passes,
        filters_clean=arm.clean == "filtered",
        relabels=arm.excluded == "relabel",
        refill_draws=arm.refill_draws if arm.excluded == "refill" else 0,
        replay=None if replayed is None else replayed.record,
        until=epoch_of(until, cell.recipe.epochs_of(arm))
        if isinstance(until, int | float)
        else None,
        overtake=teacher.dev_accuracy(cell) if overtakes and teacher is not None else None,
        fade=arm.guide_fade,
    )


def _probe(
    cell: Cell, teacher: TeacherSet | None, artifact: Artifact
) -> Callable[[int, nn.Module], None] | None:
    """Return what scores the probe plan again after the epochs that the recipe names."""
    settings = cell.recipe.scores
    if teacher is None or not settings.epochs or settings.rows == 0:
        return None

    def score(epochs_done: int, model: nn.Module) -> None:
        if epochs_done not in settings.epochs:
            return
        base = f"{artifact.fingerprint}, epoch {epochs_done}"
        write_probe(cell, artifact, teacher.against(model, base), epochs_done)

    return score


def _uses_bank(cell: Cell, arm: Arm) -> bool:
    """Whether H is scored beforehand: not where the mixes, or what is asked of them, vary."""
    fixed = arm.excluded not in ("relabel", "refill") and arm.filter.name != "confident"
    return cell.recipe.scores.bank and fixed and _asks_teacher(arm)


def _asks_teacher(arm: Arm) -> bool:
    """Whether any decision of the arm depends on r_hat or on the teacher's prediction."""
    return arm.is_guided or arm.excluded == "relabel"
