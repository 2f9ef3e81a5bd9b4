"""The two ways a run ends early, apart from bugs."""


class UserError(ValueError):
    """What the user gave is wrong: one line with the field, the rule, the value and the fix.

    The command line prints it without a traceback and exits with 2.
    """


class Interrupted(Exception):  # noqa: N818 - it is no error
    """The user or the system asked the run to stop; its state is saved and it can resume."""

    def __init__(self, signal_number: int = 2) -> None:
        super().__init__(signal_number)  # as its only argument, so that it survives pickling
        self.exit_code = 128 + signal_number

    def __str__(self) -> str:
        return "stopped, everything is saved"


def exit_state(error: BaseException) -> tuple[str, int]:
    """Return how a run that ended with `error` is described, and its exit code."""
    if isinstance(error, Interrupted):
        return "interrupted", error.exit_code
    if isinstance(error, KeyboardInterrupt):
        return "interrupted", 130
    return "failed", 2 if isinstance(error, UserError) else 1
