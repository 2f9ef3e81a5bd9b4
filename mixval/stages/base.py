"""M0, the network whose failures are looked for."""

from mixval.stages.cell import Cell
from mixval.stages.network import Network, learn
from mixval.store import Store


def base(cell: Cell, store: Store) -> Network:
    """Return the base network, trained on `train` by the recipe's `base` section."""
    return learn(cell, cell.recipe.base, ("base",), store, stream="base")
