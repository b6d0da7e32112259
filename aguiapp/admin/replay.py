"""What the Replay page shows: pages of the event list, and a run folded up to one of its events."""

from __future__ import annotations

import json
from typing import Any

from django.http import HttpRequest, HttpResponse
from django.urls import reverse
from django.utils.translation import gettext as _

from aguiapp import errors, protocol, store
from aguiapp.admin import cells, folds, rows
from aguiapp.models import Run
from aguiapp.store import reads

PAGE_ROWS = 1000
#: Rows of the table for browsers without JavaScript.
PLAIN_ROWS = 200
#: Beyond this many events that table's final state is folded only when asked for.
PLAIN_FOLD = 5000
#: How many skipped events are named.
NAMED_SKIPS = 20


def answer(data: Any, status: int = 200) -> HttpResponse:
    """JSON in ASCII letters, so that lone surrogates and NUL arrive as they were stored."""
    return HttpResponse(json.dumps(data), status=status, content_type="application/json")


def refusal(error: errors.AguiError) -> HttpResponse:
    """The error as JSON."""
    return answer(error.as_dict(), status=error.status)


def number(request: HttpRequest, name: str, default: int, low: int, high: int) -> int:
    """A whole number of the query, within its bounds."""
    given = request.GET.get(name)
    if given is None:
        return default
    try:
        value = int(given)
    except ValueError:
        value = low - 1
    if not low <= value <= high:
        raise errors.BadParameter(f"{name} must be a number from {low} to {high}.")
    return value


def events(request: HttpRequest, run: Run) -> dict[str, Any]:
    """A page of the event list, and how far the run has come."""
    last = store.last_seq(run)
    after = number(request, "after", 0, 0, 2**63 - 1)
    limit = number(request, "limit", PAGE_ROWS, 1, PAGE_ROWS)
    return {
        "events": lines(run, after, limit),
        "last": last,
        "ended": run.ended,
        "status": run.status,
        "statusText": " ".join(cells.look(run.status)),
    }


def lines(run: Run, after: int, limit: int) -> list[dict[str, Any]]:
    """The list's lines of `limit` events behind a seq; their payloads are read in small pages."""
    pages = store.pages(run.pk, after, until=after + limit)
    return [rows.line(row) for page in pages for row in page]


def at(request: HttpRequest, run: Run) -> dict[str, Any]:
    """The run's thread as it stood after the run's first `seq` events, and the last of these.

    `?messages=` limits the conversation to its last so many; `messageCount` counts them all.
    """
    seq = number(request, "seq", 0, 0, store.last_seq(run))
    shown = number(request, "messages", 0, 0, 2**31)
    row = stored(run, seq)
    found = folds.at(run, seq)
    folded = found.fold
    return {
        "seq": seq,
        "position": None if run.offset is None else run.offset + seq,
        "type": row and rows.type_name(row.type),
        "event": row and row.payload,
        "valid": row is not None and rows.parsed(row.payload) is not None,
        "created": row and row.created.isoformat(),
        "messages": folded.messages[-shown:],
        "messageCount": len(folded.messages),
        "state": folded.state,
        "openItems": [open_item(item) for item in folded.open_items],
        "pendingToolCallIds": folded.pending_tool_calls,
        "interrupts": folded.interrupts,
        "unreadable": len(found.unreadable),
        "unreadableSeqs": skipped(run, found.unreadable),
    }


def stored(run: Run, seq: int) -> reads.Stored | None:
    """The row of that seq, if there is one."""
    found = store.read(run.pk, seq - 1, 1) if seq else []
    return found[0] if found and found[0].seq == seq else None


def open_item(item: protocol.OpenItem) -> dict[str, Any]:
    """A started and not yet ended item, without the event that started it."""
    return {"kind": item.kind, "id": item.id, "subagentRunId": item.subagentRunId}


def skipped(run: Run, positions: list[int]) -> list[int]:
    """The first skipped events that are of this run, by seq."""
    offset = run.offset or 0
    return [each - offset for each in positions if each > offset][:NAMED_SKIPS]


def start_seq(request: HttpRequest, last: int) -> int:
    """Where the page opens: at `?seq=`, else at the end."""
    try:
        return number(request, "seq", last, 0, last)
    except errors.BadParameter:
        return last


def page(request: HttpRequest, run: Run, site: str) -> dict[str, Any]:
    """The context of the Replay page."""
    last = store.last_seq(run)
    first = [row for page in store.pages(run.pk, until=PLAIN_ROWS) for row in page]
    cheap = last <= PLAIN_FOLD or "plain" in request.GET
    return {
        "run": run,
        "last": last,
        "badge": cells.badge(run.status, run.error_code),
        "plain_rows": [rows.line(row) | {"created": row.created} for row in first],
        "plain_state": plain_state(run, last) if cheap else None,
        "config": {
            "events": reverse("admin:aguiapp_run_replay_events", args=[run.pk], current_app=site),
            "at": reverse("admin:aguiapp_run_replay_at", args=[run.pk], current_app=site),
            "last": last,
            "seq": start_seq(request, last),
            "start": first[0].created.isoformat() if first else None,
            "text": texts(),
        },
    }


def plain_state(run: Run, last: int) -> str:
    """The final state for browsers without JavaScript."""
    try:
        return cells.pretty(folds.at(run, last).folder.state)
    except RecursionError:
        return _("nested too deeply to be shown")


def texts() -> dict[str, str]:
    """The strings that the page's script shows."""
    return {
        "announce": _("Event {seq} of {last}, {type}"),
        "beginning": _("Before the first event"),
        "bytes": _("{count} bytes"),
        "calls": _("{count} more tool calls"),
        "cut": _("Show all {count} characters"),
        "earlier": _("Show earlier messages ({count} more)"),
        "empty": _("No events stored."),
        "failed": _("The server did not answer as expected ({status}). Reload the page."),
        "gone": _("not stored"),
        "interrupts": _("open interrupts: {count}"),
        "invalid": _("Cannot be read as an AG-UI event and is left out of the fold."),
        "loading": _("loading…"),
        "messages": _("No messages yet."),
        "nothing": _("No event: this is how the run began."),
        "open": _("open: {items}"),
        "pending": _("waiting for a result"),
        "position": _("position {position} of the thread"),
        "reasoning": _("reasoning"),
        "skipped": _("Unreadable events left out: {count} {seqs}"),
        "streaming": _("streaming"),
        "unreadable": _("unreadable"),
    }
