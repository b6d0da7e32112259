"""The example's pages: what there is to talk to, and the chat."""

from __future__ import annotations

from typing import cast
from uuid import UUID

from django.contrib.auth.decorators import login_required
from django.contrib.auth.models import User
from django.db.models import OuterRef, QuerySet, Subquery
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, render

from aguiapp.models import Run, Thread
from project.agents import SHOWN


@login_required
def home(request: HttpRequest) -> HttpResponse:
    """The agents, and the visitor's threads."""
    agents = [{"name": name, "about": about} for name, about in SHOWN.items()]
    return render(request, "home.html", {"agents": agents, "threads": threads(request)[:50]})


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


def threads(request: HttpRequest) -> QuerySet[Thread]:
    """The visitor's own threads, newest first, each with its last agent."""
    last = Run.objects.filter(thread=OuterRef("pk")).order_by("-pk").values("agent")[:1]
    user = cast(User, request.user)
    return Thread.objects.filter(owner=user).annotate(agent=Subquery(last)).order_by("-updated")


def uuid_or_404(text: str) -> UUID:
    """The UUID that an address names."""
    try:
        return UUID(text)
    except ValueError:
        raise Http404("There is no such thread.") from None
