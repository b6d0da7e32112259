"""Cells of the admin's tables and forms: badges, durations, JSON."""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any

from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.utils.translation import gettext as _

from aguiapp.models import Run

SYMBOLS = {
    Run.Status.QUEUED: "○",
    Run.Status.RUNNING: "▶",
    Run.Status.SUCCESS: "✔",
    Run.Status.INTERRUPT: "‖",
    Run.Status.CANCELLED: "⊘",
    Run.Status.ERROR: "✖",
}
#: Longer text is cut, so that one page stays one page.
SHOWN_CHARACTERS = 200_000


def look(status: str) -> tuple[str, str]:
    """The symbol and the word of a status, also of one that is not known."""
    if status not in Run.Status.values:
        return "?", status
    known = Run.Status(status)
    return SYMBOLS[known], str(known.label)


def badge(status: str, code: str = "") -> SafeString:
    """The status as a symbol, a word and a colour, with the error's code."""
    mark = format_html(
        '<span class="agui-badge agui-badge-{}"><span aria-hidden="true">{}</span> {}</span>',
        status,
        *look(status),
    )
    return format_html('{} <code class="agui-code">{}</code>', mark, code) if code else mark


def duration(span: timedelta) -> str:
    """A length of time in the two units that matter."""
    seconds = span.total_seconds()
    if seconds < 60:
        return _("%(seconds).1f s") % {"seconds": seconds}
    minutes, rest = divmod(int(seconds), 60)
    if minutes < 60:
        return _("%(minutes)d min %(seconds)02d s") % {"minutes": minutes, "seconds": rest}
    hours, minutes = divmod(minutes, 60)
    return _("%(hours)d h %(minutes)02d min") % {"hours": hours, "minutes": minutes}


def printable(text: str) -> str:
    """The text with lone surrogates and NUL as escapes: a page could not be encoded otherwise."""
    return text.encode("utf-8", "backslashreplace").decode().replace("\x00", "\\u0000")


def pretty(value: Any) -> str:
    """A JSON value on indented lines, fit for a page."""
    return printable(json.dumps(value, indent=2, ensure_ascii=False))


def block(text: str) -> SafeString | str:
    """Preformatted text, cut where it would swamp the page."""
    if not text:
        return "-"
    shown = printable(text[:SHOWN_CHARACTERS])
    if len(text) > SHOWN_CHARACTERS:
        shown += "\n" + _("… (%(count)d characters in all)") % {"count": len(text)}
    return format_html('<pre class="agui-pre">{}</pre>', shown)


def json_block(value: Any) -> SafeString | str:
    """A JSON value as a block; nothing for null and for the empty containers."""
    return "-" if value in (None, {}, []) else block(pretty(value))
