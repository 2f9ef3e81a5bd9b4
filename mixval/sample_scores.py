"""Scores of single samples and mixes that stand beside r_hat: EL2N, GraNd, forgetting, RHO-LOSS.

Log-probabilities are those of S draws (or R independent runs), (S, B, K), and every score
is the mean over draws of the score of a draw, never the score of the mean prediction:
the same convention as r_hat's, so that columns of one table can be compared.
"""

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from mixval.engine import plain
from mixval.fisher import still, trainable
from mixval.rhat import draw_losses, score
from mixval.types import Loss

# What `beside` returns, in this order.
ROW_SCORES = (
    "loss",
    "margin",
    "entropy",
    "teacher_entropy",
    "rho",
    "el2n",
    "el2n_higher",
    "el2n_lower",
)


def el2n(log_probs: Tensor, targets: Tensor) -> Tensor:
    r"""Return EL2N of each row, (B,), from R independent runs (R, B, K) and targets (B, K).

    $$ \frac{1}{R} \sum_r \lVert p_r(x) - y \rVert_2 \in [0, \sqrt 2] $$

    y may be soft: of a mix it is $\lambda e_{y_i} + (1 - \lambda) e_{y_j}$. The authors
    (Paul et al. 2021) average 10 runs; scores of a single network rank worse.
    """
    _check_shapes(log_probs, targets)
    errors = torch.linalg.vector_norm(log_probs.exp() - targets, dim=-1)  # (R, B)
    return _finite("EL2N", errors.mean(0))


def margin(log_probs: Tensor, targets: Tensor) -> Tensor:
    r"""Return the log-odds of the labelled class against its best rival, (B,).

    $$ \frac{1}{S} \sum_s \bigl[ \log p_s(c) - \max_{k \ne c} \log p_s(k) \bigr],
       \quad c = \arg\max_k y_k $$

    For a mix c is the label of the larger share; of equal shares the class with the lower
    number, whichever parent came first. A draw's margin is positive where c is its prediction.
    """
    _check_shapes(log_probs, targets)
    labelled = targets.argmax(-1, keepdim=True).expand(len(log_probs), -1, 1)  # (S, B, 1)
    own = log_probs.gather(-1, labelled).squeeze(-1)
    rival = log_probs.scatter(-1, labelled, -torch.inf).amax(-1)
    return _finite("the margin", (own - rival).mean(0))


def entropy(log_probs: Tensor) -> Tensor:
    r"""Return the expected entropy of the prediction, (B,), in nats.

    $$ -\frac{1}{S} \sum_s \sum_k p_s(k) \log p_s(k) \in [0, \log K] $$
    """
    probs = log_probs.exp()  # (S, B, K); entr(0) = 0, where 0 log 0 is NaN
    return _finite("the entropy", torch.special.entr(probs).sum(-1).mean(0))


def beside(
    student: Tensor,
    teacher: Tensor,
    targets: Tensor,
    first_el2n: Tensor,
    second_el2n: Tensor,
    *,
    loss: Loss,
) -> dict[str, Tensor]:
    r"""Return the scores of mixes that stand beside their r_hat, (B,) each, by `ROW_SCORES`.

    `student` (S, B, K) and `teacher` (T, B, K) are log-probabilities of the mixes, `targets`
    (B, K) their mixed labels, `first_el2n` and `second_el2n` (B,) EL2N of the two parents.
    `loss`, `margin`, `entropy` and `el2n` are the student's on the mix, and

    $$ \mathrm{rho} = E_\text{student}[H] - E_\text{teacher}[H] = -\hat r, $$

    the reducible loss of RHO-LOSS (Mindermann et al. 2022), with the teacher as the
    irreducible-loss model: high where the student can still learn what the teacher knows.
    """
    _check_shapes(student, targets)
    _check_shapes(teacher, targets)
    if not first_el2n.shape == second_el2n.shape == targets.shape[:1]:
        shapes = tuple(first_el2n.shape), tuple(second_el2n.shape)
        raise ValueError(f"EL2N of the parents must be ({len(targets)},) each, got {shapes}")
    losses = (draw_losses(log_probs, targets, loss) for log_probs in (teacher, student))
    scored = score(*losses)
    columns = (
        scored.base,
        margin(student, targets),
        entropy(student),
        entropy(teacher),
        -scored.r_hat,
        el2n(student, targets),
        _finite("EL2N of a parent", torch.maximum(first_el2n, second_el2n)),
        torch.minimum(first_el2n, second_el2n),
    )
    return dict(zip(ROW_SCORES, columns, strict=True))


def grand(model: nn.Module, inputs: Tensor, targets: Tensor, *, loss: Loss, chunk: int) -> Tensor:
    r"""Return GraNd of each row under one network, (B,), from inputs (B, ...), targets (B, K).

    $$ \lVert \nabla_\theta \ell(f_\theta(x), y) \rVert_2 $$

    over all trainable parameters, in eval mode and the weights' own precision. Paul et al.
    average it over runs. `chunk` rows are done at once; `grand_chunk` finds how many fit.
    """
    network = still(model)
    weights = trainable(network)

    def row_loss(weights: dict[str, Tensor], row: Tensor, target: Tensor) -> Tensor:
        logits = functional_call(network, weights, (row[None],))
        return loss(logits, target[None]).squeeze(0)

    def norm(row: Tensor, target: Tensor) -> Tensor:
        # Inside vmap: a chunk leaves (chunk,) norms behind, and its gradients are freed.
        gradients = grad(row_loss)(weights, row, target)
        parts = [torch.linalg.vector_norm(gradient) for gradient in gradients.values()]
        total: Tensor = torch.linalg.vector_norm(torch.stack(parts))
        return total

    with torch.no_grad():
        norms: Tensor = vmap(norm, chunk_size=chunk)(inputs, targets)
    return _finite("GraNd", norms)


def grand_bytes(model: nn.Module, chunk: int) -> int:
    """Return the bytes of the per-sample gradients that `grand` holds at once.

    chunk x trainable parameters x bytes of each (4 in single precision). One copy of the
    network and the activations of `chunk` rows come on top; in small convolutional
    networks on large images these are the larger part.
    """
    return chunk * sum(p.numel() * p.element_size() for p in trainable(plain(model)).values())


def grand_chunk(model: nn.Module, limit_bytes: int) -> int:
    """Return the largest chunk whose per-sample gradients fit: grand_bytes <= limit_bytes."""
    row = grand_bytes(model, 1)
    if limit_bytes < row:
        raise ValueError(
            f"limit_bytes must hold the gradient of one sample, {row} bytes, got {limit_bytes}; "
            "raise it or use grand_last_layer"
        )
    return limit_bytes // row


def grand_last_layer(features: Tensor, log_probs: Tensor, targets: Tensor) -> Tensor:
    r"""Return the part of GraNd that the last linear layer has, (B,), without a backward pass.

    $$ \lVert \nabla_{W,b}\, \ell \rVert_2 = \lVert p - y \rVert_2 \sqrt{\lVert\phi\rVert^2 + 1} $$

    Exact for cross-entropy and logits $W\phi + b$ with features (B, D), log-probabilities
    (B, K) and targets (B, K) that sum to 1: the gradient is $(p - y)\phi^T$ and $p - y$.
    A lower bound of GraNd, and EL2N scaled by the length of the features.
    """
    size = (torch.linalg.vector_norm(features, dim=-1) ** 2 + 1).sqrt()
    return _finite("GraNd of the last layer", el2n(log_probs[None], targets) * size)


def forgetting(correct: Tensor) -> Tensor:
    r"""Return how often each sample was forgotten, (N,), from (E, N) bool: E presentations.

    $$ \#\{ e : \text{correct at } e, \text{ wrong at } e + 1 \} \le \lfloor E/2 \rfloor $$

    Infinite for a sample that was never correct (Toneva et al. 2019): it was not even learnt.
    """
    forgotten = (correct[:-1] & ~correct[1:]).sum(0).float()
    return forgotten.masked_fill(~correct.any(0), torch.inf)


def _check_shapes(log_probs: Tensor, targets: Tensor) -> None:
    # Broadcasting would average over rows what should be averaged over draws.
    if log_probs.dim() != 3 or log_probs.shape[1:] != targets.shape:
        raise ValueError(
            "log-probabilities must be (draws, rows, classes) and targets (rows, classes), "
            f"got {tuple(log_probs.shape)} and {tuple(targets.shape)}"
        )


def _finite(name: str, values: Tensor) -> Tensor:
    if not torch.isfinite(values).all():
        raise FloatingPointError(
            f"{name} is not finite: a network gives NaN or infinite outputs; "
            "lower the learning rate"
        )
    return values
