"""The README's five-minute install, followed to the letter in a fresh project."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from django.conf import settings

SNIPPET = re.compile(r"^( *)```python\n\1# (\S+\.py)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
#: What the reader of the README would try first.
FIRST_TRY = """
from django.contrib.auth.models import User
from django.test import TestCase, override_settings


@override_settings(AGUIAPP={"WRITER": "inline"})
class FirstTry(TestCase):
    async def test_the_echo_agent_answers(self):
        await self.async_client.aforce_login(await User.objects.acreate_user("ada"))
        response = await self.async_client.post(
            "/agui/agents/echo/",
            {
                "threadId": "t1",
                "runId": "r1",
                "state": {},
                "messages": [{"id": "m1", "role": "user", "content": "Hello"}],
                "tools": [],
                "context": [],
                "forwardedProps": {},
            },
            content_type="application/json",
            headers={"accept": "application/json"},
        )
        self.assertEqual(response.status_code, 200)
        events = response.json()["events"]
        self.assertEqual(events[0]["type"], "RUN_STARTED")
        self.assertEqual(events[-1]["type"], "RUN_FINISHED")
        self.assertIn("You said: Hello", [event.get("delta") for event in events])
"""


def snippets() -> dict[str, str]:
    """The README's Python, by the file that it belongs to; a file's snippets follow each other."""
    readme = Path(settings.BASE_DIR, "README.md").read_text(encoding="utf-8")
    found: dict[str, str] = {}
    for _, name, code in SNIPPET.findall(readme):
        found[name] = found.get(name, "") + textwrap.dedent(code)
    return found


@pytest.fixture(scope="module")
def product(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project as `startproject` and `startapp` leave it, with the README's steps taken."""
    folder = tmp_path_factory.mktemp("product")
    django(folder, "-m", "django", "startproject", "mysite", ".")
    django(folder, "manage.py", "startapp", "shop")
    for name, code in snippets().items():
        path = folder / name
        if name == "mysite/settings.py":
            code = f"{path.read_text(encoding='utf-8')}\n{code}"
        path.write_text(code, encoding="utf-8")
    (folder / "shop" / "tests.py").write_text(FIRST_TRY, encoding="utf-8")
    return folder


def django(folder: Path, *command: str) -> str:
    """Run Python there, without our settings; its output, or a failure that shows it."""
    done = subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env={
            **{k: v for k, v in os.environ.items() if k != "DJANGO_SETTINGS_MODULE"},
            "PYTHONPATH": str(settings.BASE_DIR),
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def test_every_step_of_the_readme_has_its_file() -> None:
    assert list(snippets()) == [
        "mysite/settings.py",
        "mysite/urls.py",
        "mysite/asgi.py",
        "shop/agents.py",
    ]


def test_the_install_passes_djangos_checks(product: Path) -> None:
    django(product, "manage.py", "check", "--fail-level", "WARNING")


def test_the_install_migrates(product: Path) -> None:
    assert "aguiapp.0001_initial... OK" in django(product, "manage.py", "migrate")


def test_the_asgi_application_loads(product: Path) -> None:
    django(product, "-c", "from mysite.asgi import application; assert callable(application)")


def test_the_first_agent_answers_in_djangos_test_case(product: Path) -> None:
    django(product, "manage.py", "test", "--verbosity", "2")


def test_documents_link_to_files_that_exist() -> None:
    base = Path(settings.BASE_DIR)
    for document in (base / "README.md", base / "CHANGELOG.md", *base.glob("docs/**/*.md")):
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", document.read_text(encoding="utf-8")):
            assert (document.parent / target).exists(), f"{document.name} links to {target}"
