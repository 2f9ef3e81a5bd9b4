"""The versions that a result depends on, read without importing what they belong to."""

import platform
from importlib.metadata import version


def environment() -> dict[str, str]:
    """Return the versions a result depends on."""
    packages = ("mixval", "torch", "numpy", "timm")
    return {
        "python": platform.python_version(),
        "machine": platform.machine(),
        **{name: version(name) for name in packages},
    }
