"""Checks what a generator returned: tokens, reasons, counts, and the caches it left behind."""

from __future__ import annotations

from typing import TYPE_CHECKING

from exactkv.verify.target import Completion, Generator, NotSupported, Request

if TYPE_CHECKING:
    from exactkv.verify.operations import Generate
    from exactkv.verify.session import Session


def check_generation(session: Session, op: Generate) -> None:
    """Run a `Generate` operation and compare everything that came back."""
    target = session.target
    generator = next(g for g in target.generators if g.name == op.generator)
    given = target.generate(op.generator, list(op.requests), op.close_after)
    if len(given) != len(op.requests):
        session.violation("count", f"{len(given)} completions came for {len(op.requests)} prompts")
        return
    for i, (request, completion) in enumerate(zip(op.requests, given, strict=True)):
        where = f" of prompt {i}" if len(op.requests) > 1 else ""
        before = len(session.result.violations)
        closed = op.close_after if i == 0 else None
        _check_tokens(session, request, completion, where, closed)
        if len(session.result.violations) == before:
            _check_usage(session, request, completion, where)
            _check_cache(session, generator, request, completion, where)


def _check_tokens(session: Session, request: Request, done: Completion, where: str, closed: int | None) -> None:
    session.result.compared += len(done.tokens) + 1
    prompt, tokens = list(request.prompt), list(done.tokens)
    stop = next((i for i, t in enumerate(tokens) if t in request.stop), None)
    limit = request.max_tokens
    wrong = session.judge.wrong_token(prompt, tokens)
    if wrong is not None:
        i, right, margin = wrong
        message = f"token {i}{where} is {tokens[i]}, greedy decoding gives {right} (margin {margin:.1e})"
        session.violation("tokens", message, len(prompt) + i - 1, margin, [*prompt, *tokens[:i]])
    elif stop is not None and stop + 1 < len(tokens):
        session.violation("tokens", f"{len(tokens) - stop - 1} tokens{where} came after a stop token", hint="S")
    elif len(tokens) > limit:
        session.violation("tokens", f"{len(tokens)} tokens{where} came, at most {limit} were asked for", hint="S")
    elif stop is None and len(tokens) < (limit if closed is None else min(closed, limit)):
        message = f"{len(tokens)} tokens{where} came, {limit} were asked for, and no stop token was met"
        session.violation("tokens", message, hint="S")
    if closed is None and done.finish_reason is not None and len(tokens) <= limit:
        reason = "stop" if stop is not None else "length"
        if done.finish_reason != reason:
            message = f"the finish reason{where} is {done.finish_reason!r}; expected {reason!r}"
            session.violation("tokens", message, hint="S")


def _check_usage(session: Session, request: Request, done: Completion, where: str) -> None:
    for what, said, true in (
        ("prompt", done.prompt_tokens, len(request.prompt)),
        ("completion", done.completion_tokens, len(done.tokens)),
    ):
        if said is not None:
            session.result.compared += 1
            if said != true:
                session.violation("usage", f"{said} {what} tokens{where} were reported; it was {true}", hint="T")
    if done.cached_tokens is not None and done.forwarded is not None:
        session.result.compared += 1
        computed = len(request.prompt) - done.cached_tokens
        if done.forwarded != computed:
            message = f"{done.cached_tokens} cached tokens{where} leave {computed} to compute; {done.forwarded} were"
            session.violation("usage", message, hint="T")


def _check_cache(session: Session, generator: Generator, request: Request, done: Completion, where: str) -> None:
    """A cache left behind holds a prefix of prompt and tokens, as long as it says: going on from it is exact."""
    if done.cache is None:
        return
    whole = [*request.prompt, *done.tokens]
    try:
        held = session.target.length(done.cache)
    except NotSupported:
        return
    if held > len(whole):
        message = f"the cache left behind{where} says it holds {held} tokens; there were {len(whole)}"
        session.violation("count", message, hint="I" if generator.kind == "speculative" else "")
        return
    more = [*whole[held:], *session.judge.text[:3]]
    logits = session.target.feed(done.cache, more)
    session.compare(logits, [*whole[:held], *more], held, f", going on from the cache left behind{where}")
