"""Guided mixup in a LightningModule: python docs/examples/lightning_module.py.

Needs `pip install 'mixval[lightning]'`. The guide is no nn.Module, so the teacher is neither
trained nor saved with the student, and it goes to the device of the batches by itself.
"""

import pytorch_lightning as pl
import torch
from digits import load, network, report
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchvision.transforms import v2

import mixval


class Student(pl.LightningModule):
    """A network that trains on the mixes its guide keeps."""

    def __init__(self, teacher: nn.Module) -> None:
        super().__init__()
        self.model = network()
        self.guide = mixval.Guide(teacher)  # new
        self.mixing = v2.MixUp(num_classes=10)
        self.kept: list[float] = []

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        x_mix, targets = self.mixing(*batch)
        loss = self.guide.loss(self.model(x_mix), x_mix, targets=targets)  # new
        self.kept.append(self.guide.kept)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.01)


def main() -> None:
    images, labels, test_images, test_labels, teacher = load()
    batches = DataLoader(TensorDataset(images, labels), batch_size=50, shuffle=True)
    student = Student(teacher)
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = pl.Trainer(max_epochs=20, accelerator="cpu", enable_model_summary=False, **quiet)
    trainer.fit(student, batches)
    report(student.model, test_images, test_labels, student.kept)


if __name__ == "__main__":
    main()
