"""Databases of their own for every run of the tests, people, and what a machine may lack."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import pytest
import pytest_django
from django.conf import settings
from django.contrib.auth.hashers import PBKDF2PasswordHasher
from django.contrib.auth.models import User
from django.db import connection

from aguiapp import store
from tests import services


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Servers come last: they sweep the database, and would drive what other tests leave waiting."""
    items.sort(key=lambda item: item.get_closest_marker("live") is not None)


@pytest.fixture(scope="session")
def django_db_modify_db_settings(tmp_path_factory: pytest.TempPathFactory) -> None:
    """A test database of this run alone: another checkout, or another run, may test as well."""
    default = settings.DATABASES["default"]
    if default["ENGINE"].endswith("sqlite3"):
        name = str(tmp_path_factory.mktemp("database") / "test.sqlite3")
    else:
        checkout = hashlib.sha256(str(settings.BASE_DIR).encode()).hexdigest()[:8]
        name = f"test_aguiapp_{checkout}_{os.getpid()}"
    default["TEST"]["NAME"] = name


@pytest.fixture(scope="session")
def django_db_setup(
    django_db_setup: None, django_db_blocker: pytest_django.DjangoDbBlocker
) -> Iterator[None]:
    """The test database; before it is dropped, everything lets go of it, also what hangs."""
    yield
    store.close()
    if connection.vendor == "postgresql":
        with django_db_blocker.unblock(), connection.cursor() as cursor:
            cursor.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
                " WHERE datname = current_database() AND pid <> pg_backend_pid()"
            )


@pytest.fixture(scope="session", autouse=True)
def quick_passwords() -> None:
    """One round instead of a million; server processes can still check such a password."""
    PBKDF2PasswordHasher.iterations = 1


@pytest.fixture
def database_url(transactional_db: None) -> str:
    """`DATABASE_URL` for other processes that share the test's database."""
    default = settings.DATABASES["default"]
    if default["ENGINE"].endswith("sqlite3"):
        return f"sqlite:///{default['NAME']}"
    query = f"?host={quote(default['HOST'], safe='')}" if default["HOST"].startswith("/") else ""
    host = "" if query else f"{default['HOST']}:{default['PORT'] or 5432}"
    login = f"{quote(default['USER'])}:{quote(default['PASSWORD'])}"
    return f"postgresql://{login}@{host}/{default['NAME']}{query}"


@pytest.fixture
def user(db: None) -> User:
    """A person."""
    return User.objects.create_user("ada", password="ada")


@pytest.fixture
def other(db: None) -> User:
    """Another person, who must not see what the first one does."""
    return User.objects.create_user("bob", password="bob")


@pytest.fixture
def staff(db: None) -> User:
    """A person who may do everything in the admin."""
    return User.objects.create_superuser("eve", password="eve")


@pytest.fixture
def redis_url() -> str:
    """A Redis, or the test is skipped."""
    return services.redis_url() or pytest.skip("no Redis")


@pytest.fixture
def node() -> str:
    """Node with the official client, or the test is skipped."""
    return services.node() or pytest.skip("no Node with @ag-ui/client")


@pytest.fixture
def chromium() -> str:
    """A Chromium, or the test is skipped."""
    return services.chromium() or pytest.skip("no Chromium")


@pytest.fixture
def js() -> Path:
    """The folder of the JavaScript tests."""
    return services.JS
