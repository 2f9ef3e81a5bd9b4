"""Networks that come as a file: what the header says of them, checked before torch is loaded."""

import json
from pathlib import Path

from mixval.errors import UserError
from mixval.files import weight_facts
from mixval.recipe import Choice, Learner, Recipe, Teacher

FACTS = {"classes", "content", "splits", "leaks", "fingerprint"}  # what a header says besides


def check_external(recipe: Recipe, place: str, teacher: Teacher) -> dict[str, str]:
    """Return the facts in the header of a teacher's file; refuse one of other data or model."""
    path = Path(teacher.weights or "")
    if not path.is_file():
        raise UserError(
            f"{place}.weights: no file {str(path)!r}; give a weights.safetensors of a run"
        )
    facts = weight_facts(path)
    wanted = {
        "dataset": recipe.data.source.name,
        "model": described(recipe.model_of(teacher)),
        "labels": labels_seen(recipe, teacher),
    }
    for key, value in wanted.items():
        if facts.get(key) != value:
            raise UserError(
                f"{place}.weights: {path} has {key} {facts.get(key)}, "
                f"this recipe has {value}; give a teacher that fits"
            )
    if missing := FACTS - facts.keys():
        raise UserError(
            f"{place}.weights: {path} does not say its {sorted(missing)[0]}; "
            "give a weights.safetensors that mixval saved"
        )
    return facts


def labels_seen(recipe: Recipe, learner: Learner) -> str:
    """Return whose labels a network was trained on, the failures' split included."""
    from_failures = learner.data == "train+failures"
    return f"{learner.data} of {recipe.failures.split}" if from_failures else learner.data


def described(choice: Choice) -> str:
    return json.dumps(choice.model_dump(mode="json"), sort_keys=True)
