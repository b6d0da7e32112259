"""One error family: every refusal has a stable code, an HTTP status and a sentence for people."""

from __future__ import annotations

from typing import Any


class AguiError(Exception):
    """The server could not do this."""

    code = "internal"
    status = 500

    def __init__(
        self, message: str | None = None, *, code: str | None = None, details: Any = None
    ) -> None:
        self.message = message or (type(self).__doc__ or "").strip()
        self.code = code or type(self).code
        self.details = details
        super().__init__(self.message)

    def as_dict(self) -> dict[str, Any]:
        """The body of every error response: ``{"error": {"code", "message", "details"}}``."""
        return {"error": {"code": self.code, "message": self.message, "details": self.details}}


class Unparsable(AguiError):
    """The request could not be parsed."""

    code, status = "unparsable", 400


class BadParameter(AguiError):
    """A query parameter is not usable."""

    code, status = "bad_parameter", 400


class BadCursor(AguiError):
    """The cursor is not of the form <epoch>-<position>."""

    code, status = "cursor_malformed", 400


class Unauthenticated(AguiError):
    """Sign in, or send a bearer token."""

    code, status = "unauthenticated", 401


class Forbidden(AguiError):
    """You may not do this here."""

    code, status = "forbidden", 403


class CsrfFailed(AguiError):
    """The CSRF check failed: send the token, from a trusted origin."""

    code, status = "csrf_failed", 403


class NotFound(AguiError):
    """There is no such thing here."""

    code, status = "not_found", 404


class MethodNotAllowed(AguiError):
    """This address does not take that method."""

    code, status = "method_not_allowed", 405


class Conflict(AguiError):
    """This clashes with what is stored."""

    code, status = "conflict", 409


class ThreadBusy(Conflict):
    """A run is already active on this thread."""

    code = "thread_busy"


class QueueFull(Conflict):
    """Too many turns wait on this thread already."""

    code = "queue_full"


class RunIdTaken(Conflict):
    """This runId was used on this thread with another input."""

    code = "run_id_taken"


class InterruptsOpen(Conflict):
    """The thread waits for answers to its interrupts: send `resume` for each of them."""

    code = "interrupts_open"


class StaleHistory(Conflict):
    """The thread moved on since the state this edit is based on."""

    code = "stale_history"


class CursorForeign(Conflict):
    """The cursor belongs to another history, or lies in the future: take a new snapshot."""

    code = "cursor_foreign"


class TooLarge(AguiError):
    """The request body is larger than the limit."""

    code, status = "too_large", 413


class UnsupportedMediaType(AguiError):
    """Send the body as application/json."""

    code, status = "unsupported_media_type", 415


class InvalidInput(AguiError):
    """The input breaks the contract: see details for every place."""

    code, status = "invalid_input", 422


class NeedsAsgi(AguiError):
    """Streams need an ASGI server (Daphne, uvicorn); this one is WSGI."""

    code, status = "needs_asgi", 501


class AgentNotReady(AguiError):
    """The agent cannot take a run at the moment."""

    code, status = "agent_not_ready", 503


class StoreUnavailable(AguiError):
    """The database is away, or what is asked for is locked: try again in a moment."""

    code, status = "store_unavailable", 503


class Draining(AguiError):
    """The server is shutting down: try again in a moment."""

    code, status = "draining", 503


class Fenced(AguiError):
    """This process no longer holds the run: another one ended it."""

    code = "fenced"


class StreamAborted(Exception):
    """The stream ended before its run did: the connection must be cut, never finished."""


class StreamRefused(StreamAborted):
    """The reader may not read on: `error` is what a new request would be answered."""

    def __init__(self, error: AguiError) -> None:
        super().__init__(error.code)
        self.error = error


class RunError(Exception):
    """What an agent raises to tell people why it stopped; message and code reach the browser."""

    def __init__(self, message: str, *, code: str = "agent_error") -> None:
        # Text of Django is often lazy, and what is stored must be plain.
        self.message = str(message)
        self.code = str(code)
        super().__init__(self.message)


#: Codes of RUN_ERROR events that the server writes, with what each means.
RUN_ERROR_CODES = {
    "agent_error": "The agent stopped with a message of its own (aguiapp.RunError).",
    "agent_failed": "The agent raised an exception; the traceback is on the run, for staff.",
    "incomplete": "The agent ended without the terminal event it owed, or left items open.",
    "protocol_violation": "The agent sent an event that AG-UI does not allow; the rule is named.",
    "event_too_large": "One event was larger than EVENT_BYTES.",
    "run_too_large": "The run wrote more than RUN_EVENTS events or RUN_BYTES bytes.",
    "state_too_large": "The state grew beyond STATE_BYTES.",
    "run_timeout": "The run took longer than RUN_SECONDS.",
    "idle_timeout": "The agent sent no event for IDLE_SECONDS.",
    "stale_history": "The thread moved on before the edit's turn came; nothing was edited.",
    "forbidden": "Who asked may not speak on the thread any more; the turn was not heard.",
    "agent_not_ready": "The agent could not take the run when its turn came.",
    "orphaned": "The process that drove the run died; another one ended it.",
    "shutdown": "The server was shut down while the run was active.",
    "store_failed": "The event could not be stored, so the run was stopped.",
}
