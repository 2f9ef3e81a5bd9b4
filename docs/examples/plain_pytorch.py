"""Guided mixup in a plain PyTorch loop: python docs/examples/plain_pytorch.py."""

import torch
from digits import load, network, report

import mixval


def main() -> None:
    images, labels, test_images, test_labels, teacher = load()
    model = network()
    optimiser = torch.optim.Adam(model.parameters(), lr=0.01)
    guide = mixval.Guide(teacher)  # new
    beta, kept = torch.distributions.Beta(1.0, 1.0), []
    for _ in range(20):
        for rows in torch.randperm(len(labels)).split(50):
            others = rows[torch.randperm(len(rows))]
            lam = beta.sample((len(rows),))
            x_mix = mixval.mix(images[rows], images[others], lam)
            logits = model(x_mix)
            loss = guide.loss(logits, x_mix, labels[rows], labels[others], lam)  # new
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            kept.append(guide.kept)  # if you wish to know
    report(model, test_images, test_labels, kept)


if __name__ == "__main__":
    main()
