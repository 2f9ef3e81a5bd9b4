"""The only training loop: base, teachers and students all go through it.

An epoch is a plan; a step is a slice of it. Order, partners, lambda, augmentation and
dropout are pure functions of (seed, epoch, step), so a state of weights, optimiser and
counters is all that a resume needs to go on bit by bit.
"""

import logging
import math
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from mixval import choose
from mixval.checkpoints import Checkpoints
from mixval.engine import Engine
from mixval.errors import Interrupted, UserError
from mixval.feeding import feed
from mixval.guidance import without_traces
from mixval.metrics import accuracy_and_nll, predict
from mixval.mixing import RowMaker
from mixval.moments import alpha_at
from mixval.objectives import Objective, Weights
from mixval.optimisers import make_optimiser
from mixval.record import Record
from mixval.seeding import generator, seed_torch, torch_seed
from mixval.training_job import (
    Cost,
    Job,
    Plans,
    Trained,
    Watch,
    build_model,
    epoch_uniforms,
    micro_batches,
    num_steps,
    step_rows,
    train_rows,
)
from mixval.types import Batch, MixPlan

log = logging.getLogger(__name__)
Outputs = tuple[Tensor | None, Tensor | None]  # logits of the clean and of the mixed rows


@dataclass
class _State:
    """Where a training stands; with the weights and the optimiser, all that a resume needs."""

    epoch: int = 0
    step: int = 0  # within the epoch
    stopped_at: int | None = None  # epoch where guidance stopped because the student overtook
    cost: Cost = field(default_factory=Cost)
    metrics: list[dict[str, Any]] = field(default_factory=list)
    totals: Tensor = field(default_factory=lambda: torch.zeros(3))  # loss, hits, kept


def train(job: Job, engine: Engine, checkpoints: Checkpoints | None, watch: Watch) -> Trained:
    """Train a network from scratch, or from its last checkpoint, to the last epoch."""
    loop = Loop(job, engine, checkpoints, watch)
    for _ in loop.steps():
        pass
    return loop.trained()


class Loop:
    """One training. Each item of `steps()` is one optimiser step done."""

    def __init__(
        self, job: Job, engine: Engine, checkpoints: Checkpoints | None, watch: Watch
    ) -> None:
        self.job, self.watch, self.checkpoints = job, watch, checkpoints
        self.processes, self.device = engine.processes, engine.device
        network = build_model(job.model, job.splits, job.seed, job.stream)
        self.model = engine.prepare(network)
        self.train_rows = train_rows(job, self.device, engine.loaders)
        self.dev_rows = RowMaker.of(job.splits.val_dev, job.splits, self.device, engine.loaders)
        self.objective = self._objective()
        self.steps_per_epoch = num_steps(len(job.part), job.training.batch_size)
        self._check_shares()
        total = job.epochs * self.steps_per_epoch
        warmup = job.training.warmup_epochs * self.steps_per_epoch
        self.optimiser, self.schedule = make_optimiser(network, job.training, total, warmup)
        self.record: Record | None = None
        if job.guidance is not None and self.processes.is_main:
            self.record = Record.create(job.folder, job.epochs, len(job.part))
        self.state = _State(totals=self._no_totals())
        self.started = self.saved = time.monotonic()

    # -- the loop ---------------------------------------------------------------------

    def steps(self) -> Iterator[None]:
        """Train to the end, and hand over after every optimiser step."""
        self._resume()
        while self.state.epoch < self.job.epochs:
            yield from self._epoch()
        self.state.cost.seconds += time.monotonic() - self.started

    def trained(self) -> Trained:
        """Return the finished network; its record is whole once the main process is here, too."""
        self.processes.wait()
        record = self.record
        if self.job.guidance is not None and record is None and self.job.folder is not None:
            record = Record(self.job.folder)
        return Trained(self.model.eval(), self.state.metrics, record, self._whole_cost())

    def _epoch(self) -> Iterator[None]:
        job, state = self.job, self.state
        alpha = alpha_at(job.learner, state.epoch, job.epochs)
        plans = Plans(job, state.epoch, alpha)
        uniforms = epoch_uniforms(job, self.train_rows, state.epoch)
        micro = [self._own_rows(plans[0], step) for step in range(state.step, self.steps_per_epoch)]
        refills = self._refills(plans[0])
        ahead = [] if refills else [plan for step in micro for plan in step]
        batches = feed(self.train_rows, ahead, uniforms)
        for own in micro:
            if refills:
                self._refilled_step(plans, uniforms)
            else:
                self._step([next(batches) for _ in own], None)
            state.step += 1
            if state.step < self.steps_per_epoch:
                self._maybe_stop()
                yield
        self._end_epoch(alpha)
        self._maybe_stop()
        yield

    def _own_rows(self, plan: MixPlan, step: int) -> list[MixPlan]:
        """Return this process's rows of a step, as micro-batches."""
        rows = plan.keep(step_rows(len(plan), self.steps_per_epoch, step))
        own = rows.keep(self.processes.share(len(rows)))
        return micro_batches(own, self.job.training.accumulate)

    def _seed_step(self) -> None:
        # Dropout becomes a pure function of the step, too.
        rank, state = self.processes.rank, self.state
        place = (state.epoch, state.step, rank) if rank else (state.epoch, state.step)
        seed_torch(torch_seed(self.job.seed, f"{self.job.stream}/forward", *place), self.device)
        if not self.model.training:  # asking is cheaper than telling every module
            self.model.train()

    def _step(self, batches: list[Batch], accepted: Tensor | None) -> None:
        state = self.state
        self.schedule.step_update(state.epoch * self.steps_per_epoch + state.step)
        self._seed_step()
        outputs = [self._logits(batches[0])] if len(batches) == 1 else None
        weights = self._weights(batches, outputs, accepted)
        size = self.objective.step_size(batches, weights, self.processes.total)
        self.optimiser.zero_grad(set_to_none=True)
        for place_in_step, (batch, weight) in enumerate(zip(batches, weights, strict=True)):
            logits = outputs[place_in_step] if outputs is not None else self._logits(batch)
            loss = self.objective(logits, batch, weight, size)
            loss.backward()  # type: ignore[no-untyped-call]
            self._count(loss, logits, batch, weight)
        self.processes.sum_gradients(self.model.network)
        self.processes.average_buffers(self.model.network)
        self.optimiser.step()
        state.cost.steps += 1

    def _weights(
        self, batches: list[Batch], outputs: list[Outputs] | None, accepted: Tensor | None
    ) -> list[Weights]:
        guidance, state = self.job.guidance, self.state
        weights = [
            Weights(one, one) for one in (torch.ones_like(b.clean_targets[:, 0]) for b in batches)
        ]
        if guidance is None:
            return weights
        rows = step_rows(len(self.job.part), self.steps_per_epoch, state.step)
        mixes = batches[0].mixed is not None
        faded = guidance.faded(state.epoch, state.stopped_at)
        if faded < 1 and (guidance.filters_clean or (mixes and accepted is None)):
            scored = outputs or self._scoring_logits(batches)
            passes = (mixes and guidance.bank is None) + guidance.filters_clean
            own = sum(len(batch.clean) for batch in batches)
            state.cost.forwards += guidance.num_teachers * passes * own
            rng = generator(self.job.seed, "filter", state.epoch, state.step)
            weights = guidance.weights(
                batches, scored, (state.epoch, rows), rng, faded, self.processes
            )
        if accepted is not None:
            parts = torch.split(accepted, [len(batch.clean) for batch in batches])
            weights = [replace(w, mixed=part) for w, part in zip(weights, parts, strict=True)]
        every = {
            name: self.processes.gather(torch.cat([getattr(w, name) for w in weights]))
            for name in ("mixed", "clean")
        }
        if self.record is not None:
            self.record.write(rows, every["mixed"] if mixes else None, every["clean"])
        return weights

    def _scoring_logits(self, batches: list[Batch]) -> list[Outputs]:
        """Return logits to score by: with micro-batches a filter must see the whole step first."""
        assert self.job.guidance is not None
        if self.job.guidance.scorer is None:
            return [(None, None)] * len(batches)
        with without_traces(self.model):
            return [self._logits(batch) for batch in batches]

    # -- refill -----------------------------------------------------------------------

    def _refills(self, plan: MixPlan) -> bool:
        guidance = self.job.guidance
        if guidance is None or not guidance.refill_draws or not plan.mixes:
            return False
        return guidance.faded(self.state.epoch, self.state.stopped_at) == 0

    def _refilled_step(self, plans: Plans, uniforms: Tensor | None) -> None:
        """Take a step after exchanging the mixes that are not kept for other draws."""
        guidance, state = self.job.guidance, self.state
        assert guidance is not None
        self._seed_step()
        rows = step_rows(len(self.job.part), self.steps_per_epoch, state.step)
        own = self.processes.share(rows.stop - rows.start)
        plan, kept, tried = guidance.refilled(
            self.model,
            lambda draw: plans[draw].keep(rows).keep(own),
            lambda candidates: self.train_rows.batch(candidates, uniforms),
            lambda draw: generator(self.job.seed, "refill", state.epoch, state.step, draw),
        )
        state.cost.forwards += (1 + guidance.num_teachers) * tried
        micro = micro_batches(plan, self.job.training.accumulate)
        batches = [self.train_rows.batch(part, uniforms) for part in micro]
        self._step(batches, torch.from_numpy(kept).to(self.device, torch.float32))

    # -- the end of an epoch ----------------------------------------------------------

    def _end_epoch(self, alpha: float) -> None:
        job, state = self.job, self.state
        loss, hits, kept = self.processes.total(state.totals).tolist()
        if self.record is not None:
            self.record.end_epoch(state.epoch)
        row: dict[str, Any] = {
            "epoch": state.epoch,
            "alpha": alpha,
            "lr": self.optimiser.param_groups[0]["lr"],
            "loss": loss / self.steps_per_epoch,
            "mixed_accuracy": hits / len(job.part),
            "kept": kept / len(job.part),
        }
        state.epoch, state.step, state.totals = state.epoch + 1, 0, self._no_totals()
        if state.epoch % job.training.evaluate_every == 0 or state.epoch == job.epochs:
            row |= self._evaluate()
        self._check_finite(*row.values())
        state.metrics.append(row)
        if job.after_epoch is not None:
            job.after_epoch(state.epoch, self.model)
        self.watch.on_steps(self.steps_per_epoch)

    def _check_finite(self, *numbers: float) -> None:
        """Refuse to go on from, or to save, what is no longer a number."""
        tensors = (t for t in self.model.network.state_dict().values() if t.is_floating_point())
        if not (
            all(map(math.isfinite, numbers)) and all(bool(t.isfinite().all()) for t in tensors)
        ):
            job = self.job
            raise FloatingPointError(
                f"loss or weights are not finite in epoch {self.state.epoch} of {job.stream}; "
                f"lower training.lr ({job.training.lr}) or look for bad pixels"
            )

    def _evaluate(self) -> dict[str, float]:
        train, dev = (
            accuracy_and_nll(predict(self.model, rows, processes=self.processes), rows.part.labels)
            for rows in (self.train_rows, self.dev_rows)
        )
        guidance = self.job.guidance
        level = None if guidance is None else guidance.overtake
        if level is not None and self.state.stopped_at is None and dev[0] > level:
            self.state.stopped_at = self.state.epoch
        names = ("train_accuracy", "train_nll", "val_dev_accuracy", "val_dev_nll")
        return dict(zip(names, (*train, *dev), strict=True))

    # -- parts ------------------------------------------------------------------------

    def _logits(self, batch: Batch) -> Outputs:
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
        # On the device: reading a number back would make a GPU wait at every step.
        self.state.totals += torch.stack([loss.detach(), hits, weights.mixed.sum()])

    def _no_totals(self) -> Tensor:
        exact = torch.float32 if self.device.type == "mps" else torch.float64
        return torch.zeros(3, dtype=exact, device=self.device)

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

    def _check_shares(self) -> None:
        training, world = self.job.training, self.processes.world
        least = len(self.job.part) // self.steps_per_epoch // world
        if least < training.accumulate:
            raise UserError(
                f"training.batch_size: must give each of {world} processes and "
                f"{training.accumulate} micro-batches a row, got {training.batch_size}"
            )

    # -- stopping and resuming --------------------------------------------------------

    def _maybe_stop(self) -> None:
        stop = self.watch.should_stop()
        save = stop or time.monotonic() - self.saved > self.watch.checkpoint_seconds
        stop, save = self.processes.any([stop, save], self.device)  # what one decides, all do
        if save:
            self._save()
        if stop:
            raise Interrupted

    def _save(self) -> None:
        if self.checkpoints is None:
            return
        self._check_finite(float(self.state.totals[0]))
        now = time.monotonic()
        self.state.cost.seconds += now - self.started
        self.started = self.saved = now
        totals, cost = self.processes.total(self.state.totals), self._whole_cost()
        if not self.processes.is_main:
            return
        state = {
            **asdict(self.state),
            "totals": totals.cpu(),
            "cost": asdict(cost),
            "optimiser": self.optimiser.state_dict(),
            "record": None if self.record is None else self.record.state(),
        }
        step = self.state.epoch * self.steps_per_epoch + self.state.step
        self.checkpoints.save(step, self.model.network.state_dict(), state)

    def _resume(self) -> None:
        checkpoints = self.checkpoints
        found = self.processes.from_main(checkpoints.latest) if checkpoints is not None else None
        if found is None:
            return
        tensors, state = found
        record = state.pop("record")
        if not self.processes.from_main(lambda: self.record is None or self.record.resume(record)):
            log.warning("the record of %s is damaged; its training starts again", self.job.stream)
            return
        self.model.network.load_state_dict(tensors)
        self.optimiser.load_state_dict(state.pop("optimiser"))
        cost, totals = Cost(**state["cost"]), state["totals"].to(self._no_totals())
        if not self.processes.is_main:  # what all did together is counted once
            cost, totals = replace(cost, forwards=0), self._no_totals()
        self.state = _State(**{**state, "cost": cost, "totals": totals})

    def _whole_cost(self) -> Cost:
        """Return the cost with the forward passes of all processes."""
        own = torch.tensor(self.state.cost.forwards, device=self.device)
        return replace(self.state.cost, forwards=int(self.processes.total(own)))
