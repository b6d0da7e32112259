"""Whatever an agent hands over becomes a plain dict in wire form."""

from collections.abc import Mapping
from enum import Enum
from typing import Any, Final

from ag_ui.core.events import BaseEvent
from pydantic import TypeAdapter

from aguiapp.protocol.events import Event, ProtocolError, text_of
from aguiapp.protocol.jsontext import loads

# Required any-JSON members: here null is data, everywhere else it means "left out".
_NULLABLE: Final = frozenset({"snapshot", "event", "value"})
_PLAIN: Final = frozenset({str, int, float, bool})

# NaN stays NaN, so that it is refused by name when the event is written.
_json: Final = TypeAdapter[Any](Any, config={"ser_json_inf_nan": "constants"}).dump_python
_aliases: dict[type, dict[str, str]] = {}


def to_wire(event: object) -> Event:
    """Return the event as a dict with wire names; raise ProtocolError when it is none."""
    # Known models first, by their class: to ask whether something is a model is slow.
    names = _aliases.get(event.__class__)
    if names is not None:
        return _from_model(event, names)
    if isinstance(event, dict):
        wire: Any = event
    elif isinstance(event, str | bytes | bytearray):
        wire = loads(event)
    elif isinstance(event, BaseEvent):
        return _from_model(event, _names(event.__class__))
    elif isinstance(event, Mapping):
        wire = dict(event)
    else:
        raise ProtocolError("malformed", f"{type(event).__name__} is not an event")
    kind = wire.get("type") if isinstance(wire, dict) else None
    if kind.__class__ is str and kind:
        return wire  # type: ignore[no-any-return]
    if isinstance(kind, Enum) and isinstance(kind.value, str):
        return {**wire, "type": kind.value}
    raise ProtocolError("malformed", f"an event is an object with a type, not {text_of(wire)}")


def _from_model(model: Any, names: dict[str, str]) -> Event:
    """Dump a model like its own by-alias JSON, without building JSON."""
    wire: Event = {}
    for attribute, value in model.__dict__.items():
        if value is None:
            if attribute in _NULLABLE:
                wire[attribute] = None
        elif value.__class__ in _PLAIN:
            wire[names[attribute]] = value
        else:
            # Enum.value is a slow descriptor; every event pays for it.
            plain = value._value_ if attribute == "type" else _plain(value)
            wire[names[attribute]] = plain
    if extra := model.__pydantic_extra__:
        for key, value in extra.items():
            wire[key] = _plain(value)
    return wire


def _names(model: type[BaseEvent]) -> dict[str, str]:
    names = {
        name: field.serialization_alias or field.alias or name
        for name, field in model.model_fields.items()
    }
    _aliases[model] = names
    return names


def _plain(value: Any) -> Any:
    """Turn models, dates and the like below an event into JSON values."""
    if value.__class__ in _PLAIN or value is None:
        return value
    try:
        return _json(value, mode="json", by_alias=True)
    except (ValueError, RecursionError) as problem:
        said = f"the event holds what is not JSON: {type(problem).__name__}"
        raise ProtocolError("malformed", said) from None
