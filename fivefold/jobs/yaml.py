"""Writes YAML as people do: in the given order, and lines of text as lines."""

from collections.abc import Mapping
from typing import Any


def written(content: Mapping[str, Any]) -> str:
    """The YAML of nested dicts and lists."""
    import yaml

    class Dumper(yaml.SafeDumper):
        pass

    def text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
        style = "|" if "\n" in value else None
        return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)

    Dumper.add_representer(str, text)
    found: str = yaml.dump(dict(content), Dumper=Dumper, sort_keys=False, width=1000)
    return found
