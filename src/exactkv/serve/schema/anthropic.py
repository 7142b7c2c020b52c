"""Anthropic's messages."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from exactkv.serve.schema.base import MOST_STOPS, Asked, Count, Json, SamplingFields, StopText, Told


class TextBlock(Asked):
    type: Literal["text"]
    text: str
    cache_control: Json | None = Field(None, description="Not used: all is cached where it can be.")
    citations: list[Any] | None = None


class ThinkingBlock(Asked):
    type: Literal["thinking"]
    thinking: str
    signature: str = ""


class RedactedThinkingBlock(Asked):
    type: Literal["redacted_thinking"]
    data: str


class ToolUseBlock(Asked):
    type: Literal["tool_use"]
    id: str
    name: str
    input: Json
    cache_control: Json | None = None


class ToolResultBlock(Asked):
    type: Literal["tool_result"]
    tool_use_id: str
    content: str | list[TextBlock] | None = None
    is_error: bool | None = None
    cache_control: Json | None = None


Block = Annotated[
    TextBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock | ToolResultBlock, Field(discriminator="type")
]


class MessageParam(Asked):
    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class ToolParam(Asked):
    name: Annotated[str, Field(min_length=1, max_length=256)]
    description: str | None = None
    input_schema: Json
    type: Literal["custom"] | None = None
    cache_control: Json | None = None


class ToolChoice(Asked):
    type: Literal["auto", "any", "none", "tool"]
    name: str | None = None
    disable_parallel_tool_use: bool = False


class Thinking(Asked):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = Field(None, description="Not used.")
    display: str | None = None


class JsonOutput(Asked):
    type: Literal["json_schema"]
    schema_: Json = Field(alias="schema")


class OutputConfig(Asked):
    format: JsonOutput | None = None
    effort: str | None = Field(None, description="Not used.")


class CountRequest(Asked):
    model: str
    messages: Annotated[list[MessageParam], Field(min_length=1)]
    system: str | list[TextBlock] | None = None
    tools: list[ToolParam] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = Field(None, description="Reaches the chat template as enable_thinking.")
    output_config: OutputConfig | None = None
    cache_control: Json | None = None


class MessagesRequest(CountRequest, SamplingFields):
    max_tokens: Count
    stop_sequences: Annotated[list[StopText], Field(max_length=MOST_STOPS)] | None = None
    stream: bool | None = None
    metadata: Json | None = Field(None, description="Not used.")
    service_tier: str | None = Field(None, description="Not used.")
    context_management: Json | None = Field(None, description="Not used: the client's messages are taken as they are.")
    container: None = None
    inference_geo: str | None = None
    seed: int | None = Field(None, ge=-(1 << 63), lt=1 << 63)
    cache_salt: str | None = Field(None, max_length=1024)


class CountResponse(Told):
    input_tokens: int


class MessagesUsage(Told):
    """``input_tokens``: of the prompt, those that were computed; ``cache_read_input_tokens``: the others."""

    input_tokens: int
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int = 0
    output_tokens: int


class ToldBlock(Told):
    """``type``: "text", "thinking" or "tool_use", with its own fields."""

    type: Literal["text", "thinking", "tool_use"]
    text: str | None = None
    thinking: str | None = None
    signature: str | None = None
    id: str | None = None
    name: str | None = None
    input: Json | None = None


class MessagesResponse(Told):
    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[ToldBlock]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"] | None = None
    stop_sequence: str | None = None
    usage: MessagesUsage


class MessagesErrorBody(Told):
    type: str
    message: str


class MessagesError(Told):
    type: Literal["error"] = "error"
    error: MessagesErrorBody
