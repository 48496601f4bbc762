#!/usr/bin/env python3
"""licences.py PACKAGE TARGET: what the program of PACKAGE is made of, crate by crate, and the licences under which others
may have their parts of it, for packages with binaries. Crates that may be had under Apache-2.0, whose text every package
has, need no more than their name and their notices."""

import json
import pathlib
import re
import subprocess
import sys

package, target = sys.argv[1:]
metadata = json.loads(subprocess.run(
    ["cargo", "metadata", "--locked", "--format-version", "1", "--filter-platform", target],
    check=True, stdout=subprocess.PIPE,
).stdout)
crates = {crate["id"]: crate for crate in metadata["packages"]}
nodes = {node["id"]: node for node in metadata["resolve"]["nodes"]}
# What is linked: neither what builds, nor what tests.
todo = [crate["id"] for crate in metadata["packages"] if crate["name"] == package and not crate["source"]]
assert len(todo) == 1, f"no package {package}"
linked = set()
while todo:
    node = todo.pop()
    if node not in linked:
        linked.add(node)
        for dependency in nodes[node]["deps"]:
            if any(kind["kind"] is None for kind in dependency["dep_kinds"]):
                todo.append(dependency["pkg"])


def texts_of(crate, patterns):
    """Files of a crate that have one of these names."""
    folder = pathlib.Path(crate["manifest_path"]).parent
    return sorted({file for pattern in patterns for file in folder.glob(pattern) if file.is_file()})


others = sorted((crates[node] for node in linked if crates[node]["source"]), key=lambda c: (c["name"], c["version"]))
print(f"{package} contains these crates, which crates.io has the sources of:\n")
texts = {}
for crate in others:
    name = f"{crate['name']} {crate['version']}"
    terms = (crate["license"] or "see below").replace("/", " OR ")
    print(f"{name}: {terms}")
    # `A AND B` needs both.
    apache = "Apache-2.0" in re.split(r" OR |[()]", terms)
    wanted = ["NOTICE*"] if apache else ["NOTICE*", "LICEN[CS]E*", "COPYING*", "UNLICENSE*"]
    found = texts_of(crate, wanted)
    # Some crates leave the text to another one of their repository.
    siblings = (other for other in others if all(other[key] == crate[key] for key in ("repository", "version", "license")))
    while not apache and not found and (other := next(siblings, None)):
        found = texts_of(other, wanted)
    assert apache or found, f"{name} ({terms}) comes without the text of its licence"
    for file in found:
        texts.setdefault(file.read_text(encoding="utf-8").strip(), []).append(name)
for text, names in texts.items():
    print(f"\n{'=' * 80}\n{', '.join(names)}:\n\n{text}")
