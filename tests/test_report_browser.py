"""report.html in a real Chromium, over its debugging protocol: silent console, all there, no page scroll."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import shutil
import signal
import subprocess
from pathlib import Path

import aiohttp
import pytest
from report_samples import sample

from orchestrator.report import formats

BROWSER = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)
START_S = 30.0
ANSWER_S = 30.0
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--remote-debugging-port=0",
)
# What the page is asked at each width: how far it reaches, which boxes stick out of it, what is there.
QUESTION = """(() => {
  const width = document.documentElement.clientWidth;
  const inside = element => { for (let e = element.parentElement; e; e = e.parentElement)
    if (['auto', 'scroll'].includes(getComputedStyle(e).overflowX)) return true; return false; };
  const all = [...document.body.querySelectorAll('*')].filter(e => e.checkVisibility());
  return JSON.stringify({
    width,
    reaches: document.documentElement.scrollWidth,
    sticking: all.filter(e => e.getBoundingClientRect().right > width + 1 && !inside(e) && !e.closest('svg'))
      .map(e => e.tagName + '.' + e.className).slice(0, 5),
    sections: [...document.querySelectorAll('section')].filter(e => e.checkVisibility()).map(e => e.id),
    folded: [...document.querySelectorAll('details table')].filter(e => e.checkVisibility()).length,
    charts: [...document.querySelectorAll('.panel svg')].filter(e => e.getBoundingClientRect().height > 80).length,
    small: [...document.querySelectorAll('.panel svg text')].map(e => e.getBoundingClientRect().height)
      .filter(h => h > 0 && h < 6).length,
    paper: getComputedStyle(document.body).backgroundColor,
    chart: getComputedStyle(document.querySelector('.panel svg text')).fill,
    stamp: getComputedStyle(document.querySelector('.stamp')).position,
  });
})()"""
# Of every box that may scroll, with all folds open: whether it is wider than it shows, and whether it says so.
BOXES = """(async () => {
  for (const fold of document.querySelectorAll('details')) fold.open = true;
  for (let frame = 0; frame < 3; frame++) await new Promise(requestAnimationFrame);
  const said = style => style.content !== 'none' && style.visibility === 'visible' && parseFloat(style.height) > 5;
  const boxes = [...document.querySelectorAll('.panel, .scroll:not(.verdicts)')].filter(e => e.checkVisibility());
  return JSON.stringify(boxes.map(e => [e.scrollWidth > e.clientWidth, said(getComputedStyle(e, '::before'))]));
})()"""

pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium here: apt-get install chromium")


class Page:
    """One tab. `problems` gathers what the console, the network log and the page's own errors say."""

    def __init__(self, socket):
        self.socket = socket
        self.numbers = itertools.count(1)
        self.problems: list[str] = []
        self.requested: list[str] = []
        self.loaded = 0

    async def call(self, method, **params):
        number = next(self.numbers)
        await self.socket.send_json({"id": number, "method": method, "params": params})
        return await self.until(lambda message: message.get("id") == number)

    async def until(self, done):
        async with asyncio.timeout(ANSWER_S):
            async for raw in self.socket:
                message = json.loads(raw.data)
                self.note(message)
                if done(message):
                    return message.get("result", message)
        raise ConnectionError("the browser closed the tab")

    def note(self, message):
        method, params = message.get("method"), message.get("params", {})
        if method == "Log.entryAdded":
            self.problems.append(params["entry"]["text"])
        elif method == "Runtime.consoleAPICalled":
            self.problems.append(f"console.{params['type']}")
        elif method == "Runtime.exceptionThrown":
            self.problems.append(params["exceptionDetails"]["text"])
        elif method == "Network.requestWillBeSent":
            self.requested.append(params["request"]["url"])
        elif method == "Page.loadEventFired":
            self.loaded += 1

    async def show(self, url, *, width, dark=False, media=""):
        await self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=844, deviceScaleFactor=1, mobile=width < 600
        )
        scheme = "dark" if dark else "light"
        await self.call(
            "Emulation.setEmulatedMedia", media=media, features=[{"name": "prefers-color-scheme", "value": scheme}]
        )
        before = self.loaded
        await self.call("Page.navigate", url=url)
        if self.loaded == before:
            await self.until(lambda message: message.get("method") == "Page.loadEventFired")
        answer = await self.call("Runtime.evaluate", expression=QUESTION)
        boxes = await self.call("Runtime.evaluate", expression=BOXES, awaitPromise=True)
        return {**json.loads(answer["result"]["value"]), "boxes": json.loads(boxes["result"]["value"])}


@contextlib.contextmanager
def chromium(profile: Path):
    """A browser of our own, in a process group of its own; yields the address of its debugging port."""
    process = subprocess.Popen(
        [BROWSER, *FLAGS, f"--user-data-dir={profile}", "about:blank"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        for line in process.stderr:
            if "DevTools listening on " in line:
                yield line.split("ws://")[1].split("/")[0]
                break
        else:
            pytest.fail(f"Chromium ended with status {process.wait(START_S)} before it listened")
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.stderr.close()
        process.wait(START_S)


async def _look(address, url, profiles):
    async with aiohttp.ClientSession() as session:
        async with session.get(f"http://{address}/json/list") as answer:
            tabs = json.loads(await answer.text())
        tab = next(one for one in tabs if one["type"] == "page")
        async with session.ws_connect(tab["webSocketDebuggerUrl"], max_msg_size=0) as socket:
            page = Page(socket)
            for domain in ("Page", "Runtime", "Log", "Network"):
                await page.call(f"{domain}.enable")
            seen = {name: await page.show(url, **how) for name, how in profiles.items()}
            return seen, page.problems, page.requested


@pytest.fixture(scope="module")
def looked(tmp_path_factory):
    folder = tmp_path_factory.mktemp("browser")
    made = sample(folder / "boots")
    path = folder / "report.html"
    path.write_text(formats.FORMATS["report.html"](made.view()), "utf-8")
    profiles = {
        "phone": {"width": 390},
        "phone, dark": {"width": 390, "dark": True},
        "tablet": {"width": 768},
        "desk": {"width": 1440},
        "paper": {"width": 794, "media": "print"},  # A4 at 96 dots an inch
    }
    with chromium(folder / "profile") as address:
        return asyncio.run(_look(address, path.as_uri(), profiles))


def test_the_console_stays_silent_and_nothing_else_is_fetched(looked):
    _, problems, requested = looked
    assert problems == []
    assert {url.split(":")[0] for url in requested} <= {"file", "data"}
    assert sum(url.startswith("file:") for url in requested) == 5  # the page itself, once a profile


@pytest.mark.parametrize("profile", ["phone", "phone, dark", "tablet", "desk", "paper"])
def test_no_width_makes_the_page_scroll_sideways(looked, profile):
    seen = looked[0][profile]
    assert seen["reaches"] == seen["width"]
    assert seen["sticking"] == []


@pytest.mark.parametrize("profile", ["phone", "desk"])
def test_all_sections_and_charts_are_there(looked, profile):
    seen = looked[0][profile]
    assert len(seen["sections"]) == 12
    assert (
        seen["charts"] == 4 + 1 + 2 + 1 + 2 + 1
    )  # boots a level, throughput, latency twice, rulers, boots' time twice, order
    assert seen["small"] == 0  # no label is lower than six pixels
    assert seen["stamp"] == "sticky"


@pytest.mark.parametrize("profile", ["phone", "phone, dark", "tablet", "desk"])
def test_only_what_is_wider_than_the_page_says_that_it_scrolls(looked, profile):
    boxes = looked[0][profile]["boxes"]
    assert [hinted for _, hinted in boxes] == [wider and "phone" in profile for wider, _ in boxes]
    if "phone" in profile:
        assert {wider for wider, _ in boxes} == {True, False}  # the phone has both kinds


def test_paper_shows_what_a_screen_folds(looked):
    desk, paper = looked[0]["desk"], looked[0]["paper"]
    assert desk["folded"] == 0
    assert paper["folded"] >= 10


def test_dark_follows_the_system_in_page_and_charts(looked):
    light, dark = looked[0]["phone"], looked[0]["phone, dark"]
    assert (light["paper"], dark["paper"]) == ("rgb(255, 255, 255)", "rgb(18, 22, 27)")
    assert light["chart"] != dark["chart"]
