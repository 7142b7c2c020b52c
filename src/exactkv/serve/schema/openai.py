"""OpenAI's chat completions, completions, models and tokenizing."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from exactkv.serve.schema.base import Asked, Count, Json, MoreSampling, Stops, StreamOptions, Token, Told

MOST_CHOICES = 128


class TextPart(Asked):
    type: Literal["text"]
    text: str
    cache_control: Json | None = None


class Function(Asked):
    name: Annotated[str, Field(min_length=1, max_length=256)]
    description: str | None = None
    parameters: Json | None = None
    strict: bool | None = None


class Tool(Asked):
    type: Literal["function"]
    function: Function


class NamedFunction(Asked):
    name: str


class NamedTool(Asked):
    type: Literal["function"]
    function: NamedFunction


class CalledFunction(Asked):
    name: str
    arguments: str


class ToolCall(Asked):
    id: str
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None


class Message(Asked):
    """Of a chat. Fields beside role and content reach the model where its chat template reads them."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    annotations: list[Any] | None = None
    audio: None = None
    function_call: None = None


class JsonSchema(Asked):
    name: str | None = None
    description: str | None = None
    schema_: Json = Field(alias="schema")
    strict: bool | None = None


class TextFormat(Asked):
    type: Literal["text"]


class JsonObjectFormat(Asked):
    type: Literal["json_object"]


class JsonSchemaFormat(Asked):
    type: Literal["json_schema"]
    json_schema: JsonSchema


class GrammarFormat(Asked):
    """A grammar in Lark's notation."""

    type: Literal["grammar"]
    grammar: Annotated[str, Field(min_length=1)]


class RegexFormat(Asked):
    type: Literal["regex"]
    regex: Annotated[str, Field(min_length=1)]


ResponseFormat = Annotated[
    TextFormat | JsonObjectFormat | JsonSchemaFormat | GrammarFormat | RegexFormat, Field(discriminator="type")
]


class OpenAIRequest(MoreSampling):
    """What both kinds of completion take. What has no meaning here is taken and not used."""

    model: str
    n: Annotated[int, Field(ge=1, le=MOST_CHOICES)] | None = None
    max_tokens: int | None = None
    stop: Stops | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = Field(None, description="Not used.")


class ChatRequest(OpenAIRequest):
    messages: Annotated[list[Message], Field(min_length=1)]
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    response_format: ResponseFormat | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: Json | None = Field(None, description="Variables for the chat template.")
    add_generation_prompt: bool = True
    continue_final_message: bool = Field(False, description="Go on with the last message instead of answering it.")
    reasoning_effort: str | None = Field(None, description="Reaches the chat template.")
    metadata: Json | None = Field(None, description="Not used.")
    store: bool | None = Field(None, description="Not used: nothing is kept.")
    service_tier: str | None = Field(None, description="Not used.")
    prompt_cache_key: str | None = Field(None, description="Not used; the cache needs no key. See cache_salt.")
    prompt_cache_retention: str | None = Field(None, description="Not used.")
    safety_identifier: str | None = Field(None, description="Not used.")
    verbosity: str | None = Field(None, description="Reaches the chat template.")
    modalities: list[Literal["text"]] | None = None
    timings: bool = Field(False, description="Tell what each reply cost, and what its cache held; ours alone.")


class CompletionRequest(OpenAIRequest):
    prompt: str | list[str] | list[Token] | list[list[Token]] = Field(
        description="A text, token ids, or several of either."
    )
    max_tokens: Annotated[int, Field(ge=0)] | None = Field(None, description="Default: 16.")
    echo: bool | None = Field(None, description="Tell the prompt too; with logprobs also how probable it was.")
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    best_of: int | None = None
    suffix: None = None


class TokenizeRequest(Asked):
    """Of a text, or of messages as the chat template puts them."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1)] | None = None
    tools: list[Tool] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    return_token_strs: bool = False
    chat_template_kwargs: Json | None = None


class DetokenizeRequest(Asked):
    model: str | None = None
    tokens: list[Token]
    skip_special_tokens: bool = False


# Responses.


class PromptDetails(Told):
    cached_tokens: int


class Usage(Told):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails


class TopLogprob(Told):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Told):
    content: list[TokenLogprob]
    refusal: None = None


class ToldFunction(Told):
    name: str | None = None
    arguments: str = ""


class ToldToolCall(Told):
    index: int | None = None
    id: str | None = None
    type: Literal["function"] | None = "function"
    function: ToldFunction


class ToldMessage(Told):
    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToldToolCall] | None = None


class ChatChoice(Told):
    index: int
    message: ToldMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None


class ChatDelta(Told):
    index: int
    delta: ToldMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None


class Span(Told):
    """Positions that the layers of one kind keep: ``start`` <= p < ``end``. Of recurrent ones: the states'."""

    kind: str
    layers: int
    start: int
    end: int


class Timings(Told):
    """Seconds of one reply; ``first_token_seconds`` from its coming, waiting too; ``tokens_per_second`` after the
    first. Of the prompt's tokens some were cached, the others fed."""

    prompt_tokens: int
    cached_tokens: int
    fed_tokens: int
    generated_tokens: int
    first_token_seconds: float | None
    prefill_seconds: float
    decode_seconds: float
    tokens_per_second: float | None
    cache: list[Span]


class ChatResponse(Told):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    timings: list[Timings] | None = Field(None, description="One a choice, where asked for.")


class ChatChunk(Told):
    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatDelta]
    usage: Usage | None = None
    timings: list[Timings] | None = Field(None, description="With the last, where asked for.")


class TextLogprobs(Told):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class TextChoice(Told):
    index: int
    text: str
    logprobs: TextLogprobs | None = None
    finish_reason: str | None = None


class CompletionResponse(Told):
    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[TextChoice]
    usage: Usage | None = None


class ModelCard(Told):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "exactkv"
    max_model_len: int


class ModelList(Told):
    object: Literal["list"] = "list"
    data: list[ModelCard]


class TokenizeResponse(Told):
    tokens: list[int]
    count: int
    max_model_len: int
    token_strs: list[str] | None = None


class DetokenizeResponse(Told):
    prompt: str


class ErrorBody(Told):
    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorResponse(Told):
    error: ErrorBody
