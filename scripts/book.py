#!/usr/bin/env python3
"""book.py: makes the book of docs/ in target/book/html, with mdBook, and checks each of its links.
book.py commands PROGRAM: prints its chapter of commands, made from `PROGRAM --help`.

MDBOOK          the program; by default target/mdbook/bin/mdbook, which is compiled if it is not there
DBS, LONGHORN   the commands; by default those that `cargo build --release` has made, or else `cargo build`
"""

import html.parser
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote

ROOT = Path(__file__).resolve().parent.parent
MDBOOK = "0.5.4"
CONTENTS = Path("docs/SUMMARY.md")
# A link of Markdown, as far as its target.
LINK = re.compile(r"(\]\()([^)#\s]*)(#[^)\s]*)?\)")
FENCE = re.compile(r"^\s*```")


def fail(message):
    sys.exit(f"book.py: {message}")


def target():
    return (ROOT / os.environ.get("CARGO_TARGET_DIR", "target")).resolve()


def sections(text):
    """The parts of a help text, each with its heading; the first has none."""
    return re.split(r"\n\n(?=[A-Z][A-Za-z ]*:\n)", text.rstrip())


def help_of(program, words):
    """The text of `--help`."""
    called = subprocess.run(
        [program, *words, "--help"], check=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True,
        env={key: value for key, value in os.environ.items() if not key.startswith(("DBS_", "AWS_", "LONGHORN_"))},
    )  # fmt: skip
    return sections("\n".join(line.rstrip() for line in called.stdout.splitlines()))


def subcommands(parts):
    """Names of the commands that a help text lists."""
    for part in parts:
        if part.startswith("Commands:\n"):
            return [name for name in re.findall(r"^  (\S+)(?:  |$)", part, re.MULTILINE) if name != "help"]
    return []


def commands(program):
    """A heading and the help of each command. What holds for all of them is said once."""
    name = Path(program).name
    first = help_of(program, [])
    pages, waiting = [], [([], first)]
    while waiting:
        words, parts = waiting.pop(0)
        if words:
            parts = [part for part in parts if part not in first]
        text = "\n\n".join(parts)
        pages.append(f"## `{' '.join([name, *words])}`\n\n```text\n{text}\n```\n")
        below = [[*words, one] for one in subcommands(parts)]
        waiting = [(one, help_of(program, one)) for one in below] + waiting
    return "\n".join(pages)


def program(variable, name):
    """The command `name`, which is built if it is not there."""
    if variable in os.environ:
        return os.environ[variable]
    released = target() / "release" / name
    if released.exists():
        return str(released)
    package = {"dbs": "dbs-cli", "longhorn": "longhorn"}[name]
    subprocess.run([os.environ.get("CARGO", "cargo"), "build", "--locked", "-p", package], cwd=ROOT, check=True)
    return str(target() / "debug" / name)


def meant(path):
    """A folder means its page, if it has one."""
    page = path / "README.md"
    return page if (ROOT / page).exists() else path


def place(path):
    """Where a file or folder of the sources is in the book."""
    path = path.with_name("index.md") if path.name == "README.md" else path
    return path.relative_to("docs") if path.parts[0] == "docs" else path


def rewritten(page, text, found):
    """The text of a page, with links as they are in the book; files that it leads to go into `found`."""
    here = place(page).parent

    def link(match):
        to = match[2]
        if not to or "://" in to or to.startswith("mailto:"):
            return match[0]
        file = meant(Path(os.path.normpath(page.parent / to)))
        if file == CONTENTS:
            # mdBook's own.
            return f"{match[1]}{os.path.relpath('toc.html', here)})"
        found.add(file)
        return f"{match[1]}{os.path.relpath(place(file), here)}{match[3] or ''})"

    in_code, lines = False, []
    for line in text.splitlines():
        in_code ^= bool(FENCE.match(line))
        lines.append(line if in_code else LINK.sub(link, line))
    return "\n".join(lines) + "\n"


def decisions():
    """What the table of contents ends with: each decision, by its heading."""
    pages = sorted(path for path in (ROOT / "docs/decisions").glob("[0-9]*.md"))
    return "".join(f"  - [{page.read_text().splitlines()[0][2:]}](decisions/{page.name})\n" for page in pages)


def assemble(book):
    """All pages and what they lead to, below `book`."""
    shutil.rmtree(book, ignore_errors=True)
    waiting, done = {CONTENTS}, set()
    while waiting:
        file = waiting.pop()
        done.add(file)
        to = book / "docs" / place(file)
        to.parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / file).is_dir():
            shutil.copytree(ROOT / file, to, dirs_exist_ok=True)
            continue
        if file.suffix != ".md":
            shutil.copyfile(ROOT / file, to)
            continue
        found = set()
        text = (ROOT / file).read_text()
        text = rewritten(file, text + decisions() if file == CONTENTS else text, found)
        for variable, name in ("DBS", "dbs"), ("LONGHORN", "longhorn"):
            mark = f"<!-- commands of {name} -->"
            if mark in text:
                text = text.replace(mark, commands(program(variable, name)))
        to.write_text(text)
        waiting |= found - done
    shutil.copy(ROOT / "book.toml", book)


def mdbook():
    """mdBook, compiled if need be."""
    if "MDBOOK" in os.environ:
        return os.environ["MDBOOK"]
    place = target() / "mdbook"
    made = place / "bin/mdbook"
    if made.exists() and MDBOOK in subprocess.run([made, "--version"], stdout=subprocess.PIPE, text=True).stdout:
        return str(made)
    print(f"compiling mdBook {MDBOOK} into {place}")
    cargo = os.environ.get("CARGO", "cargo")
    arguments = ["--version", MDBOOK, "--locked", "--force", "--no-default-features", "--features", "search"]
    if subprocess.run([cargo, "install", "mdbook", *arguments, "--root", place, "--quiet"]).returncode != 0:
        fail(f"mdBook {MDBOOK} is missing: `cargo install mdbook` could not make it; MDBOOK=... names one that is there")
    return str(made)


class Page(html.parser.HTMLParser):
    """What a page of the book has: names to lead to, and links."""

    def __init__(self, path):
        super().__init__()
        self.names, self.links = set(), []
        self.feed(path.read_text())

    def handle_starttag(self, tag, attributes):
        given = dict(attributes)
        self.names.add(given.get("id"))
        for key in "href", "src":
            to = given.get(key)
            if to and tag in ("a", "img") and not re.match(r"[a-z]+:", to):
                self.links.append(unquote(to))


def check(made):
    """All links of the pages lead somewhere."""
    pages = {path: Page(path) for path in made.rglob("*.html") if path.name not in ("404.html", "toc.html")}
    wrong = []
    for path, page in pages.items():
        for link in page.links:
            file, _, name = link.partition("#")
            to = Path(os.path.normpath(path.parent / file)) if file else path
            if not to.exists() or (name and to in pages and name not in pages[to].names):
                wrong.append(f"{path.relative_to(made)}: {link}")
    if wrong:
        fail("these links of the book lead nowhere:\n" + "\n".join(sorted(set(wrong))))
    return len(pages)


def main():
    match sys.argv[1:]:
        case []:
            book = target() / "book"
            build = mdbook()
            assemble(book)
            subprocess.run([build, "build", book], check=True)
            print(f"{check(book / 'html')} pages in {book / 'html'}: open index.html")
        case ["commands", name]:
            print(commands(name), end="")
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    main()
