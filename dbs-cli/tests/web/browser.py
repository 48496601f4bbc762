#!/usr/bin/env python3
"""browser.py look|change|pictures PROGRAM URL VOLUMES [DIRECTORY]: the web page in a real browser.

PROGRAM is chromium-headless-shell, URL is that of a page, with its token: one that can only look, or one that may change
something. It has so many VOLUMES: `v0` has snapshots, a clone and data, and one is called `<b onclick=x>`. `pictures`
tests nothing, and writes pictures for the documents into DIRECTORY.

It drives the browser over a pipe (DevTools protocol), which needs nothing but Python.
"""

import base64
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

PATIENCE_SECONDS = 60


class Browser:
    """A browser with one page."""

    def __init__(self, program: str, profile: str) -> None:
        to_browser, self.to_browser = os.pipe()
        self.from_browser, from_browser = os.pipe()
        flags = ["--headless", "--remote-debugging-pipe", "--no-first-run", "--disable-gpu", "--hide-scrollbars"]
        # The store is the test's own, and there is no other page.
        flags += ["--no-sandbox"] if os.geteuid() == 0 else []
        # Fd 3 and 4 are the protocol's.
        inner = 'exec "$@" 3<&%d 4>&%d' % (to_browser, from_browser)
        self.process = subprocess.Popen(
            ["bash", "-c", inner, "browser", program, *flags, f"--user-data-dir={profile}", "about:blank"],
            pass_fds=(to_browser, from_browser),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser)
        os.close(from_browser)
        self.received, self.events, self.number, self.session = b"", [], 0, None
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ["Page", "Runtime", "Log", "Network", "Accessibility"]:
            self.send(f"{domain}.enable")
        self.size(1440, 860)

    def send(self, method: str, **params):
        self.number += 1
        message = {"id": self.number, "method": method, "params": params}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.to_browser, json.dumps(message).encode() + b"\0")
        while True:
            while b"\0" not in self.received:
                piece = os.read(self.from_browser, 1 << 16)
                if not piece:
                    raise SystemExit(f"the browser has ended: {self.process.wait()}")
                self.received += piece
            text, _, self.received = self.received.partition(b"\0")
            answer = json.loads(text)
            if answer.get("id") != self.number:
                self.events.append(answer)
                continue
            if "error" in answer:
                raise AssertionError(f"{method}: {answer['error']}")
            return answer["result"]

    def size(self, width: int, height: int) -> None:
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def run(self, code: str):
        """The value of an expression in the page, which may be a promise."""
        answer = self.send("Runtime.evaluate", expression=code, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, f"{code}: {answer['exceptionDetails']}"
        return answer["result"].get("value")

    def wait(self, code: str):
        """Waits until an expression is true; its value."""
        end = time.monotonic() + PATIENCE_SECONDS
        while not (value := self.run(code)):
            if time.monotonic() > end:
                raise AssertionError(f"it never came that {code}\n{self.run('document.body.innerText')}")
            time.sleep(0.03)
        return value

    def open(self, url: str) -> None:
        # Else an address that differs behind the # alone loads nothing.
        self.send("Page.navigate", url="about:blank")
        self.send("Page.navigate", url=url)
        self.wait("document.readyState === 'complete' && !!document.querySelector('#content')")

    def press(self, *keys: str) -> None:
        codes = {"Enter": 13, "Tab": 9, "ArrowDown": 40, "ArrowUp": 38, "ArrowRight": 39, "ArrowLeft": 37, "End": 35, "Home": 36, "Escape": 27}
        for key in keys:
            params = {"key": key, "windowsVirtualKeyCode": codes.get(key, ord(key[0]))}
            text = {"text": "\r"} if key == "Enter" else {"text": key} if len(key) == 1 else {}
            self.send("Input.dispatchKeyEvent", type="keyDown", **params, **text)
            self.send("Input.dispatchKeyEvent", type="keyUp", **params)

    def write(self, text: str) -> None:
        self.send("Input.insertText", text=text)

    def picture(self, file: Path) -> None:
        data = self.send("Page.captureScreenshot", format="png")["data"]
        file.write_bytes(base64.b64decode(data))

    def complaints(self) -> list:
        """What the page has thrown, or the browser has complained of."""
        found = []
        for event in self.events:
            method, params = event.get("method"), event.get("params", {})
            if method == "Runtime.exceptionThrown":
                found.append(params["exceptionDetails"])
            elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
                found.append(params["args"])
            elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
                found.append(params["entry"])
        return found

    def asked(self) -> set:
        events = [event for event in self.events if event.get("method") == "Network.requestWillBeSent"]
        return {event["params"]["request"]["url"] for event in events}

    def close(self) -> None:
        self.process.terminate()
        self.process.wait()


SHOWN = "document.querySelector('#shown').textContent"
ROWS = "document.querySelectorAll('#volumes .rows .row:not([hidden])').length"
TITLE = "document.querySelector('#volume h2')?.textContent"
TREE = "document.querySelector('#volume .tree table')?.innerText"
BUTTONS = "[...document.querySelectorAll('#volume button')].map((button) => button.textContent)"


def choose(browser: Browser, name: str) -> None:
    """Chooses a volume by keys alone."""
    browser.press("/")
    browser.wait("document.activeElement.id === 'filter'")
    browser.run("document.activeElement.select()")
    browser.write(name)
    browser.press("ArrowDown", "ArrowDown", "Enter")
    browser.wait(f"{TITLE} === {json.dumps(name)}")
    browser.wait(f"!!({TREE})")


def clear(browser: Browser) -> None:
    """All volumes are shown."""
    browser.run("document.querySelector('#filter').value = '', document.querySelector('#filter').dispatchEvent(new Event('input'))")


def named(browser: Browser, least: int = 10) -> None:
    """All that can be used has a name for who cannot see it."""
    nodes = browser.send("Accessibility.getFullAXTree")["nodes"]
    roles = {"button", "textbox", "searchbox", "tab", "grid", "dialog", "image", "img", "columnheader", "progressbar", "application"}
    seen = [node for node in nodes if not node.get("ignored") and node.get("role", {}).get("value") in roles]
    assert len(seen) >= least, [node["name"] for node in seen]
    without = [node for node in seen if not node.get("name", {}).get("value")]
    assert not without, without


def luminance(colour: str) -> float:
    parts = [int(part) / 255 for part in colour[colour.index("(") + 1 : -1].split(",")[:3]]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrasts(browser: Browser) -> None:
    """Texts can be read on what is behind them."""
    code = """(() => { const of = (name, part) => { const probe = document.createElement('i'); probe.style.color = `var(--${name})`;
        document.body.append(probe); const found = getComputedStyle(probe).color; probe.remove(); return found; };
        return Object.fromEntries(['panel', 'page', 'chosen', 'text', 'quiet', 'danger', 'good', 'accent'].map((name) => [name, of(name)])); })()"""
    tints = browser.run(code)
    for behind in ["panel", "page", "chosen"]:
        for text in ["text", "quiet", "danger", "good", "accent"]:
            light, dark = sorted([luminance(tints[text]), luminance(tints[behind])], reverse=True)
            ratio = (light + 0.05) / (dark + 0.05)
            assert ratio >= 4.5, f"{text} on {behind}: {ratio:.2f}"


def test_looking(browser: Browser, url: str, volumes: int) -> None:
    browser.open(url)
    count = f"{volumes:,}".replace(",", "\u202f") + " volumes"
    browser.wait(f"{SHOWN} === {json.dumps(count)}")
    assert browser.run("location.href").endswith("/"), "the token stays in the address"
    assert 10 < browser.run(ROWS) < 100, "a row for each volume"
    named(browser)
    choose(browser, "v0")
    tree = browser.run(TREE)
    places = [tree.find(text) for text in ["now", "tuesday", "monday", "protected", "clone-of-monday"]]
    assert -1 not in places and places == sorted(places), f"not in this order:\n{tree}"
    # Nothing is measured by itself, as the store has to look at each layer for that.
    usage = "[...document.querySelectorAll('#volume .facts div')].find((pair) => pair.innerText.startsWith('Data')).innerText"
    assert browser.run(usage).endswith("–"), browser.run(usage)
    sent = [event["params"]["request"] for event in browser.events if event.get("method") == "Network.requestWillBeSent"]
    commands = [request["postData"] for request in sent if "postData" in request]
    assert commands and all('"usage":false' in command for command in commands), commands
    measure = "[...document.querySelectorAll('#volume button')].find((button) => button.textContent === 'Measure space')"
    browser.run(f"{measure}.click()")
    browser.wait(f"{usage}.endsWith('B') && !!{measure}")
    assert "–" not in browser.run(TREE), browser.run(TREE)
    assert not {"Snapshot", "Clone", "Roll back", "Delete"} & set(browser.run(BUTTONS)), browser.run(BUTTONS)
    named(browser)

    # By keys to the end of the list.
    browser.press("/")
    clear(browser)
    browser.press("ArrowDown", "End", "Enter")
    last = f"v{volumes - 3}"
    browser.wait(f"{TITLE} === {json.dumps(last)}")
    assert browser.run(ROWS) < 100
    active = "document.getElementById(document.querySelector('#volumes .grid').getAttribute('aria-activedescendant'))"
    assert last in browser.run(f"{active}.textContent")

    # A name is a text.
    choose(browser, "<b onclick=x>")
    assert browser.run("document.querySelectorAll('#volumes b, #volume h2 b').length") == 0

    # From tab to tab, and over the map.
    browser.run("document.querySelector('#tab-volumes').focus()")
    browser.press("ArrowRight")
    browser.wait("!document.querySelector('#panel-space').hidden && document.activeElement.id === 'tab-space'")
    label = "document.querySelector('#space canvas').getAttribute('aria-label')"
    browser.wait(f"({label} ?? '').startsWith('Map of all ')")
    assert "shared" in browser.run(label) and "free" in browser.run(label), browser.run(label)
    browser.run("document.querySelector('#space canvas').focus()")
    browser.press("Home")
    browser.wait("document.querySelector('#cell').textContent.includes('v0')")
    browser.press("+")
    browser.wait(f"{label}.includes(' from ')")
    browser.press("-")
    browser.wait(f"{label}.startsWith('Map of all ')")
    named(browser)
    browser.run("document.querySelector('#tab-space').focus()")
    browser.press("ArrowRight", "ArrowRight")
    browser.wait("document.querySelector('#findings').textContent.includes('All metadata is well')")

    # Without leave, by the same way that the page goes.
    code = """import('/ask.js').then((server) => server.command('snapshot.create', { volume: 'v0', snapshot: 'no' }))
        .then(() => 'done', (error) => `${error.status} ${error.kind}`)"""
    assert browser.run(code) == "403 refused"
    assert all("403" in str(complaint) for complaint in browser.complaints()), browser.complaints()
    browser.events.clear()


def test_cut_answers(browser: Browser) -> None:
    """An answer that was cut off, and a server that says nothing: the page says so, and asks again."""
    shown = "!document.querySelector('#trouble').hidden && document.querySelector('#trouble').textContent"
    browser.run("window.real = window.fetch, window.fetch = () => Promise.resolve(new Response('{\"cursor\":\"x', { status: 200 })), 0")
    browser.wait(f"({shown} || '').includes('was cut off. What is shown is of ')")
    browser.run("window.fetch = window.real, 0")
    browser.wait("document.querySelector('#trouble').hidden")
    browser.run("window.fetch = () => new Promise(() => {}), 0")
    browser.wait(f"({shown} || '').includes('does not answer') && document.querySelector('#content').classList.contains('old')")
    browser.run("window.fetch = window.real, document.querySelector('#tab-volumes').click()")
    browser.wait("document.querySelector('#trouble').hidden && !document.querySelector('#content').classList.contains('old')")


def test_schemes(browser: Browser, url: str) -> None:
    pages = {}
    for scheme in ["light", "dark"]:
        browser.run("localStorage.clear()")
        browser.send("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        browser.open(url)
        browser.wait(f"{ROWS} > 0")
        assert browser.run("document.documentElement.dataset.theme") == scheme
        pages[scheme] = luminance(browser.run("getComputedStyle(document.body).backgroundColor"))
        contrasts(browser)
    assert pages["light"] > 0.8 and pages["dark"] < 0.05, pages
    browser.run("document.querySelector('#theme').click()")
    assert browser.run("document.documentElement.dataset.theme") == "light"


def test_changing(browser: Browser, url: str) -> None:
    browser.open(url)
    browser.wait(f"{ROWS} > 0")
    choose(browser, "v0")
    assert "admin" in browser.run("document.querySelector('#mode').textContent")
    open_dialog = "document.querySelector('#dialog').open"
    start = "[...document.querySelectorAll('#volume button')].find((button) => button.ariaLabel === %s).focus()"
    browser.run(start % json.dumps("Take a snapshot of v0"))
    browser.press("Enter")
    browser.wait(f"{open_dialog} && document.activeElement.id === 'field-snapshot'")
    named(browser, 4)
    browser.run("document.activeElement.select()")
    browser.write("wednesday")
    browser.press("Enter")
    browser.wait(f"!{open_dialog} && ({TREE}).includes('wednesday')")

    # A name that is taken: the dialog stays and says so, and Escape leaves it.
    browser.run(start % json.dumps("Take a snapshot of v0"))
    browser.press("Enter")
    browser.wait(open_dialog)
    browser.run("document.activeElement.select()")
    browser.write("wednesday")
    browser.press("Enter")
    browser.wait("document.querySelector('#dialog .trouble:not([hidden])')?.textContent.includes('wednesday')")
    browser.press("Escape")
    browser.wait(f"!{open_dialog}")
    assert all("409" in str(complaint) for complaint in browser.complaints()), browser.complaints()

    # Nothing is deleted before its name was written.
    browser.run(start % json.dumps("Delete snapshot v0@wednesday"))
    browser.press("Enter")
    browser.wait(open_dialog)
    yes = "document.querySelector('#dialog button[type=submit]')"
    # What is lost is asked for anew.
    browser.wait("document.querySelector('#dialog .lost').textContent.includes('that nothing else shows are lost')")
    assert "store" in browser.run("document.querySelector('#dialog .where').textContent")
    assert browser.run(f"{yes}.disabled")
    browser.run("document.querySelector('#field-word').focus()")
    browser.write("wednesda")
    browser.press("Enter")
    assert browser.run(f"{yes}.disabled && {open_dialog}")
    browser.write("y")
    browser.press("Enter")
    browser.wait(f"!{open_dialog} && !({TREE}).includes('wednesday')")


def pictures(browser: Browser, url: str, directory: Path) -> None:
    browser.size(1440, 720)
    for scheme, view in [("light", "volumes"), ("dark", "space"), ("light", "activity")]:
        browser.open(url)
        browser.run("localStorage.clear()")
        browser.send("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        browser.open(url)
        browser.wait(f"{ROWS} > 0")
        choose(browser, os.environ.get("VOLUME", "v0"))
        clear(browser)
        browser.run(f"document.querySelector('#tab-{view}').click()")
        if view == "space":
            browser.wait("document.querySelector('#cell').textContent.includes('extent')")
            browser.run("document.querySelector('#space canvas').focus()")
            browser.press("ArrowRight", "ArrowRight", "ArrowDown", "ArrowDown")
            time.sleep(2)
        else:
            # The graphs fill.
            time.sleep(float(os.environ.get("SECONDS_OF_GRAPHS", "150")))
        browser.run("document.activeElement.blur()")
        browser.picture(directory / f"web-{view}-{scheme}.png")


def main() -> None:
    what, program, url, volumes = sys.argv[1:5]
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        browser = Browser(program, profile)
        try:
            if what == "pictures":
                pictures(browser, url, Path(sys.argv[5]))
            elif what == "look":
                test_looking(browser, url, int(volumes))
                test_schemes(browser, url)
                test_cut_answers(browser)
                assert not browser.complaints(), browser.complaints()
            else:
                test_changing(browser, url)
            foreign = [asked for asked in browser.asked() if not asked.startswith((url.partition("#")[0], "about:blank"))]
            assert not foreign, foreign
        finally:
            browser.close()
    print("the page works in a browser")


if __name__ == "__main__":
    main()
