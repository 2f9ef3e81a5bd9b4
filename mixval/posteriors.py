"""Fitted weights -> a Posterior that draws: inputs -> log-probabilities (S, B, K)."""

import copy
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mixval.types import Posterior

__all__ = ["ensemble", "out_of_fold", "point"]


def point(models: Sequence[nn.Module]) -> Posterior:
    """Return all mass on one network: S = 1."""
    if len(models) != 1:
        raise ValueError(f"a point posterior needs 1 network, got {len(models)}")
    return ensemble(models)


def ensemble(models: Sequence[nn.Module]) -> Posterior:
    """Return equal mass on each of several networks, one draw each."""
    frozen = [_frozen(model) for model in models]

    @torch.inference_mode()
    def draws(inputs: Tensor, fold: Tensor | None = None) -> Tensor:
        return torch.stack([F.log_softmax(model(inputs), dim=-1) for model in frozen])

    return draws


def out_of_fold(models: Sequence[nn.Module]) -> Posterior:
    """Return, for each row, the network that was trained without the row's fold: S = 1."""
    frozen = [_frozen(model) for model in models]

    @torch.inference_mode()
    def draws(inputs: Tensor, fold: Tensor | None = None) -> Tensor:
        assert fold is not None, "out-of-fold teachers need the fold of each row"
        assert int(fold.max()) < len(frozen), "a fold without a teacher"
        every = [F.log_softmax(model(inputs[fold == k]), dim=-1) for k, model in enumerate(frozen)]
        log_probs = every[0].new_empty(len(inputs), every[0].shape[1])
        for k, rows in enumerate(every):
            log_probs[fold == k] = rows
        return log_probs[None]

    return draws


def _frozen(model: nn.Module) -> nn.Module:
    return copy.deepcopy(model).eval().requires_grad_(False)  # the caller's goes on as it was
