"""Fitted weights -> a Posterior that draws: inputs -> log-probabilities (S, B, K)."""

import copy
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mixval.last_layer import split_head
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


def last_layer(model: nn.Module, draws: Tensor) -> Posterior:
    """Return a network with S last layers, (S, K, D + 1) with the bias last or (S, K, D).

    One pass through the backbone serves all draws, and all heads are one product. Not an
    option of a recipe (`__all__`): it needs draws that a stage has fitted.
    """
    head = split_head(model)
    weight = head.layer.weight
    stacked = draws.to(weight.device, torch.float32).flatten(0, 1)  # (S K, D + 1)
    columns = weight.shape[1]
    if draws.shape[1:] != (len(weight), columns + (head.layer.bias is not None)):
        raise ValueError(f"draws {tuple(draws.shape)} are not of the layer {head.layer}")
    weights, bias = stacked[:, :columns].contiguous(), stacked[:, columns:].flatten()

    @torch.inference_mode()
    def log_probs(inputs: Tensor, fold: Tensor | None = None) -> Tensor:
        features, _ = head(inputs)
        logits = F.linear(features, weights, bias if len(bias) else None)  # (B, S K)
        every = logits.view(len(inputs), *draws.shape[:2])  # (B, S, K)
        return F.log_softmax(every, dim=-1).transpose(0, 1)

    return log_probs


def _frozen(model: nn.Module) -> nn.Module:
    return copy.deepcopy(model).eval().requires_grad_(False)  # the caller's goes on as it was
