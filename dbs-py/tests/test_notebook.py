"""What notebooks show."""

import re
from html.parser import HTMLParser

import dbs

MIB = 1 << 20


class Whole(HTMLParser):
    """A text in which every tag is closed, in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.open.append(tag)
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def bars(text: str) -> list[tuple[float, str]]:
    """The bars of the picture: width, and what each says."""
    found = re.findall(r'<rect [^>]*width="([0-9.]+)"[^>]*><title>([^<]*)</title>', text)
    return [(float(width), said) for width, said in found]


def test_where_the_space_of_a_volume_went(store: dbs.Store) -> None:
    volume = store.create_volume("v", 64 * MIB)
    volume.pwrite(b"x" * (24 * MIB), 0)
    snapshot = volume.snapshot("first", {"by": "<hand>"})
    snapshot.clone("copy")
    volume.pwrite(b"y" * (16 * MIB), 32 * MIB)
    # As wide as 64 MiB are 480.
    text = volume._repr_html_()
    assert bars(text) == [(120.0, "exclusive: 16.0 MiB"), (180.0, "shared with others: 24.0 MiB")]
    assert "not written: 24.0 MiB" in text and "by=&lt;hand&gt;" in text
    assert "table" in Whole(text).tags
    text = snapshot._repr_html_()
    assert bars(text) == [(180.0, "shared with others: 24.0 MiB")]
    assert "would free 0 B" in text and Whole(text).tags.count("svg") == 1


def test_a_store_and_its_volumes(store: dbs.Store) -> None:
    for number in range(25):
        store.create_volume(f"<i>{number:02}", MIB)
    store["<i>00"].pwrite(b"x" * (MIB // 2), 0)
    text = store._repr_html_()
    assert "<i>" not in text and "&lt;i&gt;19" in text and "&lt;i&gt;20" not in text
    assert "and 5 more" in text and f"served <b>{'yes' if store.served else 'no'}</b>" in text
    assert [said for _, said in bars(text)] == ["in use: 1.0 MiB"]
    assert Whole(text).tags.count("tr") == 21


def test_showing_never_fails(store: dbs.Store) -> None:
    volume = store.create_volume("v", MIB)
    snapshot = volume.snapshot("s")
    snapshot.delete()
    assert "no snapshot" in snapshot._repr_html_()
    store.close()
    for shown in (store, volume, snapshot):
        assert "closed" in shown._repr_html_()
