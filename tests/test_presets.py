"""Presets: valid, sourced, and never named like a command."""

from __future__ import annotations

import pytest

from actcalc.cli.app import command_names
from actcalc.io import presets
from actcalc.io.runs import load_framework
from actcalc.io.sources import source
from actcalc.specs import Model, Workload
from actcalc.specs.validate import build

pytestmark = pytest.mark.each

MODELS = presets.names("models")


@pytest.mark.parametrize("name", MODELS)
def test_model_is_valid_and_sourced(name):
    preset = presets.load("models", name)
    origin = source(name)
    build(Model, origin.model, name)
    build(Workload, origin.workload, name)
    assert preset.title
    missing = [key for key, text in preset.sources.items() if not text.strip()]
    assert not missing


@pytest.mark.parametrize("name", presets.names("frameworks"))
def test_framework_is_sourced(name):
    load_framework(name)
    preset = presets.load("frameworks", name)
    assert [key for key, text in preset.sources.items() if not text.strip()] == []


def test_no_preset_is_named_like_a_command():
    for kind in presets.KINDS:
        assert not set(presets.names(kind)) & set(command_names())


def test_no_name_means_two_things():
    assert not set(presets.names("models")) & set(presets.names("runs"))
