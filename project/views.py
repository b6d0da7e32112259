"""The example's pages: what there is to talk to, and the chat."""

from __future__ import annotations

import json
from typing import Any, cast
from uuid import UUID

from django.contrib.auth.decorators import login_required
from django.contrib.auth.models import User
from django.db.models import OuterRef, QuerySet, Subquery
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, render
from django.utils.text import Truncator

from aguiapp.models import InputMessage, Run, Thread
from project.agents import SHOWN


@login_required
def home(request: HttpRequest) -> HttpResponse:
    """The agents, and the visitor's threads."""
    agents = [{"name": name, "about": about} for name, about in SHOWN.items()]
    listed = list(threads(request)[:50])
    for thread in listed:
        thread.title = thread.title or opening(thread.said)
    return render(request, "home.html", {"agents": agents, "threads": listed})


@login_required
def chat(request: HttpRequest, agent: str) -> HttpResponse:
    """The chat with one agent, on a new thread or on `?thread=<key>`."""
    if agent not in SHOWN:
        raise Http404("There is no such agent here.")
    thread = None
    if key := request.GET.get("thread"):
        thread = get_object_or_404(threads(request), key=uuid_or_404(key))
    context = {"agent": agent, "about": SHOWN[agent], "thread": thread}
    return render(request, "chat.html", context)


@login_required
def ending(request: HttpRequest, key: UUID) -> HttpResponse:
    """The event that ended a thread's last run, which no snapshot holds; 204 without one."""
    thread = get_object_or_404(threads(request), key=key)
    ended = Run.objects.filter(thread=thread, finished_at__isnull=False).order_by("-pk").first()
    event = ended.events.order_by("-seq").first() if ended else None
    if event is None:
        return HttpResponse(status=204)
    return HttpResponse(event.payload, content_type="application/json")


def threads(request: HttpRequest) -> QuerySet[Any]:
    """The visitor's own threads, newest first, each with its last agent and its first message."""
    last = Run.objects.filter(thread=OuterRef("pk")).order_by("-pk").values("agent")
    first = InputMessage.objects.filter(thread=OuterRef("pk")).order_by("pk").values("payload")
    found = Thread.objects.filter(owner=cast(User, request.user)).order_by("-updated")
    return found.annotate(agent=Subquery(last[:1]), said=Subquery(first[:1]))


def opening(payload: str | None) -> str:
    """The beginning of a stored message, where that is text; lone surrogates become "?"."""
    content = json.loads(payload).get("content") if payload else None
    text = content if isinstance(content, str) else ""
    return Truncator(text.encode(errors="replace").decode()).chars(60)


def uuid_or_404(text: str) -> UUID:
    """The UUID that an address names."""
    try:
        return UUID(text)
    except ValueError:
        raise Http404("There is no such thread.") from None
