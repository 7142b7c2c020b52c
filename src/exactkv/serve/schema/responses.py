"""OpenAI's responses."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from exactkv.serve.schema.base import Asked, Count, Json, MoreSampling, StreamOptions, Told
from exactkv.serve.schema.openai import GrammarFormat, JsonObjectFormat, RegexFormat, TextFormat


class InputText(Asked):
    type: Literal["input_text", "output_text", "text"]
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


class InputMessage(Asked):
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[InputText]
    id: str | None = None
    status: str | None = None
    phase: str | None = None


class InputCall(Asked):
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    id: str | None = None
    status: str | None = None
    namespace: str | None = None


class InputCallOutput(Asked):
    type: Literal["function_call_output"]
    call_id: str
    output: str | list[InputText]
    id: str | None = None
    status: str | None = None


class ReasoningText(Asked):
    type: Literal["reasoning_text", "summary_text"]
    text: str


class InputReasoning(Asked):
    type: Literal["reasoning"]
    id: str | None = None
    summary: list[ReasoningText] = Field(default_factory=list)
    content: list[ReasoningText] | None = None
    encrypted_content: str | None = None
    status: str | None = None


InputItem = InputMessage | InputCall | InputCallOutput | InputReasoning


class FunctionTool(Asked):
    type: Literal["function"]
    name: Annotated[str, Field(min_length=1, max_length=256)]
    description: str | None = None
    parameters: Json | None = None
    strict: bool | None = None


class NamedFunctionTool(Asked):
    type: Literal["function"]
    name: str


class FlatJsonSchema(Asked):
    type: Literal["json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: Json = Field(alias="schema")
    strict: bool | None = None


class TextSettings(Asked):
    format: (
        Annotated[
            TextFormat | JsonObjectFormat | FlatJsonSchema | GrammarFormat | RegexFormat, Field(discriminator="type")
        ]
        | None
    ) = None
    verbosity: str | None = None


class Reasoning(Asked):
    effort: str | None = Field(None, description="Reaches the chat template as reasoning_effort.")
    summary: str | None = Field(None, description="Not used: reasoning is told as it is.")
    generate_summary: str | None = None


class ResponsesRequest(MoreSampling):
    """Nothing is kept between requests, so ``input`` is the whole conversation."""

    model: str
    input: str | Annotated[list[InputItem], Field(min_length=1)]
    instructions: str | None = None
    max_output_tokens: Count | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    tools: list[FunctionTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedFunctionTool | None = None
    parallel_tool_calls: bool | None = None
    text: TextSettings | None = None
    reasoning: Reasoning | None = None
    include: list[str] | None = Field(None, description='"message.output_text.logprobs" tells log-probabilities.')
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    chat_template_kwargs: Json | None = None
    previous_response_id: None = Field(None, description="Nothing is kept: give the whole input.")
    conversation: None = Field(None, description="Nothing is kept: give the whole input.")
    background: Literal[False] | None = None
    truncation: Literal["disabled"] | None = None
    max_tool_calls: int | None = Field(None, description="Not used: it is of built-in tools, and there are none.")
    store: bool | None = Field(None, description="Not used: nothing is kept.")
    metadata: Json | None = Field(None, description="Told again.")
    service_tier: str | None = Field(None, description="Not used.")
    prompt_cache_key: str | None = Field(None, description="Not used; see cache_salt.")
    prompt_cache_retention: str | None = Field(None, description="Not used.")
    safety_identifier: str | None = Field(None, description="Not used.")
    user: str | None = Field(None, description="Not used.")


class CachedDetails(Told):
    cached_tokens: int


class ReasoningDetails(Told):
    reasoning_tokens: int = 0


class ResponsesUsage(Told):
    input_tokens: int
    input_tokens_details: CachedDetails
    output_tokens: int
    output_tokens_details: ReasoningDetails
    total_tokens: int


class ResponsesResponse(Told):
    """``output``: items of type "message", "reasoning" and "function_call", as OpenAI's API has them."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    model: str
    output: list[Json]
    error: Json | None = None
    incomplete_details: Json | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    metadata: Json = Field(default_factory=dict)
    parallel_tool_calls: bool
    previous_response_id: None = None
    reasoning: Json | None = None
    store: bool = False
    temperature: float
    text: Json
    tool_choice: str | Json
    tools: list[Json]
    top_logprobs: int = 0
    top_p: float
    truncation: Literal["disabled"] = "disabled"
    usage: ResponsesUsage | None = None
