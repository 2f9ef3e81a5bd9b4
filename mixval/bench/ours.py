"""mixval's own training and scoring, measured through the code that does them."""

import itertools
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from mixval.bench.case import SEED, STREAM, Case, Steps
from mixval.epoch_file import EpochFile
from mixval.filter_policies import negative
from mixval.guidance import Guidance
from mixval.losses import cross_entropy
from mixval.mixing import RowMaker, draw_plan
from mixval.posteriors import point
from mixval.recipe import Learner
from mixval.rhat import Scorer
from mixval.score_store import ScoreWriter
from mixval.scoring import score_plans
from mixval.training import Loop
from mixval.training_job import Job, Watch
from mixval.types import ScoreTable

_EPOCHS = 30


def mixup_job(case: Case) -> Job:
    """Return plain mixup: alpha = 1 and no clean term, as the other libraries have it."""
    return _job(case, Learner.model_validate({"alpha": 1, "clean": "none"}))


def regmixup_job(case: Case) -> Job:
    return _job(case, Learner.model_validate({"alpha": 1}))


def guided_job(case: Case) -> Job:
    """Return RegMixup whose mixes a live teacher filters by r_hat, on the same network."""
    scorer = Scorer(point([case.engine.prepare(case.network())]), cross_entropy)
    return replace(regmixup_job(case), guidance=Guidance(negative, scorer, num_teachers=1))


def banked_job(case: Case) -> Job:
    """Return the same with the teacher's H in a bank: what the numbers are costs no time."""
    job = guided_job(case)
    assert job.guidance is not None
    path = Path(tempfile.mkdtemp()) / "bank.npy"
    bank = EpochFile.create(path, job.epochs, len(job.part), "float32")
    return replace(job, guidance=replace(job.guidance, bank=bank))


def _job(case: Case, learner: Learner) -> Job:
    return Job(
        learner=learner,
        training=case.training,
        model=case.model,
        epochs=_EPOCHS,
        part=case.splits.train,
        splits=case.splits,
        seed=SEED,
        stream=STREAM,
    )


def our_loop(case: Case, job: Job) -> Steps:
    """Return what goes on with one training for some steps and says how long they took.

    All of the real loop is measured: plans, schedule, seeding, metrics, the turns of epochs.
    A step goes before, unmeasured, as in the loops that it is compared with.
    """
    taken = _steps(case, job)

    def run(steps: int) -> float:
        next(taken)
        start = case.now()
        for _ in range(steps):
            next(taken)
        return case.now() - start

    return run


def _steps(case: Case, job: Job) -> Iterator[None]:
    while True:  # a training that has come to its end is begun again
        yield from Loop(job, case.engine, None, Watch()).steps()


def our_scoring(case: Case) -> Steps:
    """Return what scores mixes by two networks, batch after batch, into a file of each call's own.

    The file is finished and closed within what is measured. A batch goes before, as above.
    """
    taken = _scored(case)

    def run(steps: int) -> float:
        next(taken)
        with tempfile.TemporaryDirectory() as folder:
            start = case.now()
            with ScoreWriter(Path(folder) / "part-0000.parquet", {"plan": case.name}) as writer:
                for table in itertools.islice(taken, steps):
                    writer.write(table)
            return case.now() - start

    return run


def _scored(case: Case) -> Iterator[ScoreTable]:
    updated, base = (point([case.engine.prepare(case.network())]) for _ in range(2))
    plans = (
        draw_plan(seed=SEED, epoch=epoch, alpha=1.0, num_samples=case.samples, stream=STREAM)
        for epoch in itertools.count()
    )
    maker = RowMaker.of(case.splits.train, case.splits, case.engine.device)
    return score_plans(maker, plans, Scorer(updated, cross_entropy), base, chunk=case.batch_size)
