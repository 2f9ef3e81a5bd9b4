"""What `auto` chooses: the fastest way, and the plain one unless another is clearly faster."""

import pytest

from mixval import load_recipe
from mixval.recipe import EngineSettings
from mixval.store import Store
from mixval.tuning import _fastest, tuned

CONV = {"model": {"name": "conv_net", "width": 4}, "engine.device": "cpu"}


@pytest.mark.parametrize(
    ("turns", "best"),
    [
        ([[1.0, 1.0, 1.0], [0.5, 0.5, 0.5], [0.4, 0.4, 0.4]], 2),
        ([[1.0, 1.0, 1.0], [0.99, 0.98, 0.99]], 0),  # not worth leaving the plain way for
        ([[1.0, 1.0, 1.0], [0.2, 0.2, 1.1]], 0),  # fast by luck, in some turns only
        ([[1.0, 9.0, 1.0], [0.9, 8.0, 0.9]], 1),  # a slow turn hits both
        ([[1.0]], 0),
    ],
)
def test_another_way_than_the_plain_one_must_always_be_faster(turns, best):
    assert _fastest(turns) == best


def test_nothing_to_measure_is_nothing_measured(tiny_recipe):
    recipe = tiny_recipe()
    found = tuned(recipe, "main")
    assert found.recipe is recipe and found.found == ""


@pytest.mark.parametrize("key", ["precision", "channels_last"])
def test_auto_becomes_what_was_measured(tiny_recipe, monkeypatch, key):
    # The second way is made the faster one: what is chosen must be what is said and set.
    def second_wins(engines, job):
        assert getattr(engines[0], key) in ("fp32", False)
        return [[1.0], [0.5]]

    monkeypatch.setattr("mixval.tuning._interleaved", second_wins)
    found = tuned(tiny_recipe({f"engine.{key}": "auto", **CONV}), "main")
    value = getattr(found.recipe.engine, key)
    assert value == {"precision": "bf16", "channels_last": True}[key]
    assert key in found.found and "2.00 times" in found.found


@pytest.mark.parametrize(("first", "step", "compiles"), [(1.0, 0.1, True), (1e6, 0.1, False)])
def test_compiling_must_pay_within_the_steps_of_a_network(
    tiny_recipe, monkeypatch, first, step, compiles
):
    # 12 steps at 1 s against `first` + 12 steps at 0.1 s.
    monkeypatch.setattr("mixval.tuning.seconds_of", lambda job, engine, steps: first)
    monkeypatch.setattr(
        "mixval.tuning._interleaved",
        lambda engines, job: [[step if engine.compile else 1.0] for engine in engines],
    )
    found = tuned(tiny_recipe({"engine.compile": "auto", **CONV}), "main")
    assert found.recipe.engine.compile is compiles


def test_auto_is_really_measured(tiny_recipe):
    changes = {"engine.precision": "auto", "engine.channels_last": "auto", **CONV}
    found = tuned(tiny_recipe(changes), "main")
    assert found.recipe.engine.to_measure == []
    assert "times as fast as precision fp32, channels_last false" in found.found


def test_a_run_goes_on_with_what_it_found(tmp_path):
    # Measured again, another way might win, and the directory would be refused.
    store = Store(tmp_path / "run")
    asked = load_recipe("digits", {"engine.precision": "auto", "engine.compile": "auto"})
    assert store.settled(asked) == asked
    store.bind(asked.with_engine({"precision": "bf16", "compile": False}))
    assert store.settled(asked).engine == EngineSettings(precision="bf16")
    store.check(store.settled(asked))
    fixed = load_recipe("digits", {"engine.precision": "fp32"})
    assert store.settled(fixed) == fixed  # what is given is not exchanged
