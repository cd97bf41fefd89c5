"""JSON schemas of KubeRay's custom resources, small enough to be kept.

A CRD of KubeRay is a megabyte, nearly all of it Kubernetes' pod template, told several times with its documentation.
What is kept says the same without words: parts that occur more than once are told once. Unknown fields are refused, as
the API server does with strict field validation.

    python -m tests.kuberay_schema ray.io_rayservices.yaml tests/unit/serving/kuberay/rayservice.json
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import yaml

VERSION = "v1"
_DROPPED = ("description", "format", "default", "nullable")
_SHARED_FROM = 120  # characters


def strict(schema: Any) -> Any:
    """An OpenAPI schema of a CRD as JSON schema that refuses unknown fields."""
    if not isinstance(schema, dict):
        return schema
    out: dict[str, Any] = {}
    for key, value in schema.items():
        if key == "properties":
            out[key] = {name: strict(part) for name, part in value.items()}
        elif key in ("items", "additionalProperties"):
            out[key] = strict(value)
        elif key not in _DROPPED and not key.startswith("x-kubernetes"):
            out[key] = value
    if schema.get("x-kubernetes-int-or-string"):
        out.pop("anyOf", None)
        out["type"] = ["integer", "string"]
    if schema.get("nullable") and isinstance(out.get("type"), str):
        out["type"] = [out["type"], "null"]
    is_open = "additionalProperties" in out or schema.get("x-kubernetes-preserve-unknown-fields")
    if "properties" in out and not is_open:
        out["additionalProperties"] = False
    return out


def shared(schema: dict[str, Any]) -> dict[str, Any]:
    """The same schema with parts that occur more than once under `$defs`."""
    counts = Counter[str]()

    def count(part: Any) -> None:
        if isinstance(part, dict):
            if len(text := json.dumps(part, sort_keys=True)) >= _SHARED_FROM:
                counts[text] += 1
                if counts[text] > 1:
                    return
            for value in part.values():
                count(value)

    count(schema)
    names = {text: f"d{number}" for number, text in enumerate(text for text, n in counts.items() if n > 1)}

    def refer(part: Any, top: bool = False) -> Any:
        if not isinstance(part, dict):
            return part
        name = None if top else names.get(json.dumps(part, sort_keys=True))
        if name is not None:
            return {"$ref": f"#/$defs/{name}"}
        return {key: refer(value) for key, value in part.items()}

    definitions = {name: refer(json.loads(text), top=True) for text, name in names.items()}
    return {**refer(schema, top=True), "$defs": definitions}


def main(crd: Path, out: Path) -> None:
    """Write the schema of a CRD's version v1."""
    found = yaml.load(crd.read_text(), Loader=yaml.CSafeLoader)
    version = next(one for one in found["spec"]["versions"] if one["name"] == VERSION)
    schema = strict(version["schema"]["openAPIV3Schema"])
    schema["properties"]["metadata"] = {"type": "object"}
    out.write_text(json.dumps(shared(schema), separators=(",", ":"), sort_keys=True) + "\n")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:3]))
