"""From Anthropic's messages to those of chat templates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from exactkv.serve.errors import Refusal
from exactkv.serve.schema import anthropic as schema
from exactkv.serve.structure import Form
from exactkv.serve.texts import TextMaker

CHOICES = {"auto": "auto", "any": "required", "none": "none", "tool": "named"}


def prompt_of(maker: TextMaker, asked: schema.CountRequest) -> list[int]:
    """The token ids of a request's prompt. Where the last message is the assistant's, it is gone on with."""
    messages: list[dict[str, Any]] = []
    if asked.system is not None:
        messages.append({"role": "system", "content": joined(asked.system)})
    for message in asked.messages:
        messages += [{"role": message.role, "content": message.content}] if isinstance(message.content, str) else (
            blocks_as_messages(message.role, message.content)
        )  # fmt: skip
    if not messages:
        raise Refusal(400, "messages hold no text", "messages")
    thinking = {} if asked.thinking is None else {"enable_thinking": asked.thinking.type != "disabled"}
    go_on = messages[-1]["role"] == "assistant" and "tool_calls" not in messages[-1]
    return maker.rendered(messages, form_of(asked).offered, go_on=go_on, variables=thinking)


def form_of(asked: schema.CountRequest) -> Form:
    """What a request says of its reply's form."""
    choice = asked.tool_choice
    if choice is not None and (choice.type == "tool") != (choice.name is not None):
        raise Refusal(400, "tool_choice has a name if, and only if, its type is 'tool'", "tool_choice")
    wanted = asked.output_config.format if asked.output_config is not None else None
    tools = tuple(
        {"type": "function", "function": {"name": tool.name, "parameters": tool.input_schema,
                                          **({"description": tool.description} if tool.description else {})}}
        for tool in asked.tools or ()
    )  # fmt: skip
    return Form(
        "text" if wanted is None else "json_schema", None if wanted is None else wanted.schema_, tools,
        "auto" if choice is None else CHOICES[choice.type], None if choice is None else choice.name,
        choice is None or not choice.disable_parallel_tool_use,
    )  # fmt: skip


def blocks_as_messages(role: str, blocks: Sequence[schema.Block]) -> list[dict[str, Any]]:
    """A message of blocks as one or more: each tool's result is a message of its own, before the text."""
    text = [block for block in blocks if isinstance(block, schema.TextBlock)]
    results = [block for block in blocks if isinstance(block, schema.ToolResultBlock)]
    calls = [block for block in blocks if isinstance(block, schema.ToolUseBlock)]
    thoughts = "".join(block.thinking for block in blocks if isinstance(block, schema.ThinkingBlock))
    if (results and role != "user") or (calls and role != "assistant"):
        raise Refusal(400, "tool_use is of the assistant, tool_result of the user", "messages")
    messages: list[dict[str, Any]] = [
        {"role": "tool", "content": joined(result.content or ""), "tool_call_id": result.tool_use_id}
        for result in results
    ]
    if text or calls or thoughts or not results:
        made: dict[str, Any] = {"role": role, "content": joined(text)}
        if thoughts:
            made["reasoning_content"] = thoughts
        if calls:
            made["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.input}}
                for call in calls
            ]
        messages.append(made)
    return messages


def joined(content: str | Sequence[schema.TextBlock]) -> str:
    """Blocks of text, a line each."""
    return content if isinstance(content, str) else "\n".join(block.text for block in content)
