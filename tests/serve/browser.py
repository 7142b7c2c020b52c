"""A headless Chromium, and what people see and do in the page."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.serve.conftest import until

FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-component-update",
    "--disable-background-networking", "--disable-sync", "--disable-dev-shm-usage", "--window-size=1100,800",
)  # fmt: skip


@contextmanager
def chromium(profile: Path) -> Iterator[Any]:
    """A browser with a profile of its own. Skips the test where there is none."""
    webdriver = pytest.importorskip("selenium.webdriver", reason="no selenium")
    binary, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if binary is None or driver is None:
        pytest.skip("no chromium or no chromedriver (Debian: chromium, chromium-driver)")
    options = webdriver.ChromeOptions()
    options.binary_location = binary
    for flag in (*FLAGS, f"--user-data-dir={profile}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    browser = webdriver.Chrome(options, webdriver.ChromeService(driver))
    try:
        yield browser
    finally:
        browser.quit()


class Seen:
    """The page at ``url`` in a browser."""

    def __init__(self, browser: Any, url: str):
        self.browser, self.url = browser, url
        browser.get(url)
        self.until(lambda: self.js("return document.getElementById('log').childElementCount > 0"))

    def js(self, code: str, *arguments: Any) -> Any:
        return self.browser.execute_script(code, *arguments)

    def all(self, css: str) -> list[Any]:
        return self.browser.find_elements("css selector", css)  # type: ignore[no-any-return]

    def one(self, css: str) -> Any:
        return self.browser.find_element("css selector", css)

    def texts(self, css: str) -> list[str]:
        """As they are in the document, white space too."""
        return self.js("return [...document.querySelectorAll(arguments[0])].map(e => e.textContent)", css)  # type: ignore[no-any-return]

    def press(self, *keys: str) -> None:
        """Keys for whatever has the focus."""
        self.browser.switch_to.active_element.send_keys(*keys)

    def click(self, css: str, name: str) -> None:
        """The last button of that name within ``css``."""
        [each for each in self.all(f"{css} button") if name in (each.text, each.get_attribute("aria-label"))][
            -1
        ].click()

    def until(self, holds: Callable[[], Any]) -> None:
        until(lambda: bool(holds()))

    def send(self, text: str, wait: bool = True) -> None:
        """A message, by keyboard."""
        before = len(self.all(".message.assistant"))
        self.one("#input").send_keys(text, "\n")
        self.until(lambda: len(self.all(".message.assistant")) == before + 1)
        if wait:
            self.ended()

    def ended(self) -> None:
        self.until(lambda: not self.running)

    @property
    def running(self) -> bool:
        return bool(self.one("#stop").is_displayed())

    @property
    def replies(self) -> list[str]:
        return self.texts(".message.assistant > .text")

    @property
    def asked(self) -> list[str]:
        return self.texts(".message.user > .text")

    @property
    def figures(self) -> dict[str, str]:
        """Of the last reply."""
        return self.js(  # type: ignore[no-any-return]
            "const last = [...document.querySelectorAll('.message.assistant')].at(-1);"
            "return Object.fromEntries([...last.querySelectorAll('[data-figure]')]"
            ".map(e => [e.dataset.figure, e.textContent]))"
        )

    def set(self, **settings: str) -> None:
        """Settings, as people type them."""
        self.one("#open-settings").click()
        for name, value in settings.items():
            field = self.one(f"#settings [name={name}]")
            field.clear()
            field.send_keys(value)
        self.one("#close-settings").click()
        self.until(lambda: not self.one("#settings").is_displayed())

    def errors(self) -> list[str]:
        """What the browser complained of, refused requests aside."""
        return [e["message"] for e in self.browser.get_log("browser") if "Failed to load resource" not in e["message"]]
