"""What the examples share: scikit-learn's digits, a small network, and a teacher.

The teacher learns from 600 labels that the student is not given, beside the student's 300. That
makes it a teacher, and it is also why the accuracies of these examples are no evidence for the
filter: the same labels, given to the student, may be worth more.
"""

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

import mixval


def load() -> tuple[Tensor, Tensor, Tensor, Tensor, nn.Module]:
    """Return images and labels to train on, those to test on, and a teacher."""
    torch.manual_seed(0)
    bunch = load_digits()
    order = torch.randperm(len(bunch.target))
    images = torch.from_numpy(bunch.images).float()[order, None] / 16  # (N, 1, 8, 8)
    labels = torch.from_numpy(bunch.target).long()[order]
    teacher = trained_teacher(images[:900], labels[:900])
    return images[:300], labels[:300], images[900:], labels[900:], teacher


def network() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def trained_teacher(images: Tensor, labels: Tensor, epochs: int = 15) -> nn.Module:
    """Train on mixes, so that the teacher knows what to say of them."""
    teacher = network()
    optimiser = torch.optim.Adam(teacher.parameters(), lr=0.01)
    for _ in range(epochs):
        for rows in torch.randperm(len(labels)).split(50):
            others = rows[torch.randperm(len(rows))]
            lam = torch.rand(len(rows))
            targets = mixval.mixed_targets(labels[rows], labels[others], lam, 10)
            logits = teacher(mixval.mix(images[rows], images[others], lam))
            F.cross_entropy(logits, targets).backward()
            optimiser.step()
            optimiser.zero_grad()
    return teacher


@torch.inference_mode()
def report(model: nn.Module, images: Tensor, labels: Tensor, kept: list[float]) -> None:
    accuracy = (model.eval()(images).argmax(-1) == labels).float().mean()
    print(f"accuracy {accuracy:.3f}, kept {sum(kept) / len(kept):.3f} of the mixes")
