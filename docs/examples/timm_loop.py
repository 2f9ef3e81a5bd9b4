"""Guided mixup in a loop of timm's parts: python docs/examples/timm_loop.py.

timm's Mixup returns soft targets. `guide.loss` stands where SoftTargetCrossEntropy stood.
"""

import numpy as np
import torch
from digits import load, network, report
from timm.data import Mixup
from timm.optim import create_optimizer_v2
from timm.scheduler import CosineLRScheduler

import mixval

EPOCHS = 20


def main() -> None:
    np.random.seed(0)  # timm's Mixup draws from it
    images, labels, test_images, test_labels, teacher = load()
    model = network()
    optimiser = create_optimizer_v2(model, opt="adamw", lr=0.01, weight_decay=0.01)
    scheduler = CosineLRScheduler(optimiser, t_initial=EPOCHS, lr_min=1e-4)
    mixup = Mixup(mixup_alpha=1.0, mode="elem", label_smoothing=0.0, num_classes=10)
    guide = mixval.Guide(teacher, filter={"name": "soft", "tau": 0.1})  # new
    kept = []
    for epoch in range(EPOCHS):
        model.train()
        for rows in torch.randperm(len(labels)).split(50):
            x_mix, targets = mixup(images[rows], labels[rows])
            logits = model(x_mix)
            loss = guide.loss(logits, x_mix, targets=targets)  # new
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            kept.append(guide.kept)
        scheduler.step(epoch + 1)
    report(model, test_images, test_labels, kept)


if __name__ == "__main__":
    main()
