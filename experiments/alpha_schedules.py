"""Draw every alpha schedule over training.

Command: python experiments/alpha_schedules.py    Time: 3 s
Result: figures/alpha_schedules.png. `easy` and `hard` cross 1 at half of training,
`easy_hard_easy` at the quarters; `easy` ends at 0, so it is an early stop made smooth.
"""

from pathlib import Path

import numpy as np

from mixval import alpha_schedules, plots

HERE = Path(__file__).parent
SHOWN = {
    "easy": {},
    "hard": {},
    "easy_hard_easy": {},
    "linear": {},
    "cosine": {},
    "geometric": {},
    "exponential": {"start": 10.0, "middle": 4.0, "end": 0.5, "at": 0.3},
    "constant": {"value": 1.0},
    "points": {"at": [0.0, 0.25, 0.75, 1.0], "alpha": [2.0, 2.0, 0.2, 0.0]},
}


def main() -> None:
    progress = list(np.linspace(0, 1, 401))
    curves = {}
    for name, parameters in SHOWN.items():
        schedule = getattr(alpha_schedules, name)
        curves[name] = (progress, [schedule(place, **parameters) for place in progress])
    plots.schedule_curves(curves).savefig(HERE.parent / "figures" / "alpha_schedules.png", dpi=130)


if __name__ == "__main__":
    main()
