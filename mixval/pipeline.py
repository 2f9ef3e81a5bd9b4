"""The order of the stages of one panel and seed, and what each needs; nothing else."""

from dataclasses import dataclass, field

from mixval.recipe import Arm
from mixval.stages.base import base
from mixval.stages.cell import Cell
from mixval.stages.data import data
from mixval.stages.evaluation import evaluation
from mixval.stages.failures import failures
from mixval.stages.network import Network
from mixval.stages.posteriors import posteriors
from mixval.stages.repair import repair
from mixval.stages.scores import scores
from mixval.stages.student import student
from mixval.stages.teacher import TeacherSet, teacher
from mixval.store import Store
from mixval.training_job import Cost
from mixval.types import FailureSet, Ints, Pair


@dataclass
class CellRun:
    """The stages of one cell, each made when something needs it: base, failures, teacher, ..."""

    cell: Cell
    store: Store
    _base: Network | None = None
    _failures: FailureSet | None = None
    _teachers: dict[str, TeacherSet] = field(default_factory=dict)
    _students: dict[str, Network] = field(default_factory=dict)

    def upto(self, stage: str, arms: list[str]) -> None:
        """Run the stages in order up to `stage`; `run` is all of them with the evaluation."""
        data(self.cell, self.store)
        recipe = self.cell.recipe
        wanted = [
            name
            for name in recipe.teachers
            if stage in ("teacher", "score") or self._used(name, arms)
        ]
        if stage == "base":
            self.base()
        elif stage == "failures":
            self.failures()
        elif stage == "posteriors":
            for name in recipe.posteriors:
                self.posteriors(name)
        elif stage == "repair":
            repair(self.cell, self.base(), self.failures(), self.store)
        elif stage in ("teacher", "score"):
            for name in wanted:
                self.teacher(name)
        if stage in ("score", "run") and recipe.scores.rows:
            for name in wanted:
                base = self.base()
                pair = self.teacher(name).against(base.model, base.fingerprint)
                scores(self.cell, name, pair, self.store)
            for name in recipe.posteriors:
                scores(self.cell, name, self.posteriors(name), self.store)
        if stage in ("student", "run"):
            for name in arms:
                self.student(name)
        if stage == "run":
            self.evaluate(arms)

    def base(self) -> Network:
        if self._base is None:
            self._base = base(self.cell, self.store)
        return self._base

    def failures(self) -> FailureSet:
        if self._failures is None:
            self._failures = failures(self.cell, self.base(), self.store)
        return self._failures

    def teacher(self, name: str) -> TeacherSet:
        if name not in self._teachers:
            found = self._failures_for(self.cell.recipe.teachers[name].data)
            self._teachers[name] = teacher(self.cell, name, found, self.store)
        return self._teachers[name]

    def posteriors(self, name: str) -> Pair:
        return posteriors(self.cell, name, self.base(), self.failures(), self.store)

    def student(self, name: str) -> Network:
        if name not in self._students:
            arm = self.cell.recipe.arms[name]
            self._students[name] = student(
                self.cell,
                name,
                self._failures_for(arm.data),
                self.teacher(arm.teacher) if arm.teacher else None,
                self.student(arm.yoked_to) if arm.yoked_to else None,
                self._guide_folds(arm),
                self.store,
            )
        return self._students[name]

    def evaluate(self, arms: list[str]) -> None:
        for name in arms:
            arm = self.cell.recipe.arms[name]
            evaluation(
                self.cell,
                name,
                self.student(name),
                self._preparation(arm) + self.student(name).preparation,
                self.failures() if self.cell.recipe.failures.holdout else None,
                self.store,
            )

    def _guide_folds(self, arm: Arm) -> Ints | None:
        guide = self._guide(arm)
        return None if guide is None else self.teacher(guide).folds

    def _guide(self, arm: Arm) -> str | None:
        """Return the teacher behind an arm: its own, or that of the arm it replays."""
        return self.cell.recipe.arms[arm.yoked_to].teacher if arm.yoked_to else arm.teacher

    def _failures_for(self, data: str) -> FailureSet | None:
        return self.failures() if data == "train+failures" else None

    def _used(self, teacher_name: str, arms: list[str]) -> bool:
        return any(self.cell.recipe.arms[arm].teacher == teacher_name for arm in arms)

    def _preparation(self, arm: Arm) -> Cost:
        """Return what is trained before this arm can be: its teachers, and the base for F."""
        cost, pools = Cost(), {arm.data}
        if arm.teacher:
            cost += self.teacher(arm.teacher).cost
            pools.add(self.cell.recipe.teachers[arm.teacher].data)
        if "train+failures" in pools:
            cost += self.base().cost
        return cost
