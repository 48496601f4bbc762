#!/usr/bin/env python3
"""volume.py PROGRAM URL [FILE]: the web page of a controller's volume in a real browser, step by step.

PROGRAM is chromium-headless-shell, URL is that of a page with its token, which may change something. After each step it
says its name, and waits for a line: whoever started it changes the volume meanwhile
(`engine-adapter/longhorn/tests/process/page.rs`). With FILE it tests nothing: it waits until a rebuild is shown, and writes a
picture for the documents.
"""

import json
import sys
import tempfile
from pathlib import Path

from browser import Browser, contrasts, luminance, named

REPLICAS = "document.querySelector('#replicas table')?.innerText ?? ''"
HEALTH = "document.querySelector('#health').textContent"
TREE = "document.querySelector('#snapshots table')?.innerText ?? ''"
OPEN = "document.querySelector('#dialog').open"


def button(label: str) -> str:
    return f"[...document.querySelectorAll('main button')].find((button) => button.ariaLabel === {json.dumps(label)})"


def tab(browser: Browser, *names: str) -> None:
    """From the first tab to each of these, by keys."""
    browser.run("document.querySelector('#tab-replicas').click(), document.querySelector('#tab-replicas').focus()")
    for name in names:
        browser.press("ArrowRight")
        browser.wait(f"!document.querySelector('#panel-{name}').hidden && document.activeElement.id === 'tab-{name}'")


def step(name: str) -> None:
    print(name, flush=True)
    if not sys.stdin.readline():
        raise SystemExit("whoever started this is gone")


def healthy(browser: Browser, url: str) -> None:
    pages = {}
    for scheme in ["dark", "light"]:
        browser.open(url)
        browser.run("localStorage.clear()")
        browser.send("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        browser.open(url)
        browser.wait(f"({REPLICAS}).split('RW').length === 3")
        pages[scheme] = luminance(browser.run("getComputedStyle(document.body).backgroundColor"))
        contrasts(browser)
    assert pages["light"] > 0.8 and pages["dark"] < 0.05, pages
    assert browser.run("location.href").endswith("/"), "the token stays in the address"
    assert "All are complete" in browser.run(HEALTH)
    assert "vol" in browser.run("document.title"), browser.run("document.title")
    volume = browser.run("document.querySelector('#volume').innerText")
    assert "socket" in volume and "up" in volume, volume
    named(browser, 6)
    tab(browser, "snapshots")
    tree = browser.run(TREE)
    assert -1 < tree.find("now") < tree.find("one"), tree
    tab(browser, "snapshots", "activity")
    values = "[...document.querySelectorAll('#graphs b')].map((value) => value.textContent)"
    assert len(browser.run(values)) == 9, browser.run(values)
    browser.run(f"{button('Show the last 15 min')}.focus()")
    browser.press("Enter")
    assert browser.run(f"{button('Show the last 15 min')}.ariaPressed === 'true' && {button('Show the last 3 min')}.ariaPressed === 'false'")
    # Something is drawn.
    drawn = "[...document.querySelectorAll('#graphs canvas')].every((canvas) => canvas.width > 300 && canvas.height > 50)"
    assert browser.run(drawn)
    named(browser, 7)


def killed(browser: Browser) -> None:
    tab(browser)
    browser.wait(f"({REPLICAS}).includes('ERR') && {HEALTH}.includes('is ERR')")
    tab(browser, "snapshots", "activity", "events")
    browser.wait("document.querySelector('#events').innerText.includes('replica-faulted')")


def rebuilding(browser: Browser) -> None:
    tab(browser)
    browser.wait(f"({REPLICAS}).includes('WO') && {HEALTH}.includes('is being rebuilt')")
    browser.wait("!!document.querySelector('#replicas progress[aria-label=Rebuild]')")
    browser.wait(f"({REPLICAS}).includes(' %') && ({REPLICAS}).includes('from tcp://')")
    named(browser, 7)
    # How fast it is, and the time left, as they are told once something has come.
    stub = """window.real = window.fetch, window.fetch = async (...asked) => {
        const answer = await window.real(...asked);
        if (!asked[0].startsWith('/api/live')) return answer;
        const update = await answer.json();
        for (const { rebuild } of update.replicas) if (rebuild) Object.assign(rebuild, { progress: 42, bytes_per_second: 3145728, left_seconds: 75 });
        return new Response(JSON.stringify(update), { status: 200 });
    }, 0"""
    browser.run(stub)
    browser.wait(f"({REPLICAS}).includes('42 %, 3.00 MiB/s, 1 min 15 s left')")
    browser.run("window.fetch = window.real, 0")


def rebuilt(browser: Browser) -> None:
    browser.wait(f"{HEALTH}.includes('All are complete') && ({REPLICAS}).split('RW').length === 3")


def choose(browser: Browser, label: str, word: str) -> None:
    """Confirms what a button asks, by keys: not before its word was written."""
    browser.wait(f"!!{button(label)} && !{button(label)}.disabled")
    browser.run(f"{button(label)}.focus()")
    browser.press("Enter")
    browser.wait(OPEN)
    yes = "document.querySelector('#dialog button[type=submit]')"
    if word:
        assert "volume vol" in browser.run("document.querySelector('#dialog .where').textContent")
        assert browser.run(f"{yes}.disabled")
        browser.run("document.querySelector('#field-word').focus()")
        browser.write(word)
        assert not browser.run(f"{yes}.disabled")
        browser.press("Enter")
    else:
        browser.run(f"{yes}.focus()")
        browser.press("Enter")
    browser.wait(f"!{OPEN}")


def purged(browser: Browser) -> None:
    tab(browser, "snapshots")
    browser.run(f"{button('Take a snapshot of vol')}.focus()")
    browser.press("Enter")
    browser.wait(f"{OPEN} && document.activeElement.id === 'field-snapshot'")
    browser.run("document.activeElement.select()")
    browser.write("two")
    browser.press("Enter")
    browser.wait(f"!{OPEN} && ({TREE}).includes('two')")
    # While the frontend is up, and the page says why.
    assert browser.run(f"{button('Revert to two')}.disabled")
    assert "longhorn frontend shutdown" in browser.run("document.querySelector('#snapshots').innerText")
    choose(browser, "Remove snapshot one", "one")
    browser.wait(f"{button('Remove snapshot one')}.disabled && ({TREE}).includes('removed')")
    choose(browser, "Purge vol", "")
    browser.wait(f"!/one/.test({TREE})")


def reverted(browser: Browser) -> None:
    choose(browser, "Revert to two", "two")
    tab(browser, "snapshots", "activity", "events")
    browser.wait("document.querySelector('#events').innerText.includes('reverted')")


def picture(browser: Browser, url: str, file: Path) -> None:
    browser.size(1440, 420)
    browser.send("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "light"}])
    browser.open(url)
    browser.wait(f"({REPLICAS}).includes(' left')")
    browser.run("document.activeElement.blur()")
    browser.picture(file)


def main() -> None:
    program, url = sys.argv[1:3]
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        browser = Browser(program, profile)
        try:
            if len(sys.argv) > 3:
                picture(browser, url, Path(sys.argv[3]))
                return
            healthy(browser, url)
            step("healthy")
            for act in [killed, rebuilding, rebuilt, purged, reverted]:
                act(browser)
                assert not browser.complaints(), browser.complaints()
                foreign = [asked for asked in browser.asked() if not asked.startswith((url.partition("#")[0], "about:blank"))]
                assert not foreign, foreign
                step(act.__name__)
        finally:
            browser.close()


if __name__ == "__main__":
    main()
