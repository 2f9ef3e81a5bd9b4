"""Networks that a user brings: `NAME@FILE`, `module:function`, or an nn.Module."""

import copy
import hashlib
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import timm
import torch
import yaml
from pydantic import ValidationError
from safetensors.torch import load_file
from torch import Tensor, nn

from mixval import choose
from mixval.engine import Engine
from mixval.errors import UserError
from mixval.recipe_errors import one_line
from mixval.recipe_loading import parse_yaml

Model = str | nn.Module
_INSIDE = ("state_dict", "model")  # where checkpoints keep the weights
_WRAPPERS = ("module.", "_orig_mod.")  # what DataParallel and torch.compile put before names


@dataclass(frozen=True)
class OwnModel:
    """A network, what messages call it, and the fingerprint of its layers, weights and code."""

    network: nn.Module
    title: str
    fingerprint: str


def load_models(
    models: Model | Sequence[Model], role: str, shape: Sequence[int], classes: int
) -> list[OwnModel]:
    """Return the networks of one posterior; `role` (base, updated) is for messages.

    A named network is built for images (C, H, W) of this shape, with as many outputs as its
    weights have. A network that is given is copied: the caller's stays where it is.
    """
    several = [models] if isinstance(models, str | nn.Module) else list(models)
    if not several:
        raise UserError(f"--{role}: must be one model or more, got none")
    return [_load(model, f"--{role}", shape, classes) for model in several]


def _load(model: Model, place: str, shape: Sequence[int], classes: int) -> OwnModel:
    if isinstance(model, nn.Module):
        network, code = copy.deepcopy(model), {}
        title = f"{place} {type(model).__name__}"
    else:
        settings, file = parse_model(model, place)
        title, code = f"{place} {model}", choose.own_code(settings)
        weights = {} if file is None else read_weights(file, place)
        network = _build(settings, place, shape, classes, weights)
        if file is not None:
            _fill(network, weights, f"{place}: {file} does not fit {settings['name']}")
    return OwnModel(network, title, network_fingerprint(network, code))


def parse_model(word: str, place: str) -> tuple[dict[str, Any], Path | None]:
    """Return name and parameters of `SPEC` or `SPEC@FILE`, where SPEC may be {name: ...}."""
    braced = word.startswith("{")
    spec, at, file = word.partition("}@" if braced else "@")
    try:
        settings = parse_yaml(spec + at[:1]) if braced else {"name": spec}
    except yaml.YAMLError:
        settings = None
    if not (isinstance(settings, dict) and isinstance(settings.get("name"), str)):
        raise UserError(f"{place}: must be NAME@FILE or module:function, got {word!r}")
    if ":" not in settings["name"] and not file:
        raise UserError(f"{place}: {word!r} has no weights; give NAME@FILE, or module:function")
    return settings, Path(file) if file else None


# -- building -----------------------------------------------------------------------------


def _build(
    settings: Mapping[str, Any],
    place: str,
    shape: Sequence[int],
    classes: int,
    weights: Mapping[str, Tensor],
) -> nn.Module:
    name, parameters = settings["name"], {k: v for k, v in settings.items() if k != "name"}
    if ":" in name:
        choose.option("models", name)
        network = choose.pick("models", name, parameters)()
        if not isinstance(network, nn.Module):
            kind = type(network).__name__
            raise UserError(f"{place}: {name} must return an nn.Module, got {kind}")
        return network
    if len(shape) != 3:
        raise UserError(f"{place}: {name} takes images (C, H, W), a row of x is {tuple(shape)}")
    make = _maker(name, parameters, place)
    network = make(shape, classes)
    outputs = _num_outputs(network, weights)
    return network if outputs in (None, classes) else make(shape, outputs)


def _maker(name: str, parameters: dict[str, Any], place: str) -> Callable[..., nn.Module]:
    """Return the builder of a named network: one of ours, or any of timm's."""
    known = choose.options("models")
    if name not in known:
        if not timm.is_model(name):
            hint = choose.nearest(name, [*known, *timm.list_models()])
            raise UserError(f"{place}: neither mixval nor timm has a model {name!r}; {hint}")
        name, parameters = "timm", {"architecture": name, **parameters}
    try:
        checked = known[name].parameters.model_validate(parameters)
    except ValidationError as error:
        reason = one_line(error, known[name].parameters)
        raise UserError(f"{place}: {name}: {reason}") from error
    return choose.pick("models", name, checked.model_dump())


def _num_outputs(network: nn.Module, weights: Mapping[str, Tensor]) -> int | None:
    """Return how many outputs the weights have: by the last linear layer of the network."""
    layers = [name for name, layer in network.named_modules() if isinstance(layer, nn.Linear)]
    weight = weights.get(f"{layers[-1]}.weight") if layers else None
    return None if weight is None or weight.dim() != 2 else len(weight)


# -- weights ------------------------------------------------------------------------------


def read_weights(path: Path, place: str) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file, or of a checkpoint of plain tensors."""
    if not path.is_file():
        raise UserError(f"{place}: no file {str(path)!r}; give NAME@FILE with weights")
    try:
        if path.suffix == ".safetensors":
            return _unwrapped(load_file(path))
        with warnings.catch_warnings(action="ignore"):  # of another pickle protocol: it is read
            found = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # damaged files raise what they like
        reason = " ".join(str(error).split())[:150]
        raise UserError(f"{place}: {path} can't be read as weights ({reason})") from error
    for key in _INSIDE:
        if isinstance(found, dict) and isinstance(found.get(key), dict):
            found = found[key]
    if not (isinstance(found, dict) and found and all(map(_is_tensor, found.values()))):
        raise UserError(
            f"{place}: {path} must hold a state dict of tensors, or one under "
            f"{' or '.join(map(repr, _INSIDE))}"
        )
    return _unwrapped(dict(found))


def _is_tensor(value: object) -> bool:
    return isinstance(value, Tensor)


def _unwrapped(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    for prefix in _WRAPPERS:
        if weights and all(name.startswith(prefix) for name in weights):
            weights = {name.removeprefix(prefix): tensor for name, tensor in weights.items()}
    return weights


def _fill(network: nn.Module, weights: Mapping[str, Tensor], complaint: str) -> None:
    """Load the weights; what does not fit is refused with the first key."""
    own = network.state_dict()
    for name, tensor in own.items():
        if name not in weights:
            raise UserError(f"{complaint}: it has no {name!r}")
        if weights[name].shape != tensor.shape:
            shapes = tuple(weights[name].shape), tuple(tensor.shape)
            raise UserError(f"{complaint}: {name!r} is {shapes[0]}, the model has {shapes[1]}")
    for name in weights:
        if name not in own:
            raise UserError(f"{complaint}: it has {name!r}, which the model has not")
    network.load_state_dict(weights)


def network_fingerprint(network: nn.Module, code: Mapping[str, str]) -> str:
    """Return the fingerprint of layers and weights, and of the user's code behind them."""
    digest = hashlib.sha256(f"{type(network).__qualname__}{network}{sorted(code.items())}".encode())
    for name, tensor in network.state_dict().items():
        if isinstance(tensor, Tensor):
            digest.update(f"{name}{tensor.dtype}{tuple(tensor.shape)}".encode())
            # As bytes: numpy does not know bfloat16.
            plain = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
            digest.update(plain.numpy().data)
    return digest.hexdigest()[:16]


# -- running ------------------------------------------------------------------------------


class CheckedModel(nn.Module):
    """A network on the engine whose outputs are logits (B, K) and finite, or refused by name."""

    def __init__(self, model: OwnModel, engine: Engine) -> None:
        super().__init__()
        self.title = model.title
        self.network = engine.prepare(model.network)

    def forward(self, inputs: Tensor) -> Tensor:
        logits: Tensor = self.network(inputs)
        if not torch.isfinite(logits).all():
            raise UserError(f"{self.title}: gives NaN or infinite logits; mend its weights")
        return logits

    @torch.inference_mode()
    def num_outputs(self, inputs: Tensor) -> int:
        """Return K, found by a first look at rows of the data."""
        was = self.training
        try:
            logits = self.eval()(inputs)
            shape = tuple(logits.shape)
        except UserError:
            raise
        except (RuntimeError, ValueError, AttributeError, TypeError, AssertionError) as error:
            reason = " ".join(str(error).split())[:150]
            raise UserError(
                f"{self.title}: can't take inputs of {tuple(inputs.shape[1:])} ({reason})"
            ) from error
        finally:
            self.train(was)
        if len(shape) != 2 or shape[0] != len(inputs):
            raise UserError(f"{self.title}: must return logits (B, K), got {shape}")
        return int(shape[1])
