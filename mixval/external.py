"""Networks that come as a file: what the header says of them, checked before torch is loaded."""

import json
from pathlib import Path

from mixval.errors import UserError
from mixval.files import weight_facts
from mixval.recipe import Choice, Recipe, Teacher


def check_external(recipe: Recipe, place: str, teacher: Teacher) -> dict[str, str]:
    """Return the facts in the header of a teacher's file; refuse one of other data or model."""
    path = Path(teacher.weights or "")
    if not path.is_file():
        raise UserError(
            f"{place}.weights: no file {str(path)!r}; give a weights.safetensors of a run"
        )
    facts = weight_facts(path)
    wanted = {"dataset": recipe.data.source.name, "model": described(recipe.model_of(teacher))}
    for key, value in wanted.items():
        if facts.get(key) != value:
            raise UserError(
                f"{place}.weights: {path} is of another {key} ({facts.get(key)}), "
                f"this recipe's is {value}; give one that fits"
            )
    return facts


def described(choice: Choice) -> str:
    return json.dumps(choice.model_dump(mode="json"), sort_keys=True)
