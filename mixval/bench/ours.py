"""mixval's own training, measured through the code that trains."""

from contextlib import suppress
from dataclasses import replace

from mixval.bench.case import SEED, STREAM, Case, Steps
from mixval.errors import Interrupted
from mixval.filter_policies import negative
from mixval.guidance import Guidance
from mixval.losses import cross_entropy
from mixval.posteriors import point
from mixval.recipe import Learner
from mixval.rhat import Scorer
from mixval.training import train
from mixval.training_job import Job, Watch, num_steps


def mixup_job(case: Case) -> Job:
    """Return plain mixup: alpha = 1 and no clean term, as the other libraries have it."""
    return _job(case, Learner.model_validate({"alpha": 1, "clean": "none"}))


def regmixup_job(case: Case) -> Job:
    return _job(case, Learner.model_validate({"alpha": 1}))


def guided_job(case: Case) -> Job:
    """Return RegMixup whose mixes a live teacher filters by r_hat, on the same network."""
    scorer = Scorer(point([case.network()]), cross_entropy)
    return replace(regmixup_job(case), guidance=Guidance(negative, scorer, num_teachers=1))


def _job(case: Case, learner: Learner) -> Job:
    return Job(
        learner=learner,
        training=case.training,
        model=case.model,
        epochs=1,
        part=case.splits.train,
        splits=case.splits,
        seed=SEED,
        stream=STREAM,
    )


def our_loop(case: Case, job: Job) -> Steps:
    """Return what trains the job for some steps and says how long they took.

    The one place that knows how the loop is driven. Every call trains from the start and
    stops by the watch, which is asked once after every step: between the first and the
    last of its questions lie the measured steps, all of the real loop and nothing else.
    The first step is not measured, nor is what happens once an epoch (a plan is drawn, a
    thousandth of an epoch's time) unless the steps go beyond the epoch.
    """
    steps_per_epoch = num_steps(len(job.part), job.training.batch_size)

    def run(steps: int) -> float:
        asked: list[float] = []

        def should_stop() -> bool:
            at_an_end = len(asked) in (0, steps)
            asked.append(case.now() if at_an_end else 0.0)
            return len(asked) > steps

        longer = replace(job, epochs=steps // steps_per_epoch + 2)  # it stops before the last
        with suppress(Interrupted), case.autocast():
            train(longer, case.engine, None, Watch(should_stop=should_stop))
        return asked[steps] - asked[0]

    return run
