"""The only training loop: base, teachers and students all go through it.

An epoch is a plan; a step is a slice of it. Order, partners, lambda, augmentation and
dropout are pure functions of (seed, epoch, step), so a state of weights, optimiser and
counters is all that a resume needs to go on bit by bit.
"""

import math
import time
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mixval import choose
from mixval.augmentations import draw_uniforms
from mixval.checkpoints import Checkpoints
from mixval.engine import Engine
from mixval.errors import Interrupted
from mixval.guidance import Record, without_traces
from mixval.metrics import accuracy_and_nll, predict
from mixval.mixing import RowMaker
from mixval.moments import alpha_at
from mixval.objectives import Objective, Weights
from mixval.optimisers import make_optimiser
from mixval.seeding import generator, seed_torch, torch_seed
from mixval.training_job import Cost, Job, Plans, Trained, Watch, build_model, num_steps
from mixval.types import Batch, MixPlan


@dataclass
class _State:
    """Where a training stands; with the weights and the optimiser, all that a resume needs."""

    epoch: int = 0
    step: int = 0  # within the epoch
    stopped_at: int | None = None  # epoch where guidance stopped because the student overtook
    cost: Cost = field(default_factory=Cost)
    metrics: list[dict[str, Any]] = field(default_factory=list)
    totals: list[float] = field(default_factory=lambda: [0.0] * 4)  # loss, hits, kept, rows


def train(job: Job, engine: Engine, checkpoints: Checkpoints | None, watch: Watch) -> Trained:
    """Train a network from scratch, or from its last checkpoint, to the last epoch."""
    return _Loop(job, engine, checkpoints, watch).run()


class _Loop:
    def __init__(
        self, job: Job, engine: Engine, checkpoints: Checkpoints | None, watch: Watch
    ) -> None:
        self.job, self.watch, self.checkpoints = job, watch, checkpoints
        self.device = engine.device
        self.model = build_model(job.model, job.splits, job.seed, job.stream).to(self.device)
        self.train_rows = self._train_rows()
        self.dev_rows = RowMaker.of(job.splits.val_dev, job.splits, self.device)
        self.objective = self._objective()
        self.steps_per_epoch = num_steps(len(job.part), job.training.batch_size)
        total = job.epochs * self.steps_per_epoch
        warmup = job.training.warmup_epochs * self.steps_per_epoch
        self.optimiser, self.schedule = make_optimiser(self.model, job.training, total, warmup)
        self.record = None if job.guidance is None else Record.blank(job.epochs, len(job.part))
        self.state = _State()
        self.started = self.saved = time.monotonic()

    # -- the loop ---------------------------------------------------------------------

    def run(self) -> Trained:
        self._resume()
        while self.state.epoch < self.job.epochs:
            self._epoch()
        self.state.cost.seconds += time.monotonic() - self.started
        return Trained(self.model.eval(), self.state.metrics, self.record, self.state.cost)

    def _epoch(self) -> None:
        job, state = self.job, self.state
        alpha = alpha_at(job.learner, state.epoch, job.epochs)
        plans = Plans(job, state.epoch, alpha)
        uniforms = None
        if self.train_rows.augment is not None:
            uniforms = draw_uniforms(job.seed, state.epoch, job.part.ids).to(self.device)
        for step in range(state.step, self.steps_per_epoch):
            self._step(plans, self._rows(step), uniforms)
            state.step = step + 1
            if state.step < self.steps_per_epoch:
                self._maybe_stop()
        self._end_epoch(alpha)
        self._maybe_stop()

    def _rows(self, step: int) -> slice:
        """Return the step's rows: steps are equal to within one row, so none weighs more."""
        samples, steps = len(self.job.part), self.steps_per_epoch
        return slice(samples * step // steps, samples * (step + 1) // steps)

    def _step(self, plans: Plans, rows: slice, uniforms: Tensor | None) -> None:
        job, state = self.job, self.state
        self.schedule.step_update(state.epoch * self.steps_per_epoch + state.step)
        # Seeding each step makes dropout a pure function of the step, too.
        forward_seed = torch_seed(job.seed, f"{job.stream}/forward", state.epoch, state.step)
        seed_torch(forward_seed, self.device)
        self.model.train()
        step_plan, accepted = self._refilled(plans, rows, uniforms)
        batches = [self.train_rows.batch(part, uniforms) for part in self._micro(step_plan)]
        logits = [self._logits(batches[0])] if len(batches) == 1 else None
        weights = self._weights(batches, logits, rows, accepted)
        size = self.objective.step_size(batches, weights)
        self.optimiser.zero_grad(set_to_none=True)
        for batch, weight in zip(batches, weights, strict=True):
            outputs = logits[0] if logits is not None else self._logits(batch)
            loss = self.objective(outputs, batch, weight, size)
            loss.backward()  # type: ignore[no-untyped-call]
            self._count(loss, outputs, batch, weight)
        self.optimiser.step()
        state.cost.steps += 1

    def _weights(
        self,
        batches: list[Batch],
        logits: list[tuple[Tensor | None, Tensor | None]] | None,
        rows: slice,
        accepted: Tensor | None,
    ) -> list[Weights]:
        guidance, state = self.job.guidance, self.state
        weights = [
            Weights(one, one) for one in (torch.ones_like(b.clean_targets[:, 0]) for b in batches)
        ]
        if guidance is None:
            return weights
        mixes = batches[0].mixed is not None
        faded = guidance.faded(state.epoch, state.stopped_at)
        if faded < 1 and (guidance.filters_clean or (mixes and accepted is None)):
            outputs = logits or self._scoring_logits(batches)
            scored = (mixes + guidance.filters_clean) * sum(len(b.clean) for b in batches)
            state.cost.forwards += guidance.num_teachers * scored
            rng = generator(self.job.seed, "filter", state.epoch, state.step)
            weights = guidance.weights(batches, outputs, (state.epoch, rows), rng, faded)
        if accepted is not None:
            parts = torch.split(accepted, [len(batch.clean) for batch in batches])
            weights = [replace(w, mixed=part) for w, part in zip(weights, parts, strict=True)]
        assert self.record is not None
        self.record.write(state.epoch, rows, weights, mixes=mixes)
        return weights

    def _scoring_logits(self, batches: list[Batch]) -> list[tuple[Tensor | None, Tensor | None]]:
        """Return logits to score by: with micro-batches a filter must see the whole step first."""
        assert self.job.guidance is not None
        if self.job.guidance.scorer is None:
            return [(None, None)] * len(batches)
        with without_traces(self.model):
            return [self._logits(batch) for batch in batches]

    def _refilled(
        self, plans: Plans, rows: slice, uniforms: Tensor | None
    ) -> tuple[MixPlan, Tensor | None]:
        """Return the step's rows, and with `refill` which were kept after exchanging the others."""
        guidance, state = self.job.guidance, self.state
        plan = plans[0].keep(rows)
        stopped = guidance is None or guidance.faded(state.epoch, state.stopped_at) > 0
        if guidance is None or stopped or not guidance.refill_draws or not plan.mixes:
            return plan, None
        second, lam = plan.second.copy(), plan.lam.copy()
        kept = np.zeros(len(plan), dtype=bool)
        for draw in range(guidance.refill_draws):
            open_rows = np.flatnonzero(~kept)
            if not len(open_rows):
                break
            candidates = plans[draw].keep(rows).keep(open_rows)
            rng = generator(self.job.seed, "refill", state.epoch, state.step, draw)
            batch = self.train_rows.batch(candidates, uniforms)
            accepted = guidance.accepts(self.model, batch, rng).cpu().numpy()
            state.cost.forwards += (1 + guidance.num_teachers) * len(open_rows)
            filled = open_rows[accepted]
            second[filled], lam[filled] = candidates.second[accepted], candidates.lam[accepted]
            kept[filled] = True
        weights = torch.from_numpy(kept).to(self.device, torch.float32)
        return replace(plan, second=second, lam=lam), weights

    def _end_epoch(self, alpha: float) -> None:
        job, state = self.job, self.state
        loss, hits, kept, rows = state.totals
        row: dict[str, Any] = {
            "epoch": state.epoch,
            "alpha": alpha,
            "lr": self.optimiser.param_groups[0]["lr"],
            "loss": loss / self.steps_per_epoch,
            "mixed_accuracy": hits / rows,
            "kept": kept / rows,
        }
        state.epoch, state.step, state.totals = state.epoch + 1, 0, [0.0] * 4
        if state.epoch % job.training.evaluate_every == 0 or state.epoch == job.epochs:
            row |= self._evaluate()
        self._check_finite(*row.values())
        state.metrics.append(row)
        if job.after_epoch is not None:
            job.after_epoch(state.epoch, self.model)
        self.watch.on_steps(self.steps_per_epoch)

    def _check_finite(self, *numbers: float) -> None:
        """Refuse to go on from, or to save, what is no longer a number."""
        tensors = (t for t in self.model.state_dict().values() if t.is_floating_point())
        if not (
            all(map(math.isfinite, numbers)) and all(bool(t.isfinite().all()) for t in tensors)
        ):
            job = self.job
            raise FloatingPointError(
                f"loss or weights are not finite in epoch {self.state.epoch} of {job.stream}; "
                f"lower training.lr ({job.training.lr}) or look for bad pixels"
            )

    def _evaluate(self) -> dict[str, float]:
        train = accuracy_and_nll(predict(self.model, self.train_rows), self.train_rows.part.labels)
        dev = accuracy_and_nll(predict(self.model, self.dev_rows), self.dev_rows.part.labels)
        guidance = self.job.guidance
        level = None if guidance is None else guidance.overtake
        if level is not None and self.state.stopped_at is None and dev[0] > level:
            self.state.stopped_at = self.state.epoch
        names = ("train_accuracy", "train_nll", "val_dev_accuracy", "val_dev_nll")
        return dict(zip(names, (*train, *dev), strict=True))

    # -- parts ------------------------------------------------------------------------

    def _micro(self, plan: MixPlan) -> list[MixPlan]:
        count = self.job.training.accumulate
        if count == 1:
            return [plan]
        size = -(-len(plan) // count)
        return [plan.keep(slice(at, at + size)) for at in range(0, len(plan), size)]

    def _logits(self, batch: Batch) -> tuple[Tensor | None, Tensor | None]:
        outputs = self.objective.logits(self.model, batch)
        self.state.cost.forwards += sum(len(part) for part in outputs if part is not None)
        return outputs

    def _count(
        self,
        loss: Tensor,
        outputs: tuple[Tensor | None, Tensor | None],
        batch: Batch,
        weights: Weights,
    ) -> None:
        clean, mixed = outputs
        logits = clean if mixed is None else mixed
        targets = batch.clean_targets if mixed is None else batch.mixed_targets
        assert logits is not None and targets is not None
        # Under mixing the accuracy counts lambda: the mass of the label that was hit.
        hits = targets.gather(1, logits.detach().argmax(1, keepdim=True)).sum()
        kept = weights.mixed.sum()
        new = (float(loss.detach()), float(hits), float(kept), float(len(targets)))
        self.state.totals = [a + b for a, b in zip(self.state.totals, new, strict=True)]

    def _objective(self) -> Objective:
        job, learner = self.job, self.job.learner
        weigh = choose.pick(
            "class_weights", job.training.class_weights.name, job.training.class_weights.parameters
        )
        weight = weigh(job.part.labels, job.splits.num_classes).to(self.device)
        return Objective(
            loss=choose.pick("losses", job.training.loss.name, job.training.loss.parameters),
            class_weight=None if bool((weight == 1).all()) else weight,
            clean_weight=learner.clean_weight,
            mixed_weight=learner.mixed_weight,
            normalise=learner.normalise,
            forward=learner.forward,
            excluded=job.excluded,
            uses_clean=learner.clean != "none",
        )

    def _train_rows(self) -> RowMaker:
        """Return the maker of what is trained on: with augmentation, and the folds of partners."""
        job, settings, augment, folds = self.job, self.job.training.augmentation, None, None
        if settings.name != "none":
            augment = choose.pick("augmentations", settings.name, settings.parameters)
        if job.folds is not None:
            folds = torch.from_numpy(job.folds).to(self.device)
        plain = RowMaker.of(job.part, job.splits, self.device)
        return replace(plain, augment=augment, folds=folds)

    # -- stopping and resuming --------------------------------------------------------

    def _maybe_stop(self) -> None:
        stop = self.watch.should_stop()
        if stop or time.monotonic() - self.saved > self.watch.checkpoint_seconds:
            self._save()
        if stop:
            raise Interrupted

    def _save(self) -> None:
        if self.checkpoints is None:
            return
        self._check_finite(self.state.totals[0])
        now = time.monotonic()
        self.state.cost.seconds += now - self.started
        self.started = self.saved = now
        record = None if self.record is None else asdict(self.record)
        state = {"optimiser": self.optimiser.state_dict(), "record": record, **asdict(self.state)}
        step = self.state.epoch * self.steps_per_epoch + self.state.step
        self.checkpoints.save(step, self.model.state_dict(), state)

    def _resume(self) -> None:
        found = self.checkpoints.latest() if self.checkpoints is not None else None
        if found is None:
            return
        tensors, state = found
        self.model.load_state_dict(tensors)
        self.optimiser.load_state_dict(state.pop("optimiser"))
        record = state.pop("record")
        self.record = None if record is None else Record(**record)
        self.state = _State(**{**state, "cost": Cost(**state["cost"])})
