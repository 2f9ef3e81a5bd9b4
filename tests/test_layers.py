"""Imports point down only, the choice modules stand alone, and checking a recipe needs no torch."""

import ast
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

import mixval
from mixval.cli import CHOICE_MODULES

PACKAGE = Path(mixval.__file__).parent
CHOICES = frozenset(CHOICE_MODULES)

# From the bottom up. A module imports from the layers below its own, never from beside it.
LAYERS: list[set[str]] = [
    {"bounds", "dataset_facts", "errors", "fingerprints", "environment", "columns", "compare"},
    {"choose", "seeding", "files", "curvature"},
    {"types", "processes", "epoch_file", "checkpoints", "recipe_errors", "moments"},
    {"recipe", "recipe_rules"},
    {"recipe_loading", "optimisers", "engine", "record"},
    {"datasets.finding", "fisher", "last_layer"},  # what the options of a package share, below them
    {"datasets.checks", "datasets.packs", "datasets.trees"},
    {"datasets.decoding"},
    {
        "datasets.arrays",
        "datasets.cifar",
        "datasets.fashion",
        "datasets.folders",
        "datasets.photos",
        "datasets.stl",
    },
    {*CHOICES - {"posterior_fits"}, "external", "store", "score_store", "splits"},
    {
        "closed_form",
        "mixing",
        "own_dataset",
        "posteriors",
        "repair_table",
        "results",
        "rhat",
        "sources",
        "work",
    },
    {"feeding", "sample_scores", "updates"},
    {"fitting", "metrics", "objectives", "scoring", "report", "top"},
    {"posterior_fits.updated", "posterior_fits.whole_laplace"},
    {"posterior_fits.gaussian", "posterior_fits.networks"},
    {"posterior_fits"},
    {"guidance", "guide", "offline.files", "offline.models", "report.render"},
    {"offline.sources"},
    {"offline.folder"},
    {"offline"},
    {"training_job"},
    {"training"},
    {"bench", "bench.case", "bench.measure"},
    {"bench.feeds", "bench.ours"},
    {"bench.loops"},
    {"bench.suites"},
    {"bench.report"},
    {"stages"},
    {"stages.cell"},
    {"stages.network"},
    {
        "stages.base",
        "stages.data",
        "stages.evaluation",
        "stages.failures",
        "stages.posteriors",
        "stages.report",
        "stages.teacher",
        "stages.causes",
    },
    {"stages.scores", "stages.bank", "stages.repair"},
    {"stages.student"},
    {"pipeline", "tuning"},
    {"estimate"},
    {"runner"},
    {"job", "arguments"},
    {"cli"},
    {""},  # mixval/__init__.py, the public surface
]
# The tower that works before torch is loaded: it sees only itself.
TORCH_FREE = {
    "bounds",
    "dataset_facts",
    "errors",
    "fingerprints",
    "environment",
    "columns",
    "compare",
    "choose",
    "files",
    "recipe_errors",
    "moments",
    "recipe",
    "recipe_rules",
    "recipe_loading",
    "external",
    "store",
    "repair_table",
    "results",
    "work",
    "arguments",
}
# What is said of recipes in a file of its own names their types, for the type checker only.
NAMES_RECIPES = {"moments", "recipe_rules"}
# These load what needs torch when it is needed, and not before; "" is the public surface.
LAZY = {"cli", "job", ""}


class Import(NamedTuple):
    """One import of one mixval module by another."""

    importer: str
    imported: str
    line: int
    when: str  # "loaded", "called" (inside a function) or "never" (for the type checker only)


def module_files() -> dict[str, Path]:
    files = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = list(path.relative_to(PACKAGE).with_suffix("").parts)
        files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return files


FILES = module_files()
TREES = {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in FILES.items()}


def late_nodes(tree: ast.Module) -> dict[int, str]:
    """Return when the nodes run that do not run when the module is loaded."""
    late = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            late |= {id(inner): "called" for inner in ast.walk(node)}
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            late |= {id(inner): "never" for inner in ast.walk(node)}
    return late


def full_names(node: ast.Import | ast.ImportFrom, importer: str) -> list[str]:
    """Return the dotted names that a statement may load, `from a import b` as a.b and a."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    home = node.module or ""
    if node.level:
        inside = ["mixval", *importer.split(".")]
        package = inside if FILES[importer].stem == "__init__" else inside[:-1]
        package = package[: len(package) - node.level + 1]
        home = ".".join(filter(None, [*package, home]))
    return [f"{home}.{alias.name}" for alias in node.names]


def resolve(name: str) -> str | None:
    """Return the mixval module that a dotted name loads: itself, or the one it is found in."""
    if name.split(".")[0] != "mixval":
        return None
    parts = name.split(".")[1:]
    while ".".join(parts) not in FILES:
        parts.pop()
    return ".".join(parts)


def imports_of(importer: str) -> list[Import]:
    tree = TREES[importer]
    late = late_nodes(tree)
    return [
        Import(importer, imported, node.lineno, late.get(id(node), "loaded"))
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in full_names(node, importer)
        if (imported := resolve(name)) is not None
    ]


IMPORTS = [item for name in FILES for item in imports_of(name)]
LEVEL = {name: level for level, layer in enumerate(LAYERS) for name in layer}


def shown(items: list[Import]) -> str:
    return "\n".join(f"{FILES[i.importer]}:{i.line} imports mixval.{i.imported}" for i in items)


def test_every_module_has_a_layer():
    # A new module is placed here by hand, once: that is when its place is thought about.
    placed = [name for layer in LAYERS for name in layer]
    assert len(placed) == len(set(placed))
    assert set(FILES) - set(placed) == set(), "place these in LAYERS"
    assert set(placed) - set(FILES) == set(), "these are in LAYERS and nowhere else"


def test_imports_were_found():
    # The control of this file: it would pass if nothing were read.
    found = {(item.importer, item.imported, item.when) for item in IMPORTS}
    assert ("guidance", "rhat", "loaded") in found
    assert ("recipe", "choose", "loaded") in found  # from mixval import choose
    assert ("cli", "job", "called") in found
    assert ("recipe_rules", "recipe", "never") in found
    assert len(IMPORTS) > 80


def test_imports_point_down_only():
    upward = [
        item
        for item in IMPORTS
        if LEVEL[item.imported] >= LEVEL[item.importer]
        and not (item.when == "never" and item.importer in NAMES_RECIPES)
    ]
    assert not upward, shown(upward)


def choice_of(module: str) -> str:
    """Return the choice module that a module is, or is a file of; "" if of none."""
    first = module.split(".")[0]
    return first if first in CHOICES else ""


# Of the imports of choice modules those that leave it; files of one package share helpers.
OF_CHOICES = [
    item for item in IMPORTS if choice_of(item.importer) not in ("", choice_of(item.imported))
]


def test_choice_modules_never_import_each_other():
    siblings = [item for item in OF_CHOICES if choice_of(item.imported)]
    assert not siblings, shown(siblings)


def test_choice_modules_stand_on_the_lowest_layers():
    allowed = {"bounds", "choose", "dataset_facts", "errors", "fingerprints", "seeding", "types"}
    # An attack goes along the gradient of the likelihood.
    maths = {("corruptions", "fisher")}
    wrong = [
        item
        for item in OF_CHOICES
        # A fit of posteriors is more than a formula: it calls the updates of networks.
        if choice_of(item.importer) != "posterior_fits"
        and item.imported not in allowed
        and (item.importer, item.imported) not in maths
    ]
    assert not wrong, shown(wrong)
    assert {item.importer for item in OF_CHOICES} >= {"losses", "datasets.cifar"}


def test_a_choice_package_is_reached_through_its_front():
    # Others use its options by name. What makes sources of one's own uses its checks.
    inside = [
        item
        for item in IMPORTS
        if "." in item.imported
        and choice_of(item.imported)
        and choice_of(item.importer) != choice_of(item.imported)
    ]
    assert {item.importer for item in inside} == {"own_dataset", "sources"}, shown(inside)


def test_plots_see_only_the_nouns():
    seen = {item.imported for item in IMPORTS if item.importer == "plots"}
    assert seen == {"types"}


def test_the_tower_without_torch_sees_only_itself():
    outside = [
        item for item in IMPORTS if item.importer in TORCH_FREE and item.imported not in TORCH_FREE
    ]
    assert not outside, shown(outside)


def test_the_command_line_loads_torch_only_when_called():
    # Directly: at the top of cli, job and the package stand only modules of the tower.
    early = [
        item
        for item in IMPORTS
        if item.importer in LAZY and item.when == "loaded" and item.imported not in TORCH_FREE
    ]
    assert not early, shown(early)


@pytest.mark.parametrize("name", sorted(set(FILES) - LAZY))
def test_only_the_command_line_hides_imports_in_functions(name):
    # An import inside a function hides a cycle; other modules of ours need none.
    hidden = [item for item in imports_of(name) if item.when == "called"]
    assert not hidden, shown(hidden)


def test_only_options_and_the_public_surface_are_imported_by_name():
    # importlib hides an import from this file. The public surface stands above everything,
    # and what it loads is checked in test_contracts.py.
    users = {
        name
        for name, tree in TREES.items()
        for node in ast.walk(tree)
        if (isinstance(node, ast.Attribute) and node.attr == "import_module")
        or (isinstance(node, ast.Name) and node.id == "__import__")
    }
    assert users == {"choose", ""}


def loaded_after(code: str) -> set[str]:
    """Return the names in sys.modules of a fresh process that ran `code`."""
    finished = subprocess.run(
        [sys.executable, "-P", "-c", f"{code}\nimport sys; print('\\n'.join(sys.modules))"],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONPATH": ":".join(filter(None, sys.path))},
    )
    return set(finished.stdout.split())


def test_the_tower_is_loaded_without_torch():
    """What is imported, and what is imported by that: `--help` and a bad recipe answer at once."""
    modules = sorted({*TORCH_FREE, "cli", "job", "alpha_schedules"})
    loaded = loaded_after("import mixval\n" + "\n".join(f"import mixval.{n}" for n in modules))
    assert {f"mixval.{name}" for name in modules} <= loaded
    assert not {"torch", "timm", "torchvision", "matplotlib"} & loaded


def test_a_recipe_is_checked_without_torch():
    # Options, parameters and schedules: the whole validation, not only the import.
    loaded = loaded_after(
        "from mixval import load_recipe\n"
        "from mixval.recipe_loading import packaged_recipes\n"
        "for name in packaged_recipes():\n"
        "    load_recipe(name)\n"
    )
    assert "mixval.recipe_rules" in loaded
    assert "torch" not in loaded


def test_the_check_for_torch_can_fail():
    # The control of the two tests above.
    assert "torch" in loaded_after("import mixval.losses")
