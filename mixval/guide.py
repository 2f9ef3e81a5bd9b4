"""A teacher for a training loop of one's own: which of its mixes to train on, and the loss.

    guide = mixval.Guide(teacher)
    logits = model(x_mix)
    loss = guide.loss(logits, x_mix, y_a, y_b, lam)  # or targets=soft, (B, K)
    loss.backward()

The loss is the mixed term of mixval's students,

    loss = (1/B) sum_i w_i H_i,    w_i = filter(r_hat_i),    r_hat_i = H_i(teacher) - H_i(model)

with B the rows of the batch, never the number kept, so a batch of which little is kept makes
a small step. A clean term, which mixval's own students have, is the caller's to add.

Gradient accumulation: divide by the number of micro-batches as usual. Equal micro-batches give
the gradient of the whole batch for filters that look at one row (`negative`, `positive`,
`soft`, `confident`); those that compare rows (`low_fraction`, `high_fraction`, `top_k`) see the
micro-batch. The same holds for the ranks of DistributedDataParallel, which averages their
gradients.

Mixed precision: half-precision logits are scored in float32. The teacher runs in the autocast
state of the call, so call within the model's autocast block to compare like with like.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Annotated, Any

import torch
from pydantic import TypeAdapter, ValidationError
from torch import Tensor, nn
from torch.nn import functional as F

from mixval import choose
from mixval.losses import cross_entropy
from mixval.mixing import mixed_targets
from mixval.posteriors import point
from mixval.recipe import Choice, option_of
from mixval.recipe_errors import one_line
from mixval.rhat import Scored, Scorer
from mixval.seeding import generator
from mixval.types import MixScores, Posterior

Teacher = nn.Module | Posterior
Filter = str | Mapping[str, Any] | Callable[[MixScores], Tensor]

_FILTER: TypeAdapter[Choice] = TypeAdapter(Annotated[Choice, option_of("filter_policies")])
_SUM_TOLERANCE = 1e-2  # soft targets may come in half precision


class Guide:
    """(logits, mixes) -> the weight of each mix, and the loss that trains on those kept.

    A mix is given by `y_a, y_b, lam` (a number or (B,)) or by soft `targets` (B, K), as timm's
    Mixup and torchvision's MixUp and CutMix return them.
    """

    def __init__(
        self,
        teacher: Teacher | Sequence[Teacher],
        filter: Filter = "negative",  # noqa: A002 - the name users write in recipes
    ) -> None:
        """Copy and freeze the teacher: one network that returns logits, several, or a Posterior.

        `filter` is a name (`mixval list filter_policies`), a name with parameters such as
        {"name": "soft", "tau": 0.1}, or a function of MixScores that returns weights in [0, 1].
        It sees `lam` as given; of soft targets, the largest share of the row.
        """
        several: Sequence[Any] | nn.ModuleList = (
            teacher if isinstance(teacher, Sequence | nn.ModuleList) else [teacher]
        )
        self._posteriors = [_posterior(one) for one in several]
        if not self._posteriors:
            raise ValueError("teacher: must be a network, or a list of at least one; got none")
        self._policy = _policy(filter)
        self._rng = generator(0, "guide")
        self._kept: Tensor | None = None
        self.on = True  # False: guidance is stopped, every mix has weight 1, no teacher is run

    @property
    def kept(self) -> float:
        """The mean weight of the last batch; NaN before the first."""
        return math.nan if self._kept is None else float(self._kept)

    def loss(
        self,
        logits: Tensor,  # (B, K) of the training pass
        x_mix: Tensor,  # (B, ...) what the model and the teacher see
        y_a: Tensor | None = None,  # (B,)
        y_b: Tensor | None = None,  # (B,)
        lam: Tensor | float | None = None,
        *,
        targets: Tensor | None = None,  # (B, K)
    ) -> Tensor:
        """Return (1/B) sum_i w_i H_i, in float32 at least; gradients flow to `logits` alone."""
        logits = _float32(_checked_logits(logits, x_mix))
        targets, lam = _mixes(logits, y_a, y_b, lam, targets)
        weights = self._weigh(logits, x_mix, targets, lam)
        return (weights * cross_entropy(logits, targets)).sum() / len(logits)

    def weights(
        self,
        logits: Tensor,
        x_mix: Tensor,
        y_a: Tensor | None = None,
        y_b: Tensor | None = None,
        lam: Tensor | float | None = None,
        *,
        targets: Tensor | None = None,
    ) -> Tensor:
        """Return the weights in [0, 1] alone, (B,), for a loss of one's own."""
        logits = _float32(_checked_logits(logits, x_mix))
        return self._weigh(logits, x_mix, *_mixes(logits, y_a, y_b, lam, targets))

    def score(
        self,
        logits: Tensor,
        x_mix: Tensor,
        y_a: Tensor | None = None,
        y_b: Tensor | None = None,
        lam: Tensor | float | None = None,
        *,
        targets: Tensor | None = None,
    ) -> Scored:
        """Return r_hat with both its terms: `updated` the teacher's H, `base` the model's."""
        logits = _float32(_checked_logits(logits, x_mix))
        return self._score(logits, x_mix, _mixes(logits, y_a, y_b, lam, targets)[0])

    @torch.no_grad()
    def _weigh(self, logits: Tensor, x_mix: Tensor, targets: Tensor, lam: Tensor) -> Tensor:
        weights = logits.new_ones(len(logits))
        if self.on:
            scored = self._score(logits, x_mix, targets)
            scores = MixScores(
                r_hat=scored.r_hat,
                updated=scored.updated,
                base=scored.base,
                lam=lam,
                rng=self._rng,
                std_error=scored.std_error,
                draws=scored.draws,
            )
            weights = _checked_weights(self._policy(scores), logits)
        self._kept = weights.mean()  # on the device: who asks for the number waits for it
        return weights

    @torch.no_grad()
    def _score(self, logits: Tensor, x_mix: Tensor, targets: Tensor) -> Scored:
        scorer = Scorer(partial(self._draws, logits.shape), cross_entropy)
        try:
            return scorer(x_mix, targets, F.log_softmax(logits, dim=-1)[None])
        except FloatingPointError as error:  # looked into only now: every look waits for the GPU
            finite = torch.isfinite(logits).all(-1)
            who = "teacher" if finite.all() else "logits"
            where = "" if finite.all() else f" in {int((~finite).sum())} of {len(finite)} rows"
            raise ValueError(f"{who}: must be finite, got NaN or infinity{where}") from error

    def _draws(self, shape: torch.Size, inputs: Tensor, fold: Tensor | None = None) -> Tensor:
        """Return the log-probabilities of all teachers, (S, B, K)."""
        draws = [posterior(inputs) for posterior in self._posteriors]
        for one in draws:
            if one.dim() != 3 or one.shape[1:] != shape:
                raise ValueError(
                    f"teacher: must give what logits has for each mix, {tuple(shape)}, "
                    f"got {tuple(one.shape[1:])}"
                )
        return torch.cat(draws)


class _Following(nn.Module):
    """A network that goes where its inputs are; full precision comes out."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network
        self.device: torch.device | None = None

    def forward(self, inputs: Tensor) -> Tensor:
        if inputs.device != self.device:
            with torch.inference_mode(False):  # or its weights would be inference tensors
                self.network.to(inputs.device)
            self.device = inputs.device
        logits = self.network(inputs)
        if not isinstance(logits, Tensor):
            raise ValueError(f"teacher: must return a tensor of logits, got {type(logits)}")
        return _float32(logits)


def _posterior(teacher: Teacher) -> Posterior:
    if isinstance(teacher, nn.Module):
        return point([_Following(teacher)])
    if not callable(teacher):
        raise ValueError(f"teacher: must be a network or a Posterior, got {type(teacher)}")
    return teacher


def _policy(chosen: Filter) -> Callable[[MixScores], Tensor]:
    if callable(chosen):
        return chosen
    try:
        choice = _FILTER.validate_python(chosen)
    except ValidationError as error:
        raise ValueError(f"filter: {one_line(error, Choice)}") from error
    if choice.name == "yoked":
        raise ValueError("filter: must not be 'yoked', which replays a run of mixval")
    return choose.pick("filter_policies", choice.name, choice.parameters)


def _float32(logits: Tensor) -> Tensor:
    """Return half precision as float32, and the rest as it is."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


# -- what was given -----------------------------------------------------------------------


def _checked_logits(logits: Tensor, x_mix: Tensor) -> Tensor:
    if logits.dim() != 2 or not len(logits) or not logits.is_floating_point():
        shape = f"{tuple(logits.shape)} of {logits.dtype}"
        raise ValueError(f"logits: must be floats (B, K) of at least one mix, got {shape}")
    if x_mix.dim() == 0 or len(x_mix) != len(logits):
        raise ValueError(
            f"x_mix: must have a row for each of the {len(logits)} of logits, "
            f"got {tuple(x_mix.shape)}"
        )
    return logits


def _mixes(
    logits: Tensor,
    y_a: Tensor | None,
    y_b: Tensor | None,
    lam: Tensor | float | None,
    targets: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return the soft targets (B, K) and lambda (B,) of mixes given in either form."""
    pair = {"y_a": y_a, "y_b": y_b, "lam": lam}
    given = [name for name, value in pair.items() if value is not None]
    if targets is not None and not given:
        targets = _checked_targets(targets, logits)
        return targets, targets.amax(-1)
    if targets is not None or y_a is None or y_b is None or lam is None:
        given += ["targets"] if targets is not None else []
        raise ValueError(
            f"targets: give either targets=(B, K) or y_a, y_b and lam, "
            f"got {', '.join(given) or 'none of them'}"
        )
    lam = _checked_lam(lam, logits)
    y_a, y_b = _checked_labels("y_a", y_a, logits), _checked_labels("y_b", y_b, logits)
    return mixed_targets(y_a, y_b, lam, logits.shape[1]), lam


def _checked_labels(name: str, labels: Tensor, logits: Tensor) -> Tensor:
    rows, classes = logits.shape
    whole = not (labels.is_floating_point() or labels.is_complex())
    if labels.shape != (rows,) or not whole:
        raise ValueError(
            f"{name}: must be whole numbers ({rows},), as logits has {rows} rows; "
            f"got {tuple(labels.shape)} of {labels.dtype}; soft targets go in as targets="
        )
    low, high = labels.min(), labels.max()
    if low < 0 or high >= classes:
        raise ValueError(
            f"{name}: must be 0 to {classes - 1}, as logits has {classes} classes; "
            f"got {int(low)} to {int(high)}"
        )
    return labels.to(logits.device, torch.int64)


def _checked_lam(lam: Tensor | float, logits: Tensor) -> Tensor:
    given = torch.as_tensor(lam, dtype=logits.dtype, device=logits.device).detach()
    if given.shape not in ((), (len(logits),)):
        raise ValueError(f"lam: must be a number or ({len(logits)},), got {tuple(given.shape)}")
    if not ((given >= 0) & (given <= 1)).all():  # NaN is not
        raise ValueError(f"lam: must be in [0, 1], got {_range(given)}")
    return given.expand(len(logits))


def _checked_targets(targets: Tensor, logits: Tensor) -> Tensor:
    if targets.shape != logits.shape:
        raise ValueError(
            f"targets: must be {tuple(logits.shape)} as logits is, got {tuple(targets.shape)}"
        )
    given = targets.to(logits.device, logits.dtype).detach()
    if not (given >= 0).all():
        raise ValueError(f"targets: must be at least 0, got {_range(given)}")
    sums = given.sum(-1)
    if not ((sums - 1).abs() <= _SUM_TOLERANCE).all():
        raise ValueError(f"targets: must add up to 1 in each row, got sums {_range(sums)}")
    return given


def _checked_weights(weights: Tensor, logits: Tensor) -> Tensor:
    if not isinstance(weights, Tensor) or weights.shape != logits.shape[:1]:
        shape = tuple(weights.shape) if isinstance(weights, Tensor) else type(weights)
        raise ValueError(f"filter: must return a tensor ({len(logits)},), got {shape}")
    if not ((weights >= 0) & (weights <= 1)).all():
        raise ValueError(f"filter: must return weights in [0, 1], got {_range(weights)}")
    # A copy: a filter may return what backward can't keep, or what it writes to again.
    return weights.to(logits.device, logits.dtype, copy=True)


def _range(values: Tensor) -> str:
    low, high = float(values.min()), float(values.max())
    return f"{low:g}" if low == high else f"{low:g} to {high:g}"
