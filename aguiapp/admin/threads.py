"""The admin of threads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from django.contrib import admin
from django.contrib.auth import get_user_model
from django.db.models import Count, OuterRef, QuerySet, Subquery
from django.db.models.functions import Coalesce
from django.http import HttpRequest
from django.urls import reverse
from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.utils.translation import gettext, gettext_lazy as _

from aguiapp.admin import cells
from aguiapp.admin.readonly import ReadOnly
from aguiapp.admin.runs import shortened
from aguiapp.models import Participant, Run, Thread

if TYPE_CHECKING:
    ThreadModelAdmin = admin.ModelAdmin[Thread]
    ParticipantTabularInline = admin.TabularInline[Participant, Thread]
else:
    ThreadModelAdmin = admin.ModelAdmin
    ParticipantTabularInline = admin.TabularInline


class ParticipantInline(ReadOnly, ParticipantTabularInline):
    """With whom the thread is shared."""

    model = Participant
    extra = 0
    fields = ("user", "role", "created")
    readonly_fields = fields

    def get_queryset(self, request: HttpRequest) -> QuerySet[Participant]:
        """The participants, each with its user."""
        return super().get_queryset(request).select_related("user")


@admin.register(Thread)
class ThreadAdmin(ReadOnly, ThreadModelAdmin):
    """Threads, latest activity first, each with the way to its runs."""

    list_display = ("name", "owner", "runs", "last_status", "updated", "scope")
    list_display_links = ("name",)
    list_filter = (("updated", admin.DateFieldListFilter),)
    list_select_related = ("owner",)
    list_per_page = 50
    ordering = ("-updated", "-pk")
    # Only what an index can sort.
    sortable_by = ("updated",)
    show_full_result_count = False
    search_help_text = _("Thread id or owner (their beginning), or words of the title")
    fieldsets = (
        (None, {"fields": ("title", "thread_id", "key", "scope", "owner", "runs")}),
        (_("Times"), {"fields": ("created", "updated")}),
        (_("More"), {"fields": ("epoch", "metadata_shown")}),
    )
    readonly_fields = ("runs", "metadata_shown")
    inlines = (ParticipantInline,)

    class Media:
        css = {"all": ("aguiapp/replay.css",)}

    def get_queryset(self, request: HttpRequest) -> QuerySet[Thread]:
        """The threads with two facts of their runs, both by the runs' index on the thread."""
        runs = Run.objects.filter(thread=OuterRef("pk")).order_by()
        counted = runs.values("thread").annotate(count=Count("pk")).values("count")
        return (
            super()
            .get_queryset(request)
            .annotate(
                run_count=Coalesce(Subquery(counted), 0),
                run_status=Subquery(runs.order_by("-pk").values("status")[:1]),
            )
        )

    def get_search_fields(self, request: HttpRequest) -> tuple[str, ...]:
        """Beginnings of the ids and names, and the title."""
        owner = f"owner__{get_user_model().USERNAME_FIELD}__startswith"
        return ("thread_id__startswith", "title", owner)

    @admin.display(description=_("thread"))
    def name(self, thread: Thread) -> SafeString:
        """The title, else the beginning of the id; the whole id for who points there."""
        if not thread.title:
            return shortened(thread.thread_id)
        title = cells.printable(thread.title)
        return format_html('<span title="{}">{}</span>', cells.printable(thread.thread_id), title)

    @admin.display(description=_("runs"))
    def runs(self, thread: Any) -> SafeString:
        """How many runs, linked to their list."""
        address = reverse("admin:aguiapp_run_changelist", current_app=self.admin_site.name)
        return format_html(
            '<a href="{}?thread__id__exact={}">{}</a>', address, thread.pk, thread.run_count
        )

    @admin.display(description=_("last run"))
    def last_status(self, thread: Any) -> SafeString | str:
        """How the latest run stands."""
        return cells.badge(thread.run_status) if thread.run_status else gettext("no run")

    @admin.display(description=_("metadata"))
    def metadata_shown(self, thread: Thread) -> SafeString | str:
        """What the host noted about the thread."""
        return cells.json_block(thread.metadata)
