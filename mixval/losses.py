"""(logits (B, K), soft targets (B, K)) -> loss of each row, (B,).

One path for hard, soft and mixed labels: an interpolated loss is the loss of the
interpolated target. Log-probabilities may stand in for logits.
"""

from torch import Tensor
from torch.nn import functional as F

from mixval.bounds import BelowOne

__all__ = ["cross_entropy"]


def cross_entropy(
    logits: Tensor,
    targets: Tensor,
    class_weight: Tensor | None = None,
    *,
    label_smoothing: BelowOne = 0.0,
) -> Tensor:
    r"""Return $-\sum_k w_k y_k \log p_k$; dividing by the sum of w is the objective's affair."""
    if label_smoothing:
        targets = targets * (1 - label_smoothing) + label_smoothing / targets.shape[-1]
    if class_weight is not None:
        targets = targets * class_weight
    return -(targets * F.log_softmax(logits, dim=-1)).sum(-1)
