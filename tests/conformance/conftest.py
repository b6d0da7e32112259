"""What was relaxed is said at the end of a run, so that it cannot go unseen."""

import pytest

from tests.conformance import relaxed


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if not relaxed.NOTES:
        return
    terminalreporter.section("relaxed for the conformance corpus")
    for case, key, reason in relaxed.NOTES:
        terminalreporter.line(f"{case}: {key}: {reason}")
