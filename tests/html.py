"""HTML pages that the library writes: parsed, and checked to be whole and self-contained."""

import re
from html.parser import HTMLParser

VOID = {"meta", "br", "img", "link", "hr", "input"}


class Page(HTMLParser):
    """Checks that tags nest, and collects what a test asks about."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.ids, self.loads = [], [], [], []
        self.text = []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.handle_startendtag(tag, attrs)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        for name, value in attrs:
            if name == "id":
                self.ids.append(value)
            if name in ("src", "href", "srcset", "action", "data"):
                self.loads.append(value)
            assert not name.startswith("on"), f"an event handler on {tag}"

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def without_images(text):
    return re.sub(r"base64,[A-Za-z0-9+/=\s]*", "", text)


def require_self_contained(text, page):
    """No script, no request, no identifier twice."""
    assert "http://" not in text
    assert "https://" not in text
    assert "//" not in without_images(text)
    assert "script" not in page.tags
    assert "link" not in page.tags
    assert all(load.startswith(("#", "data:image/png;base64,")) for load in page.loads)
    assert "@import" not in text
    assert not re.findall(r"url\((?!#)", text)
    assert len(page.ids) == len(set(page.ids))
