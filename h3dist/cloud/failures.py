"""What can go wrong with a rented machine, each with the exit code that `runpod/pod.py` ends with."""

from h3dist.errors import H3Error


class CloudError(H3Error):
    """The cloud's API, the pod, or the way to it failed."""

    exit_code = 9
    http_status = 502


class KeyRefused(CloudError):
    """The API key is missing, unreadable, or not accepted."""


class Refused(CloudError):
    """The API answered, and the answer is no.

    `status` is the HTTP code; `body` the start of what came with it, for the message.
    """

    def __init__(self, message: str, status: int, body: str) -> None:
        super().__init__(message)
        self.status = status
        self.body = body


class NotSent(CloudError):
    """Nothing can have happened: no connection, or too many requests. `wait`: seconds the server asks for."""

    def __init__(self, message: str, wait: float = 0.0) -> None:
        super().__init__(message)
        self.wait = wait


class Unclear(CloudError):
    """The answer does not say whether the thing was done: a 5xx, a timeout, or broken JSON."""


class NoCapacity(CloudError):
    """No machine of any kind that was allowed could be had."""


class PodFailed(CloudError):
    """The pod never got ready, or left on its own before the work was done."""


class PodLost(PodFailed):
    """The pod was working and is gone: taken back by its owner, or stopped from elsewhere."""


class ConnectionLost(CloudError):
    """The pod is still rented, but no longer answers over SSH."""


class LimitReached(CloudError):
    """The budget or the deadline ended the rental."""

    exit_code = 10


class RunFailed(CloudError):
    """The command ran on the pod and failed; its exit code is passed on."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.exit_code = code if 0 < code < 256 else 1  # type: ignore[misc]


class Stopped(BaseException):
    """A signal asked us to stop. Not an Exception, so that no handler on the way swallows it."""

    def __init__(self, signum: int) -> None:
        super().__init__(signum)
        self.signum = signum
        self.exit_code = 128 + signum
