"""System checks: a wrong configuration is found by `manage.py check`, not by a visitor."""
