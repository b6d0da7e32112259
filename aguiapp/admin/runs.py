"""The admin of runs: the list, the form, the Replay page and the export."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any, Concatenate

from django.contrib import admin
from django.core.exceptions import PermissionDenied
from django.http import Http404, HttpRequest, HttpResponse
from django.http.response import HttpResponseBase
from django.template.defaultfilters import filesizeformat
from django.template.response import TemplateResponse
from django.urls import URLPattern, path, reverse
from django.utils import formats, timezone
from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.utils.translation import gettext, gettext_lazy as _
from django.views.decorators.http import require_safe

from aguiapp import errors, store
from aguiapp.admin import cells, export, replay
from aguiapp.admin.readonly import ReadOnly
from aguiapp.models import Run

if TYPE_CHECKING:
    from django.db.models import QuerySet

    RunModelAdmin = admin.ModelAdmin[Run]
else:
    RunModelAdmin = admin.ModelAdmin

#: So much of an id tells the rows of a page apart.
SHOWN_ID = 8
#: The agents of this many latest runs are offered as filters: a constant cost, at any size.
RECENT_RUNS = 1000

PAYLOAD_PERMISSION = "aguiapp.view_run_payload"
EXPORT_PERMISSION = "aguiapp.export_run"
#: A group of the form that holds one of these needs PAYLOAD_PERMISSION.
PAYLOAD_FIELDS = frozenset(
    {"input_shown", "result_shown", "outcome_shown", "findings_shown", "error_detail_shown"}
)


class AgentFilter(admin.SimpleListFilter):
    """By agent, without a DISTINCT over the whole table."""

    title = _("agent")
    parameter_name = "agent"

    def lookups(
        self, request: HttpRequest, model_admin: admin.ModelAdmin[Any]
    ) -> list[tuple[str, str]]:
        """The agents of the latest runs, and the one asked for."""
        recent = Run.objects.order_by("-pk").values_list("agent", flat=True)[:RECENT_RUNS]
        asked = request.GET.get(self.parameter_name)
        return [(agent, agent) for agent in sorted({*recent, *([asked] if asked else [])})]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Run]) -> QuerySet[Run]:
        """The runs of the chosen agent."""
        return queryset.filter(agent=self.value()) if self.value() else queryset


def shortened(text: str) -> SafeString:
    """The beginning of an id; the whole of it for who points there."""
    whole = cells.printable(text)
    shown = whole if len(whole) <= SHOWN_ID else f"{whole[:SHOWN_ID]}…"
    return format_html('<span class="nowrap" title="{}">{}</span>', whole, shown)


def json_page(
    view: Callable[Concatenate[RunAdmin, HttpRequest, int, ...], dict[str, Any]],
) -> Callable[..., HttpResponse]:
    """Answer with the view's JSON, or with the error's."""

    @wraps(view)
    def answering(self: RunAdmin, request: HttpRequest, pk: int) -> HttpResponse:
        try:
            return replay.answer(view(self, request, pk))
        except errors.AguiError as error:
            return replay.refusal(error)
        except RecursionError:
            # Patches can build a state deeper than any JSON encoder goes.
            return replay.refusal(errors.AguiError("This is nested too deeply to be shown."))

    return answering


@admin.register(Run)
class RunAdmin(ReadOnly, RunModelAdmin):
    """Runs, newest first, with Replay and export."""

    list_display = (
        "status_badge",
        "agent",
        "run_short",
        "thread_short",
        "replay_link",
        "started",
        "duration",
        "user",
        "last_seq_shown",
        "size",
    )
    list_display_links = ("run_short",)
    list_filter = ("status", AgentFilter, "kind", ("queued_at", admin.DateFieldListFilter))
    list_select_related = ("thread", "user")
    list_per_page = 50
    ordering = ("-pk",)
    # Only what an index can sort.
    sortable_by = ("started", "status_badge")
    search_fields = (
        "run_id__startswith",
        "thread__thread_id__startswith",
        "error_code__startswith",
    )
    search_help_text = _("Run id, thread id or error code (their beginning)")
    show_full_result_count = False
    readonly_fields = (
        "status_badge",
        "size",
        "duration",
        "last_seq_shown",
        "counts_shown",
        "usage_shown",
        "input_shown",
        "result_shown",
        "outcome_shown",
        "findings_shown",
        "error_detail_shown",
    )
    fieldsets = (
        (None, {"fields": ("run_id", "key", "thread", "kind", "agent", "user")}),
        (_("Status"), {"fields": ("status_badge", "error_message")}),
        (_("Size"), {"fields": ("last_seq_shown", "size", "counts_shown", "usage_shown")}),
        (
            _("Times"),
            {"fields": ("queued_at", "started_at", "first_event_at", "finished_at", "duration")},
        ),
        (_("Result"), {"fields": ("outcome_shown", "result_shown", "findings_shown")}),
        (_("Input"), {"fields": ("input_shown",)}),
        (_("Error detail"), {"fields": ("error_detail_shown",)}),
        (
            _("Place"),
            {
                "fields": (
                    "offset",
                    "actor",
                    "parent_run",
                    "branched_from",
                    "mode",
                    "transport",
                ),
                "classes": ("collapse",),
            },
        ),
        (
            _("Internals"),
            {
                "fields": (
                    "lease_owner",
                    "lease_token",
                    "lease_expires",
                    "pruned_to",
                    "input_hash",
                    "fold_hash",
                ),
                "classes": ("collapse",),
            },
        ),
    )

    class Media:
        css = {"all": ("aguiapp/replay.css",)}

    # -- permissions ----------------------------------------------------------------------------

    def has_payload_permission(self, request: HttpRequest) -> bool:
        """Whether what people and agents wrote may be seen."""
        return request.user.has_perm(PAYLOAD_PERMISSION)

    def has_export_permission(self, request: HttpRequest) -> bool:
        """Whether the stored events may be taken away."""
        return self.has_payload_permission(request) and request.user.has_perm(EXPORT_PERMISSION)

    def allowed_run(self, request: HttpRequest, pk: int, *, allowed: bool) -> Run:
        """The run, for who may see runs and has the right that the page asks for."""
        if not (allowed and self.has_view_permission(request)):
            raise PermissionDenied
        run = self.get_object(request, str(pk))
        if run is None:
            raise Http404(gettext("There is no such run."))
        if not self.has_view_permission(request, run):
            raise PermissionDenied
        return run

    # -- pages ----------------------------------------------------------------------------------

    def get_urls(self) -> list[URLPattern]:
        """The pages of one run, ahead of the admin's own."""
        pages = (
            ("replay/", self.replay_view, "replay"),
            ("replay/events/", self.events_view, "replay_events"),
            ("replay/at/", self.at_view, "replay_at"),
            ("export/", self.export_view, "export"),
        )
        own = [
            path(
                f"<int:pk>/{route}",
                self.admin_site.admin_view(require_safe(view)),
                name=f"aguiapp_run_{name}",
            )
            for route, view, name in pages
        ]
        return own + super().get_urls()

    def get_list_display(self, request: HttpRequest) -> tuple[Any, ...]:
        """The columns; Replay only for those who may see it."""
        columns = super().get_list_display(request)
        if self.has_payload_permission(request):
            return tuple(columns)
        return tuple(column for column in columns if column != "replay_link")

    def get_fieldsets(self, request: HttpRequest, obj: Run | None = None) -> Any:
        """The groups; what was said only for those who may see it."""
        groups = super().get_fieldsets(request, obj)
        if self.has_payload_permission(request):
            return groups
        return [group for group in groups if PAYLOAD_FIELDS.isdisjoint(group[1]["fields"])]

    def change_view(
        self,
        request: HttpRequest,
        object_id: str,
        form_url: str = "",
        extra_context: dict[str, Any] | None = None,
    ) -> HttpResponse:
        """The form, with the links that the user may follow."""
        context = {
            "can_replay": self.has_payload_permission(request),
            "can_export": self.has_export_permission(request),
            **(extra_context or {}),
        }
        return super().change_view(request, object_id, form_url, context)

    def replay_view(self, request: HttpRequest, pk: int) -> HttpResponseBase:
        """The Replay page."""
        run = self.allowed_run(request, pk, allowed=self.has_payload_permission(request))
        context = {
            **self.admin_site.each_context(request),
            **replay.page(request, run, self.admin_site.name),
            "opts": self.opts,
            "title": gettext("Replay of %(run)s") % {"run": run},
            "is_nav_sidebar_enabled": False,
            "can_export": self.has_export_permission(request),
        }
        request.current_app = self.admin_site.name
        return TemplateResponse(request, "admin/aguiapp/run/replay.html", context)

    @json_page
    def events_view(self, request: HttpRequest, pk: int) -> dict[str, Any]:
        """A page of the event list."""
        run = self.allowed_run(request, pk, allowed=self.has_payload_permission(request))
        return replay.events(request, run)

    @json_page
    def at_view(self, request: HttpRequest, pk: int) -> dict[str, Any]:
        """The fold at one event."""
        run = self.allowed_run(request, pk, allowed=self.has_payload_permission(request))
        return replay.at(request, run)

    def export_view(self, request: HttpRequest, pk: int) -> HttpResponseBase:
        """The stored events as a file."""
        run = self.allowed_run(request, pk, allowed=self.has_export_permission(request))
        return export.response(request, run)

    # -- cells ----------------------------------------------------------------------------------

    @admin.display(description=_("run"))
    def run_short(self, run: Run) -> SafeString:
        """The beginning of the run's id."""
        return shortened(run.run_id)

    @admin.display(description=_("thread"))
    def thread_short(self, run: Run) -> SafeString:
        """The beginning of the thread's id."""
        return shortened(run.thread.thread_id)

    @admin.display(description=_("replay"))
    def replay_link(self, run: Run) -> SafeString:
        """The way to the Replay page."""
        name = self.admin_site.name
        address = reverse("admin:aguiapp_run_replay", args=[run.pk], current_app=name)
        return format_html('<a href="{}">{}</a>', address, gettext("Replay"))

    @admin.display(description=_("status"), ordering="status")
    def status_badge(self, run: Run) -> SafeString:
        """The status, with the error's code."""
        return cells.badge(run.status, run.error_code)

    @admin.display(description=_("events"))
    def last_seq_shown(self, run: Run) -> int:
        """How many events; as of the last renewal while the run is active."""
        return run.last_seq

    @admin.display(description=_("size"))
    def size(self, run: Run) -> str:
        """The bytes of its events."""
        return filesizeformat(run.bytes)

    # Sorted by its neighbour in time that has an index.
    @admin.display(description=_("started"), ordering="queued_at")
    def started(self, run: Run) -> str:
        """When it left the queue."""
        if run.started_at is None:
            return "-"
        aware = timezone.is_aware(run.started_at)
        local = timezone.localtime(run.started_at) if aware else run.started_at
        return formats.date_format(local, "SHORT_DATETIME_FORMAT")

    @admin.display(description=_("duration"))
    def duration(self, run: Run) -> str:
        """From its start to its end, or until now."""
        if run.started_at is None:
            return "-"
        return cells.duration((run.finished_at or timezone.now()) - run.started_at)

    @admin.display(description=_("events by type"))
    def counts_shown(self, run: Run) -> SafeString | str:
        """How many events of each type."""
        return cells.json_block(run.counts)

    @admin.display(description=_("usage"))
    def usage_shown(self, run: Run) -> SafeString | str:
        """What the agent says it used."""
        return cells.json_block(run.usage)

    @admin.display(description=_("input"))
    def input_shown(self, run: Run) -> SafeString | str:
        """The posted text, its messages put back."""
        return cells.block(store.rebuild_input(run) if run.input else "")

    @admin.display(description=_("result"))
    def result_shown(self, run: Run) -> SafeString | str:
        """The result that the agent gave."""
        return cells.json_block(run.result)

    @admin.display(description=_("outcome"))
    def outcome_shown(self, run: Run) -> SafeString | str:
        """The outcome of the terminal event."""
        return cells.json_block(run.outcome)

    @admin.display(description=_("findings"))
    def findings_shown(self, run: Run) -> SafeString | str:
        """What was wrong and was noted."""
        return cells.json_block(run.findings)

    @admin.display(description=_("error detail"))
    def error_detail_shown(self, run: Run) -> SafeString | str:
        """The traceback, or the bytes that were refused."""
        return cells.block(run.error_detail)
