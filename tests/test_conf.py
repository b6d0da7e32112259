"""The settings dict: defaults, types, changes, and keys that it does not know."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, fields
from typing import Any

import pytest

from aguiapp import access, conf


def test_without_a_dict_the_defaults_hold(settings: Any) -> None:
    del settings.AGUIAPP
    assert conf.get() == conf.Settings()


def test_a_change_is_seen_at_once(settings: Any) -> None:
    settings.AGUIAPP = {"TAIL_BYTES": 7}
    assert conf.get().TAIL_BYTES == 7
    settings.AGUIAPP = {}
    assert conf.get().TAIL_BYTES == conf.MIB


def test_unknown_keys_are_left_alone(settings: Any) -> None:
    settings.AGUIAPP = {"NO_SUCH_KEY": 1, "STATE": "client"}
    assert conf.get().STATE == "client"
    assert not hasattr(conf.get(), "NO_SUCH_KEY")


def test_dotted_paths_are_imported_and_forgotten(settings: Any) -> None:
    settings.AGUIAPP = {}
    assert conf.imported("POLICY") is access.Policy
    settings.AGUIAPP = {"POLICY": "aguiapp.access.Identity"}
    assert conf.imported("POLICY") is access.Identity


def test_the_limits_are_below_what_kills_stock_clients() -> None:
    limits = conf.Settings()
    assert limits.STATE_BYTES <= 8 * conf.MIB
    assert limits.EVENT_BYTES < 10 * conf.MIB
    assert limits.COMMAND_SECONDS + limits.CANCEL_SECONDS < 1
    assert limits.LEASE_SECONDS + limits.SWEEP_SECONDS < 20


def test_it_is_closed_by_default_and_cannot_be_changed() -> None:
    assert conf.Settings().ANONYMOUS is False
    with pytest.raises(FrozenInstanceError):
        conf.get().ANONYMOUS = True  # type: ignore[misc]


def test_every_choice_is_a_setting_with_a_legal_default() -> None:
    names = {field.name for field in fields(conf.Settings)}
    for name, choices in conf.CHOICES.items():
        assert name in names
        assert getattr(conf.Settings(), name) in choices
