"""Number types for settings and for the signatures of options: the range is part of the type.

`choose` reads these names from an option's signature, so that a recipe value out of
range is refused before torch is imported.
"""

from typing import Annotated

from annotated_types import Ge, Gt, Lt

NonNegative = Annotated[float, Ge(0)]
Positive = Annotated[float, Gt(0)]
InnerFraction = Annotated[float, Gt(0), Lt(1)]
BelowOne = Annotated[float, Ge(0), Lt(1)]
Count = Annotated[int, Ge(1)]
CountOrZero = Annotated[int, Ge(0)]
Seed = Annotated[int, Ge(0), Lt(2**63)]
