"""Wheel hook: presets compiled to JSON beside their YAML, so that reading one loads no YAML parser.

The YAML stays the only definition; the JSON is made from it at build time and lies in
``actcalc/_presets/compiled``. Editable installs have none and read the YAML.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import yaml
from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class PresetHook(BuildHookInterface[Any]):
    """Compiles every preset of the source tree into the wheel."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Write the JSON files to a temporary folder and add it to the wheel."""
        self._folder = Path(tempfile.mkdtemp(prefix="actcalc-presets-"))
        if version == "editable":
            return
        root = Path(self.root) / "presets"
        for path in sorted(root.glob("*/*.yaml")):
            target = self._folder / path.parent.name / f"{path.stem}.json"
            target.parent.mkdir(parents=True, exist_ok=True)
            data = yaml.safe_load(path.read_text(encoding="utf-8"))
            target.write_text(json.dumps(data, ensure_ascii=False), encoding="utf-8")
        build_data["force_include"][str(self._folder)] = "actcalc/_presets/compiled"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove the temporary folder."""
        shutil.rmtree(self._folder, ignore_errors=True)
