"""The snippets of the protocol's reference hold."""

import re

from tests.protocol.cases import ROOT

SNIPPET = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def test_the_snippet_of_the_reference_runs() -> None:
    (snippet,) = SNIPPET.findall((ROOT / "docs" / "reference" / "protocol.md").read_text("utf-8"))
    assert snippet.count("assert") == 5
    exec(compile(snippet, "protocol.md", "exec"), {})  # noqa: S102
