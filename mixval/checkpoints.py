"""Weights and training state on disk: written whole or not at all, hashed, resumed bit by bit."""

import logging
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from mixval.files import seal, sealed_facts

log = logging.getLogger(__name__)


def save_weights(path: Path, tensors: Mapping[str, Tensor], facts: Mapping[str, str]) -> None:
    """Save tensors with a few facts in the header, such as the dataset they belong to."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.part")
    plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    save_file(plain, temporary, metadata=dict(facts))
    os.replace(temporary, path)


def load_weights(path: Path) -> dict[str, Tensor]:
    return load_file(path)


class Checkpoints:
    """The last two checkpoints of one training; the older one serves if the newer is damaged.

    `made_from` is the fingerprint of all that decides the weights. A checkpoint of
    something else, or of another torch, is not gone on with.
    """

    def __init__(self, folder: Path, made_from: str) -> None:
        self.folder = folder
        self.made_from = {"made_from": made_from, "torch": str(torch.__version__)}

    def save(self, step: int, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
        final = self.folder / f"step-{step:09d}"
        if sealed_facts(final) == self.made_from:
            return
        unfinished = self.folder / f".{final.name}.part"
        shutil.rmtree(unfinished, ignore_errors=True)
        shutil.rmtree(final, ignore_errors=True)
        unfinished.mkdir(parents=True)
        save_weights(unfinished / "weights.safetensors", tensors, {})
        torch.save(dict(state), unfinished / "state.pt")
        seal(unfinished, self.made_from)
        os.replace(unfinished, final)
        self._keep_two()

    def latest(self) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        """Return tensors and state of the newest checkpoint that is whole and fits."""
        for folder in reversed(self._steps()):
            facts = sealed_facts(folder)
            if facts is not None and facts != self.made_from:
                log.warning("%s was made from something else and is not used", folder)
            elif facts is not None:
                state = torch.load(folder / "state.pt", map_location="cpu", weights_only=True)
                return load_weights(folder / "weights.safetensors"), state
        return None

    def clear(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def _keep_two(self) -> None:
        """Remove all but the newest two that are whole: a damaged one must not push one out."""
        whole = [step for step in self._steps() if sealed_facts(step) == self.made_from]
        for step in set(self._steps()) - set(whole[-2:]):
            shutil.rmtree(step)

    def _steps(self) -> list[Path]:
        return sorted(self.folder.glob("step-*"))
