"""The download of one run: the stored texts, one per line, and nothing else."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Iterator

from asgiref.sync import sync_to_async
from django.core.handlers.asgi import ASGIRequest
from django.http import HttpRequest, StreamingHttpResponse
from django.utils.http import content_disposition_header

from aguiapp import store
from aguiapp.models import Run


def filename(run: Run) -> str:
    """A name that is a plain file name on every system, whatever the run's id is."""
    safe = re.sub(r"[^A-Za-z0-9._-]+", "_", run.run_id)[:100].strip("._-")
    return f"{safe or run.pk}.agui.jsonl"


def page(run: Run, after: int, last: int) -> tuple[bytes, int | None]:
    """The lines of the rows after a seq, and the seq to go on from; None at the end."""
    rows = [row for row in store.read(run.pk, after) if row.seq <= last]
    text = "".join(f"{row.payload}\n" for row in rows)
    return text.encode(), rows[-1].seq if rows else None


def lines(run: Run, last: int) -> Iterator[bytes]:
    """The file, page by page."""
    after: int | None = 0
    while after is not None:
        text, after = page(run, after, last)
        yield text


async def alines(run: Run, last: int) -> AsyncIterator[bytes]:
    """See lines()."""
    after: int | None = 0
    while after is not None:
        text, after = await sync_to_async(page)(run, after, last)
        yield text


def response(request: HttpRequest, run: Run) -> StreamingHttpResponse:
    """What is stored now, streamed the way the server at hand can stream."""
    last = store.last_seq(run)
    content = alines(run, last) if isinstance(request, ASGIRequest) else lines(run, last)
    disposition = content_disposition_header(True, filename(run))
    return StreamingHttpResponse(
        content,
        content_type="application/x-ndjson; charset=utf-8",
        headers={"Content-Disposition": disposition or "attachment"},
    )
