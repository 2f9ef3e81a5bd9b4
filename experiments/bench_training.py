"""How fast mixval trains: beside the fixed-batch limit, torchvision and timm, and guided.

Command: python experiments/bench_training.py [SECONDS]    Time: 8 cases of SECONDS (300) and
what choosing the competitors' best settings takes, so about 45 minutes on an idle machine.
Nothing else may run meanwhile. Every round goes to figures/bench_training.json.
"""

import sys
from pathlib import Path

from mixval.bench.report import run_all

HERE = Path(__file__).parent


def main() -> None:
    run_all(
        ["mixup", "guided"],
        models=["conv_net", "resnet18"],
        batch_sizes=[256, 64],
        seconds=float(sys.argv[1]) if len(sys.argv) > 1 else 300.0,
        file=HERE.parent / "figures" / "bench_training.json",
    )


if __name__ == "__main__":
    main()
