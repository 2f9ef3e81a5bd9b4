"""Guided MixUp and CutMix of torchvision: python docs/examples/torchvision_cutmix.py.

They are applied to whole batches, as torchvision advises, and return soft targets. The last
quarter of the epochs is trained without guidance, on all mixes.
"""

import torch
from digits import load, network, report
from torch.utils.data import DataLoader, TensorDataset
from torchvision.transforms import v2

import mixval

EPOCHS = 20


def main() -> None:
    images, labels, test_images, test_labels, teacher = load()
    batches = DataLoader(TensorDataset(images, labels), batch_size=50, shuffle=True)
    mixing = v2.RandomChoice([v2.MixUp(num_classes=10), v2.CutMix(num_classes=10)])
    model = network()
    optimiser = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    guide = mixval.Guide(teacher)  # new
    kept = []
    for epoch in range(EPOCHS):
        guide.on = epoch < 0.75 * EPOCHS
        for x, y in batches:
            x_mix, targets = mixing(x, y)
            logits = model(x_mix)
            loss = guide.loss(logits, x_mix, targets=targets)  # new
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            kept.append(guide.kept)
    report(model, test_images, test_labels, kept)


if __name__ == "__main__":
    main()
