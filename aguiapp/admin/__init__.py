"""The admin of threads and runs; importing it registers both."""

from aguiapp.admin.runs import RunAdmin
from aguiapp.admin.threads import ThreadAdmin

__all__ = ["RunAdmin", "ThreadAdmin"]
