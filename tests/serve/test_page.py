"""The page: what it is made of, and what people can do with it in a browser."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
import torch

from exactkv.cache.store import PromptStore
from exactkv.models.model import Model
from exactkv.serve import ServeOptions
from exactkv.serve.openai import chat
from exactkv.serve.static import PAGE, TYPES
from tests.generation.tiny_text import END, byte_tokenizer, scripted, text_model
from tests.serve.browser import Seen, chromium
from tests.serve.conftest import Running

A = byte_tokenizer().encode("a", add_special_tokens=False)[0]  # letters' ids are in a row
ESCAPE, SHIFT = "\ue00c", "\ue008"
EVIL = "<img src=x onerror='document.title=1'><script>document.title=1</script>"


class Talker(Model):
    """Says letters, never an end, and takes ``pause`` seconds a step."""

    pause = 0.0

    def __call__(self, *args: Any, **options: Any) -> torch.Tensor | None:
        time.sleep(self.pause)
        out = super().__call__(*args, **options)
        if out is not None:
            out[..., :A] = out[..., A + 26 :] = -torch.inf
        return out


@pytest.fixture(scope="module")
def talker() -> Talker:
    model = text_model(tokenizer=byte_tokenizer(), make=Talker)
    assert isinstance(model, Talker)
    return model


@pytest.fixture(scope="module")
def server(talker: Talker) -> Iterator[Running]:
    running = Running(talker, ServeOptions(grace=1, timeout=60), PromptStore(64_000_000))
    yield running
    running.stop()


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with chromium(tmp_path_factory.mktemp("profile")) as started:
        yield started


@pytest.fixture
def open_page(browser: Any) -> Iterator[Callable[[str], Seen]]:
    """Open the page as for the first time; nothing in it may go wrong unseen."""
    seen: list[Seen] = []

    def begin(url: str) -> Seen:
        browser.set_window_size(1100, 800)
        browser.get(f"{url}/health")
        browser.execute_script("localStorage.clear()")
        seen.append(Seen(browser, url))
        return seen[-1]

    yield begin
    assert [page.errors() for page in seen] == [[] for _ in seen]


@pytest.fixture
def page(server: Running, talker: Talker, open_page: Callable[[str], Seen]) -> Iterator[Seen]:
    talker.pause = 0.0
    opened = open_page(server.url)
    opened.set(max_tokens="20")
    yield opened
    talker.pause = 0.0


# Without a browser.


def test_it_is_served_with_types_that_browsers_run(start: Callable[..., Running]) -> None:
    server = start(api_keys=("key",))  # the page itself needs none
    files = sorted(PAGE.iterdir())
    assert {"index.html", "app.js", "style.css"} <= {file.name for file in files}
    for path, file in [("/", PAGE / "index.html"), *((f"/{file.name}", file) for file in files)]:
        reply = httpx.get(server.url + path)
        assert reply.status_code == 200 and reply.content == file.read_bytes()
        assert reply.headers["content-type"] == f"{TYPES[file.suffix]}; charset=utf-8"
        policy = reply.headers["content-security-policy"]
        assert "default-src 'none'" in policy and "unsafe" not in policy and "*" not in policy
        assert reply.headers["x-content-type-options"] == "nosniff"
        again = httpx.get(server.url + path, headers={"if-none-match": reply.headers["etag"]})
        assert again.status_code == 304 and not again.content
    told = [httpx.post(server.url + path).status_code for path in ("", "/app.js", "/nothing", "/v2/chat", "/%00")]
    assert told == [405, 405, 404, 404, 404]
    for path in ("/nothing.js", "/../app.py", "/%2e%2e/app.py", "/.%2e/%2e./pyproject.toml", "/%00", "/" + 300 * "x"):
        missing = httpx.get(server.url + path)
        assert missing.status_code == 404 and missing.json()["error"]["message"].startswith("there is nothing at")


def test_it_needs_no_other_host_and_reads_no_html() -> None:
    for file in PAGE.iterdir():
        text = file.read_text().replace("http://www.w3.org/2000/svg", "")  # a name, that nobody asks for
        assert not re.search(r"\b(https?|wss?)://|[\"\'(]//\w|@import|url\(", text), file.name
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function", text)
        assert not re.search(r"<style|\sstyle=|\son\w+=|javascript:", text), "the policy would stop it"


def test_what_it_names_is_there() -> None:
    document = (PAGE / "index.html").read_text()
    named = set(re.findall(r'(?:src|href)="([^"#]+)"', document))
    for script in PAGE.glob("*.js"):
        text = script.read_text()
        named |= {name.removeprefix("./") for name in re.findall(r'from "([^"]+)"', text)}
        ids = set(re.findall(r'\$\("([\w-]+)"\)', text))
        assert ids <= set(re.findall(r'id="([\w-]+)"', document)), script.name
    assert named | {"index.html"} == {file.name for file in PAGE.iterdir()}


# In a browser.


def test_messages_are_sent_by_enter_and_replies_come_as_they_are_made(page: Seen, talker: Talker) -> None:
    talker.pause = 0.03
    page.one("#input").send_keys("one", SHIFT + "\n" + SHIFT, "two")  # no sending yet
    assert page.asked == []
    page.send("", wait=False)
    assert page.asked == ["one\ntwo"]
    lengths = set()
    while page.running:
        lengths.add(len(page.replies[-1]))
    assert len(lengths) >= 4 and len(page.replies[-1]) == 20
    assert page.one("#log").get_attribute("aria-busy") == "false"
    assert page.browser.switch_to.active_element.get_attribute("id") == "input"


@pytest.mark.parametrize("by_key", [True, False])
def test_stopping_keeps_what_came_and_frees_the_row(page: Seen, server: Running, talker: Talker, by_key: bool) -> None:
    talker.pause = 0.02
    page.set(max_tokens="")
    page.send("go on", wait=False)
    page.until(lambda: len(page.replies[-1]) > 3)
    page.press(ESCAPE) if by_key else page.one("#stop").click()
    page.ended()
    said = page.replies[-1]
    assert 3 < len(said) < 2000 and "Stopped." in page.texts(".message.assistant .note")
    page.until(server.idle)
    assert page.replies == [said]


def test_regenerate_replaces_the_reply(page: Seen) -> None:
    page.set(seed="1", temperature="1")
    page.send("hello")
    first = page.replies
    page.click(".message.assistant", "Regenerate")
    page.ended()
    assert page.replies == first  # of the same seed
    page.set(seed="2")
    page.click(".message.assistant", "Regenerate")
    page.ended()
    assert len(page.replies) == 1 and page.replies != first and page.asked == ["hello"]


def test_an_edited_message_is_answered_anew(page: Seen, monkeypatch: pytest.MonkeyPatch) -> None:
    sent = recorded(monkeypatch)
    page.send("first")
    page.send("second")
    kept = page.replies[0]
    page.click(".message.user", "Edit")
    page.press(ESCAPE)
    assert page.asked == ["first", "second"] and len(page.replies) == 2
    page.click(".message.user", "Edit")
    page.press(" thought", "\n")
    page.until(lambda: len(sent) == 3)
    page.ended()
    assert page.asked == ["first", "second thought"] and page.replies[0] == kept
    assert [m.content for m in sent[2].messages] == ["first", kept, "second thought"]
    page.click(".message:nth-child(1)", "Edit")
    page.click(".edit", "Send")
    page.until(lambda: len(sent) == 4)
    page.ended()
    assert page.asked == ["first"] and len(page.replies) == 1
    page.click(".message.assistant", "Edit")  # the model's is changed, and nothing is asked
    page.press("!", "\n")
    assert page.replies[0].endswith("!") and len(sent) == 4


def test_conversations_outlive_the_page(page: Seen) -> None:
    page.send("about rivers")
    page.click("#side", "New conversation")
    assert page.asked == []
    page.send("about hills")
    assert page.texts("#list .title") == ["about hills", "about rivers"]
    page.click("#list .chosen", "Rename about hills")
    page.press("The Alps", "\n")
    replies, figures = page.replies, page.figures
    page = Seen(page.browser, page.url)
    assert page.texts("#list .title") == ["The Alps", "about rivers"]
    assert (page.asked, page.replies, page.figures) == (["about hills"], replies, figures)
    assert page.one("#settings [name=max_tokens]").get_attribute("value") == "20"
    page.click("#list", "about rivers")
    assert page.asked == ["about rivers"]
    page.click("#list .chosen", "Delete about rivers")
    page.browser.switch_to.alert.accept()
    assert page.texts("#list .title") == ["The Alps"] and page.asked == ["about hills"]
    assert Seen(page.browser, page.url).texts("#list .title") == ["The Alps"]


def test_two_open_pages_agree(page: Seen) -> None:
    page.send("one")
    first = page.browser.current_window_handle
    page.browser.switch_to.new_window("tab")
    try:
        second = Seen(page.browser, page.url)
        assert second.asked == ["one"]
        second.send("two")
        page.browser.switch_to.window(first)
        page.until(lambda: page.asked == ["one", "two"] and len(page.replies[-1]) == 20)
        page.click("#list .chosen", "Delete one")
        page.browser.switch_to.alert.accept()
        page.browser.switch_to.window(second.browser.window_handles[1])
        second.until(lambda: second.asked == [] and second.texts("#list .title") == [])
    finally:
        page.browser.switch_to.window(page.browser.window_handles[1])
        page.browser.close()
        page.browser.switch_to.window(first)


def test_a_reply_under_way_stays_with_its_conversation(page: Seen, talker: Talker) -> None:
    talker.pause = 0.03
    page.set(max_tokens="60")
    page.send("slow", wait=False)
    page.click("#side", "New conversation")
    assert not page.running and page.replies == []
    page.send("other")
    page.click("#list", "slow")
    page.ended()
    assert len(page.replies) == 1 and len(page.replies[0]) == 60
    page.send("again", wait=False)
    page.until(lambda: page.replies[-1])
    page = Seen(page.browser, page.url)  # closed meanwhile
    assert page.asked == ["slow", "again"] and "Stopped." in page.texts(".note")


def test_settings_reach_the_request(page: Seen, monkeypatch: pytest.MonkeyPatch) -> None:
    sent = recorded(monkeypatch)
    page.send("plain")
    assert sent[0].model_fields_set == {"model", "messages", "stream", "timings", "max_tokens"}
    page.set(system="Be brief.", temperature="0.5", top_p="0.9", max_tokens="7", seed="42")
    page.send("with settings")
    asked = sent[1]
    assert (asked.temperature, asked.top_p, asked.max_tokens, asked.seed) == (0.5, 0.9, 7, 42)
    assert (asked.messages[0].role, asked.messages[0].content) == ("system", "Be brief.")
    assert len(page.replies[-1]) == 7


def test_the_panel_tells_what_the_server_counted(page: Seen, server: Running) -> None:
    page.set(system="Something long enough that the cache keeps it.", max_tokens="9")
    page.send("one")
    before = counted(server)
    page.send("two")
    after = counted(server)
    shown = page.figures
    for name in ("cached", "fed", "generated"):
        assert int(shown[name]) == after[name] - before[name]
    assert int(shown["cached"]) > 40 and shown["generated"] == "9"
    assert float(shown["rate"]) > 0 and re.fullmatch(r"\d+\.\d+ s", shown["first"])
    held = int(shown["cached"]) + int(shown["fed"]) + 8
    spans = page.js("return [...document.querySelectorAll('.message:last-child .picture .kept')]"
                    ".map(e => [+e.dataset.start, +e.dataset.end])")  # fmt: skip
    assert sorted(spans) == [[0, held], [held - 16, held]]  # all of it, and a window of 16
    assert "window 16 (1 layer) keeps 16 of" in page.one(".message:last-child .picture").get_attribute("aria-label")


def test_errors_are_shown_in_place(page: Seen, start: Callable[..., Running], open_page: Callable[[str], Seen]) -> None:
    page.set(top_p="0")
    page.send("hello")
    assert "top_p" in page.texts(".message.assistant .error")[0]
    page.set(top_p="0.9")
    page.click(".message.assistant", "Try again")
    page.ended()
    assert not page.texts(".error") and len(page.replies[-1]) == 20
    locked = start(api_keys=("sesame",))
    page = open_page(locked.url)
    page.until(lambda: "API key is wrong or missing" in page.one("#notice").text)
    page.send("hello")
    assert "API key is wrong or missing" in page.texts(".message.assistant .error")[0]
    page.set(key="sesame", max_tokens="5")
    page.until(lambda: not page.one("#notice").is_displayed())
    page.click(".message.assistant", "Try again")
    page.ended()
    assert page.figures["generated"] and not page.texts(".error")
    locked.stop()
    page.send("gone")
    assert "cannot be reached" in page.texts(".message.assistant .error")[-1]


def test_text_is_never_read_as_html(start: Callable[..., Running], open_page: Callable[[str], Seen]) -> None:
    said = f"{EVIL}\n```html\n{EVIL}\n```\n**{EVIL}**"
    page = open_page(start(model_=scripted(said, END)).url)
    page.set(temperature="0")
    page.send(EVIL)
    assert page.replies[0].count(EVIL) == 3 and page.texts("pre code") == [EVIL + "\n"]
    for each in (page, Seen(page.browser, page.url)):
        assert each.asked == [EVIL] and each.texts("#list .title") == [EVIL[:60]]
        assert not each.all("#log img, #log script, #side img") and each.browser.title == "exactkv"


def test_a_phone_shows_all_of_it(page: Seen) -> None:
    """No scrolling sideways, and the conversations behind a button."""
    page.send("wide" * 60)
    page.browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride",
                                 {"width": 320, "height": 640, "deviceScaleFactor": 2, "mobile": True})  # fmt: skip
    try:
        assert page.js("return innerWidth") == 320
        wide = "return [...document.querySelectorAll('html, body, main, #log')].filter(e => e.scrollWidth > 320).length"
        assert page.js(wide) == 0 and not page.one("#side").is_displayed()
        page.one("#menu").click()
        page.until(lambda: page.one("#new").is_displayed())
        page.press(ESCAPE)
        page.until(lambda: not page.one("#side").is_displayed())
        page.press("\n")  # the button has the focus again
        page.until(lambda: page.one("#new").is_displayed())
        page.click("#side", "New conversation")
        page.until(lambda: not page.one("#side").is_displayed())
        page.one("#open-settings").click()
        box = page.one("#settings").rect
        assert box["x"] >= 0 and box["x"] + box["width"] <= 320 and page.js(wide) == 0
    finally:
        page.browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_all_is_reached_by_keyboard_and_has_a_name(page: Seen) -> None:
    page.send("hello")
    page.one("#input").click()
    reached = set()
    for _ in range(30):
        page.press("\ue004")  # Tab
        active = page.browser.switch_to.active_element
        reached.add(active.accessible_name)
        style = "const s = getComputedStyle(document.activeElement); return s.outlineStyle"
        assert active.tag_name == "body" or page.js(style) != "none"
    assert {"Send", "Settings", "New conversation", "hello", "Rename hello", "Delete hello", "Regenerate", "Edit",
            "Messages", "Message"} <= reached  # fmt: skip
    unnamed = [e.get_attribute("outerHTML") for e in page.all("button, input, textarea, select")
               if e.is_displayed() and not e.accessible_name]  # fmt: skip
    assert unnamed == []


def recorded(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The chat requests that reach the server from now on."""
    sent: list[Any] = []
    plain = chat.texts_of

    def texts_of(maker: Any, asked: Any, form: Any) -> Any:
        sent.append(asked)
        return plain(maker, asked, form)

    monkeypatch.setattr(chat, "texts_of", texts_of)
    return sent


def counted(server: Running) -> dict[str, int]:
    """Tokens so far, as the server's own metrics tell them."""
    text = httpx.get(f"{server.url}/metrics").text
    names = {"cached": 'exactkv_prompt_tokens_total{source="cached"}', "generated": "exactkv_generated_tokens_total",
             "fed": 'exactkv_prompt_tokens_total{source="fed"}'}  # fmt: skip
    return {name: int(float(text.split(f"\n{metric} ")[1].split("\n")[0])) for name, metric in names.items()}
