"""Options are read from source, not imported: what is read must be what would be called."""

import importlib
import inspect
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from mixval import choose
from mixval.cli import CHOICE_MODULES
from mixval.errors import UserError

# `plots` is a choice module whose options take their data by position as well.
EVERY_OPTION = [(module, name) for module in CHOICE_MODULES for name in choose.options(module)]


@pytest.mark.parametrize(("module", "name"), EVERY_OPTION)
def test_the_source_says_what_the_function_takes(module, name):
    # Catches a reader that misses a parameter, or sees another default than Python does.
    function = getattr(importlib.import_module(f"mixval.{module}"), name)
    parameters = inspect.signature(function).parameters.values()
    called = {
        p.name: "required" if p.default is p.empty else p.default
        for p in parameters
        if p.kind is p.KEYWORD_ONLY
    }
    fields = choose.options(module)[name].parameters.model_fields
    read = {key: "required" if f.is_required() else f.default for key, f in fields.items()}
    assert read == called


@pytest.mark.parametrize(("module", "name"), EVERY_OPTION)
def test_every_option_has_a_line_that_says_what_it_does(module, name):
    # Catches `mixval list` with an empty or unfinished line.
    option = choose.options(module)[name]
    assert option.summary.endswith((".", ":")) or len(option.summary) > 20
    assert option.signature.startswith(f"{name}(")


def test_options_are_what_the_module_exports():
    # Catches a helper that becomes an option, or an option that is not listed.
    for module in CHOICE_MODULES:
        home = importlib.import_module(f"mixval.{module}")
        assert set(choose.options(module)) == set(home.__all__)


def test_reading_options_does_not_import_torch():
    # Catches a bad recipe that has to wait for torch before it is refused.
    code = (
        "import sys; from mixval import choose\n"
        f"for module in {CHOICE_MODULES!r}: choose.options(module)\n"
        "assert 'torch' not in sys.modules and 'matplotlib' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_pick_binds_the_parameters():
    # Catches parameters that are checked and then not used.
    assert choose.pick("alpha_schedules", "constant", {"value": 3.5})(0.1) == 3.5
    assert choose.pick("alpha_schedules", "linear", {"start": 4.0, "end": 2.0})(0.5) == 3.0


@pytest.mark.parametrize(
    ("module", "name", "wrong"),
    [
        ("filter_policies", "low_fraction", {"fraction": 0.0}),
        ("filter_policies", "low_fraction", {"fraction": 1.0}),
        ("filter_policies", "low_fraction", {"fraction": float("nan")}),
        ("filter_policies", "top_k", {"k": 0}),
        ("filter_policies", "top_k", {"k": 2.5}),
        ("filter_policies", "soft", {"tau": float("inf")}),
        ("augmentations", "crop_flip", {"pad": -1}),
        ("models", "mlp", {"dropout": 1.0}),
        ("models", "mlp", {"hidden": 8}),
        ("class_weights", "given", {"values": [1.0, -1.0]}),
        ("alpha_schedules", "points", {"at": [0.0, "x"], "alpha": [1.0, 2.0]}),
    ],
)
def test_the_range_in_the_signature_is_checked(module, name, wrong):
    # Catches an annotation the reader does not understand, and so does not check.
    with pytest.raises(ValidationError):
        choose.option(module, name).parameters.model_validate(wrong)


def test_an_unknown_option_names_the_nearest_or_all():
    with pytest.raises(UserError, match=r"unknown option 'negativ' .*; did you mean 'negative'\?"):
        choose.option("filter_policies", "negativ")
    with pytest.raises(UserError, match="choose from balanced, given, uniform"):
        choose.option("class_weights", "zzzzzz")


@given(st.text(max_size=12), st.lists(st.text(min_size=1, max_size=12), max_size=5))
def test_nearest_always_answers_with_something_known(name, known):
    # Catches a hint that crashes on odd names, or suggests what does not exist.
    answer = choose.nearest(name, known)
    if known:
        assert any(repr(item) in answer or item in answer for item in known)
    else:
        assert "none" in answer


@pytest.mark.parametrize(
    ("annotation", "right", "wrong"),
    [
        ("float", 1.5, "x"),
        ("int | None", None, "x"),
        ("list[int]", [1, 2], [1, "x"]),
        ("Literal['a', 'b']", "b", "c"),
        ("dict[str, float]", {"a": 1.0}, {"a": "x"}),
        ("tuple[int, str]", (1, "a"), ("a", 1)),
        ("Positive", 0.1, 0.0),
    ],
)
def test_annotations_of_own_options_are_checked(tmp_path, monkeypatch, annotation, right, wrong):
    # Catches a kind of annotation that is read as "anything goes".
    (tmp_path / "annotated_option.py").write_text(
        f"def option(progress, *, value: {annotation}): return value\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    parameters = choose.option("alpha_schedules", "annotated_option:option").parameters
    assert parameters.model_validate({"value": right}).value == right
    with pytest.raises(ValidationError):
        parameters.model_validate({"value": wrong})
    with pytest.raises(ValidationError, match="required"):
        parameters.model_validate({})
