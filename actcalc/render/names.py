"""What several results side by side are called, so that each can be told from the others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from actcalc.answers.header import RunAnswer

_SECTIONS = ("framework", "device", "layout", "workload", "training", "model")


def distinct_names(results: Sequence[RunAnswer]) -> list[str]:
    """A name for each result: its title, with what differs from others of the same title."""
    names = [result.title for result in results]
    for title in {name for name in names if names.count(name) > 1}:
        alike = [index for index, name in enumerate(names) if name == title]
        facts = [_facts(results[index]) for index in alike]
        known = list(dict.fromkeys(key for each in facts for key in each))
        differing = [key for key in known if len({each.get(key) for each in facts}) > 1]
        for index, each in zip(alike, facts, strict=True):
            words = [_word(key, each[key]) for key in differing if each.get(key) is not None]
            names[index] = " ".join([title, *words])
    for name in {name for name in names if names.count(name) > 1}:
        alike = [index for index, one in enumerate(names) if one == name]
        for number, index in enumerate(alike, 1):
            names[index] = f"{name} ({number})"
    return names


def _facts(result: RunAnswer) -> dict[str, str | None]:
    """Every field of a result's inputs, as text under its own name."""
    found: dict[str, str | None] = {}
    for section in _SECTIONS:
        value = getattr(result, section, None)
        if isinstance(value, Mapping):
            fields = {"device": value.get("name")} if section == "device" else value
            found |= {key: _text(each) for key, each in fields.items() if key != "name"}
        else:
            found[section] = _text(value)
    policy = _text(getattr(result, "policy", None))
    return found | ({} if policy is None else {"policy": policy})


def _text(value: Any) -> str | None:
    return None if value is None or value == () else str(value)


def _word(key: str, text: str | None) -> str:
    word = key.replace("_", "-")
    if text in ("True", "False"):
        return word if text == "True" else f"no {word}"
    return str(text) if key in ("framework", "device", "policy") else f"{word} {text}"
