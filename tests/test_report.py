"""The page and the table of a run: self-contained, safe, aligned, and the same every time."""

import itertools
import re
import shutil
import unicodedata
from html.parser import HTMLParser

import pytest

from mixval import make_recipe
from mixval.errors import UserError
from mixval.job import run_job, write_report
from mixval.report.render import text_table
from mixval.results import Results
from mixval.stages.report import report
from mixval.store import Store

HOSTILE = [
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "--!><script>alert(2)</script>",
    "</td></table><iframe src='https://example.org'>",
    "{{ 7 * 7 }}{% raw %}",
    "a & b < c",
]


class Page(HTMLParser):
    """What a browser would see: tags with their attributes, and the text."""

    def __init__(self, path):
        super().__init__()
        self.tags, self.texts = [], []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))

    def handle_data(self, data):
        self.texts.append(data)


@pytest.fixture(scope="module")
def reported(tiny_recipe, tmp_path_factory):
    """Return a maker of the directory of a finished run, by changes; each is run once."""
    made = {}

    def make(changes=None):
        key = repr(changes)
        if key not in made:
            folder = tmp_path_factory.mktemp("reported") / "run"
            run_job(tiny_recipe(changes), folder, command="mixval run tiny.yaml")
            made[key] = folder
        return made[key]

    return make


def assert_self_contained(page):
    for tag, attributes in page.tags:
        assert tag not in ("script", "iframe", "img", "link", "object", "embed", "base")
        for name, value in attributes.items():
            assert not name.startswith("on"), (tag, name)
            if name in ("src", "href", "xlink:href", "srcset", "action", "data"):
                assert value.startswith("#"), (tag, name, value)


def test_the_page_needs_nothing_but_itself(reported):
    # Catches a font, script or picture from the network: the page must open offline, for years.
    path = reported({"seeds": [0, 1]}) / "report.html"
    page = Page(path)
    assert_self_contained(page)
    text = path.read_text(encoding="utf-8")
    assert "@import" not in text
    assert all(target.startswith("#") for target in re.findall(r"url\(['\"]?([^)'\"]*)", text))
    assert any(tag == "svg" for tag, _ in page.tags)


def test_the_page_shows_every_arm_and_how_to_repeat_it(reported):
    # Catches a page that leaves out an arm, the seeds, the recipe or the command.
    words = " ".join(Page(reported({"seeds": [0, 1]}) / "report.html").texts)
    for wanted in ("erm", "all", "guided", "yoked", "2 seeds", "mixval run tiny.yaml"):
        assert wanted in words
    assert "batch_size: 20" in words


def test_titles_are_text_whatever_they_contain(reported):
    # Catches a recipe from elsewhere that runs a script in the reader's browser.
    titles = dict(zip(("erm", "all", "guided", "yoked"), HOSTILE, strict=False))
    changes = {f"arms.{arm}.title": title for arm, title in titles.items()}
    changes |= {"panels.main.title": HOSTILE[4], "panels.noisy": {"title": HOSTILE[5]}}
    folder = reported({**changes, "training.epochs": 1})
    page = Page(folder / "report.html")
    assert_self_contained(page)
    words = "".join(page.texts)
    for title in HOSTILE:
        assert title in words


def test_the_command_is_text_whatever_it_contains(reported, tmp_path):
    # As above: the command line is shown on the page, too.
    folder = shutil.copytree(reported({"seeds": [0, 1]}), tmp_path / "run")
    status = Store(folder).read_json("status.json")
    Store(folder).write_json("status.json", {**status, "commands": [f"mixval run {HOSTILE[0]}"]})
    page = Page(write_report(folder))
    assert_self_contained(page)
    assert HOSTILE[0] in "".join(page.texts)


@pytest.mark.parametrize(
    "title", [r"costs $5 or $6", r"$\nonsense{$", "_hidden", "100 %", "r̂ ≤ 0, λ-deciles", " "]
)
def test_titles_mean_nothing_to_the_figures(reported, tmp_path, title):
    # Catches a title that matplotlib reads as a formula, or leaves out because of its first
    # letter: a run of hours would end with an error on its last line.
    store = Store(shutil.copytree(reported({"seeds": [0, 1]}), tmp_path / "run"))
    recipe = store.recipe()
    arms = {
        name: arm.model_copy(update={"title": title if name == "guided" else f"{title}{name}"})
        for name, arm in recipe.arms.items()
    }
    retitled = recipe.model_copy(update={"arms": arms})
    page = Page(report(Results.read(retitled, store), store))
    assert_self_contained(page)
    assert title.strip() in "".join(page.texts)


def test_one_seed_gives_no_verdict(reported, capsys):
    # Catches a claim from a single draw, and NaN where an interval would be.
    folder = reported({"training.epochs": 3})
    text = (folder / "report.html").read_text()
    assert "no verdict from one seed" in text
    assert "nan" not in " ".join(Page(folder / "report.html").texts).lower().split()
    table = text_table(Results.read(Store(folder).recipe(), Store(folder)))
    assert "no verdict from one seed" in table
    assert "nan" not in table and "±" not in table


def test_a_single_arm_is_enough_for_a_page(tiny_description, tmp_path, capsys):
    # Catches a report that needs a control, a teacher or a guided arm.
    described = tiny_description({"teachers": {}, "arms": {"erm": {"alpha": 0}}})
    path = run_job(make_recipe(described), tmp_path / "run")
    assert "nothing to judge" in path.read_text()
    assert "erm" in capsys.readouterr().out


def test_a_guided_arm_without_its_control_gives_no_verdict(reported, tmp_path, tiny_recipe):
    # Catches a guided accuracy that stands alone.
    path = run_job(tiny_recipe(), tmp_path / "run", arms=["guided"])
    assert "no verdict, because its yoked control was not run" in path.read_text()


def test_the_report_of_a_run_is_made_again_from_its_files(reported):
    # Catches a page that depends on the moment, or on something that is not in the run.
    path = reported({"seeds": [0, 1]}) / "report.html"
    before = path.read_bytes()
    path.unlink()
    assert write_report(path.parent) == path
    assert path.read_bytes() == before


def displayed(text):
    """Return a text as a terminal shows it: the hat of r̂ takes no column of its own."""
    return "".join(letter for letter in text if not unicodedata.combining(letter))


def test_the_columns_of_the_table_line_up(reported):
    # Catches cells that are pushed aside by a combining hat, a long title or an empty cell.
    changes = {
        "arms.guided.title": "−r̂, teacher on D∪F",
        "arms.yoked.title": "  its yoked control, r̂ and r̂ again",
        "seeds": [0, 1],
    }
    folder = reported(changes)
    table = text_table(Results.read(Store(folder).recipe(), Store(folder)))
    lines = [displayed(line) for line in table.splitlines()]
    head = next(k for k, line in enumerate(lines) if line.startswith("arm "))
    rows = lines[head + 1 : head + 5]
    assert [row.split("  ")[0] or row.split()[0] for row in rows][:2] == ["erm", "all"]
    ends = [match.end() for match in re.finditer(r"\S+(?: \S+)*", lines[head])][1:]
    assert len(ends) >= 10
    for row in rows:
        for end in ends:
            assert row[end : end + 1] in ("", " "), row
        for start, end in itertools.pairwise(ends):
            cell = row[start:end]
            assert not cell.strip() or cell[-1] != " ", (row, cell)
        assert row[ends[0] - 1] != " "


def test_a_folder_that_is_no_run_has_no_report(tmp_path):
    with pytest.raises(UserError, match="is not a run directory"):
        write_report(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_run_without_results_has_no_report_yet(tiny_recipe, tmp_path):
    run_job(tiny_recipe(), tmp_path / "run", stage="base")
    with pytest.raises(UserError, match="has no finished arm yet; run `mixval run` first"):
        write_report(tmp_path / "run")
