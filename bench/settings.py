"""The example product's settings with the benchmark's agent."""

from project.settings import *  # noqa: F403

INSTALLED_APPS = [*INSTALLED_APPS, "bench"]  # noqa: F405
LOGGING: dict[str, object] = {}
LOGGING_CONFIG = None
