"""The words of a command line, made again from the options that were read of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from actcalc.cli.options import flag_of


def given_words(models: Sequence[str], *bundles: Any) -> list[str]:
    """``models`` and the flags of each bundle of options that was given."""
    found = list(models)
    for bundle in bundles:
        for field in fields(bundle):
            value, flag = getattr(bundle, field.name), flag_of(field.name)
            if value is None:
                continue
            if isinstance(value, bool):
                found.append(flag if value else flag.replace("--", "--no-", 1))
            else:
                for one in value if isinstance(value, list) else [value]:
                    found += [flag, str(one)]
    return found
