"""The part of JSON Schema that result.schema.json uses. Every complaint names its place."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

TYPES: dict[str, tuple[type, ...]] = {"object": (dict,), "array": (list,), "string": (str,), "integer": (int,),
                                      "number": (int, float), "boolean": (bool,), "null": (type(None),)}
KNOWN = {"type", "properties", "required", "additionalProperties", "items", "enum", "const", "pattern", "oneOf", "$ref",
         "minItems", "maxItems", "description", "title", "$schema", "$id", "$defs"}


def complaints(value: Any, schema: dict[str, Any], root: dict[str, Any], at: str = "$") -> Iterator[str]:
    assert set(schema) <= KNOWN, set(schema) - KNOWN
    if "$ref" in schema:
        name = schema["$ref"].removeprefix("#/$defs/")
        yield from complaints(value, root["$defs"][name], root, at)
        return
    if "oneOf" in schema:
        tries = [list(complaints(value, one, root, at)) for one in schema["oneOf"]]
        if sum(not one for one in tries) != 1:
            yield from min(tries, key=len) or [f"{at}: matches several"]
        return
    if "const" in schema and value != schema["const"]:
        yield f"{at}: {value!r} is not {schema['const']!r}"
    if "enum" in schema and value not in schema["enum"]:
        yield f"{at}: {value!r} is none of {schema['enum']}"
    if "type" in schema:
        names = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
        fits = any(isinstance(value, TYPES[name]) and (not isinstance(value, bool) or name == "boolean")
                   for name in names)
        if not fits:
            yield f"{at}: {type(value).__name__} is not {names}"
            return
    if isinstance(value, str) and "pattern" in schema and not re.search(schema["pattern"], value):
        yield f"{at}: {value!r} does not match {schema['pattern']}"
    if isinstance(value, list):
        if not schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", len(value)):
            yield f"{at}: {len(value)} items"
        for index, one in enumerate(value):
            yield from complaints(one, schema.get("items", {}), root, f"{at}[{index}]")
    if isinstance(value, dict):
        known = schema.get("properties", {})
        for name in schema.get("required", ()):
            if name not in value:
                yield f"{at}.{name}: missing"
        extra = schema.get("additionalProperties", True)
        for name, one in value.items():
            if name in known:
                yield from complaints(one, known[name], root, f"{at}.{name}")
            elif extra is False:
                yield f"{at}.{name}: not in the schema"
            elif isinstance(extra, dict):
                yield from complaints(one, extra, root, f"{at}.{name}")
