"""(image shape, number of classes) -> nn.Module. Weights are drawn by torch's generator."""

from collections.abc import Sequence
from itertools import pairwise

from torch import nn

from mixval.bounds import BelowOne, Count
from mixval.choose import nearest
from mixval.errors import UserError

__all__ = ["conv_net", "mlp", "timm"]

Shape = Sequence[int]  # (C, H, W)


def mlp(
    shape: Shape, num_classes: int, *, hidden: list[Count] = [256, 128], dropout: BelowOne = 0.0
) -> nn.Module:
    """Return a fully connected ReLU network on the flattened image."""
    channels, height, width = shape
    widths = [channels * height * width, *hidden]
    layers: list[nn.Module] = [nn.Flatten()]
    for before, after in pairwise(widths):
        layers += [nn.Linear(before, after), nn.ReLU()]
        if dropout:
            layers.append(nn.Dropout(dropout))
    return nn.Sequential(*layers, nn.Linear(widths[-1], num_classes))


def conv_net(shape: Shape, num_classes: int, *, width: Count = 32) -> nn.Module:
    """Return four 3x3 convolutions with BatchNorm, two of stride 2, and average pooling."""
    layers: list[nn.Module] = []
    before = shape[0]
    for after, stride in ((width, 1), (2 * width, 2), (2 * width, 1), (4 * width, 2)):
        layers.append(nn.Conv2d(before, after, 3, stride, padding=1, bias=False))
        layers += [nn.BatchNorm2d(after), nn.ReLU()]
        before = after
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, num_classes)]
    return nn.Sequential(*layers, *head)


def timm(
    shape: Shape,
    num_classes: int,
    *,
    architecture: str,
    drop_rate: BelowOne = 0.0,
    small_images: bool = False,
) -> nn.Module:
    """Return timm's model of that name, untrained; `small_images` begins with stride 1."""
    import timm as library

    if not library.is_model(architecture):
        hint = nearest(architecture, library.list_models())
        raise UserError(f"model: timm has no architecture {architecture!r}; {hint}")
    network: nn.Module = library.create_model(
        architecture, num_classes=num_classes, in_chans=shape[0], drop_rate=drop_rate
    )
    return _for_small_images(network, architecture) if small_images else network


def _for_small_images(network: nn.Module, architecture: str) -> nn.Module:
    """Keep the resolution at the start: strides made for 224 pixels leave nothing of 32.

    As everybody does on CIFAR: a ResNet begins with 3x3 instead of 7x7 and does not pool, an
    EfficientNet's first convolution has stride 1.
    """
    first, stem = getattr(network, "conv1", None), getattr(network, "conv_stem", None)
    if isinstance(first, nn.Conv2d) and hasattr(network, "maxpool"):
        smaller = nn.Conv2d(first.in_channels, first.out_channels, 3, padding=1, bias=False)
        nn.init.kaiming_normal_(smaller.weight, mode="fan_out", nonlinearity="relu")
        network.conv1, network.maxpool = smaller, nn.Identity()
    elif isinstance(stem, nn.Conv2d):
        stem.stride = (1, 1)
    else:
        raise UserError(
            f"model.small_images: must be false for {architecture!r}: "
            "only ResNets and EfficientNets are known to begin in a way that can be changed"
        )
    return network
