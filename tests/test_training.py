"""The training loop and what guides it: laws that hold bit for bit, the rest by brute force."""

import copy
import json
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import mixval.stages.cell
import mixval.stages.network
from mixval import filter_policies
from mixval.checkpoints import Checkpoints, load_weights
from mixval.errors import UserError
from mixval.files import weight_facts
from mixval.guidance import Guidance, Record
from mixval.mixing import RowMaker, assign_folds, draw_plan
from mixval.pipeline import CellRun
from mixval.posteriors import point
from mixval.score_store import read_scores
from mixval.scoring import score_plans
from mixval.stages.cell import Cell
from mixval.stages.scores import score_probe
from mixval.store import Store
from mixval.training import Cost, Watch, build_model, train
from mixval.types import ScoreTable

N, EPOCHS, BATCH, STEPS = 60, 4, 20, 3  # of the tiny recipe
MLP = {"name": "mlp", "hidden": [16]}
DROPOUT = {"name": "mlp", "hidden": [16], "dropout": 0.3}
BATCH_NORM = {"name": "conv_net", "width": 4}


def run(job, engine):
    return train(job, engine, None, Watch())


def differing(one, other) -> list[str]:
    """Return the weights and buffers in which two networks differ by as little as a bit."""
    mine, theirs = one.state_dict(), other.state_dict()
    assert mine.keys() == theirs.keys()
    return [name for name in mine if not torch.equal(mine[name], theirs[name])]


def distance(one, other) -> float:
    pairs = zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    return max(float((a.double() - b.double()).abs().max()) for a, b in pairs)


def guided_by(scorer, policy=filter_policies.negative, **options):
    return Guidance(policy=policy, scorer=scorer, num_teachers=1, **options)


def row_maker(splits, part=None):
    return RowMaker(part or splits.train, splits.num_classes, splits.mean, splits.std)


def plan_of(epoch=0, draw=0, **options):
    return draw_plan(
        seed=0, epoch=epoch, alpha=1.0, num_samples=N, stream="student", draw=draw, **options
    )


@pytest.fixture
def cell_run(tiny_recipe, engine, tmp_path):
    """Return a maker of the stages of one cell, by dotted changes of the tiny recipe."""

    def make(changes=None):
        cell = Cell(tiny_recipe(changes), "main", 0, engine)
        return CellRun(cell, Store(tmp_path / "run"))

    return make


# -- all is RegMixup ----------------------------------------------------------------------


@pytest.mark.parametrize("forward", ["joint", "separate"])
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("model", [MLP, DROPOUT, BATCH_NORM], ids=["mlp", "dropout", "batch norm"])
def test_all_is_regmixup_bit_for_bit(make_job, engine, scorer, model, accumulate, forward):
    # Catches a guided path that moves weights, random numbers or BatchNorm statistics though it
    # excludes nothing: guided arms would then differ from their controls in more than the filter.
    job = make_job({"model": model, "training.accumulate": accumulate, "arms.all.forward": forward})
    live = guided_by(scorer, filter_policies.all)
    plain, guided = run(job, engine), run(replace(job, guidance=live), engine)
    assert not differing(plain.model, guided.model)
    losses = [[row["loss"] for row in trained.metrics] for trained in (plain, guided)]
    assert losses[0] == losses[1]


@pytest.mark.parametrize("excluded", ["drop", "clean", "relabel", "refill"])
@pytest.mark.parametrize("model", [MLP, DROPOUT, BATCH_NORM], ids=["mlp", "dropout", "batch norm"])
def test_what_becomes_of_excluded_mixes_is_nothing_where_none_is(
    make_job, engine, scorer, excluded, model
):
    # As above, for each fate of an excluded mix.
    job = make_job({"model": model})
    guidance = guided_by(
        scorer,
        filter_policies.all,
        relabels=excluded == "relabel",
        refill_draws=8 if excluded == "refill" else 0,
    )
    guided = run(replace(job, guidance=guidance, excluded=excluded), engine)
    assert not differing(run(job, engine).model, guided.model)


def test_a_filter_changes_the_weights(make_job, engine, scorer):
    # Catches guidance that is computed and not used; without it the laws above say nothing.
    job = make_job()
    guided = run(replace(job, guidance=guided_by(scorer)), engine)
    assert differing(run(job, engine).model, guided.model)
    kept = guided.record.mixed.float().mean().item()
    assert 0.05 < kept < 0.95
    kept_by_epoch = guided.record.mixed.float().mean(1).tolist()
    assert [row["kept"] for row in guided.metrics] == pytest.approx(kept_by_epoch)


def test_arms_of_a_seed_share_initial_weights_and_mixes(tiny_recipe, splits):
    # Catches arms that differ in luck, so that their difference is not due to what they do.
    def build(seed, stream):
        return build_model(tiny_recipe().model, splits, seed, stream)

    assert not differing(build(0, "student"), build(0, "student"))
    assert differing(build(0, "student"), build(1, "student"))
    assert differing(build(0, "student"), build(0, "base"))


# -- the yoked control --------------------------------------------------------------------

WIDE = {
    "data.train": 200,
    "training.batch_size": 50,
    "arms.yoked_lam": {
        "filter": {"name": "yoked", "of": "guided", "within_lam_deciles": True},
    },
}


@pytest.mark.parametrize("policy", ["negative", {"name": "soft", "tau": 0.3}])
def test_the_yoked_control_keeps_as_much_as_the_guided_run_in_every_step(cell_run, policy):
    # Catches a control with another dose: it would measure how much is kept, not which.
    cells = cell_run({**WIDE, "arms.guided.filter": policy})
    guided = cells.student("guided").record.mixed.view(EPOCHS, 4, 50)
    yoked = cells.student("yoked").record.mixed.view(EPOCHS, 4, 50)
    for epoch in range(EPOCHS):
        for step in range(4):
            mine, theirs = yoked[epoch, step], guided[epoch, step]
            assert torch.equal(mine.sort().values, theirs.sort().values)
    assert not torch.equal(guided, yoked)
    assert 0 < guided.float().mean() < 1


def test_within_lam_deciles_each_decile_keeps_as_many(cell_run):
    # Catches a control that does not hold lambda fixed: it could not expose a filter of lambda.
    cells = cell_run(WIDE)
    guided = cells.student("guided").record.mixed
    yoked = cells.student("yoked_lam").record.mixed
    for epoch in range(EPOCHS):
        plan = draw_plan(seed=0, epoch=epoch, alpha=1.0, num_samples=200, stream="student")
        for step in range(4):
            rows = slice(50 * step, 50 * step + 50)
            order = plan.lam[rows].astype(np.float32).argsort(kind="stable")
            for decile in np.array_split(order, 10):
                mine, theirs = (record[epoch, rows][decile] for record in (yoked, guided))
                assert torch.equal(mine.sort().values, theirs.sort().values)
    assert not torch.equal(guided, yoked)


def test_a_yoked_control_replays_the_clean_filter_too(cell_run):
    # Catches a control that trains on every clean sample while its guided arm does not.
    cells = cell_run({"arms.guided.clean": "filtered", "arms.yoked.clean": "filtered"})
    guided = cells.student("guided").record.clean.view(EPOCHS, STEPS, BATCH)
    yoked = cells.student("yoked").record.clean.view(EPOCHS, STEPS, BATCH)
    assert torch.equal(guided.sum(-1), yoked.sum(-1))
    assert guided.float().mean() < 1
    assert not torch.equal(guided, yoked)


def test_a_yoked_control_stops_with_the_guided_run(cell_run):
    # Catches a control that goes on filtering after guidance has stopped or faded.
    cells = cell_run({"arms.guided.guide_until": 2, "arms.guided.guide_fade": 1})
    guided, yoked = (cells.student(name).record.mixed for name in ("guided", "yoked"))
    assert guided[:2].min() == 0 and guided[2].min() == 0.5 and guided[3].min() == 1
    assert torch.equal(
        yoked.view(EPOCHS, STEPS, BATCH).sort(-1).values,
        guided.view(EPOCHS, STEPS, BATCH).sort(-1).values,
    )


# -- what it costs ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "guidance", "per_sample"),
    [
        ({"arms.all.alpha": 0}, {}, 1),  # ERM
        ({"arms.all.clean": "none"}, {}, 1),  # mixup
        ({}, {}, 2),  # RegMixup
        ({"arms.all.forward": "separate"}, {}, 2),
        ({"training.accumulate": 2}, {}, 2),
        ({}, {"policy": "negative"}, 3),  # and the teacher
        ({"arms.all.clean": "none"}, {"policy": "negative"}, 2),
        ({}, {"policy": "negative", "filters_clean": True}, 4),
        ({"training.accumulate": 2}, {"policy": "negative"}, 5),  # scores need a pass of their own
        ({}, {"policy": "negative", "until": 2}, 2.5),  # half of the epochs with the teacher
        ({"arms.all.mixup_until": 2}, {}, 1.5),
        ({}, {"policy": "negative", "num_teachers": 3}, 5),
    ],
)
def test_forward_passes_are_all_counted(make_job, engine, scorer, changes, guidance, per_sample):
    # Catches a cost that hides the teacher, which is half of what guidance costs.
    job = make_job(changes)
    if guidance:
        options = {"num_teachers": 1, "scorer": scorer, **guidance}
        policy = getattr(filter_policies, options.pop("policy"))
        job = replace(job, guidance=Guidance(policy=policy, **options))
    cost = run(job, engine).cost
    assert cost.steps == STEPS * EPOCHS
    assert cost.forwards == per_sample * N * EPOCHS
    assert cost.seconds > 0


def test_the_forward_passes_are_those_that_happen(make_job, engine, teacher_model, splits):
    # Catches bookkeeping that drifts from what the loop really does: count the rows themselves.
    from mixval.losses import cross_entropy
    from mixval.rhat import Scorer

    rows = []

    def counting(inputs, fold=None):
        rows.append(len(inputs))
        return point([teacher_model])(inputs)

    guidance = guided_by(Scorer(counting, cross_entropy), refill_draws=8)
    job = replace(make_job(), guidance=guidance, excluded="refill")
    cost = run(job, engine).cost
    drawn = sum(rows)
    assert drawn > 1.5 * N * EPOCHS  # some mixes were drawn again
    # Each drawn row passes student and teacher; then the student trains on clean and mixed rows.
    assert cost.forwards == 2 * drawn + 2 * N * EPOCHS


def test_costs_add():
    assert Cost(1, 2, 3.0) + Cost(10, 20, 30.0) == Cost(11, 22, 33.0)


# -- every option trains ------------------------------------------------------------------

POLICIES = {
    "all": filter_policies.all,
    "confident": filter_policies.confident,
    "negative": filter_policies.negative,
    "positive": filter_policies.positive,
    "low_fraction": filter_policies.low_fraction,
    "high_fraction": filter_policies.high_fraction,
    "top_k": partial(filter_policies.top_k, k=5),
    "soft": filter_policies.soft,
    "yoked": partial(filter_policies.yoked, of="another"),
}


def test_every_filter_is_tried_below():
    assert set(POLICIES) == set(filter_policies.__all__)


def softer_too(posterior):
    """Return a posterior of two draws: the one given, and the same with half its logits."""

    def draws(inputs, fold=None):
        one = posterior(inputs, fold)
        return torch.cat([one, (one / 2).log_softmax(-1)])

    return draws


FATES = [
    (name, excluded)
    for name in POLICIES
    for excluded in ("drop", "clean", "relabel", "refill")
    if excluded != "refill" or name in ("negative", "positive")  # a recipe allows no other
]


@pytest.mark.parametrize("clean", ["full", "filtered", "none"])
@pytest.mark.parametrize(("name", "excluded"), FATES)
def test_every_filter_fate_and_clean_term_trains(make_job, engine, scorer, name, excluded, clean):
    # Catches a combination that raises, or that makes weights or losses that are not numbers.
    if name == "confident":  # asks for the spread over several draws
        scorer = replace(scorer, updated=softer_too(scorer.updated))
    half = Record.create(None, 2, N)
    for epoch in range(2):
        every_other = (torch.arange(N) + epoch * N) % 2
        half.write(slice(0, N), every_other, every_other)
        half.end_epoch(epoch)
    guidance = guided_by(
        scorer,
        POLICIES[name],
        filters_clean=clean == "filtered",
        relabels=excluded == "relabel",
        refill_draws=2 if excluded == "refill" else 0,
        replay=half if name == "yoked" else None,
    )
    # A clean term needs no teacher here: `filtered` is the guidance's affair.
    learner = make_job({"arms.all.epochs": 2}).learner.model_copy(update={"clean": clean})
    job = make_job({"arms.all.epochs": 2}, learner=learner, guidance=guidance, excluded=excluded)
    trained = run(job, engine)
    assert all(torch.isfinite(tensor).all() for tensor in trained.model.state_dict().values())
    assert all(np.isfinite(row["loss"]) for row in trained.metrics)
    record = trained.record.mixed.float()
    assert record.shape == (2, N) and record.min() >= 0 and record.max() <= 1
    filtered = bool((trained.record.clean.float() < 1).any())
    if clean != "filtered" or name == "all":
        assert not filtered
    elif name not in ("confident", "negative", "soft"):  # may keep all: the teacher knows train
        assert filtered
    kept = record.view(2, STEPS, BATCH).sum(-1)
    expected = {"all": 20, "low_fraction": 10, "high_fraction": 10, "top_k": 5, "yoked": 10}
    if name in expected:
        assert (kept == expected[name]).all()


def test_opposite_filters_keep_opposite_halves(make_job, engine, scorer):
    # Catches a sign error: in the first step both see the same r_hat and must part it.
    first = {}
    for name in ("negative", "positive", "low_fraction", "high_fraction"):
        job = replace(make_job(), guidance=guided_by(scorer, POLICIES[name]))
        first[name] = run(job, engine).record.mixed[0, :BATCH]
    assert torch.equal(first["negative"] + first["positive"], torch.ones(BATCH).half())
    assert torch.equal(first["low_fraction"] + first["high_fraction"], torch.ones(BATCH).half())
    assert first["negative"].min() == 0 and first["negative"].max() == 1


# -- one step by brute force --------------------------------------------------------------

ONE_STEP = {
    "arms.all.epochs": 1,
    "training.batch_size": N,
    "training.weight_decay": 0.0,
    "training.momentum": 0.5,
}


def one_step_by_hand(start, loss, lr=0.05, momentum=0.5):
    """Return the weights after the first step of SGD with Nesterov momentum."""
    model = copy.deepcopy(start)
    loss(model).backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= lr * (1 + momentum) * parameter.grad
    return model


def mixes_by_hand(splits, first, second, lam):
    """Return inputs and soft targets of mixes, by the definition of mixup."""
    pixels = (splits.train.images.float() / 255 - splits.mean) / splits.std
    hot = F.one_hot(splits.train.labels, 10).float()
    share = torch.from_numpy(lam).float()
    wide = share[:, None, None, None]
    inputs = pixels[first] * wide + pixels[second] * (1 - wide)
    return inputs, hot[first] * share[:, None] + hot[second] * (1 - share[:, None])


def entropy(model, inputs, targets):
    return -(targets * F.log_softmax(model(inputs), -1)).sum(-1)


@pytest.mark.parametrize("excluded", ["drop", "clean", "relabel"])
@pytest.mark.parametrize(
    ("clean", "normalise"), [("full", "batch"), ("none", "batch"), ("full", "kept")]
)
def test_one_guided_step_is_the_formula(
    make_job, engine, scorer, teacher_model, splits, excluded, clean, normalise
):
    # Catches a wrong normaliser, sign, weight or target: the step is written out here.
    changes = {**ONE_STEP, "arms.all.clean": clean, "arms.all.normalise": normalise}
    guidance = guided_by(scorer, relabels=excluded == "relabel")
    job = make_job(changes, guidance=guidance, excluded=excluded)
    start = build_model(job.model, splits, 0, "student")
    plan = plan_of()
    mixed, targets = mixes_by_hand(splits, plan.first, plan.second, plan.lam)
    alone, labels = mixes_by_hand(splits, plan.first, plan.first, np.ones(N))
    with torch.no_grad():
        r_hat = entropy(teacher_model, mixed, targets) - entropy(start, mixed, targets)
        soft = F.softmax(teacher_model(mixed), -1)
    keep = (r_hat <= 0).float()
    assert 0 < keep.sum() < N

    def loss(model):
        instead = {
            "drop": 0.0,
            "clean": entropy(model, alone, labels),
            "relabel": entropy(model, mixed, soft),
        }[excluded]
        total = keep * entropy(model, mixed, targets) + (1 - keep) * instead
        size = keep.sum() if normalise == "kept" and excluded == "drop" else N
        clean_term = entropy(model, alone, labels).sum() / N if clean == "full" else 0.0
        return total.sum() / size + clean_term

    trained = run(job, engine)
    assert torch.equal(trained.record.mixed[0].float(), keep)
    assert distance(trained.model, one_step_by_hand(start, loss)) < 1e-6


def test_refill_exchanges_excluded_mixes_for_the_next_draw_that_is_kept(
    make_job, engine, scorer, teacher_model, splits
):
    # Catches a refill that keeps the excluded mix, or takes a draw that is excluded as well.
    draws = 4
    job = make_job(ONE_STEP, guidance=guided_by(scorer, refill_draws=draws), excluded="refill")
    start = build_model(job.model, splits, 0, "student")
    second, lam = plan_of().second.copy(), plan_of().lam.copy()
    is_open = np.ones(N, dtype=bool)
    for draw in range(draws):
        plan = plan_of(draw=draw)
        mixed, targets = mixes_by_hand(splits, plan.first, plan.second, plan.lam)
        with torch.no_grad():
            r_hat = entropy(teacher_model, mixed, targets) - entropy(start, mixed, targets)
        taken = is_open & (r_hat <= 0).numpy()
        second[taken], lam[taken] = plan.second[taken], plan.lam[taken]
        is_open &= ~taken
    mixed, targets = mixes_by_hand(splits, plan_of().first, second, lam)
    alone, labels = mixes_by_hand(splits, plan_of().first, plan_of().first, np.ones(N))
    keep = torch.from_numpy(~is_open).float()

    def loss(model):
        kept = keep * entropy(model, mixed, targets)
        return (kept.sum() + entropy(model, alone, labels).sum()) / N

    trained = run(job, engine)
    assert torch.equal(trained.record.mixed[0].float(), keep)
    assert distance(trained.model, one_step_by_hand(start, loss)) < 1e-6


def test_refill_keeps_more_than_drop(make_job, engine, scorer):
    # Catches a refill that draws and throws the draws away.
    drop = run(make_job(guidance=guided_by(scorer)), engine).record.mixed.float().mean()
    job = make_job(guidance=guided_by(scorer, refill_draws=8), excluded="refill")
    refill = run(job, engine).record.mixed.float().mean()
    assert drop < 0.9 < refill


# -- out-of-fold teachers -----------------------------------------------------------------


@pytest.fixture
def jobs(monkeypatch):
    """Return the jobs that stages train, by the folder they train in."""
    seen = {}

    def watching(job, engine, checkpoints, watch):
        seen["/".join(checkpoints.folder.parts[-3:-1])] = job
        return train(job, engine, checkpoints, watch)

    monkeypatch.setattr(mixval.stages.network, "train", watching)
    return seen


@pytest.mark.parametrize("data", ["train", "train+failures"])
def test_each_folds_teacher_never_saw_the_fold(cell_run, jobs, data):
    # Catches a teacher that judges mixes of samples whose (wrong) labels it has learned.
    cells = cell_run({"teachers.failures.folds": 3, "teachers.failures.data": data})
    teachers = cells.teacher("failures")
    train_ids = cells.cell.splits.train.ids
    assert len(teachers.networks) == 3
    folds = assign_folds(0, N, 3)
    for fold in range(3):
        seen = jobs[f"failures/fold-{fold}"].part.ids
        assert not torch.isin(train_ids[folds == fold], seen).any()
        assert torch.isin(train_ids[folds != fold], seen).all()
        outside = seen[~torch.isin(seen, train_ids)]
        expected = cells.failures().query if data == "train+failures" else []
        assert sorted(outside.tolist()) == sorted(expected)


def test_a_mix_is_judged_by_the_teacher_that_saw_neither_parent(cell_run, jobs, engine):
    # Catches partners from another fold, and rows that are given to the wrong teacher.
    cells = cell_run({"teachers.failures.folds": 3})
    cells.student("guided")
    job = jobs["students/guided"]
    assert np.array_equal(job.folds, assign_folds(0, N, 3))
    teachers = cells.teacher("failures")
    maker = replace(row_maker(cells.cell.splits), folds=torch.from_numpy(job.folds))
    for epoch in range(EPOCHS):
        plan = plan_of(epoch, folds=job.folds)
        assert np.array_equal(job.folds[plan.first], job.folds[plan.second])
        batch = maker.batch(plan)
        log_probs = teachers.posterior(batch.mixed, batch.fold)
        assert log_probs.shape == (1, N, 10)
        for row in range(0, N, 7):
            model = teachers.networks[job.folds[plan.first[row]]].model
            expected = F.log_softmax(model(batch.mixed[row : row + 1]), -1)
            torch.testing.assert_close(log_probs[0, row], expected[0], atol=1e-5, rtol=0)


def test_the_yoked_control_of_out_of_fold_teachers_sees_the_same_mixes(cell_run, jobs):
    # Partners within folds are another set of mixes than partners from everywhere. A control
    # that draws other mixes than its guided arm measures that, too.
    cells = cell_run({"teachers.failures.folds": 3})
    cells.student("yoked")
    guided, yoked = jobs["students/guided"], jobs["students/yoked"]
    assert np.array_equal(plan_of(folds=guided.folds).second, plan_of(folds=yoked.folds).second)


# -- when guidance ends -------------------------------------------------------------------


def test_guidance_ends_at_guide_until(make_job, engine, scorer):
    # Catches an off-by-one at the end of guidance, and filtering that goes on unseen.
    whole = run(make_job(guidance=guided_by(scorer)), engine).record.mixed
    ended = run(make_job(guidance=guided_by(scorer, until=2)), engine).record.mixed
    assert torch.equal(ended[:2], whole[:2])
    assert whole[2:].min() == 0 and ended[2:].min() == 1


def test_guidance_fades(make_job, engine, scorer):
    # Catches a fade that jumps, or that scales the wrong way: weight w becomes (1 - f) w + f.
    changes = {"arms.all.epochs": 6}
    whole = run(make_job(changes, guidance=guided_by(scorer)), engine).record.mixed
    faded = run(make_job(changes, guidance=guided_by(scorer, until=2, fade=3)), engine)
    record = faded.record.mixed.float()
    assert torch.equal(faded.record.mixed[:2], whole[:2])
    for epoch, share in ((2, 0.25), (3, 0.5), (4, 0.75)):
        assert set(record[epoch].unique().tolist()) == {share, 1.0}
    assert record[5].min() == 1


def test_fading_is_linear_between_the_filter_and_all(make_job, engine, scorer):
    # As above, against the filter's own weights: in the first faded step they are known.
    soft = partial(filter_policies.soft, tau=0.5)
    whole = run(make_job(guidance=guided_by(scorer, soft)), engine).record.mixed.float()
    faded = run(make_job(guidance=guided_by(scorer, soft, until=2, fade=1)), engine)
    first_step = slice(0, BATCH)
    expected = 0.5 * whole[2, first_step] + 0.5
    torch.testing.assert_close(
        faded.record.mixed.float()[2, first_step], expected, atol=2e-3, rtol=0
    )


def test_guidance_ends_when_the_student_overtakes(make_job, engine, scorer):
    # Catches a student that stays behind its teacher's judgement after it has become better.
    changes = {"arms.all.epochs": 8, "training.lr": 0.2}
    free = run(make_job(changes, guidance=guided_by(scorer)), engine)
    by_epoch = {
        row["epoch"] + 1: row["val_dev_accuracy"]
        for row in free.metrics
        if "val_dev_accuracy" in row
    }
    assert list(by_epoch) == [2, 4, 6, 8]
    assert by_epoch[2] < by_epoch[4], "the case needs a student that gets better"
    between = (by_epoch[2] + by_epoch[4]) / 2
    for level, stop in ((between, 4), (by_epoch[2], 4), (-1.0, 2), (1.0, 8)):
        trained = run(make_job(changes, guidance=guided_by(scorer, overtake=level)), engine)
        assert torch.equal(trained.record.mixed[:stop], free.record.mixed[:stop])
        assert stop == 8 or trained.record.mixed[stop:].min() == 1


def test_overtake_asks_the_teacher_for_its_accuracy_on_val_dev(cell_run, jobs):
    # Catches a level from another split: test would leak, val_f is what the teacher trained on.
    cells = cell_run({"arms.guided.guide_until": "overtake"})
    cells.student("guided")
    splits = cells.cell.splits
    model = cells.teacher("failures").networks[0].model
    inputs = (splits.val_dev.images.float() / 255 - splits.mean) / splits.std
    hits = (model(inputs).argmax(1) == splits.val_dev.labels).double().mean().item()
    assert jobs["students/guided"].guidance.overtake == pytest.approx(hits)
    assert jobs["students/guided"].guidance.until is None


def test_after_mixup_until_nothing_is_mixed(make_job, engine):
    # Catches mixing that goes on, and a clean term that loses weight where it stands alone.
    trained = run(make_job({"arms.all.mixup_until": 2}), engine)
    assert [row["alpha"] for row in trained.metrics] == [1, 1, 0, 0]
    weighted = {"arms.all.clean_weight": 0.5, "arms.all.clean": "full", "arms.all.alpha": 0}
    erm = run(make_job({"arms.all.alpha": 0}), engine)
    assert not differing(erm.model, run(make_job(weighted), engine).model)


def test_metrics_say_what_happened(make_job, engine, splits):
    # Catches an accuracy from train mode, or of mixes, reported as that of val_dev.
    trained = run(make_job({"training.evaluate_every": 3}), engine)
    assert [row["epoch"] for row in trained.metrics] == [0, 1, 2, 3]
    evaluated = [row["epoch"] for row in trained.metrics if "val_dev_nll" in row]
    assert evaluated == [2, 3]  # every third, and the last
    for name, part in (("train", splits.train), ("val_dev", splits.val_dev)):
        inputs = (part.images.float() / 255 - splits.mean) / splits.std
        logits = trained.model(inputs)
        hits = (logits.argmax(1) == part.labels).double().mean().item()
        assert trained.metrics[-1][f"{name}_accuracy"] == pytest.approx(hits)
        nll = F.cross_entropy(logits, part.labels).item()
        assert trained.metrics[-1][f"{name}_nll"] == pytest.approx(nll, rel=1e-5)


# -- gradient accumulation ----------------------------------------------------------------


@pytest.mark.parametrize("accumulate", [2, 3, 4, 20])
@pytest.mark.parametrize("name", ["none", "all", "negative", "low_fraction", "soft"])
def test_micro_batches_make_the_same_step(make_job, engine, scorer, name, accumulate):
    # Catches a normaliser or a quantile per micro-batch instead of per optimiser step.
    guidance = None if name == "none" else guided_by(scorer, POLICIES[name])
    whole = run(make_job(guidance=guidance), engine)
    parts = run(make_job({"training.accumulate": accumulate}, guidance=guidance), engine)
    assert distance(whole.model, parts.model) < 1e-5
    if whole.record is not None:
        torch.testing.assert_close(
            whole.record.mixed.float(), parts.record.mixed.float(), atol=2e-3, rtol=0
        )
    assert parts.cost.steps == whole.cost.steps


@pytest.mark.parametrize("normalise", ["kept", "joint"])
def test_micro_batches_make_the_same_step_with_other_normalisers(
    make_job, engine, scorer, normalise
):
    # As above; a kept count per micro-batch would weigh its rows differently.
    changes = {"arms.all.normalise": normalise, "arms.all.clean": "full"}
    whole = run(make_job(changes, guidance=guided_by(scorer)), engine)
    changes["training.accumulate"] = 4
    assert (
        distance(whole.model, run(make_job(changes, guidance=guided_by(scorer)), engine).model)
        < 1e-5
    )


# -- offline and online -------------------------------------------------------------------


@pytest.fixture
def online(make_job, engine, scorer):
    """Return what the filter saw in the first step of a student."""
    seen = []

    def watching(scores):
        seen.append(scores)
        return filter_policies.negative(scores)

    job = make_job({"arms.all.forward": "separate"}, guidance=guided_by(scorer, watching))
    run(job, engine)
    return seen[0]


@pytest.fixture
def offline(tiny_recipe, engine, scorer, splits):
    """Return a scorer of the student's first mixes without training, by chunk size."""

    def score(chunk, rows=BATCH):
        student = build_model(tiny_recipe().model, splits, 0, "student")
        plan = plan_of().keep(slice(0, rows))
        maker = RowMaker.of(splits.train, splits, engine.device)
        return ScoreTable.join(score_plans(maker, [plan], scorer, point([student]), chunk=chunk))

    return score


def test_offline_scores_are_the_online_ones_bit_for_bit(online, offline):
    # Catches two ways to r_hat: what is scored offline must be what the student is guided by.
    table = offline(chunk=BATCH)
    for name in ("r_hat", "updated", "base"):
        assert np.array_equal(getattr(table, name), getattr(online, name).double().numpy())
    assert np.array_equal(table.lam.astype(np.float32), online.lam.numpy())
    assert table.r_hat.min() < 0 < table.r_hat.max()


@pytest.mark.parametrize("chunk", [1, 7, 50, 500])
def test_the_chunk_size_changes_no_decision(offline, chunk):
    # Catches rows that are lost, doubled or shifted at the edges of chunks.
    whole, parts = offline(chunk=N, rows=N), offline(chunk=chunk, rows=N)
    assert np.abs(whole.r_hat - parts.r_hat).max() < 1e-5
    clear = np.abs(whole.r_hat) > 1e-5
    assert clear.mean() > 0.9
    assert np.array_equal(whole.r_hat[clear] <= 0, parts.r_hat[clear] <= 0)
    assert np.array_equal(parts.row, np.arange(N))


def test_scores_name_the_samples_that_were_mixed(offline, splits):
    # Catches positions written as ids, and labels of the wrong parent.
    table, plan = offline(chunk=7, rows=N), plan_of()
    assert np.array_equal(table.i, splits.train.ids.numpy()[plan.first])
    assert np.array_equal(table.j, splits.train.ids.numpy()[plan.second])
    assert np.array_equal(table.label_i, splits.train.labels.numpy()[plan.first])
    assert np.array_equal(table.label_j, splits.train.labels.numpy()[plan.second])
    assert np.array_equal(table.r_hat, table.updated - table.base) or np.allclose(
        table.r_hat, table.updated - table.base, atol=1e-6
    )


# -- what must not get in -----------------------------------------------------------------


def weights_of(folder):
    """Return the facts and the bytes of the tensors of every weights file."""
    return {
        str(path.relative_to(folder)): (
            weight_facts(path),
            {name: tensor.numpy().tobytes() for name, tensor in load_weights(path).items()},
        )
        for path in sorted(folder.rglob("weights.safetensors"))
    }


def weights_with_other_labels(recipe, engine, folder, part, monkeypatch):
    """Return the weights of a cell where every label of `part` is moved to the next class."""
    load = mixval.stages.cell.load_splits

    def rotated(*args, **options):
        splits = load(*args, **options)
        wanted = getattr(splits, part)
        labels = (wanted.labels + 1) % splits.num_classes
        return replace(splits, **{part: replace(wanted, labels=labels)})

    with monkeypatch.context() as patch:
        patch.setattr(mixval.stages.cell, "load_splits", rotated)
        return cell_weights(recipe, engine, folder)


def cell_weights(recipe, engine, folder):
    CellRun(Cell(recipe, "main", 0, engine), Store(folder)).upto("run", list(recipe.arms))
    return weights_of(folder)


@pytest.mark.parametrize("folds", [1, 2])
def test_no_test_label_reaches_any_weight(tiny_recipe, engine, tmp_path, monkeypatch, folds):
    # Catches any use of test labels before the last evaluation: every weight file stays the
    # same to the last bit when all of them are wrong.
    changes = {
        "teachers.failures.folds": folds,
        "arms.guided.guide_until": "overtake",
        "arms.guided.clean": "filtered",
        "arms.yoked.clean": "filtered",
    }
    recipe = tiny_recipe(changes)
    honest = cell_weights(recipe, engine, tmp_path / "honest")
    assert len(honest) == 5 + folds
    wrong = weights_with_other_labels(recipe, engine, tmp_path / "wrong", "test", monkeypatch)
    assert wrong == honest


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"teachers.failures.data": "train+test"}, "test"),
        ({"failures.split": "test"}, "test"),
        ({}, "val_f"),
        ({}, "train"),
    ],
)
def test_labels_that_may_be_used_do_reach_the_weights(
    tiny_recipe, engine, tmp_path, monkeypatch, changes, part
):
    # The test above could not fail if labels changed nothing: here they must.
    recipe = tiny_recipe({**changes, "arms.yoked": None, "arms.guided.control": None})
    right = cell_weights(recipe, engine, tmp_path / "right")
    wrong = weights_with_other_labels(recipe, engine, tmp_path / "wrong", part, monkeypatch)
    assert right.keys() == wrong.keys()
    changed = {name for name in right if right[name] != wrong[name]}
    assert any("teachers" in name for name in changed)
    assert any("guided" in name for name in changed)


def test_a_learning_rate_that_explodes_is_named(make_job, engine, tmp_path):
    # Catches NaN weights that are saved as a result, and an error without a remedy.
    with pytest.raises(FloatingPointError, match=r"lower training.lr \(1e\+20\)"):
        run(make_job({"training.lr": 1e20}), engine)


def test_a_guided_student_that_explodes_is_named(make_job, engine, scorer):
    # As above, where r_hat is the first to become NaN: a filter must never see it.
    with pytest.raises(FloatingPointError, match=r"learning rate|training.lr"):
        run(make_job({"training.lr": 1e20}, guidance=guided_by(scorer)), engine)


def test_weights_that_explode_in_the_last_step_are_noticed(make_job, engine):
    # The loss is computed before the step. After the last one nothing looks at it again.
    changes = {"training.lr": 1e38, "training.batch_size": N, "arms.all.epochs": 1}
    with pytest.raises(FloatingPointError):
        run(make_job(changes), engine)


def test_no_checkpoint_holds_nan(make_job, engine, tmp_path):
    # Catches a checkpoint from the middle of an epoch that has already gone wrong.
    checkpoints = Checkpoints(tmp_path, "made from this")
    watch = Watch(checkpoint_seconds=0.0)
    with pytest.raises(FloatingPointError):
        train(make_job({"training.lr": 1e20}), engine, checkpoints, watch)
    for path in tmp_path.rglob("weights.safetensors"):
        assert all(torch.isfinite(tensor).all() for tensor in load_weights(path).values())


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_every_momentum_that_a_recipe_may_name_trains(make_job, engine, optimizer, momentum):
    # Catches a value within the range of the recipe that the optimiser refuses.
    changes = {"training.momentum": momentum, "training.optimizer": optimizer}
    assert len(run(make_job(changes), engine).metrics) == EPOCHS


def test_the_learning_rate_warms_up_and_falls_to_zero(make_job, engine):
    # Catches a schedule in epochs where it should be in steps, or one that never starts.
    changes = {"training.warmup_epochs": 2, "arms.all.epochs": 8, "training.lr": 0.1}
    rates = [row["lr"] for row in run(make_job(changes), engine).metrics]
    assert rates[0] < rates[1] <= 0.1
    assert rates[2:] == sorted(rates[2:], reverse=True)
    assert 0 <= rates[-1] < 0.01


def probed_epochs(cells):
    cells.student("guided")
    folder = cells.store.place("main", 0, "students", "guided")
    return sorted(int(path.stem.removeprefix("part-")) for path in folder.glob("part-*.parquet"))


def test_the_probe_plan_is_scored_after_the_epochs_that_are_named(cell_run):
    # Catches an epoch too early or too late: the first file must be of the student after it.
    cells = cell_run({"scores.epochs": [1, 4]})
    assert probed_epochs(cells) == [1, 4]
    path = cells.store.place("main", 0, "students", "guided", "part-0004.parquet")
    table = read_scores(path)
    pair = cells.teacher("failures").against(cells.student("guided").model, "student")
    again = ScoreTable.join(score_probe(cells.cell, pair, 4))
    assert np.array_equal(table.r_hat, again.r_hat) and set(table.epoch) == {4}


@pytest.mark.parametrize("epoch", [0, 5])
def test_an_epoch_to_score_is_never_ignored(cell_run, epoch):
    # 0 is before training, 5 after its end: scored or refused, but not silently left out.
    try:
        cells = cell_run({"scores.epochs": [epoch]})
    except UserError:
        return
    assert probed_epochs(cells) == [epoch]


def test_scoring_the_probe_plan_leaves_the_student_alone(cell_run, tmp_path):
    # Catches a probe that freezes the student, or that draws its random numbers.
    changes = {"model": DROPOUT}
    plain = cell_run(changes).student("guided").model
    cells = cell_run({**changes, "scores.epochs": [1, 2]})
    cells.store.root = tmp_path / "probed"
    assert not differing(plain, cells.student("guided").model)


def test_metrics_are_saved_as_json_without_nan(cell_run):
    # Catches `NaN` in metrics.jsonl, which is no JSON.
    cells = cell_run()
    cells.student("guided")
    path = cells.store.place("main", 0, "students", "guided", "metrics.jsonl")

    def refuse(constant):
        raise AssertionError(constant)

    rows = [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]
    assert [row["epoch"] for row in rows] == [0, 1, 2, 3]
