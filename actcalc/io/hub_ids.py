"""Models by their name on the Hugging Face hub: presets, the local cache, or a fetched config.json.

Only ``config.json`` is ever read or fetched; nothing that it names is run.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from actcalc.errors import MissingExtraError, SpecError, install, say, suggestion
from actcalc.io import presets

if TYPE_CHECKING:
    from actcalc.io.hf import Imported

_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")
_VARIANT = re.compile(r"(?i)[-_](instruct|chat|it|base|hf|sft|dpo|\d{4}|bnb-4bit|unsloth)$")
_SAME_WEIGHTS = {"unsloth", "nousresearch", "mlx-community"}
"""Organisations that publish others' models again under the same name."""


def is_id(text: str) -> bool:
    """Whether ``text`` has the form of a hub id: an owner and a name."""
    return _ID.fullmatch(text) is not None and ".." not in text


@cache
def preset_ids() -> Mapping[str, str]:
    """Presets by the hub id, in lower case, that their values are from."""
    found: dict[str, str] = {}
    for name in presets.names("models"):
        source = presets.stated_source("models", name)
        match = re.match(rf"({_ID.pattern}) config\.json", source)
        if match:
            found[match[1].lower()] = name
    return found


def preset_of(text: str) -> tuple[str, str]:
    """The preset that a hub id means, and a note where it is taken for another id's.

    An id's own preset first; else that of the id without ``-Instruct`` and the like, which are
    trained further and keep their sizes. ("", "") where there is none.
    """
    ids = preset_ids()
    word = text.lower()
    if word in ids:
        return ids[word], ""
    owner, _, name = word.partition("/")
    bare = name.removeprefix("meta-")
    for _ in range(3):
        bare = _VARIANT.sub("", bare)
        for known, preset in ids.items():
            there, _, base = known.partition("/")
            same = there == owner or owner in _SAME_WEIGHTS
            if same and bare in (base.removeprefix("meta-"), _VARIANT.sub("", base)):
                return preset, f"{text} is taken to have the sizes of the preset {preset}."
    return "", ""


def cached_config(text: str) -> Path | None:
    """The config.json of a hub id in the local cache; None where it is not there."""
    folder = _cache() / ("models--" + text.replace("/", "--"))
    snapshots = folder / "snapshots"
    try:
        main = folder / "refs" / "main"
        first = [main.read_text(encoding="utf-8").strip()] if main.is_file() else []
        others = sorted(path.name for path in snapshots.iterdir()) if snapshots.is_dir() else []
    except (OSError, UnicodeDecodeError):
        return None
    for revision in (*first, *others):
        path = snapshots / revision / "config.json"
        if re.fullmatch(r"[\w.-]{1,100}", revision) and path.is_file():
            return path
    return None


def _cache() -> Path:
    """Where huggingface_hub keeps its downloads."""
    if named := os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE"):
        return Path(named).expanduser()
    home = os.environ.get("HF_HOME")
    if not home:
        root = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
        home = str(Path(root) / "huggingface")
    return Path(home).expanduser() / "hub"


def fetched_config(text: str) -> Path:
    """config.json of a hub id, fetched with huggingface_hub; says so on standard error.

    Raises ``SpecError`` without the extra, offline, or where the hub has no such file.
    """
    if os.environ.get("HF_HUB_OFFLINE", "").strip().lower() in ("1", "true", "yes", "on"):
        raise SpecError(
            f"{text} is no file, no preset, not in the cache at {_cache()}, and HF_HUB_OFFLINE is "
            "set",
            "give its config.json, or unset HF_HUB_OFFLINE",
        )
    try:
        from huggingface_hub import hf_hub_download
        from huggingface_hub.utils import logging
    except ImportError as error:
        raise MissingExtraError(
            f"{text} is no file, no preset and not in the local cache; fetching its config.json "
            "needs the extra hub",
            f"{install('hub')}, or give its config.json"
            + (f"; {close}" if (close := suggestion(text.split("/")[-1], _models())) else ""),
        ) from error
    logging.get_logger().setLevel(
        "ERROR"
    )  # its retries are warnings; the last failure is told below
    say(f"actcalc: fetching config.json of {text}")
    try:
        return Path(hf_hub_download(text, "config.json", etag_timeout=10))
    except Exception as error:
        raise SpecError(
            f"{text} is no file here, and the hub gives no config.json of it "
            f"({type(error).__name__})",
            "check the id (HF_TOKEN opens gated models), or give its config.json",
        ) from None


def _models() -> tuple[str, ...]:
    return presets.names("models")


def config_of(text: str) -> Imported:
    """What the config.json of a hub id describes, from the cache or the hub."""
    from actcalc.io.hf import read_config_file

    return read_config_file(cached_config(text) or fetched_config(text))
