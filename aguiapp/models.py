"""The tables: threads, runs, every event of every run, and what must reach a running run."""

from __future__ import annotations

import secrets
import time
import uuid
from typing import ClassVar

from django.conf import settings
from django.db import models
from django.utils.translation import gettext_lazy as _

EPOCH_LETTERS = "abcdefghijklmnopqrstuvwxyz234567"


def new_key() -> uuid.UUID:
    """A UUID of version 7 (RFC 9562): random, and in the order of its minting."""
    value = (time.time_ns() // 1_000_000) << 80 | secrets.randbits(80)
    value = value & ~(0xF << 76) | 0x7 << 76
    return uuid.UUID(int=value & ~(0x3 << 62) | 0x2 << 62)


def new_epoch() -> str:
    """Six lower-case base32 characters: the history that a cursor belongs to."""
    return "".join(secrets.choice(EPOCH_LETTERS) for _ in range(6))


class Thread(models.Model):
    """One conversation, owned by a scope; its id from outside is unique only within that scope."""

    key = models.UUIDField(default=new_key, unique=True, editable=False)
    scope = models.CharField(max_length=128)
    thread_id = models.CharField(max_length=255)
    epoch = models.CharField(max_length=6, default=new_epoch, editable=False)
    title = models.CharField(max_length=255, blank=True)
    owner = models.ForeignKey(
        settings.AUTH_USER_MODEL,
        on_delete=models.SET_NULL,
        null=True,
        blank=True,
        related_name="agui_threads",
    )
    metadata = models.JSONField(default=dict, blank=True)
    created = models.DateTimeField(auto_now_add=True)
    updated = models.DateTimeField(auto_now=True, db_index=True)

    class Meta:
        verbose_name = _("thread")
        verbose_name_plural = _("threads")
        constraints: ClassVar = [
            models.UniqueConstraint("scope", "thread_id", name="aguiapp_thread_scope_id"),
        ]

    def __str__(self) -> str:
        return self.title or self.thread_id


class Run(models.Model):
    """One run of one agent; its counters stand here, so nobody counts events in SQL."""

    class Status(models.TextChoices):
        QUEUED = "queued", _("queued")
        RUNNING = "running", _("running")
        SUCCESS = "success", _("success")
        INTERRUPT = "interrupt", _("interrupt")
        CANCELLED = "cancelled", _("cancelled")
        ERROR = "error", _("error")

    class Kind(models.TextChoices):
        AGENT = "agent", _("agent")
        EDIT = "edit", _("edit")
        IMPORT = "import", _("import")
        BRANCH = "branch", _("branch")

    key = models.UUIDField(default=new_key, unique=True, editable=False)
    thread = models.ForeignKey(Thread, on_delete=models.PROTECT, related_name="runs")
    run_id = models.CharField(max_length=255)
    kind = models.CharField(max_length=8, choices=Kind, default=Kind.AGENT)
    agent = models.CharField(max_length=100)
    user = models.ForeignKey(
        settings.AUTH_USER_MODEL,
        on_delete=models.SET_NULL,
        null=True,
        blank=True,
        related_name="agui_runs",
    )
    #: Opaque id of who asked for the run, as its events name them.
    actor = models.CharField(max_length=64, blank=True)
    parent_run = models.CharField(max_length=255, blank=True)
    branched_from = models.ForeignKey(
        "self", on_delete=models.SET_NULL, null=True, blank=True, related_name="branches"
    )
    status = models.CharField(max_length=9, choices=Status, default=Status.RUNNING, db_index=True)
    #: Position before the run's first event; null while queued.
    offset = models.BigIntegerField(null=True)
    #: Highest seq. Exact once the run ended; while it runs, as of the last lease renewal.
    last_seq = models.BigIntegerField(default=0)

    #: The posted text with each message cut out; see `store.inputs`.
    input = models.TextField(blank=True)
    input_hash = models.CharField(max_length=64, blank=True)
    mode = models.CharField(max_length=16, blank=True)
    transport = models.CharField(max_length=16, blank=True)
    counts = models.JSONField(default=dict, blank=True)
    bytes = models.BigIntegerField(default=0)
    result = models.JSONField(null=True, blank=True)
    outcome = models.JSONField(null=True, blank=True)
    usage = models.JSONField(null=True, blank=True)
    error_code = models.CharField(max_length=64, blank=True)
    error_message = models.TextField(blank=True)
    #: Traceback or refused bytes; for staff.
    error_detail = models.TextField(blank=True)
    findings = models.JSONField(default=list, blank=True)
    #: SHA-256 of the folded state at the run's end; see `engine.history`.
    fold_hash = models.CharField(max_length=64, blank=True)

    queued_at = models.DateTimeField(auto_now_add=True, db_index=True)
    started_at = models.DateTimeField(null=True, blank=True)
    first_event_at = models.DateTimeField(null=True, blank=True)
    finished_at = models.DateTimeField(null=True, blank=True)

    #: host, pid, boot id and process start, separated by spaces.
    lease_owner = models.CharField(max_length=255, blank=True)
    lease_token = models.BigIntegerField(null=True)
    lease_expires = models.DateTimeField(null=True)
    pruned_to = models.BigIntegerField(default=0)

    class Meta:
        verbose_name = _("run")
        verbose_name_plural = _("runs")
        constraints: ClassVar = [
            models.UniqueConstraint("thread", "run_id", name="aguiapp_run_thread_id"),
            models.UniqueConstraint(
                fields=["thread"],
                condition=models.Q(status="running"),
                name="aguiapp_run_one_running",
            ),
        ]
        indexes: ClassVar = [
            models.Index("thread", "offset", name="aguiapp_run_thread_offset"),
            models.Index(
                fields=["lease_expires"],
                condition=models.Q(status="running"),
                name="aguiapp_run_lease",
            ),
            models.Index(
                fields=["thread"],
                condition=models.Q(status="queued"),
                name="aguiapp_run_queued",
            ),
        ]
        permissions: ClassVar = [
            ("view_run_payload", _("Can view the payload of runs")),
            ("export_run", _("Can export runs")),
        ]

    def __str__(self) -> str:
        return self.run_id

    @property
    def ended(self) -> bool:
        """Whether the run has its terminal event."""
        return self.status not in (self.Status.QUEUED, self.Status.RUNNING)


class RunEvent(models.Model):
    """One event as sent: only `store` writes it, nothing points at it, nothing counts it."""

    pk = models.CompositePrimaryKey("run_id", "seq")
    run = models.ForeignKey(
        Run,
        on_delete=models.DO_NOTHING,
        db_constraint=False,
        db_index=False,
        related_name="events",
    )
    seq = models.BigIntegerField()
    #: `protocol.TYPE_CODES`
    type = models.SmallIntegerField()
    #: The exact JSON text that was sent.
    payload = models.TextField()
    created = models.DateTimeField()

    class Meta:
        verbose_name = _("event")
        verbose_name_plural = _("events")

    def __str__(self) -> str:
        return f"{self.run_id}:{self.seq}"


class InputMessage(models.Model):
    """A message of a run's input, kept once per thread however often clients send it."""

    thread = models.ForeignKey(Thread, on_delete=models.PROTECT, related_name="input_messages")
    #: SHA-256 of the text.
    hash = models.CharField(max_length=64)
    payload = models.TextField()

    class Meta:
        verbose_name = _("input message")
        verbose_name_plural = _("input messages")
        constraints: ClassVar = [
            models.UniqueConstraint("thread", "hash", name="aguiapp_inputmessage_thread_hash"),
        ]

    def __str__(self) -> str:
        return self.hash[:12]


class Participant(models.Model):
    """A person with whom a thread is shared, and what that allows."""

    class Role(models.TextChoices):
        VIEWER = "viewer", _("viewer")
        MEMBER = "member", _("member")

    thread = models.ForeignKey(Thread, on_delete=models.CASCADE, related_name="participants")
    user = models.ForeignKey(
        settings.AUTH_USER_MODEL, on_delete=models.CASCADE, related_name="agui_participations"
    )
    role = models.CharField(max_length=8, choices=Role, default=Role.VIEWER)
    created = models.DateTimeField(auto_now_add=True)

    class Meta:
        verbose_name = _("participant")
        verbose_name_plural = _("participants")
        constraints: ClassVar = [
            models.UniqueConstraint("thread", "user", name="aguiapp_participant_thread_user"),
        ]

    def __str__(self) -> str:
        return f"{self.user} ({self.role})"


class Watcher(models.Model):
    """How many connections of people who may speak one process holds on a thread."""

    thread = models.ForeignKey(Thread, on_delete=models.CASCADE, related_name="watchers")
    #: As `Run.lease_owner` names it.
    process = models.CharField(max_length=255)
    count = models.PositiveIntegerField()
    expires = models.DateTimeField(db_index=True)

    class Meta:
        verbose_name = _("watcher")
        verbose_name_plural = _("watchers")
        constraints: ClassVar = [
            models.UniqueConstraint("thread", "process", name="aguiapp_watcher_thread_process"),
        ]

    def __str__(self) -> str:
        return f"{self.process}: {self.count}"


class Command(models.Model):
    """What must reach a running run from any process: a row first, a hint second."""

    class Kind(models.TextChoices):
        CANCEL = "cancel", _("cancel")
        PATCH = "patch", _("patch")
        TOOL = "tool", _("tool")
        RESUME = "resume", _("resume")
        SAY = "say", _("say")

    class State(models.TextChoices):
        PENDING = "pending", _("pending")
        DONE = "done", _("done")
        REJECTED = "rejected", _("rejected")

    thread = models.ForeignKey(Thread, on_delete=models.CASCADE, related_name="commands")
    run = models.ForeignKey(
        Run, on_delete=models.CASCADE, null=True, blank=True, related_name="commands"
    )
    kind = models.CharField(max_length=8, choices=Kind)
    payload = models.TextField(blank=True)
    actor = models.CharField(max_length=64, blank=True)
    state = models.CharField(max_length=8, choices=State, default=State.PENDING)
    position = models.BigIntegerField(null=True, blank=True)
    created = models.DateTimeField(auto_now_add=True)

    class Meta:
        verbose_name = _("command")
        verbose_name_plural = _("commands")
        indexes: ClassVar = [
            models.Index(
                fields=["run"], condition=models.Q(state="pending"), name="aguiapp_command_pending"
            ),
        ]

    def __str__(self) -> str:
        return f"{self.kind} {self.run_id}"
