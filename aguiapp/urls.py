"""Addresses of the app, under the prefix the host chooses."""

from __future__ import annotations

from django.urls import path

from aguiapp import views

app_name = "aguiapp"
urlpatterns = [
    path("agents/<str:agent>/", views.agent_run, name="agent"),
    path("agents/<str:agent>/connect", views.agent_connect, name="connect"),
    path("agents/<str:agent>/capabilities", views.agent_capabilities, name="capabilities"),
    path("agents/<str:agent>/ws", views.agent_socket, name="agent-socket"),
    path("threads/", views.threads, name="threads"),
    path("threads/<uuid:key>/stream", views.thread_stream, name="stream"),
    path("threads/<uuid:key>/events", views.thread_events, name="events"),
    path("threads/<uuid:key>/snapshot", views.thread_snapshot, name="snapshot"),
    path("threads/<uuid:key>/runs/<uuid:run>/cancel", views.run_cancel, name="cancel"),
]
