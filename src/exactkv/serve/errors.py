"""What a request is told when it is not answered, in the words of the API that it speaks."""

from __future__ import annotations

from typing import Any

from exactkv.errors import InputError

OPENAI_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error", 500: "server_error",
                503: "server_error"}  # fmt: skip
ANTHROPIC_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error",
                   413: "request_too_large", 429: "rate_limit_error", 500: "api_error",
                   503: "overloaded_error"}  # fmt: skip


class Refusal(Exception):
    """A request is not answered. ``status``: of HTTP; ``param``: the field that is wrong, if one is; ``code``: a word
    for programs; ``retry_after``: seconds after which it may be tried again."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ):
        super().__init__(message)
        self.status, self.message, self.param, self.code, self.retry_after = status, message, param, code, retry_after

    @property
    def headers(self) -> dict[str, str]:
        """Of the response."""
        headers = {} if self.retry_after is None else {"retry-after": str(self.retry_after)}
        return headers | ({"www-authenticate": "Bearer"} if self.status == 401 else {})

    def body(self, anthropic: bool) -> dict[str, Any]:
        """The error as OpenAI's API or Anthropic's tells it."""
        if anthropic:
            kind = ANTHROPIC_TYPES.get(self.status, "invalid_request_error")
            return {"type": "error", "error": {"type": kind, "message": self.message}}
        kind = OPENAI_TYPES.get(self.status, "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def is_anthropic(path: str) -> bool:
    """Whether a path is one of Anthropic's API."""
    return path == "/v1/messages" or path.startswith("/v1/messages/")


def as_refusal(error: Exception) -> Refusal:
    """What an error tells whoever asked. What is not known to be their doing is only logged."""
    if isinstance(error, Refusal):
        return error
    if isinstance(error, InputError):
        return Refusal(400, str(error))
    return Refusal(500, "the server failed at this request; its log has the reason")
