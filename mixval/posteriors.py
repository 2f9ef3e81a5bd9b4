"""Fitted weights -> a Posterior that draws: inputs -> log-probabilities (S, B, K)."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mixval.engine import plain
from mixval.last_layer import split_head
from mixval.seeding import generators_kept, seed_torch, torch_seed
from mixval.types import Posterior


@dataclass(frozen=True)
class Fitted:
    """The draws of p(theta | D) and p(theta | D, F) behind one r_hat, as tensors by name.

    `networks`: S whole networks, every tensor of their state stacked, (S, ...).
    `heads`: S last layers of one network, `head` (S, K, D + 1) with the bias last.
    `dropout`: one network, (1, ...), and S masks of its dropout.
    """

    form: Literal["networks", "heads", "dropout"]
    base: dict[str, Tensor]
    updated: dict[str, Tensor]
    draws: int

    def to_tensors(self) -> tuple[dict[str, Tensor], dict[str, str]]:
        """Return what a safetensors file holds: tensors and metadata."""
        sides = {"base": self.base, "updated": self.updated}
        tensors = {f"{key}/{name}": t for key, side in sides.items() for name, t in side.items()}
        return tensors, {"form": self.form, "draws": str(self.draws)}

    @classmethod
    def from_tensors(cls, tensors: dict[str, Tensor], facts: dict[str, str]) -> "Fitted":
        sides: dict[str, dict[str, Tensor]] = {"base": {}, "updated": {}}
        for place, tensor in tensors.items():
            side, name = place.split("/", 1)
            sides[side][name] = tensor
        form = cast(Literal["networks", "heads", "dropout"], facts["form"])
        return cls(form, sides["base"], sides["updated"], int(facts["draws"]))

    def posteriors(self, model: nn.Module, seed: int) -> tuple[Posterior, Posterior]:
        """Return p(theta | D) and p(theta | D, F); both draw with the same random numbers.

        `model` is the trained network: its weights are exchanged, not its shape.
        """
        if self.form == "heads":
            return last_layer(model, self.base["head"]), last_layer(model, self.updated["head"])
        sides = [with_states(model, side) for side in (self.base, self.updated)]
        if self.form == "networks":
            return ensemble(sides[0]), ensemble(sides[1])
        return dropout(sides[0][0], self.draws, seed), dropout(sides[1][0], self.draws, seed)


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

    One pass through the backbone serves all draws, and all heads are one product.
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


def dropout(model: nn.Module, draws: int, seed: int) -> Posterior:
    """Return one network under S masks of its dropout.

    Draw s masks rows of equal place alike, whatever the weights are: two networks of one
    shape and seed have common random numbers. BatchNorm statistics stay as they are.
    """
    network = _frozen(model).train()
    for part in network.modules():
        if isinstance(getattr(part, "running_mean", None), Tensor):
            part.eval()
    device = next(network.parameters()).device

    @torch.inference_mode()
    def log_probs(inputs: Tensor, fold: Tensor | None = None) -> Tensor:
        every = []
        with generators_kept(device):
            for draw in range(draws):
                seed_torch(torch_seed(seed, "dropout", draw), device)
                every.append(F.log_softmax(network(inputs), dim=-1))
        return torch.stack(every)

    return log_probs


def with_states(model: nn.Module, stacked: dict[str, Tensor]) -> list[nn.Module]:
    """Return copies of the network, one for each of the stacked states."""
    count = len(next(iter(stacked.values())))
    copies = [copy.deepcopy(model) for _ in range(count)]
    for number, twin in enumerate(copies):
        state = {name: tensor[number] for name, tensor in stacked.items()}
        plain(twin).load_state_dict(state)
    return copies


def _frozen(model: nn.Module) -> nn.Module:
    return copy.deepcopy(model).eval().requires_grad_(False)  # the caller's goes on as it was
