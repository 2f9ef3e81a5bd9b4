"""Fit p(theta | D) and p(theta | D, F) around the base network, or take them from the store."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from mixval import choose
from mixval.checkpoints import load_weights, save_weights
from mixval.errors import UserError
from mixval.feeding import feed, feed_labelled
from mixval.files import weight_facts
from mixval.fingerprints import array_fingerprint
from mixval.fisher import LabelledBatch
from mixval.fitting import Known, Pool
from mixval.posteriors import Fitted
from mixval.stages.cell import Cell
from mixval.stages.network import Network, learn
from mixval.store import Store
from mixval.training_job import Job, Plans, epoch_uniforms, num_steps, step_rows, train_rows
from mixval.types import FailureSet, Pair, Part


def posteriors(cell: Cell, name: str, base: Network, failures: FailureSet, store: Store) -> Pair:
    """Return the two posteriors that the recipe calls `name`: fitted, or reused."""
    settings = cell.recipe.posteriors[name]
    artifact = cell.artifact(
        store,
        "posteriors",
        name,
        made_from={
            "settings": settings.model_dump(mode="json"),
            "training": cell.recipe.training.model_dump(mode="json"),
            "base": base.fingerprint,
            "failures": [failures.split, array_fingerprint(failures.query)],
        },
    )
    path, leaks = artifact.path("draws.safetensors"), failures.split == "test"
    if cell.reuse(artifact) is None:
        fit = choose.pick("posterior_fits", settings.name, settings.parameters)
        # By every process: networks are trained together, all else is a function of the seed.
        fitted: Fitted = fit(_Data(cell, name, failures, store).known(base))
        if cell.engine.processes.is_main:
            save_weights(path, *fitted.to_tensors())
            artifact.finish({"draws": fitted.draws, "leaks_test_labels": leaks})
        cell.engine.processes.wait()
    fitted = Fitted.from_tensors(load_weights(path), weight_facts(path))
    given_d, given_f = fitted.posteriors(base.model, cell.seed)
    own = artifact.fingerprint
    return Pair(given_d, given_f, f"{own}, given D", f"{own}, given D and F", leaks=leaks)


@dataclass(frozen=True)
class _Data:
    """D and F of a cell, in the ways that fits ask for them."""

    cell: Cell
    name: str
    failures: FailureSet
    store: Store

    def known(self, base: Network) -> Known:
        cell, failures = self.cell, self.failures
        if not len(failures.query):
            raise UserError(
                f"posteriors.{self.name}: needs failures, but the base network fails none on "
                f"{failures.split}; take another failures.rule, or leave it out"
            )
        return Known(
            model=base.model,
            failures=cell.gathered(getattr(cell.splits, failures.split), failures.query),
            num_samples=len(cell.splits.train),
            rows=lambda: feed_labelled(cell.rows(cell.splits.train)),
            batches=self._batches,
            steps=self._steps,
            learn=self._learn,
            weight_decay=cell.recipe.training.weight_decay,
            seed=cell.seed,
        )

    def _batches(self, pool: Pool, epoch: int) -> Iterator[LabelledBatch]:
        """Yield the batches of D and, in equal shares on top of them, the rows of F.

        So D comes in the same order with F and without: all that differs is F.
        """
        parts = [self.cell.splits.train]
        parts += [self._failing()] if pool == "train+failures" else []
        for batches in zip(*(self._shuffled(part, epoch) for part in parts), strict=True):
            inputs, labels = zip(*batches, strict=True)
            yield torch.cat(inputs), torch.cat(labels)

    def _shuffled(self, part: Part, epoch: int) -> Iterator[LabelledBatch]:
        recipe, count = self.cell.recipe, self._steps
        job = Job(
            learner=recipe.base,
            training=recipe.training,
            model=recipe.model,
            epochs=recipe.training.epochs,
            part=part,
            splits=self.cell.splits,
            seed=self.cell.seed,
            stream="posterior",
        )
        maker = train_rows(job, self.cell.engine.device, self.cell.engine.loaders)
        plan = Plans(job, epoch, alpha=0.0)[0]
        steps = [plan.keep(step_rows(len(plan), count, step)) for step in range(count)]
        for batch in feed(maker, steps, epoch_uniforms(job, maker, epoch)):
            yield batch.clean, batch.clean_targets.argmax(1)

    @property
    def _steps(self) -> int:
        return num_steps(len(self.cell.splits.train), self.cell.recipe.training.batch_size)

    def _failing(self) -> Part:
        split: Part = getattr(self.cell.splits, self.failures.split)
        return split.with_ids(torch.from_numpy(self.failures.query))

    def _learn(self, pool: Pool, member: int) -> nn.Module:
        return learn(
            self.cell,
            self.cell.recipe.base.model_copy(update={"data": pool}),
            ("posteriors", self.name, f"{pool}-{member}"),
            self.store,
            stream=f"posterior/member-{member}",
            failures=self.failures,
        ).model
