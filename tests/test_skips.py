"""A skipped test is listed at the end, and fails the session unless it is allowed."""

from pathlib import Path

import pytest

CONFTEST = Path(__file__).with_name("conftest.py").read_text(encoding="utf-8")
ONE_SKIP = """
    import pytest

    @pytest.mark.skip(reason="no such device")
    def test_on_a_device():
        assert True

    def test_elsewhere():
        assert True
"""


def run_with(pytester: pytest.Pytester, allowed: str, body: str) -> pytest.RunResult:
    pytester.makeconftest(CONFTEST + f"\nALLOWED_SKIPS = {allowed}\n")
    pytester.makepyfile(body)
    return pytester.runpytest_inprocess("-p", "no:hypothesispytest", "-p", "no:cacheprovider")


def test_an_unexpected_skip_fails_the_session(pytester):
    # Catches a suite that is green because its tests did not run.
    result = run_with(pytester, "()", ONE_SKIP)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(["skipped (NOT ALLOWED): *no such device*"])


@pytest.mark.parametrize("allowed", ["('no such device',)", "('test_on_a_device',)"])
def test_an_allowed_skip_is_listed_and_passes(pytester, allowed):
    # Catches an allow-list that is ignored, or that hides what it allows.
    result = run_with(pytester, allowed, ONE_SKIP)
    assert result.ret == pytest.ExitCode.OK
    result.stdout.fnmatch_lines(["skipped (allowed): *no such device*"])


def test_a_skipped_module_counts_too(pytester):
    # Catches importorskip at the top of a file: it never becomes a test that could be counted.
    body = """
        import pytest

        pytest.importorskip("no_such_module_anywhere")

        def test_anything():
            assert True
    """
    other = {"test_other": "def test_other():\n    assert True\n"}
    pytester.makepyfile(**other)
    result = run_with(pytester, "()", body)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(["skipped (NOT ALLOWED): *no_such_module_anywhere*"])


def test_a_failure_stays_a_failure_and_no_skip_is_no_failure(pytester):
    # Catches a hook that overwrites the session's own exit code.
    assert run_with(pytester, "()", "def test_wrong():\n    assert 1 == 2\n").ret == 1
    assert run_with(pytester, "()", "def test_right():\n    assert 1 == 1\n").ret == 0
