"""What chat completions, completions and responses share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from exactkv.generation.sampling import Logprobs
from exactkv.models.model import Model
from exactkv.serve.errors import Refusal
from exactkv.serve.replies import Replies
from exactkv.serve.schema import openai as schema
from exactkv.serve.schema import responses
from exactkv.serve.structure import Form
from exactkv.serve.texts import TextMaker, parsed_arguments
from exactkv.serve.tokens import finite, token_bytes, token_text


def usage(replies: Replies, count: int) -> schema.Usage:
    """What a call's texts cost so far; a prompt with ``count`` replies counts once."""
    prompt = sum(len(text.prompt) for text in replies.call.texts[::count])
    made = sum(replies.generated)
    return schema.Usage(
        prompt_tokens=prompt, completion_tokens=made, total_tokens=prompt + made,
        prompt_tokens_details=schema.PromptDetails(cached_tokens=sum(replies.cached[::count])),
    )  # fmt: skip


def told_logprobs(model: Model, logprobs: Sequence[Logprobs], top: int) -> list[schema.TokenLogprob]:
    """One a token, with the ``top`` most probable in its place."""

    def told(token: int, logprob: float) -> dict[str, Any]:
        return {"token": token_text(model, token), "logprob": finite(logprob), "bytes": list(token_bytes(model, token))}

    return [
        schema.TokenLogprob(
            **told(at.token, at.logprob),
            top_logprobs=[schema.TopLogprob(**told(*pair)) for pair in at.top_logprobs[:top]],
        )
        for at in logprobs
    ]


Format = schema.ResponseFormat | responses.FlatJsonSchema | None
Choice = str | schema.NamedTool | responses.NamedFunctionTool | None


def form_of(wanted: Format, tools: Sequence[dict[str, Any]], choice: Choice, parallel: bool | None) -> Form:
    """What a request says of its reply's form. ``tools``: each {"type": "function", "function": {...}}."""
    kind: str = "text" if wanted is None else wanted.type
    content: dict[str, Any] | str | None = None
    if isinstance(wanted, schema.JsonSchemaFormat):
        content = wanted.json_schema.schema_
    elif isinstance(wanted, responses.FlatJsonSchema):
        content = wanted.schema_
    elif isinstance(wanted, schema.GrammarFormat):
        content = wanted.grammar
    elif isinstance(wanted, schema.RegexFormat):
        content = wanted.regex
    name = None
    if isinstance(choice, schema.NamedTool | responses.NamedFunctionTool):
        name, choice = choice.function.name if isinstance(choice, schema.NamedTool) else choice.name, "named"
    return Form(kind, content, tuple(tools), choice or "auto", name, parallel is not False)


def told_tools(tools: Sequence[schema.Tool] | None) -> list[dict[str, Any]]:
    """Tools as chat templates read them."""
    return [tool.model_dump(exclude_none=True) for tool in tools or ()]


def message_for_template(maker: TextMaker, message: schema.Message) -> dict[str, Any]:
    """A message as chat templates read it: one text, arguments as mappings, the developer a system where they know no
    other."""
    made: dict[str, Any] = {"role": message.role, "content": joined(message.content)}
    if message.role == "developer" and not maker.knows_role("developer"):
        made["role"] = "system"
    if message.tool_calls:
        made["tool_calls"] = [
            {"id": call.id, "type": "function",
             "function": {"name": call.function.name, "arguments": parsed_arguments(call.function.arguments)}}
            for call in message.tool_calls
        ]  # fmt: skip
    thought = message.reasoning_content or message.reasoning
    for name, value in (("name", message.name), ("tool_call_id", message.tool_call_id), ("reasoning_content", thought)):
        if value is not None:
            made[name] = value
    return made


def joined(content: str | Sequence[schema.TextPart] | None) -> str:
    """Parts of a text, a line each."""
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(part.text for part in content)


def check_parts(prompts: int, count: int, most: int) -> None:
    """Raise Refusal where a request asks for more texts than are taken at once."""
    if prompts * count > most:
        raise Refusal(400, f"{prompts} prompts with {count} replies each are {prompts * count} texts; at most {most} "
                      "are taken at once", "n")  # fmt: skip
