"""What ends a run that asks for too much."""


class LimitExceeded(Exception):
    """A limit of the settings was hit; `code` is that of the RUN_ERROR."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
