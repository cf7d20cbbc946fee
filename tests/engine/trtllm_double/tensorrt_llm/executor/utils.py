"""The one error type of requests."""


class RequestError(RuntimeError):
    """A request was refused."""
