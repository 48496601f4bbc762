#!/usr/bin/env python3
"""circles.py [CRATE...]: modules of a crate that import each other in a circle, of every crate or of the named folders.

An import is a `use`, or a path in the code. What a module takes from one that it is inside of does not count: a parent and
its children are one part, and a child adds methods to its parent's types. Tests inside a file are left out. Exit code 1 if there is a circle.
"""

import doctest
import re
import subprocess
import sys
from pathlib import Path


def leaves(tree: str) -> list[str]:
    """The paths of a `use`, one by one."""
    head, brace, rest = tree.partition("{")
    if not brace:
        return [re.sub(r"\s+as\s+\w+", "", tree).strip()]
    parts, depth, part = [], 0, ""
    for sign in rest[: rest.rindex("}")]:
        depth += {"{": 1, "}": -1}.get(sign, 0)
        if sign == "," and depth == 0:
            parts.append(part)
            part = ""
        else:
            part += sign
    return [head.strip() + leaf for part in [*parts, part] if part.strip() for leaf in leaves(part)]


class Crate:
    """The modules of a crate, and what each imports."""

    # What is no code. Whichever begins first decides what a quote or a slash in it means.
    NO_CODE = re.compile(
        r"""\b[bc]?r(#*)".*?"\1"""  # raw strings
        r"""|"(?:\\.|[^"\\])*\""""  # strings
        r"""|'(?:\\.[^']*|[^'\\])'"""  # characters, but not lifetimes
        r"""|//[^\n]*|/\*.*?\*/""",  # comments
        re.DOTALL,
    )
    USE = re.compile(r"(pub(?:\([^)]*\))?\s+)?\buse\s+([^;]+);")
    INLINE = re.compile(r"(?<![\w:])((?:crate|super|self)(?:::\w+)+|[a-z_]\w*::\w+)")

    def __init__(self, folder: Path) -> None:
        source = folder / "src"
        self.code = {}
        for file in source.rglob("*.rs"):
            path = file.relative_to(source).with_suffix("").parts
            path = path[:-1] if path[-1] in ("mod", "lib", "main") else path
            if path[:1] != ("bin",) and path[-1:] != ("tests",):
                self.code[path] = self.plain(file.read_text())
        self.shown: dict[tuple, tuple] = {}
        found = {module: list(self.imports(module, text)) for module, text in self.code.items()}
        self.edges = {}
        for module, targets in found.items():
            whole = {self.followed(*target) for target in targets}
            self.edges[module] = {to for to in whole if to != module[: len(to)]}

    @staticmethod
    def plain(text: str) -> str:
        r"""The code alone, without what strings and comments hold, and without tests.

        >>> Crate.plain('open("http://a"); crate::b(); // crate::c("')
        'open(""); crate::b();  '
        >>> Crate.plain("f('\"'); g(r#\"h\"i\"#, '\\''); fn j<'a>(k: &'a str) { /* \" */ }")
        'f(""); g("", ""); fn j<\'a>(k: &\'a str) {   }'
        """
        text = Crate.NO_CODE.sub(lambda found: " " if found[0].startswith("/") else '""', text)
        return text.partition("#[cfg(test)]\nmod tests {")[0]

    def imports(self, module: tuple, text: str):
        for exported, tree in self.USE.findall(text):
            for path in leaves(tree):
                if target := self.resolved(module, path):
                    yield target
                    if exported and target[0] != module:
                        self.shown[module, path.split("::")[-1].strip()] = target
        for path in self.INLINE.findall(self.USE.sub("", text)):
            if target := self.resolved(module, path):
                yield target

    def resolved(self, module: tuple, path: str) -> tuple | None:
        """The module that a path leads to, and the name in it."""
        names = [name.strip() for name in path.split("::")]
        if names[0] == "crate":
            at, names = (), names[1:]
        elif names[0] in ("self", "super"):
            at, names = module, names[1:] if names[0] == "self" else names
            while names[:1] == ["super"]:
                at, names = at[:-1], names[1:]
        elif (*module, names[0]) in self.code:
            at = module
        else:
            return None
        while names and (*at, names[0]) in self.code:
            at, names = (*at, names[0]), names[1:]
        return at, names[0] if names else None

    def followed(self, module: tuple, name: str | None) -> tuple:
        """Where a name is from that a module only shows."""
        seen = set()
        while (module, name) in self.shown and (module, name) not in seen:
            seen.add((module, name))
            module, name = self.shown[module, name]
        return module

    def circles(self) -> list[list[tuple]]:
        """Each with all of its modules."""
        def reached(start: tuple) -> set:
            seen, open_ = set(), [start]
            while open_:
                for to in self.edges.get(open_.pop(), ()):
                    if to not in seen:
                        seen.add(to)
                        open_.append(to)
            return seen

        far = {module: reached(module) for module in self.code}
        circles = {frozenset(to for to in far[m] if m in far.get(to, ())) for m in far if m in far[m]}
        return sorted(sorted(circle) for circle in circles)


def main() -> int:
    if doctest.testmod().failed:
        return 1
    root = Path(__file__).resolve().parent.parent
    named = sys.argv[1:]
    listed = subprocess.run(
        ["git", "ls-files", "*/src/lib.rs", "*/src/main.rs"], cwd=root, capture_output=True, text=True, check=True
    )
    folders = named or sorted({str(Path(file).parent.parent) for file in listed.stdout.split()})
    failed = False
    for folder in folders:
        crate = Crate(root / folder)
        for circle in crate.circles():
            failed = True
            print(f"{folder}: a circle of {len(circle)} modules")
            for module in circle:
                for to in sorted(crate.edges[module] & set(circle)):
                    print(f"    {'::'.join(module)} imports {'::'.join(to)}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
